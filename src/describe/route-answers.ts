import type { RoutePolicy } from '../core/policy.ts'
import { REFUSALS, type RefusalCode, type RetryAdvice } from '../core/refusal.ts'

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
