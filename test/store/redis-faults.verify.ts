import { dirname } from 'node:path'
import { getCACertificates, setDefaultCACertificates } from 'node:tls'
import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { BREAKER_DEFAULTS, type BreakerState, withBreaker } from '../../src/store/around.ts'
import { certificate } from '../support/certificates.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { claim, newId, until } from './fixtures.ts'
import { APPLIED, answers, end, NOT_APPLIED, open, takesClaims, watch } from './redis-fixtures.ts'

/* A real server that is down, hangs, restarts or is a replica. What it may answer: redis-connection.test.ts. */

/** Until a command to a server that hangs is given up. */
const FAST: Millis = 300

void t.test('it opens without Redis, refuses at once, and connects when it is up', async (t) => {
  await using server = await RedisServer.start()
  await server.stop()
  const { store, events } = await open(t, server.url)
  const id = newId()
  await t.rejects(claim(store, id), {
    ...NOT_APPLIED,
    message: /not connected: .*ECONNREFUSED/,
  })
  await t.rejects(store.traits(), NOT_APPLIED)
  await server.start()
  await until(answers(store))
  t.equal((await store.get(id)).bytes, null, 'nothing was queued while it was down')
  // A server that reads its file answers LOADING, which is another one.
  const refused = events.filter((event) => event.startsWith('error') && event.includes('ECONNREFUSED'))
  t.equal(refused.length, 1, 'the same error is reported once')
  t.equal(events.at(-1), `connected: 127.0.0.1:${server.port}`)
  await server.stop()
  await until(() => events.at(-1)?.includes('ECONNREFUSED') ?? false)
  t.ok(events.some((event) => event.startsWith('disconnected')))
})

void t.test('R03 operations on a hanging Redis time out, and it is used again when it answers', async (t) => {
  await using server = await RedisServer.start()
  const { store, events } = await open(t, server.url, { timeoutMs: FAST })
  await until(takesClaims(store))
  const id = newId()
  server.pause()
  const first = await Promise.allSettled([claim(store, id), store.get(id), store.ping()])
  for (const one of first) t.match(one, { status: 'rejected', reason: { ...APPLIED, message: /timed out/ } })
  await Promise.allSettled([store.ping(), store.ping(), store.ping()])
  await until(() => events.some((event) => event.startsWith('disconnected')))
  await t.rejects(store.ping(), NOT_APPLIED, 'a wholly silent connection is given up')
  server.resume()
  const read = () => store.get(id).catch(() => null)
  await until(async () => (await read()) !== null)
  t.equal((await read())?.bytes, null, 'nothing is applied after its caller has given up')
})

void t.test('commands in flight when the connection breaks are not sent again', async (t) => {
  await using server = await RedisServer.start()
  const { store } = await open(t, server.url)
  const ids = [newId(), newId()]
  server.pause()
  const pending = Promise.allSettled(ids.map((id) => claim(store, id)))
  await new Promise(setImmediate)
  await new Promise(setImmediate)
  await server.kill()
  for (const one of await pending) t.match(one, { status: 'rejected', reason: APPLIED })
  await server.start()
  await until(answers(store))
  for (const id of ids) t.equal((await store.get(id)).bytes, null)
})

void t.test('a read-only replica refuses claims, and is used once it is promoted', async (t) => {
  await using primary = await RedisServer.start({ args: ['--repl-diskless-sync-delay', '0'] })
  await using replica = await RedisServer.start({ args: ['--replicaof', '127.0.0.1', String(primary.port)] })
  await until(async () =>
    String(await replica.command('INFO', 'replication')).includes('master_link_status:up'),
  )
  const { store, events } = await open(t, replica.url)
  t.ok((await store.traits()).refusals.some((refusal) => refusal.includes('read-only replica')))
  await t.rejects(claim(store), { ...NOT_APPLIED, message: /READONLY/ })
  await until(() => events.filter((event) => event.startsWith('connected')).length === 2)
  t.pass('it reconnected: the name may lead to another server by now')
  await replica.command('REPLICAOF', 'NO', 'ONE')
  await until(answers(store))
  t.ok((await claim(store)).done)
})

void t.test('R09 a server that starts again has its records, and gets its scripts again', async (t) => {
  await using server = await RedisServer.start()
  const { store } = await open(t, server.url)
  const id = newId()
  t.ok((await claim(store, id)).done)
  await server.restart()
  await until(answers(store))
  t.ok((await store.get(id)).bytes)
})

