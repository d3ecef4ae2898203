/** A bound on bytes held at one time (`limits.buffered`). */
export class Budget {
  #most: number
  #held = 0
  readonly #makeRoom: () => boolean

  /** `makeRoom` makes a dispensable holder release some; it returns false if there is none. */
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

  /** Holders keep what they have; nothing more is granted until enough is released. */
  resize(most: number): void {
    this.#most = most
  }

  /** False: no room; nothing was taken. */
  take(bytes: number): boolean {
    while (this.#held + bytes > this.#most) if (!this.#makeRoom()) return false
    this.#held += bytes
    return true
  }

  /** Takes room and returns a function that releases it, which may be called twice. Null: no room; nothing was taken. */
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

/** Shares one release among several holders: the last to let go releases. */
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

/** Holders in the same slot share one share: rare, and harmless unless others need the room. */
const SLOTS = 4096

/** Smaller bounds are not divided: `limits.inFlight: 10` must allow ten. */
const LEAST_DIVIDED = 64

/** How much of a bound one holder may have; a sixteenth is left to others. */
export function shareOf(most: number): number {
  return most < LEAST_DIVIDED ? most : most - Math.ceil(most / 16)
}

/** Each holder's part of a bounded resource, in fixed slots, so that nothing is allocated per request (docs/adr/0017). */
export class Shares {
  readonly #held = new Float64Array(SLOTS)
  readonly #salt: number

  /** `salt`: a random integer, so that nobody can target another holder's slot. */
  constructor(salt: number) {
    this.#salt = salt
  }

  /** `kind`: a character that distinguishes holders of equal names. */
  slotOf(holder: string, kind = ''): number {
    // FNV-1a
    let hash = this.#salt
    if (kind !== '') hash = Math.imul(hash ^ kind.charCodeAt(0), 0x01000193)
    for (let n = 0; n < holder.length; n++) hash = Math.imul(hash ^ holder.charCodeAt(n), 0x01000193)
    return (hash ^ (hash >>> 15)) & (SLOTS - 1)
  }

  held(slot: number): number {
    return this.#held[slot] as number
  }

  /** A negative amount takes away. */
  add(slot: number, amount: number): void {
    this.#held[slot] = this.held(slot) + amount
  }
}

/**
 * Counts protected requests. Of those whose body has arrived, at most `limits.inFlight` proceed, and no client address and no caller may
 * take all of these places.
 */
export class InFlight {
  /** In progress, including those whose body is still arriving. */
  count = 0
  #most: number
  #placed = 0
  readonly #shares: Shares

  constructor(most: number, salt: number) {
    this.#most = most
    this.#shares = new Shares(salt)
  }

  get most(): number {
    return this.#most
  }

  /** Requests keep their places; none is granted above the new bound. */
  resize(most: number): void {
    this.#most = most
  }

  isFull(): boolean {
    return this.#placed >= this.#most
  }

  /** Takes a place and returns a function that releases it; null if none is left for this client and caller. */
  enter(client: string, caller: string | null): (() => void) | null {
    if (this.isFull()) return null
    const shares = this.#shares
    const share = shareOf(this.#most)
    const ofClient = shares.slotOf(client, 'a')
    if (shares.held(ofClient) >= share) return null
    const ofCaller = caller === null ? null : shares.slotOf(caller, 'c')
    if (ofCaller !== null && shares.held(ofCaller) >= share) return null
    this.#change(ofClient, ofCaller, 1)
    return () => this.#change(ofClient, ofCaller, -1)
  }

  #change(ofClient: number, ofCaller: number | null, by: 1 | -1): void {
    this.#placed += by
    this.#shares.add(ofClient, by)
    if (ofCaller !== null) this.#shares.add(ofCaller, by)
  }

  /** Takes a place for work that continues after its request was answered; returns a function that releases it. */
  remain(): () => void {
    this.count++
    this.#placed++
    return () => {
      this.count--
      this.#placed--
    }
  }
}
