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
} from './codec.ts'
import { type Expiring, ExpiryQueue, OUTSIDE } from './expiry-queue.ts'
import { versionOf } from './prefix.ts'
import {
  inOrder,
  pageOf,
  parseCursor,
  type RateLimits,
  type RecordHistory,
  type Register,
  type Store,
  StoreFull,
} from './register.ts'
import { type Bucket, drawFromBucket, fullAt, noted, readNote, Watchers } from './side-ports.ts'

/** With as much garbage and the default `limits.buffered` of the same size, a process stays within 300 MB. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** Overhead of an entry: id, objects, timers. Roughly measured; it limits the number of small records. */
const ENTRY_BYTES = 512
/** Overhead of a line of history. */
const LINE_BYTES = 32

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
  /** Called when expired records were removed, which every operation does first. */
  readonly onPruned?: ((records: number) => void) | undefined
}

/** For development and tests: forgets everything with the process. */
export function memoryStore(options: MemoryOptions): Store {
  const memory = new Memory(options)
  const watchers = new Watchers()
  return {
    ...register(memory, watchers),
    history: history(memory),
    limits: limits(memory),
    watch: async (id, changed) => watchers.add(id, changed),
    async traits() {
      const lost =
        'The memory store forgets every record when the process ends, and no other replica sees them.'
      return {
        durable: false,
        evicts: false,
        forgets: null,
        hasIdentity: false,
        findings: [lost],
        refusals: [],
      }
    },
    async close() {},
  }
}

interface Entry extends Expiring {
  readonly id: RecordId
  /** Grows from each new entry to the next. */
  readonly serial: number
  /** The record's bytes as characters: V8 keeps thousands of short strings more cheaply than buffers. */
  text: string
  history: readonly string[]
}

interface BucketEntry extends Expiring {
  readonly name: string
  bucket: Bucket
}

class Memory {
  readonly clock: () => Millis
  readonly #maxBytes: number
  readonly #onPruned: MemoryOptions['onPruned']
  /** Oldest first. */
  readonly records = new Map<RecordId, Entry>()
  readonly byDrop = new ExpiryQueue<Entry>()
  /** Places in the index (`indexPlace`): few, since most records are completed. */
  readonly indexed = new Map<RecordId, number>()
  readonly buckets = new Map<string, BucketEntry>()
  readonly byFull = new ExpiryQueue<BucketEntry>()
  used = 0

  constructor({ clock, maxBytes, onPruned }: MemoryOptions) {
    this.clock = clock
    this.#maxBytes = maxBytes
    this.#onPruned = onPruned
  }

  /** The current time; removes everything that has expired. */
  expire(): Millis {
    const now = this.clock()
    let pruned = 0
    for (let entry = this.byDrop.due(now); entry !== undefined; entry = this.byDrop.due(now)) {
      this.forget(entry)
      pruned++
    }
    if (pruned > 0) this.#onPruned?.(pruned)
    for (let full = this.byFull.due(now); full !== undefined; full = this.byFull.due(now)) this.release(full)
    return now
  }

  /** Sets the entry's record to `bytes` with these stamps. */
  keep(entry: Entry, bytes: Buffer, stamps: Stamps): void {
    const stamped = Buffer.from(bytes)
    stamp(stamped, stamps)
    this.used += bytes.length - entry.text.length
    entry.text = stamped.toString('latin1')
    this.byDrop.set(entry, stamps.dropAt)
    const place = indexPlace(bytes, stamps.due)
    if (place === null) this.indexed.delete(entry.id)
    else this.indexed.set(entry.id, place)
  }

  forget(entry: Entry): void {
    this.byDrop.delete(entry)
    this.indexed.delete(entry.id)
    this.records.delete(entry.id)
    this.used -= entry.text.length + ENTRY_BYTES + lengthOf(entry.history)
  }

  release(bucket: BucketEntry): void {
    this.byFull.delete(bucket)
    this.buckets.delete(bucket.name)
    this.used -= ENTRY_BYTES
  }

  isFull(growth: number): boolean {
    return this.used + growth > this.#maxBytes
  }

  full(): StoreFull {
    return new StoreFull(`the memory store is full (${this.used} of ${this.#maxBytes} bytes)`)
  }
}

