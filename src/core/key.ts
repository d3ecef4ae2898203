import { hash } from 'node:crypto'
import { parseItem } from 'structured-headers'
import { type Field, formField, queryField } from './body/form.ts'
import { JsonReading } from './body/json.ts'
import { type LookedUp, lookUp } from './body/json-lookup.ts'
import { essence, isEncoded, linesOf, type RawHeaders } from './headers.ts'
import { frame, type KeyQualifier } from './identity.ts'
import type { DerivePolicy, KeyPolicy, KeySource } from './policy.ts'
import type { Millis } from './record.ts'
import type { Steps } from './steps.ts'

interface FoundKey {
  readonly kind: 'key'
  readonly key: string
  readonly qualifier: KeyQualifier
}
interface Invalid {
  readonly kind: 'invalid'
  readonly detail: string
}
export type KeyReading = FoundKey | Invalid | { readonly kind: 'missing' }

/** One source's value, or why there is none. */
type SourceValue = { readonly kind: 'value'; readonly value: string } | Invalid | { readonly kind: 'missing' }

/** The part of a request that is read before its body. */
export interface HeadersAndQuery {
  readonly headers: RawHeaders
  /** As sent, without the `?`. */
  readonly query: string
}

/** Whether the head carries a key, valid or not. */
export function carriesKey({ headers, query }: HeadersAndQuery, from: readonly KeySource[]): boolean {
  return from.some(
    (source) =>
      (source.kind === 'header' && linesOf(headers, source.name).length > 0) ||
      (source.kind === 'query' && queryField(query, source.name).kind !== 'absent'),
  )
}

/** The parts of a body that keys are taken or derived from. */
export interface KeyBody {
  /** null: not JSON, or not needed. */
  readonly json: LookedUp | null
  /** Its content coding is unknown, or it would decode to more than the limit: whether it has a key is unknown. */
  readonly isUnreadable: boolean
  readonly fields: ReadonlyMap<string, Field>
  /** RFC 8785 texts at the pointers of `derive.json`. */
  readonly values: ReadonlyMap<string, string>
}

/** Reads the parts of the body from which the policy makes the key. `derives`: a key may have to be derived. */
export function* readKeyBody(
  headers: RawHeaders,
  body: Buffer,
  { from, derive }: KeyPolicy,
  derives: boolean,
): Steps<KeyBody> {
  const pointers = from.flatMap((source) => (source.kind === 'json' ? [source.pointer] : []))
  const names = from.flatMap((source) => (source.kind === 'form' ? [source.name] : []))
  const derived = derives && derive !== null ? derive : { json: [], form: [] }
  const looked = [...pointers, ...(pointers.includes('/id') ? ['/source'] : []), ...derived.json]
  const json = looked.length > 0 ? yield* lookUp(headers, body, looked) : null
  const fields = new Map<string, Field>()
  for (const name of [...names, ...derived.form]) fields.set(name, yield* formField(headers, body, name))
  const values = new Map<string, string>()
  for (const pointer of derived.json) {
    const found = json?.at(pointer)
    if (found?.kind === 'literal') values.set(pointer, yield* canonicalText(found.literal))
  }
  return { json, isUnreadable: isEncoded(headers), fields, values }
}

/** As written if the canonical form would lose information; such text never equals the RFC 8785 text of another value. */
function* canonicalText(literal: string): Steps<string> {
  const reading = new JsonReading(Buffer.from(literal), null, false)
  while (!reading.step()) yield
  return reading.text?.toString() ?? literal
}

/** Whether the key may come from the body, verbatim or derived. */
export function keyNeedsBody({ from, derive }: KeyPolicy): boolean {
  return (
    from.some(({ kind }) => kind === 'json' || kind === 'form') ||
    (derive !== null && derive.json.length + derive.form.length > 0)
  )
}

/**
 * Reads and validates the key (contract §4). Without a body (null) only the head is read, and the result is preliminary where {@link
 * keyNeedsBody}. Details name source and length, never the key itself.
 */
