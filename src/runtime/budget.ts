/** A bound on bytes held at one time (`limits.buffered`). */
export class Budget {
  #most: number
  #held = 0
  readonly #makeRoom: () => boolean

  /** `makeRoom`: has somebody give some back who can do without; false: there is nobody. */
  constructor(most: number, makeRoom: () => boolean = () => false) {
    this.#most = most
    this.#makeRoom = makeRoom
  }

  get most(): number {
    return this.#most
  }

  get held(): number {
    return this.#held
  }

  /** Another bound from now on. What is held stays: where it is more than that, nothing is taken until it has gone. */
  resize(most: number): void {
    this.#most = most
  }

  /** False: no room; nothing was taken. */
  take(bytes: number): boolean {
    while (this.#held + bytes > this.#most) if (!this.#makeRoom()) return false
    this.#held += bytes
    return true
  }

  /** Takes room, and gives what releases it: once, however often it is called. `null`: no room; nothing was taken. */
  hold(bytes: number): (() => void) | null {
    if (!this.take(bytes)) return null
    let held = bytes
    return () => {
      this.give(held)
      held = 0
    }
  }

  give(bytes: number): void {
    this.#held -= bytes
  }
}

/** Gives a release to each of several holders; the last one that lets go releases. */
export function shared(release: () => void): () => () => void {
  let holders = 0
  return () => {
    let holds = true
    holders++
    return () => {
      if (holds && --holders === 0) release()
      holds = false
    }
  }
}
