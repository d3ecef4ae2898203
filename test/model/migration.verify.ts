import { join } from 'node:path'
import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb/store.ts'
import { openPostgresStore } from '../../src/store/postgres/store.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import type { Store } from '../../src/store/register.ts'
import { openSqliteStore } from '../../src/store/sqlite/store.ts'
import { tempDir } from '../store/fixtures.ts'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { explore, sample } from './explore.ts'
import { MISTAKES, migration } from './migration.ts'
import { APART, memoryPair, replayMigration } from './replay-migration.ts'

t.setTimeout(300_000)

/** The code takes one path in so many; of two requests it takes all (migration.test.ts). */
const EVERY = 50
/** Paths of three requests over sockets and files. */
const SOME = Number(process.env.MANY ?? 25)

interface Opened {
  readonly store: Store
  readonly advance: () => void
}

void t.test('no path of three requests between two stores executes twice, nor does the code', async (t) => {
  const { states, steps, broken, pathTo } = explore(migration(3, null))
  t.equal(broken, null)
  for (let n = 0; n < states; n += EVERY) await replayMigration(pathTo(n), memoryPair())
  t.comment(`${states} states, ${steps} steps`)
})

void t.test('the other stores go the same ways, each as the old one and as the new one', async (t) => {
  using dir = tempDir()
  await using redis = await RedisServer.start()
  await using postgres = await PostgresServer.start()
  await using dynamodb = await DynamoDbServer.start()
  const common = { timeoutMs: 10_000, onEvent: () => {} }
  /** Of both stores of a pair. */
  let advanced = 0
  const file = async (service: string, behind: Millis): Promise<Opened> => {
    const store = await openSqliteStore({ ...common, service, path: join(dir.path, service) })
    return { store, advance: () => void (store.skew = advanced - behind) }
  }
  const served = async (store: Promise<Store>): Promise<Opened> => ({ store: await store, advance: () => {} })
  const kinds: Readonly<Record<string, (service: string, behind: Millis) => Promise<Opened>>> = {
    sqlite: file,
    redis: (service, behind) =>
      served(openRedisStore({ ...common, service, url: redis.url, skew: () => advanced - behind })),
    postgres: (service, behind) =>
      served(openPostgresStore({ ...common, service, url: postgres.url, skew: () => advanced - behind })),
    dynamodb: (service, behind) => {
      const now = (): Millis => Date.now() + advanced - behind
      const clock = { saw: () => {}, earliest: now, latest: now }
      return served(openDynamoDbStore({ ...common, service, url: dynamodb.url, clock }))
    },
  }
  const paths = [...sample(explore(migration(3, null)), SOME)]
  const names = Object.keys(kinds)
  for (const [n, name] of names.entries()) {
    const next = names[(n + 1) % names.length] as string
    const [from, to] = [await kinds[name]?.('old', APART), await kinds[next]?.('new', 0)] as [Opened, Opened]
    const advance = (ms: Millis): void => {
      advanced += ms
      from.advance()
      to.advance()
    }
    for (const path of paths)
      await replayMigration(path, { stores: { from: from.store, to: to.store }, advance })
    t.pass(`${paths.length} paths from ${name} to ${next}`)
    await from.store.close()
    await to.store.close()
  }
})

void t.test('the model finds every mistake', async (t) => {
  for (const mistake of MISTAKES) {
    const { broken } = explore(migration(3, mistake))
    t.not(broken, null, mistake)
    t.comment(`${mistake}: ${broken?.what}: ${broken?.trace.join(', ')}`)
  }
})
