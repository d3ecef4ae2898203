import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { newKey, send } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { refusalOf } from '../support/replicas.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

const redis = await emptyRedis(t)

const ROUTES = `routes:
  - name: checkout
    match: { path: /checkout }
    statusHeader: true
    key: { from: ["header:idempotency-key", "form:idempotency_key", "query:idempotency_key"], presence: required }
  - name: optional
    match: { path: /optional }
    statusHeader: true
    key: { from: ["query:k", "form:k"] }
  - name: forms
    match: { path: /forms }
    key: { from: ["form:idempotency_key"], presence: required }
    fingerprint: { body: form }
  - name: orders
    match: { path: /orders }
    key: { presence: required, derive: { form: [order] } }
`

async function setUp(t: Test): Promise<{ proxy: TestProxy; upstream: UpstreamStub }> {
  let n = 0
  const upstream = await upstreamStub((_seen, response) => {
    response.writeHead(201).end(`execution ${++n}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = `service: forms
upstream: { url: "${upstream.url}", timeout: 5s }
store: { url: "${redis.url}" }
log: { level: trace, format: json }
status: { path: /status }
wellKnown: true
${ROUTES}`
  const proxy = await proxyInProcess(yaml)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return { proxy, upstream }
}

const URLENCODED = { 'content-type': 'application/x-www-form-urlencoded' }

void t.test('§4 a form field can be the key, urlencoded or multipart', async (t) => {
  const { proxy, upstream } = await setUp(t)
  const post = (body: string, path = '/checkout') => send(proxy, null, { path, body, headers: URLENCODED })
  const key = newKey()
  const body = `amount=5&idempotency_key=${key}`
  t.match(await post(body), { status: 201, body: 'execution 1', replayed: false })
  t.match(await post(body), { status: 201, body: 'execution 1', replayed: true })
  t.equal(upstream.seen[0]?.body.toString(), body, 'the upstream gets the form as it was sent')
  t.strictSame(refusalOf(await post(`amount=6&idempotency_key=${key}`)), [422, 'idempotency_key_reused'])
  t.match(await post(`amount=5&idempotency_key=${newKey()}`), { body: 'execution 2', replayed: false })
  t.strictSame(refusalOf(await post('amount=5')), [400, 'idempotency_key_missing'])
  t.strictSame(refusalOf(await post(`${body}&idempotency_key=${key}`)), [400, 'idempotency_key_invalid'])

  // A double click: two equal submissions at once.
  const twice = `amount=7&idempotency_key=${newKey()}`
  const both = await Promise.all([post(twice), post(twice)])
  t.ok(both.every(({ status, code }) => status === 201 || code === 'idempotency_key_in_progress'))
  t.equal(upstream.seen.length, 3, 'one execution')

  // Each upload has its own boundary.
  const upload = (key: string | Blob) => {
    const form = new FormData()
    form.set('amount', '5')
    form.set('idempotency_key', key)
    form.set('receipt', new Blob(['\0\xff']), 'receipt.png')
    return fetch(`${proxy.url}/checkout`, { method: 'POST', body: form, headers: { authorization: 'a' } })
  }
  const uploadKey = newKey()
  const first = await upload(uploadKey)
  t.equal(first.status, 201)
  const again = await upload(uploadKey)
  t.equal(again.headers.get('idempotent-replayed'), 'true')
  t.equal(await again.text(), await first.text())
  t.equal((await upload(new Blob([newKey()]))).status, 400, 'a file is not a key')
  t.equal(upstream.seen.length, 4)
})

void t.test('§4 a query parameter can be the key', async (t) => {
  const { proxy, upstream } = await setUp(t)
  const key = newKey()
  const path = `/checkout?idempotency_key=${key}&x=1`
  t.match(await send(proxy, null, { path }), { status: 201, replayed: false })
  t.match(await send(proxy, null, { path }), { status: 201, replayed: true })
  t.equal(upstream.seen[0]?.target, path)
  t.strictSame(refusalOf(await send(proxy, null, { path: `${path}&idempotency_key=${key}` })), [
    400,
    'idempotency_key_invalid',
  ])
  t.strictSame(refusalOf(await send(proxy, newKey(), { path })), [400, 'idempotency_key_invalid'], 'K12')
  t.match(await send(proxy, key, { path }), { replayed: true })
  t.strictSame(refusalOf(await send(proxy, null, { path: '/checkout?idempotency_key=' })), [
    400,
    'idempotency_key_invalid',
  ])
  t.equal(upstream.seen.length, 1)

  // A status query instead of a retry: the key is in the path that it asks about.
  const asked = new URLSearchParams({ method: 'POST', path })
  const status = await send(proxy, null, { method: 'GET', path: `/status?${asked.toString()}`, body: null })
  t.match(JSON.parse(status.body), { state: 'completed' })
})

void t.test('§4 an optional query or form key protects the requests that carry it', async (t) => {
  const { proxy, upstream } = await setUp(t)
  const post = (path: string, body: string) => send(proxy, null, { path, body, headers: URLENCODED })
  for (const n of [1, 2]) {
    const passed = await post('/optional?x=1', 'a=1')
    t.match(passed, { status: 201, body: `execution ${n}`, replayed: false })
    t.equal(passed.headers.get('idempotency-status'), 'ignored')
  }
  const key = newKey()
  t.match(await post(`/optional?k=${key}`, 'a=1'), { body: 'execution 3', replayed: false })
  t.match(await post(`/optional?k=${key}`, 'a=1'), { body: 'execution 3', replayed: true })
  t.strictSame(refusalOf(await post(`/optional?k=${key}`, `k=${newKey()}`)), [400, 'idempotency_key_invalid'])
  t.equal(upstream.seen.length, 3)
})

void t.test('§4 a key can be derived from a form field', async (t) => {
  const { proxy, upstream } = await setUp(t)
  const post = (body: string) => send(proxy, null, { path: '/orders', body, headers: URLENCODED })
  const first = await post('order=1&note=a')
  t.match(first, { status: 201, replayed: false })
  t.equal(first.headers.get('idempotency-key-derived'), 'true')
  t.match(await post('order=1&note=a'), { replayed: true })
  t.strictSame(refusalOf(await post('order=1&note=b')), [422, 'idempotency_key_reused'])
  t.match(await post('order=2&note=a'), { replayed: false })
  t.strictSame(refusalOf(await post('note=a')), [400, 'idempotency_key_missing'])
  t.equal(upstream.seen.length, 2)
})

void t.test('K22 a key in a form or a query is in no log line, metric, Redis key or value', async (t) => {
  const { proxy } = await setUp(t)
  const secret = 'raw-key-2c9e-do-not-tell'
  for (const path of ['/checkout', '/optional']) {
    const name = path === '/checkout' ? 'idempotency_key' : 'k'
    await send(proxy, null, { path: `${path}?${name}=${secret}` })
    await send(proxy, null, { path: `${path}?${name}=${secret}`, body: '{"other":1}' })
    await send(proxy, null, { path: `${path}?${name}=${secret}&${name}=${secret}` })
    await send(proxy, null, { path, body: `${name}=${secret}-2`, headers: URLENCODED })
    await send(proxy, null, { path, body: `a=1&${name}=${secret}-2`, headers: URLENCODED })
  }
  await send(proxy, null, { method: 'GET', path: `/elsewhere?k=${secret}`, body: null })
  t.ok(proxy.log.filter(({ msg }) => msg === 'request').length >= 8)
  const client = new Redis(redis.port, '127.0.0.1')
  t.teardown(() => client.disconnect())
  const keys = await client.keys('*')
  const dumped = await Promise.all(keys.map(async (key) => (await client.dumpBuffer(key)).toString('latin1')))
  const metrics = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
  for (const [where, text] of Object.entries({
    log: JSON.stringify(proxy.log),
    keys: keys.join(),
    values: dumped.join(),
    metrics,
  }))
    t.notOk(text.includes(secret), where)
})

const BROWSER = 'text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8'

void t.test('§6 a browser gets a refusal as an HTML page, other clients as problem+json', async (t) => {
  const { proxy, upstream } = await setUp(t)
  const post = (accept: string, body: string) =>
    send(proxy, null, { path: '/checkout', body, headers: { ...URLENCODED, accept } })
  const key = newKey()
  await post(BROWSER, `amount=5&idempotency_key=${key}`)
  const reused = await post(BROWSER, `amount=6&idempotency_key=${key}`)
  t.equal(reused.status, 422)
  t.match(reused.body, /<h1>You have sent this form before<\/h1>/)
  t.notOk(reused.body.includes(key))
  t.strictSame(
    ['content-type', 'cache-control', 'vary', 'idempotency-retry', 'x-content-type-options'].map((name) =>
      reused.headers.get(name),
    ),
    ['text/html; charset=utf-8', 'no-store', 'Accept', 'new-key', 'nosniff'],
  )
  t.match(reused.headers.get('content-security-policy'), /^default-src 'none'; style-src 'sha256-/)
  t.equal((await post(BROWSER, 'amount=5')).status, 400)
  for (const accept of ['*/*', 'application/json', 'text/html, application/json', 'text/html;q=0.5, */*']) {
    const problem = await post(accept, `amount=6&idempotency_key=${key}`)
    t.strictSame(refusalOf(problem), [422, 'idempotency_key_reused'], accept)
    t.equal(problem.headers.get('content-type'), 'application/problem+json')
  }
  t.equal(upstream.seen.length, 1)

  await upstream[Symbol.asyncDispose]()
  const down = await post(BROWSER, `amount=7&idempotency_key=${newKey()}`)
  t.equal(down.status, 502)
  t.match(down.body, /<h1>The service cannot be reached<\/h1>/)
  const passed = await send(proxy, null, { path: '/other', headers: { accept: BROWSER } })
  t.equal(passed.status, 502)
  t.match(passed.body, /<h1>The service cannot be reached<\/h1>/, 'pass-through too')
})

void t.test('§4 the published policy lists where keys are read from', async (t) => {
  const { proxy } = await setUp(t)
  const policy = (await (await fetch(`${proxy.url}/.well-known/idempotency`)).json()) as {
    routes: { key: { from: object[] } }[]
  }
  t.strictSame(policy.routes[0]?.key.from, [
    { in: 'header', name: 'Idempotency-Key' },
    { in: 'form', name: 'idempotency_key' },
    { in: 'query', name: 'idempotency_key' },
  ])
})
