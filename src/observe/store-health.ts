import type { Millis } from '../core/record.ts'
import { around, OPERATIONS, type StoreOperation } from '../store/around.ts'
import type { BreakerState } from '../store/breaker.ts'
import { type Store, StoreUnavailable } from '../store/register.ts'
import type { Logger } from './log.ts'
import type { Metrics } from './metrics.ts'

/** How often a store's settings are checked again: an operator may fix them, or break them. */
const CHECK_EVERY: Millis = 30_000
const CHECK_RETRY: Millis = 250

const BREAKER: Readonly<Record<BreakerState, number>> = { closed: 0, half_open: 1, open: 2 }

/** How the store is: its operations, connection, breaker and settings → metrics and log. */
export class StoreHealth {
  readonly #labels: { readonly store: string }
  readonly #metrics: Metrics
  readonly #log: Logger
  #asked: Pick<Store, 'traits'> | null = null
  /** As the metric says: set once per change, as a protected request uses the store twice. */
  #isUp = false
  #mayEvict = true
  #checks = 0
  #timer: NodeJS.Timeout | undefined
  /** Findings that were logged last; `down`: that it could not be asked. */
  #logged = ''
  #breakerOpen = false

  /** `store`: its name. */
  constructor(store: string, metrics: Metrics, log: Logger) {
    this.#labels = { store }
    this.#metrics = metrics
    this.#log = log
    metrics.set('idempotency_breaker_state', { store }, 0)
    metrics.count('idempotency_store_errors_total', { store }, 0)
  }

  readonly onEvent = (kind: 'connected' | 'disconnected' | 'error', detail: string): void => {
    this.#log[kind === 'connected' ? 'info' : 'warn']({ ...this.#labels, detail }, `store ${kind}`)
    // Another server may answer to the name now, or the same one with other settings.
    if (kind === 'connected') this.checkAgain()
  }

  readonly onBreaker = (state: BreakerState): void => {
    const labels = this.#labels
    this.#metrics.set('idempotency_breaker_state', labels, BREAKER[state])
    // It closes because the store answered.
    if (state === 'closed') this.#setUp(true)
    // Each probe that fails opens it anew; logged once.
    if (state === 'open' && !this.#breakerOpen)
      this.#log.error(labels, 'the store does not answer: breaker open')
    if (state === 'closed') this.#log.warn(labels, 'the store answers again: breaker closed')
    if (state !== 'half_open') this.#breakerOpen = state === 'open'
  }

  readonly onPruned = (records: number): void =>
    this.#metrics.count('idempotency_pruned_total', this.#labels, records)

  /** Counts and times the operations of a store. */
  measured(store: Store): Store {
    // Made once: a protected request runs two operations.
    const labels = Object.fromEntries(
      OPERATIONS.map((operation) => [operation, { ...this.#labels, operation }]),
    ) as Record<StoreOperation, { readonly store: string; readonly operation: StoreOperation }>
    return around(store, (operation, run) => {
      // Off the path of requests, which do without it if it fails.
      if (operation === 'note') return run()
      const startedAt = performance.now()
      const reply = run()
      const observe = (): void => {
        const seconds = (performance.now() - startedAt) / 1000
        this.#metrics.observe('idempotency_store_operation_seconds', labels[operation], seconds)
      }
      void reply.then(
        () => {
          this.#setUp(true)
          observe()
        },
        (error: unknown) => {
          this.#metrics.count('idempotency_store_errors_total', this.#labels)
          if (error instanceof StoreUnavailable) this.#setUp(false)
          observe()
        },
      )
      return reply
    })
  }

  /** Asks the store what it guarantees, warns of what it does not, and grades it (contract §9), from now on. */
  async watch(store: Pick<Store, 'traits'>): Promise<void> {
    this.#asked = store
    await this.#check(store)
  }

  /** True also where the store does not say, or has not been asked yet: `strict` is not promised on a guess. */
  mayEvict(): boolean {
    return this.#mayEvict
  }

  /** The store has come back: what it guaranteed before counts no more. */
  checkAgain(): void {
    this.#mayEvict = true
    if (this.#asked !== null) void this.#check(this.#asked)
  }

  stop(): void {
    clearTimeout(this.#timer)
  }

  #setUp(isUp: boolean): void {
    if (isUp && this.#isUp) return
    this.#isUp = isUp
    this.#metrics.set('idempotency_store_up', this.#labels, isUp ? 1 : 0)
  }

  async #check(asked: Pick<Store, 'traits'>): Promise<void> {
    const nth = ++this.#checks
    let next = CHECK_EVERY
    try {
      const { durable, evicts, findings } = await asked.traits()
      // Asked before the store came back: it may have been another server that answered.
      if (nth !== this.#checks) return
      this.#mayEvict = evicts !== false
      const grade = evicts === true ? 0 : durable === false ? 1 : durable === true && evicts === false ? 3 : 2
      this.#metrics.set('idempotency_store_grade', this.#labels, grade)
      if (findings.join() !== this.#logged)
        for (const finding of findings) this.#log.warn(this.#labels, finding)
      this.#logged = findings.join()
    } catch (error) {
      if (nth !== this.#checks) return
      if (this.#logged !== 'down')
        this.#log.error(
          { ...this.#labels, error: (error as Error).message },
          'the store cannot be asked for its settings',
        )
      this.#logged = 'down'
      next = CHECK_RETRY
    }
    clearTimeout(this.#timer)
    this.#timer = setTimeout(() => void this.#check(asked), next).unref()
  }
}
