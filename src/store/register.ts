import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans, State } from '../core/record.ts'
import type { MaybePromise } from '../runtime/scheduling.ts'

/**
 * A compare-and-set register with expiry. It holds the bytes of {@link file://./codec.ts}, of which it reads and stamps only
 * the fixed prefix; the state machine lives in core, once.
 *
 * Every operation is atomic and runs on the store's own clock, which it returns as `now`. A record whose `dropAt` has come
 * does not exist. Records in state `in_progress` or `unknown` are indexed by `due` in the same step, and so are responses that end before
 * their records, behind all of these.
 *
 * The store takes ownership of all bytes passed to an operation: it may transfer their memory, which empties them.
 *
 * Errors: {@link StoreUnavailable} if the store cannot be reached or does not answer in time, {@link StoreFull} if it has
 * no room (nothing unexpired is ever evicted), {@link InGrace} while claims are held back. They are rejections, never thrown synchronously.
 */
export interface Register {
  /** Metric label: `memory`, `sqlite`, `redis`, `postgres`, `dynamodb`. */
  readonly name: string
  /**
   * Writes `bytes` if the id is free, otherwise returns the record that is there. Stamps: version and updatedAt = now, fence and createdAt
   * = now if they are 0, due = now + dueIn, dropAt = now + dropIn. In a grace `entry` decides; the default is `claim`.
   */
  put(id: RecordId, bytes: Buffer, spans: Spans, entry?: PutKind): MaybePromise<PutReply>
  /**
   * Replaces the record if `condition` holds. Stamps: version + 1, updatedAt = now, createdAt kept, fence kept or + 1
   * (`nextFence`) and never below that of `bytes`, due and dropAt as in {@link put}. `nextFence` hands the record out for
   * execution, which a grace refuses.
   */
  swap(
    id: RecordId,
    condition: Condition,
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): MaybePromise<SwapReply>
  get(id: RecordId): Promise<GetReply>
  /** Like {@link get}, but sealed records are not opened, and the end may be missing. If absent, use {@link get}. */
  stored?(id: RecordId): Promise<GetReply>
  /**
   * Extends leases: of records that are `in_progress` under that token, and of those that are `unknown` under it only because
   * the lease expired, which become `in_progress` again. Stamps: due = now + dueIn, dropAt at least now + dropIn,
   * version + 1. One answer per item.
   */
  renew(items: readonly Renewal[]): Promise<boolean[]>
  /**
   * Ids of records whose `due` has come, oldest first within one step of the index: unresolved ones or, as `bodies`, completed ones
   * whose response ends before they do (`indexPlace` of {@link file://./codec.ts}).
   */
  due(limit: number, of?: DueKind): Promise<RecordId[]>
  /**
   * Removes the record at exactly this version ({@link file://./prefix.ts}), with its history, although this release may be
   * unable to read it. False: another version, or none.
   */
  remove(id: RecordId, version: number): Promise<boolean>
  /**
   * Pages of about `limit` ids: of `all` records or those whose id starts with `beginning`, unordered, with each record that
   * exists throughout at least once; or of the `unresolved` ones, earliest `due` first. A page may be empty and still have a
   * next one; ids may repeat, and records may be gone. `cursor`: null, then `next` of the previous page.
   * @throws {RangeError} for a cursor that no page returned.
   */
  list(which: Listing, cursor: string | null, limit: number): Promise<Page>
  /** One cheap round trip: the store's time. Throws as all operations do. */
  ping(): Promise<Millis>
  /** The time of the other store during a migration: some instants in records may be by its clock. */
  readonly pingOther?: () => Promise<Millis>
}

/** A record's history, stored beside it and removed with it. {@link file://./side-ports.ts} bounds it. */
export interface RecordHistory {
  /** False: no such record; nothing was added. */
  append(id: RecordId, notes: readonly Note[]): Promise<boolean>
  /** Oldest first; empty if there is no record. */
  read(id: RecordId): Promise<KeptNote[]>
}

/** Token buckets (GCRA): `rate.count` at once, then evenly over `rate.per`. A bucket's name looks like a record id. */
export interface RateLimits {
  /** Takes one unit, or returns one (-1). Resolves to 0, or to the time until a unit is free; then nothing was taken. */
  take(bucket: string, rate: Rate, units: 1 | -1): Promise<Millis>
}

export interface Watching {
  /**
   * Calls `changed` after each write, by any replica, that ends an attempt of the record, until the returned function is
   * called. Covers all writes after it resolves, but some stores send no messages and any may lose one: poll as well.
   * Never rejects.
   */
  watch(id: RecordId, changed: () => void): Promise<() => void>
}

/** What an adapter provides. */
export interface Store extends Register, Watching {
  readonly history: RecordHistory
  readonly limits: RateLimits
  /** What the store promises, as far as it reports it (contract §9). */
  traits(): Promise<StoreTraits>
  close(): Promise<void>
}

/** Whether `strict` routes may rely on a store: it keeps unexpired records, and says so (contract §9). */
export type StoreFitness = 'fit' | 'unfit' | 'not known yet'

/**
 * The kind of a put, for the grace after a failover (contract §9). `claim`: the key may have been claimed and lost, so it is refused;
 * `fresh`: the key was created after the failover; `again`: the record existed before, or may have.
 */
export type PutKind = 'claim' | 'fresh' | 'again'

export type Condition =
  | { readonly version: number }
  | { readonly token: Buffer; readonly states: readonly State[] }

