import { readFileSync } from 'node:fs'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { configFile, newKey, send, tempDir } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { rawRequest } from '../support/raw.ts'
import { RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

const KEY = 'raw-key-4f1b9d0c-do-not-tell'
const CREDENTIAL = 'credential-8c2e-do-not-tell'
const COOKIE = 'cookie-91aa-do-not-tell'
const BODY = 'request-body-77d3-do-not-tell'
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

/** Every way for a request to end: executed, replayed, misused, unknown, released, invalid, too large. */
async function everything(proxy: ChildProxy): Promise<void> {
  const ask = {
    headers: { authorization: `Bearer ${CREDENTIAL}`, cookie: `session=${COOKIE}` },
    body: `"${BODY}"`,
  }
  for (const path of ['/pay', '/cut', '/later']) {
    await send(proxy, KEY, { ...ask, path })
    await send(proxy, KEY, { ...ask, path })
    await send(proxy, KEY, { ...ask, path, body: `"other ${BODY}"` })
  }
  await send(proxy, `"${KEY}`, ask)
  await send(proxy, KEY, { ...ask, path: '/large', body: BODY.repeat(50_000) })
  const lines = [
    'POST /pay HTTP/1.1',
    'Host: a',
    `Authorization: ${CREDENTIAL}`,
    `Idempotency-Key: ${KEY}\x01`,
  ]
  await rawRequest(proxy.port, `${lines.join('\r\n')}\r\nContent-Length: 0\r\n\r\n`)
}

function quiet(t: Test, text: string, where: string, more: readonly string[] = []): void {
  for (const secret of [KEY, CREDENTIAL, COOKIE, ...more])
    for (const form of [secret, Buffer.from(secret).toString('base64'), Buffer.from(secret).toString('hex')])
      t.notOk(text.includes(form), `${secret} is not in ${where}`)
}

async function metrics(proxy: { readonly adminUrl: string }): Promise<string> {
  return (await fetch(`${proxy.adminUrl}/metrics`)).text()
}

void t.test(
  'K22 no key, credential or request body appears in a log line, a metric, a Redis key or value',
  async (t) => {
    await redis.command('FLUSHALL')
    const stub = await upstream(t)
    const proxy = await started(t, stub.url, redis.url)
    await everything(proxy)
    const client = new Redis(redis.port, '127.0.0.1')
    t.teardown(() => client.disconnect())
    const keys = await client.keys('*')
    t.ok(keys.some((key) => key.includes(':r:')) && keys.some((key) => key.endsWith(':u')))
    quiet(t, keys.join('\n'), 'a Redis key', [BODY, ANSWER])
    let kept = 0
    for (const key of keys) {
      const record = key.includes(':r:')
      const value = record
        ? ((await client.getBuffer(key)) as Buffer).toString('latin1')
        : await (key.includes(':h:') ? client.lrange(key, 0, -1) : client.zrange(key, 0, '-1')).then((all) =>
            all.join('\n'),
          )
      if (value.includes(ANSWER)) kept++
      quiet(t, value, 'a value', [BODY])
    }
    t.equal(kept, 1, 'the response is in the store: its replay needs it')
    quiet(t, await metrics(proxy), 'a metric', [BODY, ANSWER])

    // Without the store: errors of the client library carry the command and its arguments.
    await redis.command('CONFIG', 'SET', 'maxmemory', '1')
    await everything(proxy)
    await redis.command('CONFIG', 'SET', 'maxmemory', '0')
    redis.pause()
    await everything(proxy)
    redis.resume()
    quiet(t, JSON.stringify(proxy.log), 'a log line', [BODY, ANSWER])
    t.ok(proxy.log.filter(({ msg }) => msg === 'request').length > 20)
    quiet(t, await metrics(proxy), 'a metric', [BODY, ANSWER])
  },
)

void t.test('K22 no key, credential or request body is in the file of the embedded store', async (t) => {
  const stub = await upstream(t)
  const file = `${tempDir(t)}/store.db`
  const proxy = await started(t, stub.url, `sqlite:${file}`)
  t.match(
    proxy.log.find(({ msg }) => msg === 'listening'),
    { store: 'sqlite', file, service: 'default' },
    'the log names the file',
  )
  await everything(proxy)
  for (const one of [file, `${file}-wal`]) quiet(t, readFileSync(one, 'latin1'), one, [BODY])
  await proxy.drain()
  const bytes = readFileSync(file, 'latin1')
  quiet(t, bytes, file, [BODY])
  t.ok(bytes.includes(ANSWER))
})

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
