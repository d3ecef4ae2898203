import type { Test } from 'tap'
import { IDENTIFICATION_MARK } from '../../src/store/marks.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { onlyRecord, redisSnapshot } from './e2e.ts'
import { NO_POSTGRES, PostgresServer } from './postgres.ts'
import { RedisServer } from './redis.ts'

/** The stores that are servers and that this machine has. */
export const SHARED: readonly ('redis' | 'postgres')[] = NO_POSTGRES ? ['redis'] : ['redis', 'postgres']
export type SharedKind = (typeof SHARED)[number]

/** A record as the store has it. */
export interface Found {
  /** As in `STATE`. */
  readonly state: number
  readonly fence: number
  readonly createdAt: number
  readonly due: number
}

/** A store that replicas share, seen from outside. */
export interface SharedServer {
  readonly kind: SharedKind
  readonly port: number
  readonly url: string
  /** Whether what is sent to it has a claim, or an outcome. */
  readonly wire: Readonly<Record<'claim' | 'outcome', (bytes: Buffer) => boolean>>
  /** The URL of the same store through another port, such as a relay's. */
  through(port: number): string
  start(): Promise<void>
  stop(): Promise<void>
  kill(): Promise<void>
  pause(): void
  resume(): void
  clear(): Promise<void>
  count(): Promise<number>
  /** The only record. */
  only(): Promise<Found>
  /** Every record and every index, but no histories, which arrive late. */
  snapshot(): Promise<unknown>
  /** Milliseconds on its own clock. */
  time(): Promise<number>
}

/** A server of each kind that this machine has. */
export async function sharedServers(t: Test): Promise<Record<SharedKind, SharedServer>> {
  skipped(t)
  const [redis, postgres] = await Promise.all(SHARED.map((kind) => sharedServer(t, kind)))
  return { redis, postgres } as Record<SharedKind, SharedServer>
}

function skipped(t: Test): void {
  if (NO_POSTGRES) void t.test('on PostgreSQL, too', { skip: NO_POSTGRES }, () => {})
}

export async function sharedServer(t: Test, kind: SharedKind): Promise<SharedServer> {
  const server = kind === 'redis' ? await RedisServer.start() : await PostgresServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  const common = {
    kind,
    port: server.port,
    url: server.url,
    start: () => server.start(),
    stop: () => server.stop(),
    kill: () => server.kill(),
    pause: () => server.pause(),
    resume: () => server.resume(),
  }
  return { ...common, ...(server instanceof RedisServer ? ofRedis(server) : ofPostgres(server)) }
}

/** The mark of live replicas is written in the same way. */
function having(text: string): (bytes: Buffer) => boolean {
  return (bytes) => bytes.includes(text, 0, 'latin1') && !bytes.includes(IDENTIFICATION_MARK)
}

function ofRedis(server: RedisServer) {
  return {
    wire: { claim: having('IP\x01\x01'), outcome: having('IP\x01\x02') },
    through: (port: number) => `redis://127.0.0.1:${port}`,
    clear: async () => void (await server.command('FLUSHALL')),
    count: async () => (await redisSnapshot(server)).size,
    only: async () => {
      const { bytes } = await onlyRecord(server)
      return {
        state: bytes.readUInt8(PREFIX.state),
        fence: bytes.readUIntBE(PREFIX.fence, 6),
        createdAt: bytes.readUIntBE(PREFIX.createdAt, 6),
        due: bytes.readUIntBE(PREFIX.due, 6),
      }
    },
    snapshot: () => redisSnapshot(server),
    time: async () => {
      const [seconds, micros] = (await server.command('TIME')) as [string, string]
      return Number(seconds) * 1000 + Number(micros) / 1000
    },
  }
}

/** Live replicas renew it. */
const NO_MARK = `id <> '${IDENTIFICATION_MARK}'`

function ofPostgres(server: PostgresServer) {
  return {
    wire: { claim: having('idempotency.claims('), outcome: having('idempotency.outcomes(') },
    through: (port: number) => `postgres://owner@127.0.0.1:${port}/records`,
    clear: () => clearPostgres(server),
    count: async () =>
      (await server.sql(`SELECT FROM idempotency.stored WHERE drop_at > idempotency.now(0) AND ${NO_MARK}`))
        .length,
    only: async () => {
      const rows = await server.sql(
        `SELECT state, fence, created_at, due FROM idempotency.stored WHERE ${NO_MARK}`,
      )
      if (rows.length !== 1) throw new Error(`${rows.length} records where one was expected`)
      const [state, fence, createdAt, due] = (rows[0] ?? []).map(Number)
      return { state, fence, createdAt, due } as unknown as Found
    },
    snapshot: async () => [
      await server.sql(`SELECT records::text FROM idempotency.records WHERE ${NO_MARK} ORDER BY id`),
      await server.sql('SELECT unresolved::text FROM idempotency.unresolved ORDER BY id'),
    ],
    time: async () => {
      const [[now] = []] = await server.sql('SELECT extract(epoch FROM clock_timestamp()) * 1000')
      return Number(now)
    },
  }
}

/** Before the first proxy has started there is no schema. */
async function clearPostgres(server: PostgresServer): Promise<void> {
  await server.sql(`DO $$ BEGIN IF to_regclass('idempotency.waits') IS NOT NULL THEN
    TRUNCATE idempotency.records, idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits; END IF; END $$`)
}
