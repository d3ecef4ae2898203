import type { Millis, RecordId } from '../core/record.ts'
import {
  BODIES_FROM,
  endsAttempt,
  indexPlace,
  mayRenew,
  meets,
  nextStamps,
  placesDue,
  prolongLease,
  readStamps,
  SMALL_RECORD,
  type Stamps,
  stamp,
} from './record/codec.ts'
import { versionOf } from './record/prefix.ts'
import { inOrder, pageOf, parseCursor, SOUND, type Store, StoreFull } from './register.ts'
import { type Bucket, drawFromBucket, fullAt, noted, readNote, Watchers } from './side-ports.ts'

/** Plus as much garbage and the default `limits.buffered`, a process stays within 300 MB. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** Overhead of an entry: id, objects, timers. Roughly measured; it limits the number of small records. */
const ENTRY_BYTES = 512
const LOST = 'The memory store forgets every record when the process ends, and no other replica sees them.'
/** Overhead of a line of history. */
const LINE_BYTES = 32
/** How often expired records are removed; one that is read is removed at once. */
const SWEEP_EVERY: Millis = 1000
/** Records removed at once: less than a millisecond. */
const SLICE = 1000

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
  /** Called when expired records were removed. */
  readonly onPruned?: ((records: number) => void) | undefined
}

interface Entry {
  readonly id: RecordId
  dropAt: Millis
  /** Grows from each new entry to the next. */
  readonly serial: number
  /** The record's bytes as characters: V8 keeps thousands of short strings more cheaply than buffers. */
  text: string
  history: readonly string[]
}

/** For development and tests: forgets everything with the process. */
export function memoryStore(options: MemoryOptions): Store {
  return new MemoryStore(options)
}

class MemoryStore implements Store {
  readonly name = 'memory'
  readonly #options: MemoryOptions
  readonly #watchers = new Watchers()
  /** Oldest first. */
  readonly #records = new Map<RecordId, Entry>()
  /** Places in the index (`indexPlace`): few, since most records are completed. */
  readonly #indexed = new Map<RecordId, number>()
  readonly #buckets = new Map<string, Bucket>()
  /** Bytes of records, histories and buckets. */
  #used = 0
  #serial = 0
  /** Not yet reported. */
  #pruned = 0
  #sweptAt = 0
  #sweeping = this.#records.values()

  constructor(options: MemoryOptions) {
    this.#options = options
  }

