import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans, State } from '../core/record.ts'

/**
 * The port of a store: a compare-and-set register with expiry. It holds bytes of {@link file://./codec.ts}, of which it
 * reads and stamps the fixed prefix only; the state machine lives in core, once.
 *
 * Every operation is atomic and takes the store's own time, which it answers as `now`. A record whose `dropAt` has come
 * does not exist. States `in_progress` and `unknown` are filed in an index by their `due` instant, in the same step.
 *
 * Errors: {@link StoreUnavailable} where the store cannot be asked or does not answer in time, {@link StoreFull} where it has
 * no room (nothing unexpired is ever evicted).
 */
export interface Register {
  /** Metric label: `memory`, `sqlite`, `redis`. */
  readonly name: string
  /**
   * Writes `bytes` where nothing is; else gives back what is there. Stamps: version and updatedAt = now, fence and
   * createdAt = now where they are 0, due = now + dueIn, dropAt = now + dropIn.
   */
  put(id: RecordId, bytes: Buffer, spans: Spans): Promise<PutReply>
  /**
   * Replaces the record where `condition` holds. Stamps: version + 1, updatedAt = now, createdAt kept, fence kept or
   * + 1 (`nextFence`) and never below that of `bytes`, due and dropAt as in {@link put}.
   */
  swap(
    id: RecordId,
    condition: Condition,
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): Promise<SwapReply>
  get(id: RecordId): Promise<GetReply>
  /**
   * Prolongs leases where the record is `in_progress` under that token, or `unknown` under it for no other reason than that its
   * lease expired: then it is `in_progress` again. Stamps: due = now + dueIn, dropAt at least now + dropIn, version + 1. One
   * answer per item.
   */
  renew(items: readonly Renewal[]): Promise<boolean[]>
  /** Ids of unresolved records whose `due` instant has come, oldest first within what one step of the index gives. */
  due(limit: number): Promise<RecordId[]>
  /** Removes the record at exactly this version, and its history. False: another version, or none. */
  remove(id: RecordId, version: number): Promise<boolean>
  /**
   * Ids a page at a time, about `limit` of them: of `all` records in no order, where one that is there from the first page
   * to the last is on some page, likewise of those whose id has that `beginning`; or of the `unresolved` ones, oldest `due`
   * instant first. A store may look at all of its records to find a few: pages may be empty and have a next one. Some ids may come twice, and some
   * records may have gone. `cursor`: null, then what the page before gave.
   * @throws {RangeError} for a cursor that no page gave.
   */
  list(which: Listing, cursor: string | null, limit: number): Promise<Page>
  /**
   * Adds to the history that lies beside the record and goes with it, at most so long as {@link file://./noting.ts} says.
   * False: there is no such record, and nothing was added.
   */
  note(id: RecordId, notes: readonly Note[]): Promise<boolean>
  /** The record's history, oldest first; empty where there is no record. */
  notes(id: RecordId): Promise<KeptNote[]>
  /**
   * Calls `changed` after writes of the record that end an attempt, by whichever replica, until the function that it
   * resolves to is called. Resolved: from now on nothing is missed, where the store tells at all; some tell of nothing, and
   * any may lose a message, so a look now and then stays necessary.
   */
  watch(id: RecordId, changed: () => void): Promise<() => void>
  /**
   * Takes one unit of `rate` from a bucket (1) or gives one back (-1): `rate.count` at once, then evenly over `rate.per`
   * (GCRA). Answers how long until the next unit is free; 0: taken, or given back. `bucket` has the form of a record id.
   */
  throttle(bucket: string, rate: Rate, units: 1 | -1): Promise<Millis>
  /** One cheap round trip. Answers the store's time; throws as all operations do. */
  ping(): Promise<Millis>
  /** What the store promises, as far as it tells (contract §9). Asked at start. */
  traits(): Promise<StoreTraits>
  close(): Promise<void>
}

export type Condition =
  | { readonly version: number }
  | { readonly token: Buffer; readonly states: readonly State[] }

export interface Stamp {
  readonly version: number
  readonly fence: number
  readonly createdAt: Millis
}
export type PutReply =
  | { readonly done: true; readonly now: Millis; readonly stamp: Stamp }
  | { readonly done: false; readonly now: Millis; readonly bytes: Buffer }
export type SwapReply =
  | { readonly done: true; readonly now: Millis; readonly stamp: Stamp }
  | { readonly done: false; readonly now: Millis; readonly bytes: Buffer | null }
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
/** All of them, the unresolved ones, or those whose id begins so (two characters at least). */
export type Listing = 'all' | 'unresolved' | { readonly beginning: string }
export interface Page {
  readonly ids: readonly RecordId[]
  /** Null: this was the last one. */
  readonly next: string | null
}
/** What happened to a record, `count` times in a row. Times are told by how long ago they were, by any clock. */
export interface Note {
  /** Without blanks. Where the newest note has the same one, both become one. */
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
  /** Survives a restart of the store. `null`: it does not tell. */
  readonly durable: boolean | null
  /** May drop unexpired records when memory runs out. `null`: it does not tell. */
  readonly evicts: boolean | null
  /** For people: what was found, one sentence each. */
  readonly findings: readonly string[]
}

/** The store cannot be asked, or did not answer in time. */
export class StoreUnavailable extends Error {
  override readonly name: string = 'StoreUnavailable'
  /** True where the command may have been applied although no answer came. */
  readonly maybeApplied: boolean
  constructor(message: string, maybeApplied: boolean, options?: ErrorOptions) {
    super(message, options)
    this.maybeApplied = maybeApplied
  }
}

/** The store answers, and refuses to write (full, read-only, loading). Nothing was applied. */
export class StoreFull extends StoreUnavailable {
  override readonly name = 'StoreFull'
  constructor(message: string, options?: ErrorOptions) {
    super(message, false, options)
  }
}

/** A stored record that this version cannot read: never executed, never overwritten (contract §2). */
export class CorruptRecord extends Error {
  override readonly name = 'CorruptRecord'
}
