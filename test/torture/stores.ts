import { setTimeout as wait } from 'node:timers/promises'
import { RedisKeys } from '../../src/store/redis/keys.ts'
import { newId } from '../store/fixtures.ts'
import type { Losses } from '../support/losses.ts'
import { PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import type { Random } from './random.ts'

/** Begins the fault, and returns what ends it. */
type StoreFault = () => Promise<() => Promise<void>>

/** A server that can be tormented. */
export interface TormentedStore extends AsyncDisposable {
  /** Null: no relay stands in front of it. */
  readonly port: number | null
  /** The URL for a replica that reaches it at this port. */
  url(port: number | null): string
  /** By name. */
  readonly faults: Readonly<Record<string, StoreFault>>
  /** Those in which the store forgets: what only a replica still knows must not die with it, so no replica dies meanwhile. */
  readonly losses?: Readonly<Record<string, StoreFault>>
  /** `store.grace`. */
  readonly grace?: string
  /** Its clock is the replicas' own. */
  readonly isEmbedded?: true
}

/** `folder`: for what is kept in files. */
type Open = (folder: string, random: Random) => Promise<TormentedStore>

/** In milliseconds: longer than a replica on a busy machine needs to notice a failover and to write again what it knows. */
const GRACE = 6000
/** In milliseconds: how long a master may be silent before it is replaced. */
const DOWN_AFTER = 3000

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

/** Ends when everything that the replicas know is written again. */
function lasting(losses: Losses): TormentedStore['faults'] {
  const fault =
    (lose: () => Promise<void>): StoreFault =>
    async () => {
      await lose()
      return () => wait(GRACE)
    }
  return Object.fromEntries(Object.entries(losses).map(([name, lose]) => [name, fault(lose)]))
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
    // A busy machine may be silent for a while, too.
    await group.impatient(DOWN_AFTER)
    return {
      port: null,
      url: () => group.url,
      grace: `${GRACE}ms`,
      faults: {
        'connections to the store killed': async () => {
          await (await group.settled()).command('CLIENT', 'KILL', 'TYPE', 'normal')
          return async () => {}
        },
        'replicas of the store paused': async () => {
          const master = await group.settled()
          const others = group.servers.filter((one) => one !== master)
          for (const one of others) one.pause()
          return async () => {
            for (const one of others) one.resume()
          }
        },
      },
      losses: lasting(group.losses),
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
    return {
      port: null,
      url: () => cluster.url,
      grace: `${GRACE}ms`,
      faults: {
        'connections to the store killed': async () => {
          await random.pick(cluster.masters).server.command('CLIENT', 'KILL', 'TYPE', 'normal')
          return async () => {}
        },
        'master paused': async () => {
          // Shorter than it takes to be replaced.
          const { server } = random.pick(cluster.masters)
          server.pause()
          await wait(random.between(50, 800))
          server.resume()
          return async () => {}
        },
        'slot moved by hand': async () => {
          await cluster.whole()
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
      losses: lasting(cluster.losses),
      [Symbol.asyncDispose]: () => cluster[Symbol.asyncDispose](),
    }
  },
}
