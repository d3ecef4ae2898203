import type { RoutePolicy } from '../core/policy.ts'
import { CLAIM_RESULTS, COMPLETION_RESULTS, REQUEST_OUTCOMES } from '../guard/call.ts'
import { RECONCILE_RESULTS } from '../reconcile/ports.ts'
import type { MetricName, Metrics } from './metrics.ts'

/** Counters by route alone. */
const SINGLE: readonly MetricName[] = [
  'idempotency_duplicates_prevented_total',
  'idempotency_lease_expired_total',
  'idempotency_regenerated_keys_total',
  'idempotency_unresolved_expiring_total',
]
/** Counters by route and by one label more, with all of its values. */
const SEVERAL: readonly (readonly [MetricName, string, readonly string[]])[] = [
  ['idempotency_requests_total', 'outcome', REQUEST_OUTCOMES],
  ['idempotency_claims_total', 'result', CLAIM_RESULTS],
  ['idempotency_completions_total', 'result', COMPLETION_RESULTS],
  ['idempotency_reconcile_total', 'result', RECONCILE_RESULTS],
]

/**
 * Tells the metrics of these routes, at the start and whenever they have changed: their retention, and a 0 for every counter.
 * A counter that is first seen at 1 has not increased for Prometheus, and the first orphan would ring no bell.
 */
export function tellRoutes(metrics: Metrics, routes: Iterable<Pick<RoutePolicy, 'name' | 'ttl'>>): void {
  for (const { name: route, ttl } of routes) {
    metrics.set('idempotency_retention_seconds', { route }, ttl / 1000)
    for (const counter of SINGLE) metrics.count(counter, { route }, 0)
    for (const [counter, label, values] of SEVERAL)
      for (const value of values) metrics.count(counter, { route, [label]: value }, 0)
  }
}