export interface Stamp {
  readonly version: number
  readonly fence: number
  readonly createdAt: Millis
}
/** Written and stamped, or the existing record. */
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
export type DueKind = 'unresolved' | 'bodies'
/** `beginning`: of the id, at least two characters. */
export type Listing = 'all' | 'unresolved' | { readonly beginning: string }
export interface Page {
  readonly ids: readonly RecordId[]
  /** Null: this is the last page. */
  readonly next: string | null
}
/** The first bytes of a record of any schema: the rest may be unreadable, and these may be wrong. */
export interface Prefix {
  readonly version: number
  /** Null: not a record. */
  readonly state: State | null
  /** Only for an attempt in progress. */
  readonly leaseUntil: Millis | null
}
/** The store was replaced, or has lost its data. */
export interface NewEpoch {
  /** How much longer claims are held back. */
  readonly left: Millis
  /** Whether the record may be lost or outdated. */
  readonly concerns: (id: RecordId) => boolean
}
/** An event of a record, `count` times in a row. Times are ages, so that any clock will do. */
export interface Note {
  /** Without spaces. If the newest note has the same tag, the two become one. */
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
  /** For people, one sentence: how losing one server loses acknowledged claims that no grace covers. Null: it does not. */
  readonly forgets: string | null
  /** It identifies its process, so that the proxy notices a failover and a grace can begin. */
  readonly hasIdentity: boolean
  /** For people, one sentence each: what else is wrong. */
  readonly findings: readonly string[]
  /** For people, one sentence each: why some or all keys cannot be claimed. Unlike a risk, it cannot be accepted. */
  readonly refusals: readonly string[]
  /** For people: how several servers share the work. */
  readonly topology?: string
  /** For people: which replicas claims wait for, and how many there are. */
  readonly replication?: string
  /** For people: how much room is used, and how much there is. */
  readonly room?: string
}

/** The traits of a store that keeps everything it acknowledges. */
export const SOUND: StoreTraits = {
  durable: true,
  evicts: false,
  forgets: null,
  hasIdentity: false,
  findings: [],
  refusals: [],
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

/** Part of the store answers: operations on other records, or reads, still succeed. */
export class PartlyUnavailable extends StoreUnavailable {}

/** The claim is in the store but does not satisfy `store.wait`: it must not be executed, and is withdrawn. */
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

/** The store answers but declines for now. Nothing was applied. */
export abstract class Declined extends StoreUnavailable {
  constructor(message: string) {
    super(message, false)
  }
}

/** Another transaction has the record locked. */
export class RecordLocked extends Declined {
  override readonly name = 'RecordLocked'
}

/** The store may just have lost claims: it grants none until their owners have had time to rewrite them. */
export class InGrace extends Declined {
  override readonly name = 'InGrace'
  /** The store's clock. */
  readonly now: Millis
  /** When its present server was first seen. */
  readonly since: Millis
  readonly left: Millis
  constructor(now: Millis, since: Millis, left: Millis) {
    super(`the store may have lost claims: nothing new is claimed for another ${left} ms (store.grace)`)
    this.now = now
    this.since = since
    this.left = left
  }
}

/** This replica may not claim now: others decide in another store, or identify records differently. It executes nothing. */
export class OutOfPhase extends StoreUnavailable {
  override readonly name = 'OutOfPhase'
}

/** A stored record that this version cannot read: never executed, never overwritten (contract §2). */
export class CorruptRecord extends Error {
  override readonly name = 'CorruptRecord'
}

/** `unknown_key`: sealed with a key that this process does not have; `altered`: changed since it was sealed. */
export const SEAL_ERRORS = ['unknown_key', 'altered'] as const
export type SealError = (typeof SEAL_ERRORS)[number]

/** A sealed record that cannot be opened. */
export class SealedRecord extends CorruptRecord {
  readonly reason: SealError
  constructor(reason: SealError, message: string) {
    super(message)
    this.reason = reason
  }
}

/** For work that is best effort, or tried again. */
export function unlessBug(error: unknown): void {
  if (!(error instanceof StoreUnavailable || error instanceof CorruptRecord)) throw error
}

/**
 * The id after which a listing by id continues; '': from the start.
 * @throws {RangeError} if the cursor is not an id.
 */
export function idOfCursor(cursor: string | null): string {
  if (cursor === null) return ''
  if (!/^[\w-]{1,64}$/.test(cursor)) throw new RangeError('not a cursor of this store')
  return cursor
}

/** A record's position among unresolved records, ordered by `due`, then by id. */
export interface DuePosition {
  readonly due: Millis
  readonly id: string
}

/** Few due responses may all be in one part of an index. */
const FEWEST_OF_EACH = 8

/**
 * How many due responses to ask each of the `parts` of an index for, to find `limit`: there may be many more, evenly spread, and some stores
 * charge for each.
 */
export function responsesOfEach(limit: number, parts: number): number {
  return Math.min(limit, FEWEST_OF_EACH + Math.ceil((2 * limit) / parts))
}

/** @throws {RangeError} for a cursor that {@link pageOf} did not make. */
export function parseCursor(cursor: string | null): DuePosition {
  if (cursor === null) return { due: 0, id: '' }
  const found = /^(\d{1,16}) ([\w-]{1,64})$/.exec(cursor)
  if (found === null) throw new RangeError('not a cursor of this store')
  return { due: Number(found[1]), id: found[2] as string }
}

export function inOrder(a: DuePosition, b: DuePosition): number {
  return a.due - b.due || Number(a.id > b.id) - Number(a.id < b.id)
}

/** The page of `found`: the first `limit` places, in order. */
export function pageOf(found: readonly DuePosition[], limit: number): Page {
  const last = found[limit - 1]
  return {
    ids: found.map(({ id }) => id as RecordId),
    next: last === undefined ? null : `${last.due} ${last.id}`,
  }
}
