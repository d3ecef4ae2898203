import { isUtf8 } from 'node:buffer'
import { hexPair } from './content.ts'
import { Names, Pieces } from './json-pieces.ts'
import type { Place } from './json-pointer.ts'
import {
  BACKSLASH,
  byteAt,
  CLOSE_ARRAY,
  CLOSE_OBJECT,
  COLON,
  COMMA,
  isCanonicalEscape,
  isSpace,
  LOWER_U,
  OPEN_ARRAY,
  OPEN_OBJECT,
  putEscaped,
  putUtf8,
  QUOTE,
  readNumber,
  STOPS,
  shortEscape,
} from './json-scalars.ts'

/** Deeper than any honest request, shallow enough for the stack (contract §5). */
export const MAX_DEPTH = 100

/**
 * The RFC 8785 text of JSON in UTF-8, without the values at the places that `ignore` names. A member goes with its name; of an
 * item the commas stay, so that its neighbours keep their index.
 *
 * `null`: invalid JSON, or canonical form would lose information: a duplicate member name, a lone surrogate, a number whose
 * decimal value is not what ECMAScript prints for the double, or nesting beyond {@link MAX_DEPTH} (contract §5).
 *
 * Bodies are untrusted and reading blocks the event loop, so the time is linear in the length. No value is built of the text;
 * what is canonical already is copied once, at the end (docs/adr/0046).
 */
export function canonicalJson(body: Buffer, ignore: Place | null = null): Buffer | null {
  return read(body, (reader) => reader.without(ignore))
}

/** The RFC 8785 texts of the values found at the places that `only` names; `null` as {@link canonicalJson}. */
export function canonicalValues(body: Buffer, only: Place): ReadonlyMap<Place, Buffer> | null {
  return read(body, (reader) => reader.only(only))
}

/** Never leaves this module: no canonical form keeps all the information. */
class Lossy extends Error {}

function read<T>(body: Buffer, what: (reader: Reader) => T): T | null {
  try {
    return isUtf8(body) ? what(new Reader(body)) : null
  } catch (error) {
    if (error instanceof Lossy) return null
    throw error
  }
}

class Reader {
  readonly #body: Buffer
  readonly #pieces: Pieces
  readonly #names: Names
  /** First and last piece at each named place; null: named places are left out. */
  #found: Map<Place, readonly [number, number]> | null = null
  #at = 0
  /** The last name read, without quotes and escapes. */
  #nameStart = 0
  #nameEnd = 0

  constructor(body: Buffer) {
    this.#body = body
    this.#pieces = new Pieces(body)
    this.#names = new Names(this.#pieces)
  }

  without(ignore: Place | null): Buffer {
    this.#document(() => this.#value(0, ignore))
    return this.#pieces.text(0, this.#pieces.count - 1)
  }

