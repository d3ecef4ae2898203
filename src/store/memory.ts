import type { Millis, RecordId } from '../core/record.ts'
import {
  endsAttempt,
  isUnresolved,
  mayRenew,
  meets,
  prolongLease,
  readStamps,
  SMALL_RECORD,
  stampCopy,
} from './codec.ts'
import { type Bucket, drawFromBucket, fullAt } from './gcra.ts'
import { noted, readNote } from './history.ts'
import { inOrder, pageOf, placeOf, type Store, StoreFull } from './register.ts'
import { Watchers } from './watchers.ts'

/** Together with the default `limits.buffered` of the same size, it keeps a process well within 200 MB. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** Overhead of an entry: key, objects, heap slots. Measured roughly; it bounds the number of small records. */
const ENTRY_BYTES = 512
/** Overhead of a line of history. */
const LINE_BYTES = 32

interface Entry {
  bytes: Buffer
  history: readonly string[]
  /** Counts the records so far; the map iterates in this order. */
  readonly seq: number
  readonly drop: Slot<RecordId>
  readonly due: Slot<RecordId>
}
interface KeptBucket {
  bucket: Bucket
  readonly full: Slot<string>
}

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
  /** Expired records were removed; each operation removes them first. */
  readonly onPruned?: ((records: number) => void) | undefined
}

/** For development and tests: forgets everything with the process. Why it is not SQLite's `:memory:`: docs/adr/0057. */
export function memoryStore({ clock, maxBytes, onPruned }: MemoryOptions): Store {
  const entries = new Map<RecordId, Entry>()
  const byDrop = new Heap<RecordId>()
  const byDue = new Heap<RecordId>()
  const buckets = new Map<string, KeptBucket>()
  const byFull = new Heap<string>()
  const watchers = new Watchers()
  let used = 0
  let seq = 0

  /** The time; whatever has expired by then is removed. */
  const expire = (): Millis => {
    const now = clock()
    let pruned = 0
    for (let slot = byDrop.due(now); slot !== null; slot = byDrop.due(now)) {
      forget(slot.id, entries.get(slot.id) as Entry)
      pruned++
    }
    if (pruned > 0) onPruned?.(pruned)
    for (let slot = byFull.due(now); slot !== null; slot = byFull.due(now))
      release(buckets.get(slot.id) as KeptBucket)
    return now
  }
  const forget = (id: RecordId, { bytes, history, drop, due }: Entry): void => {
    byDrop.remove(drop)
    byDue.remove(due)
    entries.delete(id)
    used -= bytes.length + ENTRY_BYTES + lengthOf(history)
  }
  const release = ({ full }: KeptBucket): void => {
    byFull.remove(full)
    buckets.delete(full.id)
    used -= ENTRY_BYTES
  }
  /** @throws {StoreFull} */
  const reserve = (growth: number): void => {
    if (used + growth > maxBytes)
      throw new StoreFull(`the memory store is full (${used} of ${maxBytes} bytes)`)
  }
  const index = ({ bytes, drop, due: slot }: Entry): void => {
    const { due, dropAt } = readStamps(bytes)
    byDrop.move(drop, dropAt)
    if (isUnresolved(bytes)) byDue.move(slot, due)
    else byDue.remove(slot)
  }

  return {
    name: 'memory',

    async put(id, bytes, spans) {
      const now = expire()
      const entry = entries.get(id)
      if (entry !== undefined) return { done: false, now, bytes: Buffer.from(entry.bytes) }
      reserve(bytes.length + ENTRY_BYTES)
      const written = stampCopy(bytes, null, now, spans, false)
      const slots = { drop: newSlot(id), due: newSlot(id) }
      const fresh = { bytes: written.bytes, history: [], seq: ++seq, ...slots }
      entries.set(id, fresh)
      used += bytes.length + ENTRY_BYTES
      index(fresh)
      if (endsAttempt(bytes)) watchers.tell(id)
      return { done: true, now, stamp: written.stamp }
    },

    async swap(id, condition, bytes, spans, nextFence) {
      const now = expire()
      const entry = entries.get(id)
      if (entry === undefined) return { done: false, now, bytes: null }
      if (!meets(entry.bytes, condition)) return { done: false, now, bytes: Buffer.from(entry.bytes) }
      const growth = bytes.length - entry.bytes.length
      if (growth > 0 && bytes.length > SMALL_RECORD) reserve(growth)
      const written = stampCopy(bytes, entry.bytes, now, spans, nextFence)
      entry.bytes = written.bytes
      used += growth
      index(entry)
      if (endsAttempt(bytes)) watchers.tell(id)
      return { done: true, now, stamp: written.stamp }
    },

    async get(id) {
      const now = expire()
      const entry = entries.get(id)
      return { now, bytes: entry === undefined ? null : Buffer.from(entry.bytes) }
    },

    async renew(items) {
      const now = expire()
      return items.map(({ id, token, ...spans }) => {
        const entry = entries.get(id)
        if (entry === undefined || !mayRenew(entry.bytes, token)) return false
        entry.bytes = prolongLease(entry.bytes, now, spans).bytes
        index(entry)
        return true
      })
    },

    async due(limit) {
      const now = expire()
      const found: Slot<RecordId>[] = []
      for (let slot = byDue.due(now); slot !== null && found.length < limit; slot = byDue.due(now)) {
        byDue.remove(slot)
        found.push(slot)
      }
      for (const slot of found) byDue.move(slot, slot.key)
      return found.map((slot) => slot.id)
    },

    async remove(id, version) {
      expire()
      const entry = entries.get(id)
      if (entry === undefined || !meets(entry.bytes, { version })) return false
      forget(id, entry)
      watchers.tell(id)
      return true
    },

    async list(which, cursor, limit) {
      expire()
      if (which === 'unresolved') {
        const from = placeOf(cursor)
        const places = byDue.all.map(({ key, id }) => ({ due: key, id }))
        const after = places.filter((place) => inOrder(place, from) > 0).sort(inOrder)
        return pageOf(after.slice(0, limit), limit)
      }
      if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      const beginning = which === 'all' ? '' : which.beginning
      const ids: RecordId[] = []
      for (const [id, entry] of entries) {
        if (entry.seq <= Number(cursor) || !id.startsWith(beginning)) continue
        if (ids.push(id) === limit) return { ids, next: String(entry.seq) }
      }
      return { ids, next: null }
    },

    ping: async () => clock(),

    history: {
      /** Counts against the bytes of the store as records do. */
      async append(id, notes) {
        const now = expire()
        const entry = entries.get(id)
        if (entry === undefined) return false
        const history = noted(entry.history, notes, now)
        const growth = lengthOf(history) - lengthOf(entry.history)
        if (growth > 0) reserve(growth)
        entry.history = history
        used += growth
        return true
      },
      async read(id) {
        expire()
        return (entries.get(id)?.history ?? []).map(readNote)
      },
    },

    limits: {
      /** Buckets count, too; one that is full again is gone. */
      async take(id, rate, units) {
        const now = expire()
        const kept = buckets.get(id)
        const { wait, bucket } = drawFromBucket(kept?.bucket ?? null, now, rate, units)
        if (bucket === null) {
          if (kept !== undefined) release(kept)
        } else if (kept === undefined) {
          reserve(ENTRY_BYTES)
          const full = newSlot(id)
          buckets.set(id, { bucket, full })
          byFull.move(full, fullAt(bucket))
          used += ENTRY_BYTES
        } else {
          kept.bucket = bucket
          byFull.move(kept.full, fullAt(bucket))
        }
        return wait
      },
    },

    watch: async (id, changed) => watchers.add(id, changed),

    async traits() {
      const lost =
        'The memory store forgets every record when the process ends, and no other replica sees them.'
      return { durable: false, evicts: false, findings: [lost] }
    },

    async close() {},
  }
}

