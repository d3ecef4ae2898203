import type { RoutePolicy } from '../core/policy.ts'
import { isProtected, policiesOf, type Routes, readsKeys } from '../core/route.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  namesOf,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  type RequestOutcome,
} from '../protect/outcomes.ts'
import type { Metrics } from './metrics.ts'

/**
 * Tells the metrics of these routes, at the start and whenever they have changed: their retention, and a 0 for every counter
 * that can happen under the route's settings. A counter that is first seen at 1 has not increased for Prometheus, and the first
 * orphan would ring no bell.
 */
export function initSeries(metrics: Metrics, config: Routes): void {
  for (const policy of policiesOf(config)) tellRoute(metrics, policy)
  // Methods that nothing protects.
  if (config.unmatched !== 'reject') tellOutcomes(metrics, config.defaults.name, ['passed'])
}

function tellRoute(metrics: Metrics, policy: RoutePolicy): void {
  const { name: route, mode, ttl } = policy
  tellOutcomes(metrics, route, possibleOutcomes(policy))
  // Of any route: it may have left records under earlier settings, and one such event rings an alert.
  metrics.count('idempotency_lease_expired_total', { route }, 0)
  metrics.count('idempotency_unresolved_expiring_total', { route }, 0)
  if (!readsKeys(policy)) return
  metrics.set('idempotency_retention_seconds', { route }, ttl / 1000)
  metrics.count('idempotency_regenerated_keys_total', { route }, 0)
  for (const result of namesOf(COMPLETION_RESULTS))
    metrics.count('idempotency_completions_total', { route, result }, 0)
  if (policy.reconcile !== null)
    for (const result of namesOf(RECONCILE_RESULTS))
      metrics.count('idempotency_reconcile_total', { route, result }, 0)
  // Shadow mode claims without protecting anybody: its verdicts are counted alone.
  if (mode === 'shadow') return
  metrics.count('idempotency_duplicates_prevented_total', { route }, 0)
  for (const result of namesOf(CLAIM_RESULTS)) metrics.count('idempotency_claims_total', { route, result }, 0)
}

function tellOutcomes(metrics: Metrics, route: string, outcomes: readonly RequestOutcome[]): void {
  for (const outcome of outcomes) metrics.count('idempotency_requests_total', { route, outcome }, 0)
}

function possibleOutcomes(policy: RoutePolicy): RequestOutcome[] {
  if (!isProtected(policy)) return ['passed']
  return namesOf(REQUEST_OUTCOMES).filter((outcome) => REQUEST_OUTCOMES[outcome].when?.(policy) ?? true)
}
