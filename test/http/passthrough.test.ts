import { once } from 'node:events'
import { createServer, request as httpRequest, type IncomingMessage, METHODS } from 'node:http'
import { type AddressInfo, connect, type Socket } from 'node:net'
import { Readable } from 'node:stream'
import t from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import {
  answering,
  problemOf,
  proxyBefore,
  scriptedPeer,
  storeCalls,
  values,
  without,
} from '../support/exchange.ts'
import { IS_HTTP2, sent } from '../support/front.ts'
import { http1Test } from '../support/http1-test.ts'
import { dial, everything, get, post, rawRequest, readAnswer } from '../support/raw.ts'
import { freePort } from '../support/redis.ts'
import { IS_STOCK } from '../support/service.ts'
import { type Seen, tcpStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

/** HEAD has no body to compare; CONNECT is not a request to an origin. */
const UNUSUAL = new Set(['CONNECT', 'HEAD'])

const MIB = 1024 * 1024
const SIZE = 64 * MIB
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

void t.test('P17 64 MiB uploads and downloads without a key stream in flat memory', async (t) => {
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
  const client = dial(proxy.port, get('/file'))
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
  const client = dial(proxy.port, get('/events'))
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
    // undici reads UTF-8.
    [404, IS_STOCK ? 'Cree' : 'Cr\xe9\xe9'],
    [599, 'x'],
    [600, 'Odd'],
    [999, 'Denied'],
  ] as const) {
    await using peer = await answering(
      `HTTP/1.1 ${status} ${reason}\r\nX-b: 2\r\nSet-Cookie: a=1, b\r\nx-B: caf\xe9\r\nSet-Cookie: c=2\r\nX-Empty:\r\n` +
        'Connection: x-hop\r\nConnection: x-hop2\r\nX-Hop: 1\r\nX-Hop2: 1\r\nIdempotent-Replayed: true\r\nDate: D\r\nContent-Length: 2\r\n\r\n\xff\x00',
    )
    await using proxy = await proxyBefore(peer)
    const answer = await rawRequest(proxy.port, get('/x'))
    if (IS_HTTP2) t.equal(answer.status, status > 599 ? 500 : status)
    else t.equal(answer.statusLine, `HTTP/1.1 ${status} ${reason}`)
    const lines = [
      ['X-b', '2', 'Set-Cookie', 'a=1, b', 'x-B', 'caf\xe9'],
      ['Set-Cookie', 'c=2', 'X-Empty', ''],
    ]
    t.same(without(answer, 'connection', 'keep-alive', 'date', 'content-length'), sent(lines.flat()))
    t.same(answer.body, Buffer.from([0xff, 0]))
  }
})

