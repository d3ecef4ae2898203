/** The proxy before an upstream that speaks HTTP/2: what clients see of it (docs/tls.md). */
import { once } from 'node:events'
import { connect, createServer, type ServerHttp2Stream } from 'node:http2'
import type { AddressInfo, Socket } from 'node:net'
import { text } from 'node:stream/consumers'
import t, { type Test } from 'tap'
import { newKey } from '../support/e2e.ts'
import { problemOf, proxyBefore, values, without } from '../support/exchange.ts'
import {
  CANCEL,
  END_HEADERS,
  END_STREAM,
  fields,
  frame,
  frameUpstream,
  HEADERS,
  REFUSED_STREAM,
  reset,
} from '../support/frames.ts'
import type { TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'

interface Heard {
  readonly raw: readonly string[]
  readonly body: Buffer
}

/** An upstream of Node's own that keeps what it hears. */
async function hearing(t: Test, answer: (stream: ServerHttp2Stream, heard: Heard) => void) {
  const heard: Heard[] = []
  const server = createServer()
  server.on('stream', (stream, _headers, _flags, raw) => {
    const chunks: Buffer[] = []
    stream.on('data', (chunk: Buffer) => chunks.push(chunk))
    stream.on('end', () => {
      heard.push({ raw, body: Buffer.concat(chunks) })
      answer(stream, heard.at(-1) as Heard)
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, heard }
}

async function proxyOf(t: Test, upstream: { readonly url: string }, more = ''): Promise<TestProxy> {
  const proxy = await proxyBefore(upstream, { upstream: 'http2: true', more })
  t.teardown(() => proxy.drain())
  return proxy
}

const ok = (stream: number): Buffer =>
  frame(HEADERS, END_HEADERS | END_STREAM, stream, fields([[':status', '201']]))

for (const more of ['', 'http: node'])
  void t.test(`U01 a refused request may be sent again, and then executes once ${more}`, async (t) => {
    const upstream = await frameUpstream(t, {
      request: (socket, stream, n) =>
        void socket.write(n % 2 === 1 ? reset(stream, REFUSED_STREAM) : ok(stream)),
    })
    const proxy = await proxyOf(t, upstream, more)
    const key = newKey()
    const refused = problemOf(await rawRequest(proxy.port, post('/p', key, '{}')))
    t.match(refused, { code: 'upstream_unreachable', detail: 'the upstream refused the request unprocessed' })
    t.equal(refused.retry, 'same-key')
    t.equal((await rawRequest(proxy.port, post('/p', key, '{}'))).status, 201)
    const replay = await rawRequest(proxy.port, post('/p', key, '{}'))
    t.strictSame([replay.status, values(replay, 'idempotent-replayed')], [201, ['true']])
    t.equal(upstream.requests, 2)
    const passed = problemOf(await rawRequest(proxy.port, post('/other', null, '{}')))
    t.match(passed, { code: 'upstream_unreachable', detail: 'the upstream refused the request unprocessed' })
    t.equal(upstream.requests, 3, 'nothing is sent again')
  })

void t.test('U02 any other end leaves it unknown, and a retry is not sent', async (t) => {
  const ends: ((socket: Socket, stream: number) => void)[] = [
    (socket, stream) => void socket.write(reset(stream, CANCEL)),
    (socket) => void socket.resetAndDestroy(),
  ]
  const upstream = await frameUpstream(t, {
    request: (socket, stream, n) => ends[(n - 1) % ends.length]?.(socket, stream),
  })
  const proxy = await proxyOf(t, upstream)
  for (const _ of ends) {
    const key = newKey()
    const broken = problemOf(await rawRequest(proxy.port, post('/p', key, '{}')))
    t.equal(broken.code, 'upstream_failed')
    t.equal((await rawRequest(proxy.port, post('/p', key, '{}'))).status, 409)
  }
  t.equal(upstream.requests, ends.length)
  const passed = problemOf(await rawRequest(proxy.port, post('/other', null, '{}')))
  t.match(passed, { code: 'upstream_failed', retry: 'no' })
})

void t.test('U02 one connection that breaks leaves each of its requests unknown, once', async (t) => {
  const upstream = await frameUpstream(t, {
    request(socket, _stream, n) {
      if (n === 5) socket.destroy()
    },
  })
  const proxy = await proxyOf(t, upstream)
  const keys = Array.from({ length: 5 }, newKey)
  const answers = await Promise.all(keys.map((key) => rawRequest(proxy.port, post('/p', key, '{}'))))
  for (const answer of answers) t.equal(problemOf(answer).code, 'upstream_failed')
  for (const key of keys) t.equal((await rawRequest(proxy.port, post('/p', key, '{}'))).status, 409)
  t.strictSame([upstream.requests, upstream.sockets.length], [5, 1])
})

void t.test('P01 P12 lines, trailers and bodies are forwarded, stored and replayed', async (t) => {
  const upstream = await hearing(t, (stream, { body }) => {
    stream.respond({ ':status': 200, 'content-type': 'text/plain' }, { waitForTrailers: true })
    stream.once('wantTrailers', () => stream.sendTrailers({ 'x-sum': '7' }))
    stream.end(body)
  })
  const proxy = await proxyOf(t, upstream)
  const lines = ['TE: trailers, deflate', 'Connection: X-Hop', 'X-Hop: 1', 'X-Kept: 2', 'Keep-Alive: x']
  const whole = post('/p', newKey(), 'x'.repeat(5 * 1024 ** 2).slice(0, 900_000), lines)
  const live = await rawRequest(proxy.port, whole)
  const replay = await rawRequest(proxy.port, whole)
  t.strictSame([live.status, live.trailers, live.body.length], [200, ['x-sum', '7'], 900_000])
  t.equal(replay.body.equals(live.body), true)
  t.strictSame(replay.trailers, live.trailers)
  t.strictSame(without(replay, 'idempotent-replayed'), without(live))
  const { raw } = upstream.heard[0] as Heard
  t.match(raw.join('|'), /^:method\|POST\|:scheme\|http\|:authority\|api\.test\|:path\|\/p\|/)
  t.match(raw.join('|'), /\|x-kept\|2\|.*\|te\|trailers\|/)
  t.notMatch(raw.join('|'), /x-hop|keep-alive|connection|\|host\|/)
  t.equal(upstream.heard.length, 1)

  const chunked = `POST /other HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n`
  const passed = await rawRequest(proxy.port, `${chunked}3\r\nabc\r\n0\r\n\r\n`)
  t.strictSame([passed.status, passed.body.toString(), passed.trailers], [200, 'abc', ['x-sum', '7']])
  const length = 5 * 1024 ** 2
  const large = `PUT /other HTTP/1.1\r\nHost: api.test\r\nContent-Length: ${length}\r\n\r\n${'y'.repeat(length)}`
  t.equal((await rawRequest(proxy.port, large)).body.length, length)
})

void t.test('P07 trailers behind a length reach clients over HTTP/2, unprotected too', async (t) => {
  const upstream = await hearing(t, (stream, { body }) => {
    stream.respond({ ':status': 200, 'content-length': body.length }, { waitForTrailers: true })
    stream.once('wantTrailers', () => stream.sendTrailers({ 'grpc-status': '7' }))
    stream.end(body)
  })
  const proxy = await proxyBefore(upstream, {
    upstream: 'http2: true',
    more: 'listen: { address: "127.0.0.1:0", http2: true }',
  })
  t.teardown(() => proxy.drain())
  const session = connect(proxy.url)
  t.teardown(() => session.destroy())
  for (const key of [{ 'idempotency-key': newKey() }, {}]) {
    const stream = session.request({ ':method': 'POST', ':path': '/p', ...key })
    let trailers: unknown = null
    stream.on('trailers', (lines) => (trailers = lines))
    t.equal(await text(stream.end('ok')), 'ok')
    t.match(trailers, { 'grpc-status': '7' }, JSON.stringify(key))
  }
})

void t.test('L01 a client that only listens may keep its side of a stream open', async (t) => {
  const server = createServer().on('stream', (stream) => {
    stream.on('error', () => {}).respond({ ':status': 200 })
    let sent = 0
    const timer = setInterval(() => {
      stream.write('.')
      if (++sent === 12) stream.end('over')
    }, 50)
    stream.on('close', () => clearInterval(timer))
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  const proxy = await proxyBefore(
    { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}` },
    { upstream: 'http2: true, idleTimeout: 200ms', more: 'listen: { address: "127.0.0.1:0", http2: true }' },
  )
  t.teardown(() => proxy.drain())
  const session = connect(proxy.url)
  t.teardown(() => session.destroy())
  const stream = session.request({ ':method': 'POST', ':path': '/watch' })
  stream.write('watch')
  let heard = ''
  stream.on('data', (chunk: Buffer) => (heard += String(chunk))).on('error', () => {})
  await Promise.race([once(stream, 'end'), once(stream, 'close')])
  t.equal(heard, '............over')
})
