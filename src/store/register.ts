import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans, State } from '../core/record.ts'
import type { Soon } from '../runtime/scheduling.ts'

/**
 * A compare-and-set register with expiry. It holds the bytes of {@link file://./codec.ts}, of which it reads and stamps only
 * the fixed prefix; the state machine lives in core, once.
 *
 * Every operation is atomic and runs on the store's own clock, which it returns as `now`. A record whose `dropAt` has come
 * does not exist. Records in state `in_progress` or `unknown` are indexed by `due` in the same step, and so are responses that end before
 * their records, behind all of these.
 *
 * Bytes that an operation is given are the store's from then on: it may take their memory, so that they are empty afterwards.
 *
 * Errors: {@link StoreUnavailable} if the store cannot be reached or does not answer in time, {@link StoreFull} if it has
 * no room (nothing unexpired is ever evicted), {@link InGrace} where nothing may be handed out yet. They come as rejections, also where the answer would come at once.
 */
export interface Register {
  /** Metric label: `memory`, `sqlite`, `redis`, `postgres`, `dynamodb`. */
  readonly name: string
  /**
   * Writes `bytes` if the id is free, otherwise returns the record that is there. Stamps: version and updatedAt = now, fence
   * and createdAt = now if they are 0, due = now + dueIn, dropAt = now + dropIn. In a grace `entry` decides;
   * left out, it is a `claim`.
   */
  put(id: RecordId, bytes: Buffer, spans: Spans, entry?: Entry): Soon<PutReply>
  /**
   * Replaces the record if `condition` holds. Stamps: version + 1, updatedAt = now, createdAt kept, fence kept or + 1
   * (`nextFence`) and never below that of `bytes`, due and dropAt as in {@link put}. `nextFence` hands the record out for
   * execution, which a grace refuses.
   */
  swap(id: RecordId, condition: Condition, bytes: Buffer, spans: Spans, nextFence: boolean): Soon<SwapReply>
  get(id: RecordId): Promise<GetReply>
  /** As {@link get}, but not opened, and perhaps without its end. Absent: {@link get} says as much. */
  stored?(id: RecordId): Promise<GetReply>
  /**
   * Extends leases: of records that are `in_progress` under that token, and of those that are `unknown` under it only because
   * the lease expired, which become `in_progress` again. Stamps: due = now + dueIn, dropAt at least now + dropIn,
   * version + 1. One answer per item.
   */
  renew(items: readonly Renewal[]): Promise<boolean[]>
  /**
   * Ids of records whose `due` has come, oldest first within one step of the index: of unresolved ones; or, as `bodies`, of completed ones
   * whose response ends before they do (`indexPlace` of {@link file://./codec.ts}).
   */
  due(limit: number, of?: Due): Promise<RecordId[]>
  /**
   * Removes the record at exactly this version ({@link file://./prefix.ts}), with its history, although this release may be
   * unable to read it. False: another version, or none.
   */
  remove(id: RecordId, version: number): Promise<boolean>
  /**
   * Pages of about `limit` ids: of `all` records or those whose id starts with `beginning`, unordered, each record that
   * exists throughout appearing at least once; or of the `unresolved` ones, earliest `due` first. Pages may be empty and
   * still have a next one; ids may repeat, and records may be gone. `cursor`: null, then `next` of the page before.
   * @throws {RangeError} for a cursor that no page returned.
   */
  list(which: Listing, cursor: string | null, limit: number): Promise<Page>
  /** One cheap round trip: the store's time. Throws as all operations do. */
  ping(): Promise<Millis>
}

/** What happened to a record, stored beside it and gone with it. Bounded as {@link file://./history.ts} says. */
export interface RecordHistory {
  /** False: there is no such record, and nothing was added. */
  append(id: RecordId, notes: readonly Note[]): Promise<boolean>
  /** Oldest first; empty if there is no record. */
  read(id: RecordId): Promise<KeptNote[]>
}

