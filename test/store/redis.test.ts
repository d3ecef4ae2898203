import t, { type Test } from 'tap'
import { PREFIX, readStamps } from '../../src/store/record/codec.ts'
import { versionOf } from '../../src/store/record/prefix.ts'
import { RedisServer } from '../support/redis.ts'
import { bytesOf, claim, HOUR, MINUTE, newId, newToken, response, SPANS } from './fixtures.ts'
import {
  claiming,
  historyOf,
  KEYS,
  NOT_APPLIED,
  NOTE,
  open as openStore,
  redisContract,
} from './redis-fixtures.ts'

const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
redisContract(t, 'redis', server.url, () => server.command('FLUSHALL'))

const open = (t: Test, path = '') => openStore(t, `${server.url}${path}`)

void t.test('a foreign value is returned by a claim and never overwritten', async (t) => {
  const { store: register } = await open(t)
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
    await server.command('ZADD', KEYS.indexes[KEYS.shardOf(id)] as string, 1, id)
    const bytes = bytesOf('in_progress', newToken())
    t.match(await register.put(id, bytes, SPANS), { done: false, bytes: Buffer.from(foreign) })
    for (const own of [{ version: 1 }, { token: Buffer.alloc(16), states: ['in_progress' as const] }])
      t.match(await register.swap(id, own, bytes, SPANS, false), {
        done: false,
        bytes: Buffer.from(foreign),
      })
    t.same((await register.get(id)).bytes, Buffer.from(foreign))
    t.equal(await register.remove(id, 1), false)
    t.same(await register.renew([{ id, token: Buffer.alloc(16), ...SPANS }]), [false])
    t.same(await register.due(10), [])
    t.equal(await server.command('GET', KEYS.record(id)), foreign)
    t.ok(
      await server.command('ZSCORE', KEYS.indexes[KEYS.shardOf(id)] as string, id),
      'nor taken out of the index',
    )
    await server.command('RPUSH', historyOf(id), 'a 1 1 1 {}')
    t.equal(await register.history.append(id, [NOTE]), false)
    t.same(await register.history.read(id), [])
    t.equal(await register.remove(id, versionOf(Buffer.from(foreign))), true, 'an operator may remove it')
    t.equal(await server.command('EXISTS', KEYS.record(id), historyOf(id)), 0)
    t.equal(
      await server.command('ZSCORE', KEYS.indexes[KEYS.shardOf(id)] as string, id),
      null,
      'with all that belongs to it',
    )
    await server.command('FLUSHALL')
  }
})

void t.test('a record may have been due before it is written', async (t) => {
  const { store } = await open(t)
  await server.command('FLUSHALL')
  const id = newId()
  await store.put(id, claiming(), { dueIn: -MINUTE, dropIn: HOUR })
  t.strictSame(await store.due(1), [id])
  await server.command('FLUSHALL')
})

