import type { Metric as PromMetric, Registry } from 'prom-client'
import type { RoutePolicy } from '../core/policy.ts'
import { isProtected, policiesOf, type Routes, readsKeys } from '../core/route.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  namesOf,
  possibleOutcomes,
  RECONCILE_RESULTS,
} from '../protect/outcomes.ts'
import { Once } from '../runtime/scheduling.ts'

// Each bound costs a series per route (docs/metrics.md): only those that alerts and dashboards distinguish.
/** Requests, including the upstream's work. */
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
 * The series that a route starts with at 0: those that its settings allow. To Prometheus, a counter first seen at 1 has not increased, so
 * the first orphan would not fire an alert.
 */
type Start = (policy: RoutePolicy) => readonly Labels[]
type LabelNames = readonly string[]

const none = (): Labels[] => []
/** Earlier settings of the route may have left records, and one such event fires an alert. */
const always = (): Labels[] => [{}]
const results = (table: Readonly<Record<string, unknown>>): Labels[] =>
  namesOf(table).map((result) => ({ result }))

const counter = (labels: LabelNames, help: string, start: Start = none) =>
  ({ kind: 'counter', labels, help, start }) as const
/** `merged`: how the values of several workers are combined. */
const gauge = (labels: LabelNames, help: string, merged: 'sum' | 'min' | 'max' = 'sum') =>
  ({ kind: 'gauge', labels, help, merged }) as const
const histogram = (labels: LabelNames, help: string, buckets: readonly number[]) =>
  ({ kind: 'histogram', labels, help, buckets }) as const

/** All metrics (contract §13). Documentation is tested against this table. */
// biome-ignore format: a table
export const METRICS = {
  idempotency_requests_total: counter(['route', 'outcome'], 'Requests, by how they were answered.',
    (policy) => possibleOutcomes(policy).map((outcome) => ({ outcome }))),
  // Shadow mode also claims, but only its verdicts are counted.
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
  idempotency_store_up: gauge(['store'], '1 if the store answered the last operation, else 0.', 'min'),
  idempotency_breaker_state: gauge(['store'], 'Circuit breaker of the store: 0 closed, 1 half open, 2 open.', 'max'),
  idempotency_store_in_grace: gauge(['store'],
    '1 while nothing new is claimed because the store may have lost claims (store.grace), else 0.', 'max'),
  idempotency_store_graces_total: counter(['store'],
    'Grace periods that this replica has seen begin: the store failed over, restarted or lost its data (store.grace).'),
  idempotency_store_waits_total: counter(['store', 'result'],
    'Claims that waited for replicas or disks (store.wait): satisfied, or unsatisfied and withdrawn.'),
  idempotency_in_flight: gauge([], 'Protected requests in progress.'),
  idempotency_waiters: gauge([],
    'Duplicates waiting for the first request to finish, and requests waiting for the end of a grace.'),
  idempotency_buffered_bytes: gauge([], 'Bytes of request and response bodies held in memory.'),
  idempotency_spooled: gauge([],
    'Outcomes not yet written to the store: held in memory, and on disk if store.spool is set.'),
  idempotency_split_total: counter(['route'],
    'Claims that the store lost and that another owner made before they could be written again; each may have been executed twice.',
    always),
  idempotency_lease_expired_total: counter(['route'],
    'Leases that expired before their request finished; each is counted once.', always),
  idempotency_records: gauge(['state'],
    'Records with an unknown outcome, dead-lettered ones counted separately.', 'max'),
  idempotency_pruned_total: counter(['store'],
    'Expired records removed from the store (not by Redis, which does not report them).'),
  idempotency_reconcile_total: counter(['route', 'result'], 'Reconciliation of unknown records, by result.',
    (policy) => (readsKeys(policy) && policy.reconcile !== null ? results(RECONCILE_RESULTS) : [])),
  idempotency_unresolved_expiring_total: counter(['route'],
    'Unknown records that will be dropped unresolved within a day.', always),
  idempotency_retry_age_seconds: histogram(['route'], 'Age of a completed record when a retry arrived.',
    AGES),
  idempotency_retention_seconds: gauge(['route'],
    'The ttl of the route: how long a completed record answers retries.', 'max'),
  idempotency_shadow_total: counter(['route', 'verdict'],
    'Requests seen in shadow mode, by what enforce would have done.'),
  idempotency_lease_use_ratio: histogram(['route'], 'Upstream time divided by the lease.', RATIOS),
  idempotency_regenerated_keys_total: counter(['route'],
    'Requests repeated under a new key within a minute, as seen by this replica.',
    (policy) => (readsKeys(policy) ? [{}] : [])),
  idempotency_caller_changed_total: counter(['route'],
    'Requests repeated under the same key by another caller within ten minutes, as seen by this replica, and stored responses that change the cookie of their caller.',
    (policy) => (readsKeys(policy) && policy.scope.caller.length > 0 ? [{}] : [])),
  idempotency_route_near_miss_total: counter(['route'],
    'Requests that match no route, but would match this one if letter case, ;parameters or a file extension did not count.', always),
  idempotency_seal_errors_total: counter(['reason'],
    'Sealed records that could not be opened: unknown_key, or altered since they were sealed.'),
  idempotency_store_grade: gauge(['store'],
    'How far the store can be trusted: 0 unfit, 1 volatile, 2 unknown, 3 strict (docs/stores.md#the-grade).', 'min'),
  idempotency_log_lines_dropped_total: counter([],
    'Log lines dropped because standard output was full or not read.'),
  idempotency_workers: gauge([], 'Processes that serve traffic.'),
  idempotency_workers_ended_total: counter([],
    'Workers that exited unexpectedly and were replaced; what they were executing becomes unknown.'),
  idempotency_config_last_reload_successful: gauge([],
    '1 if the configuration last read is in force, 0 if it was invalid or needs a restart.', 'min'),
  idempotency_tls_certificate_expires_seconds: gauge(['listener'],
    'When the first certificate of a listener expires, in seconds since 1970.', 'min'),
  idempotency_build_info: gauge(['version', 'node'], 'Version of the proxy and of Node.js; always 1.', 'max'),
}
export type MetricName = keyof typeof METRICS

