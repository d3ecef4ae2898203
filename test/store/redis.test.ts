import t from 'tap'
import type { CompletedResponse } from '../../src/core/record.ts'
import { PREFIX, readStamps } from '../../src/store/codec.ts'
import { versionOf } from '../../src/store/prefix.ts'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import { RedisServer } from '../support/redis.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, MINUTE, newId, newToken, response, SPANS } from './fixtures.ts'

const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
let skew = 0
const KEYS = new RedisKeys('pay')
const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
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
  const nothing = (length: number) => '\0'.repeat(length)
  for (const foreign of [
    'x',
    'y'.repeat(100),
    nothing(100),
    'IP\x01',
    `IP\x01${nothing(PREFIX.end - 4)}`,
    `IP\x02${nothing(PREFIX.end - 3)}`,
  ]) {
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
    t.same(await register.renew([{ id, token: Buffer.alloc(16), ...SPANS }]), [false])
    t.same(await register.due(10), [])
    t.equal(await server.command('GET', KEYS.record(id)), foreign)
    t.ok(await server.command('ZSCORE', KEYS.index(id), id), 'nor taken out of the index')
    await server.command('RPUSH', KEYS.history(id), 'a 1 1 1 {}')
    t.equal(await register.history.append(id, [NOTE]), false)
    t.same(await register.history.read(id), [])
    t.equal(await register.remove(id, versionOf(Buffer.from(foreign))), true, 'an operator may remove it')
    t.equal(await server.command('EXISTS', KEYS.record(id), KEYS.history(id)), 0)
    t.equal(await server.command('ZSCORE', KEYS.index(id), id), null, 'with all that belongs to it')
    await server.command('FLUSHALL')
  }
})

void t.test('a record of nothing but its prefix lives and ends as any other', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const [id, token] = [newId(), newToken()]
  const bytes = bytesOf('in_progress', token).subarray(0, PREFIX.end)
  const spans = { dueIn: MINUTE, dropIn: HOUR }
  const { now: version } = await register.put(id, bytes, spans)
  t.equal((await register.get(id)).bytes?.length, PREFIX.end)
  t.match(await register.put(id, bytes, spans), { done: false, bytes: Buffer })
  t.same(await register.renew([{ id, token, ...spans }]), [true])
  t.equal((await register.get(id)).bytes?.length, PREFIX.end, 'a renewal adds nothing')
  t.match(await register.swap(id, { version: version + 1 }, bytes, spans, false), { done: true })
  t.equal(await register.history.append(id, [NOTE]), true)
  t.equal((await register.history.read(id)).length, 1)
  t.same(await register.due(10), [])
  skew += MINUTE
  t.same(await register.due(10), [id])
  skew += HOUR
  t.equal((await register.get(id)).bytes, null)
  t.match(await register.swap(id, { version: version + 2 }, bytes, spans, false), {
    done: false,
    bytes: null,
  })
  t.same(await register.renew([{ id, token, ...spans }]), [false])
  t.equal(await register.history.append(id, [NOTE]), false)
  t.same(await register.history.read(id), [])
  t.equal(await register.remove(id, version + 2), false)
  t.same(await register.due(10), [])
  t.equal(await server.command('ZCARD', KEYS.index(id)), 0)
  const again = await register.put(id, bytes, spans)
  t.ok(again.done)
  t.equal(await register.remove(id, again.now), true)
})

void t.test(
  'the index has the instant of each record that is unresolved, or whose response ends',
  async (t) => {
    const register = await open()
    t.teardown(() => register.close())
    const [id, token] = [newId(), newToken()]
    const score = async () => {
      const found = await server.command('ZSCORE', KEYS.index(id), id)
      return found === null ? null : Number(found)
    }
    const ends = bytesOf('completed', token, {
      result: { ...response(), afterBody: HOUR } as CompletedResponse,
    })
    const put = await register.put(id, bytesOf('in_progress', token), SPANS)
    t.equal(await score(), put.now + SPANS.dueIn)
    const swap = (version: number, bytes: Buffer) => register.swap(id, { version }, bytes, SPANS, false)
    const swapped = await swap(put.now, ends)
    t.equal(await score(), 2 ** 48 + swapped.now + SPANS.dueIn)
    await swap(put.now + 1, bytesOf('completed', token))
    t.equal(await score(), null)
    await swap(put.now + 2, bytesOf('unknown', token))
    t.not(await score(), null)
    skew += SPANS.dropIn
    const again = await register.put(id, ends, SPANS)
    t.equal(await score(), 2 ** 48 + again.now + SPANS.dueIn)
    skew += SPANS.dropIn
    t.ok((await register.put(id, bytesOf('completed', token), SPANS)).done)
    t.equal(await score(), null, 'nothing is left of the record before')
  },
)

void t.test('all operations have one clock', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  for (let round = 0; round < 50; round++) {
    const [id, token] = [newId(), newToken()]
    const bytes = bytesOf('in_progress', token)
    const own = { token, states: ['in_progress'] } as const
    // Sent together: most of them run within one millisecond.
    const [put, swap, get, , renewed, , later] = await Promise.all([
      register.put(id, bytes, SPANS),
      register.swap(id, own, bytes, SPANS, false),
      register.get(id),
      register.renew([{ id, token, dueIn: HOUR, dropIn: 0 }]),
      register.get(id),
      register.limits.take(id, { count: 1, per: HOUR }, 1),
      register.get(id),
    ])
    const [taken] = String(await server.command('GET', KEYS.bucket(id))).split(' ')
    await register.history.append(id, [NOTE])
    const after = await register.get(id)
    const [note] = await register.history.read(id)
    const { due } = readStamps(renewed.bytes as Buffer)
    const times = [put.now, swap.now, get.now, due - HOUR, renewed.now, Number(taken), later.now]
    times.push(note?.last ?? 0, after.now)
    t.strictSame(
      times,
      times.toSorted((a, b) => a - b),
    )
  }
})

void t.test('Redis drops a record when its retention ends', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const [id, token] = [newId(), newToken()]
  const isLeft = async (dropIn: number) => {
    const left = Number(await server.command('PTTL', KEYS.record(id)))
    t.ok(left > dropIn - MINUTE && left <= dropIn, `${left} of ${dropIn}`)
  }
  const bytes = bytesOf('in_progress', token)
  const { now } = await register.put(id, bytes, { dueIn: HOUR, dropIn: 2 * HOUR })
  await isLeft(2 * HOUR)
  await register.swap(id, { version: now }, bytes, { dueIn: HOUR, dropIn: 5 * HOUR }, false)
  await isLeft(5 * HOUR)
  await register.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }])
  await isLeft(5 * HOUR)
  await register.renew([{ id, token, dueIn: HOUR, dropIn: 9 * HOUR }])
  await isLeft(9 * HOUR)
  await register.history.append(id, [NOTE])
  t.equal(
    await server.command('PEXPIRETIME', KEYS.history(id)),
    await server.command('PEXPIRETIME', KEYS.record(id)),
  )
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
  const expiries = async () =>
    Promise.all([KEYS.record(id), KEYS.history(id)].map((key) => server.command('PEXPIRETIME', key)))
  const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  await register.history.append(id, [NOTE])
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
  await register.history.append(id, [NOTE])
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
