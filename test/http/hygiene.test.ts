import { once } from 'node:events'
import t, { type Test } from 'tap'
import { answering, problemOf, proxyBefore, scriptedPeer, storeCalls, values } from '../support/exchange.ts'
import { http1Test } from '../support/http1-test.ts'
import { type TestProxy } from '../support/proxy.ts'
import { dial, everything, get, post, rawRequest, readAnswer } from '../support/raw.ts'

t.setTimeout(300_000)

const OK = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'

/** Lower-case names of the header lines in the request text. */
function namesIn(request: string): string[] {
  const [, ...lines] = request.slice(0, request.indexOf('\r\n\r\n')).split('\r\n')
  return lines.map((line) => line.slice(0, line.indexOf(':')).toLowerCase())
}

/** The connection ends with the problem. */
async function refusedAndClosed(t: Test, proxy: TestProxy, request: string, problem: object): Promise<void> {
  const client = dial(proxy.port, Buffer.from(request, 'latin1')).on('error', () => {})
  const answer = await readAnswer(client)
  t.match(problemOf(answer), problem, JSON.stringify(request.slice(0, 80)))
  t.same(values(answer, 'connection'), ['close'])
  client.resume()
  await once(client, 'close')
}

const HANDSHAKE = [
  'Upgrade: websocket',
  'Sec-WebSocket-Version: 13',
  'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
]

http1Test('V06 Connection cannot remove a header that the proxy relies on', async (t) => {
  await using peer = await answering(OK)
  const routes = [
    '{ name: a, match: { path: /a }, key: { from: ["header:x-my-key", "header:idempotency-key"] } }',
    '{ name: b, match: { path: /b }, key: { from: ["header:ce-id"] } }',
    '{ name: c, match: { path: /c }, scope: { caller: "header:x-user" }, fingerprint: { headers: [x-tenant] } }',
    '{ name: d, match: { path: /d }, key: { derive: { headers: [x-part] } } }',
    '{ name: e, match: { path: /e }, key: { forward: X-Told } }',
  ]
  await using proxy = await proxyBefore(peer, { routes: routes.join(', ') })
  const counted = {
    'Idempotency-Key': 'KEY',
    'X-My-Key': 'KEY',
    'CE-Id': 'KEY',
    'ce-source': 's',
    'X-User': 'u',
    'X-Tenant': 't',
    'X-Part': 'p',
    Authorization: 'Bearer a',
    Cookie: 'a=b',
    'X-API-Key': 'a',
    'Content-Type': 'application/json',
    'Content-Encoding': 'identity',
    'Repeatability-First-Sent': new Date().toUTCString(),
    'X-Forwarded-For': '1.2.3.4',
    Via: '1.1 before',
    'CDN-Loop': 'before',
    traceparent: '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01',
  }
  const listed = [...Object.keys(counted), 'Host', 'Content-Length', 'X-Forwarded-Host', 'X-Mine']
  const lines = Object.entries(counted).map(([name, value]) => `${name}: ${value}`)
  const wanted = [...Object.keys(counted), 'Host', 'X-Forwarded-Host'].map((name) => name.toLowerCase())
  const told = async (connections: readonly string[], target: string): Promise<string[]> => {
    const keyed = lines.map((line) => line.replace('KEY', target.slice(1)))
    const own = ['Host: a', ...keyed, ...connections, 'X-Mine: 1']
    const head = [`POST ${target} HTTP/1.1`, ...own, 'Content-Length: 2']
    await rawRequest(proxy.port, `${head.join('\r\n')}\r\n\r\n{}`)
    return namesIn(peer.requests.at(-1) ?? '')
  }
  for (const path of ['/a?', '/b?', '/c?', '/d?', '/other?']) {
    const names = await told([`Connection: ${listed.join(', ')}`], `${path}1`)
    for (const name of wanted) t.ok(names.includes(name), `${path} ${name}`)
    t.notOk(names.includes('x-mine'), 'P13 any other header is still hop-by-hop')
    t.ok(names.includes('content-length'))
    const split = listed.map((name) => `connection: ${name.toUpperCase()}`)
    t.same(await told(split, `${path}2`), names)
  }
  t.ok((await told(['Connection: X-Told, Idempotency-Key'], '/e?3')).includes('x-told'))
  t.equal(peer.requests.length, 11)
})

http1Test('V06 Connection: <key header> changes neither what the upstream gets nor the record', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer)
  const answers = []
  for (const more of [['Connection: Idempotency-Key'], [], ['Connection: idempotency-key, close']])
    answers.push(values(await rawRequest(proxy.port, post('/p', 'k', '{}', more)), 'idempotent-replayed'))
  t.same(answers, [[], ['true'], ['true']])
  t.equal(peer.requests.length, 1)
  t.match(peer.requests[0], /\r\nIdempotency-Key: k\r\n/)
})

