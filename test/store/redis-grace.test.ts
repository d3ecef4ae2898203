import t, { type Test } from 'tap'
import { SMALL_RECORD } from '../../src/store/codec.ts'
import { openRedisStore, type RedisOptions } from '../../src/store/redis.ts'
import { StoreUnavailable } from '../../src/store/register.ts'
import { emptyRedis } from '../support/redis.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'
import {
  answers,
  claim,
  claiming,
  GRACE,
  heldBy as held,
  KEYS,
  open as openStore,
  replacedBy,
  sibling,
} from './redis-fixtures.ts'

/* The grace after a failover, on a server whose data says that it was another one. Real failovers: redis-grace.verify.ts. */

const server = await emptyRedis(t)
const promoted = () => replacedBy(server)
const open = (t: Test, { url = server.url, grace = GRACE }: Partial<RedisOptions> = {}) =>
  openStore(t, url, { grace })

void t.test('W01 a server with another identity grants no claim until the grace is over', async (t) => {
  await promoted()
  const { store, advance } = await open(t)
  const first = await held(store)
  t.ok(first.left > 0 && first.left <= GRACE)
  t.equal(first.now + first.left, first.since + GRACE)
  t.equal(first.maybeApplied, false)
  const id = newId()
  t.match(await claim(store, id, 'again'), { done: true }, 'an earlier claim is written again')
  t.match(await claim(store, id), { done: false }, 'and answers retries')
  t.match(await store.get(id), { bytes: Buffer })
  t.match(await claim(store, newId(), 'fresh'), { done: true }, 'a key created since is claimed')
  advance(GRACE / 2)
  const second = await held(store)
  t.equal(second.since, first.since)
  advance(GRACE / 2)
  t.match(await claim(store), { done: true })
})

void t.test('W02 a grace holds takeovers, too, but not outcomes', async (t) => {
  await promoted()
  const { store, advance } = await open(t)
  const [id, token] = [newId(), newToken()]
  await store.put(id, bytesOf('in_progress', token), SPANS, 'again')
  const outcome = await store.swap(
    id,
    { token, states: ['in_progress'] },
    bytesOf('failed_retryable', token),
    SPANS,
    false,
  )
  t.ok(outcome.done)
  const over = { version: outcome.done ? outcome.stamp.version : 0 }
  const takeOver = () =>
    Promise.resolve(store.swap(id, over, bytesOf('in_progress', newToken()), SPANS, true))
  await t.rejects(takeOver(), { name: 'InGrace', maybeApplied: false })
  t.match(await store.swap(id, { version: 1 }, bytesOf('in_progress', token), SPANS, true), { done: false })
  advance(GRACE)
  t.match(await takeOver(), { done: true })
})

void t.test('W01 a flush and a clock set back each begin a new grace', async (t) => {
  await promoted()
  const { store, epochs, advance } = await open(t)
  const id = newId()
  const settle = async () => {
    await held(store, sibling(id))
    advance(GRACE)
    t.match(await claim(store, sibling(id)), { done: true })
  }
  await settle()
  /** The connections break, so that it checks again. */
  const look = async () => {
    const before = epochs.length
    await server.command('CLIENT', 'KILL', 'TYPE', 'normal')
    await until(() => epochs.length > before)
  }
  await server.command('FLUSHALL')
  await look()
  await settle()
  advance(-2 * GRACE)
  await look()
  await settle()
})

void t.test('W04 a proxy that comes after the grace begins another one', async (t) => {
  const late = await open(t)
  await until(() => late.epochs.length === 1)
  await promoted()
  const { store, advance } = await open(t)
  const first = await held(store)
  advance(GRACE)
  t.match(await claim(store), { done: true })
  late.advance(GRACE)
  // It checks when it connects, and every few hours.
  await server.command('CLIENT', 'KILL', 'TYPE', 'normal')
  await until(() => late.epochs.length === 2)
  await until(answers(store))
  const second = await held(store)
  t.ok(second.left > 0 && second.since === first.since, 'for what the late one writes again')
  advance(GRACE)
  t.match(await claim(store), { done: true })
})

void t.test(
  'W01 a full store answers from what it has, and takes claims that are written again',
  async (t) => {
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
  },
)

void t.test('W01 a shard that alone has lost its epoch is held once', async (t) => {
  const { store, epochs, advance } = await open(t)
  await until(() => epochs.length === 1)
  let id = newId()
  while (KEYS.shardOf(id) === 0) id = newId()
  await server.command('DEL', KEYS.epoch(id))
  await held(store, sibling(id))
  advance(GRACE)
  for (let n = 0; n < 3; n++) t.match(await claim(store, sibling(id)), { done: true })
})

void t.test('W01 claims written again extend the grace, up to twice its length', async (t) => {
  await promoted()
  const { store, advance } = await open(t, { grace: 1000 })
  const id = newId()
  const { since } = await held(store, id)
  const tills: number[] = []
  for (const at of [100, 900, 1000, 1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800, 1900]) {
    advance(since + at - (await store.ping()))
    await claim(store, sibling(id), 'again')
    const epoch = String(await server.command('GET', KEYS.epoch(id)))
    t.match(epoch, /^[0-9a-f]{40} \d+ \d+$/)
    tills.push(Number(epoch.split(' ')[2]) - since)
  }
  t.equal(tills[0], 1000, 'nothing is extended while there is enough time')
  t.ok(tills.every((till, n) => till >= (tills[n - 1] ?? 0) && till <= 2000))
  t.ok((tills[1] as number) >= 1100)
  advance(since + 2000 - (await store.ping()))
  t.match(await claim(store, id), { done: true })
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

void t.test('a new store has no grace', async (t) => {
  const { store, epochs } = await open(t)
  t.match(await claim(store), { done: true })
  await until(() => epochs.length > 0)
  t.equal(epochs[0]?.left, 0)
  const { store: peer } = await open(t)
  t.match(await claim(peer), { done: true })
})

void t.test('W01 a flushed store is not new to a proxy that has claimed on it', async (t) => {
  const { store, epochs } = await open(t)
  const id = newId()
  t.match(await claim(store, id), { done: true })
  await until(() => epochs.length > 0)
  await server.command('FLUSHALL')
  await held(store, id)
  await server.command('FLUSHALL')
  const newcomer = await open(t)
  t.match(await claim(newcomer.store, sibling(id)), { done: true }, 'the newcomer knows of no earlier claim')
  await held(store, id)
  await held(newcomer.store, sibling(id))
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
