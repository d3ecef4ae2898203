import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { newKey, type Reply, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import {
  emptyStore,
  essenceOf,
  heldUpstream,
  KINDS,
  recordsIn,
  refusalOf,
  replicas,
} from '../support/replicas.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

/** An upstream whose every response is different. */
async function countingUpstream(t: Test): Promise<UpstreamStub> {
  let n = 0
  const stub = await upstreamStub((_seen, response) => {
    response.writeHead(201, { 'X-Execution': String(++n) }).end(`execution ${n}`)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return stub
}

async function proxyWith(t: Test, upstream: UpstreamStub, store: string, more: string): Promise<TestProxy> {
  const yaml = `upstream: { url: "${upstream.url}", timeout: 5s }\nstore: { url: "${store}" }\ndrain: { timeout: 3s }\n${more}`
  return (await replicas(t, 1, yaml))[0] as TestProxy
}

function linesNamed({ headers }: { readonly headers: readonly string[] }, name: string): string[] {
  return headers.filter((_, i) => i % 2 === 1 && headers[i - 1]?.toLowerCase() === name)
}

const HOOKS =
  '{ name: hooks, match: { path: /hooks }, statusHeader: true, key: { from: ["json:/id"], presence: required } }'

for (const kind of KINDS)
  void t.test(`§4 the id in a webhook's body is its key: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await proxyWith(t, upstream, await emptyStore(t, kind), `routes: [${HOOKS}]`)
    const hook = (body: string) => send(proxy, null, { path: '/hooks', body })
    const ids = [
      '"evt_1"',
      '"EVT_1"',
      '"evt{1}:*/\\u0041"',
      '9007199254740992',
      '9007199254740993',
      '-9223372036854775808',
      '18446744073709551615',
    ]
    for (const [i, id] of ids.entries()) {
      const body = `{ "type":"paid" , "id" : ${id} }`
      const first = await hook(body)
      t.match(first, { status: 201, body: `execution ${i + 1}`, replayed: false }, id)
      const retry = await hook(body)
      t.ok(retry.replayed)
      t.same(retry.body, first.body)
      t.equal(upstream.seen[i]?.body.toString(), body, 'the upstream gets the bytes as sent')
      t.equal((await hook(`{"id":${id},"type":"refunded"}`)).code, 'idempotency_key_reused')
    }
    t.equal(upstream.seen.length, ids.length)
  })

void t.test('§4 K02 K03 an absent JSON value gives key_missing, an unusable one key_invalid', async (t) => {
  const upstream = await countingUpstream(t)
  const store = await emptyStore(t, 'sqlite')
  const proxy = await proxyWith(t, upstream, store, `routes: [${HOOKS}]`)
  const hook = (body: string | null, headers = {}) => send(proxy, null, { path: '/hooks', body, headers })
  for (const body of ['{}', '{"ID":"a"}', '[{"id":"a"}]', '"id"', '{"id":"a"', 'id=a', '', null]) {
    const refused = await hook(body)
    t.strictSame(refusalOf(refused), [400, 'idempotency_key_missing'], String(body))
  }
  for (const id of [
    'null',
    'true',
    '1.0',
    '1.5',
    '1e3',
    '{}',
    '["a"]',
    '""',
    '"  "',
    '"caf\\u00e9"',
    '"a\\nb"',
    `"${'x'.repeat(256)}"`,
  ])
    t.strictSame(refusalOf(await hook(`{"id":${id}}`)), [400, 'idempotency_key_invalid'], id.slice(0, 20))
  t.equal((await hook('{"id":"a","id":"b"}')).code, 'idempotency_key_invalid', 'a duplicate member')
  t.equal(upstream.seen.length, 0)
  t.strictSame(await recordsIn(store), [], 'nothing is recorded')
  t.equal((await hook(`{"id":"${'x'.repeat(255)}"}`)).status, 201)
})

for (const kind of KINDS)
  void t.test(`§4 K01 a request without its optional key passes with its body intact: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWith(
      t,
      upstream,
      store,
      `limits: { request: 64KiB }
routes: [{ name: r, match: { path: /r }, statusHeader: true, key: { from: ["header:idempotency-key", "json:/id"] } }]`,
    )
    const before = await recordsIn(store)
    const binary = randomBytes(60_000)
    for (const n of [1, 2]) {
      const response = await fetch(`${proxy.url}/r?q=1`, {
        method: 'POST',
        headers: { authorization: 'a', 'content-type': 'application/octet-stream', 'x-own': 'yes' },
        body: binary,
      })
      t.equal(await response.text(), `execution ${n}`, 'executed each time')
      t.equal(response.headers.get('idempotency-status'), 'ignored')
      t.equal(response.headers.get('idempotent-replayed'), null)
      const seen = upstream.seen[n - 1]
      t.ok(seen?.body.equals(binary))
      t.equal(seen?.target, '/r?q=1')
      t.strictSame(linesNamed(seen ?? { headers: [] }, 'x-own'), ['yes'])
      t.strictSame(linesNamed(seen ?? { headers: [] }, 'idempotency-record'), [])
    }
    t.strictSame(await recordsIn(store), before)

    // F17: such a route has to read the body.
    for (const id of ['"big"', 'null'])
      for (const key of [null, newKey()]) {
        const body = `{"id":${id},"x":"${'x'.repeat(64 * 1024)}"}`
        t.strictSame(refusalOf(await send(proxy, key, { path: '/r', body })), [413, 'request_too_large'])
      }
    t.equal(upstream.seen.length, 2)
    t.strictSame(await recordsIn(store), before)
  })

for (const kind of KINDS)
  void t.test(`K12 keys in header and body must agree: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWith(
      t,
      upstream,
      store,
      'routes: [{ name: r, match: { path: /r }, key: { from: ["header:idempotency-key", "json:/id"] } }]',
    )
    const body = '{"id":"k-1"}'
    const before = await recordsIn(store)
    const refused = await send(proxy, 'k-2', { path: '/r', body })
    t.strictSame(refusalOf(refused), [400, 'idempotency_key_invalid'])
    t.notOk(refused.body.includes('k-1') || refused.body.includes('k-2'), 'names no key')
    t.equal(upstream.seen.length, 0)
    t.strictSame(await recordsIn(store), before)
    t.match(await send(proxy, '"k-1"', { path: '/r', body }), { status: 201, replayed: false })
    for (const key of [null, 'k-1']) t.ok((await send(proxy, key, { path: '/r', body })).replayed)
    t.equal((await send(proxy, 'k-1', { path: '/r', body: '{}' })).code, 'idempotency_key_reused')
    t.equal(upstream.seen.length, 1)
  })

for (const kind of KINDS)
  void t.test(`§4 CloudEvents: an id is unique within its source: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await proxyWith(
      t,
      upstream,
      await emptyStore(t, kind),
      'routes: [{ name: e, match: { path: /events }, key: { from: ["header:ce-id", "json:/id"], presence: required } }]',
    )
    const binary = (source: string, id: string) =>
      send(proxy, null, { path: '/events', body: '{}', headers: { 'ce-id': id, 'ce-source': source } })
    const structured = (source: string, id: string) =>
      send(proxy, null, {
        path: '/events',
        body: JSON.stringify({ specversion: '1.0', id, source }),
        headers: { 'content-type': 'application/cloudevents+json; charset=utf-8' },
      })
    let n = 0
    for (const ask of [binary, structured]) {
      // The last two concatenate to the same string.
      for (const [source, id] of [
        ['/a', '1'],
        ['/b', '1'],
        ['/a', '2'],
        ['s', 'ource1'],
        ['so', 'urce1'],
      ] as const) {
        const named = `${ask.name}-${source}`
        const first = await ask(named, id)
        t.match(first, { status: 201, body: `execution ${++n}`, replayed: false }, `${named} ${id}`)
        t.match(await ask(named, id), { replayed: true, body: `execution ${n}` })
      }
    }
    t.equal(upstream.seen.length, n)
    const differ = await send(proxy, null, {
      path: '/events',
      body: '{"id":"9","source":"/y"}',
      headers: { 'content-type': 'application/cloudevents+json', 'ce-id': '9', 'ce-source': '/x' },
    })
    t.strictSame(refusalOf(differ), [400, 'idempotency_key_invalid'])
    const [seen] = upstream.seen
    t.strictSame(linesNamed(seen ?? { headers: [] }, 'ce-id'), ['1'], 'forwarded')
  })

const DERIVE =
  '{ name: d, match: { path: "/d/*" }, key: { derive: { json: [/to, /amount], headers: [x-request] } } }'

for (const kind of KINDS)
  void t.test(`§4 derive makes a key where there is none, and responses say so: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWith(t, upstream, store, `routes: [${DERIVE}]`)
    const body = '{"to":"bob","amount":10}'
    const ask = (more: Parameters<typeof send>[2] = {}, key: string | null = null) =>
      send(proxy, key, { path: '/d/fast', body, ...more, headers: { 'x-request': 'r-1', ...more.headers } })
    const derived = ({ headers }: Reply) => headers.get('idempotency-key-derived')

    const slow = ask({ path: '/d/slow' })
    await upstream.arrived(1)
    const running = await ask({ path: '/d/slow' })
    t.strictSame([...refusalOf(running), derived(running)], [409, 'idempotency_key_in_progress', 'true'])
    upstream.finish(1)
    const first = await slow
    t.strictSame([first.status, first.replayed, derived(first)], [201, false, 'true'])
    const retry = await ask({ path: '/d/slow', body: '{ "amount": 10, "to": "bob" }' })
    t.strictSame([retry.replayed, derived(retry)], [true, 'true'])
    t.same(essenceOf(retry), essenceOf(first))
    const misuse = await ask({ path: '/d/slow', body: '{"to":"bob","amount":10,"note":"x"}' })
    t.strictSame([...refusalOf(misuse), derived(misuse)], [422, 'idempotency_key_reused', 'true'])
    t.equal(upstream.seen.length, 1)

    // Any other part that differs makes another key.
    let n = 1
    for (const other of [
      { body: '{"to":"bob","amount":11}' },
      { body: '{"to":"bo","amount":10}' },
      { headers: { 'x-request': 'r-2' } },
      { headers: { authorization: 'Bearer mallory' } },
    ]) {
      upstream.finish(++n)
      const executed = await ask({ path: '/d/slow', ...other })
      t.strictSame([executed.body, derived(executed)], [`execution ${n}`, 'true'], JSON.stringify(other))
      t.ok((await ask({ path: '/d/slow', ...other })).replayed)
    }
    // The client's own key is used as it is.
    upstream.finish(++n)
    const own = await ask({ path: '/d/slow' }, newKey())
    t.strictSame([own.body, derived(own)], [`execution ${n}`, null])
    // If a part is missing there is no key, and this route requires none.
    const before = await recordsIn(store)
    for (const body of ['{"to":"bob"}', 'to=bob', '{"to":null,"amount":10}']) {
      upstream.finish(++n)
      const passed = await ask({ path: '/d/slow', body })
      t.strictSame([passed.body, derived(passed)], [`execution ${n}`, null])
    }
    t.strictSame(await recordsIn(store), before)
    t.equal(upstream.seen.length, n)
  })

interface Issued {
  readonly idempotencyKey: string
  readonly expiresAt: string
}

async function issue(proxy: TestProxy): Promise<Issued> {
  const reply = await send(proxy, null, { path: '/idempotency-keys', body: null })
  if (reply.status !== 201) throw new Error(`${reply.status} ${reply.body}`)
  return JSON.parse(reply.body) as Issued
}

function issuer(
  t: Test,
  store: string,
  upstream: UpstreamStub,
  ttl: string,
  secret = 's'.repeat(32),
): string {
  const file = join(tempDir(t), 'secret')
  writeFileSync(file, secret)
  return `upstream: { url: "${upstream.url}", timeout: 5s }
store: { url: "${store}" }
drain: { timeout: 3s }
issuer: { path: /idempotency-keys, secretFile: "${file}", ttl: ${ttl} }
routes: [{ name: pay, match: { path: /pay }, key: { issuedOnly: true, presence: required } }]`
}

for (const kind of KINDS)
  void t.test(`§4 issuer: only keys that it issued are accepted: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const store = await emptyStore(t, kind)
    const [a] = await replicas(t, 1, issuer(t, store, upstream, '24h'))
    const [b] = await replicas(t, 1, issuer(t, store, upstream, '24h'))
    const [stranger] = await replicas(t, 1, issuer(t, store, upstream, '24h', 'z'.repeat(32)))
    if (!a || !b || !stranger) throw new Error('three are started')
    const asked = Date.now()
    const reply = await send(a, null, { path: '/idempotency-keys/', body: null })
    t.equal(reply.status, 201)
    t.match(reply.headers.get('content-type'), /^application\/json/)
    t.equal(reply.headers.get('cache-control'), 'no-store')
    const { idempotencyKey: key, expiresAt } = JSON.parse(reply.body) as Issued
    t.match(expiresAt, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/, 'RFC 3339')
    t.ok(Math.abs(Date.parse(expiresAt) - asked - 24 * 3_600_000) < 60_000)
    t.not((await issue(a)).idempotencyKey, key)
    t.equal(upstream.seen.length, 0, 'the upstream is not asked')

    t.match(await send(a, key), { status: 201, body: 'execution 1', replayed: false })
    t.match(await send(a, `"${key}"`), { body: 'execution 1', replayed: true })
    // Replicas with the same secret accept each other's keys (memory: each has its own records).
    t.match(await send(b, key), { status: 201, replayed: kind !== 'memory' })
    const n = upstream.seen.length
    const before = await recordsIn(store)
    const last = key.at(-1) as string
    for (const forged of [
      newKey(),
      `${key.slice(0, -1)}${last === 'A' ? 'B' : 'A'}`,
      key.slice(0, -1),
      `${key}x`,
      `${key.split('.')[0]}.${key.split('.')[1]}.`,
      key.replace(/^[^.]+/, Buffer.from('{"alg":"none"}').toString('base64url')),
      (await issue(stranger)).idempotencyKey,
    ])
      t.strictSame(refusalOf(await send(a, forged)), [400, 'idempotency_key_invalid'], forged.slice(-12))
    t.strictSame(refusalOf(await send(stranger, key)), [400, 'idempotency_key_invalid'])
    t.strictSame(refusalOf(await send(a, null)), [400, 'idempotency_key_missing'])
    t.equal(upstream.seen.length, n)
    t.strictSame(await recordsIn(store), before)
    // Other methods on this path go to the upstream.
    t.equal((await send(a, null, { method: 'GET', path: '/idempotency-keys', body: null })).status, 201)
    t.strictSame([upstream.seen[n]?.method, upstream.seen[n]?.target], ['GET', '/idempotency-keys'])
  })

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