void t.test('TLS: the certificate is verified', async (t) => {
  using own = certificate('IP:127.0.0.1')
  await using server = await RedisServer.start({ tls: dirname(own.certFile) })
  const stranger = await open(t, server.url)
  await t.rejects(stranger.store.ping(), { ...NOT_APPLIED, message: /self-signed certificate/ })
  const before = getCACertificates('default')
  setDefaultCACertificates([...before, String(own.cert)])
  t.teardown(() => setDefaultCACertificates(before))
  const { store } = await open(t, server.url)
  const id = newId()
  t.ok((await claim(store, id)).done)
  t.ok((await store.get(id)).bytes)
})

void t.test('R13 the breaker opens while Redis hangs, answers at once, and closes by itself', async (t) => {
  await using server = await RedisServer.start()
  const { store } = await open(t, server.url, { timeoutMs: FAST })
  const states: BreakerState[] = []
  const options = {
    ...BREAKER_DEFAULTS,
    probeAfter: 20,
    probeAtMost: 100,
    onState: (s: BreakerState) => void states.push(s),
  }
  const breaker = withBreaker(store, options)
  t.teardown(() => breaker.close())
  server.pause()
  await Promise.allSettled(Array.from({ length: 5 }, () => breaker.get(newId())))
  t.equal(states[0], 'open')
  await t.rejects(breaker.get(newId()), { ...NOT_APPLIED, message: /breaker open/ })
  server.resume()
  await until(() => states.at(-1) === 'closed')
  await until(() =>
    breaker.get(newId()).then(
      () => true,
      () => false,
    ),
  )
})

void t.test('close also ends without Redis', async (t) => {
  const down = await open(t, `redis://127.0.0.1:${await freePort()}`)
  await down.store.close()
  await t.rejects(down.store.ping(), NOT_APPLIED)
  await using server = await RedisServer.start()
  const hanging = await open(t, server.url)
  server.pause()
  const pending = t.rejects(hanging.store.ping(), APPLIED)
  await hanging.store.close()
  await pending
})

void t.test('a busy event loop is not mistaken for a silent Redis', async (t) => {
  await using server = await RedisServer.start()
  const { store } = await open(t, server.url, { timeoutMs: 500 })
  const asked = store.ping()
  await new Promise(setImmediate)
  await new Promise(setImmediate)
  // Long enough for the server to answer, whatever else the machine does.
  const busyUntil = performance.now() + 5000
  while (performance.now() < busyUntil);
  t.ok(await asked)
})

void t.test('every watcher, even one added during an outage, is notified after it', async (t) => {
  await using server = await RedisServer.start()
  const { store } = await open(t, server.url)
  const [early, late] = [newId(), newId()]
  const first = await watch(store, early)
  await server.stop()
  // One that knows the server as down only.
  const other = await open(t, server.url)
  const watchers = [
    first,
    await watch(store, late),
    await watch(store, early),
    await watch(other.store, late),
  ]
  const silent = await watch(other.store)
  silent.stop()
  t.ok(watchers.every(({ told }) => told === 0))
  await server.start()
  await until(() => watchers.every(({ told }) => told === 1))
  await until(answers(store))
  await end(store, late)
  await until(() => watchers[1]?.told === 2 && watchers[3]?.told === 2)
  t.equal(silent.told, 0)
})

for (const connected of [false, true])
  void t.test(
    `a server that hangs ${connected ? 'after the first watch' : 'from the first watch on'} blocks no watch`,
    async (t) => {
      await using server = await RedisServer.start()
      const { store } = await open(t, server.url, { timeoutMs: FAST })
      const [id, early] = [newId(), newId()]
      const before = connected ? [await watch(store, early)] : []
      server.pause()
      const watchers = await Promise.all([watch(store, id), watch(store, id)])
      server.resume()
      // Not the earlier one: a server that is back just in time keeps its connection.
      await until(() => watchers.every(({ told }) => told > 0))
      await until(answers(store))
      const all = [...watchers, ...before]
      const told = all.map((watcher) => watcher.told)
      await end(store, id)
      await end(store, early)
      await until(() => all.every((watcher, n) => watcher.told > (told[n] as number)))
    },
  )
