import { setTimeout as wait } from 'node:timers/promises'
import type { Test } from 'tap'
import { configFile, type Gate, gate, newKey, send, tempDir, until } from './e2e.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from './proxy.ts'
import { freePort, RedisServer } from './redis.ts'
import { type UpstreamStub, upstreamStub } from './upstream.ts'

/** Long enough for two scrapes a second apart. */
const SEEN = 2500

/** Makes everything that can go wrong with a proxy happen once, for tests of its metrics. */
export interface Trouble {
  /** host:port of every `/metrics`, including the replica that starts later. */
  readonly targets: readonly string[]
  readonly metrics: TestProxy
  run(): Promise<void>
}

/** An upstream that does what the body says, and confirms keys that begin with `paid`. */
async function obedient(): Promise<UpstreamStub & { held: Gate }> {
  const state = { held: gate() }
  const stub = await upstreamStub(async (seen, response) => {
    const key = new URL(seen.target, 'http://upstream').searchParams.get('key')
    if (seen.method === 'GET' && key !== null) {
      const paid = key.startsWith('paid') ? 'paid' : 'processing'
      response.writeHead(200, { 'Content-Type': 'application/json' })
      response.end(JSON.stringify({ key, state: paid, payment: { key } }))
      return
    }
    const what = /"do":"(\w+)"/.exec(seen.body.toString())?.[1]
    if (what === 'cut') return void response.socket?.destroy()
    if (what === 'nothing') return
    if (what === 'hold') await state.held.opened
    response.writeHead(201, { 'Content-Type': 'application/json' })
    response.end(JSON.stringify({ done: what, filling: what === 'large' ? 'x'.repeat(4096) : '' }))
  })
  return Object.assign(state, stub)
}

const yamlOf = (upstream: string, store: string): string => `
upstream: { url: "${upstream}", timeout: 8s }
store: { url: "${store}" }
drain: { timeout: 1s }
routes:
  - name: pay
    match: { path: /pay }
    key: required
    lease: 1s
    reconcile:
      request: { path: "/payments?key={key}", headers: { Authorization: "Bearer of-the-proxy" } }
      identity: { /key: "{key}" }
      completed: { status: 200, when: { /state: paid }, json: /payment, response: { status: 201 } }
      notFound: { status: 404 }
      every: 200ms
      after: 1ms
      attempts: 2
  - { name: wait, match: { path: /wait }, inFlight: { mode: wait, wait: 5s } }
  - { name: brief, match: { path: /brief }, ttl: 8s, tombstone: 1h, lease: 1s, unresolvedTtl: 12s }
  - { name: large, match: { path: /large }, limits: { request: 1KiB, response: 1KiB } }
  - { name: bypass, match: { path: /bypass }, ttl: 8s, onStoreUnavailable: bypass }
  - { name: shadow, match: { path: /shadow }, mode: shadow }
`

