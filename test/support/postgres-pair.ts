import { until } from './e2e.ts'
import { type Losing, type Losses, unheard } from './losses.ts'
import { PostgresServer } from './postgres.ts'
import { type Relay, relay } from './relay.ts'

/** A primary and its asynchronous standby, with relays between them and their clients. Nothing is promoted by itself. */
export class PostgresPair implements Losing {
  /** Clients reach the primary here, and after {@link promote} the other one. */
  readonly url: string
  readonly #clients: Relay
  readonly #replication: Relay
  #primary: PostgresServer
  #standby: PostgresServer

  readonly losses: Losses = {
    'kill -9': async () => {
      this.cutReplication()
      await unheard()
      await this.promote()
      await this.heal()
    },
    'older copy': async () => {
      const restore = await this.#primary.copy()
      await unheard()
      await restore()
      await this.heal()
    },
  }

  private constructor(
    [primary, standby]: readonly [PostgresServer, PostgresServer],
    [clients, replication]: readonly [Relay, Relay],
  ) {
    this.#primary = primary
    this.#standby = standby
    this.#clients = clients
    this.#replication = replication
    this.url = `postgres://owner:secret@127.0.0.1:${clients.port}/records`
  }

  static async start(): Promise<PostgresPair> {
    const primary = await PostgresServer.start()
    const [clients, replication] = await Promise.all([relay(primary.port), relay(primary.port)])
    return new PostgresPair([primary, await primary.standby(replication.port)], [clients, replication])
  }

  /** Like {@link cutReplication}, once the standby has everything so far. */
  async lag(): Promise<void> {
    await this.#caughtUp()
    this.cutReplication()
  }

  /** From now on what the primary acknowledges does not reach the standby. */
  cutReplication(): void {
    this.#replication.accept = false
    this.#replication.cut()
  }

  /** Kills the primary, with what it alone has, and promotes the standby in its place. */
  async promote(): Promise<void> {
    await this.#primary.kill()
    await this.#standby.promote()
    this.#clients.target = this.#standby.port
    this.#clients.cut()
    const old = this.#primary
    this.#primary = this.#standby
    this.#standby = old
  }

  /** The old primary follows the new one, as a copy of it. */
  async heal(): Promise<void> {
    this.#replication.target = this.#primary.port
    this.#replication.accept = true
    await this.#standby.follow(this.#replication.port)
    await this.#caughtUp()
  }

  async #caughtUp(): Promise<void> {
    const [[written = null] = []] = await this.#primary.sql('SELECT pg_current_wal_lsn()')
    await until(async () => {
      const rows = await this.#primary.sql(`SELECT FROM pg_stat_replication WHERE flush_lsn >= '${written}'`)
      return rows.length === 1
    })
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const one of [this.#clients, this.#replication, this.#primary, this.#standby])
      await one[Symbol.asyncDispose]()
  }
}