http1Test('V06 a handshake keeps the headers that the proxy relies on, too', async (t) => {
  await using peer = await answering('HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n')
  await using proxy = await proxyBefore(peer)
  const lines = ['Connection: Upgrade, Authorization, X-Mine', 'Authorization: a', 'X_Forwarded_For: 1']
  await everything(proxy.port, get('/ws', ...lines, ...HANDSHAKE, 'X-Mine: 1'))
  const names = namesIn(peer.requests[0] ?? '')
  t.ok(names.includes('authorization'))
  t.ok(names.includes('cdn-loop'))
  t.notOk(names.includes('x-mine'))
  t.notOk(names.includes('x_forwarded_for'))
})

void t.test('V06 an upstream’s Connection cannot remove end-to-end headers from its answer', async (t) => {
  const lines = {
    'Set-Cookie': 'a=1',
    'Content-Type': 'text/plain',
    'Cache-Control': 'no-store',
    'Retry-After': '7',
    'Idempotency-Retry': 'no',
    Location: '/x',
    ETag: '"1"',
  }
  const own = Object.entries(lines).map(([name, value]) => `${name}: ${value}\r\n`)
  await using peer = await answering(
    `HTTP/1.1 201 Created\r\nConnection: ${Object.keys(lines).join(', ')}, X-Hop\r\n${own.join('')}X-Hop: 1\r\nContent-Length: 2\r\n\r\nok`,
  )
  await using proxy = await proxyBefore(peer)
  for (const [path, key] of [
    ['/p', 'k'],
    ['/p', 'k'],
    ['/other', null],
  ] as const) {
    const answer = await rawRequest(proxy.port, post(path, key, '{}'))
    for (const [name, value] of Object.entries(lines)) t.same(values(answer, name.toLowerCase()), [value])
    t.same(values(answer, 'x-hop'), [])
  }
})

void t.test('header names that CGI folds into one the proxy relies on are dropped', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer, {
    routes:
      '{ name: p, match: { path: /p }, scope: { caller: "header:x-user" } }, { name: q, match: { path: /q }, key: { from: ["header:my_key"] } }',
    more: 'trustProxy: ["127.0.0.0/8"]',
  })
  // biome-ignore format: a list
  const folded = [
    'Idempotency_Key', 'idempotency.key', 'Idempotency_Fence', 'IDEMPOTENCY_RECORD', 'X_Forwarded_For',
    'X-Forwarded_Port', 'X.Forwarded.Proto', 'X_User', 'Content_Length', 'Content_Type', 'Transfer_Encoding',
    'CDN_Loop', 'Repeatability_First_Sent', 'My-Key', 'my.key',
  ]
  const others = ['tenant_id', 'X_Custom', 'x.y', 'My_Key']
  const lines = [...folded, ...others].map((name) => `${name}: 0`)
  for (const [path, key] of [
    ['/p', 'k'],
    ['/other', 'k'],
    ['/other', null],
    ['/q', null],
  ] as const) {
    await rawRequest(proxy.port, post(path, key, '{}', lines))
    const names = namesIn(peer.requests.at(-1) ?? '')
    for (const name of folded) t.notOk(names.includes(name.toLowerCase()), `${path} ${name}`)
    for (const name of others) t.ok(names.includes(name.toLowerCase()), `${path} ${name}`)
  }
  t.equal(peer.requests.length, 4)
})

http1Test('P24 heads that servers may read differently are refused, and nothing is claimed', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer)
  const before = await storeCalls(proxy)
  for (const path of ['/p', '/other']) {
    const coded = (version: string, ...codings: readonly string[]): string => {
      const lines = codings.map((coding) => `Transfer-Encoding: ${coding}\r\n`).join('')
      return `POST ${path} HTTP/${version}\r\nHost: a\r\nIdempotency-Key: k\r\n${lines}\r\n2\r\n{}\r\n0\r\n\r\n`
    }
    for (const [status, request] of [
      [501, coded('1.1', 'gzip, chunked')],
      [501, coded('1.1', 'gzip', 'chunked')],
      [400, coded('1.0', 'chunked')],
      [505, post(path, 'k', '{}').replace('HTTP/1.1', 'HTTP/2.0')],
      [505, post(path, 'k', '{}').replace('HTTP/1.1', 'HTTP/0.9')],
      [400, `POST ${path} HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}`],
      [400, post(path, 'k', '{}', ['Host: b'])],
      [400, post('p', 'k', '{}')],
      [400, post(`${path}#a`, 'k', '{}')],
      [417, post(path, 'k', '{}', ['Expect: tea'])],
    ] as const) {
      await refusedAndClosed(t, proxy, request, { code: 'request_malformed', status, retry: 'no' })
    }
  }
  // A request line without a version is HTTP/0.9.
  t.notMatch(await everything(proxy.port, 'POST /p\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}'), / 201 /)
  for (const version of ['HTTP/2.0', 'HTTP/1.1']) {
    const twice = get('/ws', 'Host: b', 'Connection: Upgrade', ...HANDSHAKE).replace('HTTP/1.1', version)
    t.match(await everything(proxy.port, twice), /^HTTP\/1\.1 (?:505|400) [^]*request_malformed/)
  }
  t.equal(peer.requests.length, 0)
  t.equal(await storeCalls(proxy), before, 'nothing was claimed')
})

