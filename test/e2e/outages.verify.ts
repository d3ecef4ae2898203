import t, { type Test } from 'tap'
import { configFile, gate, newKey, redisSnapshot, STATE, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { SHARED, type SharedKind, sharedServers } from '../support/shared.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

/** With a Redis for this test alone. */
async function world(t: Test, args: readonly string[] = []) {
  const redis = await RedisServer.start({ args })
  t.teardown(() => redis[Symbol.asyncDispose]())
  return { redis, ...(await before(t, redis)) }
}

const servers = await sharedServers(t)

/** The same with a shared store of either kind, which the test leaves running. */
async function worldOn(t: Test, kind: SharedKind) {
  const store = servers[kind]
  await store.clear()
  return { store, ...(await before(t, store)) }
}

/** An upstream whose responses differ and whose `/gated…` waits; starts replicas of the proxy. */
async function before(t: Test, server: { readonly url: string }) {
  const work = gate()
  let n = 0
  const upstream = await upstreamStub(async ({ target }, response) => {
    const answer = `execution ${++n}`
    if (target.startsWith('/gated')) await work.opened
    response.writeHead(201).end(answer)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const start = async (more = '', store = `{ url: "${server.url}" }`): Promise<TestProxy> => {
    const proxy = await proxyInProcess(
      `upstream: { url: "${upstream.url}" }\nstore: ${store}\ndrain: { timeout: 100ms }\n${more}`,
    )
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  return { upstream, work, start }
}

const up = (kind: SharedKind) => `idempotency_store_up{store="${kind}"}`
const breaker = (kind: SharedKind) => `idempotency_breaker_state{store="${kind}"}`

async function unavailable(t: Test, proxy: TestProxy, key: string, path = '/pay'): Promise<void> {
  const { status, code, headers } = await send(proxy, key, { path })
  t.strictSame([status, code], [503, 'idempotency_store_unavailable'])
  t.ok(Number(headers.get('retry-after')) >= 1)
}

for (const kind of SHARED)
  void t.test(
    `R01 ${kind} is down at the claim: 503, N=0; traffic without keys is not affected`,
    async (t) => {
      const { store, upstream, start } = await worldOn(t, kind)
      const proxy = await start()
      const key = newKey()
      await store.stop()
      await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
      await unavailable(t, proxy, key)
      t.equal(upstream.seen.length, 0)
      t.equal(await proxy.metric(up(kind)), 0)
      t.equal((await send(proxy, null)).status, 201)
      t.equal((await fetch(proxy.url)).status, 201)
      t.equal(
        (await fetch(`${proxy.adminUrl}/readyz`)).status,
        200,
        'a shared store that is down must not take the whole fleet out of service',
      )
      await store.start()
      await until(async () => (await send(proxy, key)).status === 201)
      t.ok((await send(proxy, key)).replayed)
      t.equal(await proxy.metric(up(kind)), 1)
    },
  )

for (const kind of ['redis'] as const)
  void t.test(
    `R02 bypass forwards, counts and marks a request, and settles it when the store is back: ${kind}`,
    async (t) => {
      const { store, upstream, start } = await worldOn(t, kind)
      const proxy = await start('defaults: { onStoreUnavailable: bypass, statusHeader: true }')
      const key = newKey()
      await store.stop()
      await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
      const reply = await send(proxy, key)
      t.strictSame([reply.status, reply.body, reply.replayed], [201, 'execution 1', false])
      t.equal(reply.headers.get('idempotency-status'), 'bypassed')
      t.equal(await proxy.metric('idempotency_requests_total{route="default",outcome="bypassed"}'), 1)
      t.equal((await send(proxy, key)).body, 'execution 1', 'this replica knows the outcome')
      await store.start()
      await until(async () => (await store.count()) >= 1)
      const other = await start()
      const retry = await send(other, key)
      t.strictSame([retry.body, retry.replayed], ['execution 1', true])
      t.equal(upstream.seen.length, 1)
    },
  )

for (const kind of SHARED)
  void t.test(
    `R03 ${kind} hangs: requests get 503, then the breaker opens, and no claim wedges its key`,
    async (t) => {
      const { store, upstream, start } = await worldOn(t, kind)
      const proxy = await start()
      t.equal((await send(proxy, newKey())).status, 201)
      store.pause()
      const keys = Array.from({ length: 10 }, newKey)
      await Promise.all(keys.map((key) => unavailable(t, proxy, key)))
      t.equal(upstream.seen.length, 1)
      await until(async () => (await proxy.metric(breaker(kind))) > 0)
      await unavailable(t, proxy, newKey())
      t.equal((await send(proxy, null)).status, 201)
      store.resume()
      // The claims that hung may have reached the store: none of them wedges its key.
      for (const key of keys) await until(async () => (await send(proxy, key)).status === 201)
      for (const key of keys) t.ok((await send(proxy, key)).replayed)
      t.equal(upstream.seen.length, 12)
    },
  )

for (const kind of SHARED)
  void t.test(`R04 R05 ${kind} dies between claim and completion: the outcome is kept`, async (t) => {
    const { store, upstream, work, start } = await worldOn(t, kind)
    const proxy = await start()
    const key = newKey()
    const asked = send(proxy, key, { path: '/gated' })
    await upstream.arrived(1)
    await store.kill()
    await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
    work.open()
    t.equal((await asked).body, 'execution 1', 'the client gets its response')
    t.equal(await proxy.metric('idempotency_completions_total{route="default",result="deferred"}'), 1)
    t.equal(await proxy.metric('idempotency_spooled'), 1)
    const meanwhile = await send(proxy, key, { path: '/gated' })
    t.strictSame([meanwhile.status, meanwhile.body, meanwhile.replayed], [201, 'execution 1', true])
    const misuse = await send(proxy, key, { path: '/gated', body: '{"amount":2}' })
    t.equal(misuse.code, 'idempotency_key_reused')
    await store.start()
    await until(async () => (await proxy.metric('idempotency_spooled')) === 0)
    t.equal((await store.only()).state, STATE.completed)
    const other = await start()
    const retry = await send(other, key, { path: '/gated' })
    t.strictSame([retry.body, retry.replayed], ['execution 1', true])
    t.equal(upstream.seen.length, 1)
  })

for (const kind of SHARED)
  void t.test(`R05 a completion with a lost reply is sent again, changing nothing: ${kind}`, async (t) => {
    const { store, upstream, work, start } = await worldOn(t, kind)
    await using wire = await relay(store.port)
    const proxy = await start('', `{ url: "${store.through(wire.port)}" }`)
    t.equal((await send(proxy, newKey())).status, 201, 'the scripts are loaded')
    await store.clear()
    const key = newKey()
    const asked = send(proxy, key, { path: '/gated' })
    await upstream.arrived(2)
    wire.onCommand = (bytes) => {
      if (store.wire.outcome(bytes)) wire.passReplies = false
    }
    work.open()
    t.equal((await asked).body, 'execution 2')
    await proxy.logged(({ msg }) => /did not take an outcome/.test(String(msg)))
    t.equal((await store.only()).state, STATE.completed, 'it was applied')
    const stored = await store.snapshot()
    wire.onCommand = () => {}
    wire.passReplies = true
    wire.cut()
    await until(async () => (await proxy.metric('idempotency_spooled')) === 0)
    t.strictSame(await store.snapshot(), stored, 'a duplicate completion changes nothing')
    t.equal(await proxy.metric('idempotency_completions_total{route="default",result="stale"}'), 0)
    t.ok((await send(proxy, key, { path: '/gated' })).replayed)
    t.equal(upstream.seen.length, 2)
  })

void t.test(
  'R07 an eviction policy causes a warning, and strict routes refuse unless the risk is accepted',
  async (t) => {
    const { redis, upstream, start } = await world(t, ['--maxmemory-policy', 'allkeys-lru'])
    const routes = `routes:
  - { name: hard, match: { path: /hard }, profile: strict, scope: { caller: "header:authorization" } }
  - { name: soft, match: { path: /soft } }`
    const proxy = await start(routes)
    t.equal((await proxy.logged(({ msg }) => /allkeys-lru/.test(String(msg))))['level'], 40, 'a warning')
    t.equal(await proxy.metric('idempotency_store_grade{store="redis"}'), 0)
    await unavailable(t, proxy, newKey(), '/hard')
    t.equal(upstream.seen.length, 0)
    t.equal((await redisSnapshot(redis)).size, 0, 'nothing was claimed')
    t.equal((await send(proxy, newKey(), { path: '/soft' })).status, 201)
    const accepting = await start(routes, `{ url: "${redis.url}", acceptRisk: true }`)
    t.equal((await send(accepting, newKey(), { path: '/hard' })).status, 201)
    await redis.command('CONFIG', 'SET', 'maxmemory-policy', 'noeviction')
    // The harness turns the grace off unless the configuration mentions it.
    const fit = await start(`${routes} # grace: 2s`)
    await until(async () => (await fit.metric('idempotency_store_grade{store="redis"}')) === 3)
    t.equal((await send(fit, newKey(), { path: '/hard' })).status, 201)
  },
)

void t.test('R01 a process with no Redis at its address still exits 0 on SIGTERM', async (t) => {
  const { upstream } = await world(t)
  const store = `redis://user:hush@127.0.0.1:${await freePort()}`
  const file = configFile(tempDir(t), `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }`)
  await using proxy = await proxyProcess(file)
  t.equal((await send(proxy, newKey())).status, 503)
  proxy.kill('SIGTERM')
  t.equal(await proxy.exited, 0)
  t.notMatch(JSON.stringify(proxy.log), /hush/, 'the password of the store is in no log line')
})
