import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyInProcess, proxyProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

const ANSWER = 'answer-body-0e5f'

async function upstream(t: Test) {
  const stub = await upstreamStub(({ target }, response) => {
    if (target.startsWith('/cut')) response.destroy()
    else if (target.startsWith('/later')) response.writeHead(429).end('later')
    else response.writeHead(201).end(ANSWER)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return stub
}

async function started(t: Test, upstreamUrl: string, store: string, more = ''): Promise<ChildProxy> {
  const yaml = `upstream: { url: "${upstreamUrl}" }
store: { url: "${store}" }
log: { level: trace, format: json }
defaults: { scope: { caller: ["header:authorization", "cookie:session"] } }
${more}`
  const proxy = await proxyProcess(configFile(tempDir(t), yaml))
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

async function metrics(proxy: { readonly adminUrl: string }): Promise<string> {
  return (await fetch(`${proxy.adminUrl}/metrics`)).text()
}

void t.test('S08 keep: outcome puts no byte of the response in the store', async (t) => {
  await redis.command('FLUSHALL')
  const stub = await upstream(t)
  const proxy = await started(
    t,
    stub.url,
    redis.url,
    'routes: [{ name: r, match: { path: /pay }, keep: outcome }]',
  )
  const key = newKey()
  t.equal((await send(proxy, key)).body, ANSWER)
  const retry = await send(proxy, key)
  t.strictSame([retry.status, retry.code], [409, 'idempotency_response_unavailable'])
  t.match(JSON.parse(retry.body), { originalStatus: 201 })
  const client = new Redis(redis.port, '127.0.0.1')
  t.teardown(() => client.disconnect())
  for (const name of await client.keys('*:r:*')) t.notOk((await client.getBuffer(name))?.includes(ANSWER))
  t.equal(stub.seen.length, 1)
})

void t.test(
  'O07 the cardinality of /metrics is bounded under random keys, paths, callers and methods',
  async (t) => {
    const stub = await upstream(t)
    await using proxy = await proxyInProcess(
      `upstream: { url: "${stub.url}" }\nstore: { url: "memory:" }\nroutes: [{ name: orders, match: { path: "/orders/:id" } }]`,
    )
    const some = async (): Promise<void> => {
      const random = newKey()
      const headers = { authorization: `Bearer ${random}`, 'x-tenant': random }
      await send(proxy, random, { path: `/orders/${random}`, headers })
      await send(proxy, random, { path: `/orders/${random}`, headers })
      await send(proxy, random, { path: `/${random}?q=${random}`, headers })
      await send(proxy, null, { path: `/${random}`, headers, method: 'PROPFIND' })
    }
    // Operations that timers start have no series until their timer has fired.
    const series = async (): Promise<string[]> =>
      (await metrics(proxy))
        .split('\n')
        .filter(
          (line) => line.startsWith('idempotency_') && !/operation="(ping|due|renew|remove)"/.test(line),
        )
        .map((line) => line.replace(/ \S+$/, ''))
    await some()
    await until(
      async () => (await proxy.metric('idempotency_requests_total{route="default",outcome="passed"}')) === 1,
    )
    const before = await series()
    for (let n = 0; n < 50; n++) await some()
    t.strictSame(await series(), before)
    const text = await metrics(proxy)
    const routes = new Set([...text.matchAll(/route="([^"]*)"/g)].map(([, route]) => route))
    t.strictSame(routes, new Set(['default', 'orders']))
  },
)
