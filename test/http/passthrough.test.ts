import { once } from 'node:events'
import { createServer, request as httpRequest, type IncomingMessage, METHODS } from 'node:http'
import { type AddressInfo, connect, type Socket } from 'node:net'
import { Readable } from 'node:stream'
import t from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { answering, proxyBefore, scriptedPeer, storeCalls, without } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

/** HEAD has no body to compare; CONNECT is not a request to an origin. */
const UNUSUAL = new Set(['CONNECT', 'HEAD'])

const MIB = 1024 * 1024
const SIZE = 100 * MIB
const stub = () => upstreamStub((_seen, response) => void response.writeHead(200).end('ok'))

/** Memory in use after garbage collection; needs no --expose-gc. */
async function held(): Promise<number> {
  const { setFlagsFromString } = await import('node:v8')
  const { runInNewContext } = await import('node:vm')
  setFlagsFromString('--expose-gc')
  const gc = runInNewContext('gc') as () => void
  for (let i = 0; i < 3; i++) {
    gc()
    await new Promise((resolve) => setImmediate(resolve))
  }
  const { heapUsed, external } = process.memoryUsage()
  return heapUsed + external
}

/** A server in this process that swallows uploads and sends large downloads, in constant memory. */
async function bulk(): Promise<{ url: string; received: () => number } & AsyncDisposable> {
  let received = 0
  const server = createServer((request, response) => {
    request.on('data', (chunk: Buffer) => {
      received += chunk.length
    })
    request.on('end', () => {
      if (request.method === 'POST') response.end('done')
      else Readable.from(pieces()).pipe(response)
    })
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    received: () => received,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

const PIECE = Buffer.alloc(MIB / 4)
function* pieces(): Generator<Buffer> {
  for (let sent = 0; sent < SIZE; sent += PIECE.length) yield PIECE
}

void t.test('P17 100 MB uploads and downloads without a key stream in flat memory', async (t) => {
  await using upstream = await bulk()
  await using proxy = await proxyBefore(upstream)
  // A small request first, so that what is allocated once does not count.
  await rawRequest(proxy.port, post('/p', null, '{}'))
  const before = await held()
  let peak = 0
  const watch = async (): Promise<void> => {
    peak = Math.max(peak, (await held()) - before)
  }
  for (const framing of ['length', 'chunked']) {
    const headers = framing === 'length' ? { 'content-length': SIZE } : {}
    const upload = httpRequest(`${proxy.url}/p`, { method: 'POST', headers })
    const answered = once(upload, 'response') as Promise<[IncomingMessage]>
    let i = 0
    for (const piece of pieces()) {
      if (!upload.write(piece)) await once(upload, 'drain')
      if (++i % 100 === 0) await watch()
    }
    upload.end()
    const [answer] = await answered
    t.equal(answer.statusCode, 200)
    answer.resume()
    await once(answer, 'end')
  }
  t.ok(upstream.received() >= 2 * SIZE, 'all of it arrived')
  const download = httpRequest(`${proxy.url}/file`).end()
  const [answer] = (await once(download, 'response')) as [IncomingMessage]
  let size = 0
  let next = SIZE / 4
  for await (const chunk of answer as AsyncIterable<Buffer>) {
    size += chunk.length
    if (size < next) continue
    next += SIZE / 4
    await watch()
  }
  t.equal(size, SIZE)
  await watch()
  t.ok(peak < 30 * MIB, `${Math.round(peak / MIB)} MiB held at most`)
  t.equal(await proxy.metric('idempotency_buffered_bytes'), 0)
})

void t.test('P17 a slow reader does not fill the proxy’s memory', async (t) => {
  await using upstream = await bulk()
  await using proxy = await proxyBefore(upstream)
  const before = await held()
  const client = connect(proxy.port, '127.0.0.1')
  client.write('GET /file HTTP/1.1\r\nHost: a\r\n\r\n')
  await once(client, 'readable')
  await new Promise((resolve) => setTimeout(resolve, 300))
  t.ok((await held()) - before < 30 * MIB)
  client.destroy()
})

void t.test('P21 events pass through as they come', async (t) => {
  let upstream: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    upstream = socket
    socket.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n')
  })
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  client.write('GET /events HTTP/1.1\r\nHost: a\r\n\r\n')
  let got = String((await once(client, 'data'))[0])
  t.match(got, /^HTTP\/1.1 200 OK\r\n/, 'the head before any event')
  for (const event of ['one', 'two']) {
    upstream?.write(`3\r\n${event}\r\n`)
    while (!got.includes(event)) got += String((await once(client, 'data'))[0])
  }
  upstream?.write('0\r\n\r\n')
  while (!got.endsWith('0\r\n\r\n')) got += String((await once(client, 'data'))[0])
  client.destroy()
  t.pass('ended')
})

void t.test('P04 an unprotected answer keeps its status, reason, header lines and bytes', async (t) => {
  for (const [status, reason] of [
    [200, 'Fine'],
    [201, ''],
    [404, 'Cr\xe9\xe9'],
    [599, 'x'],
    [600, 'Odd'],
    [999, 'Denied'],
  ] as const) {
    await using peer = await answering(
      `HTTP/1.1 ${status} ${reason}\r\nX-b: 2\r\nSet-Cookie: a=1, b\r\nx-B: caf\xe9\r\nSet-Cookie: c=2\r\nX-Empty:\r\n` +
        'Connection: x-hop\r\nConnection: x-hop2\r\nX-Hop: 1\r\nX-Hop2: 1\r\nIdempotent-Replayed: true\r\nDate: D\r\nContent-Length: 2\r\n\r\n\xff\x00',
    )
    await using proxy = await proxyBefore(peer)
    const answer = await rawRequest(proxy.port, 'GET /x HTTP/1.1\r\nHost: a\r\n\r\n')
    t.equal(answer.statusLine, `HTTP/1.1 ${status} ${reason}`)
    t.same(without(answer, 'connection', 'keep-alive', 'date', 'content-length'), [
      'X-b',
      '2',
      'Set-Cookie',
      'a=1, b',
      'x-B',
      'caf\xe9',
      'Set-Cookie',
      'c=2',
      'X-Empty',
      '',
    ])
    t.same(answer.body, Buffer.from([0xff, 0]))
  }
})

void t.test('P07 P12 204, 304 with a length, HEAD, trailers and HTTP/1.0 are framed correctly', async (t) => {
  const show = async (upstreamBytes: string, request: string) => {
    await using peer = await answering(upstreamBytes)
    await using proxy = await proxyBefore(peer)
    const client = connect(proxy.port, '127.0.0.1')
    client.write(request)
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString('latin1')
    })
    await once(client, 'end')
    client.destroy()
    return got
  }
  const request = (method: string, version = '1.1') =>
    `${method} /x HTTP/${version}\r\nHost: a\r\nConnection: close\r\n\r\n`
  const none = await show('HTTP/1.1 204 No\r\nContent-Length: 0\r\nTrailer: X\r\n\r\n', request('GET'))
  t.match(none, /^HTTP\/1.1 204 No\r\n/)
  t.notMatch(none, /content-length|transfer-encoding/i)
  const fresh = await show(
    'HTTP/1.1 304 Not Modified\r\nContent-Length: 5000\r\nETag: "e"\r\n\r\n',
    request('GET'),
  )
  t.match(fresh, /^HTTP\/1.1 304 Not Modified\r\nContent-Length: 5000\r\nETag: "e"\r\n/)
  t.ok(fresh.endsWith('\r\n\r\n'))
  const head = await show('HTTP/1.1 200 OK\r\nTrailer: X\r\nContent-Length: 5000\r\n\r\n', request('HEAD'))
  t.match(head, /Content-Length: 5000\r\n/)
  t.ok(head.endsWith('\r\n\r\n'))
  const chunked =
    'HTTP/1.1 200 OK\r\nTrailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n'
  const trailed = await show(chunked, request('GET'))
  t.match(trailed, /Trailer: X-T\r\n/)
  t.match(trailed, /2\r\nok\r\n0\r\nx-t: 1\r\n\r\n$/i)
  const old = await show(chunked, request('GET', '1.0'))
  t.match(old, /\r\n\r\nok$/)
  t.notMatch(old, /chunked|Trailer/)
  t.match(await show(chunked, request('HEAD')), /^HTTP\/1.1 200 OK\r\n/)
})

