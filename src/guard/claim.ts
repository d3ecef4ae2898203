import { type Decision, decide } from '../core/decide.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, IdempotencyRecord, Operation, RecordId, State } from '../core/record.ts'
import { claimDraft, claimSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import type { Run } from './call.ts'

/** Rounds of a race that others keep winning; each lost round means that somebody else moved the record on. */
const MAX_ROUNDS = 16

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

export type Claimed =
  | { readonly kind: 'claimed'; readonly run: Run; readonly before: State | 'absent' }
  | { readonly kind: 'met'; readonly decision: Met }
  | Unclaimed
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }

/**
 * Claims the record, or says what it met. One round trip where the key is new or finished. A claim whose reply was lost
 * is asked for once more: the store then shows our own token, and the attempt goes on (contract §3.4).
 */
export async function claim(
  records: Records,
  route: RoutePolicy,
  id: RecordId,
  operation: Operation,
  token: Buffer,
): Promise<Claimed> {
  const spans = claimSpans(route)
  const first: Attempt = { fence: 0, token, attempts: 1 }
  let attempt = first
  let before: State | 'absent' = 'absent'
  let over: IdempotencyRecord | null = null
  let lost = false
  let error: unknown = new Error('other claims kept moving the record on')
  for (let round = 0; round < MAX_ROUNDS; round++) {
    try {
      const reply = await records.claim(id, claimDraft(operation, first), spans)
      if (reply.kind === 'claimed') {
        const { fence, createdAt } = reply.stamp
        // Recognised: the claim of the round before, whatever it was, had come through. Else nothing was there any more.
        const own = reply.recognised ? { before, attempt } : { before: 'absent' as const, attempt: first }
        const run = { id, route, operation, attempt: { ...own.attempt, fence }, createdAt }
        return { kind: 'claimed', before: own.before, run }
      }
      const decision = decide(reply.record, operation, route, reply.now)
      if (decision.kind === 'gone') continue
      if (decision.kind !== 'take_over') return { kind: 'met', decision }
      over = decision.from
      before = decision.read
      attempt = { fence: over.fence + 1, token, attempts: over.attempts + 1 }
      const taken = await records.takeOver(id, over, claimDraft(operation, attempt), spans)
      if (taken.kind === 'claimed') {
        const { fence, createdAt } = taken.stamp
        return {
          kind: 'claimed',
          before,
          run: { id, route, operation, attempt: { ...attempt, fence }, createdAt },
        }
      }
    } catch (caught) {
      if (caught instanceof CorruptRecord) return { kind: 'corrupt', error: caught }
      if (!(caught instanceof StoreUnavailable)) throw caught
      error = caught
      if (caught.maybeApplied && !lost) {
        lost = true
        continue
      }
      return { kind: 'unavailable', error, attempt, lost: lost || caught.maybeApplied, over }
    }
  }
  return { kind: 'unavailable', error, attempt, lost, over }
}
