import { isUtf8 } from 'node:buffer'
import {
  essence,
  formDataBoundary,
  isEncoded,
  isUtf8Named,
  linesOf,
  type RawHeaders,
  TOKEN,
} from '../headers.ts'
import type { Steps } from '../steps.ts'
import { hexPair } from './json-text.ts'
import { withoutMark } from './mark.ts'

/** The value of a form or query under one name. */
export type Field =
  /** The decoded bytes as Latin-1. */
  | { readonly kind: 'value'; readonly value: string }
  | { readonly kind: 'absent' }
  /** Servers may read different values, or none. */
  | { readonly kind: 'unclear'; readonly why: string }

const ABSENT: Field = { kind: 'absent' }

export const URLENCODED = 'application/x-www-form-urlencoded'
export const MULTIPART = 'multipart/form-data'

/** The parameter `name` of a query, as the URL standard reads it. */
export function queryField(query: string, name: string): Field {
  return pairNamed(query, name, ABSENT)
}

/**
 * The field `name` (printable ASCII without quotes, backslashes and percent signs) of a form, urlencoded or multipart. Absent if the body
 * is not a form.
 */
export function* formField(headers: RawHeaders, sent: Buffer, name: string): Steps<Field> {
  const type = essence(headers)
  if (type !== URLENCODED && type !== MULTIPART)
    return namesForm(headers) ? unclear('the request has several Content-Type lines') : ABSENT
  if (isEncoded(headers)) return unclear('the form is compressed')
  if (!isUtf8Named(headers)) return unclear('the form is not in UTF-8')
  const body = withoutMark(sent)
  return type === URLENCODED ? yield* pairIn(body, name) : yield* partNamed(headers, body, name)
}

/** A server may use any of several Content-Type lines. */
function namesForm(headers: RawHeaders): boolean {
  const lines = linesOf(headers, 'content-type')
  return lines.length > 1 && [URLENCODED, MULTIPART].some((type) => lines.join().toLowerCase().includes(type))
}

const AMPERSAND = 0x26
const PLUS = 0x2b
const PERCENT = 0x25
const SPACE = 0x20

function* pairIn(body: Buffer, name: string): Steps<Field> {
  let found = ABSENT
  for (let at = 0; at <= body.length; ) {
    if (at > 0) yield
    const next = body.indexOf(AMPERSAND, at + AT_ONCE)
    const end = next < 0 ? body.length : next
    found = pairNamed(body.toString('latin1', at, end), name, found)
    at = end + 1
  }
  return found
}

/**
 * https://url.spec.whatwg.org/#urlencoded-parsing, of `pairs` as Latin-1; only pairs of the name are decoded. `before`: the result of
 * earlier pairs.
 */
function pairNamed(pairs: string, name: string, before: Field): Field {
  const pattern = pairPattern(name)
  pattern.lastIndex = 0
  const pair = pattern.exec(pairs)
  if (pair === null) return before
  if (before.kind !== 'absent' || pattern.test(pairs)) return unclear('the field occurs twice')
  return { kind: 'value', value: unescaped(Buffer.from(pair[1] ?? '', 'latin1')) }
}

/** Unescapes in place. Invalid escapes stay. */
function unescaped(bytes: Buffer): string {
  let length = 0
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes[at] as number
    const value = byte === PERCENT ? hexPair(bytes, at + 1) : -1
    bytes[length++] = value < 0 ? (byte === PLUS ? SPACE : byte) : value
    if (value >= 0) at += 2
  }
  return bytes.toString('latin1', 0, length)
}

/** One per configured name. */
const PAIR_PATTERNS = new Map<string, RegExp>()

/** Matches the pairs of that name, whichever of its characters are escaped. Linear. */
function pairPattern(name: string): RegExp {
  const known = PAIR_PATTERNS.get(name)
  if (known !== undefined) return known
  const characters = Array.from(name, (char) => {
    const hex = char.charCodeAt(0).toString(16)
    const escaped = `%${hex.replace(/[a-f]/g, (digit) => `[${digit}${digit.toUpperCase()}]`)}`
    if (char === ' ') return `(?:[ +]|${escaped})`
    return '+&='.includes(char) ? escaped : `(?:\\x${hex}|${escaped})`
  })
  const pattern = new RegExp(`(?:^|&)${characters.join('')}(?:=([^&]*))?(?=&|$)`, 'g')
  PAIR_PATTERNS.set(name, pattern)
  return pattern
}

