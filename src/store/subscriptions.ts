import type { Millis, RecordId } from '../core/record.ts'
import { within } from '../runtime/scheduling.ts'
import { Watchers } from './side-ports.ts'

/** Shared by the watchers of one id. */
export interface Subscription {
  readonly id: RecordId
  /** Resolves once the server has acknowledged or refused it. */
  readonly settled: Promise<void>
  readonly settle: () => void
  /** A write may have been missed. */
  missed: boolean
}

/** One subscription at a server for each watched record. */
export abstract class Subscriptions {
  readonly #timeoutMs: Millis
  readonly #watchers = new Watchers()
  readonly #byId = new Map<RecordId, Subscription>()

  constructor(timeoutMs: Millis) {
    this.#timeoutMs = timeoutMs
  }

  /** Subscribes to the record at the server, and later calls {@link acknowledged} or {@link miss}. */
  protected abstract begin(subscription: Subscription): void
  protected abstract end(id: RecordId): void

  get all(): readonly Subscription[] {
    return [...this.#byId.values()]
  }

  /** Never rejects, and takes no longer than the store's timeout: if the server is down, the watcher is notified once it is back. */
  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    const stop = this.#watchers.add(id, changed)
    const subscription = this.#byId.get(id) ?? this.#begin(id)
    if ((await within(this.#timeoutMs, subscription.settled)) === null) this.miss(subscription)
    return () => {
      stop()
      if (!this.#watchers.has(id) && this.#byId.delete(id)) this.end(id)
    }
  }

  changed(id: RecordId): void {
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
    const { promise: settled, resolve: settle } = Promise.withResolvers<void>()
    const subscription = { id, settled, settle, missed: false }
    this.#byId.set(id, subscription)
    this.begin(subscription)
    return subscription
  }
}
