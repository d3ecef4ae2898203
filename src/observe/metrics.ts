import { collectDefaultMetrics, Gauge, type Metric as PromMetric, Registry } from 'prom-client'
import { Counts, Distributions, type Labels } from './series.ts'

/** Upstream work and the proxy's own share of it: from half a millisecond to a minute. */
const SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
const AGES = [1, 5, 30, 60, 300, 1800, 3600, 21_600, 43_200, 86_400, 259_200, 604_800, 2_592_000]
const RATIOS = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]

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
    help: 'Requests by how they were answered.',
  },
  idempotency_claims_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Claims by what they found.',
  },
  idempotency_completions_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Outcomes by how they were recorded.',
  },
  idempotency_duplicates_prevented_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Requests that were not executed again.',
  },
  idempotency_request_duration_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'From the head to the answer.',
    buckets: SECONDS,
  },
  idempotency_overhead_seconds: {
    kind: 'histogram',
    labels: ['route', 'outcome'],
    help: 'The same, without the upstream.',
    buckets: SECONDS,
  },
  idempotency_store_operation_seconds: {
    kind: 'histogram',
    labels: ['store', 'operation'],
    help: 'Time of store operations.',
    buckets: SECONDS,
  },
  idempotency_store_errors_total: {
    kind: 'counter',
    labels: ['store'],
    help: 'Store operations that failed.',
  },
  idempotency_store_up: {
    kind: 'gauge',
    labels: ['store'],
    help: '1 while the last store operation was answered.',
  },
  idempotency_breaker_state: { kind: 'gauge', labels: ['store'], help: '0 closed, 1 half open, 2 open.' },
  idempotency_in_flight: { kind: 'gauge', labels: [], help: 'Protected requests under way.' },
  idempotency_waiters: { kind: 'gauge', labels: [], help: 'Duplicates held until the first has finished.' },
  idempotency_buffered_bytes: { kind: 'gauge', labels: [], help: 'Bytes of bodies held.' },
  idempotency_spooled: {
    kind: 'gauge',
    labels: [],
    help: 'Outcomes that the store has not taken yet: held in memory, and on disk with store.spool.',
  },
  idempotency_lease_expired_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Leases that lapsed, each once.',
  },
  idempotency_records: {
    kind: 'gauge',
    labels: ['state'],
    help: 'Records whose outcome is unknown; dead-lettered ones apart.',
  },
  idempotency_pruned_total: {
    kind: 'counter',
    labels: ['store'],
    help: 'Expired records that the store has removed, where the store tells (memory, sqlite).',
  },
  idempotency_reconcile_total: {
    kind: 'counter',
    labels: ['route', 'result'],
    help: 'Unknown records that the upstream is asked about, by what came of it.',
  },
  idempotency_unresolved_expiring_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Unknown records that are about to be dropped unresolved.',
  },
  idempotency_retry_age_seconds: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Age of a record when a retry came.',
    buckets: AGES,
  },
  idempotency_retention_seconds: {
    kind: 'gauge',
    labels: ['route'],
    help: 'ttl of the route: how long a finished record answers retries.',
  },
  idempotency_shadow_total: {
    kind: 'counter',
    labels: ['route', 'verdict'],
    help: 'Requests that shadow mode looked at, by what enforce would have done.',
  },
  idempotency_lease_use_ratio: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Upstream time by lease.',
    buckets: RATIOS,
  },
  idempotency_regenerated_keys_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Operations that came again under a new key within a minute, on this replica.',
  },
  idempotency_store_grade: {
    kind: 'gauge',
    labels: ['store'],
    help: '0 unfit, 1 volatile, 2 unknown, 3 strict.',
  },
  idempotency_config_last_reload_successful: {
    kind: 'gauge',
    labels: [],
    help: '1 while what was last read of the configuration is in force, 0 where it was invalid or needs a restart.',
  },
  idempotency_build_info: { kind: 'gauge', labels: ['version', 'node'], help: 'Always 1.' },
} as const satisfies Record<string, Metric>
export type MetricName = keyof typeof METRICS

/** The registry of one process. Values are set by name; unknown names are a compile error. */
export class Metrics {
  readonly registry = new Registry()
  readonly #counters = new Map<MetricName, Counts>()
  readonly #gauges = new Map<MetricName, Gauge>()
  readonly #histograms = new Map<MetricName, Distributions>()

  constructor(collect: Partial<Record<MetricName, () => number>>) {
    collectDefaultMetrics({ register: this.registry })
    for (const [name, metric] of Object.entries(METRICS) as [MetricName, Metric][]) {
      switch (metric.kind) {
        case 'counter':
          this.#counters.set(name, this.#register(new Counts({ name, ...metric })))
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
