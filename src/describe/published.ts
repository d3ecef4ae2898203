import type { Config } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { KeyPolicy, KeySource, RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { REFUSALS, type RefusalCode, type RetryAdvice } from '../core/refusal.ts'
import { isProtected, overlaps, pathPattern, policiesOf } from '../core/route.ts'

const SPECIFICATION = 'https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07'

/** The policies that clients may rely on; for unmatched requests, only those with a key. */
export function publishedPolicy(route: RoutePolicy | null, defaults: RoutePolicy): RoutePolicy | null {
  // Shadow mode protects no one: clients that relied on it would execute twice.
  if (route === null || !isProtected(route)) return null
  return route === defaults ? { ...route, key: { ...route.key, presence: 'optional' } } : route
}

/**
 * The public policy: which operations take a key, how long it is valid, and how retries are answered (the IETF draft requires publishing
 * the expiry). It reveals nothing about upstream, callers or limits.
 */
export function policyDocument(config: Config): object {
  const { defaults, problems, status, issuer } = config
  const all = policiesOf(config)
  return {
    specification: SPECIFICATION,
    replayed: { header: RESPONSE_HEADER.replayed, value: 'true' },
    ...(status.path === null ? {} : { statusPath: status.path }),
    ...(issuer === null ? {} : { issuerPath: issuer.path }),
    routes: all.flatMap((route, n) => {
      const published = publishedPolicy(route, defaults)
      if (published === null) return []
      const hidden = all.slice(0, n).filter((other) => publishedPolicy(other, defaults) === null)
      return describeRoute(
        published,
        hidden.some((other) => overlap(other, route)),
        problems.baseUrl,
      )
    }),
  }
}

/** Whether a request can match both routes. */
function overlap({ match: a }: RoutePolicy, { match: b }: RoutePolicy): boolean {
  return (
    a.methods.some((method) => b.methods.includes(method)) &&
    overlaps(pathPattern(a.path, false), pathPattern(b.path, false))
  )
}

/** `exceptions`: earlier, unpublished routes match some of its requests. */
function describeRoute(route: RoutePolicy, exceptions: boolean, baseUrl: string): object {
  const { match, key, scope, inFlight, ttl, ttlFailed, ttlBody, tombstone } = route
  return {
    methods: match.methods,
    path: templateOf(match.path),
    ...(exceptions ? { exceptions } : {}),
    key: {
      required: key.presence === 'required',
      from: key.from.map(sourceOf),
      syntax: key.syntax,
      minLength: key.minLength,
      maxLength: key.maxLength,
      ...ecmaScript(key.pattern),
      ...(key.derive === null ? {} : { derivedWhereMissing: true }),
      ...(key.issuedOnly ? { issuedOnly: true } : {}),
    },
    uniqueWithin: [
      ...(scope.caller.length > 0 ? ['caller'] : []),
      'method',
      ...(scope.path === 'none' ? [] : [scope.path === 'exact' ? 'path' : 'route']),
    ],
    expires: {
      afterSeconds: seconds(ttl),
      ...(ttlBody === null ? {} : { responseAfterSeconds: seconds(ttlBody) }),
      ...(ttlFailed === ttl ? {} : { errorsAfterSeconds: seconds(ttlFailed) }),
      ...(tombstone === 0 ? {} : { thenRefusedForSeconds: seconds(tombstone) }),
    },
    inFlight: {
      status: inFlight.status,
      ...(inFlight.mode === 'wait' ? { waitsSeconds: seconds(inFlight.wait) } : {}),
    },
    ...(route.statusHeader ? { headers: [RESPONSE_HEADER.status, RESPONSE_HEADER.expires] } : {}),
    problems: answersOf(route).map(({ status, code, retry }) => ({
      status,
      code,
      type: `${baseUrl}${code}`,
      retry,
    })),
  }
}

/** As OpenAPI writes it: `/v1/payments/{id}`. */
function templateOf(path: string): string {
  return path.replace(/\/:([^/]+)/g, '/{$1}')
}

function sourceOf(source: KeySource): object {
  switch (source.kind) {
    case 'header':
      return { in: 'header', name: spelled(source.name) }
    case 'query':
    case 'form':
      return { in: source.kind, name: source.name }
    case 'json':
      return { in: 'body', pointer: source.pointer }
  }
}

function seconds(time: Millis): number {
  return time / 1000
}

/** One of the proxy's own responses that a route's clients may get. */
export interface OwnAnswer {
  readonly status: number
  readonly code: RefusalCode
  readonly title: string
  readonly retry: RetryAdvice
}

/**
 * The proxy's own responses on a protected route (contract §6), by status. The 412 for a `Repeatability-First-Sent` that is too
 * old is listed only if the key is in a `Repeatability-` header, too.
 */
export function answersOf(route: RoutePolicy): OwnAnswer[] {
  const { key, scope, limits, authorizeReplay } = route
  const isRepeatability = key.from.some(
    (source) => source.kind === 'header' && source.name.startsWith('repeatability-'),
  )
  const asksCaller = scope.caller.length > 0 && (scope.anonymous === 'reject' || scope.jwt !== null)
  const rows: readonly (readonly [boolean, RefusalCode, number?, RetryAdvice?])[] = [
    [key.presence === 'required', 'idempotency_key_missing'],
    [true, 'idempotency_key_invalid'],
    [scope.callerIsDefault, 'idempotency_caller_missing', 400],
    [asksCaller, 'idempotency_caller_missing'],
    [scope.jwt !== null, 'idempotency_caller_missing', 503, 'same-key'],
    [true, 'idempotency_key_reused', route.misuseStatus],
    [true, 'idempotency_key_in_progress', route.inFlight.status],
    [true, 'idempotency_outcome_unknown'],
    [true, 'idempotency_response_unavailable'],
    [route.tombstone > 0, 'idempotency_key_expired'],
    [key.issuedOnly || isRepeatability, 'idempotency_key_expired', 412],
    [true, 'idempotency_store_unavailable'],
    [authorizeReplay !== null, 'replay_forbidden', 401],
    [authorizeReplay !== null, 'replay_forbidden'],
    [authorizeReplay !== null, 'replay_unauthorized_yet'],
    [limits.newKeys !== null, 'rate_limited'],
    [true, 'request_timeout'],
    [true, 'request_too_large'],
    [true, 'upstream_unreachable'],
    [true, 'upstream_failed'],
    [true, 'upstream_timeout'],
    [route.respondWithin !== null, 'upstream_slow'],
    [true, 'overloaded'],
  ]
  return rows
    .filter(([applies]) => applies)
    .map(([, code, status = REFUSALS[code].status, retry = REFUSALS[code].retry]) => {
      return { status, code, title: REFUSALS[code].title, retry }
    })
    .toSorted((a, b) => a.status - b.status)
}

/** Headers that carry keys in the wild, as their vendors spell them (contract §4). */
const KNOWN = [
  'Idempotency-Key',
  'X-Idempotency-Key',
  'PayPal-Request-Id',
  'Cko-Idempotency-Key',
  'X-Qonto-Idempotency-Key',
  'Request-Idempotency-Key',
  'Repeatability-Request-ID',
] as const

const BY_LOWER = new Map<string, string>(KNOWN.map((name) => [name.toLowerCase(), name]))

/** Whether keys are sent in a header of that name. */
export function isKeyHeader(name: string): boolean {
  return BY_LOWER.has(name.toLowerCase()) || /^(?:x-)?([a-z]+-)*idempotency-?(?:key|id|token)$/i.test(name)
}

/** A lower-case header name as people write it. */
export function spelled(name: string): string {
  return BY_LOWER.get(name) ?? name.replace(/(?<=^|-)[a-z]/g, (first) => first.toUpperCase())
}

/** The pattern for a JSON Schema. None if ECMAScript refuses it, as it does all syntax that RE2 reads differently. */
export function ecmaScript(pattern: KeyPolicy['pattern']): { readonly pattern?: string } {
  if (pattern === null) return {}
  try {
    return { pattern: new RegExp(pattern.source, 'u').source }
  } catch {
    return {}
  }
}
