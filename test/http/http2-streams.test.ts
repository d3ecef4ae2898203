import { once } from 'node:events'
import { type ClientHttp2Session, connect, type IncomingHttpHeaders } from 'node:http2'
import { type AddressInfo, connect as connectTcp, createServer, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import { serveHttp2 } from '../../src/http/http2.ts'
import { newKey, until } from '../support/e2e.ts'
import {
  CANCEL,
  DATA,
  END_HEADERS,
  END_STREAM,
  fields,
  frame,
  HEADERS,
  INTERNAL_ERROR,
  NO_ERROR,
  Peer,
  RST_STREAM,
  SETTINGS,
} from '../support/frames.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { tcpStub, type UpstreamStub, upstreamStub, wholeRequest } from '../support/upstream.ts'

async function proxyOf(t: Test, url: string, more = ''): Promise<TestProxy> {
  const proxy = await proxyInProcess(
    `listen: { address: "127.0.0.1:0", http2: true }\nupstream: { url: "${url}"${more} }\nstore: { url: "memory:" }`,
  )
  // It waits for every request that is open.
  t.teardown(() => proxy.drain())
  return proxy
}

async function answering(t: Test): Promise<UpstreamStub> {
  const upstream = await upstreamStub((_seen, response) => void response.writeHead(200).end('ok'))
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream
}

/** An upstream that answers each connection's request with these bytes, the second part after the first has left the proxy. */
async function saying(t: Test, bytes: string, firstLeft = Promise.resolve()): Promise<string> {
  const end = bytes.indexOf('\r\n\r\n') + 4
  const upstream = await tcpStub((socket) => {
    socket.on('error', () => {})
    void wholeRequest(socket).then(async () => {
      socket.write(bytes.slice(0, end))
      await firstLeft
      socket.end(bytes.slice(end))
    })
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream.url
}

const code = (value: number): Buffer => Buffer.from([0, 0, 0, value])

function head(path: string, more: readonly (readonly [string, string])[] = []): Buffer {
  const pseudo = [
    [':method', 'POST'],
    [':path', path],
    [':scheme', 'http'],
    [':authority', 'a'],
  ] as const
  return fields([...pseudo, ...more])
}

const KEY = ['idempotency-key', 'key-1'] as const

void t.test('a request that is reset before its end is never executed', async (t) => {
  const upstream = await answering(t)
  const proxy = await proxyOf(t, upstream.url)
  for (const reason of [NO_ERROR, CANCEL])
    for (const lines of [[], [KEY], [KEY, ['expect', '100-continue']]] as const)
      for (const isAtOnce of [true, false]) {
        const peer = new Peer(t, proxy.port)
        const begun = [
          frame(HEADERS, END_HEADERS, 1, head('/v1/payments', lines)),
          frame(DATA, 0, 1, Buffer.from('{"amount":1')),
        ]
        const reset = frame(RST_STREAM, 0, 1, code(reason))
        if (!isAtOnce) {
          peer.socket.write(Buffer.concat(begun))
          await answered(peer, 3)
        }
        peer.socket.write(isAtOnce ? Buffer.concat([...begun, reset]) : reset)
        await answered(peer, 5)
        peer.socket.destroy()
      }
  // Whoever waits for a body that never ends would still wait.
  await proxy.drain()
  t.strictSame(
    upstream.seen.filter(({ target }) => target === '/v1/payments'),
    [],
  )
})

void t.test('a whole request that is reset at once harms nobody', async (t) => {
  const upstream = await answering(t)
  const proxy = await proxyOf(t, upstream.url)
  for (const reason of [NO_ERROR, CANCEL]) {
    const peer = new Peer(t, proxy.port)
    const lines = head('/v1/payments', [KEY, ['expect', '100-continue']])
    const reset = frame(RST_STREAM, 0, 1, code(reason))
    peer.socket.write(Buffer.concat([frame(HEADERS, END_HEADERS | END_STREAM, 1, lines), reset]))
    await answered(peer, 3)
  }
  t.equal((await rawRequest(proxy.port, post('/other', null, '{}'))).status, 200)
})

/** Once this connection has had an answer on another stream, the proxy has read what came before. */
async function answered(peer: Peer, stream: number): Promise<void> {
  peer.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, head('/other')))
  await until(() => peer.of(DATA).some((one) => one.stream === stream))
}

/** An answer; rejects if its stream is reset. */
async function ask(
  session: ClientHttp2Session,
  path: string,
  more: IncomingHttpHeaders = {},
): Promise<{ readonly status: unknown; readonly headers: IncomingHttpHeaders; readonly body: string }> {
  const stream = session.request({ ':method': 'POST', ':path': path, ...more })
  if (more[':method'] !== 'HEAD') stream.end('{}')
  let headers: IncomingHttpHeaders = {}
  let body = ''
  stream.on('response', (lines) => (headers = lines)).on('data', (chunk: Buffer) => (body += String(chunk)))
  await once(stream, 'close')
  return { status: headers[':status'], headers, body }
}

function open(t: Test, url: string): ClientHttp2Session {
  const session = connect(url)
  t.teardown(() => session.destroy())
  return session
}

void t.test('what only HTTP/1.1 may carry harms nobody in an answer', async (t) => {
  for (const [bytes, body, lines] of [
    [
      'X-Content-Type-Options: nosniff\r\nX-Content-Type-Options: nosniff\r\nContent-Length: 2\r\n\r\nok',
      'ok',
      {},
    ],
    ['HTTP2-Settings: a\r\nContent-Length: 2\r\n\r\nok', 'ok', { 'http2-settings': undefined }],
    [
      'Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nETag: 1\r\nETag: 2\r\nHTTP2-Settings: a\r\n\r\n',
      'ok',
      {},
    ],
  ] as const) {
    const proxy = await proxyOf(t, await saying(t, `HTTP/1.1 200 OK\r\n${bytes}`))
    const session = open(t, proxy.url)
    const key = newKey()
    for (const more of [{}, { ':method': 'HEAD' }, { 'idempotency-key': key }, { 'idempotency-key': key }]) {
      const answer = await ask(session, '/v1/payments', more)
      t.equal(answer.status, 200)
      t.equal(answer.body, ':method' in more ? '' : body)
      t.match(answer.headers, lines)
    }
  }
})

void t.test('statuses without content, and one that HTTP/2 cannot carry (RFC 9110 §15)', async (t) => {
  for (const status of [204, 205, 304])
    for (const bytes of ['Content-Length: 2\r\n\r\nok', 'Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n']) {
      const headLeft = Promise.withResolvers<void>()
      const proxy = await proxyOf(t, await saying(t, `HTTP/1.1 ${status} OK\r\n${bytes}`, headLeft.promise))
      const session = open(t, proxy.url)
      const stream = session.request({ ':method': 'POST', ':path': '/other' })
      stream.on('response', headLeft.resolve).resume().end('{}')
      await once(stream, 'close')
      t.equal(stream.rstCode, NO_ERROR, `${status}`)
      const key = newKey()
      for (const _ of ['first', 'replay'])
        t.match(await ask(session, '/v1/payments', { 'idempotency-key': key }), { status, body: '' })
    }
  const proxy = await proxyOf(t, await saying(t, 'HTTP/1.1 700 No\r\nContent-Length: 2\r\n\r\nok'))
  const session = open(t, proxy.url)
  const protectedOne = { 'idempotency-key': newKey() }
  for (const more of [{}, protectedOne, protectedOne])
    t.match(await ask(session, '/v1/payments', more), { status: 500, body: 'ok' })
})

void t.test('an upload that is answered early ends with its answer', async (t) => {
  const upstream = await tcpStub((socket) => {
    socket.on('error', () => {})
    // The rest stays unread.
    socket.once('readable', () => socket.write('HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno'))
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url)
  const stream = open(t, proxy.url).request({ ':method': 'POST', ':path': '/other' })
  const chunk = Buffer.alloc(100_000)
  const upload = (): void => {
    while (!stream.closed && stream.write(chunk));
  }
  stream.on('drain', upload)
  upload()
  const [lines] = await once(stream.resume(), 'response')
  t.equal(lines[':status'], 403)
  // Node's client never closes a stream that it has not sent to its end.
  await once(stream, 'end')
  t.equal(stream.rstCode, NO_ERROR)
  await proxy.drain()
})

void t.test('an answer that is dropped before its end does not look complete', async (t) => {
  const upstream = await upstreamStub((_seen, response) => {
    response.writeHead(200).write('x')
    response.end(Buffer.alloc(3_000_000))
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url, ', idleTimeout: 1s')
  for (const lines of [[], [KEY]]) {
    const peer = new Peer(t, proxy.port)
    peer.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, head('/large', lines)))
    await until(() => peer.of(RST_STREAM).length === 1)
    t.equal(peer.of(RST_STREAM)[0]?.payload.readUInt32BE(0), INTERNAL_ERROR)
  }
})

void t.test('methods that HTTP/1.1 does not take here are not implemented', async (t) => {
  const upstream = await answering(t)
  const proxy = await proxyOf(t, upstream.url)
  const session = open(t, proxy.url)
  for (const method of ['post', 'BREW', "G'ET"])
    t.match(await ask(session, '/v1/payments', { ':method': method, 'idempotency-key': newKey() }), {
      status: 501,
      headers: { 'content-type': 'application/problem+json' },
    })
  const peer = new Peer(t, proxy.port)
  const authority = [
    [':method', 'CONNECT'],
    [':authority', 'a:443'],
  ] as const
  peer.socket.write(frame(HEADERS, END_HEADERS, 1, fields(authority)))
  await until(() => peer.of(DATA).length > 0)
  t.match(JSON.parse(String(peer.of(DATA)[0]?.payload)), { status: 501 })
  t.equal((await ask(session, '/v1/payments')).status, 200)
  t.equal(upstream.seen.length, 1)
})

void t.test('a client that ends its side of the connection is done', async (t) => {
  const upstream = await upstreamStub(() => {})
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url)
  const idle = new Peer(t, proxy.port)
  await until(() => idle.frames.length > 0)
  const waiting = new Peer(t, proxy.port)
  waiting.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, head('/other')))
  await upstream.arrived(1)
  for (const peer of [idle, waiting]) {
    peer.socket.end()
    await peer.closed
  }
})

