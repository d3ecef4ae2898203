import { setTimeout as wait } from 'node:timers/promises'
import t from 'tap'
import { newKey, send, until } from '../support/e2e.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream, replicas } from '../support/replicas.ts'

t.setTimeout(60_000)
t.jobs = 2

void t.test('Y21 a store that is flushed again and again: 503 within twice the grace', async (t) => {
  await using redis = await RedisServer.start()
  const upstream = await heldUpstream(t)
  const yaml = `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", grace: 1s }\n`
  const [proxy] = await replicas(t, 1, yaml)
  if (proxy === undefined) throw new Error('no proxy')
  t.match(await send(proxy, newKey(), { path: '/fast' }), { status: 201 })
  const flushing = new AbortController()
  const flushed = (async () => {
    while (!flushing.signal.aborted) {
      await redis.command('FLUSHALL')
      await wait(750, undefined, { signal: flushing.signal }).catch(() => {})
    }
  })()
  await until(async () => (await proxy.metric('idempotency_store_in_grace{store="redis"}')) === 1)
  const since = performance.now()
  t.match(await send(proxy, newKey()), { status: 503, code: 'idempotency_store_unavailable' })
  const took = performance.now() - since
  t.ok(took > 1700 && took < 2900, `held for ${Math.round(took)} ms`)
  t.equal(upstream.seen.length, 1)
  flushing.abort()
  await flushed
})

void t.test(
  'Y21 outcomes that an outage has deferred are in the store within a second of its return',
  async (t) => {
    await using redis = await RedisServer.start()
    const upstream = await heldUpstream(t)
    const yaml = `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}" }\n`
    const [a, b] = await replicas(t, 2, yaml)
    if (a === undefined || b === undefined) throw new Error('two replicas')
    const key = newKey()
    const first = send(a, key)
    await until(() => upstream.seen.length === 1)
    await redis.kill()
    upstream.finish(1)
    t.match(await first, { status: 201 })
    await until(async () => (await a.metric('idempotency_breaker_state{store="redis"}')) > 0)
    // Pauses between probes and between retries have grown.
    await wait(2000)
    t.equal(await a.metric('idempotency_spooled'), 1)
    await redis.start()
    const since = performance.now()
    await until(async () => (await a.metric('idempotency_spooled')) === 0)
    t.ok(performance.now() - since < 1000, `after ${Math.round(performance.now() - since)} ms`)
    await until(async () => (await send(b, key)).status !== 503)
    t.match(await send(b, key), { status: 201, replayed: true })
    t.equal(upstream.seen.length, 1)
  },
)
