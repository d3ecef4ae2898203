import { Lossy, QUOTE, QUOTE_WITHIN } from './json-scalars.ts'

/**
 * The rank of bytes; a quote ends a name. UTF-8 sorts by code point, RFC 8785 by UTF-16 unit: code points beyond U+FFFF (first byte
 * F0 to F4) go before U+E000 to U+FFFF (EE and EF).
 */
const RANK = Uint8Array.from({ length: 256 }, (_, byte) => {
  if (byte === QUOTE) return 0
  if (byte === QUOTE_WITHIN) return QUOTE + 1
  return byte >= 0xf0 ? byte - 1 : byte >= 0xee ? byte + 6 : byte + 1
})

/** Whether the name at `one` goes before the name at `other`. */
export function isBefore(memory: Uint8Array, one: number, other: number): boolean {
  let a = memory[one] as number
  let b = memory[other] as number
  while (a === b) {
    if (a === QUOTE) throw new Lossy()
    a = memory[++one] as number
    b = memory[++other] as number
  }
  return (RANK[a] as number) < (RANK[b] as number)
}

/** Fields of a member: position of its name without quotes; where it begins (`~`: it is omitted) and ends in the text. */
export const MEMBER = 3

/** Up to this many members, insertion is faster than merging. */
const RUN = 8
/** Above this, each pass is a step of its own, so that other work gets its turn. */
const MANY = 4 * 1024
/** Above {@link MANY}, this many are taken in one step. */
const TAKEN_AT_ONCE = 16 * 1024
/** Bytes of a name compared at once. */
const WORD = 4
/** Makes words compare as unsigned. */
const SIGN = 0x80000000

/** The order of an object's members by their names. */
export class Order {
  /** Indexes of the members. */
  sorted: Int32Array<ArrayBuffer> = new Int32Array(256)
  /** Beginnings of their names. */
  #words = new Int32Array(256)
  #otherSorted = new Int32Array(256)
  #otherWords = new Int32Array(256)
  /** Length of the runs already in order; 0: not all of many members are taken yet. */
  #width = 0
  #first = 0
  #taken = 0

  /** Must not be used afterwards. */
  free(): void {
    for (const { buffer } of [this.sorted, this.#words, this.#otherSorted, this.#otherWords])
      buffer.transfer(0)
  }

  /** Starts sorting the members from the index `first` on. */
  begin(memory: Uint8Array, members: Int32Array, first: number, count: number): void {
    if (count > this.sorted.length) {
      this.sorted = new Int32Array(count * 2)
      this.#words = new Int32Array(count * 2)
      this.#otherSorted = new Int32Array(count * 2)
      this.#otherWords = new Int32Array(count * 2)
    }
    const { sorted } = this
    this.#first = first
    this.#taken = 0
    if (count > MANY) {
      this.#width = 0
      return
    }
    for (let n = 0; n < count; n++) {
      const member = first + n * MEMBER
      const name = members[member] as number
      const low = n - (n % RUN)
      let to = n
      for (; to > low; to--) {
        const other = sorted[to - 1] as number
        if (isBefore(memory, members[other] as number, name)) break
        sorted[to] = other
      }
      sorted[to] = member
    }
    this.#width = RUN
    if (count > RUN)
      for (let n = 0; n < count; n++) this.#words[n] = wordAt(memory, members[sorted[n] as number] as number)
  }

  /** False: call again. */
  finish(memory: Uint8Array, members: Int32Array, count: number): boolean {
    if (this.#width === 0) return this.#take(memory, members, count)
    while (this.#width < count) {
      if (count > MANY) return this.#merge(memory, members, count)
      this.#merge(memory, members, count)
    }
    return true
  }

  /** Takes the next of many members unsorted, as runs of one. */
  #take(memory: Uint8Array, members: Int32Array, count: number): false {
    const end = Math.min(this.#taken + TAKEN_AT_ONCE, count)
    for (let n = this.#taken; n < end; n++) {
      const member = this.#first + n * MEMBER
      this.sorted[n] = member
      this.#words[n] = wordAt(memory, members[member] as number)
    }
    this.#taken = end
    if (end === count) this.#width = 1
    return false
  }

  #merge(memory: Uint8Array, members: Int32Array, count: number): boolean {
    const sorted = this.sorted
    const words = this.#words
    const otherSorted = this.#otherSorted
    const otherWords = this.#otherWords
    const width = this.#width
    for (let low = 0; low < count; low += 2 * width) {
      const middle = Math.min(low + width, count)
      const high = Math.min(middle + width, count)
      let left = low
      let right = middle
      for (let to = low; to < high; to++) {
        let takesLeft = right === high
        if (!takesLeft && left < middle) {
          const difference = (words[left] as number) - (words[right] as number)
          takesLeft =
            difference === 0
              ? isBefore(
                  memory,
                  members[sorted[left] as number] as number,
                  members[sorted[right] as number] as number,
                )
              : difference < 0
        }
        const from = takesLeft ? left++ : right++
        otherSorted[to] = sorted[from] as number
        otherWords[to] = words[from] as number
      }
    }
    this.sorted = otherSorted
    this.#words = otherWords
    this.#otherSorted = sorted
    this.#otherWords = words
    this.#width = 2 * width
    return this.#width >= count
  }
}

/** The first bytes of a name as a number, 0 beyond its end. */
function wordAt(memory: Uint8Array, name: number): number {
  let word = 0
  let at = name
  for (let n = 0; n < WORD; n++) {
    const rank = RANK[memory[at] as number] as number
    word = (word << 8) | rank
    if (rank > 0) at++
  }
  return word ^ SIGN
}
