import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { RedisServer } from '../support/redis.ts'
import { claim, newId, until } from './fixtures.ts'
import { APPLIED, answers, NOT_APPLIED, open, takesClaims } from './redis-fixtures.ts'

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
