import { linesOf, type RawHeaders, TOKEN } from '../headers.ts'
import { decodeUtf8, essence, formDataBoundary, hexPair, isEncoded, isUtf8Named } from './content.ts'

/** What a form or a query holds under one name. */
export type Field =
  /** The decoded bytes as Latin-1. */
  | { readonly kind: 'value'; readonly value: string }
  | { readonly kind: 'absent' }
  /** Servers may take it for different values, or for none. */
  | { readonly kind: 'unclear'; readonly why: string }

const ABSENT: Field = { kind: 'absent' }

export const URLENCODED = 'application/x-www-form-urlencoded'
export const MULTIPART = 'multipart/form-data'

/** The parameter `name` of a query, as the URL standard reads it. */
export function queryField(query: string, name: string): Field {
  return query === '' ? ABSENT : pairNamed(Buffer.from(query, 'latin1'), name)
}

/**
 * The field `name` of a form, urlencoded or multipart. Absent where the body is no form. `name` is printable ASCII without
 * quotes, backslashes and percent signs.
 */
export function formField(headers: RawHeaders, body: Buffer, name: string): Field {
  const type = essence(headers)
  if (type !== URLENCODED && type !== MULTIPART)
    return namesForm(headers) ? unclear('the request has several Content-Type lines') : ABSENT
  if (isEncoded(headers)) return unclear('the form is compressed')
  if (!isUtf8Named(headers)) return unclear('the form is not in UTF-8')
  return type === URLENCODED ? pairNamed(body, name) : partNamed(headers, body, name)
}

/** Of several Content-Type lines a server may take any. */
function namesForm(headers: RawHeaders): boolean {
  const lines = linesOf(headers, 'content-type')
  return lines.length > 1 && lines.some((line) => isForm(line.toLowerCase()))
}

function isForm(type: string): boolean {
  return type.includes(URLENCODED) || type.includes(MULTIPART)
}

const AMPERSAND = 0x26
const EQUALS = 0x3d
const PLUS = 0x2b
const PERCENT = 0x25
const SPACE = 0x20

/** https://url.spec.whatwg.org/#urlencoded-parsing; only what bears the name is decoded. */
function pairNamed(pairs: Buffer, name: string): Field {
  let found: Field = ABSENT
  for (let start = 0; start < pairs.length; ) {
    // A loop: a call of `indexOf` for each pair would cost fifty times as much where pairs are short.
    let end = start
    while (end < pairs.length && pairs[end] !== AMPERSAND) end++
    const afterName = endOfName(pairs, start, end, name)
    if (afterName >= 0) {
      if (found.kind === 'value') return unclear('the field is there twice')
      found = { kind: 'value', value: decoded(pairs, Math.min(afterName + 1, end), end) }
    }
    start = end + 1
  }
  return found
}

/** Where the name of the pair ends, at its `=` or at `end`; -1: it has another name. */
function endOfName(pairs: Buffer, start: number, end: number, name: string): number {
  let at = start
  for (let n = 0; n < name.length; n++) {
    if (at >= end || pairs[at] === EQUALS) return -1
    const escaped = escapedAt(pairs, at, end)
    const byte = escaped ?? (pairs[at] === PLUS ? SPACE : pairs[at])
    if (byte !== name.charCodeAt(n)) return -1
    at += escaped === null ? 1 : 3
  }
  return at >= end || pairs[at] === EQUALS ? at : -1
}

function decoded(pairs: Buffer, start: number, end: number): string {
  const bytes = Buffer.allocUnsafe(end - start)
  let length = 0
  for (let at = start; at < end; ) {
    const escaped = escapedAt(pairs, at, end)
    bytes[length++] = escaped ?? (pairs[at] === PLUS ? SPACE : (pairs[at] as number))
    at += escaped === null ? 1 : 3
  }
  return bytes.toString('latin1', 0, length)
}

/** What a percent sign and two hex digits stand for; null: there is no such escape. */
function escapedAt(pairs: Buffer, at: number, end: number): number | null {
  if (pairs[at] !== PERCENT || at + 2 >= end) return null
  const value = hexPair(pairs, at + 1)
  return Number.isNaN(value) ? null : value
}

/** Longer than any head of a part that is meant. */
const MAX_PART_HEAD = 8192

function partNamed(headers: RawHeaders, body: Buffer, name: string): Field {
  const split = multipartParts(headers, body)
  if (split === null) return unclear('the body is no multipart/form-data that all servers read alike')
  let found: Field = ABSENT
  for (const part of split.parts) {
    const read = readPart(part)
    if (read === null) return unclear('a part has headers that servers may read differently')
    if (read.name !== name) continue
    if (read.isFile) return unclear('the field is a file')
    if (found.kind === 'value') return unclear('the field is there twice')
    found = { kind: 'value', value: part.toString('latin1', read.content) }
  }
  return found
}

interface Part {
  readonly name: string
  readonly isFile: boolean
  /** Where its content begins. */
  readonly content: number
}

