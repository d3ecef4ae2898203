import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { everything } from '../support/raw.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream, refusalOf } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
t.beforeEach(async () => void (await redis.command('FLUSHALL')))

const FAST = { path: '/fast' }

/** A link of a chain of proxies. */
async function proxyOf(t: Test, service: string, url: string, more = ''): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    `service: ${service}
upstream: { url: "${url}", timeout: 5s }
store: { url: "${redis.url}" }
drain: { timeout: 1s }
routes:
  - { name: pay, match: { path: "/*" }, scope: { caller: "header:authorization" }${more} }`,
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

/** A gateway in front of a sidecar, on one store. */
async function chainOf(t: Test, url: string): Promise<{ gateway: TestProxy; sidecar: TestProxy }> {
  const sidecar = await proxyOf(t, 'sidecar', url)
  return { sidecar, gateway: await proxyOf(t, 'gateway', sidecar.url) }
}

const told = ({ headers }: Reply): string | null => headers.get('idempotency-retry')

void t.test('V04 a gateway and a sidecar on one store execute once, whichever is asked', async (t) => {
  const upstream = await heldUpstream(t)
  const { gateway, sidecar } = await chainOf(t, upstream.url)
  const key = newKey()
  const first = send(sidecar, key)
  await upstream.arrived(1)
  for (let i = 0; i < 3; i++) {
    const refused = await send(gateway, key)
    t.same(refusalOf(refused), [409, 'idempotency_key_in_progress'])
    t.equal(told(refused), 'same-key')
  }
  upstream.finish(1)
  t.equal((await first).body, 'execution 1')
  const answer = await send(gateway, key)
  t.same(
    [answer.status, answer.body, answer.replayed],
    [201, 'execution 1', false],
    'the gateway did not keep the refusal',
  )
  t.equal((await send(gateway, key)).replayed, true)
  const keys = Array.from({ length: 20 }, newKey)
  await Promise.all(
    keys.flatMap((one) => [send(gateway, one, FAST), send(sidecar, one, FAST), send(gateway, one, FAST)]),
  )
  for (const one of keys) t.match((await send(gateway, one, FAST)).body, /^execution /)
  t.equal(upstream.seen.length, 21, 'N=1 for each key')
})

void t.test('V04 V05 two proxies of one service in a row answer 508: N=0, nothing kept', async (t) => {
  const upstream = await heldUpstream(t)
  const sidecar = await proxyOf(t, 'pay', upstream.url)
  const gateway = await proxyOf(t, 'pay', sidecar.url)
  const key = newKey()
  for (let i = 0; i < 2; i++) {
    const refused = await send(gateway, key, FAST)
    t.same([...refusalOf(refused), told(refused), refused.replayed], [508, 'loop_detected', 'no', false])
  }
  t.equal(upstream.seen.length, 0)
  t.equal((await send(sidecar, key, FAST)).status, 201, 'the key was freed')
  t.equal(upstream.seen.length, 1)
})

