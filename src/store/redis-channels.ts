import type { Millis, RecordId } from '../core/record.ts'
import { type OnEvent, RedisConnection, type RedisTarget } from './redis-connection.ts'
import { Refused, repliesMismatch, wordsOf } from './redis-link.ts'
import type { RespReply } from './resp.ts'
import { type Subscription, Subscriptions } from './subscriptions.ts'

export interface ChannelOptions {
  readonly timeoutMs: Millis
  readonly onEvent: OnEvent
  readonly channelOf: (id: RecordId) => string
  /** The server that publishes writes to the record, as far as known. */
  readonly targetOf: (id: RecordId) => RedisTarget | null
  /** Whether another server publishes them now. If so, {@link Channels.moved} will be called. */
  readonly isMoved: (error: Refused, id: RecordId) => boolean
}

/**
 * Watches records by pub/sub, over one extra connection per server, opened for the first watcher and then kept. Channels are sharded
 * (Redis 7): in a cluster a message goes only to the slot of its record.
 */
export class Channels {
  readonly #options: ChannelOptions
  readonly #subscriptions: Subscriptions
  readonly #byChannel = new Map<string, RecordId>()
  readonly #targets = new Map<RecordId, RedisTarget | null>()
  readonly #connections = new Map<RedisTarget, RedisConnection>()
  #refused = false
  #closed = false

  constructor(options: ChannelOptions) {
    this.#options = options
    this.#subscriptions = new Subscriptions(options.timeoutMs, {
      begin: (subscription) => this.#begin(subscription),
      end: (id) => this.#end(id),
    })
  }

  /** See {@link Subscriptions.watch}. */
  watch(id: RecordId, changed: () => void): Promise<() => void> {
    return this.#subscriptions.watch(id, changed)
  }

  /** The server may have been replaced: subscribe again. */
  resubscribe(): void {
    for (const connection of this.#connections.values()) if (connection.isReady) connection.reconnect()
  }

  /** Some records may have moved to other servers. */
  moved(): void {
    for (const subscription of this.#subscriptions.all) {
      const { id, missed } = subscription
      if (missed || this.#targets.get(id) !== this.#options.targetOf(id)) this.#again(subscription)
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

  #again(subscription: Subscription): void {
    this.#subscriptions.miss(subscription)
    this.#begin(subscription)
  }

  #end(id: RecordId): void {
    const channel = this.#options.channelOf(id)
    const connection = this.#connections.get(this.#targets.get(id) as RedisTarget)
    this.#byChannel.delete(channel)
    this.#targets.delete(id)
    connection?.ask('sunsubscribe', [channel], ended).catch(() => {})
  }

  async #subscribe(connection: RedisConnection, subscription: Subscription): Promise<void> {
    const { id } = subscription
    try {
      // One channel per command: a cluster requires all channels of a command to be in one slot.
      await connection.ask('ssubscribe', [this.#options.channelOf(id)], begun)
      this.#refused = false
      this.#subscriptions.acknowledged(subscription)
    } catch (error) {
      this.#subscriptions.miss(subscription)
      // No answer: a new connection subscribes everything again.
      if (!(error instanceof Refused)) return connection.reconnect()
      if (this.#options.isMoved(error, id) || this.#refused) return
      this.#refused = true
      this.#options.onEvent(
        'error',
        `subscribing is refused, so waiting requests poll the store: ${error.message}`,
      )
    }
  }

  #connect(target: RedisTarget): RedisConnection {
    const ofTarget = () => this.#subscriptions.all.filter(({ id }) => this.#targets.get(id) === target)
    const connection = new RedisConnection(target, this.#options.timeoutMs, {
      onReady: () => {
        for (const subscription of ofTarget()) void this.#subscribe(connection, subscription)
      },
      onLost: () => {
        for (const subscription of ofTarget()) this.#subscriptions.miss(subscription)
      },
      // The command connection reports the same events.
      onEvent: () => {},
      onMessage: (message, awaited) => this.#take(message, awaited),
    })
    this.#connections.set(target, connection)
    void connection.open()
    return connection
  }

  #take(message: RespReply, awaited: unknown): boolean {
    const [kind = '', channel = ''] = wordsOf(message)
    if (kind !== 'smessage' && (kind !== 'sunsubscribe' || awaited === ended)) return false
    const id = this.#byChannel.get(channel)
    const subscription = id === undefined ? undefined : this.#subscriptions.get(id)
    if (subscription === undefined) return true
    if (kind === 'smessage') this.#subscriptions.tell(subscription.id)
    // The slot has moved to another server.
    else this.#again(subscription)
    return true
  }
}

/* Redis confirms a subscription by `[kind, channel, number of subscriptions]`. */

function begun(reply: RespReply): void {
  if (wordsOf(reply)[0] !== 'ssubscribe') throw repliesMismatch()
}

function ended(reply: RespReply): void {
  if (wordsOf(reply)[0] !== 'sunsubscribe') throw repliesMismatch()
}
