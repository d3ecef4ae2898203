import { setTimeout as wait } from 'node:timers/promises'
import { until } from '../store/fixtures.ts'
import { type Losing, type Losses, unheard } from './losses.ts'
import { type RedisOptions, RedisServer } from './redis.ts'

export const MASTER = 'payments'

export interface SentinelOptions extends Pick<RedisOptions, 'tls' | 'mutual'> {
  /** Further arguments of the servers, and lines of the Sentinels' configuration. */
  readonly args?: readonly string[]
  readonly lines?: readonly string[]
}

/** A master, two replicas and three Sentinels that know each other. They replace nothing by themselves before {@link impatient}. */
export class SentinelGroup implements Losing {
  readonly servers: readonly RedisServer[]
  readonly sentinels: readonly RedisServer[]
  readonly url: string

  /** The Sentinels replace a killed master once they are {@link impatient}. */
  readonly losses: Losses = {
    promotion: () => this.#replace(() => this.failover().catch(() => {})),
    'kill -9': () => this.#replace((master) => master.kill()),
  }

  private constructor(servers: readonly RedisServer[], sentinels: readonly RedisServer[]) {
    this.servers = servers
    this.sentinels = sentinels
    const scheme = sentinels[0]?.url.startsWith('rediss:') ? 'rediss' : 'redis'
    this.url = `${scheme}+sentinel://${sentinels.map(({ port }) => `127.0.0.1:${port}`).join(',')}/${MASTER}`
  }

  static async start({ args = [], lines = [], ...tls }: SentinelOptions = {}): Promise<SentinelGroup> {
    const all = ['--repl-diskless-sync-delay', '0', ...args]
    const master = await RedisServer.start({ args: all, ...tls })
    const of = ['--replicaof', '127.0.0.1', String(master.port)]
    const replicas = await Promise.all([0, 1].map(() => RedisServer.start({ args: [...all, ...of], ...tls })))
    const sentinel = [
      `sentinel monitor ${MASTER} 127.0.0.1 ${master.port} 2`,
      `sentinel down-after-milliseconds ${MASTER} 600000`,
      `sentinel failover-timeout ${MASTER} 5000`,
      ...lines,
    ]
    const sentinels = await Promise.all([0, 1, 2].map(() => RedisServer.start({ sentinel, ...tls })))
    const group = new SentinelGroup([master, ...replicas], sentinels)
    await group.#known()
    await group.settled()
    return group
  }

  /** The server that the Sentinels name, or `undefined` if they do not agree. */
  async master(): Promise<RedisServer | undefined> {
    const named = await Promise.all(this.sentinels.map((one) => this.#ask(one, 'get-master-addr-by-name')))
    const ports = new Set(named.map((address) => Number((address as string[])[1])))
    return ports.size === 1 ? this.servers.find(({ port }) => ports.has(port)) : undefined
  }

  /** From now on a master that is silent for that many milliseconds is replaced. */
  async impatient(downAfter = 500): Promise<void> {
    for (const one of this.sentinels)
      await one.command('SENTINEL', 'SET', MASTER, 'down-after-milliseconds', downAfter)
  }

  /** The master that everybody names and follows, once no Sentinel is in a failover. */
  async settled(): Promise<RedisServer> {
    for (;;) {
      const master = await this.master().catch(() => undefined)
      const replicas = this.servers.filter((one) => one !== master)
      if (master !== undefined) {
        const following = replicas.map((one) => one.isReplicaOf(master))
        const content = this.sentinels.map((one) => this.#isContent(one))
        if ((await Promise.all([...following, ...content])).every(Boolean)) return master
      }
      await wait(50)
    }
  }

  /** In the end the old master is one of the replicas. */
  async #replace(end: (master: RedisServer) => Promise<void>): Promise<void> {
    const old = await this.settled()
    const replicas = this.servers.filter((one) => one !== old)
    for (const one of replicas) await one.deafen()
    await unheard()
    await end(old)
    for (const one of replicas) await one.hear()
    let master: RedisServer | undefined
    await until(async () => {
      master = await this.master().catch(() => undefined)
      // A Sentinel gives up a failover, or refuses one, while its machine stalls.
      if (master === old && (await this.#isContent(this.sentinels[0] as RedisServer))) await end(old)
      return master !== undefined && master !== old
    })
    await old.start()
    // The Sentinels would do this, ten seconds later.
    await old.command('REPLICAOF', '127.0.0.1', (master as unknown as RedisServer).port)
    await this.settled()
  }

  /** Starts a failover, as an operator does. */
  async failover(): Promise<void> {
    await this.sentinels[0]?.command('SENTINEL', 'FAILOVER', MASTER)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const server of [...this.sentinels, ...this.servers]) await server[Symbol.asyncDispose]()
  }

  async #ask(sentinel: RedisServer, what: string): Promise<unknown> {
    return sentinel.command('SENTINEL', what, MASTER)
  }

  /** Whether the Sentinel sees nothing wrong with the master, and is in no failover. */
  async #isContent(sentinel: RedisServer): Promise<boolean> {
    return flagsIn(await this.#ask(sentinel, 'master')) === 'master'
  }

  async #known(): Promise<void> {
    for (const one of this.sentinels) {
      await until(async () => ((await this.#ask(one, 'replicas')) as unknown[]).length === 2)
      await until(async () => ((await this.#ask(one, 'sentinels')) as unknown[]).length === 2)
    }
  }
}

function flagsIn(reply: unknown): string {
  const words = reply as readonly string[]
  return words[words.indexOf('flags') + 1] as string
}
