import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { TrustedProxies } from '../../src/http/headers.ts'
import { problemOf, proxyBefore, storeCalls, values } from '../support/exchange.ts'
import { everything, get, post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const REQUIRED = '{ name: r, match: { path: /p }, key: required }'
const stub = () => upstreamStub((_seen, response) => void response.writeHead(201, { 'X-A': '1' }).end('ok'))

t.test('K01 a request without a key needs no store call and gets no header of ours', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const before = await storeCalls(proxy)
  const answer = await rawRequest(proxy.port, post('/p', null, '{}'))
  t.equal(answer.status, 201)
  t.notMatch(answer.headers.join('\n'), /idempot/i)
  t.equal(await storeCalls(proxy), before)
  const names = upstream.seen[0]?.headers.filter((_, i) => i % 2 === 0)
  t.notMatch(names?.join('\n'), /idempot/i)
  t.equal(await proxy.metric('idempotency_requests_total{route="r",outcome="passed"}'), 1)
})

void t.test('K02 a request without a required key gets 400, exactly as §6 says; N=0', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  const before = await storeCalls(proxy)
  const answer = await rawRequest(proxy.port, post('/p', null, '{}'))
  t.equal(answer.statusLine, 'HTTP/1.1 400 Bad Request')
  t.same(values(answer, 'content-type'), ['application/problem+json'])
  t.same(values(answer, 'cache-control'), ['no-store'])
  t.same(values(answer, 'link'), [])
  const problem = problemOf(answer)
  t.same(Object.keys(problem), ['type', 'title', 'status', 'detail', 'code', 'retry'])
  const code = 'idempotency_key_missing'
  t.match(problem, { type: `urn:idempotency-proxy:${code}`, status: 400, code, retry: 'new-key' })
  t.match(problem, { title: /./, detail: /./ })
  t.equal(upstream.seen.length, 0)
  t.equal(await storeCalls(proxy), before)
})

void t.test('K02 problems.baseUrl gives the type and a Link; the instance is a record id', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { more: 'problems: { baseUrl: "https://docs.test/p/" }' })
  await rawRequest(proxy.port, post('/p', 'secret-key', '{}'))
  const answer = await rawRequest(proxy.port, post('/p', 'secret-key', '{"b":1}'))
  t.equal(answer.status, 422)
  t.same(values(answer, 'link'), ['<https://docs.test/p/idempotency_key_reused>; rel="describedby"'])
  const problem = problemOf(answer)
  t.equal(problem.type, 'https://docs.test/p/idempotency_key_reused')
  t.match(problem.instance, /^[A-Za-z0-9_-]{43}$/)
  t.notMatch(answer.bytes.toString(), 'secret-key')
})

t.test('M01 POST and PATCH are protected, M02 GET, HEAD, OPTIONS and M03 PUT, DELETE not', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  for (const method of ['POST', 'PATCH', 'GET', 'OPTIONS', 'PUT', 'DELETE']) {
    const request = post('/p', `k-${method}`, '{}').replace('POST', method)
    for (let i = 0; i < 2; i++) t.equal((await rawRequest(proxy.port, request)).status, 201)
    const seen = upstream.seen.filter((one) => one.method === method)
    t.equal(seen.length, ['POST', 'PATCH'].includes(method) ? 1 : 2, `${method}: N`)
    t.same(linesOf(seen[0]?.headers ?? [], 'idempotency-key'), [`k-${method}`])
  }
  const head = get('/p', 'Idempotency-Key: k', 'Connection: close').replace('GET', 'HEAD')
  for (let i = 0; i < 2; i++) t.match(await everything(proxy.port, head), /^HTTP\/1.1 201 /)
  t.equal(upstream.seen.filter((one) => one.method === 'HEAD').length, 2)
})

void t.test('M07 key: ignored and mode: off forward every request with its key intact', async (t) => {
  for (const how of ['key: ignored', 'mode: "off"']) {
    await using upstream = await stub()
    await using proxy = await proxyBefore(upstream, {
      routes: `{ name: r, match: { path: /p }, ${how}, statusHeader: true }`,
    })
    const before = await storeCalls(proxy)
    for (const line of ['"k 1"', '', 'a, b']) {
      const answer = await rawRequest(proxy.port, post('/p', null, '{}', [`Idempotency-Key: ${line}`]))
      t.equal(answer.status, 201)
      t.same(linesOf(upstream.seen.at(-1)?.headers ?? [], 'idempotency-key'), [line])
    }
    t.equal(await storeCalls(proxy), before)
  }
})

