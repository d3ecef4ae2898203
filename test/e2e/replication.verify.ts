import t, { type Test } from 'tap'
import { newKey, send, until } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

const waits = (result: string) => `idempotency_store_waits_total{store="redis",result="${result}"}`

async function upstreamOf(t: Test): Promise<UpstreamStub> {
  let n = 0
  const upstream = await upstreamStub((_seen, response) => {
    response.writeHead(201).end(`execution ${++n}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream
}

async function start(t: Test, upstream: UpstreamStub, url: string, wait: string): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    `service: pay
upstream: { url: "${upstream.url}" }
store:
  url: "${url}"
  timeout: 10s
  wait: { ${wait} }
drain: { timeout: 100ms }
defaults: { lease: 30s }
routes: [{ name: free, match: { path: /free }, onStoreUnavailable: bypass }]
`,
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

async function refused(t: Test, proxy: TestProxy, key: string, path = '/pay'): Promise<void> {
  const { status, code, body } = await send(proxy, key, { path })
  t.strictSame([status, code], [503, 'idempotency_store_unavailable'])
  t.match(body, 'the claim did not reach the replicas that store.wait requires; nothing was executed')
}

void t.test(
  'W05 without its replica a new key is refused; a retry with the replica back executes exactly once',
  async (t) => {
    const master = await RedisServer.start({ args: ['--repl-diskless-sync-delay', '0'] })
    t.teardown(() => master[Symbol.asyncDispose]())
    const replica = await RedisServer.start({ args: ['--replicaof', '127.0.0.1', String(master.port)] })
    t.teardown(() => replica[Symbol.asyncDispose]())
    const upstream = await upstreamOf(t)
    const patient = await start(t, upstream, master.url, 'timeout: 30s')
    const hasty = await start(t, upstream, master.url, 'timeout: 50ms')
    t.equal(await patient.metric(waits('unsatisfied')), 0, 'the metric exists from the start')
    const before = newKey()
    t.equal((await send(patient, before)).status, 201)
    replica.pause()
    const key = newKey()
    for (let n = 0; n < 10; n++) await refused(t, hasty, key)
    await refused(t, hasty, newKey(), '/free')
    t.equal(upstream.seen.length, 1)
    t.ok((await send(hasty, before)).replayed, 'replays do not wait for replicas')
    t.equal(await hasty.metric('idempotency_store_up{store="redis"}'), 1)
    t.equal(await hasty.metric('idempotency_breaker_state{store="redis"}'), 0)
    t.equal(await hasty.metric(waits('unsatisfied')), 11)
    await hasty.logged(({ msg }) => /claims do not reach the replicas \(store\.wait\)/.test(String(msg)))
    replica.resume()
    t.equal((await send(patient, key)).body, 'execution 2')
    t.ok((await send(hasty, key)).replayed)
    t.equal(upstream.seen.length, 2)
    await until(async () => (await send(hasty, newKey())).status === 201)
    await hasty.logged(({ msg }) => /claims reach the replicas again/.test(String(msg)))
  },
)

void t.test(
  'R06 W05 with store.wait, clients that retry through a failover execute no key twice',
  async (t) => {
    await using group = await SentinelGroup.start()
    const upstream = await upstreamOf(t)
    const proxies = await Promise.all(
      [0, 1].map(() => start(t, upstream, group.url, 'replicas: all, timeout: 2s')),
    )
    await group.impatient()
    const over = new AbortController()
    t.teardown(() => over.abort())
    let answered = 0
    /** A refused client retries at the other replica; one with a response, or a 409, takes a new key. */
    const clients = Array.from({ length: 20 }, async (_, n) => {
      while (!over.signal.aborted) {
        const key = newKey()
        for (let tries = n, status = 0; !over.signal.aborted && status !== 201 && status !== 409; tries++)
          status = (await send(proxies[tries % 2] as TestProxy, key).catch(() => ({ status: 0 }))).status
        await send(proxies[n % 2] as TestProxy, key).catch(() => {})
        answered++
      }
    })
    await until(() => answered > 40)
    const before = (await group.master()) as RedisServer
    await before.kill()
    await until(async () => ![undefined, before].includes(await group.master()))
    // `all` means all known replicas: until this one is back, no claim reaches them.
    await before.start()
    const seen = answered
    await until(() => answered > seen + 40)
    over.abort()
    await Promise.all(clients)
    const told = upstream.seen.map((one) => valueOf(one, 'idempotency-key'))
    t.equal(new Set(told).size, told.length, 'no key twice')
  },
)
