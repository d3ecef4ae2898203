import { type RecordId, shortId } from '../core/record.ts'
import { REQUEST_OUTCOMES, type ShadowVerdict } from '../protect/outcomes.ts'
import type { Observer, RequestSummary, ShadowSummary } from '../protect/request.ts'
import type { ReconcilerPorts } from '../reconcile/reconciler.ts'
import type { History } from './history.ts'
import type { Logger } from './log.ts'
import type { Metrics } from './metrics.ts'

/**
 * What happens to protected requests → metrics, one log line each (contract §13, §14), and the records' histories. Never a key
 * or a credential. `stored`: the outcome of a request of the route was stored.
 */
export function observer(
  metrics: Metrics,
  log: Logger,
  history: History,
  stored: (route: string, id: RecordId) => void,
): Observer {
  /** Routes whose scope does not fit their own clients: one warning each, as there may be thousands of such requests. */
  const misfits = new Set<string>()
  const isFirstMisfit = ({ route, outcome, cause }: RequestSummary): boolean => {
    if (outcome !== 'caller_missing' || cause === null || misfits.has(route)) return false
    misfits.add(route)
    return true
  }
  return {
    answered(summary) {
      const { route } = summary
      const outcome = summary.outcome ?? 'aborted'
      const duration = performance.now() - summary.startedAt
      if (summary.outcome !== null) {
        metrics.count('idempotency_requests_total', { route, outcome })
        // How long a refusal took says little.
        if (REQUEST_OUTCOMES[summary.outcome].group === 'served')
          metrics.observe('idempotency_request_duration_seconds', { route, outcome }, duration / 1000)
        if (outcome === 'executed' || outcome === 'replayed') {
          const overhead = Math.max(0, duration - summary.upstreamMs) / 1000
          metrics.observe('idempotency_overhead_seconds', { route, outcome }, overhead)
        }
      }
      const becameUnknown = summary.after === 'unknown' && summary.before !== 'unknown'
      const level = becameUnknown || isFirstMisfit(summary) ? 'warn' : 'info'
      const { fence, status, upstreamMs, storeMs } = summary
      const times = { ms: round(duration), upstreamMs: round(upstreamMs), storeMs: round(storeMs) }
      log[level](line(summary, { outcome }, { fence, status, ...times }), 'request')
      history.answered(summary)
    },
    began: (execution) => history.began(execution),
    claimed: (route, result) => metrics.count('idempotency_claims_total', { route, result }),
    completed: (route, result, id) => {
      metrics.count('idempotency_completions_total', { route, result })
      history.completed(result, id)
      if (result === 'stored') stored(route, id)
    },
    prevented: (route) => metrics.count('idempotency_duplicates_prevented_total', { route }),
    retryAge: (route, age) => metrics.observe('idempotency_retry_age_seconds', { route }, age / 1000),
    leaseExpired: (route) => metrics.count('idempotency_lease_expired_total', { route }),
    leaseUse: (route, ratio) => metrics.observe('idempotency_lease_use_ratio', { route }, ratio),
    regenerated: (route) => metrics.count('idempotency_regenerated_keys_total', { route }),
    trouble: (message, detail) => log.error(detail, message),
  }
}

/** What happens to unresolved records → metrics, their histories, and a log line if something changes or needs a person. */
export function reconcileObserver(
  metrics: Metrics,
  log: Logger,
  history: History,
): ReconcilerPorts['observer'] {
  return {
    counted(counted) {
      for (const [state, count] of Object.entries(counted))
        metrics.set('idempotency_records', { state }, count)
    },
    leaseExpired: (route, id) => {
      metrics.count('idempotency_lease_expired_total', { route })
      history.add(id, 'lease_expired', '', {})
      log.warn({ route, record: shortId(id) }, 'a lease expired: the outcome is unknown')
    },
    reconciled: (route, result, id) => {
      metrics.count('idempotency_reconcile_total', { route, result })
      history.add(id, 'reconciled', result, { result })
      const level = result === 'completed' || result === 'retryable' ? 'info' : 'debug'
      log[level]({ route, record: shortId(id), result }, 'reconciled')
    },
    expiring: (route, id, dropAt) => {
      metrics.count('idempotency_unresolved_expiring_total', { route })
      log.error(
        { route, record: shortId(id), until: new Date(dropAt).toISOString() },
        'an unresolved record is about to be dropped; nobody will know then whether it was executed',
      )
    },
    trouble: (message, detail) => log.error(detail, message),
    tried: (level, message, detail) => log[level](detail, message),
  }
}

/** What shadow mode decided about a request → a metric, one log line, and its record's history. */
export function shadowObserver(
  metrics: Metrics,
  log: Logger,
  history: History,
): (summary: ShadowSummary, verdict: ShadowVerdict) => void {
  return (summary, verdict) => {
    const { route, id, startedAt, retryAge, regenerated } = summary
    metrics.count('idempotency_shadow_total', { route, verdict })
    if (id !== null) history.add(id, 'shadowed', verdict, { verdict })
    const figures = {
      ms: round(performance.now() - startedAt),
      ...(retryAge === null ? {} : { retryAgeMs: Math.round(retryAge) }),
      ...(regenerated ? { newKey: true } : {}),
    }
    log.info(line(summary, { verdict }, figures), 'shadow')
  }
}

/** The members of a log line, in the order in which people read them. */
function line(summary: RequestSummary, decision: object, figures: object): object {
  const { method, route, id, before, after, cause, traceId } = summary
  return {
    method,
    route,
    record: id === null ? null : shortId(id),
    ...decision,
    before,
    after,
    ...figures,
    ...(cause === null ? {} : { cause }),
    ...(traceId === null ? {} : { traceId }),
  }
}

function round(milliseconds: number): number {
  return Math.round(milliseconds * 100) / 100
}
