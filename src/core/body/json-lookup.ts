import { isUtf8 } from 'node:buffer'
import { isEncoded, type RawHeaders } from '../headers.ts'
import type { Steps } from '../steps.ts'
import { type PointerNode, placesOf, pointerTokens } from './json-pointer.ts'
import {
  COLON,
  COMMA,
  DOT,
  LOWER_E,
  MINUS,
  OPEN_ARRAY,
  OPEN_OBJECT,
  PLAIN,
  QUOTE,
  ZERO,
} from './json-scalars.ts'
import { hexPair } from './json-text.ts'
import { withoutMark } from './mark.ts'

/** The value at a JSON pointer, as written in the body. */
export type PointerResult =
  | { readonly kind: 'literal'; readonly literal: string }
  | { readonly kind: 'absent' }
  /** A member on the way is named twice: which one the upstream takes is unknown. */
  | { readonly kind: 'ambiguous' }

/** Services' parsers give up much earlier. */
const MAX_DEPTH = 1000

/** Bytes read in one step. */
const AT_ONCE = 64 * 1024

/** Difference between the bytes that open and close an object or array. */
const CLOSE = 2

/** Position of the last value at a place, and their number. */
interface LastValue {
  readonly count: number
  readonly start: number
  end: number
}

/** The result of {@link lookUp}. */
export class LookedUp {
  readonly #body: Buffer
  readonly #root: PointerNode
  readonly #seen: ReadonlyMap<PointerNode, LastValue>

  constructor(body: Buffer, root: PointerNode, seen: ReadonlyMap<PointerNode, LastValue>) {
    this.#body = body
    this.#root = root
    this.#seen = seen
  }

  /** The whole text. */
  get text(): string {
    return this.#body.toString()
  }

  /** `pointer` must have been looked up. */
  at(pointer: string): PointerResult {
    let place = this.#root
    let seen = this.#seen.get(place) as LastValue
    for (const token of pointerTokens(pointer)) {
      place = place.members.get(token) as PointerNode
      const next = this.#seen.get(place)
      if (next === undefined) return { kind: 'absent' }
      if (next.count > 1) return { kind: 'ambiguous' }
      seen = next
    }
    return { kind: 'literal', literal: this.#body.toString('utf8', seen.start, seen.end) }
  }
}

/**
 * Looks up the values at the pointers. null: the body is not JSON (RFC 8259) in UTF-8, or too deep. Numbers beyond a double and
 * duplicate names elsewhere do not matter.
 */
export function* lookUp(
  headers: RawHeaders,
  sent: Buffer,
  pointers: readonly string[],
): Steps<LookedUp | null> {
  if (isEncoded(headers) || !isUtf8(sent)) return null
  const body = withoutMark(sent)
  const root = placesOf(pointers)
  const seen = new Map<PointerNode, LastValue>()
  // For each enclosing object or array: the byte that opens it, its place, and the number of items begun.
  const opened: number[] = []
  const places: (PointerNode | null)[] = []
  const counts: number[] = []
  let place: PointerNode | null = root
  let at = skipSpace(body, 0)
  let until = AT_ONCE
  value: for (;;) {
    if (at > until) {
      yield
      until = at + AT_ONCE
    }
    const inner = opened.length - 1
    const outside = places[inner] ?? null
    if (opened[inner] === OPEN_OBJECT) {
      const end = body[at] === QUOTE ? stringEnd(body, at) : NO_END
      if (end < 0) return null
      place = outside === null ? null : memberOf(outside, body.toString('utf8', at, end))
      at = skipSpace(body, end)
      if (body[at] !== COLON) return null
      at = skipSpace(body, at + 1)
    } else if (inner >= 0) {
      const count = counts[inner] as number
      place = outside?.items.get(count) ?? null
      counts[inner] = count + 1
    }
    if (place !== null) seen.set(place, { count: (seen.get(place)?.count ?? 0) + 1, start: at, end: at })
    const byte = body[at]
    if (byte === OPEN_OBJECT || byte === OPEN_ARRAY) {
      if (inner + 1 === MAX_DEPTH) return null
      at = skipSpace(body, at + 1)
      if (body[at] !== byte + CLOSE) {
        opened.push(byte)
        places.push(place)
        counts.push(0)
        continue
      }
      at++
    } else {
      at = scalarEnd(body, at)
      if (at < 0) return null
    }
    // A value has ended; so may its parents.
    for (;;) {
      if (place !== null) (seen.get(place) as LastValue).end = at
      at = skipSpace(body, at)
      const open = opened.at(-1)
      if (open === undefined) break value
      const next = body[at++]
      if (next === COMMA) break
      if (next !== open + CLOSE) return null
      place = places.pop() as PointerNode | null
      opened.pop()
      counts.pop()
    }
    at = skipSpace(body, at)
  }
  return at === body.length ? new LookedUp(body, root, seen) : null
}

/** The place of a member with that name, in quotes. */
function memberOf(place: PointerNode, name: string): PointerNode | null {
  return place.members.get(name.includes('\\') ? (JSON.parse(name) as string) : name.slice(1, -1)) ?? null
}

const TAB = 0x09
const LINE_FEED = 0x0a
const CARRIAGE_RETURN = 0x0d
const SPACE = 0x20

function skipSpace(body: Buffer, at: number): number {
  for (;;) {
    const byte = body[at]
    if (byte !== SPACE && byte !== LINE_FEED && byte !== CARRIAGE_RETURN && byte !== TAB) return at
    at++
  }
}

const WORDS = ['true', 'false', 'null'].map((word) => Buffer.from(word))

/** What begins here is not JSON. */
const NO_END = -1

/** End of a string, number or word, or {@link NO_END}. */
function scalarEnd(body: Buffer, start: number): number {
  const byte = body[start]
  if (byte === QUOTE) return stringEnd(body, start)
  if (byte === MINUS || isDigit(byte)) return numberEnd(body, start)
  const word = WORDS.find((one) => one[0] === byte)
  if (word === undefined) return NO_END
  const end = start + word.length
  return body.subarray(start, end).equals(word) ? end : NO_END
}

const BACKSLASH = 0x5c
const LOWER_U = 0x75
const ESCAPED = new Set(Buffer.from('"\\/bfnrt'))

function stringEnd(body: Buffer, start: number): number {
  for (let at = start + 1; at < body.length; at++) {
    if (PLAIN[body[at] as number] !== 0) continue
    if (body[at] === QUOTE) return at + 1
    if (body[at] !== BACKSLASH) return NO_END
    at++
    if (body[at] === LOWER_U) {
      if (hexPair(body, at + 1) < 0 || hexPair(body, at + 3) < 0) return NO_END
    } else if (!ESCAPED.has(body[at] as number)) return NO_END
  }
  return NO_END
}

const PLUS = 0x2b

function numberEnd(body: Buffer, start: number): number {
  const whole = body[start] === MINUS ? start + 1 : start
  let at = digitsEnd(body, whole)
  if (at === whole || (body[whole] === ZERO && at > whole + 1)) return NO_END
  if (body[at] === DOT) {
    const decimals = at + 1
    at = digitsEnd(body, decimals)
    if (at === decimals) return NO_END
  }
  if (((body[at] as number) | 0x20) === LOWER_E) {
    const sign = body[at + 1]
    const power = sign === PLUS || sign === MINUS ? at + 2 : at + 1
    at = digitsEnd(body, power)
    if (at === power) return NO_END
  }
  return at
}

function digitsEnd(body: Buffer, at: number): number {
  while (isDigit(body[at])) at++
  return at
}

function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= ZERO && byte <= ZERO + 9
}