export function readKey(head: HeadersAndQuery, policy: KeyPolicy, body: KeyBody | null): KeyReading {
  const { headers } = head
  const json = body === null ? null : body.json
  const event = eventMode(headers, policy.from)
  let found: { readonly key: string; readonly source: KeySource } | null = null
  for (const source of policy.from) {
    // The body of a binary-mode event is its data; an id in it belongs to something else.
    if (event === 'binary' && isEventId(source)) continue
    const reading = valueOf(head, body, source, policy.syntax)
    if (reading.kind === 'missing') continue
    if (reading.kind === 'invalid') return invalid(`${sourceName(source)}: ${reading.detail}`)
    if (found !== null && found.key !== reading.value)
      return invalid(`${policy.from.map(sourceName).join(' and ')} carry different keys`)
    found ??= { key: reading.value, source }
  }
  if (found === null) {
    const unread = body?.isUnreadable === true ? policy.from.find(({ kind }) => kind === 'json') : undefined
    // Treated as a request without a key, it would pass unprotected if a key is optional.
    return unread === undefined
      ? MISSING
      : invalid(
          `${sourceName(unread)}: the content coding of the body cannot be undone within limits.request`,
        )
  }
  const broken = brokenRule(found.key, policy)
  if (broken !== null) return invalid(`${sourceName(found.source)}: ${broken}`)
  const qualifier = qualifierOf(headers, event, json, policy.from)
  return 'detail' in qualifier ? qualifier : { kind: 'key', key: found.key, qualifier }
}

function valueOf(
  { headers, query }: HeadersAndQuery,
  body: KeyBody | null,
  source: KeySource,
  syntax: KeyPolicy['syntax'],
): SourceValue {
  switch (source.kind) {
    case 'header': {
      const lines = linesOf(headers, source.name)
      if (lines.length > 1) return invalid(`${lines.length} header lines; one is allowed`)
      return lines[0] === undefined ? MISSING : parseKey(lines[0], syntax)
    }
    case 'query':
      return fieldKey(queryField(query, source.name))
    case 'form':
      return body === null ? MISSING : fieldKey(body.fields.get(source.name) as Field)
    case 'json':
      return body === null || body.json === null ? MISSING : pointedKey(body.json, source.pointer)
  }
}

const MISSING = { kind: 'missing' } as const

function fieldKey(field: Field): SourceValue {
  switch (field.kind) {
    case 'absent':
      return MISSING
    case 'unclear':
      return invalid(field.why)
    case 'value':
      return verbatim(field.value)
  }
}

function pointedKey(json: LookedUp, pointer: string): SourceValue {
  const found = json.at(pointer)
  if (found.kind === 'absent') return MISSING
  if (found.kind === 'ambiguous') return invalid('a member is named twice')
  const { literal } = found
  if (/^-?\d+$/.test(literal)) return { kind: 'value', value: literal === '-0' ? '0' : literal }
  if (!literal.startsWith('"')) return invalid('neither a string nor an integer')
  return verbatim(JSON.parse(literal) as string)
}

/** A key in a body or a query: the quotes of RFC 9651 are only for headers. */
function verbatim(value: string): SourceValue {
  if (/[^\x20-\x7e]/.test(value)) return invalid('a character outside printable ASCII')
  return value.trim() === '' ? invalid('the value is empty') : { kind: 'value', value }
}

/** Whether a header line of that value is this key, quoted or not. */
export function spells(line: string, syntax: KeyPolicy['syntax'], key: string): boolean {
  const value = parseKey(line, syntax)
  return value.kind === 'value' && value.value === key
}

/** The rule of the route that the key breaks; null: none. */
function brokenRule(key: string, policy: KeyPolicy): string | null {
  const { length } = key
  if (length < policy.minLength) return `${length} characters; at least ${policy.minLength} are needed`
  if (length > policy.maxLength) return `${length} characters; at most ${policy.maxLength} are allowed`
  if (policy.pattern !== null && !policy.pattern.test(key))
    return `the key does not match the pattern ${policy.pattern.source}`
  return null
}

