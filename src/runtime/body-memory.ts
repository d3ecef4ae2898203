/** Smaller buffers are not worth freeing, or are slices of a pool. */
const LEAST = 4096

/**
 * Frees an unused buffer that owns its memory, apart from at most `spare` unused bytes at the end. Left to V8, memory outside its heap
 * triggers a full collection every 10 to 16 MB (docs/adr/0078). A view used after all is empty; it never shows other data.
 *
 * Never free bytes that were given to a socket until the other end has answered: the kernel may not have taken them yet.
 */
export function free({ buffer, byteOffset, length }: Buffer, spare = 0): void {
  if (length >= LEAST && byteOffset === 0 && length + spare >= buffer.byteLength)
    (buffer as ArrayBuffer).transfer(0)
}

/**
 * Returns the bytes, for callers whose peer cannot tell freed bytes from an empty body.
 *
 * @throws if they have been freed: a bug must not look like an empty response.
 */
export function unfreed(bytes: Buffer): Buffer {
  if (bytes.length === 0 && (bytes.buffer as ArrayBuffer).detached)
    throw new Error('bytes were used after they had been freed')
  return bytes
}

const BLOCK = 16 * 1024
const NOTHING = Buffer.alloc(0)

/**
 * Collects a body as copies of its chunks. It allocates at most twice what has arrived, plus one block: a peer that sends single bytes, or
 * announces much and sends little, must not cost a hundred times what `limits` counts.
 */
export class BodyBuffer {
  /** Bytes; 0 if no length was announced. */
  announced = 0
  /** All full. */
  #blocks: Buffer[] = []
  /** Of the blocks. */
  #size = 0
  #block: Buffer = NOTHING
  #used = 0

  push(piece: Buffer): void {
    const copied = piece.copy(this.#block, this.#used)
    this.#used += copied
    if (copied === piece.length) return
    this.#blocks.push(this.#block)
    this.#size += this.#used
    this.#block = Buffer.allocUnsafe(this.#room(piece.length - copied))
    this.#used = piece.copy(this.#block, 0, copied)
  }

  /** Returns everything so far and releases it. */
  take(): Buffer {
    const blocks = [...this.#blocks, this.#block]
    const last = this.#block.subarray(0, this.#used)
    this.#blocks = []
    this.#size = 0
    this.#block = NOTHING
    this.#used = 0
    // The first one is empty.
    if (blocks.length <= 2) return last
    const whole = Buffer.concat([...blocks.slice(0, -1), last])
    for (const block of blocks) free(block)
    return whole
  }

  /** Size of the next block, at least `least`. Most bodies take one block of exactly their length. */
  #room(least: number): number {
    const left = this.announced - this.#size
    if (left < least) return this.#size === 0 ? least : Math.max(BLOCK, this.#size + least)
    return Math.min(left, Math.max(BLOCK, this.#size + 2 * least))
  }
}
