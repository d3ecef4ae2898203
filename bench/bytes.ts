/**
 * Bytes of a completed record in each store (docs/stores.md#sizing): a payment of 300 bytes, answered with 300.
 *
 *   node --expose-gc bench/bytes.ts [records [store]]     # 10,000 by default; starts real servers
 */
import { mkdtempSync, rmSync, statSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import type { CompletedResponse } from '../src/core/record.ts'
import { BodyRemover } from '../src/reconcile/bodies.ts'
import { memoryStore } from '../src/store/memory.ts'
import { openPostgresStore } from '../src/store/postgres/store.ts'
import { encodeDraft } from '../src/store/record/codec.ts'
import { Records } from '../src/store/records.ts'
import { openRedisStore } from '../src/store/redis/store.ts'
import type { Store } from '../src/store/register.ts'
import { openSqliteStore } from '../src/store/sqlite/store.ts'
import { NO_POSTGRES, PostgresServer } from '../test/support/postgres.ts'
import { RedisServer } from '../test/support/redis.ts'
import { FINISHED, fillWith, idOf } from './records.ts'

const RECORDS = Number(process.argv[2] ?? 10_000)
const SERVICE = { service: 'bench', timeoutMs: 60_000, onEvent: () => {} }
const DAY = 86_400_000

interface Measured {
  readonly store: string
  readonly bytes: number
  readonly how: string
}

const small = {
  ...FINISHED,
  result: { kept: false, why: 'outcome_only', status: 201, location: null },
} as const
const ending = { ...FINISHED, result: { ...FINISHED.result, afterBody: DAY } as CompletedResponse }
/** `after`: removes the response before measuring. */
const shapes = {
  whole: encodeDraft(FINISHED),
  outcome: encodeDraft(small),
  'before its ttl.body': encodeDraft(ending),
  'after its ttl.body': encodeDraft(ending),
}
type Shape = keyof typeof shapes

async function fill(store: Store, shape: Shape): Promise<void> {
  const bytes = Buffer.from(shapes[shape])
  const isAfter = shape === 'after its ttl.body'
  await fillWith(store, bytes, RECORDS, { dueIn: isAfter ? 0 : DAY, dropIn: 2 * DAY })
  if (!isAfter) return
  const trouble = (message: string): void => {
    throw new Error(message)
  }
  const observer = { leaseExpired() {}, reconciled() {}, expiring() {}, trouble }
  const bodies = new BodyRemover({ records: new Records(store), store, observer, random: Math.random })
  const startedAt = performance.now()
  while (await bodies.look());
  const took = (performance.now() - startedAt) / RECORDS
  process.stdout.write(`${store.name}: ${(took * 1000).toFixed(0)} µs to take a response out\n`)
}

async function redis(shape: Shape): Promise<Measured> {
  await using server = await RedisServer.start()
  const used = async () =>
    Number(/^used_memory:(\d+)/m.exec(String(await server.command('INFO', 'memory')))?.[1])
  const before = await used()
  const store = await openRedisStore({ url: server.url, ...SERVICE })
  await fill(store, shape)
  const bytes = ((await used()) - before) / RECORDS
  const [, keys] = (await server.command('SCAN', '0', 'COUNT', '1')) as [unknown, unknown[]]
  const one = await server.command('MEMORY', 'USAGE', String(keys[0]))
  await store.close()
  return { store: 'Redis', bytes, how: `used_memory; MEMORY USAGE of one: ${String(one)}` }
}

async function postgres(shape: Shape): Promise<Measured> {
  await using server = await PostgresServer.start()
  const store = await openPostgresStore({ url: server.url, ...SERVICE })
  const size = async () => {
    const tables = ['records', 'unresolved'].map((name) => `pg_total_relation_size('idempotency.${name}')`)
    return Number((await server.sql(`SELECT ${tables.join(' + ')}`))[0]?.[0])
  }
  const before = await size()
  await fill(store, shape)
  if (shape === 'after its ttl.body')
    for (const name of ['records', 'unresolved']) await server.sql(`VACUUM FULL idempotency.${name}`)
  const bytes = ((await size()) - before) / RECORDS
  await store.close()
  return { store: 'PostgreSQL', bytes, how: 'pg_total_relation_size, indexes included' }
}

async function sqlite(shape: Shape): Promise<Measured> {
  const folder = mkdtempSync(join(tmpdir(), 'bytes-'))
  try {
    const path = join(folder, 'records.db')
    const store: Store = await openSqliteStore({ path, ...SERVICE })
    await fill(store, shape)
    // The journal has been moved into the table.
    await store.close()
    if (shape === 'after its ttl.body') {
      const db = new DatabaseSync(path)
      db.exec('VACUUM')
      db.close()
    }
    return { store: 'SQLite', bytes: statSync(path).size / RECORDS, how: 'the file' }
  } finally {
    rmSync(folder, { recursive: true })
  }
}

async function memory(shape: Shape): Promise<Measured> {
  const used = () => {
    ;(globalThis as { gc?: () => void }).gc?.()
    const { heapUsed, external } = process.memoryUsage()
    return heapUsed + external
  }
  const store = memoryStore({ clock: Date.now, maxBytes: 2 ** 30 })
  const before = used()
  await fill(store, shape)
  const bytes = (used() - before) / RECORDS
  // Keeps it alive until here.
  await store.get(idOf(0))
  return { store: 'memory', bytes, how: 'heapUsed and external after a collection' }
}

process.stdout.write(
  `encoded: ${shapes.whole.length} bytes, with keep: outcome ${shapes.outcome.length}, with ttl.body ${shapes['before its ttl.body'].length}\n`,
)
const stores = { redis, ...(NO_POSTGRES === false ? { postgres } : {}), sqlite, memory }
const wanted = Object.entries(stores).filter(([name]) => name === (process.argv[3] ?? name))
for (const shape of Object.keys(shapes) as Shape[])
  for (const [, measure] of wanted) {
    const { store, bytes, how } = await measure(shape)
    process.stdout.write(`${shape}\t${store}\t${Math.round(bytes)} bytes\t${how}\n`)
  }
