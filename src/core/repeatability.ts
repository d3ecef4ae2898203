import { linesOf, type RawHeaders } from './headers.ts'
import type { Millis } from './record.ts'

export type FirstSent =
  | { readonly kind: 'absent' }
  /** By the client's clock. */
  | { readonly kind: 'sent'; readonly at: Millis }
  | { readonly kind: 'invalid'; readonly detail: string }

const FIELD = 'repeatability-first-sent'

/**
 * `Repeatability-First-Sent` (OASIS Repeatable Requests 1.0): an IMF-fixdate (RFC 9110 §5.6.7) and, as OASIS has it, nothing
 * else. Of the obsolete dates one has a year of two digits, which is a guess.
 */
export function readFirstSent(headers: RawHeaders): FirstSent {
  const lines = linesOf(headers, FIELD)
  if (lines.length > 1) return invalid(`${lines.length} header lines; one is allowed`)
  const line = lines[0]?.trim()
  if (line === undefined) return { kind: 'absent' }
  const at = IMF_FIXDATE.test(line) ? Date.parse(line) : Number.NaN
  // What is not printed as it was read names no day, another weekday, or an hour 24.
  return Number.isNaN(at) || new Date(at).toUTCString() !== line
    ? invalid('not a date such as Sun, 06 Nov 1994 08:49:37 GMT')
    : { kind: 'sent', at }
}

const IMF_FIXDATE = /^[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT$/

function invalid(detail: string): FirstSent {
  return { kind: 'invalid', detail: `${FIELD}: ${detail}` }
}