/** Forwards every connection to the port in `to`. */
async function detour(t: Test): Promise<{ readonly url: string; to: number; readonly passed: number }> {
  const sockets = new Set<Socket>()
  const server = createServer((client) => {
    self.passed++
    const target = connect(self.to, '127.0.0.1')
    for (const socket of [client, target]) {
      sockets.add(socket)
      socket
        .on('error', () => {})
        .on('close', () => {
          client.destroy()
          target.destroy()
        })
    }
    client.pipe(target).pipe(client)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  const self = { url: `http://127.0.0.1:${port}`, to: 0, passed: 0 }
  t.teardown(() => {
    for (const socket of sockets) socket.destroy()
    return new Promise((resolve) => server.close(resolve))
  })
  return self
}

for (const replicas of [1, 2])
  void t.test(`V05 an upstream that leads back, ${replicas} replicas: 508 on the second pass`, async (t) => {
    const upstream = await heldUpstream(t)
    const way = await detour(t)
    const proxies = await Promise.all(Array.from({ length: replicas }, () => proxyOf(t, 'pay', way.url)))
    const [first] = proxies as [TestProxy]
    way.to = (proxies.at(-1) as TestProxy).port
    const key = newKey()
    for (const ask of [FAST, { method: 'GET', body: null }, { method: 'PUT' }]) {
      const refused = await send(first, key, ask)
      t.same([...refusalOf(refused), told(refused)], [508, 'loop_detected', 'no'])
    }
    const handshake = [
      'GET /ws HTTP/1.1',
      'Host: a',
      'Connection: Upgrade',
      'Upgrade: websocket',
      'Sec-WebSocket-Version: 13',
      'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
    ]
    t.match(
      await everything(first.port, `${handshake.join('\r\n')}\r\n\r\n`),
      /^HTTP\/1\.1 508 Loop Detected\r\n/,
    )
    t.ok(way.passed <= 4, 'one pass each')
    t.ok((proxies.at(-1) as TestProxy).log.some(({ msg }) => /leads back to this proxy/.test(String(msg))))
    // With the mistake fixed the key executes: nothing was kept.
    way.to = upstream.port
    const mended = await proxyOf(t, 'pay', upstream.url)
    t.equal((await send(mended, key, FAST)).status, 201)
    t.equal(upstream.seen.length, 1)
  })

void t.test('V05 everything the proxy sends carries its CDN-Loop entry, and others stay', async (t) => {
  await using upstream = await upstreamStub((seen, response) => {
    if (seen.target === '/break') response.destroy()
    else if (seen.target.startsWith('/ask')) response.writeHead(404).end()
    else response.writeHead(200, { 'Content-Type': 'application/json' }).end('{}')
  })
  const proxy = await proxyOf(
    t,
    'pay',
    upstream.url,
    `, key: { forwardFence: true }, authorizeReplay: { path: /may-see }, reconcile: { request: { path: "/ask/{record}" }, identity: { /record: "{record}" }, completed: { status: 200 }, after: 100ms, every: 100ms }`,
  )
  const key = newKey()
  const headers = { 'CDN-Loop': 'other; a="x, y", third' }
  await send(proxy, key, { headers })
  t.equal((await send(proxy, key, { headers })).replayed, true)
  await send(proxy, null, { method: 'GET', body: null, headers })
  await send(proxy, newKey(), { path: '/break', headers })
  await until(() => upstream.seen.some(({ target }) => target.startsWith('/ask')))
  for (const target of ['/pay', '/may-see', '/break', '/ask'])
    t.ok(
      upstream.seen.some((seen) => seen.target.startsWith(target)),
      target,
    )
  const marks = upstream.seen.map((seen) => linesOf(seen.headers, 'cdn-loop'))
  for (const lines of marks) t.match(lines.at(-1), /^idempotency-proxy; id=[0-9a-f]{20}$/)
  t.equal(new Set(marks.map((lines) => lines.at(-1))).size, 1)
  t.same(
    marks.filter((lines) => lines.length === 2).map(([before]) => before),
    upstream.seen.filter(({ target }) => !target.startsWith('/ask')).map(() => headers['CDN-Loop']),
  )
  // However a proxy in between rewrites it.
  const mark = marks[0]?.at(-1) as string
  for (const line of [mark, `a, ${mark.toUpperCase()}`, `${mark.replace('; ', ' ;')},b`])
    t.equal((await send(proxy, null, { headers: { 'CDN-Loop': line } })).code, 'loop_detected')
  t.equal((await send(proxy, null, { headers: { 'CDN-Loop': 'idempotency-proxy; id=0' } })).status, 200)
})

void t.test('V05 chained proxies with embedded stores are not mistaken for a loop', async (t) => {
  const upstream = await heldUpstream(t)
  let url = upstream.url
  for (let i = 0; i < 3; i++) {
    const proxy = await proxyInProcess(`upstream: { url: "${url}" }\nstore: { url: "memory:" }`)
    t.teardown(() => proxy[Symbol.asyncDispose]())
    url = proxy.url
  }
  const key = newKey()
  t.equal((await send({ url }, key, FAST)).status, 201)
  t.equal((await send({ url }, key, FAST)).replayed, true)
  t.equal(upstream.seen.length, 1)
})
