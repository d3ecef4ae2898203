import { decide } from '../core/decide.ts'
import { digestsAfter } from '../core/fingerprint.ts'
import { type Millis, type Outcome, withoutBody } from '../core/record.ts'
import { outcomeDraft, outcomeSpans } from '../core/settle.ts'
import { isExisting } from '../protect/contest.ts'
import type { WalkPorts } from '../protect/ports.ts'
import type { Execution } from '../protect/request.ts'
import type { StoreTrouble } from '../store/records.ts'

/** Pauses between reads of a record that another replica is about to finish: the first, and the longest. */
const LOOK_FIRST: Millis = 100
const MAX_LOOK: Millis = 1000
/** Retries with growing pauses while the store does not answer: half a minute in all. */
const TRIES = 12
const MAX_RETRY: Millis = 5000

type MergePorts = Pick<WalkPorts, 'records' | 'settler' | 'waiters' | 'pause'>
/** An outcome that prevents a later execution. */
export type ObservedOutcome = Extract<Outcome, { kind: 'completed' | 'unknown' }>
/** An execution that ran beside the record's owner. */
export type Beside = Pick<Execution, 'id' | 'route' | 'operation' | 'attempt'>

/**
 * In shadow mode, merges the outcome of an execution beside the record's owner into the record, after the owner's own outcome. The stronger
 * fact wins: executed over not executed, completed over "unknown". So no retry executes just because the owner did nothing.
 *
 * False: given up, because the store did not answer or `stopped` returned true.
 */
export async function mergeOutcome(
  ports: MergePorts,
  beside: Beside,
  observed: ObservedOutcome,
  stopped: () => boolean,
): Promise<boolean> {
  let outcome = observed
  let failures = 0
  while (!stopped()) {
    // The owner's outcome is about to reach the store.
    if (ports.settler.held(beside.id)?.state === 'completed') return true
    const result = await write(ports, beside, outcome)
    if (result === null || result.kind === 'corrupt') return true
    if (result.kind === 'later') {
      failures = 0
      await ports.pause(result.wait)
      continue
    }
    if (++failures === TRIES) return false
    // Completed stays completed: if the body does not fit, it is recorded without one.
    if (result.full && outcome.kind === 'completed' && outcome.result.kept)
      outcome = { kind: 'completed', result: withoutBody(outcome.result.response, 'no_room') }
    await ports.pause(Math.min(LOOK_FIRST * 2 ** failures, MAX_RETRY))
  }
  return false
}

/** Null: written, or nothing to write. `later`: try again after `wait`. */
async function write(
  { records, waiters }: MergePorts,
  { id, route, operation, attempt }: Beside,
  outcome: ObservedOutcome,
): Promise<StoreTrouble | { readonly kind: 'later'; readonly wait: Millis } | null> {
  const spans = outcomeSpans(outcome, route)
  const draft = outcomeDraft(operation, attempt, outcome, 0)
  const reply = await records.settle(id, draft, spans)
  if (reply.kind === 'written' || reply.kind === 'recovered') return null
  if (reply.kind !== 'refused') return reply
  const { record, now } = reply
  const decision = decide(record, digestsAfter(operation, record), route, now)
  if (decision.kind === 'in_progress')
    return { kind: 'later', wait: Math.min(MAX_LOOK, Math.max(LOOK_FIRST, decision.leaseLeft)) }
  if (isExisting(decision) && decision.kind !== 'unknown') return null
  // A second uncertain execution adds nothing to an uncertain record.
  if (outcome.kind === 'unknown' && record.state !== 'failed_retryable') return null
  const taken = await records.takeOver(id, record, { ...draft, attempts: record.attempts + 1 }, spans)
  if (taken.kind === 'lost') return { kind: 'later', wait: 0 }
  if (taken.kind !== 'claimed') return taken
  waiters.tell(id, null)
  return null
}
