import type { Redis } from 'ioredis'
import type { Millis, RecordId } from '../core/record.ts'
import { disconnect } from './redis-connection.ts'
import { TIMED_OUT } from './redis-replies.ts'
import { Watchers } from './watchers.ts'

export interface ChannelOptions {
  /** A client that is not connected yet, reconnects by itself and takes up no subscription of its own accord. */
  readonly open: () => Redis
  readonly channelOf: (id: RecordId) => string
  readonly timeoutMs: Millis
  /** Redis refuses, with this reason: watchers of this process are told of nothing. Said once. */
  readonly onRefused: (reason: string) => void
}

/** The subscription of one id, which its watchers share. */
interface Subscription {
  readonly id: RecordId
  /** Resolves where Redis acknowledged it, and where it will not, or not soon. */
  readonly settled: Promise<void>
  readonly settle: () => void
  /** Something may have been written that nobody was told of. */
  missed: boolean
}

/**
 * Watching by Redis pub/sub, over a connection that is opened for the first watcher and stays.
 *
 * Sharded channels (Redis 7): as cheap on a single server as others, and in a cluster a message goes to the slot of its
 * record instead of to every node.
 */
export class Channels {
  readonly #options: ChannelOptions
  readonly #watchers = new Watchers()
  readonly #subscriptions = new Map<RecordId, Subscription>()
  readonly #byChannel = new Map<string, RecordId>()
  #client: Redis | null = null
  #refused = false
  #closed = false

  constructor(options: ChannelOptions) {
    this.#options = options
  }

  /** Throws nothing and takes no longer than the store's timeout: without Redis, the watcher is told when it is back. */
  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    const stop = this.#watchers.add(id, changed)
    await (this.#subscriptions.get(id) ?? this.#begin(id)).settled
    return () => {
      stop()
      if (!this.#watchers.has(id)) this.#end(id)
    }
  }

  /** The server is another one, perhaps: whoever may lead to the old one asks anew. */
  renew(): void {
    if (this.#client?.status === 'ready') this.#client.disconnect(true)
  }

  async close(): Promise<void> {
    this.#closed = true
    if (this.#client !== null) await disconnect(this.#client)
  }

  #begin(id: RecordId): Subscription {
    const client = this.#closed ? null : (this.#client ??= this.#connect())
    const { promise, resolve } = Promise.withResolvers<void>()
    const subscription: Subscription = {
      id,
      settled: promise,
      missed: false,
      settle: () => {
        clearTimeout(timer)
        resolve()
      },
    }
    const timer = setTimeout(() => this.#miss(subscription), this.#options.timeoutMs)
    this.#subscriptions.set(id, subscription)
    this.#byChannel.set(this.#options.channelOf(id), id)
    if (client?.status === 'ready') void this.#subscribe(client, [subscription])
    // Else 'ready' or 'close' is about to come.
    else if (client?.status !== 'connecting' && client?.status !== 'connect') this.#miss(subscription)
    return subscription
  }

  #end(id: RecordId): void {
    const channel = this.#options.channelOf(id)
    if (!this.#subscriptions.delete(id)) return
    this.#byChannel.delete(channel)
    if (this.#client?.status === 'ready') this.#client.sunsubscribe(channel).catch(() => {})
  }

  async #subscribe(client: Redis, subscriptions: readonly Subscription[]): Promise<void> {
    try {
      await client.ssubscribe(...subscriptions.map(({ id }) => this.#options.channelOf(id)))
      this.#refused = false
      for (const subscription of subscriptions) {
        if (subscription.missed) this.#watchers.tell(subscription.id)
        subscription.missed = false
        subscription.settle()
      }
    } catch (error) {
      for (const subscription of subscriptions) this.#miss(subscription)
      const { name, message } = error as Error
      // No answer: the connection is given up for a new one, on which everything is asked for again.
      if (message === TIMED_OUT) client.stream.destroy()
      if (name !== 'ReplyError' || this.#refused) return
      this.#refused = true
      this.#options.onRefused(message)
    }
  }

  #miss(subscription: Subscription): void {
    subscription.missed = true
    subscription.settle()
  }

  #connect(): Redis {
    const client = this.#options.open()
    client.on('ready', () => {
      const all = [...this.#subscriptions.values()]
      if (all.length > 0) void this.#subscribe(client, all)
    })
    client.on('close', () => {
      for (const subscription of this.#subscriptions.values()) this.#miss(subscription)
    })
    // The other connection to the same server tells of its troubles.
    client.on('error', () => {})
    client.on('smessage', (channel: string) => {
      const id = this.#byChannel.get(channel)
      if (id !== undefined) this.#watchers.tell(id)
    })
    client.connect().catch(() => {})
    return client
  }
}
