import type { Millis, RecordId } from '../core/record.ts'
import { Watchers } from './side-ports.ts'

/** Shared by the watchers of one id. */
export interface Subscription {
  readonly id: RecordId
  /** Resolves once the server has acknowledged or refused it, or takes too long. */
  readonly settled: Promise<void>
  readonly settle: () => void
  /** A write may have been missed. */
  missed: boolean
}

interface Server {
  /** Subscribes to the record at the server, which is answered by `acknowledged` or `miss`. */
  readonly begin: (subscription: Subscription) => void
  readonly end: (id: RecordId) => void
}

/** One subscription at a server for each watched record. */
export class Subscriptions {
  readonly #timeoutMs: Millis
  readonly #server: Server
  readonly #watchers = new Watchers()
  readonly #byId = new Map<RecordId, Subscription>()

  constructor(timeoutMs: Millis, server: Server) {
    this.#timeoutMs = timeoutMs
    this.#server = server
  }

  get all(): readonly Subscription[] {
    return [...this.#byId.values()]
  }

  get(id: RecordId): Subscription | undefined {
    return this.#byId.get(id)
  }

  /** Never rejects, and takes no longer than the store's timeout: if the server is down, the watcher is notified once it is back. */
  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    const stop = this.#watchers.add(id, changed)
    await (this.#byId.get(id) ?? this.#begin(id)).settled
    return () => {
      stop()
      if (!this.#watchers.has(id) && this.#byId.delete(id)) this.#server.end(id)
    }
  }

  tell(id: RecordId): void {
    this.#watchers.tell(id)
  }

  acknowledged(subscription: Subscription): void {
    if (subscription.missed) this.#watchers.tell(subscription.id)
    subscription.missed = false
    subscription.settle()
  }

  miss(subscription: Subscription): void {
    subscription.missed = true
    subscription.settle()
  }

  missAll(): void {
    for (const subscription of this.#byId.values()) this.miss(subscription)
  }

  #begin(id: RecordId): Subscription {
    const { promise, resolve } = Promise.withResolvers<void>()
    const timer = setTimeout(() => this.miss(subscription), this.#timeoutMs)
    const subscription: Subscription = {
      id,
      settled: promise,
      missed: false,
      settle: () => {
        clearTimeout(timer)
        resolve()
      },
    }
    this.#byId.set(id, subscription)
    this.#server.begin(subscription)
    return subscription
  }
}
