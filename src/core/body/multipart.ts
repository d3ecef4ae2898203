import type { RawHeaders } from '../headers.ts'
import { formDataBoundary } from './content-type.ts'

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
