import { execFileSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { type AddressInfo, createServer } from 'node:net'
import { join } from 'node:path'
import { getCACertificates, setDefaultCACertificates } from 'node:tls'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { BREAKER_DEFAULTS, type BreakerState, withBreaker } from '../../src/store/around.ts'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import { runIdOf } from '../../src/store/redis-connection.ts'
import { redisFailure } from '../../src/store/redis-link.ts'
import { lengthOf } from '../../src/store/redis-sentinel.ts'
import { redisTraits } from '../../src/store/redis-traits.ts'
import type { Store } from '../../src/store/register.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { bytesOf, newId, newToken, response, SPANS, tempDir, until } from './fixtures.ts'

const KEYS = new RedisKeys('pay')

const FAST: Millis = 300
const PATIENT: Millis = 10_000
const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }

const claim = () => bytesOf('in_progress', newToken())

async function open(t: Test, url: string, timeoutMs = PATIENT) {
  const events: string[] = []
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const register = await openRedisStore({ url, service: 'pay', timeoutMs, onEvent })
  t.teardown(() => register.close())
  return { register, events }
}

const answers = (register: Store) => () =>
  register.ping().then(
    () => true,
    () => false,
  )

void t.test('it opens without Redis, refuses at once, and connects when it is up', async (t) => {
  await using server = await RedisServer.start()
  await server.stop()
  const { register, events } = await open(t, server.url)
  const id = newId()
  await t.rejects(async () => register.put(id, claim(), SPANS), {
    ...NOT_APPLIED,
    message: /not connected: .*ECONNREFUSED/,
  })
  await t.rejects(register.traits(), NOT_APPLIED)
  await server.start()
  await until(answers(register))
  t.equal((await register.get(id)).bytes, null, 'nothing was queued while it was down')
  t.equal(events.filter((event) => event.startsWith('error')).length, 1, 'the same error is reported once')
  t.equal(events.at(-1), `connected: 127.0.0.1:${server.port}`)
  await server.stop()
  await until(() => events.at(-1)?.includes('ECONNREFUSED') ?? false)
  t.ok(events.some((event) => event.startsWith('disconnected')))
})

void t.test('R03 operations on a hanging Redis time out, and it is used again when it answers', async (t) => {
  await using server = await RedisServer.start()
  const { register, events } = await open(t, server.url, FAST)
  await register.put(newId(), claim(), SPANS)
  const id = newId()
  server.pause()
  const begun = performance.now()
  const first = await Promise.allSettled([
    register.put(id, claim(), SPANS),
    register.get(id),
    register.ping(),
  ])
  t.ok(performance.now() - begun < 10 * FAST)
  for (const one of first) t.match(one, { status: 'rejected', reason: { ...APPLIED, message: /timed out/ } })
  await Promise.allSettled([register.ping(), register.ping()])
  await until(() => events.some((event) => event.startsWith('disconnected')))
  await t.rejects(register.ping(), NOT_APPLIED, 'a wholly silent connection is given up')
  server.resume()
  await until(answers(register))
  t.ok((await register.get(id)).bytes, 'the claim had been applied, as maybeApplied said')
})

void t.test('a slow answer does not end the connection', async (t) => {
  await using server = await RedisServer.start()
  const { register, events } = await open(t, server.url, FAST)
  for (let n = 0; n < 6; n++) {
    server.pause()
    const late = register.ping()
    await t.rejects(late, APPLIED)
    server.resume()
    await until(answers(register))
  }
  t.same(events, [`connected: 127.0.0.1:${server.port}`])
})

void t.test('commands in flight when the connection breaks are not sent again', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const ids = [newId(), newId()]
  server.pause()
  const pending = Promise.allSettled(ids.map(async (id) => register.put(id, claim(), SPANS)))
  await new Promise(setImmediate)
  await new Promise(setImmediate)
  await server.kill()
  for (const one of await pending) t.match(one, { status: 'rejected', reason: APPLIED })
  await server.start()
  await until(answers(register))
  for (const id of ids) t.equal((await register.get(id)).bytes, null)
})

void t.test('R08 out of memory, Redis refuses new claims and still takes small outcomes', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const id = newId()
  const token = newToken()
  await register.put(id, bytesOf('in_progress', token), SPANS)
  await server.command('CONFIG', 'SET', 'maxmemory', '1')
  const full = { name: 'StoreFull', maybeApplied: false, message: /Redis is full: OOM/ }
  const other = newId()
  await t.rejects(async () => register.put(other, claim(), SPANS), full)
  t.match(await register.put(id, claim(), SPANS), { done: false })
  t.same(await register.renew([{ id, token, dueIn: 1000, dropIn: 0 }]), [true])
  const own = { token, states: ['in_progress'] } as const
  const large = bytesOf('completed', token, { result: response(Buffer.alloc(100_000)) })
  await t.rejects(async () => register.swap(id, own, large, SPANS, false), full)
  t.ok((await register.swap(id, own, bytesOf('completed', token), SPANS, false)).done)
  await server.command('CONFIG', 'SET', 'maxmemory', '0')
  t.ok((await register.put(other, claim(), SPANS)).done)
})

