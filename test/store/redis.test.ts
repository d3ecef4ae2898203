import t from 'tap'
import { indexKey, RedisRegister, recordKey } from '../../src/store/redis.ts'
import { RedisServer } from '../support/redis.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, SPANS } from './fixtures.ts'

const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
let skew = 0
const open = () =>
  RedisRegister.open({ url: server.url, timeoutMs: 5000, onEvent: () => {}, skew: () => skew })

registerContract(t, 'redis', async () => {
  const [register, peer] = await Promise.all([open(), open()])
  await server.command('FLUSHALL')
  return {
    register,
    peer,
    tellsPeers: true,
    advance: (ms) => void (skew += ms),
    [Symbol.asyncDispose]: async () => void (await Promise.all([register.close(), peer.close()])),
  }
})

void t.test('the keys of one record share a hash tag of the fixed layout', async (t) => {
  const id = Buffer.alloc(32, 0xaf).toString('base64url') as ReturnType<typeof newId>
  t.equal(recordKey(id), `idempotency:{af}:r:${id}`)
  t.equal(indexKey(id), 'idempotency:{af}:u')
  const register = await open()
  t.teardown(() => register.close())
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  const ttl = Number(await server.command('PTTL', recordKey(id)))
  t.ok(ttl > SPANS.dropIn - HOUR && ttl <= SPANS.dropIn, 'the retention is the expiry, not the lease')
  const token = newToken()
  const { now } = await register.put(newId(), bytesOf('in_progress', token), SPANS)
  t.ok(Math.abs(now - skew - Date.now()) < HOUR)
})

void t.test('what is not a record of ours is given back by a claim and never overwritten', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  for (const foreign of ['x', 'y'.repeat(100)]) {
    const id = newId()
    await server.command('SET', recordKey(id), foreign)
    await server.command('ZADD', indexKey(id), 1, id)
    const bytes = bytesOf('in_progress', newToken())
    t.match(await register.put(id, bytes, SPANS), { done: false, bytes: Buffer.from(foreign) })
    t.match(await register.swap(id, { version: 1 }, bytes, SPANS, false), {
      done: false,
      bytes: Buffer.from(foreign),
    })
    t.same((await register.get(id)).bytes, Buffer.from(foreign))
    t.equal(await register.remove(id, 1), false)
    t.same(await register.due(10), [])
    t.equal(await server.command('GET', recordKey(id)), foreign)
    t.ok(await server.command('ZSCORE', indexKey(id), id), 'nor taken out of the index')
    await server.command('FLUSHALL')
  }
})

void t.test('due forgets members whose record has gone', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const [gone, there] = [newId(), newId()]
  for (const id of [gone, there])
    await register.put(id, bytesOf('unknown', newToken()), { dueIn: 0, dropIn: HOUR })
  await server.command('DEL', recordKey(gone))
  t.same(await register.due(10), [there])
  t.equal(await server.command('ZSCORE', indexKey(gone), gone), null)
})

void t.test('a value of another type is a corrupt record', async (t) => {
  const register = await open()
  t.teardown(() => register.close())
  const id = newId()
  await server.command('RPUSH', recordKey(id), 'x')
  const bytes = bytesOf('in_progress', newToken())
  await t.rejects(register.put(id, bytes, SPANS), { name: 'CorruptRecord' })
  await t.rejects(register.swap(id, { version: 1 }, bytes, SPANS, false), { name: 'CorruptRecord' })
  await t.rejects(register.get(id), { name: 'CorruptRecord' })
  t.equal(await server.command('TYPE', recordKey(id)), 'list')
})
