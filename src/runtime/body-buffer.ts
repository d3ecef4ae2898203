/** Chunks up to this size are copied together: each kept separately costs more than its bytes. */
const SMALL = 1024
const BLOCK = 16 * 1024

/** Collects a body. A peer that sends chunks of one byte must not cost a hundred times what `limits` count. */
export class BodyBuffer {
  #chunks: Buffer[] = []
  #block: Buffer | null = null
  #used = 0

  push(chunk: Buffer): void {
    if (chunk.length > SMALL) {
      this.#seal()
      this.#chunks.push(chunk)
      return
    }
    if (this.#block !== null && this.#used + chunk.length > BLOCK) this.#seal()
    if (this.#block === null) {
      // Most bodies are one small chunk: no copy.
      if (this.#chunks.length === 0) {
        this.#chunks.push(chunk)
        return
      }
      this.#block = Buffer.allocUnsafeSlow(BLOCK)
      this.#used = 0
    }
    this.#used += chunk.copy(this.#block, this.#used)
  }

  /** Everything so far; nothing is held afterwards. */
  take(): Buffer {
    this.#seal()
    const chunks = this.#chunks
    this.#chunks = []
    return chunks.length === 1 ? (chunks[0] as Buffer) : Buffer.concat(chunks)
  }

  #seal(): void {
    if (this.#block !== null) this.#chunks.push(this.#block.subarray(0, this.#used))
    this.#block = null
  }
}
