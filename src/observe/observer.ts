import { shortId } from '../core/identity.ts'
import { type Millis, type RecordId } from '../core/record.ts'
import {
  type ClaimResult,
  type CompletionResult,
  REQUEST_OUTCOMES,
  type RequestOutcome,
  type ShadowVerdict,
} from '../protect/outcomes.ts'
import type { Observer, RequestSummary, ShadowSummary } from '../protect/request.ts'
import type { ReconcilerPorts } from '../reconcile/reconciler.ts'
import type { BreakerState, StoreOperation } from '../store/around.ts'
import { disproof, GRADES, gradingOf, PROVEN, unproven } from '../store/grade.ts'
import { Declined, type Store, type StoreFitness, StoreUnavailable, Unreplicated } from '../store/register.ts'
import type { History } from './history.ts'
import { type Logger, writeLine } from './log.ts'
import type { Distribution, Metrics } from './metrics.ts'

/**
 * Turns protected requests into metrics, a log line each (contract §13, §14) and entries in histories. Never a key or a credential.
 * `control` is notified of stored outcomes of its `routes`.
 */
export function observer(
  metrics: Metrics,
  log: Logger,
  history: History,
  control: { readonly routes: ReadonlySet<string>; completed(route: string, id: RecordId): void },
): Observer {
  const of = eachMade((route: string) => new RouteSeries(metrics, route))
  /** Routes whose scope does not fit their clients: one warning each, as there may be thousands of such requests. */
  const misfits = new Set<string>()
  const isFirstMisfit = ({ route, outcome, cause }: RequestSummary): boolean => {
    if (outcome !== 'caller_missing' || cause === null || misfits.has(route)) return false
    misfits.add(route)
    return true
  }
  /** Routes whose callers change: one warning each. */
  const changed = new Set<string>()
  return {
    answered(summary) {
      const { outcome, after, before, fence, status, upstreamMs, storeMs } = summary
      const duration = performance.now() - summary.startedAt
      if (outcome !== null) {
        const { requests, durations, overheads } = of(summary.route).answers(outcome)
        requests.current++
        durations?.observe(duration / 1000)
        overheads?.observe(Math.max(0, duration - upstreamMs) / 1000)
      }
      const becameUnknown = after === 'unknown' && before !== 'unknown'
      const reachedNobody = outcome === 'upstream_unreachable'
      const level = becameUnknown || reachedNobody || isFirstMisfit(summary) ? 'warn' : 'info'
      const figures = `,"fence":${fence},"status":${status},"ms":${rounded(duration)},"upstreamMs":${rounded(upstreamMs)},"storeMs":${rounded(storeMs)}`
      writeLine(log, level, members(summary, `,"outcome":"${outcome ?? 'aborted'}"`, figures), 'request')
      history.answered(summary)
    },
    began: (execution) => history.began(execution),
    claimed: (route, result) => void of(route).claims(result).current++,
    completed: (route, result, id, cause) => {
      of(route).completions(result).current++
      history.completed(result, id, cause)
      if (result === 'stored' && control.routes.has(route)) control.completed(route, id)
    },
    prevented: (route) => void of(route).prevented().current++,
    retryAge: (route, age) =>
      of(route)
        .retryAges()
        .observe(age / 1000),
    leaseExpired: (route) => metrics.count('idempotency_lease_expired_total', { route }),
    leaseUse: (route, ratio) => of(route).leaseUses().observe(ratio),
    regenerated: (route) => metrics.count('idempotency_regenerated_keys_total', { route }),
    callerChanged(route, id) {
      metrics.count('idempotency_caller_changed_total', { route })
      if (changed.has(route)) return
      changed.add(route)
      log.warn(
        { route, record: shortId(id) },
        'what identifies the caller changes between retries, which then execute again: a rotated token, a renewed session cookie or a new signature is another caller; set scope.caller to what stays the same',
      )
    },
    trouble: (message, detail) => log.error(detail, message),
  }
}

/** Counts unprotected requests. */
export function passObserver(metrics: Metrics): (route: string, took: Millis) => void {
  const of = eachMade((route: string) => new RouteSeries(metrics, route))
  return (route, took) => {
    const { requests, durations } = of(route).answers('passed')
    requests.current++
    durations?.observe(took / 1000)
  }
}

/** The series in which a route's requests are counted. Each is looked up once, on first use: looking one up exports it. */
class RouteSeries {
  readonly answers
  readonly claims
  readonly completions
  readonly prevented
  readonly retryAges
  readonly leaseUses

