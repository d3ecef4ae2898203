/**
 * Bytes that a completed record takes in each store (docs/stores.md#sizing): a payment of 300 bytes, answered with 300.
 *
 *   node bench/bytes.ts [records]     # 10,000 by default; real servers, which it starts
 */
import { mkdtempSync, rmSync, statSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { encodeDraft } from '../src/store/codec.ts'
import { memoryStore } from '../src/store/memory.ts'
import { openPostgresStore } from '../src/store/postgres.ts'
import { openRedisStore } from '../src/store/redis.ts'
import type { Store } from '../src/store/register.ts'
import { openSqliteStore } from '../src/store/sqlite.ts'
import { NO_POSTGRES, PostgresServer } from '../test/support/postgres.ts'
import { RedisServer } from '../test/support/redis.ts'
import { FINISHED, fillWith, idOf } from './records.ts'

const RECORDS = Number(process.argv[2] ?? 10_000)
const SERVICE = { service: 'bench', timeoutMs: 60_000, onEvent: () => {} }

interface Measured {
  readonly store: string
  readonly bytes: number
  readonly how: string
}

const small = {
  ...FINISHED,
  result: { kept: false, why: 'outcome_only', status: 201, location: null },
} as const
const shapes = { whole: encodeDraft(FINISHED), outcome: encodeDraft(small) }

async function redis(shape: Buffer): Promise<Measured> {
  await using server = await RedisServer.start()
  const used = async () =>
    Number(/^used_memory:(\d+)/m.exec(String(await server.command('INFO', 'memory')))?.[1])
  const before = await used()
  const store = await openRedisStore({ url: server.url, ...SERVICE })
  await fillWith(store, shape, RECORDS)
  const bytes = ((await used()) - before) / RECORDS
  const [, keys] = (await server.command('SCAN', '0', 'COUNT', '1')) as [unknown, unknown[]]
  const one = await server.command('MEMORY', 'USAGE', String(keys[0]))
  await store.close()
  return { store: 'Redis', bytes, how: `used_memory; MEMORY USAGE of one: ${String(one)}` }
}

async function postgres(shape: Buffer): Promise<Measured> {
  await using server = await PostgresServer.start()
  const store = await openPostgresStore({ url: server.url, ...SERVICE })
  const size = async () =>
    Number((await server.sql("SELECT pg_total_relation_size('idempotency.records')"))[0]?.[0])
  const before = await size()
  await fillWith(store, shape, RECORDS)
  const bytes = ((await size()) - before) / RECORDS
  await store.close()
  return { store: 'PostgreSQL', bytes, how: 'pg_total_relation_size, index included' }
}

async function sqlite(shape: Buffer): Promise<Measured> {
  const folder = mkdtempSync(join(tmpdir(), 'bytes-'))
  try {
    const path = join(folder, 'records.db')
    const store: Store = await openSqliteStore({ path, ...SERVICE })
    await fillWith(store, shape, RECORDS)
    // The journal has been moved into the table.
    await store.close()
    return { store: 'SQLite', bytes: statSync(path).size / RECORDS, how: 'the file' }
  } finally {
    rmSync(folder, { recursive: true })
  }
}

async function memory(shape: Buffer): Promise<Measured> {
  const used = () => {
    ;(globalThis as { gc?: () => void }).gc?.()
    const { heapUsed, external } = process.memoryUsage()
    return heapUsed + external
  }
  const store = memoryStore({ clock: Date.now, maxBytes: 2 ** 30 })
  const before = used()
  await fillWith(store, shape, RECORDS)
  const bytes = (used() - before) / RECORDS
  // It is not collected before.
  await store.get(idOf(0))
  return { store: 'memory', bytes, how: 'heapUsed and external after a collection' }
}

process.stdout.write(`encoded: ${shapes.whole.length} bytes, with keep: outcome ${shapes.outcome.length}\n`)
for (const [name, shape] of Object.entries(shapes))
  for (const measure of [redis, ...(NO_POSTGRES === false ? [postgres] : []), sqlite, memory]) {
    const { store, bytes, how } = await measure(Buffer.from(shape))
    process.stdout.write(`${name}\t${store}\t${Math.round(bytes)} bytes\t${how}\n`)
  }
