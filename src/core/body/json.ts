import { isUtf8 } from 'node:buffer'
import { isBefore, MEMBER, Order } from './json-names.ts'
import type { PointerNode } from './json-pointer.ts'
import {
  CLOSE_ARRAY,
  CLOSE_OBJECT,
  COLON,
  COMMA,
  DOT,
  LOWER_E,
  LOWER_F,
  LOWER_N,
  LOWER_T,
  Lossy,
  MAX_DEPTH,
  MINUS,
  OPEN_ARRAY,
  OPEN_OBJECT,
  PLAIN,
  QUOTE,
  QUOTE_WITHIN,
  readNumber,
  readString,
  SPACE,
  SURE_DIGITS,
  takeOutEscapes,
  ZERO,
} from './json-scalars.ts'
import { areOrdered, NO_SHAPE, Shapes } from './json-shapes.ts'
import { SHORT_BODY, Text } from './json-text.ts'

/**
 * The RFC 8785 text of JSON in UTF-8, without the values at the places in `ignore`. A member goes with its name; an item leaves
 * its commas, so that its neighbours keep their index. The next call overwrites the text.
 *
 * `null`: invalid JSON, or canonical form would lose information: a duplicate member name, a lone surrogate, a number whose
 * decimal value is not what ECMAScript prints for the double, or nesting beyond {@link MAX_DEPTH} (contract §5).
 */
export function canonicalJson(body: Buffer, ignore: PointerNode | null = null): Buffer | null {
  return atOnce(new JsonReading(body, ignore, false)).text
}

/** The RFC 8785 texts of the values at the places in `only`; `null` as for {@link canonicalJson}. */
export function canonicalValues(body: Buffer, only: PointerNode): ReadonlyMap<PointerNode, Buffer> | null {
  return atOnce(new JsonReading(body, only, true)).values
}

function atOnce(reading: JsonReading): JsonReading {
  while (!reading.step());
  return reading
}

/** Fields of an enclosing object or array: first member (-1: an array), `from` at its beginning, whether it is ordered, shape. */
const FRAME = 4

/** Shared by short bodies, which are read one at a time. */
const FRAMES = new Int32Array(FRAME * MAX_DEPTH)
const MEMBERS = new Int32Array(MEMBER * 1024)
const ORDER = new Order()
const SHAPES = new Shapes()

/** Difference between the bytes that open and close an object or array. */
const CLOSE = 2

/** Extra cost of a number with a point or an exponent, in bytes read. */
const NUMBER = 16
/** Bytes rearranged in the time of reading one. */
const MOVED = 16

/**
 * Reads JSON in steps. Bodies are untrusted and reading blocks the event loop, so no body makes a step take long. No values are
 * built, and canonical text is not even copied (docs/adr/0072).
 */
export class JsonReading {
  readonly #text: Text
  readonly #frames: Int32Array
  #members: Int32Array<ArrayBuffer>
  readonly #order: Order
  readonly #shapes: Shapes
  /** Texts at the places in `only`; null: places are omitted. */
  readonly #values: Map<PointerNode, Buffer> | null
  /** By depth: the place of the current value, its start in the text, and its index. */
  readonly #places: (PointerNode | null)[]
  readonly #starts: number[] = []
  readonly #indexes: number[] = []
  readonly #isShort: boolean
  #isLossy: boolean

  // Where the next step continues.
  #at = 0
  #depth = 0
  #first = -1
  #from = 0
  #isOrdered = true
  #shape = NO_SHAPE
  #top = 0
  /** The object that ends here is being sorted. */
  #isOrdering = false

  /** Collects (`only`) or omits the values at the places below `root`. */
  constructor(body: Buffer, root: PointerNode | null, only: boolean) {
    const isShort = body.length <= SHORT_BODY
    this.#isShort = isShort
    this.#text = new Text(body)
    this.#frames = isShort ? FRAMES : new Int32Array(FRAMES.length)
    this.#members = isShort ? MEMBERS : new Int32Array(MEMBERS.length)
    this.#order = isShort ? ORDER : new Order()
    this.#shapes = isShort ? SHAPES : new Shapes()
    this.#shapes.begin()
    this.#values = only ? new Map() : null
    this.#places = [root]
    this.#isLossy = !isUtf8(body)
  }

  /** Valid after the last step. See {@link canonicalJson}. */
  get text(): Buffer | null {
    return this.#isLossy ? null : this.#text.whole()
  }

  /** Valid after the last step. See {@link canonicalValues}. */
  get values(): ReadonlyMap<PointerNode, Buffer> | null {
    return this.#isLossy ? null : this.#values
  }