void t.test('a read-only replica refuses claims, and is used once it is promoted', async (t) => {
  await using primary = await RedisServer.start({ args: ['--repl-diskless-sync-delay', '0'] })
  await using replica = await RedisServer.start({ args: ['--replicaof', '127.0.0.1', String(primary.port)] })
  await until(async () =>
    String(await replica.command('INFO', 'replication')).includes('master_link_status:up'),
  )
  const { register, events } = await open(t, replica.url)
  t.ok((await register.traits()).refusals.some((refusal) => refusal.includes('read-only replica')))
  await t.rejects(async () => register.put(newId(), claim(), SPANS), { ...NOT_APPLIED, message: /READONLY/ })
  await until(() => events.filter((event) => event.startsWith('connected')).length === 2)
  t.pass('it reconnected: the name may lead to another server by now')
  await replica.command('REPLICAOF', 'NO', 'ONE')
  await until(answers(register))
  t.ok((await register.put(newId(), claim(), SPANS)).done)
})

void t.test('R09 scripts that Redis has forgotten are sent again, unnoticed by the caller', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const id = newId()
  t.ok((await register.put(id, claim(), SPANS)).done)
  await server.command('SCRIPT', 'FLUSH')
  t.ok((await register.put(newId(), claim(), SPANS)).done)
  await server.restart()
  await until(answers(register))
  t.ok((await register.get(id)).bytes, 'and with appendonly the records are still there')
  await server.command('SCRIPT', 'FLUSH')
  await server.command('DEL', KEYS.record(id))
  await server.command('RPUSH', KEYS.record(id), 'x')
  await t.rejects(register.get(id), { name: 'CorruptRecord' }, 'errors of the second try are reported alike')
})

void t.test('user and password of the URL are used, and no event shows the password', async (t) => {
  await using server = await RedisServer.start()
  const rights = ['on', '>p@ss:word/ü', '~idempotency:*', '+@all']
  await server.command('ACL', 'SETUSER', 'app', ...rights)
  const url = (password: string) => `redis://app:${encodeURIComponent(password)}@127.0.0.1:${server.port}`
  const { register } = await open(t, url('p@ss:word/ü'))
  t.ok((await register.put(newId(), claim(), SPANS)).done)
  await server.command('ACL', 'SETUSER', 'app', '-info', '-evalsha')
  t.match(await register.traits(), {
    durable: null,
    evicts: null,
    findings: [/may not run INFO.* 503: ACL SETUSER <user> \+info grants it, store\.acceptRisk: true/],
  })
  await t.rejects(async () => register.put(newId(), claim(), SPANS), { ...NOT_APPLIED, message: /NOPERM/ })
  await server.command('ACL', 'SETUSER', 'app', '+info', '+evalsha')
  const wrong = await open(t, url('wrong'))
  await t.rejects(async () => wrong.register.put(newId(), claim(), SPANS), {
    ...NOT_APPLIED,
    message: /WRONGPASS/,
  })
  const none = await open(t, `redis://app@127.0.0.1:${server.port}`)
  await t.rejects(none.register.ping(), NOT_APPLIED)
  t.notMatch(JSON.stringify([wrong.events, none.events]), /p@ss/)
})

void t.test('TLS: the certificate is verified', async (t) => {
  using dir = tempDir()
  const request = 'req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=redis'
  const files = ['-keyout', join(dir.path, 'key.pem'), '-out', join(dir.path, 'cert.pem')]
  const names = ['-addext', 'subjectAltName=IP:127.0.0.1']
  execFileSync('openssl', [...request.split(' '), ...names, ...files], { stdio: 'ignore' })
  await using server = await RedisServer.start({ tls: dir.path })
  const stranger = await open(t, server.url)
  await t.rejects(stranger.register.ping(), { ...NOT_APPLIED, message: /self-signed certificate/ })
  const before = getCACertificates('default')
  setDefaultCACertificates([...before, readFileSync(join(dir.path, 'cert.pem'), 'utf8')])
  t.teardown(() => setDefaultCACertificates(before))
  const { register } = await open(t, server.url)
  const id = newId()
  t.ok((await register.put(id, claim(), SPANS)).done)
  t.ok((await register.get(id)).bytes)
})

void t.test(
  'the database of the URL is used; one that Redis refuses is an outage, not database 0',
  async (t) => {
    await using server = await RedisServer.start()
    const { register } = await open(t, `${server.url}/3`)
    await register.put(newId(), claim(), SPANS)
    t.match(await server.command('INFO', 'keyspace'), /db3:keys=2/)
    const wrong = await open(t, `${server.url}/99`)
    await t.rejects(async () => wrong.register.put(newId(), claim(), SPANS), {
      ...NOT_APPLIED,
      message: /DB index is out of range/,
    })
    t.notMatch(await server.command('INFO', 'keyspace'), /db0/)
    t.notOk(wrong.events.some((event) => event.startsWith('connected')))
  },
)