void t.test('F21 targets, methods and content types pass as sent', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const targets = [
    '//',
    '//evil.test/x',
    '/a/../b/./c',
    '/%',
    '/%zz?%',
    '/a%00b',
    '/a b'.replace(' ', '%20'),
    '/{x}|^`"<>',
    '/?',
    '/??a=1?',
    '/a;b=c,d',
    '/*',
    '/:x',
  ]
  for (const target of targets) {
    const answer = await rawRequest(
      proxy.port,
      Buffer.from(`GET ${target} HTTP/1.1\r\nHost: a\r\n\r\n`, 'latin1'),
    )
    t.equal(answer.status, 200, target)
    t.equal(upstream.seen.at(-1)?.target, target)
  }
  for (const type of [
    '',
    'x',
    'application/json; charset="',
    'text/plain',
    'multipart/form-data',
    'application/json',
    'a/b;;c',
    'caf\xe9/x',
  ]) {
    const answer = await rawRequest(
      proxy.port,
      Buffer.from(
        `POST /t HTTP/1.1\r\nHost: a\r\nContent-Type: ${type}\r\nContent-Length: 3\r\n\r\n{no`,
        'latin1',
      ),
    )
    t.equal(answer.status, 200, type)
    t.same(linesOf(upstream.seen.at(-1)?.headers ?? [], 'content-type'), [type])
    t.equal(upstream.seen.at(-1)?.body.toString(), '{no')
  }
  for (const method of METHODS.filter((one) => !UNUSUAL.has(one))) {
    const answer = await rawRequest(
      proxy.port,
      `${method} /m HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi`,
    )
    t.equal(answer.status, 200, method)
    t.equal(upstream.seen.at(-1)?.method, method)
    t.equal(upstream.seen.at(-1)?.body.toString(), 'hi', `${method} with a body`)
    t.equal(
      (await rawRequest(proxy.port, `${method} /m HTTP/1.1\r\nHost: a\r\n\r\n`)).status,
      200,
      `${method} without`,
    )
    t.equal(upstream.seen.at(-1)?.body.length, 0)
  }
})

void t.test('K01 header lines of the request keep their order, case and number', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const before = await storeCalls(proxy)
  const lines = [
    'X-b: 2',
    'x-B: 1',
    'X-B: caf\xe9',
    'Accept-Version: 9.9.9',
    'Cookie: a=1',
    'Cookie: b=2',
    'ACCEPT: */*',
  ]
  await rawRequest(
    proxy.port,
    Buffer.from(`GET /x HTTP/1.1\r\nHost: a.test\r\n${lines.join('\r\n')}\r\n\r\n`, 'latin1'),
  )
  const headers = upstream.seen[0]?.headers ?? []
  const got = headers.flatMap((name, i) => (i % 2 === 0 ? [`${name}: ${headers[i + 1]}`] : []))
  t.same(
    got.filter((line) => lines.includes(line)),
    lines,
  )
  t.same(linesOf(headers, 'host'), ['a.test'])
  t.equal(await storeCalls(proxy), before, 'no store call')
})
