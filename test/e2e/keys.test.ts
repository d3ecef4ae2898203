import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { type Ask, newKey, type Reply, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { countingUpstream, emptyStore, KINDS, recordsIn, refusalOf, replicas } from '../support/replicas.ts'
import type { UpstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

async function proxyWith(t: Test, upstream: UpstreamStub, store: string, more: string): Promise<TestProxy> {
  const yaml = `upstream: { url: "${upstream.url}", timeout: 5s }\nstore: { url: "${store}" }\ndrain: { timeout: 3s }\n${more}`
  return (await replicas(t, 1, yaml))[0] as TestProxy
}

function linesNamed({ headers }: { readonly headers: readonly string[] }, name: string): string[] {
  return headers.filter((_, i) => i % 2 === 1 && headers[i - 1]?.toLowerCase() === name)
}

/** Routes whose keys come from forms and queries. */
const FORM_KEYS = `  - name: checkout
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

const URLENCODED = { 'content-type': 'application/x-www-form-urlencoded' }

const ROUTES = `routes:
  - { name: hooks, match: { path: /hooks }, key: { from: ["json:/id"], presence: required } }
  - { name: both, match: { path: /both }, key: { from: ["header:idempotency-key", "json:/id"] } }
  - { name: events, match: { path: /events }, key: { from: ["header:ce-id", "json:/id"], presence: required } }
  - { name: derived, match: { path: /derived }, key: { derive: { json: [/to, /amount], headers: [x-request] } } }
${FORM_KEYS}`

type Sent = Ask & { readonly key?: string }

/** A place of a key, and requests that differ from the first one. */
interface Place {
  readonly first: Sent
  /** Another spelling of it: a replay. */
  readonly same?: readonly Sent[]
  /** The same key for something else. */
  readonly reused?: readonly Sent[]
  /** Another key. */
  readonly others?: readonly Sent[]
  readonly invalid?: readonly Sent[]
  readonly missing?: readonly Sent[]
  /** Without a key where none is required. */
  readonly passed?: readonly Sent[]
  readonly isDerived?: true
}

type Lines = Readonly<Record<string, string>>
const hook = (id: string, more = ''): Sent => ({
  path: '/hooks',
  body: `{ "type":"paid" , "id" : ${id}${more} }`,
})
const both = (id: string, key?: string): Sent => ({
  path: '/both',
  body: `{"id":"${id}"}`,
  ...(key && { key }),
})
const event = (headers: Lines, body: string): Sent => ({ path: '/events', headers, body })
const binary = (source: string, id: string) => event({ 'ce-id': id, 'ce-source': source }, '{}')
const STRUCTURED = { 'content-type': 'application/cloudevents+json; charset=utf-8' }
const structured = (source: string, id: string) =>
  event(STRUCTURED, JSON.stringify({ specversion: '1.0', id, source }))
const derived = (body: string, headers: Readonly<Record<string, string>> = {}): Sent => ({
  path: '/derived',
  body,
  headers: { 'x-request': 'r-1', ...headers },
})
const form = (path: string, body: string): Sent => ({ path, body, headers: URLENCODED })

/** As clients send it, each time with a boundary of its own. */
async function upload(key: string | Blob, amount = '5'): Promise<Sent> {
  const form = new FormData()
  form.set('amount', amount)
  form.set('idempotency_key', key)
  form.set('receipt', new Blob(['%PDF-1.7\0\r\n'], { type: 'application/pdf' }), 'receipt.pdf')
  const request = new Request('http://localhost/', { method: 'POST', body: form })
  const headers = { 'content-type': request.headers.get('content-type') as string }
  return { path: '/checkout', body: await request.text(), headers }
}

/** What else is a key, invalid or missing in each place: test/core/key-sources.test.ts, test/core/forms.test.ts. */
const PLACES: Readonly<Record<string, Place>> = {
  'the id in the body of a webhook': {
    first: hook('"evt_1"'),
    reused: [hook('"evt_1"', ',"more":1')],
    others: ['"evt{1}:*/\\u0041"', '9007199254740993'].map((id) => hook(id)),
    invalid: [hook('null')],
    missing: ['{}', null].map((body) => ({ path: '/hooks', body })),
  },
  'a header and the body, which agree (K12)': {
    first: both('k-1', '"k-1"'),
    same: [both('k-1', 'k-1'), both('k-1')],
    reused: [{ path: '/both', key: 'k-1', body: '{}' }],
    invalid: [both('k-1', 'k-2')],
  },
  'the id of a CloudEvent in headers, within its source': {
    first: binary('/a', '1'),
    // The last two concatenate to the same string.
    others: [binary('/b', '1'), binary('s', 'ource1'), binary('so', 'urce1')],
  },
  'the id of a structured CloudEvent, within its source': {
    first: structured('/c', '1'),
    others: [structured('/d', '1')],
    invalid: [event({ ...STRUCTURED, 'ce-id': '9', 'ce-source': '/x' }, '{"id":"9","source":"/y"}')],
  },
  'a key derived from the body and a header': {
    isDerived: true,
    first: derived('{"to":"bob","amount":10}'),
    same: [derived('{ "amount": 10, "to": "bob" }')],
    reused: [derived('{"to":"bob","amount":10,"note":"x"}')],
    others: [
      derived('{"to":"bob","amount":10}', { 'x-request': 'r-2' }),
      derived('{"to":"bob","amount":10}', { authorization: 'Bearer mallory' }),
      { ...derived('{"to":"bob","amount":10}'), key: 'of-the-client' },
    ],
    passed: [derived('to=bob')],
  },
  'a key derived from a field of a form': {
    isDerived: true,
    first: form('/orders', 'order=1&note=a'),
    reused: [form('/orders', 'order=1&note=b')],
    others: [form('/orders', 'order=2&note=a')],
    missing: [form('/orders', 'note=a')],
  },
  'a field of a form, however it is encoded (F15)': {
    first: form('/checkout', 'to=b%C3%B6b&note=x+y&idempotency_key=f-1'),
    same: [form('/checkout', '%74o=b%c3%b6b&note=x%20%79&idempotency_key=f-1')],
    reused: [form('/checkout', 'note=x+y&to=b%C3%B6b&idempotency_key=f-1')],
    others: [form('/checkout', 'to=b%C3%B6b&note=x+y&idempotency_key=f-2')],
    missing: [form('/checkout', 'amount=5')],
  },
  'a field of an upload, whatever its boundary (F14)': {
    first: await upload('u-1'),
    same: [await upload('u-1')],
    reused: [await upload('u-1', '6')],
    invalid: [await upload(new Blob(['u-3']))],
  },
  'a parameter of the query': {
    first: { path: '/checkout?idempotency_key=q-1&x=1' },
    same: [{ path: '/checkout?idempotency_key=q-1&x=1', key: 'q-1' }],
    invalid: [{ path: '/checkout?idempotency_key=q-1&x=1', key: 'q-2' }],
  },
  'an optional field or parameter': {
    first: form('/optional?k=o-1', 'a=1'),
    passed: [form('/optional?x=1', 'a=1')],
  },
}

for (const kind of KINDS)
  void t.test(`§4 wherever a key is, it finds its record: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWith(t, upstream, store, ROUTES)
    for (const [place, way] of Object.entries(PLACES))
      await t.test(place, async (t) => {
        const ask = async (sent: Sent, isKeyed = true): Promise<Reply> => {
          const reply = await send(proxy, sent.key ?? null, sent)
          const isDerived = isKeyed && way.isDerived === true && sent.key === undefined
          t.equal(reply.headers.get('idempotency-key-derived'), isDerived ? 'true' : null, String(sent.body))
          return reply
        }
        const executes = async (sent: Sent, isKeyed = true): Promise<void> => {
          const body = `execution ${upstream.seen.length + 1}`
          t.match(await ask(sent, isKeyed), { status: 201, body, replayed: false }, String(sent.body))
          t.match(upstream.seen.at(-1), { target: sent.path, body: Buffer.from(sent.body ?? '{"amount":1}') })
          if (isKeyed) t.match(await ask(sent), { status: 201, body, replayed: true }, String(sent.body))
        }
        await executes(way.first)
        const { body } = await ask(way.first)
        for (const same of way.same ?? [])
          t.match(await ask(same), { body, replayed: true }, String(same.body))
        const before = await recordsIn(store)
        const executed = upstream.seen.length
        for (const [status, code, all] of [
          [422, 'idempotency_key_reused', way.reused],
          [400, 'idempotency_key_invalid', way.invalid],
          [400, 'idempotency_key_missing', way.missing],
        ] as const)
          for (const sent of all ?? [])
            t.strictSame(refusalOf(await ask(sent, status === 422)), [status, code], String(sent.body))
        t.equal(upstream.seen.length, executed)
        for (const sent of way.passed ?? []) for (const _ of [1, 2]) await executes(sent, false)
        t.strictSame(await recordsIn(store), before, 'nothing is recorded')
        for (const other of way.others ?? []) await executes(other)
      })
    t.ok(
      upstream.seen.some((seen) => linesNamed(seen, 'ce-id').join() === 'ource1'),
      'it is forwarded',
    )
  })

