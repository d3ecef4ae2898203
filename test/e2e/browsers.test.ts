import t, { type Test } from 'tap'
import { values } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, type RawAnswer, rawRequest } from '../support/raw.ts'
import { type Respond, type UpstreamStub, upstreamStub } from '../support/upstream.ts'

/** What browsers need (contract §15.16, 17). */

async function before(t: Test, yaml: string, respond: Respond): Promise<[TestProxy, UpstreamStub]> {
  const upstream = await upstreamStub(respond)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n${yaml}`,
  )
  t.teardown(() => proxy.drain())
  return [proxy, upstream]
}

const SHOP = 'https://shop.example'
const ADMIN = 'https://admin.example'
const FOREIGN = 'https://evil.example'

/** The lines that a browser judges by. */
function marks(answer: RawAnswer): Record<string, string> {
  const names = ['allow-origin', 'allow-credentials', 'allow-methods', 'allow-headers', 'max-age']
  const seen = names.map((name) => [name, values(answer, `access-control-${name}`).join('|')])
  return Object.fromEntries(
    [...seen, ['vary', values(answer, 'vary').join('|')]].filter(([, value]) => value),
  )
}

function exposed(answer: RawAnswer): string[] {
  return values(answer, 'access-control-expose-headers').join(', ').split(', ')
}

function preflight(path: string, method: string, origin: string, more: readonly string[] = []): string {
  const lines = ['Host: api.test', `Origin: ${origin}`, `Access-Control-Request-Method: ${method}`, ...more]
  return [`OPTIONS ${path} HTTP/1.1`, ...lines, '', ''].join('\r\n')
}

const OWN = [
  'Idempotent-Replayed',
  'Idempotency-Status',
  'Idempotency-Expires',
  'Idempotency-Retry',
  'Retry-After',
  'Location',
]
const AUTHORIZED = 'Authorization: Bearer a'

t.test('Y15 problems and replays are readable for the origin that asks, not for the first one', async (t) => {
  // An application that answers CORS for itself.
  const [proxy, upstream] = await before(
    t,
    [
      `cors: { origins: [${SHOP}, ${ADMIN}], credentials: true }`,
      'unmatched: pass',
      'defaults: { scope: { caller: "header:authorization" } }',
      'routes: [{ name: pay, match: { path: /pay }, key: required, statusHeader: true }, { name: live, match: { path: /live }, stream: always }]',
    ].join('\n'),
    ({ headers }, response) => {
      const at = headers.findIndex((name) => name.toLowerCase() === 'origin')
      response.writeHead(201, [
        'Access-Control-Allow-Origin',
        headers[at + 1] ?? 'none',
        'Access-Control-Expose-Headers',
        'X-Total',
        'Vary',
        'Accept-Encoding, Origin',
        'Access-Control-Max-Age',
        '5',
      ])
      response.end('done')
    },
  )
  const ask = (key: string | null, body: string, origin: string | null, path = '/pay') => {
    const lines = origin === null ? [] : [`Origin: ${origin}`]
    return rawRequest(proxy.port, post(path, key, body, [AUTHORIZED, ...lines]))
  }
  const shop = { 'allow-origin': SHOP, 'allow-credentials': 'true', vary: 'Accept-Encoding, Origin' }
  const first = await ask('k', '1', SHOP)
  t.equal(first.status, 201)
  t.strictSame(marks(first), shop)
  t.strictSame(exposed(first), ['X-Total', ...OWN], 'what the application exposes stays exposed')

  const again = await ask('k', '1', SHOP)
  t.strictSame(values(again, 'idempotent-replayed'), ['true'])
  const withoutOwn = ({ headers }: RawAnswer): string[] =>
    headers.filter((_, i) => !/^idempoten/i.test(headers[i - (i % 2)] ?? ''))
  t.strictSame(withoutOwn(again), withoutOwn(first), 'for the same origin, the same lines')

  const admin = await ask('k', '1', ADMIN)
  t.strictSame(values(admin, 'idempotent-replayed'), ['true'])
  t.strictSame(marks(admin), { ...shop, 'allow-origin': ADMIN })
  for (const origin of [FOREIGN, 'null', `${SHOP}.evil.example`, SHOP.toUpperCase(), null]) {
    const replay = await ask('k', '1', origin)
    t.strictSame(values(replay, 'idempotent-replayed'), ['true'])
    t.strictSame(marks(replay), { vary: 'Accept-Encoding, Origin' }, `not for ${origin}`)
    t.strictSame(values(replay, 'access-control-expose-headers'), [])
  }

  const refusals: [RawAnswer, number][] = [
    [await ask('k', '2', ADMIN), 422],
    [await ask(null, '1', ADMIN), 400],
    [await rawRequest(proxy.port, `POST /pay HTTP/1.1\r\nOrigin: ${ADMIN}\r\n\r\n`), 400],
  ]
  for (const [refused, status] of refusals) {
    t.equal(refused.status, status)
    t.strictSame(marks(refused), { 'allow-origin': ADMIN, 'allow-credentials': 'true', vary: 'Origin' })
    t.strictSame(exposed(refused), OWN)
  }
  const page = await rawRequest(
    proxy.port,
    post('/pay', null, '1', [AUTHORIZED, `Origin: ${ADMIN}`, 'Accept: text/html']),
  )
  t.match(marks(page), { 'allow-origin': ADMIN, vary: 'Accept|Origin' }, 'pages, too')
  t.strictSame(marks(await ask('k', '2', FOREIGN)), { vary: 'Origin' })

  t.strictSame(marks(await ask('l', '1', ADMIN, '/live')), { ...shop, 'allow-origin': ADMIN }, 'a stream')
  t.strictSame(marks(await ask('m', '1', FOREIGN, '/live')), { vary: shop.vary })

  const passed = await ask('k', '1', FOREIGN, '/other')
  t.match(
    marks(passed),
    { 'allow-origin': FOREIGN, 'max-age': '5' },
    'what is passed on is the application’s own',
  )
  const sent = upstream.seen.length
  const asked = await rawRequest(proxy.port, preflight('/pay', 'POST', SHOP))
  t.equal(asked.status, 201, 'so are preflights')
  t.equal(upstream.seen.length, sent + 1)
})

t.test('a replay that a browser keeps from its page is warned of once, while cors is off', async (t) => {
  const [proxy] = await before(
    t,
    'routes: [{ name: pay, match: { path: /pay } }, { name: any, match: { path: /any } }]',
    ({ target, headers }, response) => {
      const at = headers.findIndex((name) => name.toLowerCase() === 'origin')
      const allowed = target === '/any' ? '*' : (headers[at + 1] ?? 'none')
      response.writeHead(201, ['Access-Control-Allow-Origin', allowed]).end('done')
    },
  )
  const ask = (path: string, ...lines: string[]) =>
    rawRequest(proxy.port, post(path, 'k', '1', [AUTHORIZED, ...lines]))
  const warned = () =>
    proxy.log.filter(({ msg }) => String(msg).startsWith('a replay has the CORS headers of another origin'))
  for (const path of ['/pay', '/any']) await ask(path, `Origin: ${SHOP}`)
  for (const path of ['/pay', '/any']) await ask(path, `Origin: ${SHOP}`)
  await ask('/any', `Origin: ${ADMIN}`)
  await ask('/pay')
  t.strictSame(warned(), [])
  for (let n = 0; n < 2; n++) {
    const replay = await ask('/pay', `Origin: ${ADMIN}`)
    t.strictSame(values(replay, 'access-control-allow-origin'), [SHOP], 'the stored response, byte for byte')
  }
  t.match(warned(), [{ route: 'pay' }])
  t.equal(warned().length, 1)
})

t.test('Y15 a preflight is answered where nobody else would', async (t) => {
  const yaml = (cors: string) =>
    [
      cors,
      'unmatched: reject',
      'wellKnown: true',
      'status: { path: /status }',
      'issuer: { path: /keys, secretFile: test/config/files/signing-secret }',
      'routes:',
      '  - { name: pay, match: { path: /pay }, key: { from: ["header:x-request-key"] }, scope: { caller: "header:authorization" } }',
      '  - { name: own, match: { methods: [OPTIONS], path: /own }, key: ignored }',
    ].join('\n')
  const [proxy, upstream] = await before(t, yaml(`cors: { origins: ${SHOP} }`), (_, response) => {
    response.writeHead(204).end()
  })
  const ask = (path: string, method: string, origin: string, more: readonly string[] = []) =>
    rawRequest(proxy.port, preflight(path, method, origin, more))
  const headers = ['Access-Control-Request-Headers: authorization,x-request-key']
  const answer = await ask('/pay', 'POST', SHOP, headers)
  t.equal(answer.status, 204)
  t.strictSame(marks(answer), {
    'allow-origin': SHOP,
    'allow-methods': 'POST',
    'allow-headers': 'authorization,x-request-key',
    vary: 'Origin, Access-Control-Request-Headers',
  })
  t.equal(answer.body.length, 0)
  const foreign = await ask('/pay', 'POST', FOREIGN, headers)
  t.strictSame([foreign.status, marks(foreign)], [204, { vary: 'Origin' }], 'allows nothing to others')
  for (const [path, method] of [
    ['/status', 'GET'],
    ['/keys', 'POST'],
    ['/.well-known/idempotency', 'GET'],
    ['/nowhere', 'DELETE'],
  ] as const)
    t.match(marks(await ask(path, method, SHOP)), { 'allow-origin': SHOP, 'allow-methods': method }, path)
  t.equal(upstream.seen.length, 0)
  t.equal((await ask('/own', 'POST', SHOP)).status, 204)
  t.equal(upstream.seen.length, 1, 'a route that takes OPTIONS gets them')
  const plain = await rawRequest(proxy.port, 'OPTIONS /pay HTTP/1.1\r\nHost: a\r\n\r\n')
  t.equal(plain.status, 404, 'an OPTIONS without an origin is no preflight')

  for (const request of [
    `GET /status?path=/pay HTTP/1.1\r\nHost: a\r\nX-Request-Key: k\r\n${AUTHORIZED}\r\nOrigin: ${SHOP}\r\n\r\n`,
    `POST /keys HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nOrigin: ${SHOP}\r\n\r\n`,
    `GET /.well-known/idempotency HTTP/1.1\r\nHost: a\r\nOrigin: ${SHOP}\r\n\r\n`,
    `GET /nowhere HTTP/1.1\r\nHost: a\r\nOrigin: ${SHOP}\r\n\r\n`,
  ]) {
    const own = await rawRequest(proxy.port, request)
    t.strictSame(marks(own)['allow-origin'], SHOP, request.slice(0, 24))
    t.strictSame(exposed(own), OWN)
  }

  await proxy.reload(
    `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n${yaml('cors: { origins: "*", headers: [Content-Type, X-Trace] }')}`,
  )
  const any = await ask('/pay', 'POST', FOREIGN, headers)
  t.strictSame(
    marks(any),
    {
      'allow-origin': '*',
      'allow-methods': 'POST',
      'allow-headers': 'content-type, x-trace, x-request-key, idempotency-key',
    },
    'after a reload: any origin, and the headers named beside those of keys',
  )
})

t.test('without cors, an answer is the upstream’s own, for whichever origin', async (t) => {
  const [proxy] = await before(t, '', (_, response) => {
    response.writeHead(200, { 'Access-Control-Allow-Origin': SHOP }).end()
  })
  const ask = (origin: string, body: string) =>
    rawRequest(proxy.port, post('/pay', 'k', body, [AUTHORIZED, `Origin: ${origin}`]))
  t.strictSame(marks(await ask(SHOP, '1')), { 'allow-origin': SHOP })
  t.strictSame(marks(await ask(ADMIN, '1')), { 'allow-origin': SHOP })
  t.strictSame(marks(await ask(ADMIN, '2')), {})
})

t.test('Y03 a caller that changes between retries executes again, counted, and warned of once', async (t) => {
  let n = 0
  const [proxy] = await before(
    t,
    [
      'routes:',
      '  - { name: tokens, match: { path: /tokens }, scope: { caller: "header:authorization" } }',
      '  - { name: form, match: { path: /form }, key: { from: ["form:k"] }, scope: { caller: "cookie:session" } }',
      '  - { name: same, match: { path: /same }, key: { from: ["form:k"] }, scope: { caller: "cookie:session" } }',
      '  - { name: live, match: { path: /live }, stream: always, scope: { caller: "cookie:session" } }',
      '  - { name: none, match: { path: /none }, scope: { caller: none } }',
      '  - { name: shadow, match: { path: /shadow }, mode: shadow, scope: { caller: "cookie:session" } }',
    ].join('\n'),
    ({ target }, response) => {
      n++
      const renewed = target === '/same' ? 'session=s0; Max-Age=60' : `session=s${n}`
      response.writeHead(200, ['Set-Cookie', renewed]).end('done')
    },
  )
  const send = (path: string, key: string, credential: string, body = 'k=1') => {
    const type = 'Content-Type: application/x-www-form-urlencoded'
    const lines = [credential, type, `Content-Length: ${body.length}`, `Idempotency-Key: ${key}`]
    return rawRequest(proxy.port, [`POST ${path} HTTP/1.1`, 'Host: a', ...lines, '', body].join('\r\n'))
  }
  const changed = (route: string) => proxy.metric(`idempotency_caller_changed_total{route="${route}"}`)
  const warned = () =>
    proxy.log
      .filter(({ msg }) => /another caller; set scope.caller/.test(String(msg)))
      .map(({ route }) => route)

  await send('/tokens', '1', 'Authorization: Bearer a')
  await send('/tokens', '1', 'Authorization: Bearer a')
  await send('/tokens', '2', 'Authorization: Bearer b')
  await send('/tokens', '1', 'Authorization: Bearer b', 'k=2')
  t.equal(n, 3)
  t.equal(await changed('tokens'), 0, 'a retry; another key; another request')
  t.match(
    await fetch(`${proxy.adminUrl}/metrics`).then((one) => one.text()),
    /caller_changed_total\{route="tokens"\} 0/,
  )
  await send('/tokens', '3', 'Authorization: Bearer a')
  const again = await send('/tokens', '3', 'Authorization: Bearer b')
  t.strictSame([again.status, values(again, 'idempotent-replayed')], [200, []])
  t.equal(await changed('tokens'), 1)
  await send('/tokens', '3', 'Authorization: Bearer c')
  t.equal(await changed('tokens'), 2)
  t.strictSame(warned(), ['tokens'], 'once per route')

  await send('/form', 'x', 'Cookie: session=s0')
  t.equal(await changed('form'), 1, 'the response renews the cookie')
  await send('/form', 'x', 'Cookie: session=s0')
  t.equal(await changed('form'), 1, 'a replay is the same response')
  await send('/form', 'x', 'Cookie: session=s6')
  t.equal(await changed('form'), 3, 'the retry is another caller, and its response renews the cookie')
  t.strictSame(warned(), ['tokens', 'form'])

  await send('/same', 'x', 'Cookie: session=s0')
  t.equal(await changed('same'), 0, 'the same value for longer')
  await send('/live', 'x', 'Cookie: session=s0')
  while ((await changed('live')) === 0);
  await send('/none', 'x', 'Cookie: session=s0')
  await send('/none', 'x', 'Cookie: session=s1')
  t.equal(await changed('none'), 0)
  await send('/shadow', 'x', 'Cookie: session=s0')
  while ((await changed('shadow')) < 1);
  await send('/shadow', 'x', 'Cookie: session=s1')
  while ((await changed('shadow')) < 3);
  t.strictSame(warned(), ['tokens', 'form', 'live', 'shadow'])
})