/** The start time of the process; several processes have none in common. */
export const START_TIME = 'process_start_time_seconds'

/** What a scrape gets. */
export interface Exposition {
  readonly contentType: string
  readonly text: string
}

/** All metrics of a process with their samples, as prom-client exchanges them. */
export type CollectedMetrics = readonly {
  readonly name: string
  readonly type: string
  readonly values: readonly Sample[]
}[]

export interface CountedSample {
  readonly name: string
  readonly labels: Labels
  readonly value: number
}

const AGES_OF_RETRIES: MetricName = 'idempotency_retry_age_seconds'

/** Counters above 0, without Node's; and the ages of retries, by their buckets. */
export function samplesOf(metrics: CollectedMetrics): CountedSample[] {
  return metrics
    .filter(
      ({ name, type }) => Object.hasOwn(METRICS, name) && (type === 'counter' || name === AGES_OF_RETRIES),
    )
    .flatMap(({ values }) => values)
    .filter(({ value }) => value > 0)
    .map(({ metricName: name, labels, value }) => ({ name, labels, value }))
}

/** The metrics of one process. Values are set by name; an unknown name is a compile error. */
export class Metrics {
  readonly #defaults: boolean
  readonly #values = new Map<MetricName, Series<SeriesValue>>()
  readonly #histograms = new Map<MetricName, Series<Distribution>>()
  readonly #registry = new Once(() => this.#openRegistry())

  /** `defaults`: include Node's metrics. */
  constructor(defaults = true) {
    this.#defaults = defaults
    for (const name of namesOf(METRICS)) {
      const metric = METRICS[name]
      if (metric.kind === 'histogram')
        this.#histograms.set(name, new Series(name, metric, () => new Distribution(metric.buckets)))
      else this.#values.set(name, new Series(name, metric, () => new SeriesValue()))
    }
  }