function yamlOf(upstream: { readonly url: string }, store: string, fingerprint = '{}'): string {
  return `upstream: { url: "${upstream.url}" }
store: { url: "${store}" }
drain: { timeout: 3s }
defaults: { fingerprint: ${fingerprint} }`
}

interface Part {
  readonly name: string
  readonly filename?: string
  readonly type?: string
  readonly content: string
}

const PARTS: readonly Part[] = [
  { name: 'amount', content: '10' },
  { name: 'note', content: 'line one\r\n--not-the-boundary\r\nline two' },
  { name: 'receipt', filename: 'r.pdf', type: 'application/pdf', content: '%PDF-1.7\x01\x02' },
]

function multipart(boundary: string, parts: readonly Part[]) {
  const lines = parts.map(({ name, filename, type, content }) => {
    const file = filename === undefined ? '' : `; filename="${filename}"`
    const media = type === undefined ? '' : `\r\nContent-Type: ${type}`
    return `--${boundary}\r\nContent-Disposition: form-data; name="${name}"${file}${media}\r\n\r\n${content}\r\n`
  })
  return {
    path: '/fast',
    body: `${lines.join('')}--${boundary}--\r\n`,
    headers: { 'content-type': `multipart/form-data; boundary=${boundary}` },
  }
}

function reused(t: Test, reply: Reply, what: string): void {
  t.strictSame(refusalOf(reply), [422, 'idempotency_key_reused'], what)
}

