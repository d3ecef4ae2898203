import { linesOf, type RawHeaders } from '../headers.ts'

/** type/subtype and parameters without charset, in lower case but for a boundary's value (RFC 2046 §5.1.1). */
export function mediaType(headers: RawHeaders): string {
  return parametersOf(headers)
    .filter((part) => part !== '' && !/^charset\s*=/i.test(part))
    .map((part) => {
      const value = /^boundary\s*=/i.test(part) ? part.indexOf('=') : part.length
      return part.slice(0, value).toLowerCase() + part.slice(value)
    })
    .join(';')
}

/** type/subtype, in lower case. */
export function essence(headers: RawHeaders): string {
  return (parametersOf(headers)[0] as string).toLowerCase()
}

/** False if another charset than UTF-8 is named. */
export function isUtf8Named(headers: RawHeaders): boolean {
  return parametersOf(headers).every(
    (part) => !/^charset\s*=/i.test(part) || /^charset\s*=\s*("?)utf-?8\1$/i.test(part),
  )
}

/** The boundary of a `multipart/form-data` that every parser reads alike: one line, no other parameter. Else null. */
export function formDataBoundary(headers: RawHeaders): string | null {
  if (!isUtf8Named(headers)) return null
  const [type = '', ...parts] = parametersOf(headers)
  const others = parts.filter((part) => !/^charset\s*=/i.test(part))
  if (type.toLowerCase() !== 'multipart/form-data') return null
  const found = BOUNDARY.exec(others.join(';'))
  return found?.[1] ?? found?.[2] ?? null
}

/** RFC 2046's characters without the space; those outside a token (RFC 9110 §5.6.2) in quotes only. */
const BOUNDARY = /^boundary=(?:([\w'+.-]{1,70})|"([\w'()+,./:=?-]{1,70})")$/i

/** Whether the body has a content coding: it counts as sent. */
export function isEncoded(headers: RawHeaders): boolean {
  return linesOf(headers, 'content-encoding').some((line) => line.trim().toLowerCase() !== 'identity')
}

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** The body as UTF-8, byte order mark included; null: coded, or not UTF-8. */
export function textOf(headers: RawHeaders, body: Buffer): string | null {
  return isEncoded(headers) ? null : decodeUtf8(body)
}

export function decodeUtf8(bytes: Buffer): string | null {
  try {
    return UTF8.decode(bytes)
  } catch {
    return null
  }
}

/** Type and parameters of `Content-Type`, split at semicolons outside quoted strings and trimmed; at least one. */
function parametersOf(headers: RawHeaders): string[] {
  const value = linesOf(headers, 'content-type').join(', ')
  return splitAtSemicolons(value).map((part) => part.trim())
}

function splitAtSemicolons(value: string): string[] {
  if (!value.includes('"')) return value.split(';')
  const parts: string[] = []
  let quoted = false
  let start = 0
  for (let i = 0; i < value.length; i++) {
    if (quoted && value[i] === '\\') i++
    else if (value[i] === '"') quoted = !quoted
    else if (value[i] === ';' && !quoted) {
      parts.push(value.slice(start, i))
      start = i + 1
    }
  }
  return [...parts, value.slice(start)]
}

/** The byte that two hex digits encode; NaN: they are none. */
export function hexPair(bytes: Buffer, at: number): number {
  return nibble(bytes[at]) * 16 + nibble(bytes[at + 1])
}

function nibble(byte = 0): number {
  if (byte >= 0x30 && byte <= 0x39) return byte - 0x30
  const lower = byte | 0x20
  return lower >= 0x61 && lower <= 0x66 ? lower - 0x57 : Number.NaN
}