  constructor(metrics: Metrics, route: string) {
    this.answers = eachMade((outcome: RequestOutcome) => {
      const labels = { route, outcome }
      const isServed = REQUEST_OUTCOMES[outcome].group === 'served'
      const hasOverhead = outcome === 'executed' || outcome === 'replayed'
      return {
        requests: metrics.value('idempotency_requests_total', labels),
        // The duration of a refusal says little.
        durations: isServed ? metrics.histogram('idempotency_request_duration_seconds', labels) : null,
        overheads: hasOverhead ? metrics.histogram('idempotency_overhead_seconds', labels) : null,
      }
    })
    this.claims = eachMade((result: ClaimResult) =>
      metrics.value('idempotency_claims_total', { route, result }),
    )
    this.completions = eachMade((result: CompletionResult) =>
      metrics.value('idempotency_completions_total', { route, result }),
    )
    this.prevented = eachMade(() => metrics.value('idempotency_duplicates_prevented_total', { route }))
    this.retryAges = eachMade(() => metrics.histogram('idempotency_retry_age_seconds', { route }))
    this.leaseUses = eachMade(() => metrics.histogram('idempotency_lease_use_ratio', { route }))
  }
}

/** Memoizes `make` by name. */
function eachMade<Name extends string | void, Value>(make: (name: Name) => Value): (name: Name) => Value {
  const made = new Map<Name, Value>()
  return (name) => {
    let value = made.get(name)
    if (value === undefined) {
      value = make(name)
      made.set(name, value)
    }
    return value
  }
}

/** Turns events of unresolved records into metrics, entries in histories, and a log line if something changes or needs an operator. */
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
        'an unresolved record is about to be dropped; whether it was executed will then be unknown for good',
      )
    },
    trouble: (message, detail) => log.error(detail, message),
    tried: (level, message, detail) => log[level](detail, message),
  }
}

/** Turns a verdict of shadow mode into a metric, a log line and an entry in the record's history. */
export function shadowObserver(
  metrics: Metrics,
  log: Logger,
  history: History,
): (summary: ShadowSummary, verdict: ShadowVerdict) => void {
  return (summary, verdict) => {
    const { route, id, startedAt, retryAge, regenerated } = summary
    metrics.count('idempotency_shadow_total', { route, verdict })
    if (id !== null) history.add(id, 'shadowed', verdict, { verdict })
    const ages = retryAge === null ? '' : `,"retryAgeMs":${Math.round(retryAge)}`
    const figures = `,"ms":${rounded(performance.now() - startedAt)}${ages}${regenerated ? ',"newKey":true' : ''}`
    writeLine(log, 'info', members(summary, `,"verdict":"${verdict}"`, figures), 'shadow')
  }
}

/** The members of a log line, in the order in which people read them. States and outcomes need no escaping. */
function members(summary: RequestSummary, decision: string, figures: string): string {
  const { method, route, id, label, before, after, cause, traceId } = summary
  const record = id === null ? 'null' : `"${shortId(id)}"`
  const named = label === undefined ? '' : `,"label":${JSON.stringify(label)}`
  const why = cause === null ? '' : `,"cause":${JSON.stringify(cause)}`
  const trace = traceId === null ? '' : `,"traceId":${JSON.stringify(traceId)}`
  const request = `,"method":${JSON.stringify(method)},"route":${JSON.stringify(route)}`
  const states = `,"before":${before && `"${before}"`},"after":${after && `"${after}"`}`
  return `${request},"record":${record}${named}${decision}${states}${figures}${why}${trace}`
}

function rounded(milliseconds: number): number {
  return Math.round(milliseconds * 100) / 100
}

/** How often a store's settings are checked: an operator may fix or break them. */
const CHECK_EVERY: Millis = 30_000
const CHECK_RETRY: Millis = 250

const BREAKER: Readonly<Record<BreakerState, number>> = { closed: 0, half_open: 1, open: 2 }

/** Turns the store's operations, connection, breaker and settings into metrics and log lines. */
export class StoreHealth {
  readonly #labels: { readonly store: string }
  readonly #metrics: Metrics
  readonly #log: Logger
  #asked: Store | null = null
  /** The metric's value: set once per change, as a protected request uses the store twice. */
  #isUp = false
  #fitness: StoreFitness = 'not known yet'
  #isInGrace = false
  #checks = 0
  /** The store has granted a test claim. */
  #isProven = false
  #grace: Millis = 0
  #timer: NodeJS.Timeout | undefined
  /** The findings logged last; `down`: the store could not be asked. */
  #logged = ''
  #breakerOpen = false
  /** As last reported by claims. */
  #isReplicating = true
  readonly #times: { [operation in StoreOperation]?: Distribution } = {}

  /** `store`: its name. */
  constructor(store: string, metrics: Metrics, log: Logger) {
    this.#labels = { store }
    this.#metrics = metrics
    this.#log = log
    metrics.set('idempotency_breaker_state', { store }, 0)
    metrics.count('idempotency_store_errors_total', { store }, 0)
    metrics.set('idempotency_store_in_grace', { store }, 0)
    metrics.count('idempotency_store_graces_total', { store }, 0)
  }

  readonly onEvent = (kind: 'connected' | 'disconnected' | 'error', detail: string): void => {
    this.#log[kind === 'connected' ? 'info' : 'warn']({ ...this.#labels, detail }, `store ${kind}`)
    // The name may point to another server now, or the same one with other settings.
    if (kind === 'connected') this.checkAgain()
  }