http1Test('P07 P12 204, 304 with a length, HEAD, trailers and HTTP/1.0 are framed correctly', async (t) => {
  const show = async (upstreamBytes: string, request: string) => {
    await using peer = await answering(upstreamBytes)
    await using proxy = await proxyBefore(peer)
    return await everything(proxy.port, request)
  }
  const request = (method: string, version = '1.1') =>
    `${method} /x HTTP/${version}\r\nHost: a\r\nConnection: close\r\n\r\n`
  const none = await show('HTTP/1.1 204 No\r\nContent-Length: 0\r\nTrailer: X\r\n\r\n', request('GET'))
  t.match(none, /^HTTP\/1.1 204 No\r\n/)
  t.notMatch(none, /content-length|transfer-encoding/i)
  const unchanged = 'HTTP/1.1 304 Not Modified\r\nContent-Length: 5000\r\nETag: "e"\r\n'
  const fresh = await show(`${unchanged}\r\n`, request('GET'))
  t.ok(fresh.startsWith(unchanged))
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

http1Test('P07 a 205 has no content, and the next answer is not taken for it', async (t) => {
  const peers = await Promise.all([
    answering('HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\nab'),
    answering('HTTP/1.1 205 Reset Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n'),
  ])
  for (const peer of peers) {
    await using _ = peer
    await using proxy = await proxyBefore(peer)
    const client = connect(proxy.port, '127.0.0.1')
    const line = 'GET /x HTTP/1.1\r\nHost: a\r\n'
    client.write(`${line}\r\n${line}Connection: close\r\n\r\n`)
    const chunks: Buffer[] = []
    client.on('data', (chunk: Buffer) => void chunks.push(chunk))
    await once(client, 'end')
    const answer = 'HTTP/1\\.1 205 [^]*?\r\nContent-Length: 0\r\n[^]*?\r\n\r\n'
    t.match(Buffer.concat(chunks).toString('latin1'), new RegExp(`^${answer}${answer}$`))
  }
})

void t.test('F21 targets, methods and content types pass as sent', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  /** What the upstream got. */
  const passed = async (head: string, body = ''): Promise<Seen> => {
    const length = body === '' ? '' : `Content-Length: ${body.length}\r\n`
    const bytes = `${head}Host: a\r\n${length}\r\n${body}`
    t.equal((await rawRequest(proxy.port, Buffer.from(bytes, 'latin1'))).status, 200, head)
    const seen = upstream.seen.at(-1) as Seen
    t.equal(seen.body.toString(), body)
    return seen
  }
  const targets = '// //evil.test/x /a/../b/./c /% /%zz?% /a%00b /a%20b /{x}|^`"<> /? /??a=1? /a;b=c,d /* /:x'
  for (const target of targets.split(' '))
    t.equal((await passed(`GET ${target} HTTP/1.1\r\n`)).target, target)
  const types = ['', 'x', 'application/json; charset="', 'text/plain', 'multipart/form-data', 'caf\xe9/x']
  for (const type of [...types, 'application/json', 'a/b;;c']) {
    const { headers } = await passed(`POST /t HTTP/1.1\r\nContent-Type: ${type}\r\n`, '{no')
    t.same(linesOf(headers, 'content-type'), [type])
  }
  for (const method of METHODS.filter((one) => !UNUSUAL.has(one)))
    for (const body of ['hi', '']) t.equal((await passed(`${method} /m HTTP/1.1\r\n`, body)).method, method)
})

void t.test('K01 header lines of the request keep their order, case and number', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const before = await storeCalls(proxy)
  // Over HTTP/2 its lines may be crumbs of one (RFC 9113 §8.2.3).
  const cookies = ['Cookie: a=1', ...(IS_HTTP2 ? [] : ['Cookie: b=2'])]
  const lines = ['X-b: 2', 'x-B: 1', 'X-B: caf\xe9', 'Accept-Version: 9.9.9', ...cookies, 'ACCEPT: */*']
  await rawRequest(proxy.port, Buffer.from(get('/x', ...lines), 'latin1'))
  const headers = upstream.seen[0]?.headers ?? []
  const got = headers.flatMap((name, i) => (i % 2 === 0 ? [`${name}: ${headers[i + 1]}`] : []))
  const wanted = lines.map((line) => sent(line.split(': ')).join(': '))
  t.same(
    got.filter((line) => wanted.includes(line)),
    wanted,
  )
  t.same(linesOf(headers, 'host'), ['a'])
  t.equal(await storeCalls(proxy), before, 'no store call')
})

t.test('U05 an answer broken off never looks whole: by length, chunked, HTTP/1.0', async (t) => {
  for (const version of ['1.1', '1.0'])
    for (const head of ['Content-Length: 10\r\n\r\nabc', 'Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n']) {
      await using peer = await scriptedPeer((socket) => {
        socket.write(`HTTP/1.1 200 OK\r\n${head}`)
        setTimeout(() => socket.destroy(), 20)
      })
      await using proxy = await proxyBefore(peer)
      const client = dial(proxy.port, `GET / HTTP/${version}\r\nHost: a\r\n\r\n`)
      let got = ''
      let reset = false
      client.on('data', (chunk: Buffer) => {
        got += chunk.toString()
      })
      client.on('error', (error: NodeJS.ErrnoException) => {
        reset = error.code === 'ECONNRESET'
      })
      await new Promise((resolve) => client.once('close', resolve))
      t.match(got, 'abc')
      t.notMatch(got, /\r\n0\r\n/)
      t.ok(reset || /content-length: 10|chunked/i.test(got), 'the client can tell')
    }
})

t.test('X01 a client that leaves before the head, in answer or upload cancels the call', async (t) => {
  for (const [request, answer] of [
    [get('/wait'), ''],
    [get('/some'), 'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc'],
    ['POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc', ''],
  ] as const) {
    const arrived = Promise.withResolvers<Socket>()
    await using peer = await tcpStub((socket) => {
      socket.once('data', () => {
        if (answer !== '') socket.write(answer)
        arrived.resolve(socket)
      })
    })
    await using proxy = await proxyBefore(peer)
    const client = dial(proxy.port, request)
    const upstream = await arrived.promise
    if (answer !== '') await once(client, 'data')
    const closed = once(upstream, 'close')
    client.destroy()
    await closed
    t.pass(request.slice(0, 10))
  }
})

t.test('U02 what fails on a stale connection is not sent again, neither POST nor GET', async (t) => {
  for (const request of [post('/again', null, '{}'), get('/again')]) {
    await using peer = await scriptedPeer((socket, got) => {
      if (got.includes('/again')) socket.destroy()
      else socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n')
    })
    await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
    await rawRequest(proxy.port, get('/warm'))
    t.match(problemOf(await rawRequest(proxy.port, request)), { code: 'upstream_failed' })
    t.equal(peer.requests.filter((one) => one.includes('/again')).length, 1)
    t.equal((await rawRequest(proxy.port, get('/warm'))).status, 200)
  }
})

