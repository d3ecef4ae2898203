import { randomFillSync } from 'node:crypto'
import type { IdempotencyRecord, Millis, RecordDraft, RecordId, Spans } from '../core/record.ts'
import { ACCEPTING, ACCEPTING_UNKNOWN, isFromBefore, stillUnknown } from '../core/settle.ts'
import { decodeRecord, encodeDraft } from './codec.ts'
import type { Condition, Register, Stamp } from './register.ts'

/** `recognised`: the record was there already and is this very attempt's own, whose reply had been lost (contract §3.4). */
export interface Claimed {
  readonly kind: 'claimed'
  readonly now: Millis
  readonly stamp: Stamp
  readonly recognised: boolean
}
export type ClaimReply =
  | Claimed
  | { readonly kind: 'exists'; readonly now: Millis; readonly record: IdempotencyRecord }
export type TakeOverReply =
  | Claimed
  | { readonly kind: 'lost'; readonly now: Millis; readonly record: IdempotencyRecord | null }
export type SettleReply =
  | { readonly kind: 'written' | 'recovered'; readonly now: Millis; readonly stamp: Stamp }
  | { readonly kind: 'refused'; readonly now: Millis; readonly record: IdempotencyRecord }

/**
 * Records instead of bytes: what the guard speaks with a store. Says what is stored; how it reads at `now` (`readAt`) is
 * for the caller. Throws {@link CorruptRecord} for a record that cannot be decoded, beside what {@link Register} throws.
 */
export class Records {
  readonly #register: Register

  constructor(register: Register) {
    this.#register = register
  }

  /** Creates the record for `draft`'s attempt, or gives back the one that is there. One round trip. */
  async claim(id: RecordId, draft: RecordDraft, spans: Spans): Promise<ClaimReply> {
    const reply = await this.#register.put(id, encodeDraft(draft), spans)
    if (reply.done) return { kind: 'claimed', now: reply.now, stamp: reply.stamp, recognised: false }
    const record = decodeRecord(reply.bytes)
    return recognise(record, draft, reply.now) ?? { kind: 'exists', now: reply.now, record }
  }

  /** Claims a record that is there for a new attempt, where it is still as `from` says. */
  async takeOver(
    id: RecordId,
    from: IdempotencyRecord,
    draft: RecordDraft,
    spans: Spans,
  ): Promise<TakeOverReply> {
    const condition = { version: from.version }
    const reply = await this.#register.swap(id, condition, encodeDraft(draft), spans, true)
    if (reply.done) return { kind: 'claimed', now: reply.now, stamp: reply.stamp, recognised: false }
    if (reply.bytes === null) return { kind: 'lost', now: reply.now, record: null }
    const record = decodeRecord(reply.bytes)
    return recognise(record, draft, reply.now) ?? { kind: 'lost', now: reply.now, record }
  }

  /**
   * Writes the outcome of `draft`'s attempt where §2 accepts it; `recovered` where the record had gone, or was that of an
   * earlier attempt which the outcome may replace ({@link isFromBefore}). An uncertain one keeps what was found out about a record that is unknown already.
   */
  async settle(id: RecordId, draft: RecordDraft, spans: Spans): Promise<SettleReply> {
    const bytes = encodeDraft(draft)
    const condition = {
      token: draft.token,
      states: draft.state === 'unknown' ? ACCEPTING_UNKNOWN : ACCEPTING,
    }
    const reply = await this.#swapOrPut(id, condition, bytes, spans)
    const unknown = reply.kind === 'refused' && reply.record.state === 'unknown' ? reply.record : null
    if (draft.state === 'unknown' && unknown?.token.equals(draft.token)) {
      const still = stillUnknown(unknown, draft, reply.now)
      const kept = await this.replace(id, unknown.version, still.draft, still.spans)
      // The sweeper, or a person, was faster.
      return kept?.kind === 'written' ? kept : await this.settle(id, draft, spans)
    }
    if (reply.kind === 'refused' && isFromBefore(reply.record, draft)) {
      const over = await this.replace(id, reply.record.version, draft, spans)
      return over?.kind === 'written' ? { ...over, kind: 'recovered' } : await this.settle(id, draft, spans)
    }
    // The attempt's own claim, long given up, may be applied between the two steps: then it can be swapped after all.
    const again = reply.kind === 'refused' && recognise(reply.record, draft, reply.now) !== null
    return again ? await this.#swapOrPut(id, condition, bytes, spans) : reply
  }

  async #swapOrPut(id: RecordId, condition: Condition, bytes: Buffer, spans: Spans): Promise<SettleReply> {
    const swapped = await this.#register.swap(id, condition, bytes, spans, false)
    if (swapped.done) return { kind: 'written', now: swapped.now, stamp: swapped.stamp }
    if (swapped.bytes !== null)
      return { kind: 'refused', now: swapped.now, record: decodeRecord(swapped.bytes) }
    const put = await this.#register.put(id, bytes, spans)
    return put.done
      ? { kind: 'recovered', now: put.now, stamp: put.stamp }
      : { kind: 'refused', now: put.now, record: decodeRecord(put.bytes) }
  }

  /** Replaces the record at exactly this version: a decision by somebody other than the owner. */
  async replace(
    id: RecordId,
    version: number,
    draft: RecordDraft,
    spans: Spans,
  ): Promise<SettleReply | null> {
    const reply = await this.#register.swap(id, { version }, encodeDraft(draft), spans, false)
    if (reply.done) return { kind: 'written', now: reply.now, stamp: reply.stamp }
    return reply.bytes === null
      ? null
      : { kind: 'refused', now: reply.now, record: decodeRecord(reply.bytes) }
  }

  async get(id: RecordId): Promise<{ now: Millis; record: IdempotencyRecord | null }> {
    const { now, bytes } = await this.#register.get(id)
    return { now, record: bytes === null ? null : decodeRecord(bytes) }
  }
}

function recognise(record: IdempotencyRecord, draft: RecordDraft, now: Millis): Claimed | null {
  if (record.state !== 'in_progress' || !record.token.equals(draft.token)) return null
  const { version, fence, createdAt } = record
  return { kind: 'claimed', now, stamp: { version, fence, createdAt }, recognised: true }
}

const TOKEN_BYTES = 16
/** Drawn at once: a draw from the system costs as much as twenty tokens (docs/internals/performance.md). */
const TOKENS_DRAWN = 256

/** Owners' tokens: 16 random bytes, other ones with every call. */
export function tokens(): () => Buffer {
  const drawn = Buffer.alloc(TOKENS_DRAWN * TOKEN_BYTES)
  let at = drawn.length
  return () => {
    if (at === drawn.length) {
      randomFillSync(drawn)
      at = 0
    }
    at += TOKEN_BYTES
    // A copy: the block is drawn anew while tokens of it are in use.
    return Buffer.from(drawn.subarray(at - TOKEN_BYTES, at))
  }
}