/** The mode in which a request carries one CloudEvent; null: none, or the route reads no id in its body. */
function eventMode(headers: RawHeaders, from: readonly KeySource[]): 'binary' | 'structured' | null {
  if (!from.some(isEventId)) return null
  if (essence(headers) === 'application/cloudevents+json') return 'structured'
  return hasEventHeader(headers, from) ? 'binary' : null
}

function hasEventHeader(headers: RawHeaders, from: readonly KeySource[]): boolean {
  const reads = from.some((source) => source.kind === 'header' && source.name === 'ce-id')
  return reads && linesOf(headers, 'ce-id').length > 0
}

function isEventId(source: KeySource): boolean {
  return source.kind === 'json' && source.pointer === '/id'
}

/**
 * CloudEvents: an id is unique within its source only. `ce-source` goes with `ce-id`, and `/source` of a structured event
 * with `json:/id`, so that an event is one record in either mode.
 */
function qualifierOf(
  headers: RawHeaders,
  event: 'binary' | 'structured' | null,
  json: LookedUp | null,
  from: readonly KeySource[],
): KeyQualifier | Invalid {
  const isInBody = event === 'structured' && json !== null && json.at('/id').kind === 'literal'
  if (!isInBody && !hasEventHeader(headers, from)) return []
  const lines = linesOf(headers, 'ce-source')
  if (lines.length > 1) return invalid(`ce-source: ${lines.length} header lines; one is allowed`)
  const inner = isInBody ? eventSource(json) : null
  if (inner instanceof Object) return inner
  const source = lines[0] ?? inner
  return inner === null || source === inner
    ? ['ce-source', source]
    : invalid('ce-source and json:/source differ')
}

/** A structured event's source; null: it names none. */
function eventSource(json: LookedUp): string | null | Invalid {
  const found = json.at('/source')
  if (found.kind === 'absent') return null
  const source: unknown = found.kind === 'literal' ? JSON.parse(found.literal) : null
  // Lone surrogates would all be hashed as U+FFFD.
  return typeof source === 'string' && source.isWellFormed()
    ? source
    : invalid('json:/source: not one string')
}

/** As the configuration writes it. */
export function sourceName(source: KeySource): string {
  if (source.kind === 'header') return source.name
  return `${source.kind}:${source.kind === 'json' ? source.pointer : source.name}`
}

function invalid(detail: string): Invalid {
  return { kind: 'invalid', detail }
}

function parseKey(line: string, syntax: KeyPolicy['syntax']): SourceValue {
  // Before trimming: `trim` also takes NBSP and others that are not whitespace in HTTP.
  if (/[^\t\x20-\x7e]/.test(line)) return invalid('a byte outside printable ASCII')
  const value = line.trim()
  if (value === '') return invalid('the value is empty')
  if (value.includes('\t')) return invalid('a byte outside printable ASCII')
  if (value.startsWith('"')) return parseString(value, syntax)
  if (syntax === 'strict') return invalid('not an RFC 9651 String: write the key in double quotes')
  if (value.includes(',')) return invalid('a list; one key is allowed')
  return { kind: 'value', value }
}

/** An RFC 9651 Item whose bare item is a String. */
function parseString(value: string, syntax: KeyPolicy['syntax']): SourceValue {
  let item: ReturnType<typeof parseItem>
  try {
    item = parseItem(value)
  } catch {
    return invalid('begins with a double quote but is not one complete RFC 9651 String')
  }
  // What begins with a double quote is a String or fails to parse.
  const [key, parameters] = item as [string, ReadonlyMap<string, unknown>]
  if (syntax === 'strict' && parameters.size > 0) return invalid('parameters are not allowed here')
  if (key.trim() === '') return invalid('the key is empty')
  return { kind: 'value', value: key }
}

/** `path`: normalised, as in the scope. */
interface DerivedFrom {
  readonly headers: RawHeaders
  readonly method: string
  readonly path: string
}

/**
 * The parts of a request without a key from which its key is derived (contract §4), for {@link deriveKey}.
 *
 * Null if one is missing: a header, field or JSON value is absent, null, blank or named twice, or the body is not a form or JSON. One
 * key for all such requests would replay one client's response to another.
 */
