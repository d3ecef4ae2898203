import { grown, NONE } from './slots.ts'

/** Wastes little on a record of 600 bytes, and copies one of 5 MiB in 20,000 steps. */
const BLOCK = 256
const BLOCKS_PER_CHUNK = 4096

/**
 * Stores bytes outside V8's heap: 1 MiB chunks cut into blocks of one size, so there is no fragmentation. An entry is a chain of blocks,
 * named by its first. Freed blocks are reused; chunks stay.
 */
export class Slab {
  readonly #chunks: Buffer[] = []
  /** By block: the next one in its chain, or in the free list. */
  #next = new Int32Array(0)
  /** By first block. */
  #lengths = new Int32Array(0)
  #free = NONE

  /** Replaces the contents of `chain` by a copy. The chain keeps its name. */
  write(bytes: Buffer, chain: number = this.#take()): number {
    let block = chain
    for (let at = 0; ; at += BLOCK) {
      bytes.copy(this.#chunk(block), this.#at(block), at, at + BLOCK)
      if (at + BLOCK >= bytes.length) break
      const next = this.#next[block] as number
      const following = next === NONE ? this.#take() : next
      this.#next[block] = following
      block = following
    }
    const rest = this.#next[block] as number
    this.#next[block] = NONE
    if (rest !== NONE) this.free(rest)
    this.#lengths[chain] = bytes.length
    return chain
  }

  /** A copy. */
  read(chain: number): Buffer {
    const bytes = Buffer.allocUnsafe(this.length(chain))
    let block = chain
    for (let at = 0; at < bytes.length; at += BLOCK) {
      const from = this.#at(block)
      this.#chunk(block).copy(bytes, at, from, from + BLOCK)
      block = this.#next[block] as number
    }
    return bytes
  }

  /** The first bytes, which may be changed in place. Valid until the chain is freed. */
  head(chain: number): Buffer {
    const from = this.#at(chain)
    return this.#chunk(chain).subarray(from, from + Math.min(BLOCK, this.length(chain)))
  }

  length(chain: number): number {
    return this.#lengths[chain] as number
  }

  free(chain: number): void {
    let last = chain
    while (this.#next[last] !== NONE) last = this.#next[last] as number
    this.#next[last] = this.#free
    this.#free = chain
  }

  #take(): number {
    if (this.#free === NONE) this.#grow()
    const block = this.#free
    this.#free = this.#next[block] as number
    this.#next[block] = NONE
    return block
  }

  #grow(): void {
    const first = this.#next.length
    const end = first + BLOCKS_PER_CHUNK
    this.#chunks.push(Buffer.allocUnsafeSlow(BLOCKS_PER_CHUNK * BLOCK))
    this.#next = grown(this.#next, end)
    this.#lengths = grown(this.#lengths, end)
    for (let block = first; block < end; block++) this.#next[block] = block + 1
    this.#next[end - 1] = NONE
    this.#free = first
  }

  #chunk(block: number): Buffer {
    return this.#chunks[Math.floor(block / BLOCKS_PER_CHUNK)] as Buffer
  }

  #at(block: number): number {
    return (block % BLOCKS_PER_CHUNK) * BLOCK
  }
}