void t.test('answers that a client does not read keep none of its requests out', async (t) => {
  const upstream = await upstreamStub(({ target }, response) => {
    response.end(Buffer.alloc(target === '/other' ? 0 : 900_000))
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url)
  const noWindow = Buffer.from([0, 4, 0, 0, 0, 0])
  const peer = new Peer(t, proxy.port, noWindow)
  for (let n = 0; n < 20; n++) {
    const lines = head('/large', [['idempotency-key', `key-${n}`]])
    peer.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, lines))
  }
  await until(() => peer.of(HEADERS).length === 20)
  peer.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, 41, head('/other')))
  await until(() => peer.frames.some(({ stream }) => stream === 41))
  t.match(
    peer.frames.filter(({ stream }) => stream === 41),
    [{ type: HEADERS }],
  )
  peer.socket.destroy()
})

void t.test('an idle connection ends, even if its client keeps its side', async (t) => {
  const server = createServer({ allowHalfOpen: true }, (connection) => {
    serveHttp2(connection, { keepAliveTimeout: 50, serveStream: () => {} })
  })
  t.teardown(() => server.close())
  await once(server.listen(0, '127.0.0.1'), 'listening')
  const { port } = server.address() as AddressInfo
  const client = connectTcp({ port, host: '127.0.0.1', allowHalfOpen: true })
  t.teardown(() => client.destroy())
  const [accepted] = (await once(server, 'connection')) as [Socket]
  client.resume().write('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n')
  client.write(frame(SETTINGS, 0, 0))
  await once(accepted, 'close')
})

