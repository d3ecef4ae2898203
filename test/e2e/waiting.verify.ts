import t from 'tap'
import { newKey, send } from '../support/e2e.ts'
import { type TestProxy } from '../support/proxy.ts'
import { emptyRedis, RedisServer } from '../support/redis.ts'
import { heldUpstream, replicas, waitersAre } from '../support/replicas.ts'
import { many, oneAnswer, yamlOf } from '../support/waiting.ts'

t.setTimeout(240_000)

const redis = await emptyRedis(t)
void t.test(
  'I04 a completion reaches duplicates on other replicas, also where a Redis user without channels makes one poll',
  async (t) => {
    const upstream = await heldUpstream(t)
    await redis.command('ACL', 'SETUSER', 'quiet', 'on', '>secret', '~*', 'resetchannels', '+@all')
    const quiet = redis.url.replace('//', '//quiet:secret@')
    const [owner, woken] = (await replicas(t, 2, yamlOf(upstream, redis.url))) as [TestProxy, TestProxy]
    const [polling] = (await replicas(t, 1, yamlOf(upstream, quiet))) as [TestProxy]
    const key = newKey()
    const first = send(owner, key)
    await upstream.arrived(1)
    const replies = [send(polling, key)]
    await waitersAre([polling], 1)
    replies.push(send(woken, key))
    await waitersAre([woken], 1)
    upstream.finish(1)
    oneAnswer(t, [await first, ...(await Promise.all(replies))])

    const another = newKey()
    const second = send(polling, another)
    await upstream.arrived(2)
    const waiting = [woken, owner, polling].map((proxy) => send(proxy, another))
    await waitersAre([woken, owner, polling], 3)
    upstream.finish(2)
    oneAnswer(t, [await second, ...(await Promise.all(waiting))])
    t.equal(upstream.seen.length, 2)
  },
)

for (const when of ['before', 'after'] as const)
  void t.test(`R04 Redis is killed while duplicates wait, and is back ${when} the first ends`, async (t) => {
    await using server = await RedisServer.start()
    const upstream = await heldUpstream(t)
    const all = await replicas(t, 3, yamlOf(upstream, server.url))
    const on = (i: number) => all[i % 3] as TestProxy
    const key = newKey()
    const first = send(on(0), key)
    await upstream.arrived(1)
    const held = many(12, (i) => send(on(i), key))
    await waitersAre(all, 12)
    await server.kill()
    if (when === 'after') {
      upstream.finish(1)
      t.match(await first, { status: 201, body: 'execution 1', replayed: false })
      t.equal((await send(on(1), key)).code, 'idempotency_store_unavailable')
    }
    await server.start()
    if (when === 'before') upstream.finish(1)
    oneAnswer(t, [await first, ...(await Promise.all(held))])
    t.equal(upstream.seen.length, 1)
    await waitersAre(all, 0)
  })
