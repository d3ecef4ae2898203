/** A bound on bytes held at one time (`limits.buffered`). */
export class Budget {
  readonly #most: number
  #held = 0

  constructor(most: number) {
    this.#most = most
  }

  get held(): number {
    return this.#held
  }

  /** False: no room; nothing was taken. */
  take(bytes: number): boolean {
    if (this.#held + bytes > this.#most) return false
    this.#held += bytes
    return true
  }

  give(bytes: number): void {
    this.#held -= bytes
  }
}
