import { isBefore, MEMBER, type Order } from './json-names.ts'
import { COLON, MAX_DEPTH, QUOTE } from './json-scalars.ts'

/** Of an object whose names are not compared with those of another. */
export const NO_SHAPE = -0x40000000

/** Objects with more members are read as if they were the first of their kind. */
const MOST = 32
/** Members' fields that were filled, whether they are in order, of which body. */
const HEAD = 3
const SHAPE = HEAD + MEMBER * MOST
/** At one depth: lists in members beside each other. */
const BESIDE = 4

/**
 * The names of objects that were read last. Bodies that take long are mostly lists of objects with the same members in the same order: one
 * that begins as the one before it needs no search for the ends of its names, and no sorting (docs/adr/0072).
 */
export class Shapes {
  /** Of each shape its head; of each member where its name is in the body, its length up to behind the colon, its rank's member. */
  readonly #fields = new Int32Array(SHAPE * BESIDE * (MAX_DEPTH + 1))
  #body = 0

  /** Another body: nothing is known of its objects. */
  begin(): void {
    this.#body = (this.#body + 1) | 0
  }

  /**
   * What an object is compared with that is the `nth` member of its parent. Below 0: nothing; `~` of it is where it will be. Of those
   * that are open at a time no two have the same.
   */
  of(depth: number, nth: number): number {
    const shape = SHAPE * (depth * BESIDE + (nth & (BESIDE - 1)))
    return this.#fields[shape + 2] === this.#body ? shape : ~shape
  }

  /** Where the value of a member begins if its name, at `name`, is that of the shape; else 0. `nth`: its fields' index in its object. */
  end(shape: number, nth: number, words: DataView, name: number): number {
    const fields = this.#fields
    if (nth >= (fields[shape] as number)) return 0
    const known = fields[shape + HEAD + nth] as number
    const length = fields[shape + HEAD + nth + 1] as number
    let n = 0
    for (; n + 4 <= length; n += 4)
      if (words.getInt32(known + n, true) !== words.getInt32(name + n, true)) return 0
    if (n < length) {
      const differing = words.getInt32(known + n, true) ^ words.getInt32(name + n, true)
      if (differing << (32 - 8 * (length - n)) !== 0) return 0
    }
    return name + length
  }

  /** The object has the shape's members and no others. */
  isWhole(shape: number, nth: number): boolean {
    return this.#fields[shape] === nth
  }

  isOrdered(shape: number): boolean {
    return this.#fields[shape + 1] === 1
  }

  /** The order of the shape's members, in an object whose first one is at `first`. */
  sort(shape: number, first: number, { sorted }: Order): void {
    const fields = this.#fields
    const count = (fields[shape] as number) / MEMBER
    for (let n = 0; n < count; n++) sorted[n] = first + (fields[shape + HEAD + n * MEMBER + 2] as number)
  }

  /** Remembers an object with names without escapes that has been read, and ordered if it was not. */
  keep(
    shape: number,
    memory: Uint8Array,
    members: Int32Array,
    first: number,
    top: number,
    isOrdered: boolean,
    { sorted }: Order,
  ): void {
    const fields = this.#fields
    fields[shape + 2] = this.#body
    fields[shape] = 0
    if (top - first > MEMBER * MOST) return
    for (let at = first, n = 0; at < top; at += MEMBER, n++) {
      const name = members[at] as number
      let end = name
      while (memory[end] !== QUOTE) end++
      if (memory[end + 1] !== COLON) return
      const field = shape + HEAD + at - first
      fields[field] = name
      fields[field + 1] = end + 2 - name
      fields[field + 2] = isOrdered ? at - first : (sorted[n] as number) - first
    }
    fields[shape] = top - first
    fields[shape + 1] = isOrdered ? 1 : 0
  }
}

/** Whether the members from `first` to `top` are in order. */
export function areOrdered(memory: Uint8Array, members: Int32Array, first: number, top: number): boolean {
  for (let member = first + MEMBER; member < top; member += MEMBER)
    if (!isBefore(memory, members[member - MEMBER] as number, members[member] as number)) return false
  return true
}
