import { hash } from 'node:crypto'
import { essence, isEncoded, linesOf, type RawHeaders } from './headers.ts'
import type { KeyPolicy, RoutePolicy } from './policy.ts'
import { REFUSALS, type RefusalCode } from './refusal.ts'

/**
 * The meaning of a refusal by a proxy behind this one. `free`: it executed nothing, or will recognise the retry, so this proxy frees its
 * key. `uncertain`: it may have executed the request, and may not recognise the retry.
 */
export type Deferral = 'free' | 'uncertain'

/** Statuses of the proxy's own responses with `retry: same-key` (contract §6). */
const OWN_STATUSES: ReadonlySet<number> = new Set([202, 408, 409, 423, 425, 429, 502, 503, 504])
/** Those statuses that may follow an execution. */
const MAY_FOLLOW_EXECUTION: ReadonlySet<number> = new Set([502, 504])
const LOOP_DETECTED = 508

interface ObservedResponse {
  readonly status: number
  readonly headers: RawHeaders
  /** Null: streamed, or too large to read. */
  readonly body: Buffer | null
}

/** The part of a route that distinguishes its records. */
type Scoped = Pick<RoutePolicy, 'name' | 'match' | 'key' | 'scope'>

/**
 * Reads the response of a proxy behind this one to a request with the headers `sent` (contract §6, docs/adr/0037). Null: the response is
 * the upstream's, and its status decides.
 */
export function deferralOf(
  { status, headers, body }: ObservedResponse,
  route: Scoped,
  sent: RawHeaders,
): Deferral | null {
  const lines = linesOf(headers, 'idempotency-retry')
  if (lines.length !== 1) return null
  const facts = problemFacts(headers, body)
  // The request came back to a proxy that had forwarded it: no upstream saw it.
  if (status === LOOP_DETECTED) return facts?.code === 'loop_detected' ? 'free' : null
  if ((lines[0] as string).trim() !== 'same-key' || !OWN_STATUSES.has(status)) return null
  // An upstream that accepts work answers 202, too.
  if (status === 202) return facts?.code === 'idempotency_key_in_progress' ? 'free' : null
  if (!MAY_FOLLOW_EXECUTION.has(status) || facts?.code === 'upstream_unreachable') return 'free'
  // It recognises a retry by its own record, if it distinguishes records like this proxy and receives the key.
  const hasRecord = typeof facts?.code === 'string' && typeof facts.record === 'string'
  const isAlike =
    facts?.scope === undefined || facts.scope === scopeOf({ ...route, key: forwarded(route.key) })
  const hasKey = keyReaches(route.key, sent) && linesOf(headers, 'idempotency-key-derived').length === 0
  return hasRecord && isAlike && hasKey ? 'free' : 'uncertain'
}

/**
 * The status with which a proxy behind this one would have refused the request over plain HTTP; `status`, the answer's own, if no proxy
 * refused it. The two proxies may disagree on what counts as a call.
 */
export function ownStatusOf(headers: RawHeaders, status: number): number {
  if (OWN_STATUSES.has(status)) return status
  const code = problemFacts(headers, null)?.code
  // If the same key may be retried: the caller cannot be verified now.
  if (code === 'idempotency_caller_missing') return 503
  return typeof code === 'string' && Object.hasOwn(REFUSALS, code)
    ? REFUSALS[code as RefusalCode].status
    : status
}

/**
 * A hash of everything that distinguishes a route's records, except the service. Two chained proxies with equal hashes recognise the same
 * retries. If the outer one uses `jwt:sub` and the inner one the whole token, a renewed token is a new request to the inner one.
 */
export function scopeOf({ name, match, key, scope }: Scoped): string {
  const { jwt: _, anonymous: _a, callerIsDefault: _c, ...counted } = scope
  const route = scope.path === 'route' ? name : null
  const folds = match.case === 'insensitive' || match.parameters === 'strip'
  const folding = folds && !match.exact ? [match.case, match.parameters] : []
  const parts = [key.from, key.syntax, counted, route, match.exact, ...folding]
  return hash('sha256', JSON.stringify(parts), 'base64url').slice(0, 16)
}

/** The key policy as it applies to what the upstream receives. */
function forwarded(key: KeyPolicy): KeyPolicy {
  const { forward } = key
  return typeof forward === 'object'
    ? { ...key, from: [{ kind: 'header', name: forward.header.toLowerCase() }] }
    : key
}

/** Whether the upstream receives the key that this proxy uses. */
function keyReaches({ from, forward, derive }: KeyPolicy, headers: RawHeaders): boolean {
  if (typeof forward === 'object') return true
  const isInHeader = from.some(
    (source) => source.kind === 'header' && linesOf(headers, source.name).length > 0,
  )
  // A key in the body or the query is forwarded with it; a derived one never.
  return isInHeader ? forward === 'same' : derive === null
}

/** Facts in a proxy's own response for the proxy in front of it. Absent members are undefined. */
export interface ProblemFacts {
  readonly code: unknown
  /** The id of its record. */
  readonly record: unknown
  /** See {@link scopeOf}. */
  readonly scope: unknown
}

/**
 * The facts of a response: from `Idempotency-Problem`, else from problem+json, which a proxy that sends only
 * `Idempotency-Retry` may send. Null: unreadable, perhaps changed on the way.
 */
export function problemFacts(headers: RawHeaders, body: Buffer | null): ProblemFacts | null {
  const lines = linesOf(headers, 'idempotency-problem')
  if (lines.length > 0) return lines.length === 1 ? factsOfLine(lines[0] as string) : null
  if (body === null || isEncoded(headers) || essence(headers) !== 'application/problem+json') return null
  return factsOfBody(body)
}

/** One member of a Dictionary (RFC 9651): a key with a String or a Token. */
const MEMBER = /[ \t]*([a-z*][a-z0-9_.*-]*)=(?:"([^"\\]*)"|([A-Za-z*][\w*.:/-]*))[ \t]*(?:,|$)/y

/** Null if it is not such a dictionary, or a member is named twice, as after two lines were joined. */
function factsOfLine(line: string): ProblemFacts | null {
  const members = new Map<string, string>()
  for (MEMBER.lastIndex = 0; MEMBER.lastIndex < line.length; ) {
    const [, name, string, token] = MEMBER.exec(line) ?? []
    if (name === undefined || members.has(name)) return null
    members.set(name, (string ?? token) as string)
  }
  return { code: members.get('code'), record: members.get('record'), scope: members.get('scope') }
}

function factsOfBody(body: Buffer): ProblemFacts | null {
  try {
    const { code, instance, scope } = JSON.parse(body.toString())
    return { code, record: instance, scope }
  } catch {
    return null
  }
}
