import { setTimeout as wait } from 'node:timers/promises'
import { RedisKeys } from '../../src/store/redis-keys.ts'
import { newId, until } from '../store/fixtures.ts'
import { PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { MASTER, SentinelGroup } from '../support/redis-sentinel.ts'
import type { Random } from './random.ts'

/** What it returns ends it. */
type StoreFault = () => Promise<() => Promise<void>>

/** A server that can be tormented. */
export interface TormentedStore extends AsyncDisposable {
  /** Null: no relay stands before it. */
  readonly port: number | null
  /** As a replica reaches it at this port. */
  url(port: number | null): string
  /** By name. */
  readonly faults: Readonly<Record<string, StoreFault>>
  /** Those in which the store forgets: what a replica alone still knows must not die with it, so none of them dies meanwhile. */
  readonly losses?: Readonly<Record<string, StoreFault>>
  /** `store.grace`. */
  readonly grace?: string
  /** Its clock is the replicas' own. */
  readonly isEmbedded?: true
}

/** `folder`: for what is kept in files. */
type Open = (folder: string, random: Random) => Promise<TormentedStore>

/** In milliseconds: longer than a replica on a busy machine needs to hear of it and to write again what it knows. */
const GRACE = 6000
/** After so long a silent master is replaced. */
const DOWN_AFTER = 3000
/** What the servers lose: what was written while their replicas did not listen. */
const UNHEARD = 300

const KEYS = new RedisKeys('torture')
const SERVER = ['--maxmemory-policy', 'noeviction', '--save', '']

function faultsOf(
  server: {
    kill(): Promise<void>
    start(): Promise<void>
    pause(): void
    resume(): void
  },
  disconnect: () => Promise<unknown>,
): TormentedStore['faults'] {
  return {
    'store killed': async () => {
      await server.kill()
      return () => server.start()
    },
    'store paused': async () => {
      server.pause()
      return async () => server.resume()
    },
    'connections to the store killed': async () => {
      await disconnect()
      return async () => {}
    },
  }
}

async function isReplicaOf(server: RedisServer, master: RedisServer): Promise<boolean> {
  const info = String(await server.command('INFO', 'replication').catch(() => ''))
  return info.includes(`master_port:${master.port}`) && info.includes('master_link_status:up')
}

/** A master whose replicas hear nothing more of it, and then nobody does. */
async function dieUnheard(master: RedisServer, replicas: readonly RedisServer[]): Promise<void> {
  await master.command('WAIT', replicas.length, 2000)
  for (const replica of replicas) replica.pause()
  await wait(UNHEARD)
  await master.kill()
  for (const replica of replicas) replica.resume()
}

export const TORMENTED: Readonly<Record<string, Open>> = {
  sqlite: async (folder) => ({
    port: null,
    url: () => `sqlite:${folder}/store.db`,
    faults: {},
    isEmbedded: true,
    async [Symbol.asyncDispose]() {},
  }),

  redis: async () => {
    const server = await RedisServer.start({ args: SERVER })
    const config = (name: string, value: string) => server.command('CONFIG', 'SET', name, value)
    return {
      port: server.port,
      url: (port) => `redis://127.0.0.1:${port}`,
      faults: {
        ...faultsOf(server, () => server.command('CLIENT', 'KILL', 'TYPE', 'normal')),
        'store full': async () => {
          await config('maxmemory', '1mb')
          return async () => void (await config('maxmemory', '0'))
        },
      },
      [Symbol.asyncDispose]: () => server[Symbol.asyncDispose](),
    }
  },

  postgres: async () => {
    const server = await PostgresServer.start()
    return {
      port: server.port,
      url: (port) => `postgres://owner:secret@127.0.0.1:${port}/records`,
      faults: faultsOf(server, () =>
        server.sql(
          'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL',
        ),
      ),
      [Symbol.asyncDispose]: () => server[Symbol.asyncDispose](),
    }
  },

  sentinel: async () => {
    const group = await SentinelGroup.start({ args: SERVER })
    // A busy machine is silent for a while, too.
    for (const one of group.sentinels)
      await one.command('SENTINEL', 'SET', MASTER, 'down-after-milliseconds', DOWN_AFTER)
    const { servers } = group
    const settled = async (): Promise<RedisServer> => {
      for (;;) {
        const master = await group.master().catch(() => undefined)
        const others = servers.filter((one) => one !== master)
        if (master !== undefined) {
          const heard = await Promise.all(others.map((one) => isReplicaOf(one, master)))
          if (heard.every(Boolean)) return master
        }
        await wait(50)
      }
    }
    return {
      port: null,
      url: () => group.url,
      grace: `${GRACE}ms`,
      faults: {
        'connections to the store killed': async () => {
          await (await settled()).command('CLIENT', 'KILL', 'TYPE', 'normal')
          return async () => {}
        },
        'replicas of the store paused': async () => {
          const master = await settled()
          const others = servers.filter((one) => one !== master)
          for (const one of others) one.pause()
          return async () => {
            for (const one of others) one.resume()
          }
        },
      },
      losses: {
        'planned failover': async () => {
          const master = await settled()
          await group.failover().catch(() => {})
          return async () => {
            await until(async () => (await settled()) !== master)
            await wait(GRACE)
          }
        },
        'master killed with its last writes': async () => {
          const master = await settled()
          await dieUnheard(
            master,
            servers.filter((one) => one !== master),
          )
          return async () => {
            await until(async () => {
              const next = await group.master().catch(() => undefined)
              return next !== undefined && next !== master
            })
            await wait(GRACE)
            await master.start()
            await settled()
          }
        },
      },
      [Symbol.asyncDispose]: () => group[Symbol.asyncDispose](),
    }
  },

  cluster: async (_folder, random) => {
    const cluster = await RedisCluster.start({
      masters: 3,
      replicas: 1,
      nodeTimeout: DOWN_AFTER,
      args: SERVER,
    })
    const servers = cluster.members.map(({ server }) => server)
    const whole = async (): Promise<void> => {
      for (const server of servers) await until(() => cluster.isWhole(server).catch(() => false))
    }
    const pair = () => {
      const n = random.between(0, cluster.masters.length - 1)
      const [master, replica] = [servers[n], servers[n + cluster.masters.length]]
      return { master: master as RedisServer, replica: replica as RedisServer }
    }
    return {
      port: null,
      url: () => cluster.url,
      grace: `${GRACE}ms`,
      faults: {
        'connections to the store killed': async () => {
          await pair().master.command('CLIENT', 'KILL', 'TYPE', 'normal')
          return async () => {}
        },
        'master paused': async () => {
          // Shorter than it takes to be replaced.
          const { master } = pair()
          master.pause()
          await wait(random.between(50, 800))
          master.resume()
          return async () => {}
        },
        'slot moved by hand': async () => {
          await whole()
          const slot = await cluster.slotOf(KEYS.record(newId()))
          const from = await cluster.ownerOf(slot)
          const to = random.pick(cluster.masters.filter((one) => one !== from))
          const steps = async (target: typeof from): Promise<void> => {
            for (const step of await cluster.move(slot, target)) {
              await step()
              await wait(random.between(0, 150))
            }
          }
          await steps(to)
          return () => steps(from)
        },
      },
      losses: {
        'master killed with its last writes': async () => {
          await whole()
          const { master, replica } = pair()
          await dieUnheard(master, [replica])
          const role = async (server: RedisServer) => String(await server.command('ROLE').catch(() => ''))
          return async () => {
            await until(async () => (await role(replica)).startsWith('master'))
            await wait(GRACE)
            await master.start()
            await until(() => isReplicaOf(master, replica))
            // As it was: the next one finds the masters where it expects them.
            await until(async () => {
              await master.command('CLUSTER', 'FAILOVER').catch(() => {})
              await wait(500)
              return (await role(master)).startsWith('master')
            })
            await until(() => isReplicaOf(replica, master))
            await whole()
            await wait(GRACE)
          }
        },
      },
      [Symbol.asyncDispose]: () => cluster[Symbol.asyncDispose](),
    }
  },
}
