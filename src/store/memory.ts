import type { Millis, RecordId } from '../core/record.ts'
import {
  BODIES_FROM,
  endsAttempt,
  indexPlace,
  mayRenew,
  meets,
  nextStamps,
  prolongLease,
  readStamps,
  SMALL_RECORD,
  type Stamps,
  stamp,
} from './codec.ts'
import { versionOf } from './prefix.ts'
import { inOrder, pageOf, parseCursor, type Store, StoreFull } from './register.ts'
import { Schedule } from './schedule.ts'
import { type Bucket, drawFromBucket, fullAt, noted, readNote, Watchers } from './side-ports.ts'
import { Slab } from './slab.ts'
import { NONE, Slots } from './slots.ts'

/** With the default `limits.buffered` of the same size, a process stays well within 200 MB. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** Overhead of an entry: key, objects, heap slots. Roughly measured; it limits the number of small records. */
const ENTRY_BYTES = 512
/** Overhead of a line of history. */
const LINE_BYTES = 32

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
  /** Called when expired records were removed, which every operation does first. */
  readonly onPruned?: ((records: number) => void) | undefined
}

/**
 * For development and tests: forgets everything with the process. Why it keeps no V8 objects, and is not SQLite's `:memory:`:
 * docs/adr/0077.
 */
