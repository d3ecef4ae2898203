import { createHmac, timingSafeEqual } from 'node:crypto'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import { after, type MaybePromise } from '../runtime/scheduling.ts'
import { readU48, U48, writeU48 } from './record/binary.ts'
import { endsAttempt, PREFIX, readStamps, SCHEMA, stamp, stateCode } from './record/codec.ts'
import type { PutReply, Store, SwapReply } from './register.ts'

/** Ids of records seen completed: 2 MB. The cache is asked only for these. */
const KNOWN = 10_000
/** Concurrent cache writes; further entries are not written. */
const WRITING = 64
const DIGEST = 32
/** Layout of an entry: a prefix like that of a completed record, when it expires, a digest of id and rest, the record. */
const ENTRY = { until: PREFIX.end, digest: PREFIX.end + U48, record: PREFIX.end + U48 + DIGEST } as const

export interface TieredOptions {
  /** How long the cache may answer after the record was removed or replaced elsewhere. */
  readonly life: Millis
  /** Key that authenticates entries; empty: they are only protected against accidental corruption. */
  readonly secret: Buffer
  readonly monotonic?: () => Millis
}

/**
 * `primary` decides; `cache` answers claims of records that this process has seen completed (contract §9). The primary answers whatever the
 * cache lacks or cannot prove: the cache never proves absence. The first execution of a key never waits for it.
 */
export function tiered(primary: Store, cache: Store, options: TieredOptions): Store {
  const replays = new Replays(cache, options)
  return {
    ...primary,

    put(id, bytes, spans, entry) {
      const write = (): MaybePromise<PutReply> =>
        replays.wrote(id, bytes, spans, () => primary.put(id, bytes, spans, entry))
      // Outcomes and rewritten claims always go to the primary.
      if (!replays.has(id) || endsAttempt(bytes) || entry === 'again') return write()
      return replays
        .get(id)
        .catch(() => null)
        .then((found) => {
          if (found !== null) return found
          replays.delete(id)
          return write()
        })
    },

    swap: (id, condition, bytes, spans, nextFence) =>
      replays.wrote(id, bytes, spans, () => primary.swap(id, condition, bytes, spans, nextFence)),

    async traits() {
      const { topology, ...traits } = await primary.traits()
      const shared = `${primary.name} decides, ${cache.name} answers replays`
      return { ...traits, topology: topology === undefined ? shared : `${shared}; ${topology}` }
    },

    async get(id) {
      const reply = await primary.get(id)
      replays.heard(reply.now)
      return reply
    },

    async remove(id, version) {
      const isRemoved = await primary.remove(id, version)
      replays.delete(id)
      // Only report the removal once the shared cache no longer has the entry, either.
      if (isRemoved) await replays.drop(id).catch(() => {})
      return isRemoved
    },

    async close() {
      await replays.written()
      await Promise.all([primary.close(), cache.close()])
    },
  }
}

class Replays {
  readonly #cache: Store
  readonly #life: Millis
  readonly #secret: Buffer
  readonly #monotonic: () => Millis
  /** The latest records seen completed, oldest first. */
  readonly #known = new Set<RecordId>()
  readonly #writing = new Set<Promise<void>>()
  /** How far the primary's clock is ahead of this process's, known before any record is known to be completed. */
  #ahead: Millis = 0

  constructor(cache: Store, { life, secret, monotonic = () => performance.now() }: TieredOptions) {
    this.#cache = cache
    this.#life = life
    this.#secret = secret
    this.#monotonic = monotonic
  }

  heard(now: Millis): void {
    this.#ahead = now - this.#monotonic()
  }

  has(id: RecordId): boolean {
    return this.#known.has(id)
  }

  delete(id: RecordId): boolean {
    return this.#known.delete(id)
  }

