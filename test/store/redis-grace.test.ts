import t, { type Test } from 'tap'
import { SMALL_RECORD } from '../../src/store/record/codec.ts'
import { type RedisOptions } from '../../src/store/redis/keys.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import { StoreUnavailable } from '../../src/store/register.ts'
import { emptyRedis } from '../support/redis.ts'
import { claim, newId, SPANS, until } from './fixtures.ts'
import { GRACE, graceContract, heldBy as held } from './grace.ts'
import { claiming, KEYS, open as openStore, replacedBy, sibling } from './redis-fixtures.ts'

/* The grace after a failover, on a server whose data says that it was another one. Real failovers: redis-grace.verify.ts. */

const server = await emptyRedis(t)
const promoted = () => replacedBy(server)
const open = (t: Test, { url = server.url, grace = GRACE }: Partial<RedisOptions> = {}) =>
  openStore(t, url, { grace })

graceContract(t, 'redis', async () => ({
  open: (t) => open(t),
  promoted,
  lose: () => server.command('FLUSHALL'),
  breakAll: () => server.command('CLIENT', 'KILL', 'TYPE', 'normal'),
  sibling,
}))

void t.test('W01 a full store answers what it has, and takes claims written again', async (t) => {
  const [before, id] = [await open(t, { grace: 0 }), newId()]
  await claim(before.store, id)
  await promoted()
  const fill = (bytes: string) => server.command('CONFIG', 'SET', 'maxmemory', bytes)
  t.teardown(() => fill('0'))
  const { store, advance, held: seen } = await open(t)
  const { since } = await held(store)
  await until(() => (seen.at(-1) ?? 0) > 0)
  await fill('1')
  t.match(await claim(store, id), { done: false })
  const lost = sibling(id)
  t.match(await claim(store, lost, 'again'), { done: true })
  const large = Buffer.concat([claiming(), Buffer.alloc(SMALL_RECORD)])
  await t.rejects(async () => store.put(newId(), large, SPANS, 'again'), { name: 'StoreFull' })
  advance(since + 2 * GRACE - (await store.ping()))
  await t.rejects(claim(store), { name: 'StoreFull' })
  t.match(await claim(store, lost), { done: false }, 'nobody else gets it when the grace is over')
  await fill('0')
})

void t.test('W01 a shard that alone has lost its epoch is held once', async (t) => {
  const { store, epochs, advance } = await open(t)
  await until(() => epochs.length === 1)
  let id = newId()
  while (KEYS.shardOf(id) === 0) id = newId()
  await server.command('DEL', KEYS.epochs[KEYS.shardOf(id)] as string)
  await held(store, sibling(id))
  advance(GRACE)
  for (let n = 0; n < 3; n++) t.match(await claim(store, sibling(id)), { done: true })
})

void t.test('W01 a grace begins with another process, or an epoch lost or unreadable', async (t) => {
  const { store, advance, epochs } = await open(t)
  const id = newId()
  const key = KEYS.epochs[KEYS.shardOf(id)] as string
  t.match(await claim(store, sibling(id)), { done: true })
  await until(() => epochs.length === 1)
  for (const change of [
    promoted,
    promoted,
    () => server.command('DEL', key),
    () => server.command('SET', key, 'of a later release'),
  ]) {
    await change()
    t.equal((await held(store, sibling(id))).left, GRACE)
    t.match(await server.command('GET', key), /^[0-9a-f]{40} \d+ \d+$/)
    advance(GRACE / 2)
  }
})

void t.test('W01 an epoch that cannot be written grants no claim, and says why', async (t) => {
  const { store } = await open(t)
  await promoted()
  await server.command('CONFIG', 'SET', 'min-replicas-to-write', '1')
  await t.rejects(claim(store), /NOREPLICAS/)
  await server.command('CONFIG', 'SET', 'min-replicas-to-write', '0')
  await held(store)
})

void t.test('W01 without the right to INFO there is no grace, and the traits say so', async (t) => {
  await promoted()
  await server.command('ACL', 'SETUSER', 'plain', 'on', '>pw', '~*', '&*', '+@all', '-info')
  const { store, epochs } = await open(t, { url: server.url.replace('//', '//plain:pw@') })
  t.match(await claim(store), { done: true })
  t.equal((await store.traits()).hasIdentity, false)
  await until(() => epochs.length === 1)
  t.match(epochs, [{ left: 0 }])
  const { store: other } = await open(t)
  await held(other)
  t.equal((await other.traits()).hasIdentity, true)
})

void t.test('without the right to run scripts no epoch begins and no claim is granted', async (t) => {
  await server.command('ACL', 'SETUSER', 'dumb', 'on', '>pw', '~*', '&*', '+@all', '-@scripting')
  const { store, epochs, held } = await open(t, { url: server.url.replace('//', '//dumb:pw@'), grace: 200 })
  await until(() => held.length > 3)
  await t.rejects(claim(store), /NOPERM/)
  t.same(epochs, [])
})

void t.test('a store that is down begins no epoch', async (t) => {
  const { store, epochs } = await open(t, { url: 'redis://127.0.0.1:1', grace: 200 })
  await t.rejects(claim(store), StoreUnavailable)
  t.same(epochs, [])
})

void t.test('grace callbacks are optional', async (t) => {
  await promoted()
  const store = await openRedisStore({
    url: server.url,
    service: 'pay',
    timeoutMs: 5000,
    grace: 200,
    onEvent: () => {},
  })
  t.teardown(() => store.close())
  await until(() =>
    claim(store).then(
      ({ done }) => done,
      () => false,
    ),
  )
})