/** Token buckets (GCRA): `rate.count` at once, then evenly over `rate.per`. A bucket's name has the form of a record id. */
export interface RateLimits {
  /** Takes one unit, or gives one back (-1). Returns 0, or how long until one is free; then nothing was taken. */
  take(bucket: string, rate: Rate, units: 1 | -1): Promise<Millis>
}

export interface Watching {
  /**
   * Calls `changed` after each write that ends an attempt of the record, by any replica, until the returned function is
   * called. From when it resolves no message is skipped, but some stores send none and any may lose one: poll as well.
   * Never rejects.
   */
  watch(id: RecordId, changed: () => void): Promise<() => void>
}

/** What an adapter provides. */
export interface Store extends Register, Watching {
  readonly history: RecordHistory
  readonly limits: RateLimits
  /** What the store promises, as far as it tells (contract §9). */
  traits(): Promise<StoreTraits>
  close(): Promise<void>
}

/**
 * What a put is in the grace after a failover (contract §9). `claim`: the key may have been claimed and lost, so it is refused; `fresh`:
 * the key was made after the failover; `again`: the record was there before, or may have been.
 */
export type Entry = 'claim' | 'fresh' | 'again'

export type Condition =
  | { readonly version: number }
  | { readonly token: Buffer; readonly states: readonly State[] }

export interface Stamp {
  readonly version: number
  readonly fence: number
  readonly createdAt: Millis
}
/** Written and stamped, or what was found instead. */
export type WriteReply<Found> =
  | { readonly done: true; readonly now: Millis; readonly stamp: Stamp }
  | { readonly done: false; readonly now: Millis; readonly bytes: Found }
export type PutReply = WriteReply<Buffer>
export type SwapReply = WriteReply<Buffer | null>
export interface GetReply {
  readonly now: Millis
  readonly bytes: Buffer | null
}
export interface Renewal {
  readonly id: RecordId
  readonly token: Buffer
  readonly dueIn: Millis
  readonly dropIn: Millis
}
export type Due = 'unresolved' | 'bodies'
/** `beginning`: of the id, at least two characters. */
export type Listing = 'all' | 'unresolved' | { readonly beginning: string }
export interface Page {
  readonly ids: readonly RecordId[]
  /** Null: this is the last page. */
  readonly next: string | null
}
/** What the first bytes of a record say, of any schema: the rest may be unreadable, and they may be wrong. */
export interface Prefix {
  readonly version: number
  /** Null: they are those of no record. */
  readonly state: State | null
  /** Of an attempt in progress. */
  readonly leaseUntil: Millis | null
}
/** The store is another than before, or has lost its data. */
export interface NewEpoch {
  /** How long nothing is handed out yet. */
  readonly left: Millis
  /** Whether the record may be lost, or be what it was before. */
  readonly concerns: (id: RecordId) => boolean
}
/** What happened to a record, `count` times in a row. Times are given as how long ago, so that any clock will do. */
export interface Note {
  /** Without blanks. If the newest note has the same tag, the two become one. */
  readonly tag: string
  readonly count: number
  readonly firstAgo: Millis
  readonly lastAgo: Millis
  /** One line. */
  readonly text: string
}
export interface KeptNote extends Pick<Note, 'tag' | 'count' | 'text'> {
  readonly first: Millis
  readonly last: Millis
}
export interface StoreTraits {
  /** Records survive a restart of the store. Null: unknown. */
  readonly durable: boolean | null
  /** The store may drop unexpired records when memory runs out. Null: unknown. */
  readonly evicts: boolean | null
  /** For people, one sentence: how the loss of one server takes acknowledged claims along, where no grace covers it. Null: it does not. */
  readonly forgets: string | null
  /** It says which process it is, so a failover is noticed, and a grace can begin. */
  readonly hasIdentity: boolean
  /** For people, one sentence each: what else is wrong. */
  readonly findings: readonly string[]
  /** For people, one sentence each: why some or all keys cannot be claimed. No risk, which could be accepted. */
  readonly refusals: readonly string[]
  /** For people: which servers share the work, and how, where there are several. */
  readonly topology?: string
  /** For people: what claims wait for, and how many replicas there are. */
  readonly replication?: string
  /** For people: how much room the records take, and how much there is. */
  readonly room?: string
}