for (const kind of KINDS)
  void t.test(`F14 multipart: the boundary does not count, the parts do: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(yamlOf(upstream, await emptyStore(t, kind)))
    const key = newKey()
    const first = await send(proxy, key, multipart('boundary-1', PARTS))
    t.equal(first.status, 201)
    for (const boundary of ['boundary-2', 'XYZ', '----WebKitFormBoundaryAbC123'])
      t.match(await send(proxy, key, multipart(boundary, PARTS)), { body: first.body, replayed: true })
    const [amount, note, receipt] = PARTS as [Part, Part, Part]
    for (const [what, parts] of Object.entries({
      content: [{ ...amount, content: '11' }, note, receipt],
      'a name': [{ ...amount, name: 'sum' }, note, receipt],
      'a filename': [amount, note, { ...receipt, filename: 'other.pdf' }],
      'a type': [amount, note, { ...receipt, type: 'text/plain' }],
      order: [note, amount, receipt],
      'one more': [...PARTS, amount],
      'one less': [amount, note],
      // The same text if the parts were concatenated.
      'where a part ends': [{ ...amount, content: '1' }, { ...note, content: `0${note.content}` }, receipt],
    }))
      reused(t, await send(proxy, key, multipart('boundary-3', parts)), what)
    t.equal(upstream.seen.length, 1)

    // A client that makes a new boundary each time.
    const another = newKey()
    const boundaries = new Set<string | null>()
    const post = async (amount: string): Promise<Response> => {
      const form = new FormData()
      form.set('amount', amount)
      form.set('receipt', new Blob(['%PDF-1.7'], { type: 'application/pdf' }), 'r.pdf')
      const request = new Request(`${proxy.url}/fast`, { method: 'POST', body: form })
      boundaries.add(request.headers.get('content-type'))
      request.headers.set('authorization', 'Bearer alice')
      request.headers.set('idempotency-key', another)
      const response = await fetch(request)
      await response.text()
      return response
    }
    t.equal((await post('10')).status, 201)
    t.equal((await post('10')).headers.get('idempotent-replayed'), 'true')
    t.equal((await post('11')).status, 422)
    t.equal(boundaries.size, 3)
    t.equal(upstream.seen.length, 2)
  })

for (const kind of KINDS)
  void t.test(`F15 forms: the encoding does not count, pairs and their order do: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(yamlOf(upstream, await emptyStore(t, kind)))
    const key = newKey()
    const ask = (body: string, type = 'application/x-www-form-urlencoded') =>
      send(proxy, key, { path: '/fast', body, headers: { 'content-type': type } })
    const first = await ask('to=b%C3%B6b&note=x+y&n=1%262&n=2')
    t.equal(first.status, 201)
    for (const same of [
      'to=b%C3%B6b&note=x%20y&n=1%262&n=2',
      '%74o=b%c3%b6b&note=%78+%79&n=%31%262&n=2',
      'to=b%C3%B6b&note=x+y&n=1%262&n=2',
    ])
      t.match(await ask(same), { body: first.body, replayed: true }, same)
    t.ok(
      (await ask('to=b%C3%B6b&note=x+y&n=1%262&n=2', 'Application/X-WWW-Form-Urlencoded; charset=utf-8'))
        .replayed,
    )
    for (const other of [
      'note=x+y&to=b%C3%B6b&n=1%262&n=2',
      'to=b%C3%B6b&note=x+y&n=2&n=1%262',
      'to=b%C3%B6b&note=x%2By&n=1%262&n=2',
      'to=b%C3%B6b&note=x+y&n=1&2&n=2',
      'to=b%C3%B6b&note=x+y&n=1%262',
      'to=bob&note=x+y&n=1%262&n=2',
      'to=b%C3%B6b&note=X+y&n=1%262&n=2',
    ])
      reused(t, await ask(other), other)
    t.equal(upstream.seen.length, 1)
  })

