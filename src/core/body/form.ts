import type { RawHeaders } from '../headers.ts'
import { hexPair } from '../hex.ts'
import { decodeUtf8, isUtf8Named } from './content-type.ts'

/**
 * Bytes that no form parser gives a meaning of its own, so that their escapes are needless. Not `,`, `;`, `=` and brackets,
 * at which some split before they decode, and nothing that a form may not hold as it stands.
 */
const PLAIN = new Set(
  Buffer.from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!'()*:@/?$"),
)

const PERCENT = 0x25
const PLUS = 0x2b
const SPACE = 0x20
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
