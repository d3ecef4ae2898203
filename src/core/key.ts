import { parseItem } from 'structured-headers'
import { linesOf, type RawHeaders } from './headers.ts'
import { essence } from './media.ts'
import { jsonTextOf, pointedAt } from './pointed.ts'
import type { KeyPolicy, KeySource } from './policy.ts'

/** `qualifier`: what else tells equal keys apart (CloudEvents' source); framed into the record id. */
interface Found {
  readonly kind: 'key'
  readonly key: string
  readonly qualifier: Qualifier
}
interface Invalid {
  readonly kind: 'invalid'
  readonly detail: string
}
export type KeyReading = Found | Invalid | { readonly kind: 'missing' }
export type Qualifier = readonly (string | null)[]

/** One source's value, or why there is none. */
type Value = { readonly kind: 'value'; readonly value: string } | Invalid | { readonly kind: 'missing' }

/** True where the request carries any of the headers, valid or not. */
export function carriesKey(headers: RawHeaders, from: readonly KeySource[]): boolean {
  return from.some((source) => source.kind === 'header' && linesOf(headers, source.name).length > 0)
}

/** True where the key may come from the body, as it is or derived. */
export function keyNeedsBody(policy: KeyPolicy): boolean {
  return policy.from.some(({ kind }) => kind === 'json') || (policy.derive?.json.length ?? 0) > 0
}

/**
 * Reads and validates the key (contract §4). `body` is null before it was read: then headers alone are looked at, and what
 * is found in them is not the last word where {@link keyNeedsBody}. Details name source and length, never the key itself.
 */
export function readKey(headers: RawHeaders, policy: KeyPolicy, body: Buffer | null): KeyReading {
  const json =
    body !== null && policy.from.some(({ kind }) => kind === 'json') ? jsonTextOf(headers, body) : null
  let found: { readonly key: string; readonly source: KeySource } | null = null
  for (const source of policy.from) {
    const reading = valueOf(headers, json, source, policy.syntax)
    if (reading.kind === 'missing') continue
    if (reading.kind === 'invalid') return invalid(`${sourceName(source)}: ${reading.detail}`)
    if (found !== null && found.key !== reading.value)
      return invalid(`${policy.from.map(sourceName).join(' and ')} carry different keys`)
    found ??= { key: reading.value, source }
  }
  if (found === null) return { kind: 'missing' }
  const { key, source } = found
  const wrong = brokenRule(key, policy)
  if (wrong !== null) return invalid(`${sourceName(source)}: ${wrong}`)
  return qualified(headers, json, policy.from, key)
}

function valueOf(
  headers: RawHeaders,
  json: string | null,
  source: KeySource,
  syntax: KeyPolicy['syntax'],
): Value {
  if (source.kind === 'json') return json === null ? { kind: 'missing' } : pointedKey(json, source.pointer)
  const lines = linesOf(headers, source.name)
  if (lines.length > 1) return invalid(`${lines.length} header lines; one is allowed`)
  return lines[0] === undefined ? { kind: 'missing' } : parseKey(lines[0], syntax)
}

/** Taken as it stands in the body: a String of RFC 9651 is a header's notation. */
function pointedKey(json: string, pointer: string): Value {
  const found = pointedAt(json, pointer)
  if (found.kind === 'absent') return { kind: 'missing' }
  if (found.kind === 'ambiguous') return invalid('a member is named twice')
  const { literal } = found
  if (/^-?\d+$/.test(literal)) return { kind: 'value', value: literal === '-0' ? '0' : literal }
  if (!literal.startsWith('"')) return invalid('neither a string nor an integer')
  const value = JSON.parse(literal) as string
  if (/[^\x20-\x7e]/.test(value)) return invalid('a character outside printable ASCII')
  return value.trim() === '' ? invalid('the value is empty') : { kind: 'value', value }
}

/** The header line that brings `key` to the upstream, where it is written otherwise than the key; null: it is not. */
export function otherSpelling(headers: RawHeaders, { from, forward }: KeyPolicy, key: string): string | null {
  if (forward !== 'same') return null
  const lines = from.flatMap((source) => (source.kind === 'header' ? linesOf(headers, source.name) : []))
  return lines.map((line) => line.trim()).find((line) => line !== key) ?? null
}

/** What the key breaks of the route's own rules; null: nothing. */
function brokenRule(key: string, policy: KeyPolicy): string | null {
  const { length } = key
  if (length < policy.minLength) return `${length} characters; at least ${policy.minLength} are needed`
  if (length > policy.maxLength) return `${length} characters; at most ${policy.maxLength} are allowed`
  if (policy.pattern !== null && !policy.pattern.test(key))
    return `the key does not match the pattern ${policy.pattern.source}`
  return null
}

/**
 * CloudEvents: an id is unique within its source only. In binary mode `ce-source` goes with `ce-id`; a route that reads
 * `json:/id` beside it takes `/source` of a structured event likewise, so that an event is one record in either mode.
 */
function qualified(
  headers: RawHeaders,
  json: string | null,
  from: readonly KeySource[],
  key: string,
): KeyReading {
  if (!from.some((source) => source.kind === 'header' && source.name === 'ce-id'))
    return { kind: 'key', key, qualifier: [] }
  const binary = linesOf(headers, 'ce-id').length > 0
  const structured =
    json !== null &&
    essence(headers) === 'application/cloudevents+json' &&
    from.some((source) => source.kind === 'json' && source.pointer === '/id') &&
    pointedAt(json, '/id').kind === 'literal'
  if (!binary && !structured) return { kind: 'key', key, qualifier: [] }
  const lines = linesOf(headers, 'ce-source')
  if (lines.length > 1) return invalid(`ce-source: ${lines.length} header lines; one is allowed`)
  const inner = structured ? sourceIn(json) : null
  if (inner instanceof Object) return inner
  const source = lines[0] ?? inner
  if (inner !== null && source !== inner) return invalid('ce-source and json:/source differ')
  return { kind: 'key', key, qualifier: ['ce-source', source] }
}

/** A structured event's source; null: it names none. */
function sourceIn(json: string): string | null | Invalid {
  const found = pointedAt(json, '/source')
  if (found.kind === 'absent') return null
  const source: unknown = found.kind === 'literal' ? JSON.parse(found.literal) : null
  // Lone surrogates would all be hashed as U+FFFD.
  if (typeof source === 'string' && source.isWellFormed()) return source
  return invalid('json:/source: not one string')
}

/** As the configuration writes it. */
export function sourceName(source: KeySource): string {
  return source.kind === 'header' ? source.name : `json:${source.pointer}`
}

function invalid(detail: string): Invalid {
  return { kind: 'invalid', detail }
}

function parseKey(line: string, syntax: KeyPolicy['syntax']): Value {
  // Before any trimming: `trim` would also take NBSP and other bytes that are not blanks of HTTP.
  if (/[^\t\x20-\x7e]/.test(line)) return invalid('a byte outside printable ASCII')
  const value = line.trim()
  if (value === '') return invalid('the value is empty')
  if (value.includes('\t')) return invalid('a byte outside printable ASCII')
  if (value.startsWith('"')) return parseString(value, syntax)
  if (syntax === 'strict') return invalid('not an RFC 9651 String: write the key in double quotes')
  if (value.includes(',')) return invalid('a list; one key is allowed')
  return { kind: 'value', value }
}

/** The quoted form: an RFC 9651 Item whose bare item is a String. */
function parseString(value: string, syntax: KeyPolicy['syntax']): Value {
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
  return { kind: 'value', value: key }
}
