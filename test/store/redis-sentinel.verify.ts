import t from 'tap'
import { RedisServer } from '../support/redis.ts'
import { MASTER, SentinelGroup } from '../support/redis-sentinel.ts'
import { bytesOf, claim, newId, newToken, SPANS, until } from './fixtures.ts'
import { NOT_APPLIED, open, redisContract, takesClaims as writes } from './redis-fixtures.ts'

/* Real Sentinels. What they may answer: redis-sentinel.test.ts. */

t.setTimeout(300_000)

const group = await SentinelGroup.start()
t.teardown(() => group[Symbol.asyncDispose]())
redisContract(t, 'redis through Sentinel', group.url, async () => (await group.master())?.command('FLUSHALL'))

void t.test('operations and watchers follow an operator’s failover', async (t) => {
  const { store, events } = await open(t, group.url)
  const { store: peer, events: theirs } = await open(t, group.url)
  const before = await group.master()
  const id = newId()
  let told = 0
  await store.watch(id, () => void told++)
  t.ok((await claim(store, id)).done)
  await group.failover()
  await until(async () => {
    const now = await group.master()
    return now !== undefined && now !== before
  })
  const after = await group.master()
  // The old master may answer until a Sentinel is asked again.
  for (const one of [events, theirs]) await until(() => one.at(-1) === `connected: 127.0.0.1:${after?.port}`)
  await until(() => told > 0)
  t.ok((await store.get(id)).bytes, 'the replicated record is there')
  const { bytes } = await store.get(id)
  const seen = told
  await until(writes(peer))
  const version = (bytes as Buffer).readUIntBE(4, 6)
  t.ok((await peer.swap(id, { version }, bytesOf('unknown', newToken()), SPANS, false)).done)
  await until(() => told > seen)
})

void t.test('servers and Sentinels can have different passwords, which no event shows', async (t) => {
  await using server = await RedisServer.start({ args: ['--requirepass', 'p@ss'] })
  const monitor = [`sentinel monitor ${MASTER} 127.0.0.1 ${server.port} 1`]
  await using unguarded = await RedisServer.start({ sentinel: monitor })
  await using alike = await RedisServer.start({ sentinel: [...monitor, 'requirepass p@ss'] })
  await using guarded = await RedisServer.start({
    sentinel: [...monitor, 'requirepass other', 'user eye on >s3n ~* &* +@all'],
  })
  const url = ({ port }: RedisServer, credentials: string, query = '') =>
    `redis+sentinel://${credentials}127.0.0.1:${port}/${MASTER}/0${query}`
  for (const right of [
    url(unguarded, ':p%40ss@'),
    url(unguarded, 'default:p%40ss@'),
    url(alike, ':p%40ss@'),
    url(guarded, ':p%40ss@', '?sentinelPassword=other'),
    url(guarded, 'default:p%40ss@', '?sentinelUsername=eye&sentinelPassword=s3n'),
  ]) {
    const { store } = await open(t, right)
    t.ok(await writes(store)(), right)
  }
  for (const [wrong, message] of [
    [url(unguarded, ''), /NOAUTH/],
    [url(alike, 'default:p%40ss@'), /no Sentinel names the master.*NOAUTH/],
    [url(guarded, ':p%40ss@'), /no Sentinel names the master.*WRONGPASS/],
  ] as const) {
    const { store, events } = await open(t, wrong)
    await t.rejects(store.ping(), { ...NOT_APPLIED, message })
    t.notMatch(JSON.stringify(events), /p@ss|\bother\b|s3n/)
  }
})
