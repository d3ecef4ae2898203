import { collectDefaultMetrics, Gauge, type Metric as PromMetric, Registry } from 'prom-client'
import type { RoutePolicy } from '../core/policy.ts'
import { isProtected, policiesOf, type Routes, readsKeys } from '../core/route.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  namesOf,
  possibleOutcomes,
  RECONCILE_RESULTS,
} from '../protect/outcomes.ts'
import { Distributions, type Labels, Values } from './fast-series.ts'

// Each bound costs a series per route (docs/metrics.md): no more than the alerts and dashboards can tell apart.
/** A request with its upstream's work. */
const DURATIONS = [0.005, 0.025, 0.05, 0.1, 0.25, 1, 2.5, 10, 60]
/** The proxy's own share; IdempotencyOverheadHigh compares with 0.1. */
const OVERHEADS = [0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5]
/** Up to `store.timeout` and its grace. */
const STORE_TIMES = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1]
/** IdempotencyRetentionTooShort compares with 80 % of `ttl`; reports count retries within a minute, an hour and a day. */
const AGES = [10, 60, 600, 3600, 21_600, 43_200, 86_400, 259_200, 604_800, 2_592_000]
/** IdempotencyLeaseTooShort compares with 0.8. */
const RATIOS = [0.1, 0.25, 0.5, 0.75, 1, 1.5]

interface Described {
  readonly labels: readonly string[]
  readonly help: string
}
interface Counter extends Described {
  readonly kind: 'counter'
  /**
   * The series that a route begins with, at 0: those that can happen under its settings. A counter that is first seen at 1 has
   * not increased for Prometheus, and the first orphan would ring no bell.
   */
  readonly start?: (policy: RoutePolicy) => readonly Labels[]
}
type Metric =
  | Counter
  | (Described & { readonly kind: 'gauge' })
  | (Described & { readonly kind: 'histogram'; readonly buckets: readonly number[] })

const results = (table: Readonly<Record<string, unknown>>): Labels[] =>
  namesOf(table).map((result) => ({ result }))
/** A route may have left records under earlier settings, and one such event rings an alert. */
const always = (): Labels[] => [{}]

const named = <Name extends string>(rows: Readonly<Record<Name, Metric>>) => rows

/** Every metric of this version (contract §13). Documentation is tested against it. */
export const METRICS = named({
  idempotency_requests_total: {
    kind: 'counter',
    labels: ['route', 'outcome'],
    help: 'Requests, by how they were answered.',
    start: (policy) => possibleOutcomes(policy).map((outcome) => ({ outcome })),
  },
  idempotency_claims_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Attempts to claim a key, by what was found.',
    // Shadow mode claims, too, but is counted by its verdicts alone.
    start: (policy) => (isProtected(policy) ? results(CLAIM_RESULTS) : []),
  },
  idempotency_completions_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Outcomes of executed requests, by how they were recorded.',
    start: (policy) => (readsKeys(policy) ? results(COMPLETION_RESULTS) : []),
  },
  idempotency_duplicates_prevented_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Duplicates that were answered without being executed again.',
    start: (policy) => (isProtected(policy) ? [{}] : []),
  },
  idempotency_request_duration_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'Time from the head of a request to the end of its response, for requests answered by the upstream, live or replayed.',
    buckets: DURATIONS,
  },
  idempotency_overhead_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'The part of that time not spent waiting for the upstream, for executed and replayed requests.',
    buckets: OVERHEADS,
  },
  idempotency_store_operation_seconds: {
    kind: 'histogram',
    labels: ['store', 'operation'],
    help: 'Duration of store operations.',
    buckets: STORE_TIMES,
  },
  idempotency_store_errors_total: {
    kind: 'counter',
    labels: ['store'],
    help: 'Store operations that failed.',
  },
  idempotency_store_up: {
    kind: 'gauge',
    labels: ['store'],
    help: '1 if the store answered the last operation, else 0.',
  },
  idempotency_breaker_state: {
    kind: 'gauge',
    labels: ['store'],
    help: 'Circuit breaker of the store: 0 closed, 1 half open, 2 open.',
  },
  idempotency_in_flight: { kind: 'gauge', labels: [], help: 'Protected requests in progress.' },
  idempotency_waiters: {
    kind: 'gauge',
    labels: [],
    help: 'Duplicates waiting for the first request to finish.',
  },
  idempotency_buffered_bytes: {
    kind: 'gauge',
    labels: [],
    help: 'Bytes of request and response bodies held in memory.',
  },
  idempotency_spooled: {
    kind: 'gauge',
    labels: [],
    help: 'Outcomes not yet written to the store: held in memory, and on disk if store.spool is set.',
  },
  idempotency_lease_expired_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Leases that expired before their request finished; each is counted once.',
    start: always,
  },
  idempotency_records: {
    kind: 'gauge',
    labels: ['state'],
    help: 'Records with an unknown outcome, dead-lettered ones counted separately.',
  },
  idempotency_pruned_total: {
    kind: 'counter',
    labels: ['store'],
    help: 'Expired records removed from the store (memory and sqlite only; Redis does not report them).',
  },
  idempotency_reconcile_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Reconciliation of unknown records, by result.',
    start: (policy) => (readsKeys(policy) && policy.reconcile !== null ? results(RECONCILE_RESULTS) : []),
  },
  idempotency_unresolved_expiring_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Unknown records that will be dropped unresolved within a day.',
    start: always,
  },
  idempotency_retry_age_seconds: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Age of a completed record when a retry arrived.',
    buckets: AGES,
  },
  idempotency_retention_seconds: {
    kind: 'gauge',
    labels: ['route'],
    help: 'The ttl of the route: how long a completed record answers retries.',
  },
  idempotency_shadow_total: {
    kind: 'counter',
    labels: ['route', 'verdict'],
    help: 'Requests seen in shadow mode, by what enforce would have done.',
  },
  idempotency_lease_use_ratio: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Upstream time divided by the lease.',
    buckets: RATIOS,
  },
  idempotency_regenerated_keys_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Requests repeated under a new key within a minute, as seen by this replica.',
    start: (policy) => (readsKeys(policy) ? [{}] : []),
  },
  idempotency_store_grade: {
    kind: 'gauge',
    labels: ['store'],
    help: 'How far the store can be trusted: 0 unfit, 1 volatile, 2 unknown, 3 strict.',
  },
  idempotency_log_lines_dropped_total: {
    kind: 'counter',
    labels: [],
    help: 'Log lines dropped because standard output was full or nobody read it.',
  },
  idempotency_config_last_reload_successful: {
    kind: 'gauge',
    labels: [],
    help: '1 if the configuration last read is in force, 0 if it was invalid or needs a restart.',
  },
  idempotency_build_info: {
    kind: 'gauge',
    labels: ['version', 'node'],
    help: 'Version of the proxy and of Node.js; always 1.',
  },
})
export type MetricName = keyof typeof METRICS

