import { createHmac } from 'node:crypto'
import t, { type Test } from 'tap'
import { jwksServer, type Pair, pair, part, token } from '../credentials/support.ts'
import { gate, newKey, type Reply, send } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import type { TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { emptyStore, KINDS, recordsIn, refusalOf, replicas } from '../support/replicas.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const CLAIMS = { iss: 'https://issuer.test', aud: 'api' }
const SECRET_ANSWER = 'what-alice-alone-may-see'

/** The wall clock of the proxies in this process; tests can move it forward. */
const wallClock = Date.now
let ahead = 0
Date.now = () => wallClock() + ahead
t.afterEach(() => {
  ahead = 0
})

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
      const [head, claims, signature] = alice.split('.') as [string, string, string]
      const none = part({ alg: 'none', typ: 'JWT' })
      const symmetric = `${part({ alg: 'HS256', kid: own.kid })}.${claims}`
      const hmac = createHmac('sha256', JSON.stringify(own.jwk)).update(symmetric).digest('base64url')
      const long = Math.floor(Date.now() / 1000) - 3600
      for (const [what, wrong] of Object.entries({
        'signed by somebody else': await tokenOf(mallory, 'alice'),
        'other claims under a real signature': `${head}.${part({ ...CLAIMS, sub: 'alice', exp: 9e9, x: 1 })}.${signature}`,
        'alg none': `${none}.${claims}.`,
        'alg none with a signature': `${none}.${claims}.${signature}`,
        'the public key as a secret': `${symmetric}.${hmac}`,
        'an unknown key id': await tokenOf(mallory, 'alice', {}, { kid: 'unknown' }),
        expired: await tokenOf(own, 'alice', { exp: long }),
        'without an expiry': await tokenOf(own, 'alice', { exp: undefined }),
        'not valid yet': await tokenOf(own, 'alice', { nbf: long + 7200 }),
        'of another issuer': await tokenOf(own, 'alice', { iss: 'https://issuer.evil' }),
        'for another audience': await tokenOf(own, 'alice', { aud: 'other' }),
        'without the claim': await tokenOf(own, 'alice', { sub: undefined }),
        'with a blank claim': await tokenOf(own, ' '),
        'not a JWT': 'alice',
      })) {
        const refused = await send(proxy, key, asCaller(wrong))
        t.strictSame(refusalOf(refused), [401, 'idempotency_caller_missing'], what)
        tellsNothing(t, refused, what)
        t.equal((await send(proxy, newKey(), asCaller(wrong))).status, 401, 'nor does it execute')
      }
      const twice = await rawRequest(
        proxy.port,
        `POST /pay HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${alice}\r\nAuthorization: Bearer ${rotated}\r\nIdempotency-Key: ${key}\r\nContent-Length: 0\r\n\r\n`,
      )
      t.equal(twice.status, 401, 'two tokens')
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
    }
  })

void t.test('S04 header:authorization: a rotated token is another caller', async (t) => {
  const own = await pair('ES256')
  const upstream = await payments(t)
  const proxy = await proxyWith(t, upstream, 'memory:', 'scope: { caller: "header:authorization" }')
  const key = newKey()
  const [one, other] = [await tokenOf(own, 'alice'), await tokenOf(own, 'alice')]
  t.match(await send(proxy, key, asCaller(one)), { status: 201, replayed: false })
  t.match(await send(proxy, key, asCaller(other)), { status: 201, replayed: false })
  t.ok((await send(proxy, key, asCaller(one))).replayed)
  t.equal(upstream.seen.length, 2)
})

