import { Counter, collectDefaultMetrics, Gauge, Histogram, Registry } from 'prom-client'

/** Upstream work and the proxy's own share of it: from half a millisecond to a minute. */
const SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
const AGES = [1, 5, 30, 60, 300, 1800, 3600, 21_600, 86_400, 259_200, 604_800, 2_592_000]
const RATIOS = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]

interface Metric {
  readonly kind: 'counter' | 'gauge' | 'histogram'
  readonly labels: readonly string[]
  readonly help: string
  readonly buckets?: readonly number[]
}

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
  idempotency_buffered_bytes: { kind: 'gauge', labels: [], help: 'Bytes of bodies held.' },
  idempotency_spooled: { kind: 'gauge', labels: [], help: 'Outcomes that the store has not taken yet.' },
  idempotency_lease_expired_total: {
    kind: 'counter',
    labels: ['route'],
    help: 'Requests that met a lapsed lease.',
  },
  idempotency_retry_age_seconds: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Age of a record when a retry came.',
    buckets: AGES,
  },
  idempotency_lease_use_ratio: {
    kind: 'histogram',
    labels: ['route'],
    help: 'Upstream time by lease.',
    buckets: RATIOS,
  },
  idempotency_store_grade: {
    kind: 'gauge',
    labels: ['store'],
    help: '0 unfit, 1 volatile, 2 unknown, 3 strict.',
  },
  idempotency_build_info: { kind: 'gauge', labels: ['version', 'node'], help: 'Always 1.' },
} as const satisfies Record<string, Metric>
export type MetricName = keyof typeof METRICS

/** The registry of one process. Values are set by name; unknown names are a compile error. */
export class Metrics {
  readonly registry = new Registry()
  readonly #counters = new Map<string, Counter>()
  readonly #gauges = new Map<string, Gauge>()
  readonly #histograms = new Map<string, Histogram>()

  constructor(collect: Partial<Record<MetricName, () => number>>) {
    collectDefaultMetrics({ register: this.registry })
    for (const [name, metric] of Object.entries(METRICS) as [MetricName, Metric][]) {
      const { kind, labels, help, buckets = [] } = metric
      const base = { name, help, labelNames: [...labels], registers: [this.registry] }
      const read = collect[name]
      if (kind === 'counter') this.#counters.set(name, new Counter(base))
      else if (kind === 'histogram')
        this.#histograms.set(name, new Histogram({ ...base, buckets: [...buckets] }))
      else
        this.#gauges.set(
          name,
          new Gauge(
            read === undefined
              ? base
              : {
                  ...base,
                  collect() {
                    this.set(read())
                  },
                },
          ),
        )
    }
  }

  count(name: MetricName, labels: Record<string, string>): void {
    this.#counters.get(name)?.inc(labels)
  }
  set(name: MetricName, labels: Record<string, string>, value: number): void {
    this.#gauges.get(name)?.set(labels, value)
  }
  observe(name: MetricName, labels: Record<string, string>, value: number): void {
    this.#histograms.get(name)?.observe(labels, value)
  }
}
