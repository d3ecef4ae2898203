import { type Asked, type Decision, decide } from '../core/decide.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, IdempotencyRecord, Millis, Operation, RecordId, State } from '../core/record.ts'
import { claimDraft, claimSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, type Stamp, StoreUnavailable } from '../store/register.ts'
import type { Run } from './call.ts'

/** Rounds of a race that others keep winning; each lost round means that somebody else moved the record on. */
const MAX_ROUNDS = 16

/** Waits for a lost connection before its claim is asked for again. */
const RECONNECT_PAUSES: readonly Millis[] = [50, 100, 200]

/** A record that answers the request: nobody may claim over it. */
export type Met = Exclude<Decision, { kind: 'take_over' | 'gone' }>

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
  readonly run: Run
  /** When the claim was asked for, by `performance.now()`. */
  readonly askedAt: Millis
  readonly unclaimed: Unclaimed | null
}

export type Claimed =
  | {
      readonly kind: 'claimed'
      readonly run: Run
      /** By `performance.now()`; of several tries the first. */
      readonly askedAt: Millis
      readonly before: State | 'absent'
      /** It ended a lapsed lease that nobody had written down yet. */
      readonly lapsed: boolean
      readonly version: number
    }
  | { readonly kind: 'met'; readonly decision: Met }
  | Unclaimed
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }

export function isMet(decision: Decision): decision is Met {
  return decision.kind !== 'take_over' && decision.kind !== 'gone'
}

/** What `record` answers; null where there is none, or where it may be claimed over. For records without the store's clock. */
export function met(record: IdempotencyRecord | null, asked: Asked, route: RoutePolicy): Met | null {
  const decision = record === null ? null : decide(record, asked, route, 0)
  return decision !== null && isMet(decision) ? decision : null
}

/** No claim was sent: the store does not even take what this replica has to tell it first. */
export function notAsked(token: Buffer): Unclaimed {
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
  asked: Asked,
  token: Buffer,
  pause: (time: Millis) => Promise<unknown>,
): Promise<Claimed> {
  const askedAt = performance.now()
  const spans = claimSpans(route)
  const first: Attempt = { fence: 0, token, attempts: 1 }
  let attempt = first
  let before: State | 'absent' = 'absent'
  let over: IdempotencyRecord | null = null
  let lost = false
  const reconnect = [...RECONNECT_PAUSES]
  let error: unknown = null
  const claimed = ({ version, fence, createdAt }: Stamp, own: Attempt, was: State | 'absent'): Claimed => ({
    kind: 'claimed',
    before: was,
    lapsed: was === 'unknown' && over?.state === 'in_progress',
    version,
    askedAt,
    run: { id, route, operation, attempt: { ...own, fence }, createdAt },
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
          ? claimed(reply.stamp, attempt, before)
          : claimed(reply.stamp, first, 'absent')
      }
      const decision = decide(reply.record, asked, route, reply.now)
      if (isMet(decision)) return { kind: 'met', decision }
      if (decision.kind === 'gone') continue
      over = decision.from
      before = decision.read
      attempt = { fence: over.fence + 1, token, attempts: over.attempts + 1 }
      const taken = await records.takeOver(id, over, claimDraft(operation, attempt), spans)
      if (taken.kind === 'claimed') return claimed(taken.stamp, attempt, before)
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
 * The store had lost the record of a run that is still going on here, and a claim for a retry has taken its place: the
 * record is given back to the run, so that its outcome finds it. Where that fails the claim stays, and lapses to `unknown`.
 */
export async function giveBack(records: Records, version: number, run: Run): Promise<void> {
  try {
    await records.replace(run.id, version, claimDraft(run.operation, run.attempt), claimSpans(run.route))
  } catch (error) {
    if (!(error instanceof StoreUnavailable) && !(error instanceof CorruptRecord)) throw error
  }
}