export function memoryStore({ clock, maxBytes, onPruned }: MemoryOptions): Store {
  const slab = new Slab()
  const slots = new Slots()
  /** By slot: the chains of the record and of its history. */
  const records: number[] = []
  const histories: number[] = []
  const byDrop = new Schedule()
  const byDue = new Schedule()
  /** Responses that end before their records. */
  const byBody = new Schedule()
  const bucketSlots = new Slots()
  const buckets: Bucket[] = []
  const byFull = new Schedule()
  const watchers = new Watchers()
  let used = 0

  /** The current time; removes everything that has expired. */
  const expire = (): Millis => {
    const now = clock()
    let pruned = 0
    for (let slot = byDrop.due(now); slot !== NONE; slot = byDrop.due(now)) {
      forget(slot)
      pruned++
    }
    if (pruned > 0) onPruned?.(pruned)
    for (let slot = byFull.due(now); slot !== NONE; slot = byFull.due(now)) release(slot)
    return now
  }
  const chainOf = (slot: number): number => records[slot] as number
  const head = (slot: number): Buffer => slab.head(chainOf(slot))
  const read = (slot: number): Buffer => slab.read(chainOf(slot))
  const forget = (slot: number): void => {
    byDrop.delete(slot)
    byDue.delete(slot)
    byBody.delete(slot)
    used -= slab.length(chainOf(slot)) + ENTRY_BYTES
    slab.free(chainOf(slot))
    if (histories[slot] !== NONE) {
      used -= lengthOf(historyOf(slot))
      slab.free(histories[slot] as number)
    }
    slots.remove(slot)
  }
  const release = (slot: number): void => {
    byFull.delete(slot)
    bucketSlots.remove(slot)
    used -= ENTRY_BYTES
  }
  const isFull = (growth: number): boolean => used + growth > maxBytes
  const full = (): StoreFull => new StoreFull(`the memory store is full (${used} of ${maxBytes} bytes)`)
  const index = (slot: number, bytes: Buffer, { due, dropAt }: Stamps): void => {
    byDrop.set(slot, dropAt)
    const place = indexPlace(bytes, due)
    const isBody = place !== null && place >= BODIES_FROM
    if (place === null || isBody) byDue.delete(slot)
    else byDue.set(slot, due)
    if (isBody) byBody.set(slot, due)
    else byBody.delete(slot)
  }
  const idOf = (slot: number): RecordId => slots.nameOf(slot) as RecordId
  const historyOf = (slot: number): string[] => {
    const chain = histories[slot] as number
    return chain === NONE ? [] : slab.read(chain).toString().split('\n')
  }
  const keepHistory = (slot: number, lines: readonly string[]): void => {
    const chain = histories[slot] as number
    if (chain === NONE) histories[slot] = slab.write(Buffer.from(lines.join('\n')))
    else slab.write(Buffer.from(lines.join('\n')), chain)
  }

  return {
    name: 'memory',

    put(id, bytes, spans) {
      const now = expire()
      const existing = slots.find(id)
      if (existing !== NONE) return { done: false, now, bytes: read(existing) }
      if (isFull(bytes.length + ENTRY_BYTES)) return Promise.reject(full())
      const stamps = nextStamps(bytes, null, now, spans, false)
      const slot = slots.add(id)
      records[slot] = slab.write(bytes)
      histories[slot] = NONE
      used += bytes.length + ENTRY_BYTES
      stamp(head(slot), stamps)
      index(slot, bytes, stamps)
      if (endsAttempt(bytes)) watchers.tell(id)
      return writtenAs(now, stamps)
    },

    swap(id, condition, bytes, spans, nextFence) {
      const now = expire()
      const slot = slots.find(id)
      if (slot === NONE) return { done: false, now, bytes: null }
      const existing = head(slot)
      if (!meets(existing, condition)) return { done: false, now, bytes: read(slot) }
      const growth = bytes.length - slab.length(chainOf(slot))
      if (growth > 0 && bytes.length > SMALL_RECORD && isFull(growth)) return Promise.reject(full())
      const stamps = nextStamps(bytes, readStamps(existing), now, spans, nextFence)
      slab.write(bytes, chainOf(slot))
      used += growth
      // It continues where the previous one ended.
      stamp(existing, stamps)
      index(slot, bytes, stamps)
      if (endsAttempt(bytes)) watchers.tell(id)
      return writtenAs(now, stamps)
    },

    async get(id) {
      const now = expire()
      const slot = slots.find(id)
      return { now, bytes: slot === NONE ? null : read(slot) }
    },

    async renew(items) {
      const now = expire()
      return items.map(({ id, token, ...spans }) => {
        const slot = slots.find(id)
        if (slot === NONE) return false
        const existing = head(slot)
        if (!mayRenew(existing, token)) return false
        index(slot, existing, prolongLease(existing, now, spans))
        return true
      })
    },

    async due(limit, of) {
      const now = expire()
      const schedule = of === 'bodies' ? byBody : byDue
      const found: number[] = []
      for (let slot = schedule.due(now); slot !== NONE && found.length < limit; slot = schedule.due(now)) {
        schedule.delete(slot)
        found.push(slot)
      }
      for (const slot of found) schedule.set(slot, schedule.timeOf(slot))
      return found.map(idOf)
    },

    async remove(id, version) {
      expire()
      const slot = slots.find(id)
      if (slot === NONE || versionOf(head(slot)) !== version) return false
      forget(slot)
      watchers.tell(id)
      return true
    },

    async list(which, cursor, limit) {
      expire()
      if (which === 'unresolved') {
        const from = parseCursor(cursor)
        const places = Array.from(byDue.slots, (slot) => ({ due: byDue.timeOf(slot), id: idOf(slot) }))
        const after = places.filter((place) => inOrder(place, from) > 0).sort(inOrder)
        return pageOf(after.slice(0, limit), limit)
      }
      if (cursor !== null && !/^\d{1,16}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      const beginning = which === 'all' ? '' : which.beginning
      const ids: RecordId[] = []
      // A record keeps its slot while it exists.
      for (const slot of slots.from(Number(cursor))) {
        const id = idOf(slot)
        if (id.startsWith(beginning) && ids.push(id) === limit) return { ids, next: String(slot + 1) }
      }
      return { ids, next: null }
    },

    ping: async () => clock(),

    history: {
      /** Counts towards the store's bytes, as records do. */
      async append(id, notes) {
        const now = expire()
        const slot = slots.find(id)
        if (slot === NONE) return false
        const before = historyOf(slot)
        const history = noted(before, notes, now)
        const growth = lengthOf(history) - lengthOf(before)
        if (growth > 0 && isFull(growth)) throw full()
        keepHistory(slot, history)
        used += growth
        return true
      },
      async read(id) {
        expire()
        const slot = slots.find(id)
        return slot === NONE ? [] : historyOf(slot).map(readNote)
      },
    },

    limits: {
      /** Buckets count, too; a full one is removed. */
      async take(id, rate, units) {
        const now = expire()
        const existing = bucketSlots.find(id)
        const { wait, bucket } = drawFromBucket(
          existing === NONE ? null : (buckets[existing] as Bucket),
          now,
          rate,
          units,
        )
        if (bucket === null) {
          if (existing !== NONE) release(existing)
          return wait
        }
        if (existing === NONE) {
          if (isFull(ENTRY_BYTES)) throw full()
          used += ENTRY_BYTES
        }
        const slot = existing === NONE ? bucketSlots.add(id) : existing
        buckets[slot] = bucket
        byFull.set(slot, fullAt(bucket))
        return wait
      },
    },

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

function lengthOf(lines: readonly string[]): number {
  return lines.reduce((sum, line) => sum + line.length + LINE_BYTES, 0)
}

function writtenAs(now: Millis, { version, fence, createdAt }: Stamps) {
  return { done: true, now, stamp: { version, fence, createdAt } } as const
}
