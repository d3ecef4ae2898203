import type { RecordId } from '../../core/record.ts'
import { type Subscription, Subscriptions } from '../subscriptions.ts'
import { connectionError, RedisConnection, Refused } from './connection.ts'
import type { RedisKeys, RedisOptions } from './keys.ts'
import { number, type RespReply } from './resp.ts'
import type { Servers } from './servers.ts'

/**
 * Watches records by pub/sub, over one extra connection per server, opened for the first watcher and then kept. Channels are sharded (Redis
 * 7): in a cluster a message goes only to the slot of its record. Any doubt ends the connection: the next one subscribes to everything
 * again, and every watcher is notified.
 */
export class Channels extends Subscriptions {
  readonly #options: RedisOptions
  readonly #keys: RedisKeys
  readonly #servers: Servers
  /** By record and by server: the server of its shard, and the connection for its subscriptions. */
  readonly #servedBy = new Map<RecordId, RedisConnection | undefined>()
  readonly #connections = new Map<RedisConnection, RedisConnection>()
  #refused = false
  #closed = false

  constructor(options: RedisOptions, keys: RedisKeys, servers: Servers) {
    super(options.timeoutMs)
    this.#options = options
    this.#keys = keys
    this.#servers = servers
  }

  /** Reconnected; the server may have been replaced: subscribes again for all existing watchers. */
  renew(server: RedisConnection): void {
    const connection = this.#connections.get(server)
    if (connection?.isReady) connection.reconnect()
  }

  /** Some records may have moved to other servers. */
  moved(): void {
    for (const subscription of this.all) {
      const { id, missed } = subscription
      if (!missed && this.#servedBy.get(id) === this.#serverOf(id)) continue
      this.miss(subscription)
      this.begin(subscription)
    }
    const used = new Set(this.#servedBy.values())
    for (const [server, connection] of this.#connections)
      if (!used.has(server)) {
        this.#connections.delete(server)
        void connection.close()
      }
  }

  async close(): Promise<void> {
    this.#closed = true
    this.missAll()
    await Promise.all([...this.#connections.values()].map((connection) => connection.close()))
  }

  #serverOf(id: RecordId): RedisConnection | undefined {
    return this.#servers.at(this.#keys.shardOf(id))
  }

  protected override begin(subscription: Subscription): void {
    const { id } = subscription
    const server = this.#closed ? undefined : this.#serverOf(id)
    this.#servedBy.set(id, server)
    if (server === undefined) return this.miss(subscription)
    const connection = this.#connections.get(server) ?? this.#connect(server)
    if (connection.isReady) void this.#subscribe(connection, subscription)
    else if (!connection.isTrying) this.miss(subscription)
  }

  protected override end(id: RecordId): void {
    const connection = this.#connections.get(this.#servedBy.get(id) as RedisConnection)
    this.#servedBy.delete(id)
    if (!connection?.isReady) return
    const ended = connection.redis.sunsubscribe(this.#keys.channel(id)) as Promise<RespReply>
    ended.then(number).catch((error: Error) => {
      if (!(connectionError(error) instanceof Refused)) connection.reconnect()
    })
  }

  async #subscribe(connection: RedisConnection, subscription: Subscription): Promise<void> {
    const { id } = subscription
    try {
      // One channel per command: a cluster requires all channels of a command to be in one slot.
      number((await connection.redis.ssubscribe(this.#keys.channel(id))) as RespReply)
      this.#refused = false
      this.acknowledged(subscription)
    } catch (error) {
      this.miss(subscription)
      const refused = connectionError(error as Error)
      if (!(refused instanceof Refused)) return connection.reconnect()
      if (this.#servers.isMoved(refused, this.#keys.shardOf(id)) || this.#refused) return
      this.#refused = true
      const { message } = refused
      this.#options.onEvent('error', `subscribing is refused, so waiting requests poll the store: ${message}`)
    }
  }

  #connect(server: RedisConnection): RedisConnection {
    const each = (then: (subscription: Subscription) => void) => () => {
      for (const one of this.all) if (this.#servedBy.get(one.id) === server) then(one)
    }
    // The command connection reports the same events.
    const connection: RedisConnection = new RedisConnection(server.target, this.#options, {
      onReady: each((subscription) => void this.#subscribe(connection, subscription)),
      onLost: each((subscription) => this.miss(subscription)),
    })
    connection.redis.on('smessage', (channel: string) =>
      this.changed(channel.slice(channel.lastIndexOf(':') + 1) as RecordId),
    )
    // A slot has left the server, which ends its subscriptions; ioredis does not say which.
    connection.redis.on('moved', () => connection.reconnect())
    this.#connections.set(server, connection)
    void connection.open()
    return connection
  }
}
