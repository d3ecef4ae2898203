import { parseItem } from 'structured-headers'
import { linesOf, type RawHeaders } from './headers.ts'
import type { KeyPolicy } from './policy.ts'

interface Found {
  readonly kind: 'key'
  readonly key: string
}
interface Invalid {
  readonly kind: 'invalid'
  readonly detail: string
}
export type KeyReading = Found | Invalid | { readonly kind: 'missing' }

/** True where the request carries any of the headers, valid or not. */
export function carriesKey(headers: RawHeaders, from: readonly string[]): boolean {
  return from.some((name) => linesOf(headers, name).length > 0)
}

/** Reads and validates the key (contract §4). Details name header and length, never the key itself. */
export function readKey(headers: RawHeaders, policy: KeyPolicy): KeyReading {
  let found: string | null = null
  for (const name of policy.from) {
    const lines = linesOf(headers, name)
    if (lines.length === 0) continue
    if (lines.length > 1) return invalid(`${name}: ${lines.length} header lines; one is allowed`)
    const reading = parseKey(lines[0] as string, policy.syntax)
    if (reading.kind === 'invalid') return invalid(`${name}: ${reading.detail}`)
    if (found !== null && found !== reading.key)
      return invalid(`${policy.from.join(' and ')} carry different keys`)
    found = reading.key
  }
  if (found === null) return { kind: 'missing' }
  const { length } = found
  if (length < policy.minLength)
    return invalid(`${length} characters; at least ${policy.minLength} are needed`)
  if (length > policy.maxLength)
    return invalid(`${length} characters; at most ${policy.maxLength} are allowed`)
  if (policy.pattern !== null && !policy.pattern.test(found))
    return invalid(`the key does not match the pattern ${policy.pattern.source}`)
  return { kind: 'key', key: found }
}

function invalid(detail: string): Invalid {
  return { kind: 'invalid', detail }
}

function parseKey(line: string, syntax: KeyPolicy['syntax']): Found | Invalid {
  // Before any trimming: `trim` would also take NBSP and other bytes that are not blanks of HTTP.
  if (/[^\t\x20-\x7e]/.test(line)) return invalid('a byte outside printable ASCII')
  const value = line.trim()
  if (value === '') return invalid('the value is empty')
  if (value.includes('\t')) return invalid('a byte outside printable ASCII')
  if (value.startsWith('"')) return parseString(value, syntax)
  if (syntax === 'strict') return invalid('not an RFC 9651 String: write the key in double quotes')
  if (value.includes(',')) return invalid('a list; one key is allowed')
  return { kind: 'key', key: value }
}

/** The quoted form: an RFC 9651 Item whose bare item is a String. */
function parseString(value: string, syntax: KeyPolicy['syntax']): Found | Invalid {
  let item: ReturnType<typeof parseItem>
  try {
    item = parseItem(value)
  } catch {
    return invalid('begins with a double quote but is not one complete RFC 9651 String')
  }
  const [bare, parameters] = item
  // What begins with a double quote is parsed as a String or not at all.
  const key = bare as string
  if (syntax === 'strict' && parameters.size > 0) return invalid('parameters are not allowed here')
  if (key.trim() === '') return invalid('the key is empty')
  return { kind: 'key', key }
}
