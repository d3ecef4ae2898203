import type { RawHeaders } from '../headers.ts'
import { textOf } from './content.ts'

/** What a JSON pointer names in a body, as written there. */
export type PointerResult =
  | { readonly kind: 'literal'; readonly literal: string }
  | { readonly kind: 'absent' }
  /** A member on the way is named twice: which one the upstream takes is unknown. */
  | { readonly kind: 'ambiguous' }

/** A body's text if it is JSON (RFC 8259), even if a double or a map would lose some of it; else null. */
export function jsonText(headers: RawHeaders, body: Buffer): string | null {
  const text = textOf(headers, body)
  if (text === null || isDeep(text)) return null
  try {
    // Validation only: V8 13.6 misnames members whose names have escapes.
    JSON.parse(text)
    return text
  } catch {
    return null
  }
}

/** Services' parsers give up far earlier, and a megabyte of brackets would take this one 0.2 s. */
const MAX_DEPTH = 1000

/** Whether brackets nest too deep; linear. */
function isDeep(text: string): boolean {
  let depth = 0
  let quoted = false
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at)
    if (quoted) {
      if (code === BACKSLASH) at++
      else if (code === QUOTE) quoted = false
    } else if (code === QUOTE) quoted = true
    else if (code === BRACKET || code === BRACE) {
      if (++depth > MAX_DEPTH) return true
    } else if (code === BRACKET_END || code === BRACE_END) depth--
  }
  return false
}

const QUOTE = 0x22
const BACKSLASH = 0x5c
const BRACKET = 0x5b
const BRACKET_END = 0x5d
const BRACE = 0x7b
const BRACE_END = 0x7d

/** The literal that an RFC 6901 pointer names in valid JSON. Numbers beyond a double and duplicate names elsewhere do not matter. */
export function resolvePointer(json: string, pointer: string): PointerResult {
  let at = skipSpace(json, 0)
  for (const token of pointerTokens(pointer)) {
    const next = json[at] === '{' ? member(json, at, token) : json[at] === '[' ? item(json, at, token) : []
    if (next.length > 1) return { kind: 'ambiguous' }
    if (next[0] === undefined) return { kind: 'absent' }
    at = next[0]
  }
  return { kind: 'literal', literal: json.slice(at, skipValue(json, at)) }
}

/** Offsets of the values of that name. */
function member(json: string, object: number, token: string): number[] {
  const found: number[] = []
  let at = skipSpace(json, object + 1)
  while (json[at] !== '}') {
    const name = at
    at = skipString(json, at)
    const own = JSON.parse(json.slice(name, at)) === token
    at = skipSpace(json, skipSpace(json, at) + 1)
    if (own) found.push(at)
    at = skipComma(json, skipValue(json, at))
  }
  return found
}

function item(json: string, array: number, token: string): number[] {
  if (!isIndex(token)) return []
  let at = skipSpace(json, array + 1)
  for (let index = Number(token); json[at] !== ']'; index--) {
    if (index === 0) return [at]
    at = skipComma(json, skipValue(json, at))
  }
  return []
}

function skipSpace(json: string, at: number): number {
  while (' \t\n\r'.includes(json.charAt(at)) && at < json.length) at++
  return at
}

function skipComma(json: string, at: number): number {
  const next = skipSpace(json, at)
  return json[next] === ',' ? skipSpace(json, next + 1) : next
}

function skipString(json: string, at: number): number {
  for (at++; json[at] !== '"'; at++) if (json[at] === '\\') at++
  return at + 1
}

const DELIMITERS = ' \t\n\r,:"[]{}'

/** A loop, not a recursion: bodies may be nested as deep as they are long. */
function skipValue(json: string, at: number): number {
  let depth = 0
  do {
    switch (json.charAt(at)) {
      case '"':
        at = skipString(json, at)
        break
      case '{':
      case '[':
        depth++
        at++
        break
      case '}':
      case ']':
        depth--
        at++
        break
      default:
        do at++
        while (at < json.length && !DELIMITERS.includes(json.charAt(at)))
    }
  } while (depth > 0)
  return at
}

/** RFC 6901 pointer → reference tokens. */
export function pointerTokens(pointer: string): string[] {
  return pointer
    .split('/')
    .slice(1)
    .map((token) => token.replaceAll('~1', '/').replaceAll('~0', '~'))
}

/** A place in a document that pointers name or lead through, so that one pass serves all pointers. */
export interface Place {
  /** A pointer ends here. */
  isNamed: boolean
  readonly members: Map<string, Place>
  /** By the tokens that are an index. */
  readonly items: Map<number, Place>
  /** Lengths of the members' names, in bytes of UTF-8. */
  readonly lengths: Set<number>
}

/** The root of all places that the pointers name. */
export function placesOf(pointers: readonly string[]): Place {
  const root = newPlace()
  for (const pointer of pointers) placeOf(root, pointer).isNamed = true
  return root
}

/** The place that the pointer names. */
export function placeOf(root: Place, pointer: string): Place {
  let place = root
  for (const token of pointerTokens(pointer)) place = next(place, token)
  return place
}

function next(place: Place, token: string): Place {
  let found = place.members.get(token)
  if (found === undefined) {
    found = newPlace()
    place.members.set(token, found)
    place.lengths.add(Buffer.byteLength(token))
    if (isIndex(token)) place.items.set(Number(token), found)
  }
  return found
}

function newPlace(): Place {
  return { isNamed: false, members: new Map(), items: new Map(), lengths: new Set() }
}

/** As RFC 6901 spells it. */
function isIndex(token: string): boolean {
  return /^(?:0|[1-9]\d*)$/.test(token)
}