/** An upstream that holds payments on `/pay?slow`, and says at `/may-see` who may see them. */
async function judging(t: Test) {
  const work = gate()
  let n = 0
  const state = { status: 204, probes: 0 }
  const stub = await upstreamStub(async ({ method, target }, response) => {
    if (method === 'GET' && target === '/may-see?what=payments') {
      state.probes++
      if (state.status === 0) response.destroy()
      else
        response
          .writeHead(state.status, { Location: '/login', 'X-Own': 'probe' })
          .end(SECRET_ANSWER.slice(0, 4))
      return
    }
    n++
    if (target === '/pay?slow') await work.opened
    response.writeHead(201, { 'X-Secret': SECRET_ANSWER }).end(`${SECRET_ANSWER} ${n}`)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return { stub, work, state, executed: () => n }
}

const MAY_SEE = (cache: string) =>
  `scope: { caller: ["header:authorization", "header:x-tenant"] }, inFlight: { mode: wait, wait: 20s }, authorizeReplay: { path: "/may-see?what=payments", cache: ${cache} }`

for (const kind of KINDS)
  void t.test(`S05 a caller whose access was revoked gets no stored byte: ${kind}`, async (t) => {
    const { stub, state, executed } = await judging(t)
    const store = await emptyStore(t, kind)
    const proxy = await proxyWith(t, stub, store, MAY_SEE('0s'))
    const key = newKey()
    const headers = {
      cookie: 'session=1',
      'x-tenant': 'acme',
      'x-other': 'no',
      traceparent: `00-${'a'.repeat(32)}-${'b'.repeat(16)}-01`,
    }
    const first = await send(proxy, key, { headers })
    t.equal(first.status, 201)
    t.equal(state.probes, 0, 'no probe for a first request')
    t.match(await send(proxy, key, { headers }), { body: first.body, replayed: true })
    const probe = stub.seen[1]
    t.match(probe, { method: 'GET', target: '/may-see?what=payments' })
    const named = (name: string) =>
      (probe?.headers ?? []).filter((_, i, all) => i % 2 === 1 && all[i - 1]?.toLowerCase() === name)
    t.strictSame(named('authorization'), ['Bearer alice'])
    t.strictSame(named('cookie'), ['session=1'])
    t.strictSame(named('x-tenant'), ['acme'])
    for (const none of ['idempotency-key', 'content-type', 'x-other']) t.strictSame(named(none), [], none)
    t.equal(probe?.body.length, 0)

    const before = await recordsIn(store)
    for (const [said, status, code] of [
      [401, 401, 'replay_forbidden'],
      [403, 403, 'replay_forbidden'],
      [404, 403, 'replay_forbidden'],
      [429, 403, 'replay_forbidden'],
      [302, 403, 'replay_forbidden'],
      [500, 503, 'replay_unauthorized_yet'],
      [503, 503, 'replay_unauthorized_yet'],
      [0, 503, 'replay_unauthorized_yet'],
    ] as const) {
      state.status = said
      // Neither the response nor the state is disclosed, nor that the key was reused.
      for (const body of ['{"amount":1}', '{"amount":2}']) {
        const refused = await send(proxy, key, { headers, body })
        t.strictSame(refusalOf(refused), [status, code], `the upstream said ${said}`)
        tellsNothing(t, refused, String(said))
        t.equal(refused.headers.get('x-own'), null)
        t.equal(refused.headers.get('location'), null)
        if (status === 503) t.match(refused.headers.get('retry-after'), /^[1-9]\d*$/)
        t.match(JSON.parse(refused.body), { retry: status === 503 ? 'same-key' : 'no' })
      }
    }
    t.strictSame(await recordsIn(store), before)
    t.equal(executed(), 1)
    t.equal(await proxy.metric('idempotency_requests_total{route="pay",outcome="replay_forbidden"}'), 16)
    state.status = 200
    t.match(await send(proxy, key, { headers }), { body: first.body, replayed: true })
    t.equal(executed(), 1)
    await stub[Symbol.asyncDispose]()
    const down = await send(proxy, key, { headers })
    t.strictSame(refusalOf(down), [503, 'replay_unauthorized_yet'])
    tellsNothing(t, down, 'the upstream is down')
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  })