  /** False: it was known. */
  #add(id: RecordId): boolean {
    if (this.#known.has(id)) return false
    if (this.#known.size >= KNOWN)
      for (const oldest of [...this.#known].slice(0, KNOWN / 2)) this.#known.delete(oldest)
    this.#known.add(id)
    return true
  }

  async get(id: RecordId): Promise<PutReply | null> {
    const { bytes } = await this.#cache.get(id)
    const record = bytes === null ? null : this.#recordIn(id, bytes)
    const now = Math.round(this.#monotonic() + this.#ahead)
    if (bytes === null || record === null || readU48(bytes, ENTRY.until) <= now) return null
    return { done: false, now, bytes: record }
  }

  async drop(id: RecordId): Promise<void> {
    const { bytes } = await this.#cache.get(id)
    if (bytes !== null && this.#recordIn(id, bytes) !== null)
      await this.#cache.remove(id, readStamps(bytes).version)
  }

  /** Writes to the primary, and remembers whether the record is completed. */
  wrote<Reply extends PutReply | SwapReply>(
    id: RecordId,
    bytes: Buffer,
    spans: Spans,
    write: () => MaybePromise<Reply>,
  ): MaybePromise<Reply> {
    // The store takes ownership of the bytes.
    const copy = isCompleted(bytes) ? Buffer.from(bytes) : null
    return after(write(), (reply) => {
      const { now } = reply
      this.heard(now)
      if (!reply.done) {
        const found = reply.bytes
        if (found === null || !isCompleted(found)) this.#known.delete(id)
        // The caller may free its own copy.
        else if (this.#add(id)) this.#fill(id, Buffer.from(found), now)
      } else if (copy === null) {
        if (this.#known.delete(id)) this.#later(() => this.drop(id))
      } else {
        const { due, dropAt } = { due: now + spans.dueIn, dropAt: now + spans.dropIn }
        stamp(copy, { ...reply.stamp, updatedAt: now, due, dropAt })
        this.#add(id)
        this.#fill(id, copy, now)
      }
      return reply
    })
  }

  /** Never replaces an equally new entry. */
  #fill(id: RecordId, record: Buffer, now: Millis): void {
    const { version, dropAt } = readStamps(record)
    const left = Math.min(this.#life, dropAt - now)
    const spans = { dueIn: left, dropIn: left }
    const entry = this.#entryOf(id, record, now + left)
    this.#later(async () => {
      // The cache takes ownership of the bytes.
      const reply = await this.#cache.put(id, Buffer.from(entry), spans)
      const cached = reply.done ? null : this.#recordIn(id, reply.bytes)
      if (reply.done || cached === null || readStamps(cached).version >= version) return
      await this.#cache.swap(id, { version: readStamps(reply.bytes).version }, entry, spans, false)
    })
  }

  /** Best effort, alongside the request. */
  #later(write: () => Promise<unknown>): void {
    if (this.#writing.size >= WRITING) return
    const written: Promise<void> = write()
      .catch(() => {})
      .then(() => void this.#writing.delete(written))
    this.#writing.add(written)
  }

  async written(): Promise<void> {
    await Promise.all(this.#writing)
  }

  #digestOf(id: RecordId, entry: Buffer): Buffer {
    return createHmac('sha256', this.#secret)
      .update(id)
      .update(entry.subarray(ENTRY.until, ENTRY.digest))
      .update(entry.subarray(ENTRY.record))
      .digest()
  }

  #entryOf(id: RecordId, record: Buffer, until: Millis): Buffer {
    const entry = Buffer.concat([Buffer.alloc(ENTRY.record), record])
    entry.write('IP', 'latin1')
    entry[PREFIX.schema] = SCHEMA
    entry[PREFIX.state] = stateCode('completed')
    writeU48(entry, until, ENTRY.until)
    this.#digestOf(id, entry).copy(entry, ENTRY.digest)
    return entry
  }

  /** The record in an entry; null: it is not one, or not this record's. */
  #recordIn(id: RecordId, entry: Buffer): Buffer | null {
    if (entry.length < ENTRY.record + PREFIX.end) return null
    const digest = entry.subarray(ENTRY.digest, ENTRY.record)
    return timingSafeEqual(digest, this.#digestOf(id, entry)) ? entry.subarray(ENTRY.record) : null
  }
}

function isCompleted(bytes: Buffer): boolean {
  return bytes[PREFIX.schema] === SCHEMA && bytes[PREFIX.state] === stateCode('completed')
}
