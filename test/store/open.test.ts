import { once } from 'node:events'
import { join, relative } from 'node:path'
import type { Worker } from 'node:worker_threads'
import t from 'tap'
import type { StoreHooks } from '../../src/store/around.ts'
import {
  asObserver,
  hasGrace,
  openStore,
  openStores,
  STORE_SCHEMES,
  storeName,
} from '../../src/store/open.ts'
import { readStamps } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { RedisKeys } from '../../src/store/redis/keys.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { bytesOf, draft, newId, newToken, PLAIN_STORE, response, SPANS, tempDir, until } from './fixtures.ts'

t.setTimeout(300_000)
const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())

const hooks: StoreHooks = { onEvent: () => {}, onBreaker: () => {} }
const config = (url: string) => ({
  service: 'pay',
  store: { ...PLAIN_STORE, url },
})

void t.test('there is a grace only for stores that fail over, or a migration from one', async (t) => {
  const of = (url: string, from: string | null, grace = 2000) =>
    hasGrace({ ...config(url).store, grace, migrate: from === null ? null : { from, phase: 'mirror' } })
  t.ok(of('redis+sentinel://h/m', null))
  t.ok(of('postgres://h/d', null))
  t.notOk(of('postgres://h/d', null, 0))
  t.ok(of('postgres://h/d', null, 1))
  t.notOk(of('sqlite:f', null))
  t.notOk(of('mysql://x', null), 'nor for one that nobody knows')
  t.ok(of('sqlite:f', 'redis://h'))
})

