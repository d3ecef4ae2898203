import { isBefore, MEMBER, type Order } from './json-names.ts'
import { COLON, MAX_DEPTH, QUOTE } from './json-scalars.ts'

/** The shape of an object whose names are not compared with another's. */
export const NO_SHAPE = -0x40000000

/** Objects with more members are always read as if they were the first of their kind. */
const MAX_MEMBERS = 32
/** Number of filled member fields; whether the members are in order; number of the body. */
const HEAD = 3
const SHAPE = HEAD + MEMBER * MAX_MEMBERS
/** Shapes per depth, for lists in neighbouring members. */
const BESIDE = 4

/**
 * The member names of the latest objects. Large bodies are mostly lists of objects with the same members in the same order: an object whose
 * names repeat the previous one's needs no search for the ends of its names, and no sorting (docs/adr/0072).
 */
export class Shapes {
  /** Per shape: its head, then per member its name's position in the body, its length with the colon, and the n-th member in order. */
  readonly #fields = new Int32Array(SHAPE * BESIDE * (MAX_DEPTH + 1))
  #body = 0

  /** Begins another body, and forgets all objects. */
  begin(): void {
    this.#body = (this.#body + 1) | 0
  }

  /**
   * The shape to compare with for the `nth` member of its parent. Below 0: none yet; `~` of it is where it will be. No two open objects
   * share a shape.
   */
  of(depth: number, nth: number): number {
    const shape = SHAPE * (depth * BESIDE + (nth & (BESIDE - 1)))
    return this.#fields[shape + 2] === this.#body ? shape : ~shape
  }

  /** Where a member's value begins if its name, at `name`, matches the shape; else 0. `nth`: index of its fields in its object. */
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

  /** Whether the object has exactly the shape's members. */
  isWhole(shape: number, nth: number): boolean {
    return this.#fields[shape] === nth
  }

  isOrdered(shape: number): boolean {
    return this.#fields[shape + 1] === 1
  }

  /** Sorts the members of an object of this shape whose first one is at `first`. */
  sort(shape: number, first: number, { sorted }: Order): void {
    const fields = this.#fields
    const count = (fields[shape] as number) / MEMBER
    for (let n = 0; n < count; n++) sorted[n] = first + (fields[shape + HEAD + n * MEMBER + 2] as number)
  }

  /** Remembers the shape of an object that was read, and sorted if needed. Its names must have no escapes. */
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
    if (top - first > MEMBER * MAX_MEMBERS) return
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
