import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import { endsAttempt, isUnresolved, mayRenew, meets, readStamps } from './codec.ts'
import { inOrder, pageOf, placeOf } from './cursor.ts'
import { type Bucket, drawFromBucket, fullAt } from './gcra.ts'
import { Heap, type Heaped } from './heap.ts'
import { noted, readNote } from './history.ts'
import {
  type Condition,
  type GetReply,
  type KeptNote,
  type Listing,
  type Note,
  type Page,
  type PutReply,
  type RateLimits,
  type RecordHistory,
  type Renewal,
  type Store,
  StoreFull,
  type StoreTraits,
  type SwapReply,
} from './register.ts'
import { prolongLease, SMALL_RECORD, stampCopy } from './stamps.ts'
import { Watchers } from './watchers.ts'

/** Beside the default `limits.buffered` of the same size, it keeps a process well within the 200 MB that it may take. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** What an entry costs beside its bytes: key, objects, heap slots. Measured roughly; it bounds the number of small records. */
const ENTRY_BYTES = 512
/** Likewise a string of a history. */
const LINE_BYTES = 32

interface Slot<Id = RecordId> extends Heaped {
  readonly id: Id
}
interface Entry {
  bytes: Buffer
  history: readonly string[]
  /** Of the records so far: the order in which the map gives them. */
  readonly seq: number
  readonly drop: Slot
  readonly due: Slot
}
interface KeptBucket {
  bucket: Bucket
  readonly full: Slot<string>
}

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
  /** Expired records were removed: found at the next operation, whatever it is. */
  readonly onPruned?: ((records: number) => void) | undefined
}

/** For development and tests: forgets everything with the process. */
export class MemoryStore implements Store {
  readonly name = 'memory'
  readonly history: RecordHistory = {
    append: async (id, notes) => this.#append(id, notes),
    read: async (id) => this.#read(id),
  }
  readonly limits: RateLimits = {
    take: async (bucket, rate, units) => this.#take(bucket, rate, units),
  }
  readonly #clock: () => Millis
  readonly #maxBytes: number
  readonly #onPruned: MemoryOptions['onPruned']
  readonly #entries = new Map<RecordId, Entry>()
  readonly #byDrop = new Heap<Slot>()
  readonly #byDue = new Heap<Slot>()
  readonly #buckets = new Map<string, KeptBucket>()
  readonly #byFull = new Heap<Slot<string>>()
  readonly #watchers = new Watchers()
  #used = 0
  #seq = 0

  constructor({ clock, maxBytes, onPruned }: MemoryOptions) {
    this.#clock = clock
    this.#maxBytes = maxBytes
    this.#onPruned = onPruned
  }

  async put(id: RecordId, bytes: Buffer, spans: Spans): Promise<PutReply> {
    const now = this.#now()
    const entry = this.#entries.get(id)
    if (entry !== undefined) return { done: false, now, bytes: Buffer.from(entry.bytes) }
    this.#makeSure(bytes.length + ENTRY_BYTES)
    const written = stampCopy(bytes, null, now, spans, false)
    const slot = (): Slot => ({ id, key: 0, at: -1 })
    const fresh = { bytes: written.bytes, history: [], seq: ++this.#seq, drop: slot(), due: slot() }
    this.#entries.set(id, fresh)
    this.#used += written.bytes.length + ENTRY_BYTES
    this.#file(fresh)
    if (endsAttempt(bytes)) this.#watchers.tell(id)
    return { done: true, now, stamp: written.stamp }
  }

  async swap(
    id: RecordId,
    condition: Condition,
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): Promise<SwapReply> {
    const now = this.#now()
    const entry = this.#entries.get(id)
    if (entry === undefined) return { done: false, now, bytes: null }
    if (!meets(entry.bytes, condition)) return { done: false, now, bytes: Buffer.from(entry.bytes) }
    const growth = bytes.length - entry.bytes.length
    if (growth > 0 && bytes.length > SMALL_RECORD) this.#makeSure(growth)
    const written = stampCopy(bytes, entry.bytes, now, spans, nextFence)
    entry.bytes = written.bytes
    this.#used += growth
    this.#file(entry)
    if (endsAttempt(bytes)) this.#watchers.tell(id)
    return { done: true, now, stamp: written.stamp }
  }

  async get(id: RecordId): Promise<GetReply> {
    const now = this.#now()
    const entry = this.#entries.get(id)
    return { now, bytes: entry === undefined ? null : Buffer.from(entry.bytes) }
  }

  async renew(items: readonly Renewal[]): Promise<boolean[]> {
    const now = this.#now()
    return items.map(({ id, token, ...spans }) => {
      const entry = this.#entries.get(id)
      if (entry === undefined || !mayRenew(entry.bytes, token)) return false
      entry.bytes = prolongLease(entry.bytes, now, spans).bytes
      this.#file(entry)
      return true
    })
  }

  async due(limit: number): Promise<RecordId[]> {
    const now = this.#now()
    const found: Slot[] = []
    for (let slot = this.#byDue.peek(); slot !== undefined && slot.key <= now; slot = this.#byDue.peek()) {
      if (found.length === limit) break
      this.#byDue.remove(slot)
      found.push(slot)
    }
    for (const slot of found) this.#byDue.add(slot)
    return found.map((slot) => slot.id)
  }

  async remove(id: RecordId, version: number): Promise<boolean> {
    this.#now()
    const entry = this.#entries.get(id)
    if (entry === undefined || !meets(entry.bytes, { version })) return false
    this.#forget(id, entry)
    this.#watchers.tell(id)
    return true
  }

  async list(which: Listing, cursor: string | null, limit: number): Promise<Page> {
    this.#now()
    if (which === 'unresolved') {
      const from = placeOf(cursor)
      const places = this.#byDue.all.map(({ key, id }) => ({ due: key, id }))
      const after = places.filter((place) => inOrder(place, from) > 0).sort(inOrder)
      return pageOf(after.slice(0, limit), limit)
    }
    if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
    const beginning = which === 'all' ? '' : which.beginning
    const ids: RecordId[] = []
    for (const [id, { seq }] of this.#entries) {
      if (seq <= Number(cursor) || !id.startsWith(beginning)) continue
      if (ids.push(id) === limit) return { ids, next: String(seq) }
    }
    return { ids, next: null }
  }

  /** Counted like records; where there is no room, nothing is noted. */
  #append(id: RecordId, notes: readonly Note[]): boolean {
    const now = this.#now()
    const entry = this.#entries.get(id)
    if (entry === undefined) return false
    const history = noted(entry.history, notes, now)
    const growth = lengthOf(history) - lengthOf(entry.history)
    if (growth > 0) this.#makeSure(growth)
    entry.history = history
    this.#used += growth
    return true
  }