t.test('M08 key.forward: the key as it is, none, or another header; forwardFence adds one', async (t) => {
  await using upstream = await stub()
  const forwards = { same: 'same', none: 'none', other: 'X-Request-Key, forwardFence: true' }
  const routes = Object.entries(forwards).map(
    ([name, forward]) => `{ name: ${name}, match: { path: /${name} }, key: { forward: ${forward} } }`,
  )
  await using proxy = await proxyBefore(upstream, { routes: routes.join(', ') })
  const lines = ['Idempotency-Fence: 99', 'idempotency-RECORD: forged', 'x-request-KEY: forged']
  for (const path of ['same', 'none', 'other', 'unmatched']) {
    await rawRequest(proxy.port, post(`/${path}`, '"k-1"', '{}', lines))
    await rawRequest(proxy.port, post(`/${path}`, null, '{}', lines))
  }
  /** Lines of the n-th request: with and without a key, of each path. */
  const got = (n: number, name: string) => linesOf(upstream.seen[n]?.headers ?? [], name)
  t.same(got(0, 'idempotency-key'), ['"k-1"'], 'unchanged')
  t.same(got(2, 'idempotency-key'), [])
  t.same(got(4, 'idempotency-key'), [])
  t.same(got(4, 'x-request-key'), ['k-1'], 'the key, and not the client’s own line')
  t.match(got(4, 'idempotency-fence')[0], /^\d{13,}$/)
  t.match(got(4, 'idempotency-record')[0], /^[A-Za-z0-9_-]{43}$/)
  for (const n of [0, 1, 2, 3, 5, 6, 7])
    for (const name of ['idempotency-fence', 'idempotency-record']) t.same(got(n, name), [])
  t.same(got(6, 'idempotency-key'), ['"k-1"'])
})

void t.test('a client cannot make proxies behind this one send a protected request twice', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const orders = [
    'X-Envoy-Retry-On: 5xx,reset',
    'x-envoy-retry-grpc-on: unavailable',
    'X-ENVOY-MAX-RETRIES: 9',
    'x-envoy-hedge-on-per-try-timeout: true',
  ]
  const lines = [...orders, 'x-envoy-decorator-operation: pay']
  await rawRequest(proxy.port, post('/p', 'k-1', '{}', lines))
  await rawRequest(proxy.port, post('/p', null, '{}', lines))
  const [guarded, passed] = upstream.seen.map(({ headers }) =>
    headers.filter((name, n) => n % 2 === 0 && /^x-envoy-/i.test(name)),
  )
  t.same(guarded, ['x-envoy-decorator-operation'], 'other lines stay')
  t.equal(passed?.length, 5, 'an unprotected request keeps them all')
})

void t.test('M09 a CORS preflight passes where a key is required', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  const asks = ['Access-Control-Request-Method: POST', 'Access-Control-Request-Headers: idempotency-key']
  const preflight = get('/p', 'Origin: https://a.test', ...asks).replace('GET', 'OPTIONS')
  t.equal((await rawRequest(proxy.port, preflight)).status, 201)
  t.same(linesOf(upstream.seen[0]?.headers ?? [], 'access-control-request-headers'), ['idempotency-key'])
})

void t.test('M10 an Upgrade line does not get a POST past the guard; CONNECT reaches nobody', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  for (const protocol of ['websocket', 'h2c', 'WebSocket'])
    for (let i = 0; i < 2; i++) {
      const lines = [
        'Connection: Upgrade',
        `Upgrade: ${protocol}`,
        'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
      ]
      t.equal((await rawRequest(proxy.port, post('/p', `k-${protocol}`, '{}', lines))).status, 201)
    }
  t.equal(upstream.seen.length, 3, 'N=1 for each key')
  t.notOk(upstream.seen.some((one) => linesOf(one.headers, 'upgrade').length > 0))
  const tunnel = 'CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\nIdempotency-Key: k\r\n\r\n'
  t.notMatch(await everything(proxy.port, tunnel), / 2\d\d /)
  t.equal(upstream.seen.length, 3)
})