  readonly put: Store['put'] = (id, bytes, spans) => {
    const now = this.#now()
    const existing = this.#find(id, now)
    if (existing !== undefined) return { done: false, now, bytes: bytesOf(existing) }
    if (this.#isFull(bytes.length + ENTRY_BYTES)) return Promise.reject(this.#full())
    const stamps = nextStamps(bytes, null, now, spans, false)
    const entry = { id, serial: this.#serial++, text: '', history: [], dropAt: 0 }
    this.#records.set(id, entry)
    this.#used += ENTRY_BYTES
    return this.#write(entry, bytes, stamps)
  }

  readonly swap: Store['swap'] = (id, condition, bytes, spans, nextFence) => {
    const now = this.#now()
    const entry = this.#find(id, now)
    if (entry === undefined) return { done: false, now, bytes: null }
    const existing = bytesOf(entry)
    if (!meets(existing, condition)) return { done: false, now, bytes: existing }
    const growth = bytes.length - existing.length
    if (bytes.length > SMALL_RECORD && this.#isFull(growth)) return Promise.reject(this.#full())
    return this.#write(entry, bytes, nextStamps(bytes, readStamps(existing), now, spans, nextFence))
  }

  readonly get: Store['get'] = async (id) => {
    const now = this.#now()
    const entry = this.#find(id, now)
    return { now, bytes: entry === undefined ? null : bytesOf(entry) }
  }

  readonly renew: Store['renew'] = async (items) => {
    const now = this.#now()
    return items.map(({ id, token, ...spans }) => {
      const entry = this.#find(id, now)
      if (entry === undefined) return false
      const bytes = bytesOf(entry)
      if (!mayRenew(bytes, token)) return false
      this.#keep(entry, bytes, prolongLease(bytes, now, spans))
      return true
    })
  }

  readonly remove: Store['remove'] = async (id, version) => {
    const entry = this.#find(id, this.#now())
    if (entry === undefined || versionOf(bytesOf(entry)) !== version) return false
    this.#forget(entry)
    this.#watchers.tell(id)
    return true
  }

  readonly due: Store['due'] = async (limit, of = 'unresolved') => {
    const now = this.#now()
    const { from, to } = placesDue(of, now)
    return [...this.#indexed]
      .filter(([id, place]) => place >= from && place <= to && this.#find(id, now) !== undefined)
      .sort(([, one], [, other]) => one - other)
      .slice(0, limit)
      .map(([id]) => id)
  }

  readonly list: Store['list'] = async (which, cursor, limit) => {
    const now = this.#now()
    if (which === 'unresolved') {
      const from = parseCursor(cursor)
      const places = Array.from(this.#indexed, ([id, due]) => ({ due, id }))
      const after = places.filter(
        (place) => place.due < BODIES_FROM && inOrder(place, from) > 0 && this.#find(place.id, now),
      )
      return pageOf(after.sort(inOrder).slice(0, limit), limit)
    }
    if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
    const beginning = which === 'all' ? '' : which.beginning
    const ids: RecordId[] = []
    for (const [id, { serial, dropAt }] of this.#records)
      if (serial >= Number(cursor) && id.startsWith(beginning) && dropAt > now && ids.push(id) === limit)
        return { ids, next: String(serial + 1) }
    return { ids, next: null }
  }

  readonly ping: Store['ping'] = async () => this.#now()

  readonly history: Store['history'] = {
    append: async (id, notes) => {
      const now = this.#now()
      const entry = this.#find(id, now)
      if (entry === undefined) return false
      const lines = noted(entry.history, notes, now)
      const growth = lengthOf(lines) - lengthOf(entry.history)
      if (this.#isFull(growth)) throw this.#full()
      entry.history = lines
      this.#used += growth
      return true
    },
    read: async (id) => (this.#find(id, this.#now())?.history ?? []).map(readNote),
  }

  readonly limits: Store['limits'] = {
    take: async (name, rate, units) => {
      const now = this.#now()
      const existing = this.#buckets.get(name) ?? null
      const { wait, bucket } = drawFromBucket(existing, now, rate, units)
      if (bucket === null) {
        this.#release(name)
        return wait
      }
      if (existing === null) {
        if (this.#isFull(ENTRY_BYTES)) throw this.#full()
        this.#used += ENTRY_BYTES
      }
      this.#buckets.set(name, bucket)
      return wait
    },
  }

  readonly watch: Store['watch'] = async (id, changed) => this.#watchers.add(id, changed)

  readonly traits: Store['traits'] = async () => ({ ...SOUND, durable: false, findings: [LOST] })

  readonly close: Store['close'] = async () => {}

  #now(): Millis {
    const { clock, onPruned } = this.#options
    const now = clock()
    // A large store in slices, so that none takes long. Also works after the clock was set back.
    if (Math.abs(now - this.#sweptAt) < SWEEP_EVERY / Math.ceil((this.#records.size + 1) / SLICE)) return now
    this.#sweptAt = now
    for (let n = 0; n <= SLICE; n++) {
      const { done, value } = this.#sweeping.next()
      if (done) {
        this.#sweeping = this.#records.values()
        for (const [name, bucket] of this.#buckets) if (fullAt(bucket) <= now) this.#release(name)
        break
      }
      if (value.dropAt <= now) this.#find(value.id, now)
    }
    if (this.#pruned > 0) onPruned?.(this.#pruned)
    this.#pruned = 0
    return now
  }

  #find(id: RecordId, now: Millis): Entry | undefined {
    const entry = this.#records.get(id)
    if (entry === undefined || entry.dropAt > now) return entry
    this.#forget(entry)
    this.#pruned++
    return undefined
  }

  #write(entry: Entry, bytes: Buffer, stamps: Stamps) {
    this.#keep(entry, bytes, stamps)
    if (endsAttempt(bytes)) this.#watchers.tell(entry.id)
    const { version, fence, createdAt, updatedAt: now } = stamps
    return { done: true, now, stamp: { version, fence, createdAt } } as const
  }

  /** Sets the entry's record to `bytes` with these stamps. */
  #keep(entry: Entry, bytes: Buffer, stamps: Stamps): void {
    const stamped = Buffer.from(bytes)
    stamp(stamped, stamps)
    this.#used += bytes.length - entry.text.length
    entry.text = stamped.toString('latin1')
    entry.dropAt = stamps.dropAt
    const place = indexPlace(bytes, stamps.due)
    if (place === null) this.#indexed.delete(entry.id)
    else this.#indexed.set(entry.id, place)
  }

  #forget(entry: Entry): void {
    this.#indexed.delete(entry.id)
    this.#records.delete(entry.id)
    this.#used -= entry.text.length + ENTRY_BYTES + lengthOf(entry.history)
  }

  #release(bucket: string): void {
    if (this.#buckets.delete(bucket)) this.#used -= ENTRY_BYTES
  }

  #isFull(growth: number): boolean {
    return growth > 0 && this.#used + growth > this.#options.maxBytes
  }

  #full(): StoreFull {
    return new StoreFull(`the memory store is full (${this.#used} of ${this.#options.maxBytes} bytes)`)
  }
}

function bytesOf({ text }: Entry): Buffer {
  return Buffer.from(text, 'latin1')
}

function lengthOf(lines: readonly string[]): number {
  return lines.reduce((sum, line) => sum + line.length + LINE_BYTES, 0)
}
