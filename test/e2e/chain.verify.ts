import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { type Link, proxyOn } from '../support/chain.ts'
import { newKey, send } from '../support/e2e.ts'
import { type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
t.beforeEach(async () => void (await redis.command('FLUSHALL')))

const proxyOf = (t: Test, ...link: Link) => proxyOn(t, redis, ...link)

void t.test(
  'V04 clients that retry through either proxy while everything breaks execute a key at most once',
  async (t) => {
    const executed = new Map<string, number>()
    let turn = 0
    await using upstream = await upstreamStub(async (seen, response) => {
      const how = turn++ % 6
      // A refused request is not executed.
      if (how === 0) return void response.writeHead(429, { 'Retry-After': '1' }).end()
      if (how === 1) return void response.writeHead(503, { 'Idempotency-Outcome': 'not-applied' }).end()
      const [key = ''] = linesOf(seen.headers, 'idempotency-key')
      executed.set(key, (executed.get(key) ?? 0) + 1)
      if (how === 2) response.destroy()
      else if (how === 3) setTimeout(() => response.writeHead(201).end('late'), 700)
      else if (how === 4) response.writeHead(201, { 'Content-Length': '9' }).end('cut')
      else response.writeHead(201).end('done')
    })
    const sidecars = await Promise.all([
      proxyOf(t, 'sidecar', upstream.url),
      proxyOf(t, 'sidecar', upstream.url),
    ])
    const gateways = await Promise.all(
      sidecars.map(({ url }) => proxyOf(t, 'gateway', url, ', respondWithin: 300ms, lease: 1s')),
    )
    const doors = [...gateways, ...sidecars]
    const keys = Array.from({ length: 40 }, newKey)
    await Promise.all(
      keys.map(async (key, n) => {
        for (let tries = 0; tries < 8; tries++) {
          const door = doors[(n + tries) % doors.length] as TestProxy
          const reply = await send(door, key).catch(() => null)
          if (reply?.status === 201) return
          await wait(100)
        }
      }),
    )
    t.same(
      [...executed].filter(([, n]) => n > 1),
      [],
    )
    t.ok(executed.size > 20, `${executed.size} were executed`)
  },
)
