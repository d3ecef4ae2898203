import { join, relative } from 'node:path'
import t from 'tap'
import { nameOf, openStore, STORE_SCHEMES, type StoreHooks } from '../../src/store/open.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { bytesOf, newId, newToken, SPANS, tempDir } from './fixtures.ts'

const hooks: StoreHooks = { onEvent: () => {}, onBreaker: () => {} }
const config = (url: string) => ({
  service: 'pay',
  store: { url, timeout: 5000, secret: null, spool: null, acceptRisk: false },
})

void t.test('each scheme opens its store', async (t) => {
  using dir = tempDir()
  await using server = await RedisServer.start()
  t.same(STORE_SCHEMES, ['memory:', 'sqlite:', 'redis:', 'rediss:'])
  const file = relative(process.cwd(), join(dir.path, 'records.db'))
  for (const [url, name] of [
    ['memory:', 'memory'],
    [`sqlite:${file}`, 'sqlite'],
    [`${server.url}/3`, 'redis'],
  ] as const) {
    const pruned: number[] = []
    const store = await openStore(config(url), { ...hooks, onPruned: (records) => pruned.push(records) })
    t.equal(store.name, name)
    t.equal(nameOf(url), name)
    t.same(pruned, name === 'redis' ? [] : [0], 'it tells, or never will')
    const id = newId()
    t.ok((await store.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
    t.ok((await store.get(id)).bytes)
    await store.close()
  }
  t.equal(nameOf('rediss://h/0'), 'redis')
  t.equal(nameOf('mysql://x'), 'mysql', 'even of none that there is')
})

void t.test('an unknown scheme is refused', async (t) => {
  for (const url of ['mysql://x', 'nonsense', '', 'toString:'])
    await t.rejects(openStore(config(url), hooks), {
      name: 'StoreUnavailable',
      message: /known are memory: sqlite:/,
    })
})

void t.test('an embedded store that cannot be used is an error at start; Redis may come later', async (t) => {
  using dir = tempDir()
  await t.rejects(openStore(config(`sqlite:${join(dir.path, 'no', 'records.db')}`), hooks), {
    message: /does not exist/,
  })
  const states: string[] = []
  const redis = await openStore(config(`redis://127.0.0.1:${await freePort()}`), {
    ...hooks,
    onBreaker: (state) => states.push(state),
  })
  for (let n = 0; n < 5; n++)
    await t.rejects(redis.get(newId()), { name: 'StoreUnavailable', maybeApplied: false })
  t.same(states, ['open'], 'it is behind the breaker')
  await redis.close()
})
