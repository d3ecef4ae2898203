import t from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { counting, proxyOf, verdict } from '../support/shadow.ts'
import { valueOf } from '../support/upstream.ts'

t.setTimeout(200_000)

void t.test(
  'O06 while Redis hangs, shadow mode forwards every request; afterwards enforce replays the responses',
  async (t) => {
    const redis = await RedisServer.start()
    t.teardown(() => redis[Symbol.asyncDispose]())
    const upstream = await counting(t)
    const shadow = await proxyOf(t, upstream, redis.url, 'mode: shadow')
    const keys = [newKey(), newKey(), newKey()]
    await send(shadow, newKey())
    await verdict(shadow, 'first')
    redis.pause()
    const replies: Reply[] = []
    for (const key of keys) replies.push(await send(shadow, key))
    t.same(
      replies.map(({ status }) => status),
      [201, 201, 201],
      'answered although Redis did not answer',
    )
    await verdict(shadow, 'store_unavailable', 3)
    redis.resume()
    await until(async () => (await shadow.metric('idempotency_spooled')) === 0)
    await shadow.drain()
    const enforce = await proxyOf(t, upstream, redis.url, 'mode: enforce')
    for (const [i, key] of keys.entries())
      t.match(await send(enforce, key), { body: replies[i]?.body, replayed: true })
    t.equal(upstream.seen.length, 4)
  },
)

void t.test(
  'after duplicates with mixed results on two shadow replicas, enforce executes no completed key',
  async (t) => {
    const redis = await RedisServer.start()
    t.teardown(() => redis[Symbol.asyncDispose]())
    const done = new Set<string>()
    const open = new Set<string>()
    const makes = ['done', 'refused', 'busy', 'reset', 'slow'] as const
    let n = 0
    const upstream = await counting(t, async (seen, response, request) => {
      const key = valueOf(seen, 'idempotency-key')
      n++
      // Spread evenly, and differently over the requests of one key.
      const make = makes[(n * 7 + Math.floor(n / 3)) % makes.length]
      if (make === 'slow') await new Promise((next) => setTimeout(next, 30))
      if (make === 'done' || make === 'slow') done.add(key)
      else if (make === 'reset') {
        open.add(key)
        request.socket.resetAndDestroy()
      } else response.writeHead(make === 'refused' ? 401 : 503, { 'retry-after': '1' }).end()
    })
    const shadows = [0, 1].map(() => proxyOf(t, upstream, `${redis.url}", timeout: "10s`, 'mode: shadow'))
    const keys = Array.from({ length: 50 }, newKey)
    const asked: Promise<unknown>[] = []
    for (let i = 0; i < 4; i++)
      for (const key of keys) {
        const proxy = (await shadows[i % 2]) as TestProxy
        asked.push(send(proxy, key))
      }
    await Promise.all(asked)
    t.equal(n, 200, 'each of them was forwarded')
    for (const proxy of shadows) await (await proxy).drain()
    const [wasDone, wasOpen] = [new Set(done), new Set(open)]
    t.ok(wasDone.size > 0 && wasOpen.size > 0)

    const enforce = await proxyOf(t, upstream, redis.url, '')
    const again = await Promise.all(keys.map(async (key) => [key, await send(enforce, key)] as const))
    const executed = upstream.seen.slice(200).map(({ headers }) => headers.join())
    for (const [key, reply] of again) {
      const times = executed.filter((lines) => lines.includes(key)).length
      if (wasDone.has(key)) t.ok(reply.replayed && times === 0, 'done: replayed')
      else if (wasOpen.has(key))
        t.ok(reply.code === 'idempotency_outcome_unknown' && times === 0, 'open: refused')
      else t.equal(times, 1, 'nothing was done: executed, once')
    }
  },
)
