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

  /** Sets a new bound. Holders keep what they have; no more is granted until enough is released. */
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

/** Shares one release among several holders: the last release counts. */
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

/** Holders in the same slot share one share: rare, and noticeable only if they use most of a bound at once. */
const SLOTS = 4096

/** Smaller bounds are not divided: `limits.inFlight: 10` must allow ten. */
const MIN_DIVIDED = 64

/** How much of a bound one holder may have; a sixteenth is left to others. */
export function shareOf(most: number): number {
  return most < MIN_DIVIDED ? most : most - Math.ceil(most / 16)
}

/** Each holder's part of a bounded resource, in fixed slots, so that nothing is allocated per request (docs/adr/0017). */
export class Shares {
  readonly #held = new Float64Array(SLOTS)
  readonly #salt: number

  /** `salt`: a random integer, so that nobody can target another holder's slot. */
  constructor(salt: number) {
    this.#salt = salt
  }

  slotOf(holder: string): number {
    // FNV-1a
    let hash = this.#salt
    for (let n = 0; n < holder.length; n++) hash = Math.imul(hash ^ holder.charCodeAt(n), 0x01000193)
    return (hash ^ (hash >>> 15)) & (SLOTS - 1)
  }

  held(slot: number): number {
    return this.#held[slot] as number
  }

  /** A negative amount lowers the share. */
  add(slot: number, amount: number): void {
    this.#held[slot] = this.held(slot) + amount
  }
}

/**
 * Counts protected requests. Of those whose body has arrived, at most `limits.inFlight` proceed, and no client address and no caller may
 * take all of them.
 */
export class InFlight {
  /** In progress, including those whose body is still arriving. */
  count = 0
  #most: number
  #placed = 0
  readonly #clients: Shares
  readonly #callers: Shares

  constructor(most: number, salt: number) {
    this.#most = most
    this.#clients = new Shares(salt)
    this.#callers = new Shares(salt)
  }

  get most(): number {
    return this.#most
  }

  /** Sets a new bound; running requests are unaffected. */
  resize(most: number): void {
    this.#most = most
  }

  isFull(): boolean {
    return this.#placed >= this.#most
  }

  /** Admits a request and returns a function that releases its place; null if no place is left for this client and caller. */
  enter(client: string, caller: string | null): (() => void) | null {
    if (this.isFull()) return null
    const share = shareOf(this.#most)
    const ofClient = this.#clients.slotOf(client)
    if (this.#clients.held(ofClient) >= share) return null
    const ofCaller = caller === null ? null : this.#callers.slotOf(caller)
    if (ofCaller !== null && this.#callers.held(ofCaller) >= share) return null
    this.#change(ofClient, ofCaller, 1)
    return () => this.#change(ofClient, ofCaller, -1)
  }

  #change(ofClient: number, ofCaller: number | null, by: 1 | -1): void {
    this.#placed += by
    this.#clients.add(ofClient, by)
    if (ofCaller !== null) this.#callers.add(ofCaller, by)
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

/** Smaller buffers are not worth freeing, or are slices of a pool. */
const MIN_FREED = 4096

/**
 * Frees an unused buffer that owns its memory, apart from at most `spare` unused bytes at the end. Left to V8, memory outside its heap
 * triggers a full collection every 10 to 16 MB (docs/adr/0017). A view used after all is empty; it never shows other data.
 *
 * Never free bytes that were given to a socket until the other end has answered: the kernel may not have taken them yet.
 */
export function free({ buffer, byteOffset, length }: Buffer, spare = 0): void {
  if (length >= MIN_FREED && byteOffset === 0 && length + spare >= buffer.byteLength)
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
  /** Full blocks. */
  #blocks: Buffer[] = []
  /** Total bytes of the blocks. */
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
    // The first block is empty.
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
