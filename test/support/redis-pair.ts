import { until } from './e2e.ts'
import { type Losing, type Losses, unheard } from './losses.ts'
import { RedisServer } from './redis.ts'
import { type Relay, relay } from './relay.ts'

/** A master and its replica, with relays between them and their clients. Nothing is promoted by itself. */
export class RedisPair implements Losing {
  /** Clients reach the master here, and after {@link promote} the other one. */
  readonly url: string
  /** Clients that use this one do not learn of a promotion before {@link tellLate}. */
  readonly lateUrl: string
  readonly #clients: Relay
  readonly #late: Relay
  readonly #replication: Relay
  #master: RedisServer
  #replica: RedisServer

  readonly losses: Losses = {
    promotion: () => this.#replace(async () => {}),
    'kill -9': () => this.#replace((master) => master.kill()),
    'older copy': async () => {
      const restore = await this.#master.copy()
      await unheard()
      await restore()
      await this.#follow()
    },
    FLUSHALL: async () => void (await this.#master.command('FLUSHALL')),
  }

  private constructor(
    [master, replica]: readonly [RedisServer, RedisServer],
    [clients, late, replication]: readonly [Relay, Relay, Relay],
  ) {
    this.#master = master
    this.#replica = replica
    this.#clients = clients
    this.#late = late
    this.#replication = replication
    this.url = `redis://127.0.0.1:${clients.port}`
    this.lateUrl = `redis://127.0.0.1:${late.port}`
  }

  static async start(): Promise<RedisPair> {
    const args = [
      '--repl-diskless-sync-delay',
      '0',
      '--repl-timeout',
      '3600',
      '--repl-ping-replica-period',
      '1',
    ]
    const master = await RedisServer.start({ args })
    const replica = await RedisServer.start({ args })
    const relays = await Promise.all([relay(master.port), relay(master.port), relay(master.port)])
    const pair = new RedisPair([master, replica], relays)
    await pair.#follow()
    return pair
  }

  get master(): RedisServer {
    return this.#master
  }

  /** Like {@link cutReplication}, once the replica has everything so far. */
  async lag(): Promise<void> {
    await this.synced()
    this.cutReplication()
  }

  /** From now on what the master acknowledges does not reach the replica. */
  cutReplication(): void {
    this.#replication.accept = false
    this.#replication.cut()
  }

  /** Resolves when everything that clients have written has reached the replica. */
  async synced(): Promise<void> {
    const offset = async (server: RedisServer, field: string) =>
      new RegExp(`^${field}:(\\d+)`, 'm').exec(String(await server.command('INFO', 'replication')))?.[1]
    await until(
      async () =>
        (await offset(this.#replica, 'slave_repl_offset')) ===
        (await offset(this.#master, 'master_repl_offset')),
    )
  }

  /** Makes the replica the master that clients reach, and breaks off their connections. */
  async promote(): Promise<void> {
    await this.#replica.command('REPLICAOF', 'NO', 'ONE')
    this.#clients.target = this.#replica.port
    this.#clients.cut()
    const old = this.#master
    this.#master = this.#replica
    this.#replica = old
  }

  async #replace(end: (master: RedisServer) => Promise<void>): Promise<void> {
    const old = this.#master
    this.cutReplication()
    await unheard()
    await end(old)
    await this.promote()
    await old.start()
    await this.heal()
  }

  tellLate(): void {
    this.#late.target = this.#master.port
    this.#late.cut()
  }

  /** The old master follows the new one: all that it alone had is gone for good. */
  async heal(): Promise<void> {
    this.#replication.target = this.#master.port
    this.#replication.accept = true
    await this.#follow()
  }

  async #follow(): Promise<void> {
    await this.#replica.command('REPLICAOF', '127.0.0.1', this.#replication.port)
    await until(async () =>
      String(await this.#replica.command('INFO', 'replication')).includes('master_link_status:up'),
    )
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const one of [this.#clients, this.#late, this.#replication, this.#master, this.#replica])
      await one[Symbol.asyncDispose]()
  }
}
