import { allMatch, literalAt, textOf } from '../body/conditions.ts'
import { lookUp } from '../body/json-lookup.ts'
import { linesOf } from '../headers.ts'
import type { AnswerPattern, CompletedPattern, ReconcilePolicy, RoutePolicy } from '../policy.ts'
import {
  type CompletedResponse,
  IDENTIFIERS,
  type Identifier,
  type Operation,
  type RecordId,
  type StoredResponse,
  withoutBody,
} from '../record.ts'
import { NO_PARAMETERS, type PathParameters } from '../route.ts'
import { withBody } from '../settle.ts'
import { atOnce } from '../steps.ts'

/** A status query to the upstream, as it is sent. */
export interface StatusQuery {
  readonly method: string
  readonly target: string
  readonly headers: readonly string[]
}

/** The meaning of an answer. `why` is for people: pointers and statuses, no body content. */
export type AnswerMeaning =
  | { readonly kind: 'completed'; readonly result: CompletedResponse }
  | { readonly kind: 'not_found' }
  | { readonly kind: 'pending'; readonly why: string }
  /** The answer may be about another operation: a wrong replay is worse than waiting. */
  | { readonly kind: 'mismatch'; readonly why: string }
  /** The answer says nothing. */
  | { readonly kind: 'unusable'; readonly why: string }

/** The identifiers in the status query's path and headers. Those in `identity` do not count. */
export function asksBy({ request }: Pick<ReconcilePolicy, 'request'>): Identifier[] {
  const texts = [request.path, ...request.headers]
  return IDENTIFIERS.filter((name) => texts.some((text) => text.includes(`{${name}}`)))
}

/**
 * Why "not found" proves nothing about this record; null: it does. An upstream that never received an identifier of the status query
 * finds nothing, even if it executed the request. `upstream`: tag of the queried one.
 */
export function whyUnproven(
  policy: Pick<ReconcilePolicy, 'request'>,
  { received = [], receivedBy }: Pick<Operation, 'received' | 'receivedBy'>,
  upstream: string,
): string | null {
  const by = asksBy(policy)
  const missing = by.filter((name) => !received.includes(name))
  if (by.length > 0 && missing.length === 0)
    return receivedBy === upstream
      ? null
      : 'not found, which proves nothing: the request was sent to another `upstream.url`'
  return by.length === 0
    ? 'not found, which proves nothing: the status query names no record'
    : `not found, which proves nothing: this record's request did not carry ${missing.map((name) => `{${name}}`).join(' or ')}`
}

/** Names of the `{:name}` in the path of the status query and in `identity`. */
export function parametersIn({ request, identity }: Pick<ReconcilePolicy, 'request' | 'identity'>): string[] {
  return [request.path, ...identity.map(({ value }) => value)].flatMap(namedIn)
}

function namedIn(text: string): string[] {
  return [...text.matchAll(/\{:([A-Za-z_][A-Za-z0-9_]*)\}/g)].map(([, name]) => name as string)
}

/** Whether the client's key is needed, and so must be kept in the record (contract §1). */
export function asksByKey({ request, identity }: ReconcilePolicy): boolean {
  const texts = [request.path, ...request.headers, ...identity.map(({ value }) => value)]
  return texts.some((text) => text.includes('{key}'))
}

/** null: its bytes are not UTF-8. */
function decoded(segment: string): string | null {
  try {
    return decodeURIComponent(segment)
  } catch {
    return null
  }
}

/** The status query; or why the record cannot be asked about, as text. */
export function buildStatusQuery(
  policy: ReconcilePolicy,
  id: RecordId,
  key: string | null,
  parameters: PathParameters = NO_PARAMETERS,
): StatusQuery | string {
  if (key === null && asksByKey(policy))
    return 'cannot be asked: the key was not stored, as the record is older than `reconcile`'
  const lacking = parametersIn(policy).find((name) => !parameters.has(name))
  if (lacking !== undefined) return `cannot be asked: the record's path has no :${lacking}`
  const undecoded = policy.identity
    .flatMap(({ value }) => namedIn(value))
    .find((name) => decoded(parameters.get(name) as string) === null)
  if (undecoded !== undefined)
    return `cannot be asked: :${undecoded} of the record's path is not UTF-8, so \`identity\` cannot be compared with it`
  const { method, path, headers } = policy.request
  const target = targetOf(path, id, key, parameters)
  // A dot segment, however encoded, names another path (RFC 3986 §5.2.4, WHATWG URL): "not found" there says nothing.
  if (/^[^?]*\/\.\.?(?:[/?]|$)/.test(target))
    return 'cannot be asked: the key, or a segment of the path, would be a dot segment'
  const own = headers.map((part, i) => (i % 2 === 0 ? part : filled(part, id, key)))
  const defaults = DEFAULTS.filter(([name]) => linesOf(headers, name.toLowerCase()).length === 0)
  return { method, target, headers: [...defaults.flat(), ...own] }
}

const DEFAULTS: readonly (readonly [string, string])[] = [
  ['Accept', 'application/json'],
  // Codings are not decoded.
  ['Accept-Encoding', 'identity'],
  // A cache may remember "not found" from before the request arrived.
  ['Cache-Control', 'no-cache'],
]

/** The part of a response that a route keeps, and for how long. */
type Keeping = Pick<RoutePolicy, 'match' | 'keep' | 'ttl' | 'ttlFailed' | 'ttlBody'>

/**
 * The meaning of an answer for the record. Order matters: pending comes first; completed counts for this very record only; "not
 * found" with the status of a completed form must differ from it by its `when`.
 */