/** Longer than any real head of a part. Bytes. */
const MAX_PART_HEAD = 8192

function* partNamed(headers: RawHeaders, body: Buffer, name: string): Steps<Field> {
  const split = yield* multipartParts(headers, body)
  if (split === null) return unclear('the body is not multipart/form-data that all servers read alike')
  let found: Field = ABSENT
  let left = AT_ONCE
  for (const part of split.parts) {
    left -= Math.min(part.length, MAX_PART_HEAD)
    if (left < 0) {
      yield
      left = AT_ONCE
    }
    const read = readPart(part)
    if (read === null) return unclear('a part has headers that servers may read differently')
    if (read.name !== name) continue
    if (read.isFile) return unclear('the field is a file')
    if (found.kind === 'value') return unclear('the field occurs twice')
    found = { kind: 'value', value: part.toString('latin1', read.content) }
  }
  return found
}

interface FormPart {
  readonly name: string
  readonly isFile: boolean
  /** Where its content begins. */
  readonly content: number
}

/** null: not as browsers and HTTP libraries write it, or with content that some servers would decode. */
function readPart(part: Buffer): FormPart | null {
  const head = part.toString('latin1', 0, MAX_PART_HEAD)
  const end = head.indexOf('\r\n\r\n')
  if (end < 0) return null
  let disposition: RegExpExecArray | null = null
  for (const line of head.slice(0, end).split('\r\n')) {
    const [, field, padded = ''] = PART_LINE.exec(line) ?? []
    const value = padded.replace(/^[ \t]+/, '')
    switch (field?.toLowerCase()) {
      case undefined:
        return null
      case 'content-disposition':
        if (disposition !== null) return null
        disposition = DISPOSITION.exec(value)
        if (disposition === null) return null
        break
      case 'content-transfer-encoding':
        if (!/^(?:binary|[78]bit)$/i.test(value)) return null
        break
      default:
    }
  }
  if (disposition === null) return null
  const [, quoted, token, file] = disposition
  return { name: quoted ?? (token as string), isFile: file !== undefined, content: end + 4 }
}

/** Whitespace before the value is part of it here: matched apart, it would cause backtracking. */
const PART_LINE = new RegExp(`^(${TOKEN}):([^\\r\\n\\0]*)$`)
/** A name with a backslash is read in two ways. File names may have any spelling (RFC 7578 §4.2, RFC 6266 §4.3). */
const DISPOSITION = new RegExp(
  `^form-data; ?name=(?:"([^"\\\\]*)"|(${TOKEN}))(?:; ?(filename\\*?)=(?:"(?:[^"\\\\]|\\\\.)*"|[^\\s";]+)){0,2}[ \\t]*$`,
  'i',
)

function unclear(why: string): Field {
  return { kind: 'unclear', why }
}

/** Bytes with no meaning to any form parser, so that escaping them is needless. Some parsers split at `,`, `;`, `=` and brackets. */
const PLAIN = new Uint8Array(256)
for (const byte of Buffer.from(
  "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!'()*:@/?$",
))
  PLAIN[byte] = 1

const DIGITS = '0123456789ABCDEF'

/**
 * The body of a form in one spelling: needless escapes undone, `%20` as `+`, hex digits in upper case. All else stays (order,
 * empty pairs, `a` or `a=`), so that every parser reads equal results alike. null: an invalid escape, or not UTF-8.
 */