/** Which keys are forged, for whom they are and until when: test/credentials/issuer.test.ts, test/protect/elsewhere.test.ts. */
for (const kind of KINDS)
  void t.test(`§4 issuer: only keys that it issued are accepted: ${kind}`, async (t) => {
    const upstream = await countingUpstream(t)
    const store = await emptyStore(t, kind)
    const file = join(tempDir(t), 'secret')
    writeFileSync(file, 's'.repeat(32))
    const issuer = `issuer: { path: /idempotency-keys, secretFile: "${file}", ttl: 24h }`
    const routes =
      'routes: [{ name: pay, match: { path: /pay }, key: { issuedOnly: true, presence: required } }]'
    const proxy = await proxyWith(t, upstream, store, `${issuer}\n${routes}`)
    const asked = Date.now()
    const reply = await send(proxy, null, { path: '/idempotency-keys/', body: null })
    t.equal(reply.status, 201)
    t.match(reply.headers.get('content-type'), /^application\/json/)
    t.equal(reply.headers.get('cache-control'), 'no-store')
    const { idempotencyKey: key, expiresAt } = JSON.parse(reply.body) as Record<string, string>
    t.match(expiresAt, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/, 'RFC 3339')
    t.ok(Math.abs(Date.parse(expiresAt ?? '') - asked - 24 * 3_600_000) < 60_000)
    t.equal(upstream.seen.length, 0, 'the upstream is not asked')

    t.match(await send(proxy, key ?? null), { status: 201, body: 'execution 1', replayed: false })
    t.match(await send(proxy, `"${key}"`), { body: 'execution 1', replayed: true })
    const before = await recordsIn(store)
    for (const forged of [newKey(), `${key}x`])
      t.strictSame(refusalOf(await send(proxy, forged)), [400, 'idempotency_key_invalid'])
    t.strictSame(refusalOf(await send(proxy, null)), [400, 'idempotency_key_missing'])
    t.equal(upstream.seen.length, 1)
    t.strictSame(await recordsIn(store), before)
    // Other methods on this path go to the upstream.
    t.equal((await send(proxy, null, { method: 'GET', path: '/idempotency-keys', body: null })).status, 201)
    t.match(upstream.seen[1], { method: 'GET', target: '/idempotency-keys' })
  })

