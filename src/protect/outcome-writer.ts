import { decide } from '../core/decide.ts'
import type { PendingOutcome } from '../core/outcome.ts'
import { type IdempotencyRecord, type Millis, type Spans, type State, shortId } from '../core/record.ts'
import { judgeRefusal, type OutcomeDraft } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, StoreFull } from '../store/register.ts'
import { heldRecord, withoutBody } from './classify.ts'
import type { CompletionResult } from './outcomes.ts'
import type { Observer } from './request.ts'

export interface Settled {
  readonly state: State
  /** The store's time until which the response is kept; null where it is not, or not yet. */
  readonly expiresAt: Millis | null
  /** The record as this outcome left it, for those who wait for it; null: look it up. */
  readonly record: IdempotencyRecord | null
}

/** Writes outcomes where §2 accepts them, and says what became of each. */
export class OutcomeWriter {
  readonly #records: Records
  readonly #observer: Observer

  constructor(records: Records, observer: Observer) {
    this.#records = records
    this.#observer = observer
  }

  /** @throws {StoreUnavailable} where the store did not take it. */
  async write(unsettled: PendingOutcome): Promise<Settled> {
    const { id, draft, spans, claimed } = unsettled
    try {
      const reply = await this.#records.settle(id, draft, spans)
      if (reply.kind === 'refused') {
        const own = claimed ? null : await this.#writeUnclaimed(unsettled, reply.record, reply.now)
        return own ?? this.#refused(unsettled, reply.record)
      }
      const lost = reply.kind === 'recovered' && claimed
      if (lost)
        this.#observer.trouble(
          'the store had lost a record under way; its outcome was written again',
          described(unsettled),
        )
      const result = lost ? 'recovered' : resultOf(draft)
      return this.#written(unsettled, result, draft.state, reply.now + spans.dueIn)
    } catch (error) {
      if (error instanceof StoreFull && draft.state === 'completed' && draft.result.kept) {
        // Done stays done: without room for the body it is recorded without one (contract §3).
        const result = withoutBody(draft.result.response, 'no_room')
        return await this.write({ ...unsettled, draft: { ...draft, result } })
      }
      if (error instanceof CorruptRecord) {
        this.#observer.trouble('the stored record cannot be read; it is left as it is', {
          ...described(unsettled),
          error: String(error),
        })
        return { state: draft.state, expiresAt: null, record: null }
      }
      throw error
    }
  }

  /** The attempt has no claim in the store, and another record is there. null: that one stands. */
  async #writeUnclaimed(
    unsettled: PendingOutcome,
    found: IdempotencyRecord,
    now: Millis,
  ): Promise<Settled | null> {
    const { id, draft, spans, over } = unsettled
    if (draft.state === 'failed_retryable') {
      if (found.version !== over) return null
      // The claim over it has not arrived, and must not arrive any more: the record stays what it is, at another version.
      const moved = await this.#records.replace(id, found.version, found, remaining(found, now))
      if (moved?.kind === 'refused') return await this.write(unsettled)
      return this.#written(unsettled, 'released', found.state, null)
    }
    // Executed, and the record says that a retry may execute: it must not.
    const asked = { ...draft, rawDigestUnder: () => draft.rawDigest }
    if (decide(found, asked, unsettled, now).kind !== 'take_over') return null
    const taken = await this.#records.takeOver(id, found, draft, spans)
    if (taken.kind === 'lost' || taken.recognised) return await this.write(unsettled)
    return this.#written(unsettled, resultOf(draft), draft.state, taken.now + spans.dueIn)
  }

  #written(
    { id, draft }: PendingOutcome,
    result: CompletionResult,
    state: State,
    at: Millis | null,
  ): Settled {
    this.#observer.completed(draft.route, result, id)
    const expiresAt = state === 'completed' ? at : null
    const known = state === draft.state && state !== 'unknown'
    return { state, expiresAt, record: known ? heldRecord(draft, expiresAt) : null }
  }

  /** The store found the attempt no more, or in a state that takes no outcome (contract §2). */
  #refused(unsettled: PendingOutcome, found: IdempotencyRecord): Settled {
    const { id, draft, claimed } = unsettled
    if (found.state === 'completed' && judgeRefusal(found, draft) === 'duplicate')
      return this.#written(unsettled, resultOf(draft), found.state, found.expiresAt)
    if (claimed || draft.state !== 'failed_retryable') {
      this.#observer.completed(draft.route, 'stale', id)
      this.#observer.trouble('an outcome came too late and was refused', {
        ...described(unsettled),
        found: found.state,
        foundFence: found.fence,
      })
    }
    return { state: found.state, expiresAt: null, record: null }
  }
}

/** For the log. */
export function described({ id, draft }: PendingOutcome): Record<string, unknown> {
  return { route: draft.route, record: shortId(id), fence: draft.fence, outcome: draft.state }
}

/** The spans that leave a record's instants as they are. */
function remaining(record: IdempotencyRecord, now: Millis): Spans {
  const due =
    record.state === 'in_progress'
      ? record.leaseUntil
      : record.state === 'unknown'
        ? record.nextLookAt
        : record.dropAt
  return { dueIn: due - now, dropIn: record.dropAt - now }
}

function resultOf(draft: OutcomeDraft): CompletionResult {
  switch (draft.state) {
    case 'completed':
      return draft.result.kept || draft.result.why === 'outcome_only' ? 'stored' : 'too_large'
    case 'failed_retryable':
      return 'released'
    case 'unknown':
      return 'unknown'
  }
}