export function* formContent(headers: RawHeaders, body: Buffer): Steps<Buffer | null> {
  if (essence(headers) !== URLENCODED || !isUtf8Named(headers)) return null
  if (!body.includes(PERCENT)) return isUtf8(body) ? body : null
  const spelled = Buffer.allocUnsafe(body.length)
  const decoded = Buffer.allocUnsafe(body.length)
  let written = 0
  let length = 0
  let until = AT_ONCE
  for (let at = 0; at < body.length; at++) {
    if (at > until) {
      yield
      until += AT_ONCE
    }
    const byte = body[at] as number
    if (byte !== PERCENT) {
      spelled[written++] = byte
      decoded[length++] = byte
      continue
    }
    const value = hexPair(body, at + 1)
    if (value < 0) return null
    decoded[length++] = value
    if (value === SPACE) spelled[written++] = PLUS
    else if (PLAIN[value] === 1) spelled[written++] = value
    else {
      spelled[written++] = PERCENT
      spelled[written++] = DIGITS.charCodeAt(value >> 4)
      spelled[written++] = DIGITS.charCodeAt(value & 15)
    }
    at += 2
  }
  return isUtf8(decoded.subarray(0, length)) ? spelled.subarray(0, written) : null
}

/** Bytes of a form read in one step. */
const AT_ONCE = 64 * 1024

/** More than any honest form has; each part costs a call of the hash. */
const MAX_PARTS = 1000

/**
 * A `multipart/form-data` body without its boundary: each part byte for byte, framed, and the closing bytes. Bodies with equal results
 * differ only in the boundary, so no parser reads them differently. null: see {@link multipartParts}.
 */
export function* multipartContent(headers: RawHeaders, body: Buffer): Steps<(string | Buffer)[] | null> {
  const split = yield* multipartParts(headers, body)
  if (split === null) return null
  const content = split.parts.flatMap((part) => [`${part.length}:`, part])
  return [...content, split.closing]
}

interface MultipartParts {
  /** Headers and content of each. */
  readonly parts: readonly Buffer[]
  readonly closing: string
}

/**
 * The parts of a `multipart/form-data` body. null: too many parts, or not of the strict form that every parser splits alike (a
 * preamble, an epilogue, whitespace after a delimiter, the boundary within a part, bare line feeds).
 */
export function* multipartParts(headers: RawHeaders, body: Buffer): Steps<MultipartParts | null> {
  const boundary = formDataBoundary(headers)
  if (boundary === null || !body.subarray(0, boundary.length + 2).equals(Buffer.from(`--${boundary}`)))
    return null
  const delimiter = Buffer.from(`\r\n--${boundary}`)
  const parts: Buffer[] = []
  let at = boundary.length + 2
  let until = AT_ONCE
  let delimiters = 1
  while (body.subarray(at, at + CRLF.length).equals(CRLF)) {
    if (at > until) {
      yield
      until = at + AT_ONCE
    }
    const start = at + CRLF.length
    const end = yield* find(body, delimiter, start)
    if (end < 0 || delimiters++ > MAX_PARTS) return null
    parts.push(body.subarray(start, end))
    at = end + delimiter.length
  }
  const closing = body.toString('latin1', at)
  if (!CLOSING.test(closing)) return null
  return (yield* occurrences(body, boundary, delimiters + 1)) === delimiters ? { parts, closing } : null
}

const CRLF = Buffer.from('\r\n')
/** Some clients add blank lines. */
const CLOSING = /^--[ \t\r\n]{0,8}$/

/** How often `text` occurs in `body`, including overlaps, up to `most`. */
function* occurrences(body: Buffer, text: string, most: number): Steps<number> {
  const bytes = Buffer.from(text)
  let count = 0
  let until = AT_ONCE
  for (let at = yield* find(body, bytes, 0); at >= 0 && count < most; at = yield* find(body, bytes, at + 1)) {
    count++
    if (at < until) continue
    yield
    until = at + AT_ONCE
  }
  return count
}

/** Where `text` is in `body`, from `at` on; below 0: nowhere. A crafted body may have each byte compared many times. */
function* find(body: Buffer, text: Buffer, at: number): Steps<number> {
  for (; at < body.length; at += AT_ONCE) {
    const found = body.subarray(at, at + AT_ONCE + text.length - 1).indexOf(text)
    if (found >= 0) return at + found
    if (at + AT_ONCE < body.length) yield
  }
  return -1
}
