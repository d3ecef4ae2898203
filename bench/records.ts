import { hash } from 'node:crypto'
import { join } from 'node:path'
import type { Fingerprint, RecordDraft, RecordId } from '../src/core/record.ts'
import { encodeDraft } from '../src/store/record/codec.ts'
import { openRedisStore } from '../src/store/redis/store.ts'
import type { Store } from '../src/store/register.ts'
import { openSqliteStore } from '../src/store/sqlite/store.ts'
import { freePort } from '../test/support/redis.ts'
import { SMALL } from './bodies.ts'
import { startProxy, type World } from './candidates.ts'
import { Child } from './child.ts'
import type { LoadResult } from './load.ts'
import { median } from './machine.ts'
import { once, type Plan } from './measure.ts'
import { scenarioOf } from './scenarios.ts'

const DAY = 86_400_000
/** Concurrent puts while filling a store. */
const AT_ONCE = 2000

export interface LiveRecords {
  readonly store: 'redis' | 'sqlite'
  readonly records: number
  readonly first: LoadResult
  readonly replay: LoadResult
}

/** The same proxy on a store with few records and on one with many, in turns. */
export async function liveRecords(world: World, quick: boolean, plan: Plan): Promise<LiveRecords[]> {
  const sizes = quick ? [100, 1000] : [1000, 1_000_000]
  const found: LiveRecords[] = []
  for (const store of ['redis', 'sqlite'] as const) {
    await using stack = new AsyncDisposableStack()
    const sides: { records: number; child: Child; first: LoadResult[]; replay: LoadResult[] }[] = []
    for (const records of sizes) {
      const url = await (store === 'redis'
        ? newRedis(world, stack)
        : join(world.folder, `records-${records}.db`))
      await fill(store, url, records)
      const child = stack.use(await startProxy(world, store === 'redis' ? url : `sqlite:${url}`))
      sides.push({ records, child, first: [], replay: [] })
    }
    for (let n = 0; n <= plan.rounds; n++)
      for (const side of n % 2 === 0 ? sides : sides.toReversed())
        for (const id of ['first', 'replay'] as const) {
          const milliseconds = n === 0 ? Math.min(plan.warmUp, 3000) : plan.milliseconds
          const own = { ...plan, milliseconds }
          const result = await once(scenarioOf(id), 'proxy-redis', side.child, world.upstreamPort, own)
          if (n > 0) side[id].push(result)
        }
    for (const { records, first, replay } of sides)
      found.push({ store, records, first: medians(first), replay: medians(replay) })
  }
  return found
}

async function newRedis(world: World, stack: AsyncDisposableStack): Promise<string> {
  const port = await freePort()
  const program = process.env['REDIS_SERVER'] ?? 'redis-server'
  const args = ['--port', String(port), '--bind', '127.0.0.1', '--save', '', '--dir', world.folder]
  stack.use(await Child.spawn(port, [program, ...args], world.folder))
  return `redis://127.0.0.1:${port}`
}

/** Writes finished records like the proxy. */
async function fill(store: 'redis' | 'sqlite', url: string, records: number): Promise<void> {
  const options = { service: 'bench', timeoutMs: 60_000, onEvent: () => {} }
  const register: Store =
    store === 'redis'
      ? await openRedisStore({ url, ...options })
      : await openSqliteStore({ path: url, ...options })
  await fillWith(register, encodeDraft(FINISHED), records)
  await register.close()
}

/** Writes that many records of these bytes. */
export async function fillWith(
  register: Store,
  bytes: Buffer,
  records: number,
  spans = { dueIn: DAY, dropIn: DAY },
): Promise<void> {
  for (let n = 0; n < records; n += AT_ONCE) {
    const ids = Array.from({ length: Math.min(AT_ONCE, records - n) }, (_, i) => idOf(n + i))
    await Promise.all(ids.map(async (id) => register.put(id, Buffer.from(bytes), spans)))
  }
}

export function idOf(n: number): RecordId {
  return hash('sha256', `live record ${n}`, 'base64url') as RecordId
}

export const FINISHED: Extract<RecordDraft, { state: 'completed' }> = {
  state: 'completed',
  route: 'payments',
  method: 'POST',
  path: '/v1/payments',
  fingerprint: Buffer.alloc(32, 1) as Fingerprint,
  rawDigest: Buffer.alloc(32, 2),
  recipe: 'bench',
  key: null,
  fence: 1,
  token: Buffer.alloc(16, 3),
  attempts: 1,
  createdAt: 0,
  lastError: null,
  result: {
    kept: true,
    response: {
      status: 201,
      reason: 'Created',
      headers: ['Content-Type', 'application/json', 'Date', 'Sat, 21 Nov 2026 12:00:00 GMT'],
      body: Buffer.from(SMALL),
      trailers: [],
    },
  },
}

function medians(results: readonly LoadResult[]): LoadResult {
  const of = (figure: keyof LoadResult): number => median(results.map((result) => result[figure]))
  return {
    requests: of('requests'),
    cpuPerRequest: of('cpuPerRequest'),
    perSecond: of('perSecond'),
    p50: of('p50'),
    p99: of('p99'),
    lateP99: of('lateP99'),
  }
}
