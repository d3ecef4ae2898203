import { decide } from '../core/decide.ts'
import type { Millis, Outcome } from '../core/record.ts'
import { outcomeDraft, outcomeSpans } from '../core/settle.ts'
import { isExisting } from '../protect/claim.ts'
import { withoutBody } from '../protect/classify.ts'
import type { Ports } from '../protect/ports.ts'
import type { Execution } from '../protect/request.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from '../store/register.ts'

/** Looks at a record that another replica's attempt is about to finish. */
const LOOK_FIRST: Millis = 100
const LOOK_MOST: Millis = 1000
/** Tries of a store that does not answer, ever more apart: half a minute in all. */
const TRIES = 12
const RETRY_MOST: Millis = 5000

type AdoptPorts = Pick<Ports, 'records' | 'settler' | 'waiters' | 'pause'>
/** What an execution can show that keeps a later one from happening. */
export type ObservedOutcome = Extract<Outcome, { kind: 'completed' | 'unknown' }>

/**
 * Tells a record what an execution beside its owner has shown (shadow mode). The owner's word goes first: its attempt is
 * waited for. What stands then gives way to what says more: nothing, and "not executed", to an execution; "unknown" to a
 * completed one. So no later retry is let through because the owner alone did nothing.
 *
 * False: given up, as the store did not answer for long, or `stopped` says so.
 */
export async function mergeOutcome(
  ports: AdoptPorts,
  execution: Execution,
  shown: ObservedOutcome,
  stopped: () => boolean,
): Promise<boolean> {
  let outcome = shown
  let failures = 0
  while (!stopped()) {
    // The first answer is on its way to the store.
    if (ports.settler.held(execution.id)?.state === 'completed') return true
    let rest: Millis
    try {
      const left = await write(ports, execution, outcome)
      if (left === null) return true
      failures = 0
      rest = left
    } catch (error) {
      if (error instanceof CorruptRecord) return true
      if (!(error instanceof StoreUnavailable)) throw error
      if (++failures === TRIES) return false
      // Done stays done: without room for the body it is recorded without one.
      if (error instanceof StoreFull && outcome.kind === 'completed' && outcome.result.kept)
        outcome = { kind: 'completed', result: withoutBody(outcome.result.response, 'no_room') }
      rest = Math.min(LOOK_FIRST * 2 ** failures, RETRY_MOST)
    }
    await ports.pause(rest)
  }
  return false
}

/** null: written, or nothing to write; else how long until it is worth another look. */
async function write(
  { records, waiters }: AdoptPorts,
  execution: Execution,
  outcome: ObservedOutcome,
): Promise<Millis | null> {
  const { id, route, operation } = execution
  const spans = outcomeSpans(outcome, route)
  const draft = outcomeDraft(operation, execution.attempt, outcome, execution.createdAt)
  const reply = await records.settle(id, draft, spans)
  if (reply.kind !== 'refused') return null
  const { record: found, now } = reply
  const decision = decide(found, { ...operation, rawDigestUnder: () => operation.rawDigest }, route, now)
  if (decision.kind === 'in_progress') return Math.min(LOOK_MOST, Math.max(LOOK_FIRST, decision.leaseLeft))
  if (isExisting(decision) && decision.kind !== 'unknown') return null
  // What is uncertain already, a lapsed lease too, learns nothing of another uncertain execution.
  if (outcome.kind === 'unknown' && found.state !== 'failed_retryable') return null
  const taken = await records.takeOver(id, found, { ...draft, attempts: found.attempts + 1 }, spans)
  if (taken.kind === 'lost') return 0
  waiters.tell(id, null)
  return null
}
