import t from 'tap'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { openPostgresStore } from '../../src/store/postgres/store.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import type { Store } from '../../src/store/register.ts'
import { openSqliteStore } from '../../src/store/sqlite/store.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { copiesUnchanged, type Kinds, knowsItself } from './copying.ts'
import { tempDir } from './fixtures.ts'

t.setTimeout(300_000)

void t.test('§9 a record in any state is copied unchanged from any server to any other', async (t) => {
  using dir = tempDir()
  await using redis = await RedisServer.start()
  await using postgres = NO_POSTGRES === false ? await PostgresServer.start() : null
  await using open = new AsyncDisposableStack()
  const settings = () => ({ service: `test${services++}`, timeoutMs: 10_000, onEvent: () => {} })
  let services = 0
  const opened = async (opening: Promise<Store>): Promise<Store> => {
    const store = await opening
    open.defer(() => store.close())
    return store
  }
  const kinds: Kinds = {
    sqlite: () => opened(openSqliteStore({ ...settings(), path: `${dir.path}/${services}.db` })),
    redis: () => opened(openRedisStore({ ...settings(), url: redis.url })),
    ...(postgres && { postgres: () => opened(openPostgresStore({ ...settings(), url: postgres.url })) }),
  }
  await copiesUnchanged(t, kinds)
  await knowsItself(t, kinds, memoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES }))
})