/** The upstream gets these lines, whether a request is protected or not. */
async function forwards(t: Test, more: string, sent: string[], got: Record<string, string[]>): Promise<void> {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { more })
  for (const path of ['/p', '/other']) {
    await rawRequest(proxy.port, post(path, path === '/p' ? 'k' : null, '{}', sent))
    for (const [name, lines] of Object.entries({ host: ['api.test'], ...got }))
      t.same(linesOf(upstream.seen.at(-1)?.headers ?? [], name), lines, name)
  }
}

t.test('P23 X-Forwarded-* and Forwarded of the untrusted are replaced; Host stays, Via grows', async (t) => {
  const own = ['X-Forwarded-For: 1.2.3.4', 'X-Forwarded-Proto: https', 'X-Forwarded-Host: evil.test']
  const others = ['X-Forwarded-Port: 1', 'Forwarded: for=1.2.3.4', 'Via: 1.1 before']
  await forwards(t, '', [...own, ...others], {
    'x-forwarded-for': ['127.0.0.1'],
    'x-forwarded-proto': ['http'],
    'x-forwarded-host': ['api.test'],
    'x-forwarded-port': [],
    forwarded: [],
    via: ['1.1 before', '1.1 idempotency-proxy'],
  })
})

void t.test('P23 trustProxy: a trusted peer’s lines are believed and extended', async (t) => {
  const addresses = ['X-Forwarded-For: 1.2.3.4', 'X-Forwarded-For: 5.6.7.8']
  const others = ['X-Forwarded-Proto: https', 'X-Forwarded-Host: shop.test', 'X-Forwarded-Port: 443']
  await forwards(t, 'trustProxy: ["127.0.0.0/8"]', [...addresses, ...others], {
    'x-forwarded-for': ['1.2.3.4, 5.6.7.8, 127.0.0.1'],
    'x-forwarded-proto': ['https'],
    'x-forwarded-host': ['shop.test'],
    'x-forwarded-port': ['443'],
  })
})

void t.test('F21 the upstream gets the target as sent; spellings of one path are one record', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { routes: '{ name: r, match: { path: "/a/~x" } }' })
  const spellings = ['/a/%7Ex?q=%2F', '/a/~x?q=%2F', '//a//~x/?q=%2F', '/b/../a/./~x?q=%2F', '/%61/~x/?q=%2F']
  for (const [i, target] of spellings.entries()) {
    t.equal((await rawRequest(proxy.port, post(target, `k-${i}`, '{}'))).status, 201)
    t.equal(upstream.seen.at(-1)?.target, target)
    const other = spellings[(i + 1) % spellings.length] as string
    t.same(values(await rawRequest(proxy.port, post(other, `k-${i}`, '{}')), 'idempotent-replayed'), ['true'])
  }
  t.equal(upstream.seen.length, spellings.length)
})

t.test('M01 requests that match no route are protected, passed or refused by `unmatched`', async (t) => {
  await using upstream = await stub()
  for (const mode of ['protect', 'pass']) {
    await using proxy = await proxyBefore(upstream, { more: `unmatched: ${mode}` })
    const before = upstream.seen.length
    for (let i = 0; i < 2; i++) t.equal((await rawRequest(proxy.port, post('/other', 'k', '{}'))).status, 201)
    t.equal(upstream.seen.length - before, mode === 'protect' ? 1 : 2, mode)
    t.equal((await rawRequest(proxy.port, post('/other', null, '{}'))).status, 201)
  }
  await using proxy = await proxyBefore(upstream, { more: 'unmatched: reject' })
  const before = upstream.seen.length
  const upgrade = ['Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13']
  for (const request of [
    post('/other', 'k', '{}'),
    post('/other', null, '{}'),
    get('/other'),
    get('/p').replace('GET', 'DELETE'),
    get('/other', ...upgrade, 'Sec-WebSocket-Key: x'),
  ]) {
    const answer = await rawRequest(proxy.port, request)
    t.match(problemOf(answer), { code: 'route_not_found', status: 404, retry: 'no' })
    t.same(values(answer, 'cache-control'), ['no-store'])
  }
  t.equal(upstream.seen.length, before)
  t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 201)
})

const TRUST = 'trustProxy: [127.0.0.1]'
const at = (host: string, key: string, lines: string[] = []) =>
  post('/p', key, '{}', ['Authorization: t', ...lines]).replace(/\r\nHost: [^\r]*/i, `\r\nHost: ${host}`)

