import type { Test } from 'tap'
import { NO_POSTGRES, PostgresServer } from './postgres.ts'
import { RedisServer } from './redis.ts'

/** The stores that are servers and that this machine has. */
export const SHARED: readonly ('redis' | 'postgres')[] = NO_POSTGRES ? ['redis'] : ['redis', 'postgres']
export type SharedKind = (typeof SHARED)[number]

/** A store that replicas share, seen from outside. */
export interface SharedServer {
  readonly url: string
  pause(): void
  resume(): void
  clear(): Promise<void>
}

export async function sharedServer(t: Test, kind: SharedKind): Promise<SharedServer> {
  const server = kind === 'redis' ? await RedisServer.start() : await PostgresServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  return {
    url: server.url,
    pause: () => server.pause(),
    resume: () => server.resume(),
    clear: async () => {
      if (server instanceof RedisServer) await server.command('FLUSHALL')
      else await clearPostgres(server)
    },
  }
}

/** Before the first proxy has started there is no schema. */
async function clearPostgres(server: PostgresServer): Promise<void> {
  await server.sql(`DO $$ BEGIN IF to_regclass('idempotency.waits') IS NOT NULL THEN
    TRUNCATE idempotency.records, idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits; END IF; END $$`)
}
