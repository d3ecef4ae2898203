import { setTimeout as wait } from 'node:timers/promises'
import type { RecordId } from '../../src/core/record.ts'
import { openPostgresStore } from '../../src/store/postgres/store.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import type { Store } from '../../src/store/register.ts'
import { bytesOf, newId, newToken, SPANS } from '../../test/store/fixtures.ts'
import { NO_POSTGRES, PostgresServer } from '../../test/support/postgres.ts'
import { RedisServer } from '../../test/support/redis.ts'
import { RedisCluster } from '../../test/support/redis-cluster.ts'
import { cpuMicros, processTree } from '../machine.ts'
import { FINISHED, fillWith } from '../records.ts'
import { FAILOVER, RESPONSE } from './measured.ts'
import { planOf } from './plan.ts'

const SERVICE = { service: 'capacity', timeoutMs: 5000, onEvent: () => {} }
const DAY = { dueIn: 86_400_000, dropIn: 86_400_000 }
const COMPLETED = encodeDraft(FINISHED)
/**
 * How many proxies there are, and how much each has in flight. Redis: one each, since in a cluster few operations of a turn share a
 * shard, and so a batch.
 */
const REDIS = { proxies: 32, lanes: 1 }
const POSTGRES = { proxies: 4, lanes: 16 }
const OPERATIONS = 20_000
const RECORDS = 100_000
/** New keys per second during the failover, and how long a node may be silent, in milliseconds. */
const RATE = 300
const NODE_TIMEOUT = 2000
const GRACE = FAILOVER.grace

type Say = (...rows: readonly (readonly [what: string, value: string])[]) => void

/** What measured.ts says, and two points of the model beside what real servers do. */
export async function measure(say: Say): Promise<void> {
  {
    await using server = await RedisServer.start()
    say([
      'Redis',
      await cpuOf(
        REDIS,
        () => openRedisStore({ url: server.url, ...SERVICE }),
        () => [server.pid as number],
      ),
    ])
  }
  if (!NO_POSTGRES) {
    await using server = await PostgresServer.start()
    say([
      'PostgreSQL',
      await cpuOf(
        POSTGRES,
        () => openPostgresStore({ url: server.url, ...SERVICE }),
        () => server.pids,
      ),
    ])
  }
  const { found, planned } = await memoryOf(RECORDS)
  const mib = (bytes: number): string => (bytes / 2 ** 20).toFixed(1)
  say([`${RECORDS} records in Redis`, `${mib(found)} MiB; the plan says ${mib(planned)}`])
  for (const coverage of ['yes', 'no'] as const) await failoverPoint(say, coverage)
}

/** CPU of the server per first execution (claim and outcome) and per replay. */
async function cpuOf(
  { proxies, lanes }: typeof REDIS,
  open: () => Promise<Store>,
  pids: () => readonly number[],
): Promise<string> {
  const stores = await Promise.all(Array.from({ length: proxies }, open))
  await Promise.all(stores.map((store) => store.ping()))
  const all = stores.flatMap((store) => Array.from({ length: lanes }, () => store))
  const ids: RecordId[] = []
  // Those that serve: others come and go.
  const serving = pids().flatMap(processTree)
  const cost = async (one: (store: Store, n: number) => Promise<unknown>): Promise<string> => {
    let n = 0
    const before = cpuMicros(serving)
    await Promise.all(
      all.map(async (store) => {
        while (n < OPERATIONS) await one(store, n++)
      }),
    )
    return ((cpuMicros(serving) - before) / OPERATIONS).toFixed(1)
  }
  const first = await cost(async (store) => {
    const [id, token] = [newId(), newToken()]
    await store.put(id, bytesOf('in_progress', token), SPANS)
    await store.swap(id, { token, states: ['in_progress'] }, Buffer.from(COMPLETED), DAY, false)
    ids.push(id)
  })
  const replay = await cost(async (store, n) =>
    store.put(ids[n] as RecordId, bytesOf('in_progress', newToken()), SPANS),
  )
  await Promise.all(stores.map((store) => store.close()))
  return `${first} µs of CPU per first execution, ${replay} per replay`
}

/** Bytes of that many records in Redis, and what the plan says. */
export async function memoryOf(
  records: number,
): Promise<{ readonly found: number; readonly planned: number }> {
  await using server = await RedisServer.start()
  const used = async () =>
    Number(/^used_memory:(\d+)/m.exec(String(await server.command('INFO', 'memory')))?.[1])
  const before = await used()
  const store = await openRedisStore({ url: server.url, ...SERVICE })
  await fillWith(store, COMPLETED, records)
  const found = (await used()) - before
  await store.close()
  const work = { first: records, replays: 0, response: RESPONSE, ttl: 1000, bodyTtl: null } as const
  const { bytes } = planOf(
    { store: 'redis', keep: 'response', ...work },
    { size: 2 ** 36, load: 0.5, waits: false },
  )
  return { found, planned: bytes }
}

/** New keys that are refused when one of three masters is killed. */
async function failoverPoint(say: Say, coverage: 'yes' | 'no'): Promise<void> {
  const args = ['--cluster-require-full-coverage', coverage]
  await using cluster = await RedisCluster.start({ masters: 3, replicas: 1, nodeTimeout: NODE_TIMEOUT, args })
  const store = await openRedisStore({ url: cluster.url, ...SERVICE, timeoutMs: 500, grace: GRACE })
  let refused = 0
  let lastAt = 0
  const claims: Promise<void>[] = []
  const claim = async (): Promise<void> => {
    try {
      await store.put(newId(), bytesOf('in_progress', newToken()), SPANS)
    } catch {
      refused++
      lastAt = performance.now()
    }
  }
  const load = async (seconds: number): Promise<void> => {
    const began = performance.now()
    for (let n = 0; n < RATE * seconds; n++) {
      await wait(Math.max(0, began + (n / RATE) * 1000 - performance.now()))
      claims.push(claim())
    }
    await Promise.all(claims)
  }
  // The grace that follows a first start.
  await load(GRACE / 1000 + 1)
  refused = 0
  const killedAt = performance.now()
  await cluster.masters[0]?.server.kill()
  await load((NODE_TIMEOUT + GRACE) / 1000 + 8)
  await store.close()
  const model = (NODE_TIMEOUT * FAILOVER.pinged + FAILOVER.election + GRACE) / 1000
  const expected = (RATE / 3) * model + (coverage === 'yes' ? (RATE * 2 * FAILOVER.election) / 3000 : 0)
  say([
    `a master of three killed, ${coverage}`,
    `${refused} of ${RATE} new keys a second refused, within ${((lastAt - killedAt) / 1000).toFixed(1)} s; the model says ${Math.round(expected)}, ${model.toFixed(1)} s`,
  ])
}
