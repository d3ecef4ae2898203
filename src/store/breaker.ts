import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import {
  type Condition,
  type Listing,
  type Note,
  type Register,
  type Renewal,
  StoreFull,
  StoreUnavailable,
} from './register.ts'

export type BreakerState = 'closed' | 'half_open' | 'open'

export interface BreakerOptions {
  /** Failures in a row that open it. */
  readonly threshold: number
  /** How long it waits before the first probe; doubled after each that fails, up to `probeAtMost`. */
  readonly probeAfter: Millis
  readonly probeAtMost: Millis
  readonly onState: (state: BreakerState) => void
}

/** Five: one lost connection with few commands in flight does not open it, a hanging store costs five timeouts. */
export const BREAKER_DEFAULTS = { threshold: 5, probeAfter: 250, probeAtMost: 5000 } as const

/** Answers at once while the store does not, and asks it in the background until it does. */
export function withBreaker(register: Register, options: BreakerOptions): Register {
  return new Breaker(register, options)
}

class Breaker implements Register {
  readonly #register: Register
  readonly #options: BreakerOptions
  #state: BreakerState = 'closed'
  #failures = 0
  /** How often it has opened: an operation from before says nothing about now. */
  #openings = 0
  #timer: NodeJS.Timeout | undefined
  #closed = false

  constructor(register: Register, options: BreakerOptions) {
    this.#register = register
    this.#options = options
  }

  get name(): string {
    return this.#register.name
  }

  put(id: RecordId, bytes: Buffer, spans: Spans) {
    return this.#guard(() => this.#register.put(id, bytes, spans))
  }
  swap(id: RecordId, condition: Condition, bytes: Buffer, spans: Spans, nextFence: boolean) {
    return this.#guard(() => this.#register.swap(id, condition, bytes, spans, nextFence))
  }
  get(id: RecordId) {
    return this.#guard(() => this.#register.get(id))
  }
  renew(items: readonly Renewal[]) {
    return this.#guard(() => this.#register.renew(items))
  }
  due(limit: number) {
    return this.#guard(() => this.#register.due(limit))
  }
  remove(id: RecordId, version: number) {
    return this.#guard(() => this.#register.remove(id, version))
  }
  /** These are refused while it is open, and not counted: what people look at must not take the store from the traffic. */
  list(which: Listing, cursor: string | null, limit: number) {
    return this.#pass(() => this.#register.list(which, cursor, limit))
  }
  note(id: RecordId, notes: readonly Note[]) {
    return this.#pass(() => this.#register.note(id, notes))
  }
  notes(id: RecordId) {
    return this.#pass(() => this.#register.notes(id))
  }
  /** Not counted, nor refused: it throws nothing, and says nothing about the store. */
  watch(id: RecordId, changed: () => void) {
    return this.#register.watch(id, changed)
  }
  throttle(bucket: string, rate: Rate, units: 1 | -1) {
    return this.#guard(() => this.#register.throttle(bucket, rate, units))
  }
  ping() {
    return this.#guard(() => this.#register.ping())
  }
  traits() {
    return this.#guard(() => this.#register.traits())
  }

  async close(): Promise<void> {
    this.#closed = true
    clearTimeout(this.#timer)
    await this.#register.close()
  }

  async #pass<T>(operation: () => Promise<T>): Promise<T> {
    this.#refuseWhileOpen()
    return operation()
  }

  #refuseWhileOpen(): void {
    if (this.#state !== 'closed')
      throw new StoreUnavailable(`the store ${this.name} is down (breaker open)`, false)
  }

  #guard<T>(operation: () => Promise<T>): Promise<T> {
    if (this.#state !== 'closed')
      return Promise.reject(new StoreUnavailable(`the store ${this.name} is down (breaker open)`, false))
    const opening = this.#openings
    const reply = operation()
    // Beside the operation, not between it and its caller: each promise in between costs a turn of the microtasks.
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
      await this.#register.ping()
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
