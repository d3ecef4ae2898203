import type { Config } from '../config/config.ts'
import type { KeySource, RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { spelled } from './key-headers.ts'
import { answersOf } from './route-answers.ts'

const SPECIFICATION = 'https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07'

/**
 * What clients are told: which operations take a key, and what becomes of it. The draft obliges a server to publish that
 * and its expiry. Anybody may read it: nothing of the upstream, of callers, of limits, and no route that does not
 * protect.
 */
export function policyDocument({ routes, defaults, unmatched, problems, status, issuer }: Config): object {
  const all = [
    ...routes,
    // What no route matches is looked at where it carries a key, and never has to.
    ...(unmatched === 'protect'
      ? [
          {
            ...defaults,
            key: {
              ...defaults.key,
              presence: defaults.key.presence === 'ignored' ? ('ignored' as const) : ('optional' as const),
            },
          },
        ]
      : []),
  ]
  return {
    specification: SPECIFICATION,
    replayed: { header: 'Idempotent-Replayed', value: 'true' },
    ...(status.path === null ? {} : { statusPath: status.path }),
    ...(issuer === null ? {} : { issuerPath: issuer.path }),
    routes: all.flatMap((route, n) =>
      isTold(route) ? [toldOf(route, hasExceptions(route, all.slice(0, n)), problems.baseUrl)] : [],
    ),
  }
}

/** Shadow protects nobody: who relied on it would execute twice. */
export function isTold({ mode, key }: RoutePolicy): boolean {
  return mode === 'enforce' && key.presence !== 'ignored'
}

/** Narrower routes that are not told come first, so that this one does not speak of all that its path matches. */
function hasExceptions({ match }: RoutePolicy, before: readonly RoutePolicy[]): boolean {
  return before.some(
    (other) =>
      !isTold(other) &&
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
    ...(route.statusHeader ? { headers: ['Idempotency-Status', 'Idempotency-Expires'] } : {}),
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