const redis = await emptyRedis(t)

async function setUp(t: Test): Promise<{ proxy: TestProxy; upstream: UpstreamStub }> {
  const upstream = await countingUpstream(t)
  const yaml = `service: forms
upstream: { url: "${upstream.url}", timeout: 5s }
store: { url: "${redis.url}" }
log: { level: trace, format: json }
status: { path: /status }
wellKnown: true
routes:
${FORM_KEYS}`
  const proxy = await proxyInProcess(yaml)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return { proxy, upstream }
}

void t.test('§4 §6 instead of a retry, the state of a key in the query can be asked for', async (t) => {
  const { proxy } = await setUp(t)
  const path = `/checkout?idempotency_key=${newKey()}&x=1`
  t.match(await send(proxy, null, { path }), { status: 201, replayed: false })
  const asked = new URLSearchParams({ method: 'POST', path })
  const status = await send(proxy, null, { method: 'GET', path: `/status?${asked.toString()}`, body: null })
  t.match(JSON.parse(status.body), { state: 'completed' })
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
  for (const [name, value] of Object.entries({
    'content-type': 'text/html; charset=utf-8',
    'cache-control': 'no-store',
    vary: 'Accept',
    'idempotency-retry': 'new-key',
    'x-content-type-options': 'nosniff',
  }))
    t.equal(reused.headers.get(name), value)
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