function register(memory: Memory, watchers: Watchers): Register {
  const { records } = memory
  let serial = 0
  return {
    name: 'memory',

    put(id, bytes, spans) {
      const now = memory.expire()
      const existing = records.get(id)
      if (existing !== undefined) return { done: false, now, bytes: bytesOf(existing) }
      if (memory.isFull(bytes.length + ENTRY_BYTES)) return Promise.reject(memory.full())
      const stamps = nextStamps(bytes, null, now, spans, false)
      const entry = { id, serial: serial++, text: '', history: [], expiresAt: 0, place: OUTSIDE }
      records.set(id, entry)
      memory.keep(entry, bytes, stamps)
      memory.used += ENTRY_BYTES
      if (endsAttempt(bytes)) watchers.tell(id)
      return writtenAs(now, stamps)
    },

    swap(id, condition, bytes, spans, nextFence) {
      const now = memory.expire()
      const entry = records.get(id)
      if (entry === undefined) return { done: false, now, bytes: null }
      const existing = bytesOf(entry)
      if (!meets(existing, condition)) return { done: false, now, bytes: existing }
      const growth = bytes.length - existing.length
      if (growth > 0 && bytes.length > SMALL_RECORD && memory.isFull(growth))
        return Promise.reject(memory.full())
      const stamps = nextStamps(bytes, readStamps(existing), now, spans, nextFence)
      memory.keep(entry, bytes, stamps)
      if (endsAttempt(bytes)) watchers.tell(id)
      return writtenAs(now, stamps)
    },

    async get(id) {
      const now = memory.expire()
      const entry = records.get(id)
      return { now, bytes: entry === undefined ? null : bytesOf(entry) }
    },

    async renew(items) {
      const now = memory.expire()
      return items.map(({ id, token, ...spans }) => {
        const entry = records.get(id)
        if (entry === undefined) return false
        const bytes = bytesOf(entry)
        if (!mayRenew(bytes, token)) return false
        memory.keep(entry, bytes, prolongLease(bytes, now, spans))
        return true
      })
    },

    async due(limit, of = 'unresolved') {
      const now = memory.expire()
      const { from, to } = placesDue(of, now)
      return [...memory.indexed]
        .filter(([, place]) => place >= from && place <= to)
        .sort(([, one], [, other]) => one - other)
        .slice(0, limit)
        .map(([id]) => id)
    },

    async remove(id, version) {
      memory.expire()
      const entry = records.get(id)
      if (entry === undefined || versionOf(bytesOf(entry)) !== version) return false
      memory.forget(entry)
      watchers.tell(id)
      return true
    },

    async list(which, cursor, limit) {
      memory.expire()
      if (which === 'unresolved') {
        const from = parseCursor(cursor)
        const places = Array.from(memory.indexed, ([id, due]) => ({ due, id }))
        const after = places.filter((place) => place.due < BODIES_FROM && inOrder(place, from) > 0)
        return pageOf(after.sort(inOrder).slice(0, limit), limit)
      }
      if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      const beginning = which === 'all' ? '' : which.beginning
      const ids: RecordId[] = []
      for (const [id, { serial }] of records)
        if (serial >= Number(cursor) && id.startsWith(beginning) && ids.push(id) === limit)
          return { ids, next: String(serial + 1) }
      return { ids, next: null }
    },

    ping: async () => memory.clock(),
  }
}

function history(memory: Memory): RecordHistory {
  return {
    /** Counts towards the store's bytes, as records do. */
    async append(id, notes) {
      const now = memory.expire()
      const entry = memory.records.get(id)
      if (entry === undefined) return false
      const lines = noted(entry.history, notes, now)
      const growth = lengthOf(lines) - lengthOf(entry.history)
      if (growth > 0 && memory.isFull(growth)) throw memory.full()
      entry.history = lines
      memory.used += growth
      return true
    },
    async read(id) {
      memory.expire()
      return (memory.records.get(id)?.history ?? []).map(readNote)
    },
  }
}

function limits(memory: Memory): RateLimits {
  return {
    /** Buckets count, too; a full one is removed. */
    async take(name, rate, units) {
      const now = memory.expire()
      const existing = memory.buckets.get(name)
      const { wait, bucket } = drawFromBucket(existing?.bucket ?? null, now, rate, units)
      if (bucket === null) {
        if (existing !== undefined) memory.release(existing)
        return wait
      }
      if (existing === undefined) {
        if (memory.isFull(ENTRY_BYTES)) throw memory.full()
        memory.used += ENTRY_BYTES
      }
      const entry = existing ?? { name, bucket, expiresAt: 0, place: OUTSIDE }
      entry.bucket = bucket
      memory.buckets.set(name, entry)
      memory.byFull.set(entry, fullAt(bucket))
      return wait
    },
  }
}

function bytesOf({ text }: Entry): Buffer {
  return Buffer.from(text, 'latin1')
}

function lengthOf(lines: readonly string[]): number {
  return lines.reduce((sum, line) => sum + line.length + LINE_BYTES, 0)
}

function writtenAs(now: Millis, { version, fence, createdAt }: Stamps) {
  return { done: true, now, stamp: { version, fence, createdAt } } as const
}
