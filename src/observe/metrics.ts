import { collectDefaultMetrics, Gauge, type Metric as PromMetric, Registry } from 'prom-client'
import { Counts, Distributions, type Labels } from './fast-series.ts'

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
type Metric =
  | (Described & { readonly kind: 'counter' | 'gauge' })
  | (Described & { readonly kind: 'histogram'; readonly buckets: readonly number[] })

/** Every metric of this version (contract §13). Documentation is tested against it. */
export const METRICS = {
  idempotency_requests_total: {
    kind: 'counter',
    labels: ['route', 'outcome'],
    help: 'Requests, by how they were answered.',
  },
  idempotency_claims_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Attempts to claim a key, by what was found.',
  },
  idempotency_completions_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Outcomes of executed requests, by how they were recorded.',
  },
  idempotency_duplicates_prevented_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Duplicates that were answered without being executed again.',
  },
  idempotency_request_duration_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'Time from the request’s head to the end of its answer, of requests that got an answer of the upstream, live or replayed.',
    buckets: DURATIONS,
  },
  idempotency_overhead_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'The part of that time which the upstream did not take, of executed and replayed requests.',
    buckets: OVERHEADS,
  },
  idempotency_store_operation_seconds: {
    kind: 'histogram',
    labels: ['store', 'operation'],
    help: 'Time that store operations took.',
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
    help: 'Duplicates that wait for the first request to finish.',
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
  },
  idempotency_unresolved_expiring_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Unknown records that will be dropped unresolved within a day.',
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
  },
  idempotency_store_grade: {
    kind: 'gauge',
    labels: ['store'],
    help: 'How far the store can be trusted: 0 unfit, 1 volatile, 2 unknown, 3 strict.',
  },
  idempotency_log_lines_dropped_total: {
    kind: 'counter',
    labels: [],
    help: 'Log lines dropped because nobody read standard output, or it was full.',
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
} as const satisfies Record<string, Metric>
export type MetricName = keyof typeof METRICS

const MISNAMED = [
  'nodejs_active_handles_total',
  'nodejs_active_requests_total',
  'nodejs_active_resources_total',
]

/** The registry of one process. Values are set by name; unknown names are a compile error. */
export class Metrics {
  readonly registry = new Registry()
  readonly #counters = new Map<MetricName, Counts>()
  readonly #gauges = new Map<MetricName, Gauge>()
  readonly #histograms = new Map<MetricName, Distributions>()

  /** `defaults`: Node's metrics as well. */
  constructor(collect: Partial<Record<MetricName, () => number>>, defaults = true) {
    if (defaults) this.#collectDefaults()
    else this.#registerStartTime()
    for (const [name, metric] of Object.entries(METRICS) as [MetricName, Metric][]) {
      switch (metric.kind) {
        case 'counter':
          this.#counters.set(name, this.#register(new Counts({ name, ...metric }, collect[name])))
          break
        case 'histogram':
          this.#histograms.set(name, this.#register(new Distributions({ name, ...metric }, metric.buckets)))
          break
        case 'gauge':
          this.#gauges.set(name, this.#gauge(name, metric, collect[name]))
      }
    }
  }

  /** `by`: 0 makes a series that is not there yet. */
  count(name: MetricName, labels: Labels, by = 1): void {
    this.#counters.get(name)?.increment(labels, by)
  }
  set(name: MetricName, labels: Labels, value: number): void {
    this.#gauges.get(name)?.set(labels, value)
  }
  observe(name: MetricName, labels: Labels, value: number): void {
    this.#histograms.get(name)?.observe(labels, value)
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
  #register<M extends Counts | Distributions>(series: M): M {
    this.registry.registerMetric(series as unknown as PromMetric)
    return series
  }

  #gauge(name: string, { help, labels }: Metric, read: (() => number) | undefined): Gauge {
    const base = { name, help, labelNames: [...labels], registers: [this.registry] }
    if (read === undefined) return new Gauge(base)
    return new Gauge({
      ...base,
      collect() {
        this.set(read())
      },
    })
  }
}
