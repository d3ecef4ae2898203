import { randomInt } from 'node:crypto'

/** No slot or block. */
export const NONE = -1

const ID_CHARS = 43
/** Ids are digests, so this many characters distinguish them. */
const HASHED_CHARS = 16
const SMALLEST = 256

/**
 * Assigns each name a slot, a small number, while it exists: a hash table outside V8's heap, with linear probing. A name is a record id, or
 * shorter. Entries of a `Map` are objects that live long enough for the garbage collector to move them twice (docs/adr/0077).
 */
export class Slots {
  /** Keeps clients from choosing names that all collide. */
  readonly #seed = randomInt(2 ** 32)
  /** Slot + 1 by place, 0 if empty; at most half are in use. */
  #table = new Int32Array(2 * SMALLEST)
  /** By slot: the hash of the name, and the name itself, padded with zeros. */
  #hashes = new Int32Array(SMALLEST)
  #names = Buffer.alloc(SMALLEST * ID_CHARS)
  readonly #free: number[] = []
  /** Number of slots ever assigned. */
  #count = 0

  find(name: string): number {
    const last = this.#table.length - 1
    let place = this.#hash(name) & last
    while (this.#table[place] !== 0 && !this.#holds((this.#table[place] as number) - 1, name))
      place = (place + 1) & last
    // 0 is NONE + 1.
    return (this.#table[place] as number) - 1
  }

  /** Assigns a slot to a new name. */
  add(name: string): number {
    const slot = this.#free.pop() ?? this.#count++
    if (slot === this.#hashes.length) this.#grow()
    const hash = this.#hash(name)
    this.#hashes[slot] = hash
    const at = slot * ID_CHARS
    this.#names.write(name, at, 'latin1')
    if (name.length < ID_CHARS) this.#names.fill(0, at + name.length, at + ID_CHARS)
    this.#enter(slot, hash)
    return slot
  }

  remove(slot: number): void {
    const last = this.#table.length - 1
    let hole = (this.#hashes[slot] as number) & last
    while (this.#table[hole] !== slot + 1) hole = (hole + 1) & last
    // Entries that were displaced move up.
    for (let place = (hole + 1) & last; this.#table[place] !== 0; place = (place + 1) & last) {
      const next = this.#table[place] as number
      const own = (this.#hashes[next - 1] as number) & last
      if (((place - own) & last) < ((place - hole) & last)) continue
      this.#table[hole] = next
      hole = place
    }
    this.#table[hole] = 0
    this.#names[slot * ID_CHARS] = 0
    this.#free.push(slot)
  }

  nameOf(slot: number): string {
    const at = slot * ID_CHARS
    const bytes = this.#names.subarray(at, at + ID_CHARS)
    const end = bytes.indexOf(0)
    return String.fromCharCode(...(end < 0 ? bytes : bytes.subarray(0, end)))
  }

  /** The slots in use from `first` on, in order. */
  *from(first: number): Iterable<number> {
    for (let slot = first; slot < this.#count; slot++) if (this.#names[slot * ID_CHARS] !== 0) yield slot
  }

  #holds(slot: number, name: string): boolean {
    const at = slot * ID_CHARS
    for (let n = 0; n < name.length; n++) if (this.#names[at + n] !== name.charCodeAt(n)) return false
    return name.length === ID_CHARS || this.#names[at + name.length] === 0
  }

  #hash(name: string): number {
    if (name.length > ID_CHARS) throw new RangeError(`longer than a record id: ${name.length} characters`)
    let hash = this.#seed
    const end = Math.min(name.length, HASHED_CHARS)
    for (let n = 0; n < end; n++) hash = Math.imul(hash ^ name.charCodeAt(n), 0x01000193)
    return hash ^ (hash >>> 15)
  }

  #enter(slot: number, hash: number): void {
    const last = this.#table.length - 1
    let place = hash & last
    while (this.#table[place] !== 0) place = (place + 1) & last
    this.#table[place] = slot + 1
  }

  /** All slots are in use. */
  #grow(): void {
    const size = this.#hashes.length
    this.#names = Buffer.concat([this.#names], 2 * size * ID_CHARS)
    this.#hashes = grown(this.#hashes, 2 * size)
    this.#table = new Int32Array(4 * size)
    for (let slot = 0; slot < size; slot++) this.#enter(slot, this.#hashes[slot] as number)
  }
}

/** A longer copy, padded with zeros. */
export function grown<Numbers extends Int32Array | Float64Array>(old: Numbers, length: number): Numbers {
  const larger = new (old.constructor as new (length: number) => Numbers)(length)
  larger.set(old)
  return larger
}