void t.test('each scheme opens its store', async (t) => {
  using dir = tempDir()
  t.same(
    STORE_SCHEMES,
    'memory: sqlite: redis: rediss: redis+sentinel: rediss+sentinel: redis+cluster: rediss+cluster: postgres: postgresql: dynamodb:'.split(
      ' ',
    ),
  )
  const file = relative(process.cwd(), join(dir.path, 'records.db'))
  for (const [url, name] of [
    ['memory:', 'memory'],
    [`sqlite:${file}`, 'sqlite'],
    [`${server.url}/3`, 'redis'],
  ] as const) {
    const pruned: number[] = []
    const store = await openStore(config(url), { ...hooks, onPruned: (records) => pruned.push(records) })
    t.equal(store.name, name)
    t.equal(storeName(url), name)
    t.same(pruned, name === 'redis' ? [] : [0], 'a store that prunes reports it at once')
    const id = newId()
    t.ok((await store.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
    t.ok((await store.get(id)).bytes)
    await store.close()
  }
  t.equal(storeName('dynamodb://t'), 'dynamodb')
  t.equal(storeName('rediss://h/0'), 'redis')
  t.equal(storeName('mysql://x'), 'mysql', 'even of an unknown store')
})

void t.test('tiered: the deciding store opens behind its cache, even if the cache is away', async (t) => {
  using dir = tempDir()
  const away = `redis://127.0.0.1:${await freePort()}`
  for (const [n, [cache, secret]] of (
    [
      ['memory:', null],
      [server.url, Buffer.alloc(32, 1)],
      [away, null],
    ] as const
  ).entries()) {
    const { service, store: own } = config(`sqlite:${join(dir.path, `${n}.db`)}`)
    const told: string[] = []
    const onEvent = (kind: string, detail: string) => void told.push(`${kind} ${detail}`)
    const states: string[] = []
    const store = await openStore(
      { service, store: { ...own, secret, cache: { url: cache } } },
      { onEvent, onBreaker: (state) => states.push(state) },
    )
    t.equal(store.name, 'sqlite')
    const [id, token] = [newId(), newToken()]
    await store.put(id, bytesOf('in_progress', token), SPANS)
    const own1 = { token, states: ['in_progress'] } as const
    await store.swap(id, own1, bytesOf('completed', token), SPANS, false)
    for (let asked = 0; asked < 10; asked++)
      t.match(await new Records(store).claim(id, draft('in_progress', newToken()), SPANS), {
        kind: 'exists',
        record: { state: 'completed' },
      })
    t.same(states, [], 'the health is that of the deciding store')
    if (cache === away) await until(() => told.length > 0)
    t.ok(told.every((one) => one.includes('store.cache: ')))
    await store.close()
  }
})

void t.test('a record that others remove is answered from the cache', async (t) => {
  const { service, store: own } = config(`${server.url}/9`)
  const plain = await openStore({ service, store: own }, hooks)
  await server.command('FLUSHALL')
  const { now } = performance
  let skew = 0
  performance.now = () => now.call(performance) + skew
  t.teardown(() => {
    performance.now = now
  })
  const cachedBy = async (url: string) => {
    const store = await openStore({ service, store: { ...own, cache: { url } } }, hooks)
    const [id, token] = [newId(), newToken()]
    await store.put(id, bytesOf('in_progress', token), SPANS)
    const condition = { token, states: ['in_progress'] } as const
    t.ok((await store.swap(id, condition, bytesOf('completed', token), SPANS, false)).done)
    const claim = async () => store.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.notOk((await claim()).done)
    return { id, claim, store }
  }
  await t.test('for five seconds where that is in this process', async (t) => {
    const { id, claim, store } = await cachedBy('memory:')
    await new Promise((next) => setTimeout(next, 20))
    const { bytes } = await plain.get(id)
    t.ok(await plain.remove(id, readStamps(bytes as Buffer).version))
    t.notOk((await claim()).done)
    skew = 4000
    t.notOk((await claim()).done)
    skew = 5001
    t.ok((await claim()).done)
    await store.close()
  })
  await t.test('for a minute where they share it', async (t) => {
    const { store } = await cachedBy(server.url)
    const keys = async () => (await server.command('KEYS', '*')) as string[]
    await until(async () => (await keys()).some((key) => key.includes(`${service}~`)))
    const lives: number[] = []
    for (const key of await keys()) lives.push(Number(await server.command('PTTL', key)))
    const longest = Math.max(...lives)
    t.ok(longest > 50_000 && longest <= 60_000, `${longest} ms`)
    await store.close()
  })
  await plain.close()
})

void t.test('an unknown scheme is refused', async (t) => {
  for (const url of ['mysql://x', 'nonsense', '', 'toString:'])
    await t.rejects(openStore(config(url), hooks), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: /allowed: memory: sqlite:/,
    })
})

void t.test('an embedded store that cannot be used is an error at start; Redis may come later', async (t) => {
  using dir = tempDir()
  await t.rejects(openStore(config(`sqlite:${join(dir.path, 'no', 'records.db')}`), hooks), {
    message: /does not exist/,
  })
  const { service, store } = config(`sqlite:${join(dir.path, 'new.db')}`)
  const migrate = { from: `sqlite:${join(dir.path, 'no', 'old.db')}`, phase: 'both' } as const
  await t.rejects(openStore({ service, store: { ...store, migrate } }, hooks), { message: /does not exist/ })
  const both = { ...migrate, from: `sqlite:${join(dir.path, 'old.db')}` }
  await using pair = new AsyncDisposableStack()
  const opened = await openStore({ service, store: { ...store, migrate: both } }, hooks)
  pair.defer(() => opened.close())
  t.match((await opened.traits()).topology, 'migration from sqlite to sqlite, phase both')
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

void t.test('records are sealed if there are keys, and without theirs refused', async (t) => {
  const url = `${server.url}/10`
  const { service, store: plain } = config(url)
  const sealing = { ...plain, encryption: { keys: [{ id: 'a', key: Buffer.alloc(32, 7) }] } }
  const [before, sealed] = [newId(), newId()]
  const without = await openStore({ service, store: plain }, hooks)
  await without.put(before, bytesOf('in_progress', newToken()), SPANS)
  await without.close()
  const store = await openStore({ service, store: sealing }, hooks)
  await store.put(sealed, bytesOf('in_progress', newToken()), SPANS)
  for (const id of [before, sealed])
    t.match(await new Records(store).get(id), { record: { path: '/v1/payments/ü' } })
  await store.close()
  const again = await openStore({ service, store: plain }, hooks)
  t.match(await new Records(again).get(before), { record: { path: '/v1/payments/ü' } })
  t.match(await new Records(again).get(sealed), { kind: 'corrupt', error: { reason: 'unknown_key' } })
  await again.close()
})

void t.test('responses are compressed if the configuration says so', async (t) => {
  const { service, store: plain } = config(`${server.url}/11`)
  const read = await openStore({ service, store: plain }, hooks)
  for (const compression of ['off', 'gzip', 'zstd'] as const) {
    const store = await openStore({ service, store: { ...plain, compression } }, hooks)
    const id = newId()
    await store.put(
      id,
      bytesOf('completed', newToken(), { result: response(Buffer.alloc(9000, 'x')) }),
      SPANS,
    )
    const { length } = (await read.get(id)).bytes as Buffer
    t.equal(length > 9000, compression === 'off', compression)
    await store.close()
  }
  await read.close()
})

void t.test('a Redis that has replaced another one says for how long it holds claims', async (t) => {
  const old = `${'0'.repeat(40)} 1 2`
  const replaced = (service: string) =>
    server.command('MSET', ...new RedisKeys(service).epochs.flatMap((key) => [key, old]))
  const claim = async (grace: number, timeout: number, service: string) => {
    await replaced(service)
    const held: number[] = []
    const { store: settings } = config(server.url)
    const { to: store } = await openStores(
      { service, store: { ...settings, timeout, grace } },
      { ...hooks, onHeld: (left) => void held.push(left) },
    )
    try {
      await store.put(newId(), bytesOf('in_progress', newToken()), SPANS)
      return held
    } catch (error) {
      t.match(error, { name: 'InGrace' })
      await until(() => held.some((left) => left > 0))
      return held
    } finally {
      await store.close()
    }
  }
  t.same(
    (await claim(0, 5000, 'off')).filter((left) => left > 0),
    [],
  )
  const longest = Math.max(...(await claim(1, 5000, 'short')))
  t.ok(longest > 5000 && longest <= 10_000, `a grace lasts two timeouts at least, and not ${longest} ms`)
  t.equal(asObserver(config(server.url)).store.grace, 0)
  const strict = config(server.url)
  t.equal(asObserver({ ...strict, store: { ...strict.store, grace: 2000 } }).store.grace, 0)
})

void t.test('a PostgreSQL that is away may come later', async (t) => {
  const told: string[] = []
  const pruned: number[] = []
  const url = `postgres://u@127.0.0.1:${await freePort()}/d`
  const store = await openStore(config(url), {
    ...hooks,
    onEvent: (kind) => void told.push(kind),
    onPruned: (records) => void pruned.push(records),
  })
  t.equal(store.name, 'postgres')
  for (const scheme of ['postgres', 'postgresql']) t.equal(storeName(`${scheme}://h/d`), 'postgres')
  t.same(pruned, [0])
  await t.rejects(store.get(newId()), { name: 'StoreUnavailable', maybeApplied: false })
  await until(() => told.length > 0)
  await store.close()
})

void t.test('if the store to move from cannot be used, the other one is closed again', async (t) => {
  using dir = tempDir()
  const { service, store } = config(`sqlite:${join(dir.path, 'new.db')}`)
  const migrate = { from: `sqlite:${join(dir.path, 'no', 'old.db')}`, phase: 'both' } as const
  const [[worker]] = await Promise.all([
    once(process, 'worker'),
    t.rejects(openStores({ service, store: { ...store, migrate } }, hooks), { message: /does not exist/ }),
  ])
  t.equal((worker as Worker).threadId, -1, 'its thread has ended')
})