export function derivedParts(
  { headers, method, path }: DerivedFrom,
  { fields, values }: Pick<KeyBody, 'fields' | 'values'>,
  policy: DerivePolicy,
): readonly string[] | null {
  const parts = [
    ...policy.json.map((pointer) => saying(values.get(pointer))),
    ...policy.form.map((name) => fieldText(fields.get(name) as Field)),
    ...policy.headers.map((name) => linesFramed(headers, name)),
    ...(policy.path ? [frame([method, path])] : []),
  ]
  return parts.every((part) => part !== null) ? parts : null
}

/**
 * The key: SHA-256, base64url, over the caller (from `readCaller`) and {@link derivedParts}. `now`, the store's time, counts if the
 * policy has a bucket.
 */
export function deriveKey(
  parts: readonly string[],
  caller: readonly (string | null)[],
  policy: DerivePolicy,
  now: Millis,
): string {
  const bucket = policy.bucket === null ? null : String(Math.floor(now / policy.bucket))
  return hash('sha256', frame(['derived/1', frame(caller), ...parts, bucket]), 'base64url')
}

function saying(value: string | undefined): string | null {
  return value === undefined || value === 'null' || /^"\s*"$/.test(value) ? null : value
}

/** No JSON text starts with this prefix. */
function fieldText(field: Field): string | null {
  return field.kind === 'value' && field.value.trim() !== '' ? `form:${field.value}` : null
}

function linesFramed(headers: RawHeaders, name: string): string | null {
  const lines = linesOf(headers, name)
  return lines.some((line) => line.trim() !== '') ? frame(lines) : null
}

export type FirstSent =
  | { readonly kind: 'absent' }
  /** By the client's clock. */
  | { readonly kind: 'sent'; readonly at: Millis }
  | Invalid

const FIELD = 'repeatability-first-sent'

/**
 * `Repeatability-First-Sent` (OASIS Repeatable Requests 1.0): only an IMF-fixdate (RFC 9110 §5.6.7), as OASIS requires. The two-digit year
 * of an obsolete date is ambiguous.
 */
export function readFirstSent(headers: RawHeaders): FirstSent {
  const lines = linesOf(headers, FIELD)
  if (lines.length > 1) return invalid(`${FIELD}: ${lines.length} header lines; one is allowed`)
  const line = lines[0]?.trim()
  if (line === undefined) return { kind: 'absent' }
  const at = IMF_FIXDATE.test(line) ? Date.parse(line) : Number.NaN
  // If it prints differently, it named an impossible day, the wrong weekday or hour 24.
  return Number.isNaN(at) || new Date(at).toUTCString() !== line
    ? invalid(`${FIELD}: not a date such as Sun, 06 Nov 1994 08:49:37 GMT`)
    : { kind: 'sent', at }
}

const IMF_FIXDATE = /^[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT$/

/** How far a key generator's clock may be ahead of the store's. */
const DOUBT: Millis = 1000
/** RFC 9562 §5.7. */
const UUID_V7 = /^([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/i

/**
 * Whether the key was certainly created after the failover, so that no claim of it can have been lost. The earliest evidence counts.
 *
 * @param bornAt the creation time that the request states; null: none; 0: the key itself proves nothing, regardless of its form.
 */
export function isBornSince(
  { now, since }: { readonly now: Millis; readonly since: Millis },
  key: string,
  bornAt: Millis | null,
): boolean {
  const born = Math.min(bornAt ?? Number.POSITIVE_INFINITY, uuidBirth(key) ?? Number.POSITIVE_INFINITY)
  // A clock that is ahead proves nothing.
  return born >= since + DOUBT && born <= now
}

function uuidBirth(key: string): Millis | null {
  const [, high, low] = UUID_V7.exec(key) ?? []
  return high === undefined ? null : Number.parseInt(`${high}${low}`, 16)
}

/** When the proxy issued this verified key; null: an earlier version issued it, without a time. */
export function issuedAt(key: string): Millis | null {
  const [, payload = ''] = key.split('.')
  const [, seconds] = /"iat":(\d+)/.exec(Buffer.from(payload, 'base64url').toString()) ?? []
  return seconds === undefined ? null : Number(seconds) * 1000
}