void t.test('all operations have one clock', async (t) => {
  const { store: register } = await open(t)
  for (let round = 0; round < 10; round++) {
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

void t.test('Redis drops a record when its retention ends, and its history with it', async (t) => {
  const { store } = await open(t)
  const [id, token] = [newId(), newToken()]
  const isLeft = async (dropIn: number) => {
    const left = Number(await server.command('PTTL', KEYS.record(id)))
    t.ok(left > dropIn - MINUTE && left <= dropIn, `${left} of ${dropIn}`)
    await store.history.append(id, [NOTE])
    const [record, history] = await Promise.all(
      [KEYS.record(id), historyOf(id)].map((key) => server.command('PEXPIRETIME', key)),
    )
    t.equal(history, record, 'to the millisecond')
  }
  const { now } = await store.put(id, claiming(token), { dueIn: HOUR, dropIn: 2 * HOUR })
  await isLeft(2 * HOUR)
  await store.swap(id, { version: now }, claiming(token), { dueIn: HOUR, dropIn: 5 * HOUR }, false)
  await isLeft(5 * HOUR)
  for (const hours of [1, 9]) await store.renew([{ id, token, dueIn: HOUR, dropIn: hours * HOUR }])
  await isLeft(9 * HOUR)
})

void t.test('due removes members whose record is gone', async (t) => {
  const { store } = await open(t)
  const [gone, there] = [newId(), newId()]
  for (const id of [gone, there])
    await store.put(id, bytesOf('unknown', newToken()), { dueIn: 0, dropIn: HOUR })
  await server.command('DEL', KEYS.record(gone))
  t.same(await store.due(10), [there])
  t.equal(await server.command('ZSCORE', KEYS.indexes[KEYS.shardOf(gone)] as string, gone), null)
})

void t.test('list skips foreign keys, and pages through many records of one instant', async (t) => {
  const { store } = await open(t)
  await server.command('FLUSHALL')
  await server.command('SET', 'idempotency:pay:{ff}:r:not-an-id', 'x')
  await server.command('SET', 'other', 'x')
  t.same(await store.list('all', null, 1000), { ids: [], next: null })
  const ids = Array.from({ length: 25 }, () => newId()).sort()
  for (const id of ids) await server.command('ZADD', 'idempotency:pay:{00}:u', 1000, id)
  const seen: string[] = []
  let cursor: string | null = null
  do {
    const page: { ids: readonly string[]; next: string | null } = await store.list('unresolved', cursor, 4)
    seen.push(...page.ids)
    cursor = page.next
  } while (cursor !== null)
  t.same(seen, ids)
  await server.command('FLUSHALL')
})

void t.test('a bucket expires when it is full again, or goes with the last unit given back', async (t) => {
  const { store } = await open(t)
  const id = newId()
  const rate = { count: 10, per: 10 * HOUR }
  const taken = async (units: 1 | -1, hours: number) => {
    t.equal(await store.limits.take(id, rate, units), 0)
    const left = Number(await server.command('PTTL', KEYS.bucket(id)))
    t.ok(left > (hours - 1) * HOUR && left <= hours * HOUR, `${left} of ${hours} hours`)
  }
  await taken(1, 1)
  await taken(1, 2)
  await taken(-1, 1)
  await store.limits.take(id, rate, -1)
  t.equal(await server.command('EXISTS', KEYS.bucket(id)), 0)
  await server.command('SET', KEYS.bucket(id), 'of a later release')
  t.equal(await store.limits.take(id, rate, 1), 0)
})

void t.test('R08 out of memory, Redis refuses new claims and still takes small outcomes', async (t) => {
  const { store } = await open(t)
  const [id, token, other] = [newId(), newToken(), newId()]
  await store.put(id, claiming(token), SPANS)
  await server.command('CONFIG', 'SET', 'maxmemory', '1')
  const full = { name: 'StoreFull', maybeApplied: false, message: /Redis is full: OOM/ }
  await t.rejects(claim(store, other), full)
  await t.rejects(store.limits.take(other, { count: 1, per: HOUR }, 1), full)
  t.match(await claim(store, id), { done: false })
  t.same(await store.renew([{ id, token, dueIn: 1000, dropIn: 0 }]), [true])
  const own = { token, states: ['in_progress'] } as const
  const large = bytesOf('completed', token, { result: response(Buffer.alloc(100_000)) })
  await t.rejects(async () => store.swap(id, own, large, SPANS, false), full)
  t.ok((await store.swap(id, own, bytesOf('completed', token), SPANS, false)).done)
  await server.command('CONFIG', 'SET', 'maxmemory', '0')
  t.ok((await claim(store, other)).done)
})

void t.test('R07 traits report eviction and persistence', async (t) => {
  const { store } = await open(t)
  t.match(await store.traits(), {
    durable: true,
    evicts: false,
    forgets: /^Claims wait for no replica/,
    hasIdentity: true,
    findings: [],
    replication: 'claims wait for no replica (store.wait); no replica is connected',
    room: /^\d+ MiB are used; maxmemory is not set/,
  })
  await server.command('CONFIG', 'SET', 'maxmemory-policy', 'allkeys-lru')
  await server.command('CONFIG', 'SET', 'appendonly', 'no')
  t.match(await store.traits(), {
    durable: false,
    evicts: true,
    findings: [/appendonly is off/, /allkeys-lru, not noeviction/],
  })
  await server.command('CONFIG', 'SET', 'maxmemory-policy', 'noeviction')
  await server.command('CONFIG', 'SET', 'appendonly', 'yes')
})

void t.test('user, password and database of the URL are used, and no event shows the password', async (t) => {
  await server.command('ACL', 'SETUSER', 'app', 'on', '>p@ss:word/ü', '~idempotency:*', '+@all')
  await server.command('FLUSHALL')
  const as = (password: string, path = '') =>
    openStore(t, `redis://app${password}@127.0.0.1:${server.port}${path}`)
  const password = `:${encodeURIComponent('p@ss:word/ü')}`
  const { store } = await as(password, '/3')
  t.ok((await claim(store)).done)
  t.match(await server.command('INFO', 'keyspace'), /db3:keys=2/)
  await server.command('ACL', 'SETUSER', 'app', '-info', '-evalsha')
  t.match(await store.traits(), {
    durable: null,
    evicts: null,
    findings: [/may not run INFO.* 503: ACL SETUSER <user> \+info grants it, store\.acceptRisk: true/],
  })
  await t.rejects(claim(store), { ...NOT_APPLIED, message: /NOPERM/ })
  await server.command('ACL', 'SETUSER', 'app', '+info', '+evalsha', '-ping', '-client')
  t.ok((await claim((await as(password)).store)).done, 'a greeting needs no rights')
  for (const [wrong, message] of [
    [await as(':wrong'), /WRONGPASS/],
    [await as(''), /WRONGPASS/],
    [await as(password, '/99'), /DB index is out of range/],
  ] as const) {
    await t.rejects(claim(wrong.store), { ...NOT_APPLIED, message })
    t.notMatch(JSON.stringify(wrong.events), /p@ss|connected/)
  }
})
