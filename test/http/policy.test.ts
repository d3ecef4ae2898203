import t from 'tap'
import { WELL_KNOWN } from '../../src/core/route.ts'
import { errorsOf, load, UPSTREAM } from '../config/support.ts'
import { send } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

const stub = (): Promise<UpstreamStub> =>
  upstreamStub((_seen, response) => void response.writeHead(200, { 'X-Own': '1' }).end('of the upstream'))

const ROUTES = `
routes:
  - { name: hidden-admin, match: { path: /v1/payments/internal-refund }, mode: off }
  - { name: hidden-shadow, match: { path: /v1/shadowed }, mode: shadow }
  - { name: hidden-search, match: { path: /v1/search }, key: ignored }
  - name: pay
    match: { methods: [POST], path: "/v1/payments/:id" }
    key: { from: ["header:paypal-request-id", "json:/id"], presence: required, pattern: "[a-z]+" }
    profile: strict
    scope: { caller: "header:x-secret-caller" }
    ttl: { record: 7d, body: 2h }
    ttlFailed: 1h
    inFlight: { mode: wait, wait: 5s, status: 425 }
    statusHeader: true
  - name: hooks
    match: { path: "/hooks/*" }
    scope: { caller: none, path: none }
    misuse: { status: 409 }
`

async function proxyOf(upstream: UpstreamStub, more: string): Promise<TestProxy> {
  return proxyInProcess(`upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n${more}`)
}

const ask = (proxy: TestProxy, method = 'GET', path = WELL_KNOWN) =>
  send(proxy, null, { method, path, body: null })

void t.test('by default the well-known path is the upstream’s, like any other', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyOf(upstream, ROUTES)
  const answer = await ask(proxy)
  t.match(answer, { status: 200, body: 'of the upstream' })
  t.equal(upstream.seen[0]?.target, WELL_KNOWN)
  t.equal(load(UPSTREAM).wellKnown, false)
})

void t.test('wellKnown: true tells clients what they need to know by route, and nothing else', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyOf(
    upstream,
    `wellKnown: true\nproblems: { baseUrl: "https://docs.example.com/" }\nstatus: { path: /v1/idempotency }${ROUTES}`,
  )
  const answer = await ask(proxy)
  t.equal(answer.status, 200)
  t.equal(answer.headers.get('content-type'), 'application/json')
  t.equal(answer.headers.get('cache-control'), 'public, max-age=300')
  const policy = JSON.parse(answer.body)
  t.match(policy, {
    specification: /draft-ietf-httpapi-idempotency-key-header-07$/,
    replayed: { header: 'Idempotent-Replayed', value: 'true' },
    statusPath: '/v1/idempotency',
  })
  t.notOk('issuerPath' in policy)
  const [pay, hooks, rest, ...more] = policy.routes
  t.strictSame(more, [])
  const { problems, ...told } = pay
  t.strictSame(told, {
    methods: ['POST'],
    path: '/v1/payments/{id}',
    exceptions: true,
    key: {
      required: true,
      from: [
        { in: 'header', name: 'PayPal-Request-Id' },
        { in: 'body', pointer: '/id' },
      ],
      syntax: 'lenient',
      minLength: 16,
      maxLength: 255,
      pattern: '^(?:[a-z]+)$',
    },
    uniqueWithin: ['caller', 'method', 'path'],
    expires: {
      afterSeconds: 604_800,
      responseAfterSeconds: 7200,
      errorsAfterSeconds: 3600,
      thenRefusedForSeconds: 604_800,
    },
    inFlight: { status: 425, waitsSeconds: 5 },
    headers: ['Idempotency-Status', 'Idempotency-Expires'],
  })
  t.match(
    problems.find(({ code }: { code: string }) => code === 'idempotency_key_in_progress'),
    { status: 425, type: 'https://docs.example.com/idempotency_key_in_progress', retry: 'same-key' },
  )
  t.match(hooks, {
    methods: ['POST', 'PATCH'],
    path: '/hooks/*',
    key: { required: false, from: [{ in: 'header', name: 'Idempotency-Key' }] },
    uniqueWithin: ['method'],
    expires: { afterSeconds: 86_400 },
  })
  t.notOk('exceptions' in hooks, 'no hidden route lies below it')
  t.match(rest, { path: '/*', methods: ['POST', 'PATCH'], exceptions: true, key: { required: false } })

  t.notMatch(answer.body, /hidden|internal|shadowed|search|secret|127\.0\.0\.1|memory:|"pay"/)
  t.equal(upstream.seen.length, 0)
})

t.test('GET and HEAD of the well-known path are answered in any spelling; others pass', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyOf(upstream, 'wellKnown: true')
  const { body } = await ask(proxy)
  t.equal((await ask(proxy, 'GET', '//.well-known/./idempotency/?x=1')).body, body)
  const head = await ask(proxy, 'HEAD')
  t.equal(head.headers.get('content-length'), String(Buffer.byteLength(body)))
  t.equal(upstream.seen.length, 0)
  for (const [method, path] of [
    ['POST', WELL_KNOWN],
    ['GET', `${WELL_KNOWN}/more`],
    ['GET', '/.well-known/other'],
  ])
    t.equal((await ask(proxy, method, path)).headers.get('x-own'), '1')
})

void t.test('requests that match no route are described only if they are protected', async (t) => {
  await using upstream = await stub()
  for (const [more, told] of [
    ['', 1],
    ['unmatched: pass', 0],
    ['unmatched: reject', 0],
    ['defaults: { mode: shadow }', 0],
    ['defaults: { key: ignored }', 0],
    ['defaults: { key: required }', 1],
  ] as const) {
    await using proxy = await proxyOf(upstream, `wellKnown: true\n${more}`)
    const { routes } = JSON.parse((await ask(proxy)).body)
    t.equal(routes.length, told, more)
    if (told > 0) t.equal(routes[0].key.required, false, 'no key is ever required there')
  }
})

void t.test('a route or a status.path that wellKnown would hide is an error', async (t) => {
  const route = `wellKnown: true\nroutes: [{ name: a, match: { methods: [GET], path: ${WELL_KNOWN} } }]\n`
  t.match(errorsOf(UPSTREAM + route), [
    /routes\[0\]\.match.*GET requests never reach the route, since `wellKnown`/,
  ])
  const status = `wellKnown: true\nstatus: { path: ${WELL_KNOWN} }\n`
  t.match(errorsOf(UPSTREAM + status), [
    /status\.path: found "\/\.well-known\/idempotency", which `wellKnown`/,
  ])
  t.strictSame(errorsOf(`${UPSTREAM}status: { path: ${WELL_KNOWN} }\n`), [])
  t.match(errorsOf(`${UPSTREAM}wellKnown: yes\n`), [/wellKnown: found "yes"; allowed: true or false/])
})