function lengthOf(lines: readonly string[]): number {
  return lines.reduce((sum, line) => sum + line.length + LINE_BYTES, 0)
}

interface Slot<Id> {
  readonly id: Id
  key: Millis
  /** Index in the heap, -1 outside of it: removal needs no search. */
  at: number
}

function newSlot<Id>(id: Id): Slot<Id> {
  return { id, key: 0, at: -1 }
}

/** A binary min-heap over `key` with removal from the middle: every operation is O(log n). */
class Heap<Id> {
  readonly #slots: Slot<Id>[] = []

  /** Unordered. */
  get all(): readonly Slot<Id>[] {
    return this.#slots
  }

  /** The first slot, if its time has come by `now`. */
  due(now: Millis): Slot<Id> | null {
    const first = this.#slots[0]
    return first === undefined || first.key > now ? null : first
  }

  /** Puts the slot where `key` belongs, whether it is in the heap or not. */
  move(slot: Slot<Id>, key: Millis): void {
    this.remove(slot)
    slot.key = key
    slot.at = this.#slots.push(slot) - 1
    this.#up(slot)
  }

  remove(slot: Slot<Id>): void {
    if (slot.at < 0) return
    const last = this.#slots.pop() as Slot<Id>
    if (last !== slot) {
      last.at = slot.at
      this.#slots[last.at] = last
      this.#up(last)
      this.#down(last)
    }
    slot.at = -1
  }

  #up(slot: Slot<Id>): void {
    while (slot.at > 0) {
      const parent = this.#slots[(slot.at - 1) >> 1] as Slot<Id>
      if (parent.key <= slot.key) return
      this.#exchange(parent, slot)
    }
  }

  #down(slot: Slot<Id>): void {
    for (;;) {
      const left = this.#slots[2 * slot.at + 1]
      const right = this.#slots[2 * slot.at + 2]
      const least = right !== undefined && right.key < (left as Slot<Id>).key ? right : left
      if (least === undefined || slot.key <= least.key) return
      this.#exchange(slot, least)
    }
  }

  #exchange(upper: Slot<Id>, lower: Slot<Id>): void {
    const at = upper.at
    upper.at = lower.at
    lower.at = at
    this.#slots[upper.at] = upper
    this.#slots[lower.at] = lower
  }
}
