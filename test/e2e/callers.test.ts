import t, { type Test } from 'tap'
import { jwksServer, type Pair, pair, token } from '../credentials/support.ts'
import { newKey, type Reply, send } from '../support/e2e.ts'
import { type TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import {
  emptyStore,
  type HeldUpstream,
  heldUpstream,
  KINDS,
  recordsIn,
  refusalOf,
  replicas,
} from '../support/replicas.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const CLAIMS = { iss: 'https://issuer.test', aud: 'api' }
const SECRET_ANSWER = 'what-alice-alone-may-see'

/** A token of that caller, valid for an hour; each call makes a different one. */
function tokenOf(by: Pair, sub: string, claims: object = {}, header: object = {}): Promise<string> {
  const exp = Math.floor(Date.now() / 1000) + 3600
  return token(by, { sub, exp, jti: newKey(), ...CLAIMS, ...claims }, header)
}

async function payments(t: Test): Promise<UpstreamStub> {
  let n = 0
  const stub = await upstreamStub((_seen, response) => {
    response.writeHead(201, { 'X-Secret': SECRET_ANSWER }).end(`${SECRET_ANSWER} ${++n}`)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return stub
}

async function proxyWith(t: Test, upstream: UpstreamStub, store: string, route: string): Promise<TestProxy> {
  const yaml = `upstream: { url: "${upstream.url}", timeout: 5s }
store: { url: "${store}" }
drain: { timeout: 3s }
routes: [{ name: pay, match: { path: /pay }, ${route} }]`
  return (await replicas(t, 1, yaml))[0] as TestProxy
}

function jwtScope(jwks: string, anonymous = 'share'): string {
  return `scope: { caller: "jwt:sub", anonymous: ${anonymous}, jwt: { jwks: "${jwks}", issuer: "${CLAIMS.iss}", audience: ${CLAIMS.aud} } }`
}

function asCaller(credentials: string, more: object = {}) {
  return { headers: { authorization: `Bearer ${credentials}` }, ...more }
}

function tellsNothing(t: Test, reply: Reply, what: string): void {
  t.notOk(reply.replayed, what)
  t.notOk(JSON.stringify([reply.body, ...reply.headers]).includes(SECRET_ANSWER), `${what}: no stored byte`)
}

for (const kind of KINDS)
  void t.test(`S04 S06 a rotated token with the same sub replays, nobody else's does: ${kind}`, async (t) => {
    const [own, mallory] = [await pair('ES256'), await pair('ES256')]
    await using jwks = await jwksServer(own)
    const upstream = await payments(t)
    const store = await emptyStore(t, kind)
    for (const anonymous of ['share', 'reject']) {
      const proxy = await proxyWith(t, upstream, store, jwtScope(jwks.url, anonymous))
      const n = upstream.seen.length
      const key = newKey()
      const alice = await tokenOf(own, 'alice')
      const first = await send(proxy, key, asCaller(alice))
      t.match(first, { status: 201, replayed: false })
      const rotated = await tokenOf(own, 'alice')
      t.not(rotated, alice)
      t.match(await send(proxy, key, asCaller(rotated)), { body: first.body, replayed: true })
      t.equal(upstream.seen.length, n + 1)

      const before = await recordsIn(store)
      // Each of the others: test/credentials/jwt.test.ts.
      for (const [what, wrong] of Object.entries({
        'signed by somebody else': await tokenOf(mallory, 'alice'),
        expired: await tokenOf(own, 'alice', { exp: Math.floor(Date.now() / 1000) - 3600 }),
        'of another issuer': await tokenOf(own, 'alice', { iss: 'https://issuer.evil' }),
        'for another audience': await tokenOf(own, 'alice', { aud: 'other' }),
        'with a blank claim': await tokenOf(own, ' '),
      })) {
        const refused = await send(proxy, key, asCaller(wrong))
        t.strictSame(refusalOf(refused), [401, 'idempotency_caller_missing'], what)
        tellsNothing(t, refused, what)
        t.equal((await send(proxy, newKey(), asCaller(wrong))).status, 401, 'nor does it execute')
      }
      t.equal(upstream.seen.length, n + 1)
      t.strictSame(await recordsIn(store), before, 'refused requests write nothing')

      // Another caller has its own keys; so do callers without a token, where they share a bucket.
      const bob = await tokenOf(own, 'bob')
      t.match(await send(proxy, key, asCaller(bob)), { status: 201, replayed: false })
      t.ok((await send(proxy, key, asCaller(bob))).replayed)
      t.match(await send(proxy, key, asCaller(rotated)), { body: first.body, replayed: true })
      const nobody = await rawRequest(proxy.port, post('/pay', key, '{"amount":1}'))
      t.equal(nobody.status, anonymous === 'reject' ? 401 : 201)
      const basic = await send(proxy, key, { headers: { authorization: 'Basic YTpi' } })
      t.strictSame(refusalOf(basic), [401, 'idempotency_caller_missing'])
      tellsNothing(t, basic, 'another scheme')
      // The next one identifies records differently.
      await proxy.drain()
    }
  })

const STATUS = '/.idempotency/status'

async function proxyWithStatus(
  t: Test,
  upstream: HeldUpstream,
  store: string,
  more = '',
): Promise<TestProxy> {
  const yaml = `upstream: { url: "${upstream.url}", timeout: 1s }
store: { url: "${store}" }
drain: { timeout: 3s }
status: { path: "${STATUS}" }
${more}`
  return (await replicas(t, 1, yaml))[0] as TestProxy
}

interface Said {
  readonly state: string
  readonly since: string
  readonly retryAfter: number | null
  readonly recordId: string
}

/** Asks about POST /pay, or what `query` says. */
function ask(
  proxy: TestProxy,
  key: string | null,
  {
    query = 'method=POST&path=/pay',
    headers = {},
  }: { query?: string; headers?: Record<string, string> } = {},
): Promise<Reply> {
  return send(proxy, key, { method: 'GET', path: `${STATUS}?${query}`, body: null, headers })
}

function said(t: Test, reply: Reply, state: string): Said {
  t.equal(reply.status, 200)
  t.match(reply.headers.get('content-type'), /^application\/json/)
  t.equal(reply.headers.get('cache-control'), 'no-store')
  t.equal(reply.headers.get('idempotent-replayed'), null)
  const body = JSON.parse(reply.body) as Said
  t.strictSame(Object.keys(body).sort(), ['recordId', 'retryAfter', 'since', 'state'])
  t.equal(body.state, state)
  t.match(body.recordId, /^[\w-]{43}$/)
  t.match(body.since, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/)
  t.notOk(reply.body.includes('execution'), 'never the stored body')
  return body
}

for (const kind of KINDS)
  void t.test(`§6 status.path reports the state and changes nothing: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWithStatus(t, upstream, store)
    const key = newKey()
    const before = await recordsIn(store)
    t.equal((await ask(proxy, key)).status, 404, 'no record')
    t.strictSame(await recordsIn(store), before, 'asking makes none')

    const first = send(proxy, key)
    await upstream.arrived(1)
    const held = await recordsIn(store)
    const running = said(t, await ask(proxy, key), 'in_progress')
    t.ok(Number.isInteger(running.retryAfter) && Number(running.retryAfter) >= 1)
    t.ok(Number(running.retryAfter) <= 30)
    t.ok(Math.abs(Date.parse(running.since) - Date.now()) < 60_000)
    const duplicate = await send(proxy, key)
    t.equal((JSON.parse(duplicate.body) as { instance: string }).instance, running.recordId)
    t.strictSame(await recordsIn(store), held)
    upstream.finish(1)
    t.equal((await first).status, 201)

    const kept = await recordsIn(store)
    const done = said(t, await ask(proxy, `"${key}"`), 'completed')
    t.strictSame([done.recordId, done.retryAfter], [running.recordId, null])
    // In any spelling that matches the same route.
    said(t, await ask(proxy, key, { query: 'path=%2Fpay&method=POST' }), 'completed')
    said(t, await ask(proxy, key, { query: 'method=POST&path=//p%2561y/' }), 'completed')

    // The key and the credentials of the request are needed.
    const absent: readonly [string, Promise<Reply>][] = [
      ['another caller', ask(proxy, key, { headers: { authorization: 'Bearer mallory' } })],
      ['no caller', ask(proxy, key, { headers: { authorization: '' } })],
      ['another key', ask(proxy, newKey())],
      ['another path', ask(proxy, key, { query: 'method=POST&path=/pay/more' })],
      ['another method', ask(proxy, key, { query: 'method=PATCH&path=/pay' })],
    ]
    for (const [what, asking] of absent) {
      const reply = await asking
      t.equal(reply.status, 404, what)
      t.notOk(reply.body.includes(done.recordId), what)
      t.equal(reply.headers.get('idempotency-retry'), 'same-key', what)
    }
    t.equal((await ask(proxy, null)).status, 400, 'no key')
    t.equal((await ask(proxy, '"x')).status, 400, 'an invalid key')
    t.equal((await ask(proxy, key, { query: '' })).status, 404, 'no path')
    const reading = await ask(proxy, key, { query: 'method=GET&path=/pay' })
    t.equal(reading.status, 404, 'nothing is protected there')
    t.strictSame(await recordsIn(store), kept, 'no record or expiry has changed')
    t.equal(upstream.seen.length, 1, 'the upstream is not asked')
    t.match(await send(proxy, key), { status: 201, replayed: true })
    t.equal(upstream.seen.length, 1)
  })

const ACCEPTED = `defaults: { inFlight: { status: 202 } }
routes:
  - { name: exact, match: { path: "/exact/*", exact: true, methods: [POST, PUT, DELETE] }, inFlight: { status: 202 } }
  - { name: events, match: { path: /events }, key: { from: ["header:ce-id"] }, inFlight: { status: 202 } }`

const PLAIN = '/pay /pay?a=1&method=GET&path=/x /pay/caf%C3%A9/%E2%82%AC /pay/a%2Fb /pay/a%252Fb /pay/a+b%20c'
const ODD = "/pay//double///slash/ /pay/%7Etilde%2e /pay/a;b=c&d,e=f!$'()*:@ /exact//double/ /exact/%7Etilde"
const TARGETS = `${PLAIN} ${ODD}`.split(' ')

for (const kind of KINDS)
  void t.test(`§6 I07 following the Location of a 202 gives the state: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const proxy = await proxyWithStatus(t, upstream, await emptyStore(t, kind), ACCEPTED)
    let n = 0
    const asks = [
      ...TARGETS.map((path) => ({ method: 'POST', path, headers: {} })),
      { method: 'PATCH', path: '/pay', headers: {} },
      { method: 'PUT', path: '/exact/a', headers: {} },
      { method: 'DELETE', path: '/exact/a', headers: {} },
      { method: 'POST', path: '/events', headers: { 'ce-id': '1', 'ce-source': '/a b' } },
    ]
    for (const { method, path, headers } of asks) {
      const key = 'ce-id' in headers ? null : newKey()
      const first = send(proxy, key, { method, path, headers })
      const seen = await upstream.arrived(++n)
      t.equal(seen.target, path, 'as sent')
      const duplicate = await send(proxy, key, { method, path, headers })
      t.strictSame(refusalOf(duplicate), [202, 'idempotency_key_in_progress'], path)
      const { instance } = JSON.parse(duplicate.body) as { instance: string }
      const location = duplicate.headers.get('location')
      t.type(location, 'string')
      const followed = new URL(location as string, `${proxy.url}${path}`)
      t.equal(followed.origin, proxy.url)
      // The same headers, Content-Type included.
      const follow = () =>
        send(proxy, key, {
          method: 'GET',
          path: `${followed.pathname}${followed.search}`,
          body: null,
          headers: { 'content-type': 'application/json', ...headers },
        })
      t.equal(said(t, await follow(), 'in_progress').recordId, instance)
      upstream.finish(n)
      t.equal((await first).status, 201)
      t.equal(said(t, await follow(), 'completed').recordId, instance)
      t.equal(upstream.seen.length, n)
    }
  })

void t.test('§6 I07 a 202 has a Location only where following it works', async (t) => {
  const upstream = await heldUpstream(t)
  const routes = `routes:
  - { name: hooks, match: { path: /hooks }, key: { from: ["header:idempotency-key", "json:/id"] }, inFlight: { status: 202 } }
  - { name: derived, match: { path: /derived }, key: { derive: { json: [/id] } }, inFlight: { status: 202 } }`
  const proxy = await proxyWithStatus(t, upstream, 'memory:', routes)
  let n = 0
  for (const path of ['/hooks', '/derived'])
    for (const key of [null, 'k-1']) {
      const body = `{"id":"${key ?? 'k-2'}"}`
      const first = send(proxy, key, { path, body })
      await upstream.arrived(++n)
      const duplicate = await send(proxy, key, { path, body })
      t.equal(duplicate.status, 202)
      const location = duplicate.headers.get('location')
      if (key !== null) t.type(location, 'string', 'the state of a key in a header can be asked for')
      if (location !== null) {
        const followed = await send(proxy, key, { method: 'GET', path: location, body: null })
        t.equal(followed.status, 200, `${path} with the key ${key}`)
      }
      upstream.finish(n)
      t.equal((await first).status, 201)
    }
})

void t.test('§6 other methods on status.path go upstream; where it is not set, GET does too', async (t) => {
  const upstream = await heldUpstream(t)
  const proxy = await proxyWithStatus(t, upstream, 'memory:')
  for (let n = 1; n <= 20; n++) upstream.finish(n)
  const target = `${STATUS}?method=POST&path=/pay`
  for (const method of ['HEAD', 'POST', 'PUT', 'DELETE', 'OPTIONS']) {
    const body = ['POST', 'PUT'].includes(method) ? '{}' : null
    const reply = await send(proxy, null, { method, path: target, body })
    t.equal(reply.status, 201, method)
    t.match(upstream.seen.at(-1), { method, target })
  }
  // A POST with a key is protected like any other.
  const key = newKey()
  t.match(await send(proxy, key, { path: target }), { status: 201, replayed: false })
  t.match(await send(proxy, key, { path: target }), { status: 201, replayed: true })
  t.equal((await ask(proxy, key)).status, 404)
  const [plain] = await replicas(t, 1, `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`)
  if (!plain) throw new Error('one is started')
  t.equal((await ask(plain, key)).status, 201)
  t.match(upstream.seen.at(-1), { method: 'GET', target })
})
