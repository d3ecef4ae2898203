import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { jwksServer, pair, token } from '../credentials/support.ts'
import { newKey, type Reply, send, tempDir, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { rawRequest } from '../support/raw.ts'
import { emptyServer, emptyStore, heldUpstream, KINDS, replicas, waitersAre } from '../support/replicas.ts'

t.setTimeout(200_000)

const FAST = { path: '/fast' }

for (const kind of KINDS)
  void t.test(`§13 metrics count waiters, rate limits, refusals and regenerated keys: ${kind}`, async (t) => {
    let maySee = true
    const upstream = await heldUpstream(t, (_, { method }) =>
      method === 'GET' ? { status: maySee ? 200 : 403 } : {},
    )
    const [proxy] = await replicas(
      t,
      1,
      `upstream: { url: "${upstream.url}" }
store: { url: "${await emptyStore(t, kind)}" }
drain: { timeout: 3s }
routes:
  - { name: held, match: { path: /held }, inFlight: { mode: wait, wait: 20s } }
  - { name: rated, match: { path: /fast/rated }, limits: { newKeys: 1/h } }
  - { name: asked, match: { path: /fast/asked }, authorizeReplay: { path: /fast/may-see } }
  - { name: plain, match: { path: /fast }, lease: 1s }`,
    )
    if (!proxy) throw new Error('one is started')
    const outcome = (route: string, name: string) =>
      proxy.metric(`idempotency_requests_total{route="${route}",outcome="${name}"}`)

    const key = newKey()
    const first = send(proxy, key, { path: '/held' })
    await upstream.arrived(1)
    const held = Array.from({ length: 3 }, () => send(proxy, key, { path: '/held' }))
    await waitersAre([proxy], 3)
    upstream.finish(1)
    await Promise.all([first, ...held])
    t.equal((await send(proxy, key, { path: '/held' })).replayed, true)
    t.strictSame(
      [await outcome('held', 'executed'), await outcome('held', 'waited'), await outcome('held', 'replayed')],
      [1, 3, 1],
    )
    t.equal(await proxy.metric('idempotency_waiters'), 0)
    t.equal(await proxy.metric('idempotency_duplicates_prevented_total{route="held"}'), 4)

    t.equal((await send(proxy, newKey(), { path: '/fast/rated' })).status, 201)
    for (let i = 0; i < 2; i++) t.equal((await send(proxy, newKey(), { path: '/fast/rated' })).status, 429)
    t.equal(await outcome('rated', 'rate_limited'), 2)

    const seen = newKey()
    t.equal((await send(proxy, seen, { path: '/fast/asked' })).status, 201)
    maySee = false
    t.equal((await send(proxy, seen, { path: '/fast/asked' })).status, 403)
    t.equal(await outcome('asked', 'replay_forbidden'), 1)
    t.equal(await outcome('asked', 'replayed'), 0)

    // A client that makes a new key for each attempt is not protected: same caller, same operation.
    const regenerated = () => proxy.metric('idempotency_regenerated_keys_total{route="plain"}')
    const one = newKey()
    for (let i = 0; i < 3; i++) await send(proxy, one, FAST)
    t.equal(await regenerated(), 0, 'a retry with the same key')
    await send(proxy, newKey(), { ...FAST, body: '{"amount":2}' })
    await send(proxy, newKey(), { ...FAST, headers: { authorization: 'Bearer bob' } })
    t.equal(await regenerated(), 0, 'another operation, another caller')
    await send(proxy, newKey(), FAST)
    t.equal(await regenerated(), 1)

    const sample = (name: string, suffix: string) => proxy.metric(`${name}_${suffix}{route="plain"}`)
    t.equal(await sample('idempotency_retry_age_seconds', 'count'), 2, 'the two replays')
    const age = await sample('idempotency_retry_age_seconds', 'sum')
    t.ok(age >= 0 && age < 60, `${age} s`)
    t.equal(await sample('idempotency_lease_use_ratio', 'count'), 4, 'the four executions')
    t.ok((await sample('idempotency_lease_use_ratio', 'sum')) > 0)
    const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
    for (const [name, type] of Object.entries({
      idempotency_waiters: 'gauge',
      idempotency_regenerated_keys_total: 'counter',
      idempotency_retry_age_seconds: 'histogram',
      idempotency_lease_use_ratio: 'histogram',
    }))
      t.ok(text.includes(`# TYPE ${name} ${type}\n`), `${name} is a ${type}`)
  })

const KEY = 'raw-key-4f1b9d0c-do-not-tell'
const CREDENTIAL = 'credential-8c2e-do-not-tell'
const COOKIE = 'cookie-91aa-do-not-tell'
const BODY = 'request-body-77d3-do-not-tell'
const ANSWER = 'answer-body-0e5f'
const FIELD = 'field-key-2c9e-do-not-tell'
const HOOK = 'hook-id-6c2f-do-not-tell'
const EVENT = 'event-id-55b0-do-not-tell'
const PART = 'derived-part-9d31-do-not-tell'
const SUBJECT = 'subject-7a10-do-not-tell'
const CLAIM = 'claim-3f8e-do-not-tell'
const SENT = [KEY, CREDENTIAL, COOKIE, BODY, FIELD, HOOK, EVENT, PART, SUBJECT, CLAIM]

async function startAll(t: Test, upstream: string, store: string, jwks: string): Promise<TestProxy> {
  const dir = tempDir(t)
  writeFileSync(join(dir, 'secret'), 's'.repeat(32))
  const yaml = `upstream: { url: "${upstream}" }
store: { url: "${store}" }
log: { level: trace, format: json }
issuer: { path: /keys, secretFile: "${join(dir, 'secret')}", ttl: 1s }
status: { path: /status }
defaults:
  inFlight: { mode: wait, wait: 100ms }
  scope: { caller: "jwt:sub", jwt: { jwks: "${jwks}" } }
  limits: { newKeys: 100/h }
routes:
  - { name: plain, match: { path: /fast/plain/* }, scope: { caller: ["header:authorization", "cookie:session"] } }
  - { name: outcome, match: { path: /fast/outcome }, keep: outcome }
  - { name: fields, match: { path: /fast/fields }, key: { from: ["query:k", "form:k"] } }
  - { name: hooks, match: { path: /fast/hooks }, key: { from: ["json:/id"], presence: required } }
  - { name: events, match: { path: /fast/events }, key: { from: ["header:ce-id", "json:/id"] } }
  - { name: derived, match: { path: /fast/derived }, key: { derive: { json: [/part], headers: [x-part] } } }
  - { name: issued, match: { path: /fast/issued }, key: { issuedOnly: true, presence: required } }
  - { name: rated, match: { path: /fast/rated }, limits: { newKeys: 1/h } }
  - { name: asked, match: { path: /fast/asked }, authorizeReplay: { path: /fast/may-see } }`
  const proxy = await proxyInProcess(yaml)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

/** Each form in which a secret could leak: as it is, encoded, and the parts of a token. */
function formsOf(secret: string): string[] {
  const parts = secret.split('.')
  return [secret, ...(parts.length === 3 ? parts.slice(1) : [])].flatMap((text) => [
    text,
    encodeURIComponent(text),
    Buffer.from(text).toString('base64').replace(/=+$/, ''),
    Buffer.from(text).toString('base64url'),
    Buffer.from(text).toString('hex'),
  ])
}

function quiet(t: Test, text: string, secrets: readonly string[], where: string): void {
  for (const secret of secrets)
    t.notOk(
      formsOf(secret).find((form) => text.includes(form)),
      `${secret.slice(0, 24)}… is not in ${where}`,
    )
}

/** What a Redis key holds. */
async function valueOf(client: Redis, name: string): Promise<string> {
  switch (await client.type(name)) {
    case 'string':
      return ((await client.getBuffer(name)) as Buffer).toString('latin1')
    case 'list':
      return (await client.lrange(name, 0, -1)).join('\n')
    default:
      return (await client.zrange(name, 0, '-1')).join('\n')
  }
}

const TITLE = 'K22 S08 no key, credential, body or claim is in a refusal, log, metric or record'
for (const kind of KINDS.filter((one) => one !== 'memory'))
  void t.test(`${TITLE}: ${kind}`, async (t) => {
    const [own, mallory] = [await pair('ES256'), await pair('ES256')]
    await using jwks = await jwksServer(own)
    const upstream = await heldUpstream(t, (_, { method, target }) => {
      if (method === 'GET') return { status: 401 }
      if (target.endsWith('/later')) return { status: 429 }
      if (target.endsWith('/cut')) return { cut: true }
      return /pay|outcome/.test(target) ? { body: ANSWER } : {}
    })
    const server = kind === 'redis' ? await emptyServer('redis') : null
    const store = server?.url ?? (await emptyStore(t, kind))
    const proxy = await startAll(t, upstream.url, store, jwks.url)
    const claims = { sub: SUBJECT, exp: Math.floor(Date.now() / 1000) + 3600, own: CLAIM, aud: CLAIM }
    const good = await token(own, claims)
    const forged = await token(mallory, claims)
    const stale = await token(own, { ...claims, exp: 1_000_000_000 })
    const { idempotencyKey: issued, expiresAt } = JSON.parse(
      (await send(proxy, null, { path: '/keys', body: null })).body,
    ) as { idempotencyKey: string; expiresAt: string }
    const later = JSON.parse((await send(proxy, null, { path: '/keys', body: null })).body) as {
      idempotencyKey: string
    }
    const secrets = [...SENT, good, forged, stale, issued, later.idempotencyKey]
    const answers: number[] = []
    const ask = async (key: string | null, more: Parameters<typeof send>[2]): Promise<Reply> => {
      const reply = await send(proxy, key, {
        ...more,
        headers: { authorization: `Bearer ${good}`, ...more?.headers },
      })
      answers.push(reply.status)
      if (reply.code !== null) quiet(t, JSON.stringify([reply.body, ...reply.headers]), secrets, reply.code)
      return reply
    }
    const ofPlain = {
      headers: { authorization: `Bearer ${CREDENTIAL}`, cookie: `session=${COOKIE}` },
      body: `"${BODY}"`,
    }
    const inQuery = { path: `/fast/fields?k=${FIELD}` }
    const inForm = {
      path: '/fast/fields',
      headers: { 'content-type': 'application/x-www-form-urlencoded' },
      body: `k=${FIELD}-2`,
    }
    const malformed = [
      'POST /fast/plain/pay HTTP/1.1',
      'Host: a',
      `Authorization: ${CREDENTIAL}`,
      `Idempotency-Key: ${KEY}\x01`,
      'Content-Length: 0',
    ]
    /** Every way for a request to end. */
    const everything = async (): Promise<void> => {
      for (const path of ['/fast/plain/pay', '/fast/plain/cut', '/fast/plain/later', '/fast/outcome'])
        for (const body of [ofPlain.body, ofPlain.body, `"other ${BODY}"`])
          await ask(KEY, { ...(path === '/fast/outcome' ? {} : ofPlain), path, body })
      await ask(`"${KEY}`, { ...ofPlain, path: '/fast/plain/pay' })
      await ask(KEY, { ...ofPlain, path: '/fast/plain/large', body: BODY.repeat(50_000) })
      await rawRequest(proxy.port, `${malformed.join('\r\n')}\r\n\r\n`)
      for (const field of [inQuery, inForm])
        for (const more of [{}, {}, { body: `a=1&k=${FIELD}-2` }]) await ask(null, { ...field, ...more })
      await ask(null, { path: `${inQuery.path}&k=${FIELD}` })
      await ask(null, { method: 'GET', path: `/fast/elsewhere?k=${FIELD}`, body: null })
      for (const body of [
        `{"id":"${HOOK}"}`,
        `{"id":"${HOOK}","x":1}`,
        `{"id":["${HOOK}"]}`,
        `{"id":"${HOOK}\\n"}`,
      ])
        for (let i = 0; i < 2; i++) await ask(null, { path: '/fast/hooks', body })
      const source = { 'ce-id': EVENT, 'ce-source': EVENT }
      for (let i = 0; i < 2; i++) await ask(null, { path: '/fast/events', headers: source, body: '{}' })
      await ask(null, { path: '/fast/events', headers: source, body: `{"id":"${HOOK}"}` })
      for (const body of [`{"part":"${PART}"}`, `{"part":"${PART}","x":1}`, `{"part":null,"x":"${PART}"}`])
        await ask(null, { path: '/fast/derived', headers: { 'x-part': PART }, body })
      for (const key of [issued, issued, `${issued}x`, later.idempotencyKey]) {
        await ask(key, { path: '/fast/issued' })
        await ask(key, { path: '/fast/issued', body: '{}' })
      }
      for (const bad of [forged, stale, `${good}x`])
        await ask(HOOK, { path: '/fast/hooks', headers: { authorization: `Bearer ${bad}` } })
      for (const key of [HOOK, EVENT]) await ask(key, { path: '/fast/rated' })
      for (let i = 0; i < 2; i++) await ask(HOOK, { path: '/fast/asked' })
      await ask(EVENT, { method: 'GET', path: '/status?method=POST&path=/fast/asked', body: null })
      await ask(`"${EVENT}`, { path: '/fast/other' })
    }
    await everything()
    for (const field of [inQuery, inForm]) t.ok((await ask(null, field)).replayed, 'it has its key')
    const slow = ask(HOOK, { path: '/slow' })
    await upstream.arrived(upstream.seen.length + 1)
    t.equal((await ask(HOOK, { path: '/slow' })).status, 409)
    upstream.finish(upstream.seen.length)
    await slow
    await until(() => Date.now() > Date.parse(expiresAt) + 50)
    await ask(later.idempotencyKey, { path: '/fast/issued', body: '{"x":1}' })
    await everything()
    const client = kind === 'redis' ? new Redis(store) : null
    t.teardown(() => client?.disconnect())
    // With the store full, or it or the key server down, errors of libraries are logged, which carry commands.
    await jwks.stop()
    if (client !== null) {
      await client.config('SET', 'maxmemory', '1')
      await everything()
      await client.config('SET', 'maxmemory', '0')
    }
    server?.pause()
    await everything()
    server?.resume()
    for (const status of [201, 400, 401, 409, 413, 422, 429, 502])
      t.ok(answers.includes(status), `there was a ${status}`)

    t.ok(proxy.log.filter(({ msg }) => msg === 'request').length > 50)
    quiet(t, JSON.stringify(proxy.log), [...secrets, ANSWER], 'a log line')
    quiet(t, await (await fetch(`${proxy.adminUrl}/metrics`)).text(), [...secrets, ANSWER], 'a metric')
    if (client !== null) {
      const names = await client.keys('*')
      t.ok(names.some((name) => name.includes(':r:')) && names.some((name) => name.endsWith(':u')))
      quiet(t, names.join('\n'), secrets, 'a Redis key')
      const values = await Promise.all(names.map((name) => valueOf(client, name)))
      quiet(t, values.join('\n'), secrets, 'a value')
      const kept = values.filter((value) => value.includes(ANSWER))
      t.equal(kept.length, 1, 'a replay needs the response, except for that of keep: outcome')
      return
    }
    const file = store.slice('sqlite:'.length)
    const listening = proxy.log.find(({ msg }) => msg === 'listening')
    t.match(listening, { store: 'sqlite', file, service: 'default' }, 'the log names the file')
    for (const one of [file, `${file}-wal`]) quiet(t, readFileSync(one, 'latin1'), secrets, one)
    await proxy.drain()
    const bytes = readFileSync(file, 'latin1')
    quiet(t, bytes, secrets, file)
    t.ok(bytes.includes(ANSWER))
  })

void t.test('O07 random keys, paths, callers and methods add no series to /metrics', async (t) => {
  const upstream = await heldUpstream(t)
  const [proxy] = (await replicas(
    t,
    1,
    `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nroutes: [{ name: orders, match: { path: "/fast/orders/:id" } }]`,
  )) as [TestProxy]
  const some = async (): Promise<void> => {
    const random = newKey()
    const headers = { authorization: `Bearer ${random}`, 'x-tenant': random }
    for (let n = 0; n < 2; n++) await send(proxy, random, { path: `/fast/orders/${random}`, headers })
    await send(proxy, random, { path: `/fast/${random}?q=${random}`, headers })
    await send(proxy, null, { path: `/fast/${random}`, headers, method: 'PROPFIND' })
  }
  const text = async () => (await fetch(`${proxy.adminUrl}/metrics`)).text()
  // Operations that timers start have no series until their timer has fired.
  const series = async (): Promise<string[]> =>
    (await text())
      .split('\n')
      .filter((line) => line.startsWith('idempotency_') && !/operation="(ping|due|renew|remove)"/.test(line))
      .map((line) => line.replace(/ \S+$/, ''))
  await some()
  await metricIs(proxy, 'idempotency_requests_total{route="default",outcome="passed"}', 1)
  const before = await series()
  for (let n = 0; n < 15; n++) await some()
  t.strictSame(await series(), before)
  const routes = new Set([...(await text()).matchAll(/route="([^"]*)"/g)].map(([, route]) => route))
  t.strictSame(routes, new Set(['default', 'orders']))
})
