import t, { type Test } from 'tap'
import { until } from '../support/e2e.ts'
import {
  CONTINUATION,
  DATA,
  END_HEADERS,
  END_STREAM,
  fields,
  frame,
  HEADERS,
  NO_ERROR,
  Peer,
  PING,
  REFUSED_STREAM,
  RST_STREAM,
} from '../support/frames.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

function request(port: number, path: string, more: readonly (readonly [string, string])[] = []): Buffer {
  const pseudo = [
    [':method', 'GET'],
    [':path', path],
    [':scheme', 'http'],
    [':authority', `127.0.0.1:${port}`],
  ] as const
  return fields([...pseudo, ...more])
}

async function proxyOf(t: Test, more = ''): Promise<TestProxy> {
  const upstream = await upstreamStub(({ target }, response) => {
    if (target === '/held') return
    response.writeHead(200).end(target === '/large' ? Buffer.alloc(3_000_000) : 'ok')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(
    `listen: { address: "127.0.0.1:0", http2: true }\nupstream: { url: "${upstream.url}"${more} }\nstore: { url: "memory:" }\ndrain: { timeout: 0s }`,
  )
  t.teardown(() => proxy.drain())
  return proxy
}

async function stillServes({ port }: TestProxy): Promise<number> {
  return (await rawRequest(port, post('/other', null, '{}'))).status
}

void t.test('a client that opens and resets streams without end loses its connection', async (t) => {
  const proxy = await proxyOf(t)
  const peer = new Peer(t, proxy.port)
  const head = request(proxy.port, '/held')
  for (let n = 0; n < 5000; n++)
    peer.socket.write(
      Buffer.concat([
        frame(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, head),
        frame(RST_STREAM, 0, 2 * n + 1, Buffer.from([0, 0, 0, 8])),
      ]),
    )
  t.not(await peer.ended(), NO_ERROR)
  t.equal(await stillServes(proxy), 200)
})

void t.test('a head that goes on in CONTINUATION frames without end is cut off', async (t) => {
  const proxy = await proxyOf(t)
  const peer = new Peer(t, proxy.port)
  peer.socket.write(frame(HEADERS, END_STREAM, 1, request(proxy.port, '/')))
  for (let n = 0; n < 1000; n++)
    peer.socket.write(frame(CONTINUATION, 0, 1, fields([[`x-${n}`, 'y'.repeat(50)]])))
  t.not(await peer.ended(), NO_ERROR)
  t.equal(await stillServes(proxy), 200)
})

void t.test('a head over 32 KiB gets 431', async (t) => {
  const proxy = await proxyOf(t)
  const peer = new Peer(t, proxy.port)
  const long = request(proxy.port, '/', [
    ['x-a', 'a'.repeat(15_000)],
    ['x-b', 'b'.repeat(15_000)],
    ['x-c', 'c'.repeat(15_000)],
  ])
  peer.socket.write(
    Buffer.concat([
      frame(HEADERS, END_STREAM, 1, long.subarray(0, 16_000)),
      frame(CONTINUATION, 0, 1, long.subarray(16_000, 32_000)),
      frame(CONTINUATION, END_HEADERS, 1, long.subarray(32_000)),
    ]),
  )
  await until(() => peer.of(HEADERS).length === 1)
  // The status is a literal of three digits.
  t.match(String(peer.of(HEADERS)[0]?.payload), '431')
  t.equal(await stillServes(proxy), 200)
})

void t.test('a connection has at most 100 requests at once', async (t) => {
  const proxy = await proxyOf(t)
  const peer = new Peer(t, proxy.port)
  const head = request(proxy.port, '/held')
  for (let n = 0; n < 101; n++) peer.socket.write(frame(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, head))
  await until(() => peer.of(RST_STREAM).length === 1)
  const [refused] = peer.of(RST_STREAM)
  t.match(refused, { stream: 201 })
  t.equal(refused?.payload.readUInt32BE(0), REFUSED_STREAM)
})

void t.test('pings without end, whose answers nobody reads, end their connection', async (t) => {
  const proxy = await proxyOf(t)
  const peer = new Peer(t, proxy.port)
  peer.socket.pause()
  const pings = Buffer.concat(Array.from({ length: 10_000 }, () => frame(PING, 0, 0, Buffer.alloc(8))))
  const flood = (): void => {
    while (!peer.socket.destroyed && peer.socket.write(pings));
  }
  peer.socket.on('drain', flood)
  flood()
  await peer.closed
  t.equal(await stillServes(proxy), 200)
})

void t.test('an answer whose client opens no window is dropped after idleTimeout', async (t) => {
  const proxy = await proxyOf(t, ', idleTimeout: 1s')
  const noWindow = Buffer.from([0, 4, 0, 0, 0, 0])
  const peer = new Peer(t, proxy.port, noWindow)
  const lines = [
    [':method', 'POST'],
    [':path', '/large'],
    [':scheme', 'http'],
    [':authority', 'a'],
    ['idempotency-key', 'key-1'],
  ] as const
  peer.socket.write(
    Buffer.concat([
      frame(HEADERS, END_HEADERS, 1, fields(lines)),
      frame(DATA, END_STREAM, 1, Buffer.from('{}')),
    ]),
  )
  await until(() => peer.of(HEADERS).length === 1)
  await until(() => peer.of(RST_STREAM).length === 1)
  t.equal(await proxy.metric('idempotency_buffered_bytes'), 0)
  t.equal(await stillServes(proxy), 200)
})
