import { randomFillSync } from 'node:crypto'
import type { IdempotencyRecord, Millis, RecordDraft, RecordId, Spans } from '../core/record.ts'
import { ACCEPTING, ACCEPTING_UNKNOWN, isFromBefore, stillUnknown } from '../core/settle.ts'
import { decodeRecord, encodeDraft } from './codec.ts'
import {
  type Condition,
  CorruptRecord,
  type PutReply,
  type Register,
  type Stamp,
  StoreFull,
  StoreUnavailable,
  type SwapReply,
} from './register.ts'

/** The store cannot be reached, has no room (`full`), or did not answer in time. */
export interface Unavailable {
  readonly kind: 'unavailable'
  readonly full: boolean
  readonly error: StoreUnavailable
}
/** `corrupt`: the record that is there cannot be decoded; it is left as it is. */
export type StoreTrouble = Unavailable | { readonly kind: 'corrupt'; readonly error: CorruptRecord }

/** `recognised`: the record is this very attempt's own, written by a claim whose reply was lost (contract §3.4). */
interface Claimed {
  readonly kind: 'claimed'
  readonly now: Millis
  readonly stamp: Stamp
  readonly recognised: boolean
}
export type ClaimReply =
  | Claimed
  | { readonly kind: 'exists'; readonly now: Millis; readonly record: IdempotencyRecord }
  | StoreTrouble
export type TakeOverReply =
  | Claimed
  | { readonly kind: 'lost'; readonly now: Millis; readonly record: IdempotencyRecord | null }
  | StoreTrouble
export type SettleReply =
  | { readonly kind: 'written'; readonly now: Millis; readonly stamp: Stamp }
  | { readonly kind: 'recovered'; readonly now: Millis; readonly stamp: Stamp }
  | { readonly kind: 'refused'; readonly now: Millis; readonly record: IdempotencyRecord }
  | StoreTrouble
export type GetReply =
  | { readonly kind: 'read'; readonly now: Millis; readonly record: IdempotencyRecord | null }
  | StoreTrouble

/**
 * Records instead of bytes: what the guard speaks with a store. Says what is stored; how it reads at `now` (`readAt`) is
 * for the caller. Trouble with the store is a value; {@link orThrow} is for callers whose own edge handles exceptions.
 */
export class Records {
  readonly #register: Register

  constructor(register: Register) {
    this.#register = register
  }

  /** Creates the record for `draft`'s attempt, or returns the one that is there. One round trip. */
  claim(id: RecordId, draft: RecordDraft, spans: Spans): Promise<ClaimReply> {
    return answered(this.#register.put(id, encodeDraft(draft), spans), (reply) => {
      const { now } = reply
      if (reply.done) return { kind: 'claimed', now, stamp: reply.stamp, recognised: false }
      const record = decodeRecord(reply.bytes)
      return recognise(record, draft, now) ?? { kind: 'exists', now, record }
    })
  }

  /** Claims an existing record for a new attempt, if it is still as in `from`. */
  takeOver(
    id: RecordId,
    { version }: IdempotencyRecord,
    draft: RecordDraft,
    spans: Spans,
  ): Promise<TakeOverReply> {
    return answered(this.#register.swap(id, { version }, encodeDraft(draft), spans, true), (reply) => {
      const { now } = reply
      if (reply.done) return { kind: 'claimed', now, stamp: reply.stamp, recognised: false }
      if (reply.bytes === null) return { kind: 'lost', now, record: null }
      const record = decodeRecord(reply.bytes)
      return recognise(record, draft, now) ?? { kind: 'lost', now, record }
    })
  }

  /**
   * Writes the outcome of `draft`'s attempt where §2 accepts it; `recovered` if the record was gone, or belonged to an earlier
   * attempt that the outcome may replace ({@link isFromBefore}). An uncertain outcome keeps what was found out about a
   * record that is unknown already.
   */
  async settle(id: RecordId, draft: RecordDraft, spans: Spans): Promise<SettleReply> {
    const bytes = encodeDraft(draft)
    const states = draft.state === 'unknown' ? ACCEPTING_UNKNOWN : ACCEPTING
    const condition = { token: draft.token, states }
    for (let isOwnClaim = false; ; ) {
      const reply =
        (await this.#swap(id, condition, bytes, spans)) ??
        (await answered(this.#register.put(id, bytes, spans), (put) => written('recovered', put)))
      if (reply.kind !== 'refused' || isOwnClaim) return reply
      const { record, now } = reply
      let replaced: SettleReply | null
      if (draft.state === 'unknown' && record.state === 'unknown' && record.token.equals(draft.token)) {
        const still = stillUnknown(record, draft, now)
        replaced = await this.replace(id, record.version, still.draft, still.spans)
      } else if (isFromBefore(record, draft)) {
        replaced = await this.replace(id, record.version, draft, spans)
        if (replaced?.kind === 'written') return { ...replaced, kind: 'recovered' }
      } else {
        // The attempt's own claim, long given up, may arrive between swap and put: then the swap succeeds after all.
        isOwnClaim = recognise(record, draft, now) !== null
        if (isOwnClaim) continue
        return reply
      }
      // Else the sweeper, or a person, was faster.
      if (replaced !== null && replaced.kind !== 'refused') return replaced
    }
  }

  /** Replaces the record at exactly this version: a decision by somebody other than the owner. Null: there is none. */
  replace(id: RecordId, version: number, draft: RecordDraft, spans: Spans): Promise<SettleReply | null> {
    return this.#swap(id, { version }, encodeDraft(draft), spans)
  }

  get(id: RecordId): Promise<GetReply> {
    return answered(this.#register.get(id), ({ now, bytes }) => ({
      kind: 'read',
      now,
      record: bytes === null ? null : decodeRecord(bytes),
    }))
  }

  #swap(id: RecordId, condition: Condition, bytes: Buffer, spans: Spans): Promise<SettleReply | null> {
    return answered(this.#register.swap(id, condition, bytes, spans, false), (reply) =>
      written('written', reply),
    )
  }
}

/** @throws what the trouble is, {@link StoreUnavailable} or {@link CorruptRecord}. */
export function orThrow<Reply extends { readonly kind: string } | null>(
  reply: Reply,
): Exclude<Reply, StoreTrouble> {
  if (reply?.kind === 'unavailable' || reply?.kind === 'corrupt') throw (reply as StoreTrouble).error
  return reply as Exclude<Reply, StoreTrouble>
}

/** For ports that throw. */
export function nullIfUnavailable(error: unknown): null {
  if (error instanceof StoreUnavailable) return null
  throw error
}

/** What `read` makes of the store's reply; other errors than the store's are bugs and go on. */
function answered<Reply, Value>(
  reply: Promise<Reply>,
  read: (reply: Reply) => Value,
): Promise<Value | StoreTrouble> {
  return reply.then(read).catch(troubleOf)
}

function troubleOf(error: unknown): StoreTrouble {
  if (error instanceof StoreUnavailable)
    return { kind: 'unavailable', full: error instanceof StoreFull, error }
  if (error instanceof CorruptRecord) return { kind: 'corrupt', error }
  throw error
}

function written(kind: 'written' | 'recovered', reply: PutReply): SettleReply
function written(kind: 'written' | 'recovered', reply: SwapReply): SettleReply | null
function written(kind: 'written' | 'recovered', reply: SwapReply): SettleReply | null {
  const { now } = reply
  if (reply.done) return { kind, now, stamp: reply.stamp }
  return reply.bytes === null ? null : { kind: 'refused', now, record: decodeRecord(reply.bytes) }
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