const BODY = '{"amount":10, "sentAt":"12:00"}'
const CHANGES: readonly (readonly [what: string, before: string, after: string])[] = [
  ['ignore added', '{}', '{ ignore: [/sentAt] }'],
  ['ignore to only', '{ ignore: [/sentAt] }', '{ only: [/amount] }'],
  ['another body mode', '{ body: json }', '{ body: raw }'],
  ['the body no longer counts', '{}', '{ body: none }'],
  ['a header counts', '{}', '{ headers: [x-version] }'],
  ['another header counts', '{ headers: [x-version] }', '{ headers: [x-tenant] }'],
  ['the order of the query does not count', '{}', '{ query: sorted }'],
  ['all at once', '{}', '{ body: json, ignore: [/sentAt], headers: [x-version], query: ignore }'],
]

for (const kind of KINDS.filter((one) => one !== 'memory'))
  void t.test(`F20 a retry replays across recipes, in flight and afterwards: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const routes = (recipes: readonly string[]) =>
      recipes.map((recipe, n) => `  - { name: r${n}, match: { path: /slow${n} }, fingerprint: ${recipe} }`)
    const yaml = (recipes: readonly string[]) =>
      `${yamlOf(upstream, store)}\nroutes:\n${routes(recipes).join('\n')}`
    const [one] = (await replicas(t, 1, yaml(CHANGES.map(([, before]) => before)))) as [TestProxy]
    const [two] = (await replicas(t, 1, yaml(CHANGES.map(([, , after]) => after)))) as [TestProxy]
    for (const [n, [what]] of CHANGES.entries())
      for (const [old, fresh] of [
        [one, two],
        [two, one],
      ] as const) {
        const key = newKey()
        const ask = (proxy: TestProxy, more: { body?: string; query?: string; headers?: object } = {}) =>
          send(proxy, key, {
            path: `/slow${n}?${more.query ?? 'a=1&b=2'}`,
            body: more.body ?? BODY,
            headers: { 'x-version': '1', 'x-tenant': 'acme', ...more.headers },
          })
        const executed = upstream.seen.length
        const first = ask(old)
        await upstream.arrived(executed + 1)
        t.strictSame(refusalOf(await ask(fresh)), [409, 'idempotency_key_in_progress'], what)
        upstream.finish(executed + 1)
        const { body } = await first
        t.match(await ask(fresh), { status: 201, body, replayed: true }, what)
        const snapshot = await recordsIn(store)
        // Different requests under either recipe.
        reused(t, await ask(fresh, { body: '{"amount":11, "sentAt":"12:00"}' }), `${what}: the amount`)
        reused(t, await ask(fresh, { query: 'a=1&b=3' }), `${what}: the query`)
        reused(t, await ask(fresh, { headers: { 'content-type': 'text/plain' } }), `${what}: the media type`)
        t.strictSame(await recordsIn(store), snapshot, 'refused requests change nothing')
        for (const proxy of [old, fresh]) t.match(await ask(proxy), { body, replayed: true }, what)
        t.equal(upstream.seen.length, executed + 1)
      }
  })

void t.test(
  '§5 store.secretFile keys the digests in the store; an equal body replays, another amount does not',
  async (t) => {
    const upstream = await heldUpstream(t)
    const file = join(tempDir(t), 'secret')
    writeFileSync(file, 'a secret of sixteen bytes')
    const store = await emptyStore(t, 'sqlite')
    const yaml = yamlOf(upstream, store).replace('store: {', `store: { secretFile: "${file}",`)
    await using proxy = await proxyInProcess(yaml)
    await using plain = await proxyInProcess(yamlOf(upstream, store))
    const [key, body] = [newKey(), '{"amount":1,"to":"a"}']
    const first = await send(proxy, key, { path: '/fast', body })
    t.match(await send(proxy, key, { path: '/fast', body: '{"to":"a","amount":1.0}' }), {
      body: first.body,
      replayed: true,
    })
    reused(t, await send(proxy, key, { path: '/fast', body: '{"amount":2,"to":"a"}' }), 'another amount')
    const keyed = (await recordsIn(store)) as string[]
    await send(plain, key, { path: '/fast', body })
    const all = (await recordsIn(store)) as string[]
    t.strictSame([keyed.length, all.length], [1, 2])
    const digestsOf = (record = '') => [
      record.split(' ')[1]?.slice(126, 190),
      record.split(' ')[1]?.slice(190, 254),
    ]
    const [mine] = keyed.map(digestsOf)
    const [theirs] = all.filter((record) => !keyed.includes(record)).map(digestsOf)
    for (const [n, digest] of (mine ?? []).entries()) {
      t.equal(digest?.length, 64)
      t.not(digest, theirs?.[n])
    }
    t.equal(upstream.seen.length, 2)
  },
)
