import { randomFillSync } from 'node:crypto'
import { reclaimed, splitDraft } from '../core/copies.ts'
import {
  type CompletedResponse,
  type Fingerprint,
  type IdempotencyRecord,
  type Millis,
  type RecordDraft,
  type RecordId,
  type Spans,
  withoutBody,
} from '../core/record.ts'
import {
  ACCEPTING,
  ACCEPTING_UNKNOWN,
  isFromBefore,
  isRecorded,
  remainingSpans,
  stillUnknown,
} from '../core/settle.ts'
import { free } from '../runtime/limits.ts'
import { after, type MaybePromise } from '../runtime/scheduling.ts'
import { LARGEST_RECENT, type RecentWrites } from './recent.ts'
import { decodeRecord, encodeDraft, HEAD_ROOM, storedSpans } from './record/codec.ts'
import { prefixOf } from './record/prefix.ts'
import {
  type Condition,
  CorruptRecord,
  type Prefix,
  type PutReply,
  type Register,
  type SealError,
  SealedRecord,
  type Stamp,
  StoreFull,
  StoreUnavailable,
  type SwapReply,
} from './register.ts'

const NO_DIGEST = Buffer.alloc(32)
/** A draft that belongs to no request, without state and token. */
export const NO_REQUEST = {
  fence: 0,
  createdAt: 0,
  attempts: 1,
  fingerprint: NO_DIGEST as Fingerprint,
  rawDigest: NO_DIGEST,
  recipe: '',
  route: '',
  method: '',
  path: '',
  key: null,
  lastError: null,
}
/** Others may change a record meanwhile. */
const MAX_RECLAIMS = 5

type CompletedWithResponse = Extract<RecordDraft, { state: 'completed' }> & {
  readonly result: Extract<CompletedResponse, { kept: true }>
}

/** The record is the attempt's own, in one of these states. */
type OwnIn = Extract<Condition, { readonly token: Buffer }>

interface FoundRecord {
  readonly kind: 'found'
  readonly now: Millis
  readonly record: IdempotencyRecord
}

/** The store is unreachable, has no room (`full`), or did not answer in time. */
export interface Unavailable {
  readonly kind: 'unavailable'
  readonly full: boolean
  readonly error: StoreUnavailable
}
/** `corrupt`: the existing record cannot be decoded; it is left unchanged. */
export type StoreTrouble = Unavailable | { readonly kind: 'corrupt'; readonly error: CorruptRecord }

/** `recognised`: the record is this attempt's own, from a claim whose reply was lost (contract §3.4). */
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
/** `kept`: nothing was lost. `split`: another owner has claimed the key; `found` is its record. */
export type ReclaimReply =
  | { readonly kind: 'written' | 'kept' }
  | { readonly kind: 'split'; readonly own: RecordDraft; readonly found: IdempotencyRecord }
  | StoreTrouble
export type ReadReply =
  | { readonly kind: 'read'; readonly now: Millis; readonly record: IdempotencyRecord | null }
  | StoreTrouble
export type PrefixReply =
  | { readonly kind: 'prefix'; readonly now: Millis; readonly prefix: Prefix | null }
  | StoreTrouble

/**
 * The guard's view of a store: records instead of bytes. It returns records as stored; callers interpret them at `now` (`readAt`). Store
 * errors are values; {@link orThrow} is for callers that prefer exceptions.
 */
export class Records {
  readonly #register: Register
  readonly #onSealError: (reason: SealError) => void
  readonly #recent: RecentWrites | null

  /** `onSealError`: a record could not be opened. `recent`: remembers outcomes, if the store may lose them. */
  constructor(
    register: Register,
    onSealError: (reason: SealError) => void = () => {},
    recent: RecentWrites | null = null,
  ) {
    this.#register = register
    this.#onSealError = onSealError
    this.#recent = recent
  }