void t.test('a client that reads slowly gets all of a stream, one after another', async (t) => {
  const chunk = Buffer.alloc(100_000, 'x')
  const upstream = await upstreamStub(async (_seen, response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    for (let n = 0; n < 30; n++) if (!response.write(chunk)) await once(response, 'drain')
    response.end()
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url)
  const session = open(t, proxy.url)
  await Promise.all(
    [{}, { 'idempotency-key': newKey() }].map(async (more) => {
      const stream = session.request({ ':method': 'POST', ':path': '/events', ...more })
      stream.end('{}')
      let size = 0
      for await (const part of stream) {
        size += (part as Buffer).length
        await new Promise(setImmediate)
      }
      t.equal(size, 30 * chunk.length)
      t.equal(stream.rstCode, NO_ERROR)
    }),
  )
})

void t.test('an upload whose upstream breaks off harms nobody', async (t) => {
  const upstream = await tcpStub((socket) => {
    socket.on('error', () => {})
    socket.once('readable', () => socket.destroy())
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyOf(t, upstream.url)
  const stream = open(t, proxy.url).request({ ':method': 'POST', ':path': '/other' })
  stream.write(Buffer.alloc(200_000))
  const [lines] = await once(stream.resume(), 'response')
  t.equal(lines[':status'], 502)
  await once(stream, 'end')
  await proxy.drain()
})

void t.test('an answer in many small pieces waits for its client without a warning', async (t) => {
  const warnings: Error[] = []
  const warned = (warning: Error): void => void warnings.push(warning)
  process.on('warning', warned)
  t.teardown(() => process.off('warning', warned))
  const pieces = `64\r\n${'x'.repeat(100)}\r\n`.repeat(4000)
  const head = 'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n'
  const proxy = await proxyOf(t, await saying(t, `${head}${pieces}0\r\n\r\n`))
  const session = connect(proxy.url, { settings: { initialWindowSize: 2000 } })
  t.teardown(() => session.destroy())
  for (const more of [{}, { 'idempotency-key': newKey() }])
    t.equal((await ask(session, '/events', more)).body.length, 400_000)
  t.strictSame(warnings, [])
})
