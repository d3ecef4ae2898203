import type { Config } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { KeySource, RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { REFUSALS, type RefusalCode, type RetryAdvice } from '../core/refusal.ts'
import { isProtected, policiesOf, readsKeys } from '../core/route.ts'

const SPECIFICATION = 'https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07'

/**
 * What clients are told: which operations take a key, and what becomes of it. The draft obliges a server to publish that
 * and its expiry. Anybody may read it: nothing of the upstream, of callers, of limits, and no route that does not
 * protect.
 */
export function policyDocument(config: Config): object {
  const { problems, status, issuer } = config
  const all = policiesOf(config).map((policy) =>
    policy === config.defaults ? withOptionalKey(policy) : policy,
  )
  return {
    specification: SPECIFICATION,
    replayed: { header: RESPONSE_HEADER.replayed, value: 'true' },
    ...(status.path === null ? {} : { statusPath: status.path }),
    ...(issuer === null ? {} : { issuerPath: issuer.path }),
    routes: all.flatMap((route, n) =>
      isProtected(route) ? [toldOf(route, hasExceptions(route, all.slice(0, n)), problems.baseUrl)] : [],
    ),
  }
}

/** What no route matches is protected where it carries a key, and never has to carry one. */
export function withOptionalKey(defaults: RoutePolicy): RoutePolicy {
  return readsKeys(defaults) ? { ...defaults, key: { ...defaults.key, presence: 'optional' } } : defaults
}

/** Narrower routes that are not told come first, so that this one does not speak of all that its path matches. */
function hasExceptions({ match }: RoutePolicy, before: readonly RoutePolicy[]): boolean {
  return before.some(
    (other) =>
      !isProtected(other) &&
      other.match.methods.some((method) => match.methods.includes(method)) &&
      overlap(other.match.path.split('/'), match.path.split('/')),
  )
}

/** Whether a path may match both patterns. */
function overlap([a, ...others]: readonly string[], [b, ...more]: readonly string[]): boolean {
  if (a === undefined || b === undefined) return a === b
  if (a === '*' || b === '*') return true
  return (a === b || a.startsWith(':') || b.startsWith(':')) && overlap(others, more)
}

function toldOf(route: RoutePolicy, exceptions: boolean, baseUrl: string): object {
  const { match, key, scope, inFlight, ttl, ttlFailed, tombstone } = route
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
      ...(key.pattern === null ? {} : { pattern: key.pattern.source }),
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
export function templateOf(path: string): string {
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

/** An answer of the proxy's own that a client of a route has to reckon with. */
export interface OwnAnswer {
  readonly status: number
  readonly code: RefusalCode
  readonly title: string
  readonly retry: RetryAdvice
}

/**
 * Every answer of its own that the proxy may give on a protected route (contract §6), by status. Left out is the 412 for
 * a `Repeatability-First-Sent` that is too old, which only those meet who send that header, unless the route's key is OASIS'.
 */
export function answersOf(route: RoutePolicy): OwnAnswer[] {
  return statuses(route)
    .map(([code, status = REFUSALS[code].status, retry = REFUSALS[code].retry]) => ({
      status,
      code,
      title: REFUSALS[code].title,
      retry,
    }))
    .toSorted((a, b) => a.status - b.status)
}

/** Status and advice where they are not those of the table. */
type Given = readonly [RefusalCode, number?, RetryAdvice?]

function statuses(route: RoutePolicy): Given[] {
  const { key, scope, limits } = route
  const oasis = key.from.some(
    (source) => source.kind === 'header' && source.name.startsWith('repeatability-'),
  )
  const when = (condition: boolean, ...given: Given[]): Given[] => (condition ? given : [])
  return [
    ...when(key.presence === 'required', ['idempotency_key_missing']),
    ['idempotency_key_invalid'],
    ...when(scope.callerIsDefault, ['idempotency_caller_missing', 400]),
    ...when(scope.caller.length > 0 && (scope.anonymous === 'reject' || scope.jwt !== null), [
      'idempotency_caller_missing',
    ]),
    ...when(scope.jwt !== null, ['idempotency_caller_missing', 503, 'same-key']),
    ['idempotency_key_reused', route.misuseStatus],
    ['idempotency_key_in_progress', route.inFlight.status],
    ['idempotency_outcome_unknown'],
    ['idempotency_response_unavailable'],
    ...when(route.tombstone > 0, ['idempotency_key_expired']),
    ...when(key.issuedOnly || oasis, ['idempotency_key_expired', 412]),
    ['idempotency_store_unavailable'],
    ...when(
      route.authorizeReplay !== null,
      ['replay_forbidden', 401],
      ['replay_forbidden'],
      ['replay_unauthorized_yet'],
    ),
    ...when(limits.newKeys !== null, ['rate_limited']),
    ['request_timeout'],
    ['request_too_large'],
    ['upstream_unreachable'],
    ['upstream_failed'],
    ['upstream_timeout'],
    ...when(route.respondWithin !== null, ['upstream_slow']),
    ['overloaded'],
  ]
}

/** Headers that carry keys in the wild, as their makers spell them (contract §4; Cko, Qonto and others beside it). */
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

/** Whether a header of that name, in any case, is one that keys are sent in. */
export function isKeyHeader(name: string): boolean {
  return BY_LOWER.has(name.toLowerCase()) || /^(?:x-)?([a-z]+-)*idempotency-?(?:key|id|token)$/i.test(name)
}

/** A header's lower-case name as people write it. Case means nothing in it (RFC 9110 §5.1). */
export function spelled(name: string): string {
  return BY_LOWER.get(name) ?? name.replace(/(?<=^|-)[a-z]/g, (first) => first.toUpperCase())
}
