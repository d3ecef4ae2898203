import type { Millis } from '../core/record.ts'
import { after, type MaybePromise } from '../runtime/scheduling.ts'
import { isClaim, PREFIX, stateCode } from './record/codec.ts'
import {
  Declined,
  type NewEpoch,
  OutOfPhase,
  PartlyUnavailable,
  type Store,
  StoreFull,
  StoreUnavailable,
  Unreplicated,
} from './register.ts'

/** Operations by their names in metrics and spans; not `watch`, which never fails. */
export type StoreOperation =
  | 'put'
  | 'swap'
  | 'get'
  | 'renew'
  | 'due'
  | 'remove'
  | 'list'
  | 'note'
  | 'notes'
  | 'throttle'
  | 'ping'
  | 'traits'

/**
 * Runs an operation, or refuses to. A hook that only observes attaches to the promise of `run` and returns that same promise: wrapping it
 * would cost the request a turn of the microtask queue.
 */
export type Hook = <Reply extends MaybePromise<unknown>>(operation: StoreOperation, run: () => Reply) => Reply

/** Wraps `store` so that `hook` runs every operation. The caller handles closing. */
export function around(store: Store, hook: Hook): Omit<Store, 'close'> {
  const { history, limits, pingOther } = store
  return {
    name: store.name,
    put: (id, bytes, spans, entry) => hook('put', () => store.put(id, bytes, spans, entry)),
    swap: (id, condition, bytes, spans, nextFence) =>
      hook('swap', () => store.swap(id, condition, bytes, spans, nextFence)),
    get: (id) => hook('get', () => store.get(id)),
    stored: (id) => hook('get', () => store.stored?.(id) ?? store.get(id)),
    renew: (items) => hook('renew', () => store.renew(items)),
    due: (limit, of) => hook('due', () => store.due(limit, of)),
    remove: (id, version) => hook('remove', () => store.remove(id, version)),
    list: (which, cursor, limit) => hook('list', () => store.list(which, cursor, limit)),
    ping: () => hook('ping', () => store.ping()),
    ...(pingOther && { pingOther: () => hook('ping', pingOther) }),
    history: {
      append: (id, notes) => hook('note', () => history.append(id, notes)),
      read: (id) => hook('notes', () => history.read(id)),
    },
    limits: {
      take: (bucket, rate, units) => hook('throttle', () => limits.take(bucket, rate, units)),
    },
    watch: (id, changed) => store.watch(id, changed),
    traits: () => hook('traits', () => store.traits()),
  }
}

export type BreakerState = 'closed' | 'half_open' | 'open'

export interface BreakerOptions {
  /** Consecutive failures that open it. */
  readonly threshold: number
  /** Delay before the first probe; doubled after each failed one, up to `probeAtMost`. */
  readonly probeAfter: Millis
  readonly probeAtMost: Millis
  readonly onState: (state: BreakerState) => void
  readonly onOperation?: OnOperation | undefined
}

/** Called when an operation has ended, refused ones included. `error`: null if it succeeded. */
export type OnOperation = (operation: StoreOperation, time: Millis, error: unknown) => void

/** For log and metrics. */
export interface StoreHooks {
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  readonly onBreaker: (state: BreakerState) => void
  readonly onOperation?: OnOperation
  /** The store was replaced, or lost its data: recent writes may have to be repeated. */
  readonly onNewEpoch?: ((epoch: NewEpoch) => void) | undefined
  /** The instant before which the store can no longer lose a write; reported continuously. */
  readonly onSafe?: ((before: Millis) => void) | undefined
  /** How much longer the store grants no claims; reported continuously. */
  readonly onHeld?: ((left: Millis) => void) | undefined
  /** Called when expired records were removed, first with 0. Only for stores that do this themselves. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** A claim has waited for replicas (`store.wait`); `satisfied`: they had it in time. */
  readonly onWaited?: ((satisfied: boolean) => void) | undefined
}

/**
 * Five: one lost connection with few commands in flight does not open it; a hanging store costs five timeouts. Half a second: what an
 * outage has deferred is written within a second of its end.
 */
export const BREAKER_DEFAULTS = { threshold: 5, probeAfter: 250, probeAtMost: 500 } as const

/** Refusals by a store that is up. */
const ANSWERS = [StoreFull, Declined, PartlyUnavailable, Unreplicated] as const

/** Refused while the breaker is open, but not counted: operators' reads must not open it for traffic. */
const NOT_COUNTED: readonly StoreOperation[] = ['list', 'note', 'notes']

/** Fails fast while the store is down, and probes it in the background until it is back. */
export function withBreaker(store: Store, options: BreakerOptions): Store & { readonly heard: () => void } {
  const breaker = new Breaker(store, options)
  return {
    ...around(store, (operation, run) => breaker.run(operation, run)),
    heard: () => breaker.heard(),
    close: () => breaker.close(),
  }
}

