import { randomInt } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { until } from '../store/fixtures.ts'
import { type Losing, type Losses, unheard } from './losses.ts'
import { freePort, type RedisOptions, RedisServer } from './redis.ts'

export const SLOTS = 16_384

export interface ClusterOptions extends Pick<RedisOptions, 'tls' | 'mutual'> {
  readonly masters?: number
  /** Per master. */
  readonly replicas?: number
  /** How long a master may be silent before it is replaced. */
  readonly nodeTimeout?: number
  readonly args?: readonly string[]
}

interface Member {
  readonly server: RedisServer
  readonly id: string
}

/** A cluster on loopback, its slots divided evenly and in order. */
export class RedisCluster implements Losing {
  readonly members: readonly Member[]
  /** The first of the members. */
  readonly masters: readonly Member[]
  readonly url: string

  /** For masters with one replica each, which takes over for a while. */
  readonly losses: Losses = {
    promotion: () =>
      this.#replace(async (_, replica) => void (await replica.command('CLUSTER', 'FAILOVER', 'TAKEOVER'))),
    'kill -9': () => this.#replace((master) => master.kill()),
  }

  private constructor(members: readonly Member[], masters: number) {
    this.members = members
    this.masters = members.slice(0, masters)
    const scheme = this.masters[0]?.server.url.startsWith('rediss:') ? 'rediss' : 'redis'
    this.url = `${scheme}+cluster://${this.masters.map(({ server }) => `127.0.0.1:${server.port}`).join(',')}`
  }

  static async start(options: ClusterOptions = {}): Promise<RedisCluster> {
    const { masters = 3, replicas = 0, nodeTimeout = 60_000, args = [], ...tls } = options
    const buses = new Map<RedisServer, number>()
    const servers = await Promise.all(
      Array.from({ length: masters * (1 + replicas) }, async () => {
        const bus = await freePort()
        const own = ['--cluster-enabled', 'yes', '--cluster-port', String(bus)]
        const patience = ['--cluster-node-timeout', String(nodeTimeout), '--repl-diskless-sync-delay', '0']
        const server = await RedisServer.start({ args: [...own, ...patience, ...args], ...tls })
        buses.set(server, bus)
        return server
      }),
    )
    const members: Member[] = []
    for (const server of servers)
      members.push({ server, id: String(await server.command('CLUSTER', 'MYID')) })
    const cluster = new RedisCluster(members, masters)
    for (const [n, { server }] of members.entries()) {
      await server.command('CLUSTER', 'SET-CONFIG-EPOCH', n + 1)
      const range = [n, n + 1].map((nth) => Math.round((nth * SLOTS) / masters))
      if (n < masters)
        await server.command('CLUSTER', 'ADDSLOTSRANGE', range[0] as number, (range[1] as number) - 1)
    }
    const [first] = servers
    for (const server of servers.slice(1))
      await first?.command('CLUSTER', 'MEET', '127.0.0.1', server.port, buses.get(server) as number)
    for (const { server } of members)
      await until(async () =>
        String(await server.command('CLUSTER', 'INFO')).includes(`cluster_known_nodes:${servers.length}`),
      )
    for (const [n, { server }] of members.entries())
      if (n >= masters) {
        const { id } = members[n % masters] as Member
        await until(async () => {
          try {
            return (await server.command('CLUSTER', 'REPLICATE', id)) === 'OK'
          } catch {
            return false
          }
        })
        await until(async () =>
          String(await server.command('INFO', 'replication')).includes('master_link_status:up'),
        )
      }
    await cluster.whole()
    return cluster
  }

  async whole(): Promise<void> {
    for (const { server } of this.members) await until(() => this.isWhole(server).catch(() => false))
  }

  /** Whether this server sees every slot covered and every node in its role. */
  async isWhole(server: RedisServer): Promise<boolean> {
    const info = String(await server.command('CLUSTER', 'INFO'))
    const ranges = (await server.command('CLUSTER', 'SLOTS')) as [number, number, ...unknown[]][]
    const nodes = ranges.reduce((sum, [, , ...its]) => sum + its.length, 0)
    return info.includes('cluster_state:ok') && nodes >= this.members.length
  }

  async #replace(end: (master: RedisServer, replica: RedisServer) => Promise<void>): Promise<void> {
    const nth = randomInt(this.masters.length)
    const [master, replica] = [nth, nth + this.masters.length].map((n) => this.members[n]?.server) as [
      RedisServer,
      RedisServer,
    ]
    await replica.deafen()
    await unheard()
    await end(master, replica)
    await replica.hear()
    await until(() => isMaster(replica))
    await master.start()
    await until(() => master.isReplicaOf(replica))
    // Back to the old roles, without a loss.
    await until(async () => {
      await master.command('CLUSTER', 'FAILOVER').catch(() => {})
      await wait(500)
      return isMaster(master)
    })
    await until(() => replica.isReplicaOf(master))
    await this.whole()
  }

  /** The owner of the slot, as the first master sees it. */
  async ownerOf(slot: number): Promise<Member> {
    const ranges = (await this.masters[0]?.server.command('CLUSTER', 'SLOTS')) as [
      number,
      number,
      [string, number, string],
    ][]
    const range = ranges.find(([first, last]) => first <= slot && slot <= last)
    return this.members.find(({ id }) => id === range?.[2][2]) as Member
  }

  async slotOf(key: string): Promise<number> {
    return Number(await this.masters[0]?.server.command('CLUSTER', 'KEYSLOT', key))
  }

  /** The steps of an operator who moves a slot by hand. */
  async move(slot: number, to: Member): Promise<readonly (() => Promise<void>)[]> {
    const from = await this.ownerOf(slot)
    const set = async (at: Member, ...how: string[]) =>
      void (await at.server.command('CLUSTER', 'SETSLOT', slot, ...how))
    const next = async (): Promise<string | undefined> =>
      ((await from.server.command('CLUSTER', 'GETKEYSINSLOT', slot, 1)) as string[])[0]
    const carry = async (key: string | undefined) =>
      void (key && (await from.server.command('MIGRATE', '127.0.0.1', to.server.port, key, 0, 5000)))
    return [
      () => set(to, 'IMPORTING', from.id),
      () => set(from, 'MIGRATING', to.id),
      async () => carry(await next()),
      async () => {
        for (let key = await next(); key !== undefined; key = await next()) await carry(key)
      },
      () => set(to, 'NODE', to.id),
      async () => {
        await set(from, 'NODE', to.id)
        // The others would hear of it some time later.
        for (const master of this.masters) await set(master, 'NODE', to.id)
      },
    ]
  }

  async command(...words: [string, ...(string | number)[]]): Promise<void> {
    for (const { server } of this.masters) await server.command(...words)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { server } of this.members) await server[Symbol.asyncDispose]()
  }
}

async function isMaster(server: RedisServer): Promise<boolean> {
  return String(await server.command('ROLE')).startsWith('master')
}
