import { NO_POSTGRES, PostgresServer } from '../test/support/postgres.ts'
import { RedisServer } from '../test/support/redis.ts'
import { RedisCluster } from '../test/support/redis-cluster.ts'
import { SentinelGroup } from '../test/support/redis-sentinel.ts'

/** This proxy on stores of several servers, or on an emulator: `--stores`. */
export const STORE_CANDIDATES = [
  'proxy-sentinel',
  'proxy-cluster',
  'proxy-wait',
  'proxy-dynalite',
  'proxy-tiered',
] as const
export type StoreCandidate = (typeof STORE_CANDIDATES)[number]

export interface StoreAt {
  readonly url: string
  /** Further members of `store`. */
  readonly more?: string
}

/** Like the other candidates' Redis: nothing on disk. */
const VOLATILE = ['--appendonly', 'no']

const STARTERS: Readonly<Record<StoreCandidate, (owner: AsyncDisposableStack) => Promise<StoreAt | string>>> =
  {
    'proxy-sentinel': async (owner) => ({
      url: owner.use(await SentinelGroup.start({ args: VOLATILE })).url,
    }),
    'proxy-cluster': async (owner) => ({ url: owner.use(await RedisCluster.start({ args: VOLATILE })).url }),
    'proxy-wait': async (owner) => {
      const args = [...VOLATILE, '--repl-diskless-sync-delay', '0']
      const { url, port } = owner.use(await RedisServer.start({ args }))
      owner.use(await RedisServer.start({ args: [...args, '--replicaof', '127.0.0.1', String(port)] }))
      // A claim whose replica is late on a busy machine would be an error, not a figure.
      return { url, more: 'wait: { replicas: 1, timeout: 2s }' }
    },
    'proxy-dynalite': async (owner) => {
      // In this process, which also makes the load: slow, but without effect on the proxy's cost.
      const { DynamoDbServer } = await import('../test/support/dynamodb.ts')
      return { url: owner.use(await DynamoDbServer.start()).url }
    },
    'proxy-tiered': async (owner) => {
      if (NO_POSTGRES) return NO_POSTGRES
      const primary = owner.use(await PostgresServer.start()).url
      const cache = owner.use(await RedisServer.start({ args: VOLATILE })).url
      return { url: 'tiered:', more: `primary: { url: "${primary}" }, cache: { url: "${cache}" }` }
    },
  }

/** Starts the servers of these candidates; `owner` ends them. A string says why one is unavailable here. */
export async function startStores(
  owner: AsyncDisposableStack,
  wanted: readonly string[],
): Promise<ReadonlyMap<StoreCandidate, StoreAt | string>> {
  const stores = new Map<StoreCandidate, StoreAt | string>()
  for (const name of STORE_CANDIDATES)
    if (wanted.includes(name)) stores.set(name, await STARTERS[name](owner))
  return stores
}