export async function trouble(t: Test): Promise<Trouble> {
  const kept = <T extends AsyncDisposable>(one: T): T => {
    t.teardown(() => one[Symbol.asyncDispose]())
    return one
  }
  const redis = kept(await RedisServer.start())
  const upstream = kept(await obedient())
  const yaml = yamlOf(upstream.url, redis.url)
  const dir = tempDir(t)
  const owner = kept(await proxyProcess(configFile(dir, yaml)))
  const other = kept(await proxyInProcess(yaml))
  const unreachable = kept(await proxyInProcess(yamlOf(`http://127.0.0.1:${await freePort()}`, redis.url)))
  const embedded = kept(await proxyInProcess(yamlOf(upstream.url, `sqlite:${dir}/store.db`)))
  const late = `127.0.0.1:${await freePort()}`
  const sharing: TestProxy[] = [owner, other, unreachable]

  const ask = (proxy: TestProxy, path: string, what: string, key: string | null = newKey()) =>
    send(proxy, key, { path, body: JSON.stringify({ do: what, n: newKey() }) })
  const counted = async (proxies: readonly TestProxy[], sample: string): Promise<void> =>
    until(async () => {
      const found = await Promise.all(proxies.map((proxy) => proxy.metric(sample)))
      return found.some((value) => value > 0)
    })
  /** Sends one request that the upstream holds until `meanwhile` is done. */
  const held = async (proxy: TestProxy, path: string, key: string, meanwhile: () => Promise<unknown>) => {
    upstream.held = gate()
    const seen = upstream.seen.length
    const first = send(proxy, key, { path, body: '{"do":"hold"}' })
    await upstream.arrived(seen + 1)
    await meanwhile()
    upstream.held.open()
    return first
  }

  async function plain(): Promise<void> {
    const body = '{"do":"work"}'
    for (let n = 0; n < 5; n++) {
      const key = newKey()
      // The same operation again and again, each time under a new key.
      for (let retry = 0; retry < 3; retry++) await send(owner, key, { body })
      await send(owner, key, { body: '{"do":"else"}' })
      await send(owner, key, { body, headers: { authorization: 'Bearer renewed' } })
      for (const one of [owner, other, embedded]) await ask(one, '/pay', 'work')
      await ask(unreachable, '/pay', 'work')
      await ask(owner, '/pay', 'work', null)
      await ask(owner, '/pay', 'work', 'x'.repeat(300))
      await send(owner, newKey(), { headers: { authorization: '', cookie: 'who=me' } })
      await send(owner, null, { method: 'GET', path: '/pay', body: null })
      for (const one of [owner, embedded]) await ask(one, '/bypass', 'work')
      for (const what of ['work', 'work']) await send(owner, `shadow-${n}`, { path: '/shadow', body: what })
      for (let retry = 0; retry < 2; retry++)
        await send(owner, `large-${n}`, { path: '/large', body: '{"do":"large"}' })
      await send(owner, newKey(), { path: '/large', body: 'x'.repeat(2048) })
      await wait(500)
    }
    const key = newKey()
    await held(owner, '/pay', key, () => send(owner, key, { body: '{"do":"hold"}' }))
    const waiting = newKey()
    let second: Promise<unknown> = Promise.resolve()
    await held(owner, '/wait', waiting, async () => {
      second = send(owner, waiting, { path: '/wait', body: '{"do":"hold"}' })
      await wait(SEEN)
    })
    await second
  }

  async function unknown(): Promise<void> {
    await ask(other, '/pay', 'cut', `paid-${newKey()}`)
    const lost = newKey()
    for (const _ of [1, 2]) {
      await send(other, lost, { body: '{"do":"cut"}' })
      await send(other, lost, { body: '{"do":"cut"}' })
    }
    await counted(sharing, 'idempotency_reconcile_total{route="pay",result="completed"}')
    await counted(
      [owner, other, unreachable],
      'idempotency_reconcile_total{route="pay",result="dead_lettered"}',
    )
    // Counts unresolved records when it starts.
    sharing.push(kept(await proxyInProcess(`${yaml}admin: { listen: "${late}" }\n`)))
  }

  async function stopped(): Promise<void> {
    await wait(SEEN)
    const others = sharing.slice(1)
    const resolved = async (): Promise<number> => {
      const completed = 'idempotency_reconcile_total{route="pay",result="completed"}'
      const counts = await Promise.all(others.map((proxy) => proxy.metric(completed)))
      return counts.reduce((sum, one) => sum + one, 0)
    }
    const before = await resolved()
    const first = held(owner, '/pay', `paid-${newKey()}`, async () => {
      owner.kill('SIGSTOP')
      await counted(others, 'idempotency_lease_expired_total{route="pay"}')
      // A renewal would return the record to its owner before anybody has resolved it.
      await until(async () => (await resolved()) > before)
      owner.kill('SIGCONT')
      // It is scraped once more before the late outcome arrives.
      await wait(SEEN)
    })
    await first
    await counted([owner], 'idempotency_completions_total{route="pay",result="stale"}')
  }

  async function forgotten(): Promise<void> {
    await held(other, '/pay', newKey(), () => redis.command('FLUSHALL'))
    await counted([other], 'idempotency_completions_total{route="pay",result="recovered"}')
  }

  async function outage(): Promise<void> {
    await held(owner, '/pay', newKey(), async () => redis.pause())
    await Promise.all(
      Array.from({ length: 6 }, async () => {
        await ask(owner, '/pay', 'work')
        await ask(owner, '/bypass', 'work')
      }),
    )
    await wait(SEEN)
    redis.resume()
    await until(async () => (await owner.metric('idempotency_spooled')) === 0)
  }

  async function run(): Promise<void> {
    const brief = newKey()
    await send(other, brief, { path: '/brief' })
    const dropped = ask(other, '/brief', 'cut')
    const never = ask(other, '/pay', 'nothing')
    await plain()
    await dropped
    await never
    await send(other, brief, { path: '/brief' })
    await unknown()
    await stopped()
    await counted(sharing, 'idempotency_unresolved_expiring_total{route="brief"}')
    await forgotten()
    await outage()
    await wait(SEEN)
  }

  const hosts = [owner, other, unreachable, embedded].map(({ adminUrl }) => new URL(adminUrl).host)
  return { targets: [...hosts, late], metrics: owner, run }
}
