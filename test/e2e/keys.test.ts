import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { newKey, type Reply, send, tempDir } from '../support/e2e.ts'
import type { TestProxy } from '../support/proxy.ts'
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