/** The store cannot be reached, or did not answer in time. */
export class StoreUnavailable extends Error {
  override readonly name: string = 'StoreUnavailable'
  /** The operation may have been applied although no answer came. */
  readonly maybeApplied: boolean
  constructor(message: string, maybeApplied: boolean, options?: ErrorOptions) {
    super(message, options)
    this.maybeApplied = maybeApplied
  }
}

/** Part of the store answers: whoever asks for other records, or only reads, is served. */
export class PartlyUnavailable extends StoreUnavailable {}

/** The claim is in the store, but not where `store.wait` wants it: it must not be executed, and is withdrawn. */
export class Unreplicated extends StoreUnavailable {
  override readonly name = 'Unreplicated'
  constructor(message: string) {
    super(message, true)
  }
}

/** The store answers but refuses to write (full, read-only). Nothing was applied. */
export class StoreFull extends StoreUnavailable {
  override readonly name = 'StoreFull'
  constructor(message: string, options?: ErrorOptions) {
    super(message, false, options)
  }
}

/** The store answers, and does not do this now. Nothing was applied. */
export abstract class Declined extends StoreUnavailable {
  constructor(message: string) {
    super(message, false)
  }
}

/** Somebody else has the record locked. */
export class RecordLocked extends Declined {
  override readonly name = 'RecordLocked'
}

/** The store may have lost claims a moment ago: until their owners have had the time to write them again it hands nothing out. */
export class InGrace extends Declined {
  override readonly name = 'InGrace'
  /** The store's clock. */
  readonly now: Millis
  /** When the store was first seen as what it is since. */
  readonly since: Millis
  readonly left: Millis
  constructor(now: Millis, since: Millis, left: Millis) {
    super(`the store may have lost claims: nothing new is claimed for another ${left} ms (store.grace)`)
    this.now = now
    this.since = since
    this.left = left
  }
}

/** This replica may not claim now: which phase of a migration the others are in is not known. Nothing is executed on it. */
export class OutOfPhase extends StoreUnavailable {
  override readonly name = 'OutOfPhase'
}

/** A stored record that this version cannot read: never executed, never overwritten (contract §2). */
export class CorruptRecord extends Error {
  override readonly name = 'CorruptRecord'
}

/** `unknown_key`: it was sealed with a key that this process does not have; `altered`: it is not what was sealed. */
export const SEAL_ERRORS = ['unknown_key', 'altered'] as const
export type SealError = (typeof SEAL_ERRORS)[number]

/** A sealed record that does not open. */
export class SealedRecord extends CorruptRecord {
  readonly reason: SealError
  constructor(reason: SealError, message: string) {
    super(message)
    this.reason = reason
  }
}

/**
 * The id after which a listing in the order of ids continues; '': at the first.
 * @throws {RangeError} if the cursor is not an id.
 */
export function idOfCursor(cursor: string | null): string {
  if (cursor !== null && !/^[\w-]{1,64}$/.test(cursor)) throw new RangeError('not a cursor of this store')
  return cursor ?? ''
}

/** Where a record stands among the unresolved ones, which are ordered by `due`, then by id. */
export interface Place {
  readonly due: Millis
  readonly id: string
}

/** @throws {RangeError} for a cursor that {@link pageOf} did not make. */
export function placeOf(cursor: string | null): Place {
  if (cursor === null) return { due: 0, id: '' }
  const [, due, id] = /^(\d{1,16}) ([\w-]{1,64})$/.exec(cursor) ?? []
  if (due === undefined || id === undefined) throw new RangeError('not a cursor of this store')
  return { due: Number(due), id }
}

export function inOrder(a: Place, b: Place): number {
  return a.due - b.due || Number(a.id > b.id) - Number(a.id < b.id)
}

/** The page of `found`: the first `limit` places, in order. */
export function pageOf(found: readonly Place[], limit: number): Page {
  const last = found[limit - 1]
  return {
    ids: found.map(({ id }) => id as RecordId),
    next: last === undefined ? null : `${last.due} ${last.id}`,
  }
}
