import { once } from 'node:events'
import { type ClientHttp2Session, connect, constants, type IncomingHttpHeaders } from 'node:http2'
import { connect as connectTcp } from 'node:net'
import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { certificate } from '../support/certificates.ts'
import { newKey } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

async function upstreamOf(t: Test): Promise<UpstreamStub> {
  const upstream = await upstreamStub(({ method, target, body }, response) => {
    if (target === '/slow') return
    if (target === '/trailers') {
      response.writeHead(201, { Trailer: 'X-Sum' })
      response.addTrailers([
        ['X-Sum', '1'],
        ['X-Sum', '2'],
      ])
      response.end('with trailers')
      return
    }
    response.writeHead(method === 'GET' ? 200 : 201, ['X-Own', 'caf\xe9', 'X-Own', 'b', 'Set-Cookie', 'a=1'])
    response.end(target === '/large' ? Buffer.alloc(700_000, 'x') : `${method} ${body.length}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream
}

function proxyOf(upstream: UpstreamStub, more = ''): Promise<TestProxy> {
  return proxyInProcess(
    `listen: { address: "127.0.0.1:0", http2: true }\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n${more}`,
  )
}

async function open(t: Test, url: string, options = {}): Promise<ClientHttp2Session> {
  const session = connect(url, options)
  t.teardown(() => session.destroy())
  await once(session, 'connect')
  return session
}

interface Answer {
  readonly status: number
  readonly lines: readonly string[]
  readonly body: Buffer
  readonly trailers: readonly string[]
}

/** Rejects if the stream was reset. */
async function ask(
  session: ClientHttp2Session,
  path: string,
  { key = null, body = null, headers = {}, method = 'POST' }: Asked = {},
): Promise<Answer> {
  const stream = session.request({
    ':method': method,
    ':path': path,
    authorization: 'Bearer alice',
    ...(key === null ? {} : { 'idempotency-key': key, 'content-type': 'application/json' }),
    ...headers,
  })
  stream.end(body ?? undefined)
  let lines: string[] = []
  let trailers: string[] = []
  const chunks: Buffer[] = []
  stream.on('response', (_headers, _flags, raw) => (lines = raw))
  stream.on('trailers', (_headers, _flags, raw) => (trailers = raw))
  stream.on('data', (chunk: Buffer) => chunks.push(chunk))
  // Node's client never closes a stream that it has not sent to its end.
  await once(stream, 'end')
  if (stream.rstCode !== constants.NGHTTP2_NO_ERROR) throw new Error(`reset by ${stream.rstCode}`)
  return { status: Number(lines[1]), lines: lines.slice(2), body: Buffer.concat(chunks), trailers }
}

interface Asked {
  readonly key?: string | null
  readonly body?: string | Buffer | null
  readonly headers?: IncomingHttpHeaders
  readonly method?: string
}

void t.test('a protected request over HTTP/2 is executed once and replayed byte for byte', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream)
  const session = await open(t, proxy.url)
  const key = newKey()
  const first = await ask(session, '/v1/payments', { key, body: '{"amount":1}' })
  const replay = await ask(session, '/v1/payments', { key, body: '{"amount":1}' })
  t.equal(first.status, 201)
  t.equal(String(first.body), 'POST 12')
  t.strictSame(replay.body, first.body)
  t.strictSame(linesOf(first.lines, 'x-own'), ['caf\xe9', 'b'])
  t.strictSame(linesOf(replay.lines, 'x-own'), ['caf\xe9', 'b'])
  t.strictSame(linesOf(replay.lines, 'idempotent-replayed'), ['true'])
  t.strictSame(linesOf(replay.lines, 'connection'), [])
  const overHttp1 = await rawRequest(
    proxy.port,
    post('/v1/payments', key, '{"amount":1}', ['Authorization: Bearer alice', `X-Any: 1`]).replace(
      'Host: api.test',
      `Host: 127.0.0.1:${proxy.port}`,
    ),
  )
  t.strictSame([overHttp1.status, overHttp1.body], [201, first.body], 'a retry may come over HTTP/1.1')
  t.equal(upstream.seen.length, 1)
  const misuse = await ask(session, '/v1/payments', { key, body: '{"amount":2}' })
  t.equal(misuse.status, 422)
  t.match(JSON.parse(String(misuse.body)), { code: 'idempotency_key_reused' })
})

void t.test('the upstream gets a request of HTTP/1.1', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream)
  const session = await open(t, proxy.url)
  await ask(session, '/v1/payments?a=1', {
    key: newKey(),
    body: '{}',
    headers: { cookie: ['a=1', 'b=2'] as never, 'x-b': 'é' },
  })
  const [seen] = upstream.seen as [(typeof upstream.seen)[0]]
  t.strictSame([seen.method, seen.target], ['POST', '/v1/payments?a=1'])
  t.equal(valueOf(seen, 'cookie'), 'a=1; b=2')
  t.equal(valueOf(seen, 'content-length'), '2')
  t.equal(valueOf(seen, 'x-forwarded-host'), `127.0.0.1:${proxy.port}`)
  t.strictSame(
    seen.headers.filter((text) => text.startsWith(':')),
    [],
  )
})

void t.test('bodies of every length, trailers, HEAD and requests without protection pass', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream)
  const session = await open(t, proxy.url)
  const large = Buffer.alloc(900_000, '1')
  t.equal(String((await ask(session, '/v1/payments', { key: newKey(), body: large })).body), 'POST 900000')
  t.equal(
    String((await ask(session, '/other', { body: large })).body),
    'POST 900000',
    'streamed, unprotected',
  )
  t.equal(String((await ask(session, '/other', { method: 'GET' })).body), 'GET 0')
  t.equal((await ask(session, '/other', { method: 'HEAD' })).body.length, 0)
  const key = newKey()
  for (const replayed of [[], ['true']]) {
    const answer = await ask(session, '/trailers', { key, body: '{}' })
    t.strictSame(linesOf(answer.lines, 'idempotent-replayed'), replayed)
    t.strictSame(answer.trailers, ['x-sum', '1', 'x-sum', '2'])
    const big = await ask(session, '/large', { key: `large-${key}`, body: '{}' })
    t.equal(big.body.length, 700_000)
  }
  const over = await ask(session, '/v1/payments', { key: newKey(), body: Buffer.alloc(1_100_000) })
  t.equal(over.status, 413)
  t.equal((await ask(session, '/other', { method: 'GET' })).status, 200, 'and its connection stays')
})

void t.test('requests of a connection run at once, and one that is cancelled ends alone', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream, 'drain: { timeout: 0s }')
  const session = await open(t, proxy.url)
  const slow = session.request({
    ':method': 'POST',
    ':path': '/slow',
    'idempotency-key': 'slow-key',
    'content-type': 'application/json',
  })
  slow.on('error', () => {})
  slow.end('{}')
  await upstream.arrived(1)
  const others = await Promise.all(
    Array.from({ length: 30 }, () => ask(session, '/v1/payments', { key: newKey(), body: '{}' })),
  )
  t.strictSame(new Set(others.map(({ status }) => status)), new Set([201]))
  const duplicate = await ask(session, '/slow', {
    key: 'slow-key',
    body: '{}',
    headers: { authorization: undefined },
  })
  t.equal(duplicate.status, 409)
  slow.close(constants.NGHTTP2_CANCEL)
  await once(slow, 'close')
  t.equal((await ask(session, '/v1/payments', { key: newKey(), body: '{}' })).status, 201)
})

void t.test('over TLS the client chooses the protocol', async (t) => {
  using own = certificate('IP:127.0.0.1')
  const upstream = await upstreamOf(t)
  const files = `cert: ${own.certFile}, key: ${own.keyFile}`
  const listening = (tls: string): Promise<TestProxy> =>
    proxyInProcess(
      `listen: { address: "127.0.0.1:0", tls: { ${tls} } }\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`,
    )
  await using both = await listening(files)
  const session = await open(t, both.url, { ca: own.cert })
  t.equal(session.alpnProtocol, 'h2')
  t.equal((await ask(session, '/v1/payments', { key: newKey(), body: '{}' })).status, 201)
  t.equal(valueOf(upstream.seen[0] as never, 'x-forwarded-proto'), 'https')
  await using one = await listening(`${files}, alpn: [http/1.1]`)
  await t.rejects(open(t, one.url, { ca: own.cert }))
})

void t.test('a drain tells HTTP/2 clients to go, and answers what runs', async (t) => {
  let answer = (): void => {}
  const upstream = await upstreamStub((_seen, response) => {
    answer = () => response.writeHead(201).end('late')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  await using proxy = await proxyOf(upstream)
  const session = await open(t, proxy.url)
  const running = ask(session, '/v1/payments', { key: newKey(), body: '{}' })
  await upstream.arrived(1)
  const goaway = once(session, 'goaway')
  const drained = proxy.drain()
  await goaway
  answer()
  t.equal(String((await running).body), 'late')
  await drained
})

void t.test('malformed requests are refused, and their connection stays', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream)
  const session = await open(t, proxy.url)
  const refused = async (headers: IncomingHttpHeaders): Promise<number> =>
    (await ask(session, '/v1/payments', { key: newKey(), body: '{}', headers })).status
  t.equal(await refused({ ':authority': 'a.example', host: 'b.example' }), 400)
  t.equal(await refused({ expect: 'a-miracle' }), 417)
  t.equal(await refused({}), 201)
  t.equal(upstream.seen.length, 1)
})

void t.test('bytes that begin neither protocol harm nobody', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream)
  for (const bytes of ['PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n', 'PRI ', 'P', '']) {
    const socket = connectTcp(proxy.port, '127.0.0.1')
    socket.on('error', () => {})
    socket.end(bytes)
    await once(socket.resume(), 'close')
  }
  const slowly = connectTcp(proxy.port, '127.0.0.1')
  slowly.setNoDelay(true)
  for (const byte of 'POST') {
    slowly.write(byte)
    await new Promise(setImmediate)
  }
  slowly.write(post('/v1/payments', newKey(), '{}').slice(4))
  const [bytes] = await once(slowly, 'data')
  t.match(String(bytes), /^HTTP\/1\.1 201/)
  slowly.destroy()
})