t.test('U07 an answer before the upload is whole arrives, and the connection is not reused', async (t) => {
  await using peer = await tcpStub((socket) => {
    socket.once('data', () => socket.write('HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno'))
  })
  await using proxy = await proxyBefore(peer)
  const client = dial(proxy.port, 'POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nabc').on(
    'error',
    () => {},
  )
  const answer = await readAnswer(client)
  t.equal(answer.status, 413)
  t.equal(answer.body.toString(), 'no')
  t.same(values(answer, 'connection'), ['close'])
  client.destroy()
})

void t.test('P27 pipelined pass-through requests are answered in order', async (t) => {
  await using upstream = await upstreamStub((seen, response) => void response.end(seen.target))
  await using proxy = await proxyBefore(upstream)
  const client = dial(proxy.port, ['/1', '/2', '/3'].map((target) => get(target)).join(''))
  for (const target of ['/1', '/2', '/3']) t.equal((await readAnswer(client)).body.toString(), target)
  client.destroy()
})

t.test('U01 U04 errors of the upstream: 502 unreachable, 502 failed, 504 timeout', async (t) => {
  await using nobody = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
  const problem = async ({ port }: { port: number }, request = get('/')) =>
    problemOf(await rawRequest(port, request))
  const absent = { code: 'upstream_unreachable', status: 502, retry: 'same-key' }
  t.match(await problem(nobody), { ...absent, type: 'urn:idempotency-proxy:upstream_unreachable' })
  const detail = 'no byte of the request was sent'
  t.match(await problem(nobody, post('/x', null, 'x'.repeat(10))), { ...absent, detail })
  await using silent = await tcpStub(() => {})
  await using slow = await proxyBefore(silent, { upstream: 'timeout: 200ms' })
  const late = { code: 'upstream_timeout', status: 504 }
  t.match(await problem(slow), { ...late, retry: 'same-key' })
  // Nothing is recorded, so a retry may execute it again.
  const again = { retry: 'no', detail: /a retry may execute it again/ }
  t.match(await problem(slow, post('/x', null, '{}')), { ...late, ...again })
  for (const [bytes, why] of [
    ['', 'the upstream closed the connection before a complete response'],
    ['garbage\r\n\r\n', IS_STOCK ? 'the response is malformed' : 'the response is not HTTP/1.1'],
    [
      'HTTP/1.1 200 OK\r\nX: \x01\r\n\r\n',
      IS_STOCK
        ? 'the response is malformed'
        : 'the value in header line 1 of the response has a control character',
    ],
  ] as const) {
    await using peer = await scriptedPeer((socket) => void socket.end(bytes, 'latin1'))
    await using proxy = await proxyBefore(peer)
    const detail = new RegExp(`^the request was sent, but ${why}`)
    const failed = { code: 'upstream_failed', status: 502, detail }
    t.match(await problem(proxy), { ...failed, retry: 'same-key' })
    t.match(await problem(proxy, post('/x', null, '{}')), { ...failed, retry: 'no' })
    t.equal(peer.requests.length, 2, 'nothing is tried again')
  }
})

t.test('U01 an upload to an unreachable upstream is answered, and the proxy keeps working', async (t) => {
  await using proxy = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
  const client = dial(proxy.port, 'POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc').on(
    'error',
    () => {},
  )
  const answer = await readAnswer(client)
  t.match(problemOf(answer), { code: 'upstream_unreachable' })
  t.same(values(answer, 'connection'), ['close'])
  client.resume()
  await once(client, 'close')
  t.match(problemOf(await rawRequest(proxy.port, post('/x', null, '{}'))), { code: 'upstream_unreachable' })
})

t.test('P15 P13 trailers of an answer lose hop-by-hop lines and the replay marker', async (t) => {
  const trailers = 'X-T: 1\r\nIdempotent-Replayed: true\r\nKeep-Alive: x\r\n'
  await using peer = await answering(
    `HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n${trailers}\r\n`,
  )
  await using proxy = await proxyBefore(peer)
  const answer = await rawRequest(proxy.port, get('/'))
  t.same(
    answer.trailers.map((part) => part.toLowerCase()),
    ['x-t', '1'],
  )
})

void t.test('U01 a stalled upload is ended, and keeps no protected request waiting meanwhile', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  await using proxy = await proxyBefore(upstream, { upstream: 'connections: 1, idleTimeout: 300ms' })
  const client = dial(proxy.port, 'POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\na')
  const ended = readAnswer(client)
  t.equal((await rawRequest(proxy.port, post('/p', 'key-1', '{}'))).status, 201, 'other connections')
  const answer = await ended
  t.match(problemOf(answer), { code: 'request_timeout', status: 408, retry: 'same-key' })
  client.destroy()
  t.equal(upstream.seen.length, 1)
})

