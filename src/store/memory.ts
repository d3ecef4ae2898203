import type { Millis, RecordId, Spans } from '../core/record.ts'
import { isUnresolved, meets, readStamps } from './codec.ts'
import { Heap, type Heaped } from './heap.ts'
import {
  type Condition,
  type GetReply,
  type PutReply,
  type Register,
  type Renewal,
  StoreFull,
  type StoreTraits,
  type SwapReply,
} from './register.ts'
import { prolonged, SMALL_RECORD, stamped } from './stamping.ts'

/** Beside the default `limits.buffered` of the same size, it keeps a process well within the 200 MB that it may take. */
export const MEMORY_BYTES = 64 * 1024 * 1024
/** What an entry costs beside its bytes: key, objects, heap slots. Measured roughly; it bounds the number of small records. */
const ENTRY_BYTES = 512

interface Slot extends Heaped {
  readonly id: RecordId
}
interface Entry {
  bytes: Buffer
  readonly drop: Slot
  readonly due: Slot
}

export interface MemoryOptions {
  readonly clock: () => Millis
  readonly maxBytes: number
}

/** For development and tests: forgets everything with the process. */
export class MemoryRegister implements Register {
  readonly name = 'memory'
  readonly #clock: () => Millis
  readonly #maxBytes: number
  readonly #entries = new Map<RecordId, Entry>()
  readonly #byDrop = new Heap<Slot>()
  readonly #byDue = new Heap<Slot>()
  #used = 0

  constructor({ clock, maxBytes }: MemoryOptions) {
    this.#clock = clock
    this.#maxBytes = maxBytes
  }

  async put(id: RecordId, bytes: Buffer, spans: Spans): Promise<PutReply> {
    const now = this.#now()
    const entry = this.#entries.get(id)
    if (entry !== undefined) return { done: false, now, bytes: Buffer.from(entry.bytes) }
    if (this.#used + bytes.length + ENTRY_BYTES > this.#maxBytes)
      throw new StoreFull(`the memory store is full (${this.#used} of ${this.#maxBytes} bytes)`)
    const written = stamped(bytes, null, now, spans, false)
    const fresh = { bytes: written.bytes, drop: { id, key: 0, at: -1 }, due: { id, key: 0, at: -1 } }
    this.#entries.set(id, fresh)
    this.#used += written.bytes.length + ENTRY_BYTES
    this.#file(fresh)
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
    if (this.#used + growth > this.#maxBytes && growth > 0 && bytes.length > SMALL_RECORD)
      throw new StoreFull(`the memory store is full (${this.#used} of ${this.#maxBytes} bytes)`)
    const written = stamped(bytes, entry.bytes, now, spans, nextFence)
    entry.bytes = written.bytes
    this.#used += growth
    this.#file(entry)
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
      if (entry === undefined || !meets(entry.bytes, { token, states: ['in_progress'] })) return false
      entry.bytes = prolonged(entry.bytes, now, spans).bytes
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
    return true
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
    for (let slot = this.#byDrop.peek(); slot !== undefined && slot.key <= now; slot = this.#byDrop.peek())
      this.#forget(slot.id, this.#entries.get(slot.id) as Entry)
    return now
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
    this.#used -= entry.bytes.length + ENTRY_BYTES
  }
}