export function readAnswer(
  policy: ReconcilePolicy,
  route: Keeping,
  id: RecordId,
  key: string | null,
  answer: StoredResponse,
  parameters: PathParameters = NO_PARAMETERS,
): AnswerMeaning {
  const { status } = answer
  // A proxy in between refused; this is not the upstream's answer.
  if (linesOf(answer.headers, 'idempotency-retry').length > 0)
    return {
      kind: 'unusable',
      why: `status ${status} with Idempotency-Retry, which comes from a proxy and not from the upstream`,
    }
  const json = atOnce(lookUp(answer.headers, answer.body, pointersIn(policy)))
  const fits = (pattern: AnswerPattern): boolean => pattern.status === status && allMatch(pattern.when, json)
  const { pending, notFound } = policy
  if (pending !== null && fits(pending)) return { kind: 'pending', why: `status ${status}, still pending` }
  const completed = policy.completed.find(fits)
  const missing = notFound !== null && fits(notFound)
  const absent: AnswerMeaning = isCached(answer)
    ? { kind: 'pending', why: `status ${status}, from a cache` }
    : { kind: 'not_found' }
  if (completed === undefined) {
    if (missing) return absent
    return status >= 500 || json === null
      ? { kind: 'unusable', why: `status ${status}, which says nothing` }
      : { kind: 'pending', why: `status ${status}, which matches no pattern` }
  }
  if (json === null) return { kind: 'unusable', why: `status ${status}, but not JSON in UTF-8` }
  const found = policy.identity.map(({ pointer, value }) => {
    const literal = literalAt(json, pointer)
    // An empty list is no key, even if a key looks like one.
    const holds =
      literal !== null &&
      !/^[[{]/.test(literal) &&
      textOf(literal) === filled(value, id, key, (name) => decoded(parameters.get(name) as string))
    return { pointer, literal, holds }
  })
  const kept = completed.json === '' ? json.text : literalAt(json, completed.json)
  const other = found.find(({ holds }) => !holds)
  if (other === undefined && kept !== null)
    return { kind: 'completed', result: resultOf(completed, route, kept, answer) }
  // Both fit. "Not found" counts unless the answer shows an identity, of this record or another.
  if (missing && notFound.when.length > 0 && found.every(({ literal }) => literal === null)) return absent
  return other !== undefined && other.literal !== null
    ? { kind: 'mismatch', why: `status ${status}, and ${other.pointer} is not this record's` }
    : { kind: 'pending', why: `status ${status}, and nothing at ${other?.pointer ?? completed.json}` }
}

/** From a cache (RFC 9111 §5.1). */
function isCached({ headers }: StoredResponse): boolean {
  return linesOf(headers, 'age').some((age) => !/^0*$/.test(age.trim()))
}

/** Statuses without content (RFC 9110 §6.4.1). */
const BODILESS: ReadonlySet<number> = new Set([204, 205, 304])

function resultOf(
  { response: overrides }: CompletedPattern,
  route: Keeping,
  json: string,
  answer: StoredResponse,
): CompletedResponse {
  const status = overrides.status ?? answer.status
  // JSON does not answer a gRPC call.
  if (route.keep === 'outcome' || route.match.grpc != null)
    return withoutBody({ status, headers: overrides.headers }, 'outcome_only')
  const bodiless = BODILESS.has(status)
  const typed = bodiless || linesOf(overrides.headers, 'content-type').length > 0
  const dated =
    linesOf(overrides.headers, 'date').length > 0 ? [] : linesOf(answer.headers, 'date').slice(0, 1)
  const response = {
    status,
    reason: status === answer.status ? answer.reason : '',
    headers: [
      ...(typed ? [] : ['Content-Type', 'application/json']),
      ...overrides.headers,
      ...dated.flatMap((date) => ['Date', date]),
    ],
    body: bodiless ? Buffer.alloc(0) : Buffer.from(json),
    trailers: [],
  }
  return withBody(response, route)
}

/** The parts of an answer that a policy reads. */
function pointersIn({ pending, notFound, completed, identity }: ReconcilePolicy): string[] {
  const patterns = [pending, notFound, ...completed].filter((pattern) => pattern !== null)
  const read = [...patterns.flatMap(({ when }) => when), ...identity].map(({ pointer }) => pointer)
  return [...read, ...completed.map(({ json }) => json)]
}

/** Segments stay byte for byte as in the record: re-encoding one that is not UTF-8 would name another path. */
function targetOf(template: string, id: RecordId, key: string | null, parameters: PathParameters): string {
  const [path] = template.split('?') as [string]
  const query = template.slice(path.length)
  const segment = (name: string): string => parameters.get(name) as string
  return (
    filled(path, id, key, segment, percentEncoded) +
    filled(query, id, key, (name) => escapedInQuery(segment(name)), percentEncoded)
  )
}

/** Fills in placeholders: `parameter` gives the text for `{:name}`; the others are encoded by `encode`. */
function filled(
  template: string,
  id: RecordId,
  key: string | null,
  parameter: (name: string) => string | null = () => null,
  encode: (text: string) => string = (text) => text,
): string {
  // A function: `$&` in a key is data.
  return template.replaceAll(PLACEHOLDER, (whole, name: string) => {
    if (name.startsWith(':')) return parameter(name.slice(1)) ?? whole
    return encode(name === 'key' ? (key as string) : id)
  })
}

const PLACEHOLDER = /\{(key|record|:[A-Za-z_][A-Za-z0-9_]*)\}/g

/** All but the unreserved characters of RFC 3986. */
function percentEncoded(text: string): string {
  return encodeURIComponent(text).replaceAll(/[!'()*]/g, hex)
}

/** `&`, `=` and `+` are plain in a segment, but not in a query. */
function escapedInQuery(segment: string): string {
  return segment.replaceAll(/[!$&'()*+,;=:@]/g, hex)
}

function hex(character: string): string {
  return `%${character.charCodeAt(0).toString(16).toUpperCase()}`
}
