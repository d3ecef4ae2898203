import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { RedisServer } from '../support/redis.ts'
import { claim, newId, until } from './fixtures.ts'
import { APPLIED, NOT_APPLIED, open, takesClaims } from './redis-fixtures.ts'

/* A real server that is down, hangs, restarts or is a replica. What it may answer: redis-connection.test.ts. */

/** Until a command to a server that hangs is given up. */
const FAST: Millis = 300

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
