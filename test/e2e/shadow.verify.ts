import t from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { RedisServer } from '../support/redis.ts'
import { counting, proxyOf, verdict } from '../support/shadow.ts'

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