t.test('U01 an upload given up behind another answer does not crash the proxy', async (t) => {
  const slow = Promise.withResolvers<Socket>()
  await using peer = await tcpStub((socket) => {
    socket.on('error', () => {})
    socket.on('data', (request: Buffer) => {
      if (request.includes('/slow')) slow.resolve(socket)
      else socket.destroy()
    })
  })
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 3s' })
  const client = dial(
    proxy.port,
    'GET /slow HTTP/1.1\r\nHost: a\r\n\r\nPOST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc',
  )
  const upstream = await slow.promise
  // Longer than the idle timeout, which a slow machine must not reach once the upload is sent.
  await new Promise((resolve) => setTimeout(resolve, 3500))
  upstream.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
  t.equal((await readAnswer(client)).body.toString(), 'ok')
  t.match(problemOf(await readAnswer(client)), { code: 'upstream_failed' })
  client.destroy()
})

http1Test('U05 an answer that breaks off while it waits behind another ends the connection', async (t) => {
  await using peer = await scriptedPeer((socket, request) => {
    if (request.includes('/slow'))
      setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), 200)
    else {
      const type = request.includes('POST') ? 'Content-Type: text/event-stream\r\n' : ''
      socket.write(`HTTP/1.1 200 OK\r\n${type}Content-Length: 10\r\n\r\nabc`)
      setTimeout(() => socket.destroy(), 20)
    }
  })
  await using proxy = await proxyBefore(peer)
  for (const request of [get('/cut'), post('/p', 'k', '{}')]) {
    const client = dial(proxy.port, `GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${request}`)
    t.equal((await readAnswer(client)).body.toString(), 'ok')
    const ended = Promise.race([
      once(client.resume(), 'close'),
      new Promise((resolve) => setTimeout(resolve, 2000, null)),
    ])
    t.not(await ended, null, 'the connection ends')
    client.destroy()
  }
})

http1Test('U05 an answer that waits is whole if the upstream closes, broken if it resets', async (t) => {
  const SIZE = 120_000
  const body = 'x'.repeat(SIZE)
  for (const [name, head, ends] of [
    ['closed, with a length', `Content-Length: ${SIZE}\r\nConnection: close\r\n`, 'end'],
    ['closed, without a length', 'Connection: close\r\n', 'end'],
    ['closed, though keep-alive', `Content-Length: ${SIZE}\r\n`, 'end'],
    ['reset, without a length', 'Connection: close\r\n', 'resetAndDestroy'],
  ] as const) {
    await using peer = await scriptedPeer((socket, request) => {
      if (request.includes('/slow'))
        setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), 300)
      else {
        socket.write(`HTTP/1.1 200 OK\r\n${head}\r\n${body}`)
        if (ends === 'end') socket.end()
        else setTimeout(() => socket.resetAndDestroy(), 100)
      }
    })
    await using proxy = await proxyBefore(peer, { more: 'limits: { response: 64KiB }' })
    for (const request of [get('/big'), post('/p', 'k', '{}')]) {
      const client = connect(proxy.port, '127.0.0.1')
      // Nobody reads an answer that waits for its turn.
      client.write(`GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${request}`)
      t.equal((await readAnswer(client)).body.toString(), 'ok')
      if (ends === 'end') t.equal((await readAnswer(client)).body.length, SIZE, `${name}: whole`)
      else await t.rejects(readAnswer(client), `${name}: not taken for whole`)
      client.destroy()
    }
  }
})

void t.test('U05 an answer without a length that ends in a reset is not taken for whole', async (t) => {
  await using peer = await scriptedPeer((socket) => {
    socket.write('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc')
    setTimeout(() => socket.resetAndDestroy(), 50)
  })
  await using proxy = await proxyBefore(peer)
  await t.rejects(rawRequest(proxy.port, get('/')))
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), { code: 'upstream_failed' })
})

void t.test('U01 an upload refused for stalling gets no late answer', async (t) => {
  await using peer = await tcpStub((socket) => {
    socket.on('error', () => {})
    socket.once('data', (request: Buffer) => {
      const later = request.includes('/slow') ? 800 : 500
      setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), later)
    })
  })
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 200ms' })
  const client = connect(proxy.port, '127.0.0.1')
  // The refusal waits for its turn, and meanwhile the upstream answers.
  client.write(
    'GET /slow HTTP/1.1\r\nHost: a\r\n\r\nPOST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc',
  )
  t.equal((await readAnswer(client)).body.toString(), 'ok')
  t.match(problemOf(await readAnswer(client)), { code: 'request_timeout' })
  client.destroy()
  t.notOk(proxy.log.some(({ msg }) => msg === 'internal error'))
})