  /** To be called once the results have been used: it empties the {@link text} of a long body. */
  free(): void {
    this.#text.free()
    if (this.#isShort) return
    this.#members.buffer.transfer(0)
    this.#order.free()
  }

  /** Reads about {@link SHORT_BODY} more bytes. True: that was the last step. A short body takes one. */
  step(): boolean {
    if (this.#isLossy) return true
    try {
      while (!this.#read()) if (!this.#isShort) return false
    } catch (error) {
      if (!(error instanceof Lossy)) throw error
      this.#isLossy = true
    }
    return true
  }

  #read(): boolean {
    const text = this.#text
    const frames = this.#frames
    const order = this.#order
    const shapes = this.#shapes
    const plain = PLAIN
    const isTracked = this.#places[0] !== null
    let at = text.skipSpace(this.#at)
    let { memory, words } = text
    let members = this.#members
    let depth = this.#depth
    let first = this.#first
    let from = this.#from
    let isOrdered = this.#isOrdered
    let shape = this.#shape
    let top = this.#top
    let resumes = this.#isOrdering
    let until = at + SHORT_BODY

    value: for (;;) {
      if (!resumes) {
        if (at > until) return this.#pause(at, depth, first, from, isOrdered, shape, top)
        if (first >= 0) {
          // The name of a member.
          if (memory[at] !== QUOTE) throw new Lossy()
          if (top === members.length) members = this.#moreMembers()
          const name = at + 1
          members[top] = name
          members[top + 1] = text.placeOf(at)
          const known = shape >= 0 ? shapes.end(shape, top - first, words, name) : 0
          top += MEMBER
          if (known > 0) {
            at = known
            if (isTracked) this.#toMember(depth, name)
          } else {
            if (shape >= 0) {
              shape = ~shape
              isOrdered = isOrdered && areOrdered(memory, members, first, top - MEMBER)
            }
            at = name
            while (plain[memory[at] as number] !== 0) at++
            if (memory[at] !== QUOTE) {
              at = this.#escapedName(name, at)
              shape = NO_SHAPE
              memory = text.memory
              words = text.words
            }
            if (isOrdered && top - MEMBER > first)
              isOrdered = isBefore(memory, members[top - 2 * MEMBER] as number, name)
            if (isTracked) this.#toMember(depth, name)
            at++
            if (memory[at] !== COLON) {
              at = text.skipSpace(at)
              if (memory[at] !== COLON) throw new Lossy()
            }
            at++
          }
          if ((memory[at] as number) <= SPACE) at = text.skipSpace(at)
        }
        if (isTracked) this.#starts[depth] = text.placeOf(at)
        let byte = memory[at] as number
        if (byte === QUOTE) {
          at++
          while (plain[memory[at] as number] !== 0) at++
          if (memory[at] !== QUOTE) at = readString(text, at)
          at++
        } else if (byte === OPEN_OBJECT || byte === OPEN_ARRAY) {
          if (depth === MAX_DEPTH) throw new Lossy()
          at++
          if ((memory[at] as number) <= SPACE) at = text.skipSpace(at)
          if (memory[at] !== byte + CLOSE) {
            const frame = FRAME * depth++
            frames[frame] = first
            frames[frame + 1] = from
            frames[frame + 2] = isOrdered ? 1 : 0
            frames[frame + 3] = shape
            // An object outside a list occurs once, so its shape is not remembered.
            const isOne = byte === OPEN_ARRAY || depth === 1 || (first >= 0 && shape === NO_SHAPE)
            shape = isOne ? NO_SHAPE : shapes.of(depth, first < 0 ? 0 : top - first)
            first = byte === OPEN_OBJECT ? top : -1
            from = text.from
            isOrdered = true
            if (isTracked) this.#toItem(depth, 0)
            continue
          }
          at++
        } else if (byte === LOWER_T) at = wordEnd(memory, at, 0x72, 0x75, 0x65)
        else if (byte === LOWER_N) at = wordEnd(memory, at, 0x75, 0x6c, 0x6c)
        else if (byte === LOWER_F && memory[at + 1] === 0x61) at = wordEnd(memory, at + 1, 0x6c, 0x73, 0x65)
        else {
          const start = at
          if (byte === MINUS) byte = memory[++at] as number
          const whole = at
          while (((memory[at] as number) - ZERO) >>> 0 < 10) at++
          const length = at - whole
          const next = memory[at] as number
          let isUsual: boolean
          if (next === DOT) {
            const tenths = memory[++at] as number
            while (((memory[at] as number) - ZERO) >>> 0 < 10) at++
            const isSmall = byte === ZERO && (length > 1 || tenths <= ZERO)
            // The last character is neither a zero nor the point.
            isUsual = length > 0 && !isSmall && (memory[at - 1] as number) > ZERO
          } else isUsual = length > 0 && (byte !== ZERO || at - start === 1)
          if (!isUsual || at - whole > SURE_DIGITS || ((memory[at] as number) | 0x20) === LOWER_E) {
            at = readNumber(text, start)
            until -= NUMBER
          }
        }
      }
      // A value has ended; so may its parents.
      for (;;) {
        if (isTracked && !resumes && this.#leave(depth, at, first < 0 ? -1 : top)) isOrdered = false
        if ((memory[at] as number) <= SPACE) at = text.skipSpace(at)
        if (depth === 0) break value
        const byte = memory[at]
        if (first >= 0 && !resumes) members[top - 1] = text.placeOf(at)
        if (byte === COMMA) {
          at++
          if ((memory[at] as number) <= SPACE) at = text.skipSpace(at)
          if (isTracked && first < 0) this.#toItem(depth, (this.#indexes[depth] as number) + 1)
          break
        }
        if (byte !== (first < 0 ? CLOSE_ARRAY : CLOSE_OBJECT)) throw new Lossy()
        let isSorted = false
        if (shape >= 0 && first >= 0 && !resumes) {
          if (!shapes.isWhole(shape, top - first)) {
            shape = ~shape
            isOrdered = isOrdered && areOrdered(memory, members, first, top)
          } else if (!shapes.isOrdered(shape)) {
            isOrdered = false
            isSorted = true
            shapes.sort(shape, first, order)
          }
        }
        if (!isOrdered) {
          const count = (top - first) / MEMBER
          if (!resumes && !isSorted) order.begin(memory, members, first, count)
          const moved =
            isSorted || order.finish(memory, members, count)
              ? text.rearrange(members, order.sorted, count, first, from, at)
              : -1
          this.#isOrdering = moved < 0
          if (moved < 0) return this.#pause(at, depth, first, from, isOrdered, shape, top)
          until -= moved / MOVED
          resumes = false
        }
        if (first >= 0) {
          if (shape < 0 && shape !== NO_SHAPE)
            shapes.keep(~shape, memory, members, first, top, isOrdered, order)
          top = first
        }
        at++
        const frame = FRAME * --depth
        first = frames[frame] as number
        from = frames[frame + 1] as number
        isOrdered = frames[frame + 2] === 1
        shape = frames[frame + 3] as number
      }
    }
    if (at !== text.end) throw new Lossy()
    return true
  }

  #pause(
    at: number,
    depth: number,
    first: number,
    from: number,
    isOrdered: boolean,
    shape: number,
    top: number,
  ): false {
    this.#at = at
    this.#depth = depth
    this.#first = first
    this.#from = from
    this.#isOrdered = isOrdered
    this.#shape = shape
    this.#top = top
    return false
  }

  #moreMembers(): Int32Array<ArrayBuffer> {
    const more = new Int32Array(this.#members.length * 2)
    more.set(this.#members)
    if (this.#members !== MEMBERS) this.#members.buffer.transfer(0)
    this.#members = more
    return more
  }

  /** Reads a name from its first escape on, and decodes all escapes in the body, so that names compare as bytes. */
  #escapedName(name: number, at: number): number {
    const end = readString(this.#text, at)
    this.#text.keep(end)
    takeOutEscapes(this.#text.memory, name, end)
    return end
  }

  #toItem(depth: number, index: number): void {
    this.#indexes[depth] = index
    this.#places[depth] = this.#places[depth - 1]?.items.get(index) ?? null
  }

  #toMember(depth: number, name: number): void {
    const place = this.#places[depth - 1] ?? null
    this.#places[depth] = null
    if (place === null) return
    const { memory } = this.#text
    const end = memory.indexOf(QUOTE, name)
    if (!place.lengths.has(end - name)) return
    const bytes = memory.slice(name, end).map((byte) => (byte === QUOTE_WITHIN ? QUOTE : byte))
    this.#places[depth] = place.members.get(Buffer.from(bytes).toString()) ?? null
  }

  /** The value at `depth` ends before `at`; `top`: index after its member, -1: not a member. True: the member is omitted. */
  #leave(depth: number, at: number, top: number): boolean {
    const place = this.#places[depth] as PointerNode | null
    if (place === null || !place.isNamed) return false
    const text = this.#text
    const start = this.#starts[depth] as number
    if (this.#values !== null) {
      text.keep(at)
      this.#values.set(place, Buffer.from(text.bytes(start, text.out)))
      return false
    }
    if (depth === 0) return false
    if (top < 0) {
      text.takeBack(start, at)
      return false
    }
    this.#members[top - 2] = ~(this.#members[top - 2] as number)
    return true
  }
}

/** End of a word with these letters after the first. */
function wordEnd(memory: Uint8Array, at: number, second: number, third: number, fourth: number): number {
  if (memory[at + 1] !== second || memory[at + 2] !== third || memory[at + 3] !== fourth) throw new Lossy()
  return at + 4
}