const MISNAMED = [
  'nodejs_active_handles_total',
  'nodejs_active_requests_total',
  'nodejs_active_resources_total',
]

/** A sample of a counter, or of a bucket. */
interface Sample {
  readonly name: string
  readonly labels: Readonly<Record<string, string>>
  readonly value: number
}

/** The registry of one process. Values are set by name; unknown names are a compile error. */
export class Metrics {
  readonly registry = new Registry()
  readonly #values = new Map<MetricName, Values>()
  readonly #histograms = new Map<MetricName, Distributions>()

  /** `defaults`: Node's metrics as well. */
  constructor(defaults = true) {
    if (defaults) this.#collectDefaults()
    else this.#registerStartTime()
    for (const name of namesOf(METRICS)) {
      const metric = METRICS[name]
      if (metric.kind === 'histogram')
        this.#histograms.set(name, this.#register(new Distributions({ name, ...metric }, metric.buckets)))
      else this.#values.set(name, this.#register(new Values({ name, ...metric }, metric.kind)))
    }
  }

  count(name: MetricName, labels: Labels, by = 1): void {
    this.#values.get(name)?.increment(labels, by)
  }
  set(name: MetricName, labels: Labels, value: number): void {
    this.#values.get(name)?.set(labels, value)
  }
  observe(name: MetricName, labels: Labels, value: number): void {
    this.#histograms.get(name)?.observe(labels, value)
  }

  /** Values that are counted elsewhere, by metrics without labels. */
  read(sources: Partial<Record<MetricName, () => number>>): void {
    for (const [name, source] of Object.entries(sources)) this.#values.get(name as MetricName)?.read(source)
  }

  /** The series of these routes, at the start and whenever the routes have changed. */
  startRoutes(config: Routes): void {
    for (const policy of policiesOf(config)) {
      const { name: route, ttl } = policy
      if (readsKeys(policy)) this.set('idempotency_retention_seconds', { route }, ttl / 1000)
      for (const name of namesOf(METRICS)) {
        const metric = METRICS[name]
        if (metric.kind !== 'counter') continue
        for (const labels of metric.start?.(policy) ?? []) this.count(name, { route, ...labels }, 0)
      }
    }
    // Methods that nothing protects.
    if (config.unmatched !== 'reject')
      this.count('idempotency_requests_total', { route: config.defaults.name, outcome: 'passed' }, 0)
  }

  /** The counters of this program that have counted anything, without Node's; and the ages of retries, by their buckets. */
  async samples(): Promise<Sample[]> {
    const counted = [...this.#values.values()].filter(({ kind }) => kind === 'counter')
    const ages = this.#histograms.get('idempotency_retry_age_seconds') as Distributions
    const metrics = await Promise.all([...counted, ages].map((series) => series.get()))
    return metrics.flatMap(({ values }) =>
      values
        .filter(({ value }) => value > 0)
        .map(({ metricName, labels, value }) => ({ name: metricName, labels: texts(labels), value })),
    )
  }

  #collectDefaults(): void {
    collectDefaultMetrics({ register: this.registry })
    // Gauges named like counters, which `promtool check metrics` refuses: sums of the metrics without `_total`.
    for (const name of MISNAMED) this.registry.removeSingleMetric(name)
  }

  /** Alerts on single events need it (docs/adr/0024-alerts-on-single-events.md). */
  #registerStartTime(): void {
    const help = 'Start time of the process since unix epoch in seconds.'
    const gauge = new Gauge({ name: 'process_start_time_seconds', help, registers: [this.registry] })
    gauge.set(Math.round(performance.timeOrigin / 1000))
  }

  /** All that the registry asks of a metric is its name and `get`. */
  #register<M extends Values | Distributions>(series: M): M {
    this.registry.registerMetric(series as unknown as PromMetric)
    return series
  }
}

/** The bound of a bucket is a number. */
function texts(labels: Readonly<Record<string, string | number>>): Record<string, string> {
  return Object.fromEntries(Object.entries(labels).map(([label, value]) => [label, String(value)]))
}
