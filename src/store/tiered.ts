import { createHmac, timingSafeEqual } from 'node:crypto'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import { after, type Soon } from '../runtime/scheduling.ts'
import { readU48, U48, writeU48 } from './binary.ts'
import { endsAttempt, PREFIX, readStamps, SCHEMA, stamp, stateCode } from './codec.ts'
import type { PutReply, Store, SwapReply } from './register.ts'

/** Ids of records seen completed: 2 MB. The cache is asked only for these. */
const KNOWN = 10_000
/** Concurrent cache writes; further entries are not written. */
const WRITING = 64
const DIGEST = 32
/** Layout of an entry: a prefix like that of a completed record, its end, a digest of id and rest, the record. */
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
  const { life, secret } = options
  const monotonic = options.monotonic ?? (() => performance.now())
  const known = new Recent()
  const writing = new Set<Promise<void>>()
  /** How far the primary's clock is ahead of this process's, known before any record is known to be completed. */
  let ahead: Millis = 0

  const heard = (now: Millis): void => void (ahead = now - monotonic())

  const digestOf = (id: RecordId, entry: Buffer): Buffer =>
    createHmac('sha256', secret)
      .update(id)
      .update(entry.subarray(ENTRY.until, ENTRY.digest))
      .update(entry.subarray(ENTRY.record))
      .digest()

  const entryOf = (id: RecordId, record: Buffer, until: Millis): Buffer => {
    const entry = Buffer.concat([Buffer.alloc(ENTRY.record), record])
    entry.write('IP', 'latin1')
    entry[PREFIX.schema] = SCHEMA
    entry[PREFIX.state] = stateCode('completed')
    writeU48(entry, until, ENTRY.until)
    digestOf(id, entry).copy(entry, ENTRY.digest)
    return entry
  }

  /** The record in an entry; null: it is not one, or not this record's. */
  const recordIn = (id: RecordId, entry: Buffer): Buffer | null => {
    if (entry.length < ENTRY.record + PREFIX.end) return null
    const digest = entry.subarray(ENTRY.digest, ENTRY.record)
    return timingSafeEqual(digest, digestOf(id, entry)) ? entry.subarray(ENTRY.record) : null
  }

  const cached = async (id: RecordId): Promise<PutReply | null> => {
    const { bytes } = await cache.get(id)
    const record = bytes === null ? null : recordIn(id, bytes)
    const now = Math.round(monotonic() + ahead)
    if (bytes === null || record === null || readU48(bytes, ENTRY.until) <= now) return null
    return { done: false, now, bytes: record }
  }

  /** Best effort, alongside the request. */
  const later = (write: () => Promise<unknown>): void => {
    if (writing.size >= WRITING) return
    const written: Promise<void> = write()
      .catch(() => {})
      .then(() => void writing.delete(written))
    writing.add(written)
  }

  /** Never replaces an equally new entry. */
  const fill = (id: RecordId, record: Buffer, now: Millis): void => {
    const { version, dropAt } = readStamps(record)
    const left = Math.min(life, dropAt - now)
    const spans = { dueIn: left, dropIn: left }
    const entry = entryOf(id, record, now + left)
    later(async () => {
      // The cache takes ownership of the bytes.
      const reply = await cache.put(id, Buffer.from(entry), spans)
      const cached = reply.done ? null : recordIn(id, reply.bytes)
      if (reply.done || cached === null || readStamps(cached).version >= version) return
      await cache.swap(id, { version: readStamps(reply.bytes).version }, entry, spans, false)
    })
  }

  const drop = async (id: RecordId): Promise<void> => {
    const { bytes } = await cache.get(id)
    if (bytes !== null && recordIn(id, bytes) !== null) await cache.remove(id, readStamps(bytes).version)
  }

  /** Notes a record that the primary returned. */
  const note = (id: RecordId, bytes: Buffer | null, now: Millis): void => {
    heard(now)
    if (bytes === null || !isCompleted(bytes)) known.delete(id)
    // The caller may free its own copy.
    else if (known.add(id)) fill(id, Buffer.from(bytes), now)
  }

  const wrote = <Reply extends PutReply | SwapReply>(
    id: RecordId,
    bytes: Buffer,
    spans: Spans,
    write: () => Soon<Reply>,
  ): Soon<Reply> => {
    // The store takes ownership of what it is given.
    const copy = isCompleted(bytes) ? Buffer.from(bytes) : null
    return after(write(), (reply) => {
      const { now } = reply
      if (!reply.done) note(id, reply.bytes, now)
      else if (copy === null) {
        heard(now)
        if (known.delete(id)) later(() => drop(id))
      } else {
        const { due, dropAt } = { due: now + spans.dueIn, dropAt: now + spans.dropIn }
        stamp(copy, { ...reply.stamp, updatedAt: now, due, dropAt })
        heard(now)
        known.add(id)
        fill(id, copy, now)
      }
      return reply
    })
  }

  return {
    ...primary,

    put(id, bytes, spans, entry) {
      const write = (): Soon<PutReply> => wrote(id, bytes, spans, () => primary.put(id, bytes, spans, entry))
      // Outcomes and rewritten claims always go to the primary.
      if (!known.has(id) || endsAttempt(bytes) || entry === 'again') return write()
      return cached(id)
        .catch(() => null)
        .then((found) => {
          if (found !== null) return found
          known.delete(id)
          return write()
        })
    },

    swap: (id, condition, bytes, spans, nextFence) =>
      wrote(id, bytes, spans, () => primary.swap(id, condition, bytes, spans, nextFence)),

    async traits() {
      const { topology, ...traits } = await primary.traits()
      const shared = `${primary.name} decides, ${cache.name} answers replays`
      return { ...traits, topology: topology === undefined ? shared : `${shared}; ${topology}` }
    },

    async get(id) {
      const reply = await primary.get(id)
      heard(reply.now)
      return reply
    },

    async remove(id, version) {
      const isRemoved = await primary.remove(id, version)
      known.delete(id)
      // Only report the removal once the shared cache no longer has the entry, either.
      if (isRemoved) await drop(id).catch(() => {})
      return isRemoved
    },

    async close() {
      await Promise.all(writing)
      await Promise.all([primary.close(), cache.close()])
    },
  }
}

function isCompleted(bytes: Buffer): boolean {
  return bytes[PREFIX.schema] === SCHEMA && bytes[PREFIX.state] === stateCode('completed')
}

/** A bounded set that keeps at least the latest entries. */
class Recent {
  #now = new Set<RecordId>()
  #before = new Set<RecordId>()

  has(id: RecordId): boolean {
    return this.#now.has(id) || this.#before.has(id)
  }

  /** False: it was there. */
  add(id: RecordId): boolean {
    if (this.has(id)) return false
    if (this.#now.size >= KNOWN / 2) [this.#before, this.#now] = [this.#now, new Set()]
    this.#now.add(id)
    return true
  }

  delete(id: RecordId): boolean {
    return this.#now.delete(id) || this.#before.delete(id)
  }
}