  /** The series of a counter or gauge, to be kept by callers that count often. It is exported from now on. */
  value(name: MetricName, labels: Labels): SeriesValue {
    return (this.#values.get(name) as Series<SeriesValue>).of(labels)
  }
  /** The same for a histogram. */
  histogram(name: MetricName, labels: Labels): Distribution {
    return (this.#histograms.get(name) as Series<Distribution>).of(labels)
  }

  /** A count of 0 creates the series. */
  count(name: MetricName, labels: Labels, by = 1): void {
    this.value(name, labels).current += by
  }
  set(name: MetricName, labels: Labels, value: number): void {
    this.value(name, labels).current = value
  }
  observe(name: MetricName, labels: Labels, value: number): void {
    this.histogram(name, labels).observe(value)
  }

  /** Sets where to read metrics without labels at each scrape. */
  read(sources: Partial<Record<MetricName, () => number>>): void {
    for (const [name, source] of Object.entries(sources)) this.value(name as MetricName, {}).source = source
  }

  /** Creates the series that these routes start with; also called after a reload. */
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
    // For unprotected requests.
    if (config.unmatched !== 'reject')
      this.count('idempotency_requests_total', { route: config.defaults.name, outcome: 'passed' }, 0)
  }

  /** The exposition for Prometheus. */
  async exposition(): Promise<Exposition> {
    const registry = await this.#registry.get()
    return { contentType: registry.contentType, text: await registry.metrics() }
  }

  /** The same, to be merged with that of other processes. */
  async collected(): Promise<CollectedMetrics> {
    return (await this.#registry.get()).getMetricsAsJSON() as unknown as CollectedMetrics
  }

  /** For reports. */
  async samples(): Promise<CountedSample[]> {
    return samplesOf(await this.collected())
  }

  /** On the first scrape: prom-client takes long to load, and the values are here (docs/adr/0074). */
  async #openRegistry(): Promise<Registry> {
    const { collectDefaultMetrics, Gauge, Registry } = await import('prom-client')
    const registry = new Registry()
    if (this.#defaults) {
      collectDefaultMetrics({ register: registry })
      // Gauges named like counters, which `promtool check metrics` refuses: sums of the metrics without `_total`.
      for (const kind of ['handles', 'requests', 'resources'])
        registry.removeSingleMetric(`nodejs_active_${kind}_total`)
    } else {
      // Alerts on single events need it (docs/adr/0024).
      const help = 'Start time of the process since unix epoch in seconds.'
      const gauge = new Gauge({ name: START_TIME, help, registers: [registry], aggregator: 'omit' })
      gauge.set(Math.round(performance.timeOrigin / 1000))
    }
    for (const name of namesOf(METRICS)) {
      // The registry needs only a name and `get` of a metric.
      const series = this.#values.get(name) ?? this.#histograms.get(name)
      registry.registerMetric(series as unknown as PromMetric)
    }
    return registry
  }
}

/*
 * Metrics by label values, kept here and handed to prom-client when it is scraped: its own `inc` and `observe` check and hash the labels
 * each time, ten times per protected request (docs/internals/performance.md). Callers that count often keep the series of their labels.
 */

export type Labels = Readonly<Record<string, string>>

/** As prom-client prints it. */
interface Sample {
  readonly metricName: string
  readonly labels: Labels
  readonly value: number
}

interface MetricDescription {
  readonly kind: 'counter' | 'gauge' | 'histogram'
  readonly help: string
  readonly labels: readonly string[]
  readonly merged?: 'sum' | 'min' | 'max'
}

/** One series of a metric. */
interface Sampled {
  samples(name: string, labels: Labels): Sample[]
}

/** One metric, with one value per combination of labels. prom-client's registry needs only its name and `get`. */
class Series<V extends Sampled> {
  readonly name: string
  readonly kind: string
  readonly #about: MetricDescription
  readonly #make: () => V
  readonly #values = new Map<string, { readonly labels: Labels; readonly value: V }>()

  constructor(name: string, about: MetricDescription, make: () => V) {
    this.name = name
    this.kind = about.kind
    this.#about = about
    this.#make = make
    if (about.labels.length === 0) this.of({})
  }

  /** The series of these labels, created if missing; it is exported from then on. */
  of(labels: Labels): V {
    let key = ''
    // Label values have no NUL: they come from the configuration and from this program.
    for (const name of this.#about.labels) key += `${labels[name]}\0`
    let found = this.#values.get(key)
    if (found === undefined) {
      found = { labels: { ...labels }, value: this.#make() }
      this.#values.set(key, found)
    }
    return found.value
  }

  async get() {
    const { name, kind: type } = this
    const values = [...this.#values.values()].flatMap(({ labels, value }) => value.samples(name, labels))
    const { help, merged: aggregator = 'sum' } = this.#about
    return { name, help, type, values, aggregator }
  }
}

/** A counter or a gauge. */
class SeriesValue {
  current = 0
  /** Where to read it at each scrape; null: here. */
  source: (() => number) | null = null

  samples(metricName: string, labels: Labels): Sample[] {
    return [{ metricName, labels, value: this.source?.() ?? this.current }]
  }
}

/** A histogram. */
export class Distribution {
  readonly #bounds: readonly number[]
  /** Counts per bucket, not cumulative; the last one is for values beyond every bound. */
  readonly buckets: number[]
  sum = 0

  constructor(bounds: readonly number[]) {
    this.#bounds = bounds
    this.buckets = [...bounds.map(() => 0), 0]
  }

  observe(value: number): void {
    const bounds = this.#bounds
    let at = 0
    while (at < bounds.length && value > (bounds[at] as number)) at++
    ;(this.buckets[at] as number)++
    this.sum += value
  }

  samples(name: string, labels: Labels): Sample[] {
    let count = 0
    const counts = this.buckets.map((own, at) => {
      count += own
      const le = String(this.#bounds[at] ?? '+Inf')
      return { metricName: `${name}_bucket`, labels: { le, ...labels }, value: count }
    })
    return [
      ...counts,
      { metricName: `${name}_sum`, labels, value: this.sum },
      { metricName: `${name}_count`, labels, value: count },
    ]
  }
}