void t.test('R07 traits report eviction and persistence', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  t.match(await register.traits(), {
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
  t.match(await register.traits(), {
    durable: false,
    evicts: true,
    findings: [/appendonly is off/, /allkeys-lru, not noeviction/],
  })
  const strange = redisTraits(
    'redis_version:6.2.1\r\nrole:master\r\ncluster_enabled:1\r\naof_enabled:1\r\n',
    false,
    null,
  )
  t.match(strange, {
    durable: true,
    evicts: null,
    findings: [/does not say what maxmemory-policy is/],
    refusals: [/6\.2\.1 is too old/, /node of a cluster/],
  })
  for (const garbage of [
    '',
    'garbage',
    'maxmemory_policy:\r\naof_enabled:\r\n',
    'maxmemory_policy\naof_enabled',
  ])
    t.match(redisTraits(garbage, false, null), {
      durable: null,
      evicts: null,
      findings: [/whether appendonly is on/, /what maxmemory-policy is/],
    })
})

void t.test('R13 the breaker opens while Redis hangs, answers at once, and closes by itself', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url, FAST)
  const states: BreakerState[] = []
  const options = {
    ...BREAKER_DEFAULTS,
    probeAfter: 20,
    probeAtMost: 100,
    onState: (s: BreakerState) => void states.push(s),
  }
  const breaker = withBreaker(register, options)
  t.teardown(() => breaker.close())
  server.pause()
  await Promise.allSettled(Array.from({ length: 5 }, () => breaker.get(newId())))
  t.equal(states[0], 'open')
  const begun = performance.now()
  await t.rejects(breaker.get(newId()), { ...NOT_APPLIED, message: /breaker open/ })
  t.ok(performance.now() - begun < FAST)
  server.resume()
  await until(() => states.at(-1) === 'closed')
  t.equal((await breaker.get(newId())).bytes, null)
})

void t.test('close also ends without Redis', async (t) => {
  const down = await openRedisStore({
    url: `redis://127.0.0.1:${await freePort()}`,
    service: 'pay',
    timeoutMs: FAST,
    onEvent() {},
  })
  await down.close()
  await t.rejects(down.ping(), NOT_APPLIED)
  await using server = await RedisServer.start()
  const hanging = await openRedisStore({ url: server.url, service: 'pay', timeoutMs: FAST, onEvent() {} })
  server.pause()
  const pending = t.rejects(hanging.ping(), APPLIED)
  await hanging.close()
  await pending
})

void t.test('error replies mean that nothing was applied', async (t) => {
  for (const code of [
    'READONLY',
    'MISCONF',
    'LOADING',
    'NOAUTH',
    'WRONGPASS',
    'NOPERM',
    'CLUSTERDOWN',
    'MOVED',
    'ERR',
  ])
    t.match(redisFailure(`${code} because`), NOT_APPLIED, code)
  t.match(redisFailure('OOM command not allowed'), { name: 'StoreFull', maybeApplied: false })
  t.match(redisFailure('WRONGTYPE Operation'), { name: 'CorruptRecord' })
})

/** A server that answers each of these commands with these bytes, whatever is asked. */
async function answering(t: Test, replies: Readonly<Record<string, string>>): Promise<string> {
  const command = new RegExp(`\\r\\n(${Object.keys(replies).join('|')})\\r\\n`, 'g')
  const server = createServer((socket) => {
    socket.on('error', () => {})
    socket.on('data', (bytes) => {
      for (const [, name = ''] of bytes.toString('latin1').matchAll(command))
        socket.write(replies[name] ?? '')
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  return `redis://127.0.0.1:${(server.address() as AddressInfo).port}`
}

void t.test('a reply of the wrong form for its command is refused', async (t) => {
  const greeting = { ping: '+PONG\r\n', client: '+OK\r\n' }
  const time = '*2\r\n$1\r\n1\r\n$1\r\n0\r\n'
  const stranger = await open(t, await answering(t, { ...greeting, ping: '+OK\r\n' }))
  await t.rejects(stranger.register.ping(), NOT_APPLIED, 'an unexpected answer to the greeting')
  const one = await open(t, await answering(t, { ...greeting, time: ':1\r\n' }))
  await t.rejects(one.register.ping(), APPLIED, 'no array')
  const place = '*2\r\n$1\r\na\r\n$1\r\n0\r\n'
  const index = await open(t, await answering(t, { ...greeting, time: place }))
  await t.rejects(index.register.ping(), APPLIED, 'an id and its time')
  const odd = { ...greeting, time, zrangebyscore: '*1\r\n$1\r\na\r\n' }
  const { register } = await open(t, await answering(t, odd))
  t.equal(await register.ping(), 1000)
  await t.rejects(register.due(10), APPLIED, 'an id without its time')
})

void t.test('a server without a run_id has no identity, and malformed replies throw', async (t) => {
  t.equal(runIdOf(Buffer.from('redis_version:7.0.0\r\n')), '')
  t.throws(() => runIdOf(7), /do not match/)
  t.throws(() => lengthOf(Buffer.from('3')), /do not match/)
  t.equal(redisTraits('redis_version:7.0.0\r\n', false, null).hasIdentity, false)
})