  #read(id: RecordId): KeptNote[] {
    this.#now()
    return (this.#entries.get(id)?.history ?? []).map(readNote)
  }

  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    return this.#watchers.add(id, changed)
  }

  /** Buckets count among what the store may hold; one that is full again is gone. */
  #take(id: string, rate: Rate, units: 1 | -1): Millis {
    const now = this.#now()
    const kept = this.#buckets.get(id)
    const { wait, bucket } = drawFromBucket(kept?.bucket ?? null, now, rate, units)
    if (bucket === null) {
      if (kept !== undefined) this.#release(kept)
    } else if (kept === undefined) {
      this.#makeSure(ENTRY_BYTES)
      const full = { id, key: fullAt(bucket), at: -1 }
      this.#buckets.set(id, { bucket, full })
      this.#byFull.add(full)
      this.#used += ENTRY_BYTES
    } else {
      kept.bucket = bucket
      this.#byFull.remove(kept.full)
      kept.full.key = fullAt(bucket)
      this.#byFull.add(kept.full)
    }
    return wait
  }

  async ping(): Promise<Millis> {
    return this.#clock()
  }

  async traits(): Promise<StoreTraits> {
    return {
      durable: false,
      evicts: false,
      findings: [
        'The memory store forgets every record when the process ends, and no other replica sees them.',
      ],
    }
  }

  async close(): Promise<void> {}

  /** The time; what has expired by then is gone. */
  #now(): Millis {
    const now = this.#clock()
    let pruned = 0
    for (let slot = this.#byDrop.peek(); slot !== undefined && slot.key <= now; slot = this.#byDrop.peek()) {
      this.#forget(slot.id, this.#entries.get(slot.id) as Entry)
      pruned++
    }
    if (pruned > 0) this.#onPruned?.(pruned)
    for (let slot = this.#byFull.peek(); slot !== undefined && slot.key <= now; slot = this.#byFull.peek())
      this.#release(this.#buckets.get(slot.id) as KeptBucket)
    return now
  }

  /** @throws {StoreFull} where there is no room for so many bytes more. */
  #makeSure(growth: number): void {
    if (this.#used + growth > this.#maxBytes)
      throw new StoreFull(`the memory store is full (${this.#used} of ${this.#maxBytes} bytes)`)
  }

  #release({ full }: KeptBucket): void {
    this.#byFull.remove(full)
    this.#buckets.delete(full.id)
    this.#used -= ENTRY_BYTES
  }

  #file(entry: Entry): void {
    const { due, dropAt } = readStamps(entry.bytes)
    this.#byDrop.remove(entry.drop)
    entry.drop.key = dropAt
    this.#byDrop.add(entry.drop)
    this.#byDue.remove(entry.due)
    entry.due.key = due
    if (isUnresolved(entry.bytes)) this.#byDue.add(entry.due)
  }

  #forget(id: RecordId, entry: Entry): void {
    this.#byDrop.remove(entry.drop)
    this.#byDue.remove(entry.due)
    this.#entries.delete(id)
    this.#used -= entry.bytes.length + ENTRY_BYTES + lengthOf(entry.history)
  }
}

function lengthOf(lines: readonly string[]): number {
  return lines.reduce((sum, line) => sum + line.length + LINE_BYTES, 0)
}