class Breaker {
  readonly #store: Store
  readonly #options: BreakerOptions
  #state: BreakerState = 'closed'
  #failures = 0
  /** How often it has opened: operations that began before the latest opening do not count. */
  #openings = 0
  #timer: NodeJS.Timeout | undefined
  #closed = false

  constructor(store: Store, options: BreakerOptions) {
    this.#store = store
    this.#options = options
  }

  run<Reply extends MaybePromise<unknown>>(operation: StoreOperation, run: () => Reply): Reply {
    if (this.#state !== 'closed') {
      const error = new StoreUnavailable(`the store ${this.#store.name} is down (breaker open)`, false)
      this.#options.onOperation?.(operation, 0, error)
      return Promise.reject(error) as unknown as Reply
    }
    const opening = this.#openings
    const startedAt = performance.now()
    const reply = run()
    if (!(reply instanceof Promise)) this.#ended(operation, opening, startedAt, null)
    else
      void reply.then(
        () => this.#ended(operation, opening, startedAt, null),
        (error: unknown) => this.#ended(operation, opening, startedAt, error),
      )
    return reply
  }

  /** The store has just shown that it answers, outside of these operations. */
  heard(): void {
    clearTimeout(this.#timer)
    if (this.#state !== 'closed') this.#close()
  }

  #close(): void {
    this.#failures = 0
    this.#become('closed')
  }

  async close(): Promise<void> {
    this.#closed = true
    clearTimeout(this.#timer)
    await this.#store.close()
  }

  #ended(operation: StoreOperation, opening: number, startedAt: Millis, error: unknown): void {
    this.#options.onOperation?.(operation, performance.now() - startedAt, error)
    if (opening !== this.#openings || NOT_COUNTED.includes(operation)) return
    // Any other error is also an answer.
    if (!(error instanceof StoreUnavailable) || ANSWERS.some((answer) => error instanceof answer))
      this.#failures = 0
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
      if (this.#state === 'half_open') this.#open(Math.min(waited * 2, this.#options.probeAtMost))
      return
    }
    this.heard()
  }

  #become(state: BreakerState): void {
    this.#state = state
    this.#options.onState(state)
  }
}

/**
 * Decides whether this replica may claim: a migration may have moved past its phase (docs/adr/0101), or others may identify records
 * differently (docs/adr/0117).
 */
export interface PhaseGuard {
  /** By `clock`: it may claim until then. */
  readonly sureUntil: Millis
  readonly clock: () => Millis
  /** Checks again. @throws {StoreUnavailable} if it still may not. */
  ensure(): Promise<void>
}

/** Wraps `store`: nothing is claimed and no lease renewed unless all `guards` are sure that it may. */
export function inPhase(store: Store, ...guards: readonly PhaseGuard[]): Store {
  const isSure = (): boolean => guards.every(({ clock, sureUntil }) => clock() < sureUntil)
  const ensure = async (): Promise<void> => {
    for (const guard of guards) if (guard.clock() >= guard.sureUntil) await guard.ensure()
  }
  const guarded = <Reply>(
    write: () => MaybePromise<Reply>,
    isMade: (reply: Reply) => boolean,
  ): MaybePromise<Reply> => {
    const written = (): MaybePromise<Reply> =>
      after(write(), (reply) => {
        if (isSure() || !isMade(reply)) return reply
        // The write may have arrived late, after this process was paused.
        return ensure().then(
          () => reply,
          (error: Error) => Promise.reject(new OutOfPhase(error.message, true)),
        )
      })
    return isSure() ? written() : ensure().then(written)
  }
  const put = (...args: Parameters<Store['put']>) => guarded(() => store.put(...args), isAny)
  return {
    ...store,
    put: (id, bytes, spans, entry) => {
      // A claim that is written again is already being executed.
      if (!isClaim(bytes) || entry === 'again') return store.put(id, bytes, spans, entry)
      if (isSure()) return put(id, bytes, spans, entry)
      // Completed records are answered as usual.
      return store.get(id).then(({ now, bytes: there }) => {
        if (there !== null && there[PREFIX.state] === stateCode('completed'))
          return { done: false, now, bytes: there }
        return put(id, bytes, spans, entry)
      })
    },
    swap: (id, condition, bytes, spans, nextFence) => {
      const write = () => store.swap(id, condition, bytes, spans, nextFence)
      return nextFence && isClaim(bytes) ? guarded(write, ({ done }) => done) : write()
    },
    renew: async (items) => guarded(() => store.renew(items), isAny),
  }
}

function isAny(): boolean {
  return true
}