void t.test('V03 scope.host: blank or conflicting X-Forwarded-Host lines merge no hosts', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end())
  await using proxy = await proxyBefore(upstream, {
    routes: '{ name: r, match: { path: /p }, scope: { host: true, caller: "header:authorization" } }',
    more: TRUST,
  })
  const x = (...hosts: string[]) => hosts.map((host) => `X-Forwarded-Host: ${host}`)
  const replayed = async (message: string) =>
    values(await rawRequest(proxy.port, message), 'idempotent-replayed').length > 0
  // biome-ignore format: a table
  const rows: [hosts: string, one: string[], other: string[], same: string[]][] = [
    ['a.test b.test a.test', x(''), x(''), []],
    ['a.test b.test a.test', x(' , '), x(' , '), []],
    ['p.test p.test p.test', x(' ,a.test'), x(' ,b.test'), x('a.test')],
    ['p.test p.test p.test', x('a.test', 'b.test'), x('a.test', 'c.test'), x('a.test', 'b.test')],
    ['p.test p.test p.test', x('a.test', 'b.test'), x('a.test'), x('A.test', 'b.test:443')],
    ['p.test p.test p.test', x('a.test', 'a.test'), x('b.test'), x('a.test')],
  ]
  for (const [n, [hosts, ...lines]] of rows.entries())
    for (const [i, host] of hosts.split(' ').entries())
      t.equal(await replayed(at(host, `k${n}`, lines[i])), i === 2, `${n}: host ${i}`)
})

void t.test('V03 scope.host: permission for a replay on one host does not count on another', async (t) => {
  let revoked = false
  await using upstream = await upstreamStub((seen, response) => {
    const refuses = seen.method === 'GET' && revoked && linesOf(seen.headers, 'host')[0] === 'b.test'
    response.writeHead(refuses ? 403 : 201).end()
  })
  await using proxy = await proxyBefore(upstream, {
    routes:
      '{ name: r, match: { path: /p }, scope: { host: true, caller: "header:authorization" }, authorizeReplay: { path: /me, cache: 60s } }',
  })
  const send = async (host: string) => (await rawRequest(proxy.port, at(host, 'k'))).status
  for (const host of ['a.test', 'b.test', 'a.test']) t.equal(await send(host), 201)
  revoked = true
  t.equal(await send('a.test'), 201, 'granted')
  t.equal(await send('b.test'), 403)
})

function told(peer: string, forwarded: readonly string[], trusted: readonly string[] = []): string {
  const proxies = new TrustedProxies(trusted)
  return proxies.clientOf(
    forwarded.flatMap((value) => ['X-Forwarded-For', value]),
    proxies.peerOf(peer),
  )
}

void t.test('X02 a client is identified by its peer address, or by what trusted proxies say', async (t) => {
  const proxies = ['10.0.0.0/8', 'fd00::/8']
  t.equal(told('203.0.113.7', ['198.51.100.1']), '203.0.113.7', 'nobody is trusted')
  t.equal(told('203.0.113.7', ['198.51.100.1'], proxies), '203.0.113.7', 'this peer is not trusted')
  t.equal(told('10.0.0.1', ['198.51.100.1'], proxies), '198.51.100.1')
  t.equal(told('::ffff:10.0.0.1', ['198.51.100.1'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['6.6.6.6, 198.51.100.1, 10.0.0.2'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['6.6.6.6', '198.51.100.1', '10.0.0.2'], proxies), '198.51.100.1')
  t.equal(told('10.0.0.1', ['10.0.0.3'], proxies), '10.0.0.3', 'a client among the proxies')
  t.equal(told('10.0.0.1', [], proxies), '10.0.0.1')
  t.equal(told('10.0.0.1', ['unknown'], proxies), '10.0.0.1')
})

void t.test('X02 an IPv6 client is identified by its /64', async (t) => {
  const same = ['2001:db8:1:2:3:4:5:6', '2001:DB8:1:2::1', '2001:0db8:0001:0002::', '2001:db8:1:2::1.2.3.4']
  for (const address of same) t.equal(told(address, []), '2001:db8:1:2', address)
  t.equal(told('fe80::1%eth0', []), 'fe80:0:0:0')
  t.equal(told('::1', []), '0:0:0:0')
  t.equal(told('fd00::9', ['2001:db8:9::7'], ['fd00::/8']), '2001:db8:9:0')
})
