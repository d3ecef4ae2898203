import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { SMALL_RECORD } from '../../src/store/codec.ts'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import { InGrace, type NewEpoch, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { emptyRedis, RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'

const server = await emptyRedis(t)
const KEYS = new RedisKeys('pay')
/** Longer than any test: time passes where `skew` says so. */
const GRACE = 10 * HOUR

interface Opened {
  readonly store: Store
  readonly epochs: NewEpoch[]
  readonly held: number[]
  /** Moves the server's clock, as this store sees it. */
  advance(ms: number): void
}

/** A server that has replaced another one: its data says so. */
async function promoted(of = server): Promise<void> {
  const old = `${'0'.repeat(40)} 1 2`
  await of.command('MSET', ...KEYS.epochs.flatMap((key) => [key, old]))
}

async function open(t: Test, { url = server.url, grace = GRACE, timeoutMs = 5000 } = {}): Promise<Opened> {
  let skew = 0
  const epochs: NewEpoch[] = []
  const held: number[] = []
  const store = await openRedisStore({
    url,
    service: 'pay',
    timeoutMs,
    grace,
    skew: () => skew,
    onEvent: () => {},
    onNewEpoch: (epoch) => void epochs.push(epoch),
    onHeld: (left) => void held.push(left),
  })
  t.teardown(() => store.close())
  return { store, epochs, held, advance: (ms) => void (skew += ms) }
}

const claim = (store: Store, id: RecordId = newId(), entry?: 'claim' | 'fresh' | 'again') =>
  Promise.resolve(store.put(id, bytesOf('in_progress', newToken()), SPANS, entry))

/** Another id of the same shard: without looks each shard has a grace of its own. */
function sibling(id: RecordId): RecordId {
  return `${id.slice(0, 2)}${newId().slice(2)}` as RecordId
}

async function held(store: Store, id?: RecordId): Promise<InGrace> {
  const error = await claim(store, id).then(
    () => null,
    (error: unknown) => error,
  )
  if (!(error instanceof InGrace)) throw new Error(`not held but ${String(error)}`)
  return error
}

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

void t.test('W01 an older snapshot, a flush and a clock set back each begin a new grace', async (t) => {
  await using own = await RedisServer.start({ args: ['--appendonly', 'no', '--save', ''] })
  await promoted(own)
  const { store, epochs, advance } = await open(t, { url: own.url })
  const id0 = newId()
  const settle = async () => {
    await held(store, sibling(id0))
    advance(GRACE)
    t.match(await claim(store, sibling(id0)), { done: true })
  }
  await settle()
  const seen = epochs.length
  await own.command('SAVE')
  const id = newId()
  await claim(store, id)
  await own.kill()
  await own.start()
  await until(async () => (await store.ping().catch(() => null)) !== null)
  await held(store, id)
  await until(() => epochs.length > seen)
  t.ok(epochs.at(-1)?.concerns(id))
  advance(GRACE)
  t.match(await claim(store), { done: true })
  /** The connections break, so that it checks again. */
  const look = async () => {
    const before = epochs.length
    await own.command('CLIENT', 'KILL', 'TYPE', 'normal')
    await until(() => epochs.length > before)
  }
  await own.command('FLUSHALL')
  await look()
  await settle()
  advance(-2 * GRACE)
  await look()
  await settle()
})

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

void t.test('W04 a proxy that comes after the grace begins another one', async (t) => {
  await using own = await RedisServer.start()
  await using name = await relay(own.port)
  const late = await open(t, { url: `redis://127.0.0.1:${name.port}` })
  await until(() => late.epochs.length === 1)
  name.accept = false
  name.cut()
  await promoted(own)
  const { store, advance } = await open(t, { url: own.url })
  const first = await held(store)
  advance(GRACE)
  t.match(await claim(store), { done: true })
  late.advance(GRACE)
  name.accept = true
  await until(() => late.epochs.length === 2)
  const second = await held(store)
  t.ok(second.left > 0 && second.since === first.since, 'for what the late one writes again')
  advance(GRACE)
  t.match(await claim(store), { done: true })
})

void t.test('W01 a failover that nobody may write down is not noticed before somebody may', async (t) => {
  await using own = await RedisServer.start()
  await using name = await relay(own.port)
  const { store, epochs } = await open(t, { url: `redis://127.0.0.1:${name.port}`, grace: 2000 })
  await until(() => epochs.length === 1)
  await promoted(own)
  await own.command('CONFIG', 'SET', 'min-replicas-to-write', '1')
  name.cut()
  await until(async () => (await store.ping().catch(() => null)) !== null)
  await t.rejects(claim(store), { name: 'StoreUnavailable' })
  await wait(1200)
  t.equal(epochs.length, 1, 'two checks later')
  await own.command('CONFIG', 'SET', 'min-replicas-to-write', '0')
  await until(() => epochs.length === 2)
  await held(store)
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

void t.test('W01 existing records still answer when the store is too full to record a grace', async (t) => {
  await using own = await RedisServer.start()
  const before = await open(t, { url: own.url, grace: 0 })
  const id = newId()
  await claim(before.store, id)
  await promoted(own)
  await own.command('CONFIG', 'SET', 'maxmemory', '1')
  const { store } = await open(t, { url: own.url })
  t.match(await claim(store, id), { done: false })
  await held(store)
})

void t.test('W01 a full store takes claims that are written again, and nothing new', async (t) => {
  await using own = await RedisServer.start()
  await promoted(own)
  const { store, advance, held: seen } = await open(t, { url: own.url })
  const id = newId()
  const { since } = await held(store, id)
  await until(() => (seen.at(-1) ?? 0) > 0)
  await own.command('CONFIG', 'SET', 'maxmemory', '1')
  t.match(await claim(store, id, 'again'), { done: true })
  const large = Buffer.concat([bytesOf('in_progress', newToken()), Buffer.alloc(SMALL_RECORD)])
  await t.rejects(Promise.resolve(store.put(newId(), large, SPANS, 'again')), { name: 'StoreFull' })
  advance(since + 2 * GRACE - (await store.ping()))
  await t.rejects(claim(store), { name: 'StoreFull' })
  t.match(await claim(store, id), { done: false }, 'nobody else gets it when the grace is over')
})

void t.test('W01 returning to a server that had been left begins a new grace', async (t) => {
  await using first = await RedisServer.start()
  await using second = await RedisServer.start()
  await using name = await relay(first.port)
  await promoted(first)
  const { store, epochs, advance } = await open(t, { url: `redis://127.0.0.1:${name.port}` })
  const id = newId()
  for (const { port } of [first, second, first]) {
    const before = epochs.length
    name.target = port
    name.cut()
    await until(async () => (await store.ping().catch(() => null)) !== null && epochs.length > before)
    await held(store, id)
    advance(GRACE)
    t.match(await claim(store, sibling(id)), { done: true })
  }
})

void t.test('a master that has become a replica is left even if nothing is written', async (t) => {
  await using own = await RedisServer.start()
  await using between = await relay(own.port)
  const { epochs } = await open(t, { url: `redis://127.0.0.1:${between.port}`, grace: 200 })
  await until(() => epochs.length === 1)
  let connections = 0
  between.onCommand = (bytes) => void (connections += bytes.includes('setname') ? 1 : 0)
  await own.command('REPLICAOF', '127.0.0.1', '1')
  await until(() => connections > 0)
})

void t.test('a replica refuses a claim instead of holding it', async (t) => {
  await using own = await RedisServer.start()
  await promoted(own)
  const { store } = await open(t, { url: own.url })
  await held(store)
  await own.command('FLUSHALL')
  await own.command('REPLICAOF', '127.0.0.1', '1')
  await t.rejects(claim(store), /READONLY|not connected/)
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

void t.test('a grace begins on the only node of a cluster, too', async (t) => {
  await using own = await RedisServer.start({ args: ['--cluster-enabled', 'yes'] })
  await own.command('CLUSTER', 'ADDSLOTSRANGE', 0, 16383)
  await until(async () => String(await own.command('CLUSTER', 'INFO')).includes('cluster_state:ok'))
  for (const key of KEYS.epochs) await own.command('SET', key, `${'0'.repeat(40)} 1 2`)
  const { store, epochs } = await open(t, { url: own.url })
  await until(() => epochs.length === 1)
  t.ok(epochs[0]?.concerns(newId()))
  await held(store)
})

void t.test('every proxy notices a new epoch, even if its server falls silent', async (t) => {
  await using own = await RedisServer.start()
  await promoted(own)
  await using between = await relay(own.port)
  const a = await open(t, { url: own.url, grace: 200 })
  const b = await open(t, { url: `redis://127.0.0.1:${between.port}`, grace: 200, timeoutMs: 60_000 })
  await until(() => a.epochs.length === 1 && b.epochs.length === 1)
  t.ok(a.held.some((left) => left > 0))
  await until(() => a.held.at(-1) === 0 && b.held.at(-1) === 0)
  await own.command('FLUSHALL')
  await until(() => a.epochs.length === 2 && b.epochs.length === 2)
  // No reply, and no end of the connection: only a look notices.
  let connections = 0
  between.onCommand = (bytes) => void (connections += bytes.includes('setname') ? 1 : 0)
  between.passReplies = false
  await until(() => connections > 0)
  between.passReplies = true
  await own.restart()
  await until(() => a.epochs.length >= 3 && b.epochs.length >= 3)
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