http1Test('K17 P24 a request that the parser refuses is answered with a problem, too', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer)
  const chunked = (bytes: string) =>
    `POST /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n${bytes}\r\n`
  for (const [status, request] of [
    [431, post('/p', 'k'.repeat(20_000), '{}')],
    [400, 'POST /p HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n'],
    [400, 'nonsense\r\n\r\n'],
    [400, 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'],
    [400, post('/p', 'k', '{}').replace('Content-Length: 2', 'Content-Length: 2\r\nContent-Length: 3')],
    [413, chunked(`2;${'x'.repeat(20_000)}`)],
    [400, chunked('zz')],
  ] as const) {
    const code = status === 400 ? 'request_malformed' : 'request_too_large'
    await refusedAndClosed(t, proxy, request, { code, status, retry: 'no' })
  }
  t.equal(peer.requests.length, 0)
})

http1Test('P24 the refusal of a pipelined head is never taken for the answer before it', async (t) => {
  for (const path of ['/p', '/other']) {
    let answer = (): void => {}
    await using peer = await scriptedPeer((socket) => {
      answer = () => void socket.write(OK)
    })
    await using proxy = await proxyBefore(peer)
    const client = dial(proxy.port, post(path, 'k', '{}')).on('error', () => {})
    while (peer.requests.length === 0) await new Promise((resolve) => setTimeout(resolve, 5))
    client.write('nonsense\r\n\r\n')
    await new Promise((resolve) => setTimeout(resolve, 50))
    client.write('and more of it\r\n\r\n')
    answer()
    const got = await readAnswer(client)
    t.equal(got.status, 201)
    t.same(values(got, 'connection'), ['close'])
    client.on('data', (chunk: Buffer) => t.fail(chunk.toString()))
    await once(client.resume(), 'close')
  }
})

http1Test('a request with more than 2000 header lines is forwarded whole', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer)
  const many = 'a:\r\n'.repeat(2500)
  for (const path of ['/p', '/other']) {
    await rawRequest(proxy.port, post(path, path, '{}').replace('Idempotency', `${many}Idempotency`))
    const request = peer.requests.at(-1) ?? ''
    t.ok(request.endsWith('\r\n\r\n{}'), 'its body, too')
    t.match(request, /\r\nIdempotency-Key: /)
    t.equal(namesIn(request).filter((name) => name === 'a').length, 2500)
  }
})

void t.test('trailers of a request, even a key in them, are not forwarded', async (t) => {
  await using peer = await answering(OK)
  await using proxy = await proxyBefore(peer)
  for (const [path, key] of [
    ['/p', 'Idempotency-Key: k\r\n'],
    ['/other', ''],
  ] as const) {
    const head = `POST ${path} HTTP/1.1\r\nHost: a\r\n${key}Trailer: Idempotency-Key\r\nTransfer-Encoding: chunked\r\n\r\n`
    await rawRequest(
      proxy.port,
      `${head}2;a=b\r\n{}\r\n0\r\nIdempotency-Key: smuggled\r\nIdempotency-Fence: 1\r\n\r\n`,
    )
  }
  t.notMatch(peer.requests.join(''), /smuggled|Idempotency-Fence|a=b/)
})

void t.test('an egress proxy derives the key of each call from its record, method and path', async (t) => {
  await using peer = await answering(OK)
  const route = `{ name: calls, match: { path: "/*" },
    key: { presence: required, forward: Idempotency-Key,
      derive: { headers: [idempotency-record], path: true } } }`
  await using proxy = await proxyBefore(peer, { routes: route })
  const call = (path: string, ...lines: string[]) =>
    rawRequest(proxy.port, post(path, null, '{"a":1}', lines))
  const ofR1 = 'Idempotency-Record: r-1'
  for (const [path, ...lines] of [
    ['/charges', ofR1],
    ['/charges', ofR1],
    ['/refunds', ofR1],
    ['/charges', 'Idempotency-Record: r-2'],
    ['/charges', ofR1, 'Connection: Idempotency-Record'],
  ] as const)
    t.equal((await call(path, ...lines)).status, 201)
  t.match(problemOf(await call('/charges')), { code: 'idempotency_key_missing' }, 'no record, no call')
  const keys = peer.requests.map((request) => /^idempotency-key: (.*)$/im.exec(request)?.[1])
  t.equal(new Set(keys).size, 3, 'three operations, each sent once')
  t.equal(keys.length, 3)
  t.notOk(peer.requests.some((request) => namesIn(request).includes('idempotency-record')))
  t.match(values(await call('/charges', ofR1), 'idempotent-replayed'), ['true'])
})
