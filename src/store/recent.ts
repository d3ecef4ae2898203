import type { Millis, RecordId, Spans } from '../core/record.ts'

const CHUNK = 1024 * 1024
const CHUNKS = 16
/** For larger records, only the head is worth the memory. */
export const LARGEST_RECENT = 64 * 1024
const ID_BYTES = 43
/** The length, three instants, the id. */
const BEFORE = 4 + 3 * 8 + ID_BYTES
/** No id begins with it. */
const FORGOTTEN = 0

/** A record as it was written. */
export interface RecentWrite {
  readonly id: RecordId
  readonly bytes: Buffer
  /** The rest of its spans; null: its retention is over, and its key may belong to another request. */
  readonly left: () => Spans | null
}

interface Chunk {
  readonly bytes: Buffer
  used: number
  /** Its newest write. */
  at: Millis
}

/**
 * The most recent writes, at most 16 MiB, as bytes outside V8's heap: every outcome passes through here and would survive many collections
 * (docs/adr/0017).
 */
export class RecentWrites {
  readonly #clock: () => Millis
  /** Oldest first. */
  readonly #chunks: Chunk[] = []
  /** By store: the instant before which its writes are safe. */
  readonly #safe = new Map<symbol, Millis>()

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  /** For one of the stores: a callback that takes the instant before which it can no longer lose a write ({@link Safety}). */
  safeBefore(): (before: Millis) => void {
    const store = Symbol('store')
    return (before) => void this.#safe.set(store, before)
  }

  /** What was written then can no longer be lost. */
  readonly isSafe = (at: Millis): boolean => this.#safe.size > 0 && Math.min(...this.#safe.values()) > at

  /**
   * Half the room is taken by writes that may be lost, as while one master of a cluster is down: remember as little as possible of further
   * ones.
   */
  get isTight(): boolean {
    const half = this.#chunks.at(-CHUNKS / 2)
    return half !== undefined && !this.isSafe(half.at)
  }

  /** Copies `bytes`, of at most {@link LARGEST_RECENT}. */
  add(id: RecordId, bytes: Buffer, { dueIn, dropIn }: Spans): void {
    const now = this.#clock()
    const size = BEFORE + bytes.length
    let chunk = this.#chunks.at(-1)
    if (chunk === undefined || chunk.used + size > CHUNK) chunk = this.#next(now)
    const { bytes: to } = chunk
    let at = chunk.used
    at = to.writeUInt32BE(bytes.length, at)
    for (const time of [now, dueIn, dropIn]) at = to.writeDoubleBE(time, at)
    at += to.write(id, at, 'latin1')
    at += bytes.copy(to, at)
    chunk.used = at
    chunk.at = now
  }

  /** Oldest first; copies, since chunks are reused. */
  all(): RecentWrite[] {
    const found: RecentWrite[] = []
    for (const { bytes, from, to } of this.#writes()) {
      const at = bytes.readDoubleBE(from + 4)
      if (this.isSafe(at) || bytes[to.id] === FORGOTTEN) continue
      const [dueIn, dropIn] = [bytes.readDoubleBE(from + 12), bytes.readDoubleBE(from + 20)]
      found.push({
        id: bytes.toString('latin1', to.id, to.bytes) as RecordId,
        bytes: Buffer.from(bytes.subarray(to.bytes, to.end)),
        left: () => {
          const age = Math.ceil(this.#clock() - at)
          return dropIn > age ? { dueIn: dueIn - age, dropIn: dropIn - age } : null
        },
      })
    }
    return found
  }

  /** The record was removed: it is never written again. */
  forget(id: RecordId): void {
    for (const { bytes, to } of this.#writes())
      if (bytes.toString('latin1', to.id, to.bytes) === id) bytes[to.id] = FORGOTTEN
  }

  *#writes() {
    for (const { bytes, used } of this.#chunks)
      for (let from = 0; from < used; ) {
        const start = from + BEFORE
        const to = { id: start - ID_BYTES, bytes: start, end: start + bytes.readUInt32BE(from) }
        yield { bytes, from, to }
        from = to.end
      }
  }

  /** An empty chunk: a new one, or the oldest if there are enough or it is no longer needed. */
  #next(now: Millis): Chunk {
    const [oldest] = this.#chunks
    const isFree = oldest !== undefined && (this.#chunks.length === CHUNKS || this.isSafe(oldest.at))
    const bytes = isFree ? (this.#chunks.shift() as Chunk).bytes : Buffer.allocUnsafeSlow(CHUNK)
    const chunk = { bytes, used: 0, at: now }
    this.#chunks.push(chunk)
    return chunk
  }
}
