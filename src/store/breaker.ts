import type { Millis } from '../core/record.ts'
import { around, type StoreOperation } from './around.ts'
import { type Store, StoreFull, StoreUnavailable } from './register.ts'

export type BreakerState = 'closed' | 'half_open' | 'open'

export interface BreakerOptions {
  /** Consecutive failures that open it. */
  readonly threshold: number
  /** Delay before the first probe; doubled after each failed one, up to `probeAtMost`. */
  readonly probeAfter: Millis
  readonly probeAtMost: Millis
  readonly onState: (state: BreakerState) => void
}

/** Five: one lost connection with few commands in flight does not open it; a hanging store costs five timeouts. */
export const BREAKER_DEFAULTS = { threshold: 5, probeAfter: 250, probeAtMost: 5000 } as const

/** Refused while it is open, but not counted: what people look at must not take the store away from traffic. */
const NOT_COUNTED: readonly StoreOperation[] = ['list', 'note', 'notes']

/** Fails fast while the store is down, and probes it in the background until it is back. */
export function withBreaker(store: Store, options: BreakerOptions): Store {
  const breaker = new Breaker(store, options)
  return {
    ...around(store, (operation, run) => breaker.run(operation, run)),
    close: () => breaker.close(),
  }
}

class Breaker {
  readonly #store: Store
  readonly #options: BreakerOptions
  #state: BreakerState = 'closed'
  #failures = 0
  /** How often it has opened: an operation that began before says nothing about now. */
  #openings = 0
  #timer: NodeJS.Timeout | undefined
  #closed = false

  constructor(store: Store, options: BreakerOptions) {
    this.#store = store
    this.#options = options
  }

  run<T>(operation: StoreOperation, run: () => Promise<T>): Promise<T> {
    if (this.#state !== 'closed')
      return Promise.reject(
        new StoreUnavailable(`the store ${this.#store.name} is down (breaker open)`, false),
      )
    const opening = this.#openings
    const reply = run()
    if (NOT_COUNTED.includes(operation)) return reply
    void reply.then(
      () => {
        if (opening === this.#openings) this.#failures = 0
      },
      (error: unknown) => {
        if (opening === this.#openings) this.#count(error)
      },
    )
    return reply
  }

  async close(): Promise<void> {
    this.#closed = true
    clearTimeout(this.#timer)
    await this.#store.close()
  }

  #count(error: unknown): void {
    // Any other error is an answer.
    if (!(error instanceof StoreUnavailable) || error instanceof StoreFull) this.#failures = 0
    else if (++this.#failures >= this.#options.threshold) this.#open(this.#options.probeAfter)
  }

  #open(wait: Millis): void {
    if (this.#state === 'closed') this.#openings++
    this.#become('open')
    if (this.#closed) return
    this.#timer = setTimeout(() => void this.#probe(wait), wait).unref()
  }

  async #probe(waited: Millis): Promise<void> {
    this.#become('half_open')
    try {
      await this.#store.ping()
    } catch {
      return this.#open(Math.min(waited * 2, this.#options.probeAtMost))
    }
    this.#failures = 0
    this.#become('closed')
  }

  #become(state: BreakerState): void {
    this.#state = state
    this.#options.onState(state)
  }
}
