import { hash } from 'node:crypto'
import { essence, isEncoded } from './body/content.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import type { KeyPolicy, RoutePolicy } from './policy.ts'

/** What the proxy behind this one said of a request that it refused itself. */
export type Deferral =
  /** It executed nothing, or it will recognise the retry: this proxy frees its key. */
  | 'free'
  /** It may have executed the request, and may not recognise the retry. */
  | 'uncertain'

/** The statuses that this proxy's own answers may have with `retry: same-key` (contract §6). */
const OWN_STATUSES: ReadonlySet<number> = new Set([202, 408, 409, 423, 425, 429, 502, 503, 504])
/** Of these, the ones that may follow an execution. */
const MAY_FOLLOW_EXECUTION: ReadonlySet<number> = new Set([502, 504])
const LOOP_DETECTED = 508

interface Answer {
  readonly status: number
  readonly headers: RawHeaders
  /** Null: it streams, or is too large to be looked at. */
  readonly body: Buffer | null
}

/**
 * Reads the answer of a proxy behind this one to a request that came with the lines `sent` (contract §6, docs/adr/0037). Null:
 * the answer is the upstream's, and its status decides.
 */
export function deferralOf(
  { status, headers, body }: Answer,
  route: Pick<RoutePolicy, 'name' | 'match' | 'key' | 'scope'>,
  sent: RawHeaders,
): Deferral | null {
  const lines = linesOf(headers, 'idempotency-retry')
  if (lines.length !== 1) return null
  if (status === LOOP_DETECTED)
    // The request came back to a proxy that had sent it on; no upstream has seen it.
    return problemFacts(headers, body)?.code === 'loop_detected' ? 'free' : null
  if ((lines[0] as string).trim() !== 'same-key' || !OWN_STATUSES.has(status)) return null
  // An upstream that accepts work answers 202, too.
  if (status === 202)
    return problemFacts(headers, body)?.code === 'idempotency_key_in_progress' ? 'free' : null
  if (!MAY_FOLLOW_EXECUTION.has(status)) return 'free'
  const facts = problemFacts(headers, body)
  if (facts?.code === 'upstream_unreachable') return 'free'
  const knowsKey = keyReaches(route.key, sent) && linesOf(headers, 'idempotency-key-derived').length === 0
  return facts !== null && keepsRecord(facts) && tellsAlike(facts, route) && knowsKey ? 'free' : 'uncertain'
}

/** Without a record of its own it has nothing to recognise the retry by. */
function keepsRecord({ code, record }: ProblemFacts): boolean {
  return typeof code === 'string' && typeof record === 'string'
}

function tellsAlike(
  { scope }: ProblemFacts,
  route: Pick<RoutePolicy, 'name' | 'match' | 'key' | 'scope'>,
): boolean {
  return scope === undefined || scope === scopeOf({ ...route, key: forwarded(route.key) })
}

/**
 * By what a route tells its records apart, the service aside: a hash. Two proxies in a row with the same one know the same retries
 * again. Where the outer one counts `jwt:sub` and the inner one the whole token, a renewed token is a new request inside.
 */
export function scopeOf({
  name,
  match,
  key,
  scope,
}: Pick<RoutePolicy, 'name' | 'match' | 'key' | 'scope'>): string {
  const { jwt: _, anonymous: _a, callerIsDefault: _c, ...counted } = scope
  const route = scope.path === 'route' ? name : null
  return hash(
    'sha256',
    JSON.stringify([key.from, key.syntax, counted, route, match.exact]),
    'base64url',
  ).slice(0, 16)
}

/** The key as the upstream gets it. */
function forwarded(key: KeyPolicy): KeyPolicy {
  const { forward } = key
  return typeof forward === 'object'
    ? { ...key, from: [{ kind: 'header', name: forward.header.toLowerCase() }] }
    : key
}

/** Whether the upstream gets the key that this proxy counts, so that a proxy there can recognise a retry by it. */
function keyReaches({ from, forward, derive }: KeyPolicy, headers: RawHeaders): boolean {
  if (typeof forward === 'object') return true
  const isInHeader = from.some(
    (source) => source.kind === 'header' && linesOf(headers, source.name).length > 0,
  )
  // What stands in the body or in the query is forwarded with it; a derived key is forwarded nowhere.
  return isInHeader ? forward === 'same' : derive === null
}

/** What a proxy's own answer says to a proxy in front of it. */
export interface ProblemFacts {
  readonly code: unknown
  /** The id of its record; undefined: it has none. */
  readonly record: unknown
  /** By what it tells records apart (`scopeOf`); undefined: it does not say. */
  readonly scope: unknown
}

/**
 * The facts of an answer: those of `Idempotency-Problem`, else the members of a whole problem+json, which a proxy that speaks
 * only `Idempotency-Retry` may send. Null: they cannot be read, whoever changed them on the way.
 */
export function problemFacts(headers: RawHeaders, body: Buffer | null): ProblemFacts | null {
  const lines = linesOf(headers, 'idempotency-problem')
  if (lines.length > 0) return lines.length === 1 ? factsOfLine(lines[0] as string) : null
  if (body === null || isEncoded(headers) || essence(headers) !== 'application/problem+json') return null
  return factsOfBody(body)
}

/** One member: a key with a String or a Token, and what ends it. */
const MEMBER = /[ \t]*([a-z*][a-z0-9_.*-]*)=(?:"([^"\\]*)"|([A-Za-z*][\w*.:/-]*))[ \t]*(?:,|$)/y

/** Null: no such dictionary, or one that names a member twice, as where two lines were joined. */
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
    const { code, instance, scope } = JSON.parse(body.toString()) ?? {}
    return { code, record: instance, scope }
  } catch {
    return null
  }
}
