import t from 'tap'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import { RedisServer } from '../support/redis.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, SPANS } from './fixtures.ts'

const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
let skew = 0
const KEYS = new RedisKeys('pay')
const open = (service = 'pay') =>
  openRedisStore({ url: server.url, service, timeoutMs: 5000, onEvent: () => {}, skew: () => skew })

registerContract(t, 'redis', async () => {
  const [register, peer, other] = await Promise.all([open(), open(), open('pay.eu')])
  await server.command('FLUSHALL')
  return {
    register,
    peer,
    other,
    tellsPeers: true,
    advance: (ms) => void (skew += ms),
    [Symbol.asyncDispose]: async () =>
      void (await Promise.all([register.close(), peer.close(), other.close()])),
  }
})

void t.test('the keys of a record follow the fixed layout and share a hash tag', async (t) => {
  const id = Buffer.alloc(32, 0xaf).toString('base64url') as ReturnType<typeof newId>
  t.equal(KEYS.record(id), `idempotency:pay:{af}:r:${id}`)
  t.equal(KEYS.index(id), 'idempotency:pay:{af}:u')
  const register = await open()
  t.teardown(() => register.close())
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  const ttl = Number(await server.command('PTTL', KEYS.record(id)))
  t.ok(ttl > SPANS.dropIn - HOUR && ttl <= SPANS.dropIn, 'the expiry is the retention, not the lease')
  const token = newToken()
  const { now } = await register.put(newId(), bytesOf('in_progress', token), SPANS)
  t.ok(Math.abs(now - skew - Date.now()) < HOUR)
})

void t.test('a foreign value is returned by a claim and never overwritten', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  for (const foreign of ['x', 'y'.repeat(100)]) {
    const id = newId()
    await server.command('SET', KEYS.record(id), foreign)
    await server.command('ZADD', KEYS.index(id), 1, id)
    const bytes = bytesOf('in_progress', newToken())
    t.match(await register.put(id, bytes, SPANS), { done: false, bytes: Buffer.from(foreign) })
    t.match(await register.swap(id, { version: 1 }, bytes, SPANS, false), {
      done: false,
      bytes: Buffer.from(foreign),
    })
    t.same((await register.get(id)).bytes, Buffer.from(foreign))
    t.equal(await register.remove(id, 1), false)
    t.same(await register.due(10), [])
    t.equal(await server.command('GET', KEYS.record(id)), foreign)
    t.ok(await server.command('ZSCORE', KEYS.index(id), id), 'nor taken out of the index')
    await server.command('FLUSHALL')
  }
})

void t.test('due removes members whose record is gone', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const [gone, there] = [newId(), newId()]
  for (const id of [gone, there])
    await register.put(id, bytesOf('unknown', newToken()), { dueIn: 0, dropIn: HOUR })
  await server.command('DEL', KEYS.record(gone))
  t.same(await register.due(10), [there])
  t.equal(await server.command('ZSCORE', KEYS.index(gone), gone), null)
})

void t.test('a value of another type is a corrupt record', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const id = newId()
  await server.command('RPUSH', KEYS.record(id), 'x')
  const bytes = bytesOf('in_progress', newToken())
  await t.rejects(async () => register.put(id, bytes, SPANS), { name: 'CorruptRecord' })
  await t.rejects(async () => register.swap(id, { version: 1 }, bytes, SPANS, false), {
    name: 'CorruptRecord',
  })
  await t.rejects(register.get(id), { name: 'CorruptRecord' })
  t.equal(await server.command('TYPE', KEYS.record(id)), 'list')
})

void t.test('a history expires with its record, to the millisecond, as of its last note', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const id = newId()
  const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
  const expiries = async () =>
    Promise.all([KEYS.record(id), KEYS.history(id)].map((key) => server.command('PEXPIRETIME', key)))
  const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  await register.history.append(id, [note])
  const [first, history] = await expiries()
  t.ok(Number(first) > 0)
  t.equal(history, first)
  await register.swap(
    id,
    { version: put.now },
    bytesOf('completed', newToken()),
    { dueIn: 1, dropIn: HOUR },
    false,
  )
  await register.history.append(id, [note])
  const [second, later] = await expiries()
  t.not(second, first)
  t.equal(later, second)
  t.equal(KEYS.history(id).slice(0, 20), KEYS.record(id).slice(0, 20), 'in the slot of the record')
})

void t.test('list skips foreign keys, and pages through many records of one instant', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  await server.command('FLUSHALL')
  await server.command('SET', 'idempotency:pay:{ff}:r:not-an-id', 'x')
  await server.command('SET', 'other', 'x')
  t.same(await register.list('all', null, 1000), { ids: [], next: null })
  const ids = Array.from({ length: 25 }, () => newId()).sort()
  for (const id of ids) await server.command('ZADD', 'idempotency:pay:{00}:u', 1000, id)
  const seen: string[] = []
  let cursor: string | null = null
  do {
    const page: { ids: readonly string[]; next: string | null } = await register.list('unresolved', cursor, 4)
    seen.push(...page.ids)
    cursor = page.next
  } while (cursor !== null)
  t.same(seen, ids)
  await server.command('FLUSHALL')
})
