import { type Decision, decide, type RequestDigests } from '../core/decide.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { identifiersSentByBoth } from '../core/reconcile/identifiers.ts'
import type {
  Attempt,
  IdempotencyRecord,
  Millis,
  Operation,
  RecordDraft,
  RecordId,
  Spans,
  State,
} from '../core/record.ts'
import { claimDraft, claimSpans, outcomeDraft, outcomeSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, type Stamp, StoreUnavailable } from '../store/register.ts'
import type { Execution } from './request.ts'

/** Rounds of a race that others keep winning; each lost round means that somebody else moved the record on. */
const MAX_ROUNDS = 16

/** Waits for a lost connection before its claim is asked for again. */
const RECONNECT_PAUSES: readonly Millis[] = [50, 100, 200]

/** A record that answers the request: nobody may claim over it. */
export type Existing = Exclude<Decision, { kind: 'take_over' | 'gone' }>

/** `lost`: a claim of ours may be in the store, or still on its way there; `over` is what it expected to find. */
export interface Unclaimed {
  readonly kind: 'unavailable'
  readonly error: unknown
  readonly attempt: Attempt
  readonly lost: boolean
  readonly over: IdempotencyRecord | null
}

/** This request is sent upstream. `unclaimed`: why there is no claim, where the route goes on without one. */
export interface Execute {
  readonly kind: 'execute'
  readonly execution: Execution
  /** When the claim was asked for, by `performance.now()`. */
  readonly askedAt: Millis
  readonly unclaimed: Unclaimed | null
}

export type ClaimOutcome =
  | {
      readonly kind: 'claimed'
      readonly execution: Execution
      /** By `performance.now()`; of several tries the first. */
      readonly askedAt: Millis
      readonly before: State | 'absent'
      /** It ended a lapsed lease that nobody had written down yet. */
      readonly lapsed: boolean
      readonly version: number
    }
  | { readonly kind: 'existing'; readonly decision: Existing }
  | Unclaimed
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }

export function isExisting(decision: Decision): decision is Existing {
  return decision.kind !== 'take_over' && decision.kind !== 'gone'
}

/** What `record` answers; null where there is none, or where it may be claimed over. For records without the store's clock. */
export function existing(
  record: IdempotencyRecord | null,
  asked: RequestDigests,
  route: RoutePolicy,
): Existing | null {
  const decision = record === null ? null : decide(record, asked, route, 0)
  return decision !== null && isExisting(decision) ? decision : null
}

/** No claim was sent: the store does not even take what this replica has to tell it first. */
export function notClaimed(token: Buffer): Unclaimed {
  const error = new StoreUnavailable('the store does not answer', false)
  return { kind: 'unavailable', error, attempt: { fence: 0, token, attempts: 1 }, lost: false, over: null }
}

/**
 * Claims the record, or says what it met. One round trip where the key is new or finished. A claim whose reply was lost
 * is asked for once more: the store then shows our own token, and the attempt goes on (contract §3.4).
 */
export async function claim(
  records: Records,
  route: RoutePolicy,
  id: RecordId,
  operation: Operation,
  asked: RequestDigests,
  token: Buffer,
  pause: (time: Millis) => Promise<unknown>,
): Promise<ClaimOutcome> {
  const askedAt = performance.now()
  const spans = claimSpans(route)
  const first: Attempt = { fence: 0, token, attempts: 1 }
  let attempt = first
  let own = operation
  let before: State | 'absent' = 'absent'
  let over: IdempotencyRecord | null = null
  let lost = false
  const reconnect = [...RECONNECT_PAUSES]
  let error: unknown = null
  const claimed = (
    { version, fence, createdAt }: Stamp,
    by: Attempt,
    executes: Operation,
    was: State | 'absent',
  ): ClaimOutcome => ({
    kind: 'claimed',
    before: was,
    lapsed: was === 'unknown' && over?.state === 'in_progress',
    version,
    askedAt,
    execution: { id, route, operation: executes, attempt: { ...by, fence }, createdAt, ended: null },
  })
  const unavailable = (): Unclaimed => ({
    kind: 'unavailable',
    // Made only here: an error takes its stack, which costs more than the rest of a claim.
    error: error ?? new Error('other claims kept moving the record on'),
    attempt: { ...attempt, fence: 0 },
    lost,
    over,
  })
  for (let round = 0; round < MAX_ROUNDS; round++) {
    try {
      const reply = await records.claim(id, claimDraft(operation, first), spans)
      if (reply.kind === 'claimed') {
        // Recognised: what the round before asked for had come through. Else nothing is there any more.
        return reply.recognised
          ? claimed(reply.stamp, attempt, own, before)
          : claimed(reply.stamp, first, operation, 'absent')
      }
      const decision = decide(reply.record, asked, route, reply.now)
      if (isExisting(decision)) return { kind: 'existing', decision }
      if (decision.kind === 'gone') continue
      over = decision.from
      before = decision.read
      attempt = { fence: over.fence + 1, token, attempts: over.attempts + 1 }
      // The attempt that fell silent may have been executed, too: the upstream must have been told by it as well.
      own = before === 'unknown' ? identifiersSentByBoth(over, operation) : operation
      const taken = await records.takeOver(id, over, claimDraft(own, attempt), spans)
      if (taken.kind === 'claimed') return claimed(taken.stamp, attempt, own, before)
    } catch (caught) {
      if (caught instanceof CorruptRecord) return { kind: 'corrupt', error: caught }
      if (!(caught instanceof StoreUnavailable)) throw caught
      error = caught
      // A second loss ends it. A store that cannot be asked any more is often back in a moment: a connection broke.
      const wait = caught.maybeApplied ? (lost ? undefined : 0) : lost ? reconnect.shift() : undefined
      lost ||= caught.maybeApplied
      if (wait === undefined) return unavailable()
      await pause(wait)
    }
  }
  return unavailable()
}

/**
 * A claim for a retry came through over an execution that this replica knows of, as the store had lost the record or gone back to an
 * older state of it: the record is given back to the execution as it stands, so that its outcome is what retries find. False: the store
 * did not take it.
 */
export async function giveBack(records: Records, version: number, execution: Execution): Promise<boolean> {
  const { id, route, operation, attempt, createdAt } = execution
  let at: number | null = version
  try {
    while (at !== null) {
      const { ended } = execution
      const [draft, spans]: [RecordDraft, Spans] =
        ended === null
          ? [claimDraft(operation, attempt), claimSpans(route)]
          : [outcomeDraft(operation, attempt, ended, createdAt), outcomeSpans(ended, route)]
      const reply = await records.replace(id, at, draft, spans)
      // Where the execution ended meanwhile, its own write may have met the claim and been refused.
      at = reply?.kind === 'written' && execution.ended !== ended ? reply.stamp.version : null
    }
    return true
  } catch (error) {
    if (error instanceof StoreUnavailable) return false
    if (error instanceof CorruptRecord) return true
    throw error
  }
}