/** null: not as browsers and HTTP libraries write it, or with a content that some would decode. */
function readPart(part: Buffer): Part | null {
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

/** Blanks before the value are part of it here: told apart by the expression, each of them would be tried. */
const PART_LINE = new RegExp(`^(${TOKEN}):([^\\r\\n\\0]*)$`)
/** A name with a backslash is read in two ways. File names may have any spelling (RFC 7578 §4.2, RFC 6266 §4.3). */
const DISPOSITION = new RegExp(
  `^form-data; ?name=(?:"([^"\\\\]*)"|(${TOKEN}))(?:; ?(filename\\*?)=(?:"(?:[^"\\\\]|\\\\.)*"|[^\\s";]+)){0,2}[ \\t]*$`,
  'i',
)

function unclear(why: string): Field {
  return { kind: 'unclear', why }
}

/**
 * Bytes that no form parser gives a meaning of its own, so that their escapes are needless. Not `,`, `;`, `=` and brackets,
 * at which some split before they decode, and nothing that a form may not hold as it stands.
 */
const PLAIN = new Set(
  Buffer.from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!'()*:@/?$"),
)

const DIGITS = '0123456789ABCDEF'

/**
 * The body of a form in one spelling: needless escapes undone, `%20` written as `+`, hex digits in upper case. All else
 * stays, so that no parser tells two equal forms apart: order, empty pairs, `a` beside `a=`. null: an invalid escape,
 * or another character encoding than UTF-8.
 */
export function formContent(headers: RawHeaders, body: Buffer): Buffer | null {
  if (!isUtf8Named(headers)) return null
  // Neither is longer than what it is made of.
  const spelled = Buffer.alloc(body.length)
  const decoded = Buffer.alloc(body.length)
  let written = 0
  let said = 0
  for (let at = 0; at < body.length; at++) {
    const byte = body[at] as number
    if (byte !== PERCENT) {
      spelled[written++] = byte
      decoded[said++] = byte
      continue
    }
    const value = hexPair(body, at + 1)
    if (Number.isNaN(value)) return null
    decoded[said++] = value
    if (value === SPACE) spelled[written++] = PLUS
    else if (PLAIN.has(value)) spelled[written++] = value
    else {
      spelled[written++] = PERCENT
      spelled[written++] = DIGITS.charCodeAt(value >> 4)
      spelled[written++] = DIGITS.charCodeAt(value & 15)
    }
    at += 2
  }
  return decodeUtf8(decoded.subarray(0, said)) === null ? null : spelled.subarray(0, written)
}

/** More parts than any honest form has; each costs a call of the hash. */
const MOST_PARTS = 1000

/**
 * What a `multipart/form-data` body says apart from its boundary: each part, headers and content byte for byte, framed, and
 * what ends it. Two bodies with equal contents are the same bytes but for the boundary where it delimits, and the boundary
 * stands nowhere else: no parser, however lenient, can read them differently. null: see {@link multipartParts}.
 */
export function multipartContent(headers: RawHeaders, body: Buffer): (string | Buffer)[] | null {
  const split = multipartParts(headers, body)
  if (split === null) return null
  const content = split.parts.flatMap((part) => [`${part.length}:`, part])
  return [...content, split.closing]
}

interface Parts {
  /** Headers and content of each. */
  readonly parts: readonly Buffer[]
  readonly closing: string
}

/**
 * The parts of a `multipart/form-data` body. null: it is not of the strict form that every parser splits alike (a preamble,
 * an epilogue, blanks after a delimiter, the boundary within a part, bare line feeds), or has too many parts.
 */
export function multipartParts(headers: RawHeaders, body: Buffer): Parts | null {
  const boundary = formDataBoundary(headers)
  if (boundary === null || !body.subarray(0, boundary.length + 2).equals(Buffer.from(`--${boundary}`)))
    return null
  const delimiter = Buffer.from(`\r\n--${boundary}`)
  const parts: Buffer[] = []
  let at = boundary.length + 2
  let delimiters = 1
  while (startsWith(body, at, CRLF)) {
    const start = at + CRLF.length
    const end = body.indexOf(delimiter, start)
    if (end < 0 || delimiters++ > MOST_PARTS) return null
    parts.push(body.subarray(start, end))
    at = end + delimiter.length
  }
  const closing = body.toString('latin1', at)
  if (!CLOSING.test(closing)) return null
  return occurrences(body, boundary, delimiters + 1) === delimiters ? { parts, closing } : null
}

const CRLF = Buffer.from('\r\n')
/** With the blank lines that some clients send after it. */
const CLOSING = /^--[ \t\r\n]{0,8}$/

function startsWith(body: Buffer, at: number, start: Buffer): boolean {
  return body.subarray(at, at + start.length).equals(start)
}

/** How often `text` stands in `body`, overlaps counted, up to `most`. */
function occurrences(body: Buffer, text: string, most: number): number {
  let count = 0
  for (let at = body.indexOf(text); at >= 0 && count < most; at = body.indexOf(text, at + 1)) count++
  return count
}
