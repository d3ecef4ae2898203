import { type Decision, decide } from '../core/decide.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, IdempotencyRecord, Operation, RecordId, State } from '../core/record.ts'
import { claimDraft, claimSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import type { Run } from './call.ts'

/** Rounds of a race that others keep winning; each lost round means that somebody else moved the record on. */
const MAX_ROUNDS = 16

export type Claimed =
  | { readonly kind: 'claimed'; readonly run: Run; readonly before: State | 'absent' }
  | { readonly kind: 'met'; readonly decision: Exclude<Decision, { kind: 'take_over' | 'gone' }> }
  /** `lost`: a claim of ours may be in the store, or still on its way there; `over` is what it expected to find. */
  | {
      readonly kind: 'unavailable'
      readonly error: unknown
      readonly lost: boolean
      readonly over: IdempotencyRecord | null
    }
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
  let attempt: Attempt = { fence: 0, token, attempts: 1 }
  let before: State | 'absent' = 'absent'
  let over: IdempotencyRecord | null = null
  let lost = false
  let error: unknown = new Error('other claims kept moving the record on')
  for (let round = 0; round < MAX_ROUNDS; round++) {
    try {
      const reply = await records.claim(id, claimDraft(operation, { fence: 0, token, attempts: 1 }), spans)
      if (reply.kind === 'claimed') {
        const { fence, createdAt } = reply.stamp
        return {
          kind: 'claimed',
          before,
          run: { id, route, operation, attempt: { ...attempt, fence }, createdAt },
        }
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
      return { kind: 'unavailable', error, lost: lost || caught.maybeApplied, over }
    }
  }
  return { kind: 'unavailable', error, lost, over }
}