  readonly onBreaker = (state: BreakerState): void => {
    const labels = this.#labels
    this.#metrics.set('idempotency_breaker_state', labels, BREAKER[state])
    // The breaker closes because the store answered.
    if (state === 'closed') this.#setUp(true)
    // Each failed probe opens it again; logged once.
    if (state === 'open' && !this.#breakerOpen)
      this.#log.error(labels, 'the store does not answer: breaker open')
    if (state === 'closed') this.#log.warn(labels, 'the store answers again: breaker closed')
    if (state !== 'half_open') this.#breakerOpen = state === 'open'
  }

  readonly onHeld = (left: Millis): void => {
    const isInGrace = left > 0
    if (isInGrace && !this.#isInGrace) {
      this.#metrics.count('idempotency_store_graces_total', this.#labels)
      this.#log.warn(
        { ...this.#labels, left },
        'the store is new or has changed its identity: recent claims may be lost, and nothing new is claimed until their owners have written them again (store.grace)',
      )
    }
    this.#isInGrace = isInGrace
    this.#metrics.set('idempotency_store_in_grace', this.#labels, isInGrace ? 1 : 0)
  }

  readonly onPruned = (records: number): void =>
    this.#metrics.count('idempotency_pruned_total', this.#labels, records)

  /** Claims will wait (`store.wait`): creates the series. */
  startWaits(): void {
    for (const satisfied of [true, false]) this.#countWait(satisfied, 0)
  }

  readonly onWaited = (satisfied: boolean): void => {
    this.#countWait(satisfied, 1)
    // Each request whose claim was not replicated in time logs that itself.
    if (satisfied === this.#isReplicating) return
    this.#isReplicating = satisfied
    if (satisfied) this.#log.warn(this.#labels, 'claims reach the replicas again (store.wait)')
    else
      this.#log.error(
        this.#labels,
        'claims do not reach the replicas (store.wait): they are withdrawn and answered 503',
      )
  }

  readonly onOperation = (operation: StoreOperation, time: Millis, error: unknown): void => {
    // Histories are off the request path and may fail.
    if (operation === 'note') return
    const times = (this.#times[operation] ??= this.#metrics.histogram('idempotency_store_operation_seconds', {
      ...this.#labels,
      operation,
    }))
    times.observe(time / 1000)
    if (error === null || error instanceof Declined || error instanceof Unreplicated) return this.#setUp(true)
    this.#metrics.count('idempotency_store_errors_total', this.#labels)
    if (error instanceof StoreUnavailable) this.#setUp(false)
  }

  /**
   * Tests the store, reads its guarantees, warns about missing ones, and grades it (contract §9), now and at intervals.
   */
  async watch(store: Store, grace: Millis): Promise<void> {
    this.#grace = grace
    this.#asked = store
    await this.#check(store)
  }

  fitness(): StoreFitness {
    return this.#fitness
  }

  /** The store has come back: earlier guarantees no longer count. */
  checkAgain(): void {
    this.#fitness = 'not known yet'
    if (this.#asked !== null) void this.#check(this.#asked)
  }

  stop(): void {
    clearTimeout(this.#timer)
  }

  #countWait(satisfied: boolean, by: 0 | 1): void {
    const result = satisfied ? 'satisfied' : 'unsatisfied'
    this.#metrics.count('idempotency_store_waits_total', { ...this.#labels, result }, by)
  }

  #setUp(isUp: boolean): void {
    if (isUp && this.#isUp) return
    this.#isUp = isUp
    this.#metrics.set('idempotency_store_up', this.#labels, isUp ? 1 : 0)
  }

  async #check(asked: Store): Promise<void> {
    const nth = ++this.#checks
    let next = CHECK_EVERY
    try {
      const traits = await asked.traits()
      const proof = this.#isProven ? PROVEN : await disproof(asked).catch(unproven)
      // The check began before the store came back: another server may have answered.
      if (nth !== this.#checks) return
      // A store that accepts no claims now grants none, either: it is tested again next time.
      this.#isProven = proof === PROVEN
      const { grade, reasons: risks } = gradingOf(traits, this.#grace, proof)
      const reasons = [...traits.refusals, ...risks]
      this.#fitness = grade !== 'unfit' && traits.evicts === false ? 'fit' : 'unfit'
      this.#metrics.set('idempotency_store_grade', this.#labels, GRADES.indexOf(grade))
      const summary = [grade, ...reasons].join()
      if (summary !== this.#logged) {
        const line = grade === 'strict' ? 'info' : 'warn'
        this.#log[line]({ ...this.#labels, grade }, `the store is graded ${grade}`)
        for (const reason of reasons) this.#log.warn(this.#labels, reason)
      }
      this.#logged = summary
    } catch (error) {
      if (nth !== this.#checks) return
      if (this.#logged !== 'down')
        this.#log.error(
          { ...this.#labels, error: (error as Error).message },
          'the settings of the store cannot be read',
        )
      this.#logged = 'down'
      next = CHECK_RETRY
    }
    clearTimeout(this.#timer)
    this.#timer = setTimeout(() => void this.#check(asked), next).unref()
  }
}