  /** Creates the record for `draft`'s attempt, or returns the existing one. One round trip. */
  claim(
    id: RecordId,
    draft: RecordDraft,
    spans: Spans,
    entry: 'claim' | 'fresh' = 'claim',
  ): MaybePromise<ClaimReply> {
    return this.#answered(this.#register.put(id, encodeDraft(draft), spans, entry), (reply) => {
      const { now } = reply
      if (reply.done) return { kind: 'claimed', now, stamp: reply.stamp, recognised: false }
      const record = decodeRecord(reply.bytes)
      return recognise(record, draft, now) ?? { kind: 'exists', now, record }
    })
  }

  /** Claims an existing record for a new attempt if it is still as in `from`. */
  takeOver(
    id: RecordId,
    { version }: IdempotencyRecord,
    draft: RecordDraft,
    spans: Spans,
  ): MaybePromise<TakeOverReply> {
    const stored = storedSpans(draft, spans)
    return this.#answered(this.#register.swap(id, { version }, encodeDraft(draft), stored, true), (reply) => {
      const { now } = reply
      if (reply.done) return { kind: 'claimed', now, stamp: reply.stamp, recognised: false }
      if (reply.bytes === null) return { kind: 'lost', now, record: null }
      const record = decodeRecord(reply.bytes)
      return recognise(record, draft, now) ?? { kind: 'lost', now, record }
    })
  }

  /**
   * Writes the outcome of `draft`'s attempt where §2 accepts it; `recovered` if the record was gone, or belonged to an earlier attempt that
   * the outcome may replace ({@link isFromBefore}). An uncertain outcome keeps what reconciliation has found out so far.
   */
  settle(id: RecordId, draft: RecordDraft, spans: Spans): MaybePromise<SettleReply> {
    const recent = this.#recent
    const bytes = encodeDraft(draft)
    const states = draft.state === 'unknown' ? ACCEPTING_UNKNOWN : ACCEPTING
    const condition = { token: draft.token, states }
    const settled = (reply: SettleReply): SettleReply => {
      if (recent !== null && reply.kind !== 'refused' && isNewest(reply, draft))
        this.#remember(recent, id, draft, spans, bytes)
      // The store has answered, so all bytes were sent.
      if (reply.kind !== 'unavailable') free(bytes, HEAD_ROOM)
      return reply
    }
    return after(this.#swap(id, condition, bytes, storedSpans(draft, spans)), (swapped) =>
      swapped !== null && settled(swapped).kind !== 'refused'
        ? swapped
        : this.#contest(id, draft, spans, condition, swapped).then((reply) => {
            if (recent !== null && isNewest(reply, draft))
              this.#remember(recent, id, draft, spans, encodeDraft(draft))
            return reply
          }),
    )
  }

  /** A large outcome is remembered without its body, and so is any other once room is tight. */
  #remember(recent: RecentWrites, id: RecordId, draft: RecordDraft, spans: Spans, bytes: Buffer): void {
    if (!hasBody(draft) || (bytes.length <= LARGEST_RECENT && !recent.isTight))
      return recent.add(id, bytes, spans)
    const result = withoutBody(draft.result.response, 'no_room')
    recent.add(id, encodeDraft({ ...draft, result }), spans)
  }

  /** Recent outcomes, oldest first, each with a function that writes it again. */
  recent(): { readonly id: RecordId; readonly again: () => Promise<ReclaimReply> }[] {
    const recent = this.#recent
    if (recent === null) return []
    return recent.all().map(({ id, bytes, left }) => ({
      id,
      again: async () => {
        const spans = left()
        if (spans === null) return { kind: 'kept' }
        const reply = await this.reclaim(id, decodeRecord(bytes), spans)
        // The next failover may lose it again.
        if (reply.kind === 'written') recent.add(id, bytes, spans)
        return reply
      },
    }))
  }

  /** The record was removed: {@link recent} drops its outcomes. */
  forget(id: RecordId): void {
    this.#recent?.forget(id)
  }

  /**
   * Rewrites a record that a failover may have lost, under its own fence, if needed. A record that another owner has claimed meanwhile
   * becomes unknown, unless it is final or `isStill` says that it no longer belongs to this process.
   */
  async reclaim(
    id: RecordId,
    own: RecordDraft,
    spans: Spans,
    isStill: () => boolean = () => true,
  ): Promise<ReclaimReply> {
    let reply = await this.#reclaimOnce(id, own, spans, isStill)
    for (let round = 1; reply === null && round < MAX_RECLAIMS; round++)
      reply = await this.#reclaimOnce(id, own, spans, isStill)
    return reply ?? { kind: 'kept' }
  }

  /** Null: the record has changed meanwhile. */
  async #reclaimOnce(
    id: RecordId,
    own: RecordDraft,
    spans: Spans,
    isStill: () => boolean,
  ): Promise<ReclaimReply | null> {
    const put = await this.#answered(
      this.#register.put(id, encodeDraft(own), storedSpans(own, spans), 'again'),
      (reply): ReclaimReply | FoundRecord =>
        reply.done
          ? { kind: 'written' }
          : { kind: 'found', record: decodeRecord(reply.bytes), now: reply.now },
    )
    if (put.kind !== 'found') return put
    const { record, now } = put
    const decision = reclaimed(record, own)
    if (decision === 'keep' || !isStill()) return { kind: 'kept' }
    const split = decision === 'split' ? splitDraft(record, own) : null
    if (decision === 'split' && split === null) return { kind: 'split', own, found: record }
    const replaced = await (split === null
      ? this.replace(id, record.version, { ...own, fence: Math.max(own.fence, record.fence) }, spans)
      : this.replace(id, record.version, split, remainingSpans(record, now)))
    if (replaced === null || replaced.kind === 'refused') return null
    if (replaced.kind === 'unavailable' || replaced.kind === 'corrupt') return replaced
    return split === null ? { kind: 'written' } : { kind: 'split', own, found: record }
  }

  /** Continues if the record was gone or different from what was expected. */
  async #contest(
    id: RecordId,
    draft: RecordDraft,
    spans: Spans,
    condition: OwnIn,
    first: SettleReply | null,
  ): Promise<SettleReply> {
    let swapped = first
    const stored = storedSpans(draft, spans)
    // The store may have applied the bytes.
    const bytes = (): Buffer => encodeDraft(draft)
    for (let isOwn = false; ; swapped = await this.#swap(id, condition, bytes(), stored)) {
      const reply =
        swapped ??
        (await this.#answered(this.#register.put(id, bytes(), stored, 'again'), (put) =>
          written('recovered', put),
        ))
      if (reply.kind !== 'refused' || isOwn) return reply
      const { record, now } = reply
      let replaced: SettleReply | null
      if (draft.state === 'unknown' && record.state === 'unknown' && record.token.equals(draft.token)) {
        const still = stillUnknown(record, draft, now)
        replaced = await this.replace(id, record.version, still.draft, still.spans)
      } else if (isFromBefore(record, draft)) {
        replaced = await this.replace(id, record.version, draft, spans)
        if (replaced?.kind === 'written') return { ...replaced, kind: 'recovered' }
      } else {
        // A delayed write of this attempt, mostly its claim, may arrive between swap and put: then the swap succeeds after all.
        isOwn = condition.states.includes(record.state) && record.token.equals(draft.token)
        if (isOwn) continue
        return reply
      }
      // Otherwise the sweeper or a person was faster.
      if (replaced !== null && replaced.kind !== 'refused') return replaced
    }
  }

  /** Replaces the record at exactly this version: the decision of somebody other than its owner. Null: there is none. */
  replace(id: RecordId, version: number, draft: RecordDraft, spans: Spans): MaybePromise<SettleReply | null> {
    return this.#swap(id, { version }, encodeDraft(draft), storedSpans(draft, spans))
  }

  async get(id: RecordId): Promise<ReadReply> {
    return this.#answered(this.#register.get(id), ({ now, bytes }) => ({
      kind: 'read',
      now,
      record: bytes === null ? null : decodeRecord(bytes),
    }))
  }

  /** The prefix of an unreadable record. Null: there is none. */
  async prefix(id: RecordId): Promise<PrefixReply> {
    const reading = this.#register.stored?.(id) ?? this.#register.get(id)
    return this.#answered(reading, ({ now, bytes }) => ({
      kind: 'prefix',
      now,
      prefix: bytes === null ? null : prefixOf(bytes),
    }))
  }

  #swap(id: RecordId, condition: Condition, bytes: Buffer, spans: Spans): MaybePromise<SettleReply | null> {
    return this.#answered(this.#register.swap(id, condition, bytes, spans, false), (reply) =>
      written('written', reply),
    )
  }

  /** Applies `read` to the store's reply; errors that are not the store's are bugs and propagate. */
  #answered<Reply, Value>(
    reply: MaybePromise<Reply>,
    read: (reply: Reply) => Value,
  ): MaybePromise<Value | StoreTrouble> {
    const readable = (replied: Reply): Value | StoreTrouble => {
      try {
        return read(replied)
      } catch (error) {
        return this.#troubleOf(error)
      }
    }
    return reply instanceof Promise ? reply.then(readable, this.#troubleOf) : readable(reply)
  }

  readonly #troubleOf = (error: unknown): StoreTrouble => {
    if (error instanceof StoreUnavailable)
      return { kind: 'unavailable', full: error instanceof StoreFull, error }
    if (error instanceof SealedRecord) this.#onSealError(error.reason)
    if (error instanceof CorruptRecord) return { kind: 'corrupt', error }
    throw error
  }
}

