import { METRICS, type MetricName } from '../../src/observe/metrics.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  namesOf,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  SHADOW_VERDICTS,
} from '../../src/protect/outcomes.ts'
import { named } from './promql.ts'

/** Labels that Prometheus or Kubernetes puts on every series. */
const TARGET = ['job', 'namespace', 'instance', 'le']
/** Metrics of Node and of Prometheus itself. */
const OTHERS = [
  'up',
  'process_start_time_seconds',
  'process_resident_memory_bytes',
  'process_cpu_seconds_total',
  'nodejs_eventloop_lag_p99_seconds',
]

/** Labels with a closed list of values. */
const VALUES: Readonly<Record<string, readonly string[]>> = {
  'idempotency_requests_total outcome': namesOf(REQUEST_OUTCOMES),
  'idempotency_request_duration_seconds outcome': namesOf(REQUEST_OUTCOMES),
  'idempotency_overhead_seconds outcome': namesOf(REQUEST_OUTCOMES),
  'idempotency_claims_total result': namesOf(CLAIM_RESULTS),
  'idempotency_completions_total result': namesOf(COMPLETION_RESULTS),
  'idempotency_reconcile_total result': namesOf(RECONCILE_RESULTS),
  'idempotency_records state': ['unknown', 'dead_lettered'],
  'idempotency_shadow_total verdict': namesOf(SHADOW_VERDICTS),
}

/** Metrics, labels and values in a query that no proxy has. */
export function unknownTo(query: string): string[] {
  const wrong: string[] = []
  const { selectors, grouped } = named(query)
  const labels = new Set(TARGET)
  for (const { metric, labels: compared } of selectors) {
    const base = metric.replace(/_(?:bucket|sum|count)$/, '')
    if (OTHERS.includes(metric)) continue
    const known = METRICS[(metric in METRICS ? metric : base) as MetricName]
    if (known === undefined || (metric !== base && metric.startsWith(base) && known.kind !== 'histogram')) {
      wrong.push(metric)
      continue
    }
    const own: readonly string[] = known.labels
    for (const label of own) labels.add(label)
    for (const { label, value } of compared) {
      if (!own.includes(label) && !TARGET.includes(label)) wrong.push(`${metric}{${label}}`)
      const values = VALUES[`${base} ${label}`]
      if (values === undefined) continue
      const pattern = new RegExp(`^(?:${value})$`)
      if (!values.some((one) => pattern.test(one))) wrong.push(`${metric}{${label}="${value}"}`)
      for (const one of value.split('|'))
        if (/^\w+$/.test(one) && !values.includes(one)) wrong.push(`${metric}{${label}="${one}"}`)
    }
  }
  return [...wrong, ...grouped.filter((label) => !labels.has(label)).map((label) => `by (${label})`)]
}
