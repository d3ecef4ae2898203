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

/**
 * The series that a route begins with, at 0: those that its settings allow. A counter that is first seen at 1 has not increased for
 * Prometheus, and the first orphan would not fire an alert.
 */
type Start = (policy: RoutePolicy) => readonly Labels[]
type Names = readonly string[]

const none = (): Labels[] => []
/** A route may have left records under earlier settings, and one such event fires an alert. */
const always = (): Labels[] => [{}]
const results = (table: Readonly<Record<string, unknown>>): Labels[] =>
  namesOf(table).map((result) => ({ result }))

const counter = (labels: Names, help: string, start: Start = none) =>
  ({ kind: 'counter', labels, help, start }) as const
const gauge = (labels: Names, help: string) => ({ kind: 'gauge', labels, help }) as const
const histogram = (labels: Names, help: string, buckets: readonly number[]) =>
  ({ kind: 'histogram', labels, help, buckets }) as const

/** Every metric of this version (contract §13). Documentation is tested against it. */
// biome-ignore format: a table
export const METRICS = {
  idempotency_requests_total: counter(['route', 'outcome'], 'Requests, by how they were answered.',
    (policy) => possibleOutcomes(policy).map((outcome) => ({ outcome }))),
  // Shadow mode claims, too, but is counted by its verdicts alone.
  idempotency_claims_total: counter(['route', 'result'], 'Attempts to claim a key, by what was found.',
    (policy) => (isProtected(policy) ? results(CLAIM_RESULTS) : [])),
  idempotency_completions_total: counter(['route', 'result'],
    'Outcomes of executed requests, by how they were recorded.',
    (policy) => (readsKeys(policy) ? results(COMPLETION_RESULTS) : [])),
  idempotency_duplicates_prevented_total: counter(['route'],
    'Duplicates that were answered without being executed again.', (policy) => (isProtected(policy) ? [{}] : [])),
  idempotency_request_duration_seconds: histogram(['route', 'outcome'],
    'Time from the head of a request to the end of its response, for requests answered by the upstream, live or replayed.',
    DURATIONS),
  idempotency_overhead_seconds: histogram(['route', 'outcome'],
    'The part of that time not spent waiting for the upstream, for executed and replayed requests.', OVERHEADS),
  idempotency_store_operation_seconds: histogram(['store', 'operation'], 'Duration of store operations.',
    STORE_TIMES),
  idempotency_store_errors_total: counter(['store'], 'Store operations that failed.'),
  idempotency_store_up: gauge(['store'], '1 if the store answered the last operation, else 0.'),
  idempotency_breaker_state: gauge(['store'], 'Circuit breaker of the store: 0 closed, 1 half open, 2 open.'),
  idempotency_in_flight: gauge([], 'Protected requests in progress.'),
  idempotency_waiters: gauge([], 'Duplicates waiting for the first request to finish.'),
  idempotency_buffered_bytes: gauge([], 'Bytes of request and response bodies held in memory.'),
  idempotency_spooled: gauge([],
    'Outcomes not yet written to the store: held in memory, and on disk if store.spool is set.'),
  idempotency_lease_expired_total: counter(['route'],
    'Leases that expired before their request finished; each is counted once.', always),
  idempotency_records: gauge(['state'],
    'Records with an unknown outcome, dead-lettered ones counted separately.'),
  idempotency_pruned_total: counter(['store'],
    'Expired records removed from the store (memory and sqlite only; Redis does not report them).'),
  idempotency_reconcile_total: counter(['route', 'result'], 'Reconciliation of unknown records, by result.',
    (policy) => (readsKeys(policy) && policy.reconcile !== null ? results(RECONCILE_RESULTS) : [])),
  idempotency_unresolved_expiring_total: counter(['route'],
    'Unknown records that will be dropped unresolved within a day.', always),
  idempotency_retry_age_seconds: histogram(['route'], 'Age of a completed record when a retry arrived.',
    AGES),
  idempotency_retention_seconds: gauge(['route'],
    'The ttl of the route: how long a completed record answers retries.'),
  idempotency_shadow_total: counter(['route', 'verdict'],
    'Requests seen in shadow mode, by what enforce would have done.'),
  idempotency_lease_use_ratio: histogram(['route'], 'Upstream time divided by the lease.', RATIOS),
  idempotency_regenerated_keys_total: counter(['route'],
    'Requests repeated under a new key within a minute, as seen by this replica.',
    (policy) => (readsKeys(policy) ? [{}] : [])),
  idempotency_store_grade: gauge(['store'],
    'How far the store can be trusted: 0 unfit, 1 volatile, 2 unknown, 3 strict.'),
  idempotency_log_lines_dropped_total: counter([],
    'Log lines dropped because standard output was full or nobody read it.'),
  idempotency_config_last_reload_successful: gauge([],
    '1 if the configuration last read is in force, 0 if it was invalid or needs a restart.'),
  idempotency_build_info: gauge(['version', 'node'], 'Version of the proxy and of Node.js; always 1.'),
}
export type MetricName = keyof typeof METRICS

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
      else this.#values.set(name, this.#register(new Values({ name, ...metric })))
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

  /** Where to read metrics without labels at each scrape. */
  read(sources: Partial<Record<MetricName, () => number>>): void {
    for (const [name, source] of Object.entries(sources)) this.#values.get(name as MetricName)?.read(source)
  }

  /** Makes the series that these routes begin with; also after a reload. */
  startRoutes(config: Routes): void {
    for (const policy of policiesOf(config)) {
      const { name: route, ttl } = policy
      if (readsKeys(policy)) this.set('idempotency_retention_seconds', { route }, ttl / 1000)
      for (const name of namesOf(METRICS)) {
        const metric = METRICS[name]
        if (metric.kind !== 'counter') continue
        for (const labels of metric.start(policy)) this.count(name, { route, ...labels }, 0)
      }
    }
    // Methods that nothing protects.
    if (config.unmatched !== 'reject')
      this.count('idempotency_requests_total', { route: config.defaults.name, outcome: 'passed' }, 0)
  }

  /** Counters above 0, without Node's; and the ages of retries, by their buckets. */
  async samples(): Promise<{ name: string; labels: Labels; value: number }[]> {
    const counted = [...this.#values.values()].filter(({ kind }) => kind === 'counter')
    const ages = this.#histograms.get('idempotency_retry_age_seconds') as Distributions
    const metrics = await Promise.all([...counted, ages].map((series) => series.get()))
    return metrics.flatMap(({ values }) =>
      values
        .filter(({ value }) => value > 0)
        .map(({ metricName: name, labels, value }) => ({ name, labels, value })),
    )
  }

  #collectDefaults(): void {
    collectDefaultMetrics({ register: this.registry })
    // Gauges named like counters, which `promtool check metrics` refuses: sums of the metrics without `_total`.
    for (const kind of ['handles', 'requests', 'resources'])
      this.registry.removeSingleMetric(`nodejs_active_${kind}_total`)
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