/** @throws {StoreUnavailable} or {@link CorruptRecord}, as the reply says. */
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

function hasBody(draft: RecordDraft): draft is CompletedWithResponse {
  return draft.state === 'completed' && draft.result.kept
}

function written(kind: 'written' | 'recovered', reply: PutReply): SettleReply
function written(kind: 'written' | 'recovered', reply: SwapReply): SettleReply | null
function written(kind: 'written' | 'recovered', reply: SwapReply): SettleReply | null {
  const { now } = reply
  if (reply.done) return { kind, now, stamp: reply.stamp }
  return reply.bytes === null ? null : { kind: 'refused', now, record: decodeRecord(reply.bytes) }
}

/**
 * The outcome was written; or refused although no later attempt is known: an earlier write of it lost its reply, somebody else ended the
 * attempt, or the store reverted to before it.
 */
function isNewest(reply: SettleReply, draft: RecordDraft): boolean {
  if (reply.kind !== 'refused') return reply.kind === 'written' || reply.kind === 'recovered'
  const { record } = reply
  return isRecorded(record, draft) || (record.fence <= draft.fence && record.createdAt === draft.createdAt)
}

/** The attempt's own claim, even if recorded as lapsed before its owner learned of the claim: nobody else could have ended it. */
function recognise(record: IdempotencyRecord, draft: RecordDraft, now: Millis): Claimed | null {
  const isHeld = record.state === 'in_progress' || (record.state === 'unknown' && record.leaseExpired)
  if (!isHeld || !record.token.equals(draft.token)) return null
  const { version, fence, createdAt } = record
  return { kind: 'claimed', now, stamp: { version, fence, createdAt }, recognised: true }
}

const TOKEN_BYTES = 16
/** Drawn in blocks: one system call costs as much as twenty tokens (docs/internals/performance.md). */
const TOKENS_DRAWN = 256

/** Owners' tokens: 16 random bytes, different with every call. */
export function tokens(): () => Buffer {
  const drawn = Buffer.alloc(TOKENS_DRAWN * TOKEN_BYTES)
  let at = drawn.length
  return () => {
    if (at === drawn.length) {
      randomFillSync(drawn)
      at = 0
    }
    at += TOKEN_BYTES
    // A copy: the block is redrawn while its tokens are in use.
    return Buffer.from(drawn.subarray(at - TOKEN_BYTES, at))
  }
}