  only(places: Place): ReadonlyMap<Place, Buffer> {
    const found = new Map<Place, readonly [number, number]>()
    this.#found = found
    this.#document(() => void this.#placed(0, places))
    return new Map([...found].map(([place, [first, last]]) => [place, this.#pieces.text(first, last)]))
  }

  #document(value: () => void): void {
    this.#space()
    value()
    this.#space()
    if (this.#at !== this.#body.length) throw new Lossy()
    this.#pieces.cut(this.#at)
  }

  /** Reads the value at a place; true: it is left out. */
  #placed(depth: number, place: Place | null): boolean {
    if (place === null || !place.isNamed) {
      this.#value(depth, place)
      return false
    }
    const pieces = this.#pieces
    pieces.cut(this.#at)
    pieces.changes++
    const first = pieces.count
    if (this.#found === null) {
      this.#value(depth, null)
      pieces.rewind(first, this.#at)
      return true
    }
    this.#value(depth, place)
    pieces.cut(this.#at)
    this.#found.set(place, [first, pieces.count - 1])
    return false
  }

  #value(depth: number, place: Place | null): void {
    switch (byteAt(this.#body, this.#at)) {
      case OPEN_OBJECT:
        return this.#object(depth, place)
      case OPEN_ARRAY:
        return this.#array(depth, place)
      case QUOTE:
        return this.#string()
      case 0x74:
        return this.#word('true')
      case 0x66:
        return this.#word('false')
      case 0x6e:
        return this.#word('null')
      default:
        return this.#number()
    }
  }

  #array(depth: number, place: Place | null): void {
    if (depth === MAX_DEPTH) throw new Lossy()
    const body = this.#body
    this.#at++
    this.#space()
    if (byteAt(body, this.#at) !== CLOSE_ARRAY) {
      for (let index = 0; ; index++) {
        if (place === null) this.#value(depth + 1, null)
        else this.#placed(depth + 1, place.items.get(index) ?? null)
        this.#space()
        if (byteAt(body, this.#at) !== COMMA) break
        this.#at++
        this.#space()
      }
      if (byteAt(body, this.#at) !== CLOSE_ARRAY) throw new Lossy()
    }
    this.#at++
  }

  #object(depth: number, place: Place | null): void {
    if (depth === MAX_DEPTH) throw new Lossy()
    const body = this.#body
    const pieces = this.#pieces
    const names = this.#names
    const { count, from, changes } = pieces
    const own = names.count
    let isOrdered = true
    this.#at++
    this.#space()
    if (byteAt(body, this.#at) === CLOSE_OBJECT) {
      this.#at++
      return
    }
    pieces.cut(this.#at)
    const before = pieces.count - 1
    for (;;) {
      const first = pieces.count
      this.#name()
      const start = this.#nameStart
      const end = this.#nameEnd
      const inner = place === null ? null : this.#member(place)
      this.#space()
      if (byteAt(body, this.#at) !== COLON) throw new Lossy()
      this.#at++
      this.#space()
      const isLeftOut = this.#placed(depth + 1, inner)
      if (isLeftOut) pieces.rewind(first, this.#at)
      else pieces.cut(this.#at)
      names.add(start, end, isLeftOut ? -1 : first, pieces.count - 1)
      if (isOrdered && names.count > own + 1) {
        const order = names.compareLast()
        if (order === 0) throw new Lossy()
        isOrdered = order < 0
      }
      this.#space()
      if (byteAt(body, this.#at) !== COMMA) break
      this.#at++
      this.#space()
      pieces.from = this.#at
    }
    if (byteAt(body, this.#at) !== CLOSE_OBJECT) throw new Lossy()
    this.#at++
    if (isOrdered && pieces.changes === changes) pieces.rewind(count, from)
    else {
      if (!names.link(own, before, isOrdered)) throw new Lossy()
      pieces.changes++
    }
    names.count = own
  }

  /** The place of the member with the last name read. */
  #member(place: Place): Place | null {
    if (!place.lengths.has(this.#nameEnd - this.#nameStart)) return null
    return place.members.get(this.#pieces.string(this.#nameStart, this.#nameEnd)) ?? null
  }

  #name(): void {
    if (byteAt(this.#body, this.#at) !== QUOTE) throw new Lossy()
    const start = this.#at + 1
    const plain = this.#plainEnd(start)
    if (byteAt(this.#body, plain) === QUOTE) {
      this.#nameStart = start
      this.#nameEnd = plain
      this.#at = plain + 1
      return
    }
    this.#string()
    const end = this.#at
    const pieces = this.#pieces
    this.#nameStart = this.#body.length + pieces.madeLength
    for (this.#at = start; this.#at < end - 1; )
      if (this.#body[this.#at] === BACKSLASH) putUtf8(this.#escape(), pieces)
      else pieces.put(this.#body[this.#at++] as number)
    this.#nameEnd = this.#body.length + pieces.madeLength
    this.#at = end
  }

  #string(): void {
    const body = this.#body
    let at = this.#plainEnd(this.#at + 1)
    while (byteAt(body, at) === BACKSLASH) {
      this.#at = at
      const code = this.#escape()
      if (!isCanonicalEscape(body, at, code)) return this.#respelled(at, code)
      at = this.#plainEnd(this.#at)
    }
    if (byteAt(body, at) !== QUOTE) throw new Lossy()
    this.#at = at + 1
  }

  /** Rewrites the string from the escape at `start` to its end: one piece, however many escapes. */
  #respelled(start: number, code: number): void {
    const body = this.#body
    const pieces = this.#pieces
    const made = pieces.madeLength
    putEscaped(code, pieces)
    for (;;) {
      const byte = byteAt(body, this.#at)
      if (STOPS[byte] === 0) {
        pieces.put(byte)
        this.#at++
      } else if (byte === BACKSLASH) putEscaped(this.#escape(), pieces)
      else break
    }
    if (byteAt(body, this.#at) !== QUOTE) throw new Lossy()
    pieces.replace(start, this.#at++, made)
  }

  #plainEnd(at: number): number {
    const body = this.#body
    while (at < body.length && STOPS[body[at] as number] === 0) at++
    return at
  }

  /** The code point of the escape here. */
  #escape(): number {
    const letter = byteAt(this.#body, this.#at + 1)
    if (letter === LOWER_U) {
      const unit = this.#unit()
      if (unit < 0xd800 || unit > 0xdfff) return unit
      const isPair = this.#body[this.#at] === BACKSLASH && this.#body[this.#at + 1] === LOWER_U
      const low = isPair ? this.#unit() : 0
      if (unit > 0xdbff || low < 0xdc00 || low > 0xdfff) throw new Lossy()
      return 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
    }
    const code = shortEscape(letter)
    if (code === 0) throw new Lossy()
    this.#at += 2
    return code
  }

  /** The four hex digits of a `\u`. */
  #unit(): number {
    const unit = hexPair(this.#body, this.#at + 2) * 256 + hexPair(this.#body, this.#at + 4)
    if (Number.isNaN(unit)) throw new Lossy()
    this.#at += 6
    return unit
  }

  #word(word: string): void {
    for (let n = 0; n < word.length; n++)
      if (byteAt(this.#body, this.#at++) !== word.charCodeAt(n)) throw new Lossy()
  }

  #number(): void {
    const end = readNumber(this.#body, this.#at, this.#pieces)
    if (end < 0) throw new Lossy()
    this.#at = end
  }

  #space(): void {
    const body = this.#body
    const start = this.#at
    let at = start
    while (at < body.length && isSpace(body[at] as number)) at++
    if (at === start) return
    this.#pieces.leaveOut(start, at)
    this.#at = at
  }
}
