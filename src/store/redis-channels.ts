import type { RecordId } from '../core/record.ts'
import { within } from '../runtime/scheduling.ts'
import {
  type ConnectionSettings,
  type OnEvent,
  RedisConnection,
  type RedisTarget,
} from './redis-connection.ts'
import { connectionError, Refused } from './redis-link.ts'
import { type Subscription, Subscriptions } from './subscriptions.ts'

export interface ChannelOptions {
  readonly settings: ConnectionSettings
  readonly onEvent: OnEvent
  readonly channelOf: (id: RecordId) => string
  /** The server that publishes writes to the record, as far as known. */
  readonly targetOf: (id: RecordId) => RedisTarget | null
  /** Whether another server publishes them now. If so, {@link Channels.moved} will be called. */
  readonly isMoved: (error: Refused, id: RecordId) => boolean
}

/**
 * Watches records by pub/sub, over one extra connection per server, opened for the first watcher and then kept. Channels are sharded
 * (Redis 7): in a cluster a message goes only to the slot of its record. Whatever is unclear ends the connection: the next one subscribes
 * to everything again, and every watcher is told.
 */
export class Channels {
  readonly #options: ChannelOptions
  readonly #subscriptions: Subscriptions
  readonly #byChannel = new Map<string, RecordId>()
  readonly #targets = new Map<RecordId, RedisTarget | null>()
  readonly #connections = new Map<RedisTarget, RedisConnection>()
  readonly #suspects = new Set<RedisConnection>()
  #refused = false
  #closed = false

  constructor(options: ChannelOptions) {
    this.#options = options
    this.#subscriptions = new Subscriptions(options.settings.timeoutMs, {
      begin: (subscription) => this.#begin(subscription),
      end: (id) => this.#end(id),
    })
  }

  /** See {@link Subscriptions.watch}. */
  watch(id: RecordId, changed: () => void): Promise<() => void> {
    return this.#subscriptions.watch(id, changed)
  }

  /** The server may be replaced, without an end of these connections. */
  suspect(): void {
    for (const connection of this.#connections.values())
      if (connection.isReady) this.#suspects.add(connection)
  }

  /** It may have been: those that are left of the time before subscribe again. */
  resubscribe(): void {
    for (const connection of this.#suspects) connection.reconnect()
    this.#suspects.clear()
  }

  /** Some records may have moved to other servers. */
  moved(): void {
    for (const subscription of this.#subscriptions.all) {
      const { id, missed } = subscription
      if (!missed && this.#targets.get(id) === this.#options.targetOf(id)) continue
      this.#subscriptions.miss(subscription)
      this.#begin(subscription)
    }
    const used = new Set(this.#targets.values())
    for (const [target, connection] of this.#connections)
      if (!used.has(target)) {
        this.#connections.delete(target)
        void connection.close()
      }
  }

  async close(): Promise<void> {
    this.#closed = true
    this.#subscriptions.missAll()
    await Promise.all([...this.#connections.values()].map((connection) => connection.close()))
  }

  #begin(subscription: Subscription): void {
    const { id } = subscription
    const target = this.#closed ? null : this.#options.targetOf(id)
    this.#byChannel.set(this.#options.channelOf(id), id)
    this.#targets.set(id, target)
    if (target === null) return this.#subscriptions.miss(subscription)
    const connection = this.#connections.get(target) ?? this.#connect(target)
    if (connection.isReady) void this.#subscribe(connection, subscription)
    else if (!connection.isTrying) this.#subscriptions.miss(subscription)
  }

  #end(id: RecordId): void {
    const channel = this.#options.channelOf(id)
    const connection = this.#connections.get(this.#targets.get(id) as RedisTarget)
    this.#byChannel.delete(channel)
    this.#targets.delete(id)
    if (!connection?.isReady) return
    const counted = this.#counted(connection.redis.sunsubscribe(channel))
    counted.catch((error: Error) => {
      if (!(connectionError(error) instanceof Refused)) connection.reconnect()
    })
  }

  /** Rejects a reply that is none, which ioredis takes all the same, and one that does not come in time. */
  async #counted(reply: Promise<unknown>): Promise<void> {
    const count = await within(this.#options.settings.timeoutMs, reply)
    if (typeof count !== 'number') throw new Error('replies do not match their commands')
  }

  async #subscribe(connection: RedisConnection, subscription: Subscription): Promise<void> {
    const { id } = subscription
    try {
      // One channel per command: a cluster requires all channels of a command to be in one slot.
      await this.#counted(connection.redis.ssubscribe(this.#options.channelOf(id)))
      this.#refused = false
      this.#subscriptions.acknowledged(subscription)
    } catch (error) {
      this.#subscriptions.miss(subscription)
      const refused = connectionError(error as Error)
      if (!(refused instanceof Refused)) return connection.reconnect()
      if (this.#options.isMoved(refused, id) || this.#refused) return
      this.#refused = true
      this.#options.onEvent(
        'error',
        `subscribing is refused, so waiting requests poll the store: ${refused.message}`,
      )
    }
  }

  #connect(target: RedisTarget): RedisConnection {
    const { timeoutMs, client = {} } = this.#options.settings
    const ofTarget = () => this.#subscriptions.all.filter(({ id }) => this.#targets.get(id) === target)
    // The command connection reports the same events.
    const connection = new RedisConnection(
      target,
      { timeoutMs, client },
      {
        onReady: () => {
          for (const subscription of ofTarget()) void this.#subscribe(connection, subscription)
        },
        onLost: () => {
          this.#suspects.delete(connection)
          for (const subscription of ofTarget()) this.#subscriptions.miss(subscription)
        },
      },
    )
    connection.redis.on('smessage', (channel: string) => {
      const id = this.#byChannel.get(channel)
      if (id !== undefined) this.#subscriptions.tell(id)
    })
    // A slot has left the server, which ends its subscriptions; ioredis does not say which.
    connection.redis.on('moved', () => connection.reconnect())
    this.#connections.set(target, connection)
    void connection.open()
    return connection
  }
}
