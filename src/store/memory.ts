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
import {
  inOrder,
  pageOf,
  parseCursor,
  type RateLimits,
  type RecordHistory,
  type Register,
  SOUND,
  type Store,
  StoreFull,
} from './register.ts'
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

/** For development and tests: forgets everything with the process. */
export function memoryStore(options: MemoryOptions): Store {
  const memory = new Memory(options)
  const watchers = new Watchers()
  return {
    ...register(memory, watchers),
    ...lists(memory),
    history: history(memory),
    limits: limits(memory),
    watch: async (id, changed) => watchers.add(id, changed),
    traits: async () => ({ ...SOUND, durable: false, findings: [LOST] }),
    async close() {},
  }
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

class Memory {
  readonly #clock: () => Millis
  readonly #maxBytes: number
  readonly #onPruned: MemoryOptions['onPruned']
  /** Oldest first. */
  readonly records = new Map<RecordId, Entry>()
  /** Places in the index (`indexPlace`): few, since most records are completed. */
  readonly indexed = new Map<RecordId, number>()
  readonly buckets = new Map<string, Bucket>()
  used = 0
  /** Not yet reported. */
  #pruned = 0
  #sweptAt = 0
  #sweeping = this.records.values()

  constructor({ clock, maxBytes, onPruned }: MemoryOptions) {
    this.#clock = clock
    this.#maxBytes = maxBytes
    this.#onPruned = onPruned
  }

  now(): Millis {
    const now = this.#clock()
    // A large store in slices, so that none takes long. Also works after the clock was set back.
    if (Math.abs(now - this.#sweptAt) < SWEEP_EVERY / Math.ceil((this.records.size + 1) / SLICE)) return now
    this.#sweptAt = now
    for (let n = 0; n <= SLICE; n++) {
      const { done, value } = this.#sweeping.next()
      if (done) {
        this.#sweeping = this.records.values()
        for (const [name, bucket] of this.buckets) if (fullAt(bucket) <= now) this.release(name)
        break
      }
      if (value.dropAt <= now) this.find(value.id, now)
    }
    if (this.#pruned > 0) this.#onPruned?.(this.#pruned)
    this.#pruned = 0
    return now
  }

  find(id: RecordId, now: Millis): Entry | undefined {
    const entry = this.records.get(id)
    if (entry === undefined || entry.dropAt > now) return entry
    this.forget(entry)
    this.#pruned++
    return undefined
  }

  /** Sets the entry's record to `bytes` with these stamps. */
  keep(entry: Entry, bytes: Buffer, stamps: Stamps): void {
    const stamped = Buffer.from(bytes)
    stamp(stamped, stamps)
    this.used += bytes.length - entry.text.length
    entry.text = stamped.toString('latin1')
    entry.dropAt = stamps.dropAt
    const place = indexPlace(bytes, stamps.due)
    if (place === null) this.indexed.delete(entry.id)
    else this.indexed.set(entry.id, place)
  }

  forget(entry: Entry): void {
    this.indexed.delete(entry.id)
    this.records.delete(entry.id)
    this.used -= entry.text.length + ENTRY_BYTES + lengthOf(entry.history)
  }

  release(bucket: string): void {
    if (this.buckets.delete(bucket)) this.used -= ENTRY_BYTES
  }

  isFull(growth: number): boolean {
    return this.used + growth > this.#maxBytes
  }

  full(): StoreFull {
    return new StoreFull(`the memory store is full (${this.used} of ${this.#maxBytes} bytes)`)
  }
}

function register(memory: Memory, watchers: Watchers): Omit<Register, 'due' | 'list'> {
  const { records } = memory
  let serial = 0
  return {
    name: 'memory',

    put(id, bytes, spans) {
      const now = memory.now()
      const existing = memory.find(id, now)
      if (existing !== undefined) return { done: false, now, bytes: bytesOf(existing) }
      if (memory.isFull(bytes.length + ENTRY_BYTES)) return Promise.reject(memory.full())
      const stamps = nextStamps(bytes, null, now, spans, false)
      const entry = { id, serial: serial++, text: '', history: [], dropAt: 0 }
      records.set(id, entry)
      memory.keep(entry, bytes, stamps)
      memory.used += ENTRY_BYTES
      if (endsAttempt(bytes)) watchers.tell(id)
      return writtenAs(now, stamps)
    },

    swap(id, condition, bytes, spans, nextFence) {
      const now = memory.now()
      const entry = memory.find(id, now)
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
      const now = memory.now()
      const entry = memory.find(id, now)
      return { now, bytes: entry === undefined ? null : bytesOf(entry) }
    },

    async renew(items) {
      const now = memory.now()
      return items.map(({ id, token, ...spans }) => {
        const entry = memory.find(id, now)
        if (entry === undefined) return false
        const bytes = bytesOf(entry)
        if (!mayRenew(bytes, token)) return false
        memory.keep(entry, bytes, prolongLease(bytes, now, spans))
        return true
      })
    },

    async remove(id, version) {
      const entry = memory.find(id, memory.now())
      if (entry === undefined || versionOf(bytesOf(entry)) !== version) return false
      memory.forget(entry)
      watchers.tell(id)
      return true
    },

    ping: async () => memory.now(),
  }
}

function lists(memory: Memory): Pick<Register, 'due' | 'list'> {
  return {
    async due(limit, of = 'unresolved') {
      const now = memory.now()
      const { from, to } = placesDue(of, now)
      return [...memory.indexed]
        .filter(([id, place]) => place >= from && place <= to && memory.find(id, now) !== undefined)
        .sort(([, one], [, other]) => one - other)
        .slice(0, limit)
        .map(([id]) => id)
    },

    async list(which, cursor, limit) {
      const now = memory.now()
      if (which === 'unresolved') {
        const from = parseCursor(cursor)
        const places = Array.from(memory.indexed, ([id, due]) => ({ due, id }))
        const after = places.filter(
          (place) => place.due < BODIES_FROM && inOrder(place, from) > 0 && memory.find(place.id, now),
        )
        return pageOf(after.sort(inOrder).slice(0, limit), limit)
      }
      if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      const beginning = which === 'all' ? '' : which.beginning
      const ids: RecordId[] = []
      for (const [id, { serial, dropAt }] of memory.records)
        if (serial >= Number(cursor) && id.startsWith(beginning) && dropAt > now && ids.push(id) === limit)
          return { ids, next: String(serial + 1) }
      return { ids, next: null }
    },
  }
}

function history(memory: Memory): RecordHistory {
  return {
    /** Counts towards the store's bytes, as records do. */
    async append(id, notes) {
      const now = memory.now()
      const entry = memory.find(id, now)
      if (entry === undefined) return false
      const lines = noted(entry.history, notes, now)
      const growth = lengthOf(lines) - lengthOf(entry.history)
      if (growth > 0 && memory.isFull(growth)) throw memory.full()
      entry.history = lines
      memory.used += growth
      return true
    },
    async read(id) {
      return (memory.find(id, memory.now())?.history ?? []).map(readNote)
    },
  }
}

function limits(memory: Memory): RateLimits {
  return {
    /** Buckets count, too; a full one is removed. */
    async take(name, rate, units) {
      const now = memory.now()
      const existing = memory.buckets.get(name) ?? null
      const { wait, bucket } = drawFromBucket(existing, now, rate, units)
      if (bucket === null) memory.release(name)
      else {
        if (existing === null) {
          if (memory.isFull(ENTRY_BYTES)) throw memory.full()
          memory.used += ENTRY_BYTES
        }
        memory.buckets.set(name, bucket)
      }
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
