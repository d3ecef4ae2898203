import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import { gzipSync } from 'node:zlib'
import t, { type Test } from 'tap'
import {
  answering,
  metricIs,
  type ProxyOptions,
  problemOf,
  proxyBefore,
  scriptedPeer,
  values,
  without,
} from '../support/exchange.ts'
import { post, type RawAnswer, rawRequest, readAnswer } from '../support/raw.ts'

const MARK = 'idempotent-replayed'

interface Pair {
  readonly live: RawAnswer
  readonly replay: RawAnswer
}

/** One request twice: the answers must be equal in every byte apart from the marker, and N is 1. */
async function twice(t: Test, upstreamBytes: string, options: ProxyOptions = {}, request?: string): Promise<Pair> {
  await using peer = await answering(upstreamBytes)
  await using proxy = await proxyBefore(peer, options)
  const sent = request ?? post('/p', 'k-1', '{"a":1}')
  const live = await rawRequest(proxy.port, sent)
  const replay = await rawRequest(proxy.port, sent)
  sameBytes(t, live, replay)
  t.equal(peer.requests.length, 1, 'N=1')
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  return { live, replay }
}

function sameBytes(t: Test, live: RawAnswer, replay: RawAnswer): void {
  t.same(values(live, MARK), [], 'a first answer carries no marker')
  t.same(values(replay, MARK), ['true'], 'a replay carries it once')
  const unmarked = replay.bytes.toString('latin1').replace('Idempotent-Replayed: true\r\n', '')
  t.equal(unmarked, live.bytes.toString('latin1'))
}

const OWN = ['date', 'connection', 'keep-alive', 'content-length', 'transfer-encoding']

void t.test('P01 P04 P14 a 201 is replayed in status, lines and bytes; order, case and number are kept', async (t) => {
  const { live } = await twice(
    t,
    'HTTP/1.1 201 Created\r\nLocation: /p/1\r\nX-b: 2\r\nETag: "v1"\r\nx-B: 1\r\nContent-Type: application/json\r\n' +
      'X-B: 2\r\nX-Empty:\r\nDATE: Tue, 03 Nov 2026 08:00:00 GMT\r\nContent-Length: 8\r\nWarning: a, b\r\n\r\n{"id":1}',
  )
  t.equal(live.statusLine, 'HTTP/1.1 201 Created')
  t.same(without(live, 'connection', 'keep-alive', 'content-length'), [
    ...['Location', '/p/1', 'X-b', '2', 'ETag', '"v1"', 'x-B', '1', 'Content-Type', 'application/json'],
    ...['X-B', '2', 'X-Empty', '', 'DATE', 'Tue, 03 Nov 2026 08:00:00 GMT', 'Warning', 'a, b'],
  ])
  t.same(values(live, 'content-length'), ['8'])
  t.equal(live.body.toString(), '{"id":1}')
})

void t.test('P01 the reason phrase is the upstream’s: custom, empty, latin1, UTF-8', async (t) => {
  for (const reason of ['Made It So', '', 'Cr\xe9\xe9', Buffer.from('Créé').toString('latin1'), 'a  b\tc']) {
    const { live } = await twice(t, `HTTP/1.1 201 ${reason}\r\nContent-Length: 2\r\n\r\nok`)
    t.equal(live.statusLine, `HTTP/1.1 201 ${reason}`)
  }
})

void t.test('P01 a latin1 header value keeps its bytes', async (t) => {
  const { live } = await twice(t, 'HTTP/1.1 200 OK\r\nX-Name: caf\xe9 \xff\r\nContent-Length: 0\r\n\r\n')
  t.same(values(live, 'x-name'), ['caf\xe9 \xff'])
})

void t.test('P02 all 256 byte values', async (t) => {
  const bytes = Buffer.from(Array.from({ length: 1024 }, (_, i) => i % 256))
  const { live, replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1024\r\n\r\n${bytes.toString('latin1')}`,
  )
  const digest = (of: Buffer): string => createHash('sha256').update(of).digest('hex')
  t.equal(digest(live.body), digest(bytes))
  t.equal(digest(replay.body), digest(bytes))
})

void t.test('P03 Set-Cookie lines with commas stay lines of their own', async (t) => {
  const cookies = ['a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT', 'b=2; Expires=Thu, 22 Oct 2026 07:28:00 GMT; Path=/']
  const { replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nSet-Cookie: ${cookies[0]}\r\nX: 1\r\nSet-Cookie: ${cookies[1]}\r\nContent-Length: 0\r\n\r\n`,
  )
  t.same(values(replay, 'set-cookie'), cookies)
})

void t.test('P05 gzip stays gzip, with its Content-Encoding', async (t) => {
  const packed = gzipSync('{"hello":"world"}')
  const { replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: ${packed.length}\r\n\r\n${packed.toString('latin1')}`,
  )
  t.same(values(replay, 'content-encoding'), ['gzip'])
  t.same(replay.body, packed)
})

void t.test('P06 a chunked answer has a framing of the proxy’s own', async (t) => {
  const { replay } = await twice(
    t,
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext="x"\r\nabc\r\n1\r\nd\r\n0\r\n\r\n',
  )
  t.same(values(replay, 'transfer-encoding'), [])
  t.same(values(replay, 'content-length'), ['4'])
  t.equal(replay.body.toString(), 'abcd')
})

void t.test('P07 204, 205 and 304 have no body; 204 no Content-Length', async (t) => {
  const none = await twice(t, 'HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n')
  t.same(without(none.live, 'date', 'connection', 'keep-alive'), ['X-A', '1'])
  const zero = await twice(t, 'HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n')
  t.same(values(zero.live, 'content-length'), [])
  const reset = await twice(t, 'HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n')
  t.equal(reset.live.status, 205)
  t.same(values(reset.live, 'content-length'), ['0'])
  const fresh = await twice(t, 'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\n\r\n')
  t.equal(fresh.live.status, 304)
  // RFC 9110 §8.6: it tells the length of what would have been sent; not even a large one is a body.
  const told = await twice(t, 'HTTP/1.1 304 Not Modified\r\nContent-Length: 99999999\r\nETag: "a"\r\n\r\n')
  t.same(values(told.live, 'content-length'), ['99999999'])
  t.same(values(told.live, 'transfer-encoding'), [])
})

void t.test('P08 a redirect is stored and not followed', async (t) => {
  for (const status of [301, 302, 303, 307, 308]) {
    const { live } = await twice(t, `HTTP/1.1 ${status} Go\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n`)
    t.equal(live.status, status)
    t.same(values(live, 'location'), ['/elsewhere'])
  }
})

void t.test('P09 interim answers are not stored: 103, 102, 100, and several of them', async (t) => {
  for (const interim of [
    'HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n',
    'HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n',
  ]) {
    const { live } = await twice(t, `${interim}HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok`)
    t.equal(live.status, 201)
    t.same(values(live, 'link'), [])
  }
})

void t.test('P12 trailers are forwarded and sent again', async (t) => {
  for (const announced of ['', 'Trailer: X-Sum\r\n']) {
    const { live, replay } = await twice(
      t,
      `HTTP/1.1 200 OK\r\n${announced}Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\nX-sum: 2\r\n\r\n`,
    )
    t.same(live.trailers, ['X-Sum', '1', 'X-sum', '2'])
    t.same(replay.trailers, live.trailers)
    t.same(values(live, 'trailer'), announced === '' ? [] : ['X-Sum'])
  }
})

void t.test('P12 trailers to a client that cannot have them: the body all the same', async (t) => {
  const bytes = 'HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n'
  const old = post('/p', 'k', '{}').replace('HTTP/1.1', 'HTTP/1.0')
  const { live } = await twice(t, bytes, {}, old)
  t.equal(live.body.toString(), 'ok')
  t.same(values(live, 'trailer'), [])
  const announcedOnly = await twice(
    t,
    'HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
  )
  t.equal(announcedOnly.live.body.toString(), 'ok')
  const none = await twice(t, 'HTTP/1.1 204 No\r\nTrailer: X-Sum\r\n\r\n')
  t.equal(none.live.status, 204)
})

void t.test('P13 hop-by-hop lines are neither forwarded nor stored', async (t) => {
  const { live } = await twice(
    t,
    'HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nConnection: x-other\r\nX-Hop: 1\r\nX-Other: 1\r\n' +
      'Keep-Alive: timeout=1\r\nProxy-Authenticate: Basic\r\nProxy-Connection: x\r\nTE: trailers\r\nUpgrade: h2c\r\n' +
      'X-End: 1\r\nContent-Length: 0\r\n\r\n',
  )
  t.same(without(live, ...OWN), ['X-End', '1'])
  t.same(values(live, 'keep-alive'), ['timeout=72'], 'the proxy’s own')
})

void t.test('P13 hop-by-hop lines of the request do not reach the upstream', async (t) => {
  await using peer = await answering('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n')
  await using proxy = await proxyBefore(peer)
  const hop = ['Connection: X-Mine, close', 'X-Mine: 1', 'Keep-Alive: 5', 'TE: trailers', 'Proxy-Authorization: Basic x']
  await rawRequest(proxy.port, post('/p', 'k', '{}', hop))
  await rawRequest(proxy.port, post('/other', null, '{}', hop))
  for (const request of peer.requests) t.notMatch(request, /x-mine|keep-alive: 5|\r\nte:|proxy-authorization/i)
  t.equal(peer.requests.length, 2)
})

void t.test('P14 an answer without Date gets one from the proxy, once', async (t) => {
  await using peer = await answering('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n')
  await using proxy = await proxyBefore(peer)
  const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  const [date = ''] = values(live, 'date')
  while (new Date().toUTCString() === date) await new Promise((resolve) => setTimeout(resolve, 20))
  const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.same(values(replay, 'date'), [date])
})

void t.test('P15 an upstream’s own Idempotent-Replayed never passes', async (t) => {
  const bytes = 'HTTP/1.1 200 OK\r\nidempotent-REPLAYED: true\r\nX: 1\r\nContent-Length: 0\r\n\r\n'
  const { live } = await twice(t, bytes)
  t.same(without(live, ...OWN), ['X', '1'])
  await using peer = await answering(bytes)
  await using proxy = await proxyBefore(peer)
  for (const request of [post('/other', null, '{}'), 'GET /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n\r\n'])
    t.same(values(await rawRequest(proxy.port, request), MARK), [])
})

void t.test('P15 the upstream’s own word on the outcome is read and removed', async (t) => {
  const { live } = await twice(t, 'HTTP/1.1 500 No\r\nIdempotency-Outcome: applied\r\nContent-Length: 0\r\n\r\n')
  t.same(values(live, 'idempotency-outcome'), [])
})

void t.test('P16 statusHeader: Idempotency-Expires is equal on the first answer and on the replay', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n')
  await using proxy = await proxyBefore(peer, {
    routes: '{ name: r, match: { path: /p }, statusHeader: true, ttl: 2h }',
  })
  const before = Date.now()
  const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  const ignored = await rawRequest(proxy.port, post('/p', null, '{}'))
  t.same(values(live, 'idempotency-status'), ['executed'])
  t.same(values(replay, 'idempotency-status'), ['replayed'])
  t.same(values(ignored, 'idempotency-status'), ['ignored'])
  const [expires = ''] = values(live, 'idempotency-expires')
  t.match(expires, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/)
  t.ok(Date.parse(expires) >= before + 7_200_000 && Date.parse(expires) <= Date.now() + 7_200_000)
  t.same(values(replay, 'idempotency-expires'), [expires])
  t.same(values(ignored, 'idempotency-expires'), [])
})

void t.test('S07 replay.excludeHeaders leaves lines out of the replay alone', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nSet-Cookie: s=1\r\nX-Kept: 1\r\nContent-Length: 0\r\n\r\n')
  await using proxy = await proxyBefore(peer, {
    routes: '{ name: r, match: { path: /p }, replay: { excludeHeaders: [Set-Cookie] } }',
  })
  t.same(values(await rawRequest(proxy.port, post('/p', 'k', '{}')), 'set-cookie'), ['s=1'])
  const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.same(without(replay, ...OWN), ['X-Kept', '1', 'Idempotent-Replayed', 'true'])
})

void t.test('S08 keep: outcome — the first client gets the answer, a retry its status and location', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nLocation: /p/9\r\nContent-Length: 6\r\n\r\nsecret')
  await using proxy = await proxyBefore(peer, { routes: '{ name: r, match: { path: /p }, keep: outcome }' })
  const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.equal(live.body.toString(), 'secret')
  const retry = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.match(problemOf(retry), { status: 409, code: 'idempotency_response_unavailable', retry: 'no', originalStatus: 201, location: '/p/9' })
  t.notMatch(retry.bytes.toString(), /secret/)
  t.equal(peer.requests.length, 1)
})

void t.test('P19 a response at the limit is kept; one byte more goes live, by length and chunked', async (t) => {
  const framed = (size: number, chunked: boolean): string =>
    chunked
      ? `Transfer-Encoding: chunked\r\n\r\n${size.toString(16)}\r\n${'x'.repeat(size)}\r\n0\r\n\r\n`
      : `Content-Length: ${size}\r\n\r\n${'x'.repeat(size)}`
  const limit = 'limits: { response: 64KiB }'
  for (const chunked of [false, true]) {
    const { live } = await twice(t, `HTTP/1.1 201 Created\r\n${framed(65_536, chunked)}`, { more: limit })
    t.equal(live.body.length, 65_536)
    await using peer = await answering(`HTTP/1.1 201 Created\r\nLocation: /big\r\n${framed(65_537, chunked)}`)
    await using proxy = await proxyBefore(peer, { more: limit })
    const over = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    t.equal(over.body.length, 65_537, 'the first client gets all of it')
    await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
    const retry = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    t.match(problemOf(retry), { code: 'idempotency_response_unavailable', originalStatus: 201, location: '/big' })
    t.equal(peer.requests.length, 1, 'N=1')
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  }
})

void t.test('P21 events reach the client while the upstream is still open; a retry is told that it was done', async (t) => {
  let upstream: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    upstream = socket
    socket.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nLocation: /s\r\nX-L: \xe9\r\n', 'latin1')
    socket.write('Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n')
  })
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  client.write(post('/p', 'k', '{}'))
  let got = ''
  while (!got.includes('data: 1\n\n')) got += String(((await once(client, 'data')) as [Buffer])[0].toString('latin1'))
  t.match(got, /^HTTP\/1.1 200 OK\r\n/)
  t.match(got, 'X-L: \xe9\r\n')
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), { code: 'idempotency_key_in_progress' })
  upstream?.write('9\r\ndata: 2\n\n\r\n0\r\n\r\n')
  while (!got.endsWith('0\r\n\r\n')) got += String(((await once(client, 'data')) as [Buffer])[0].toString('latin1'))
  t.match(got, 'data: 2\n\n')
  client.destroy()
  await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
  const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
  t.match(retry, { code: 'idempotency_response_unavailable', originalStatus: 200, location: '/s' })
  t.equal(peer.requests.length, 1)
})

void t.test('U05 a broken live answer is never ended cleanly, and its record is unknown', async (t) => {
  for (const version of ['1.1', '1.0']) {
    let upstream: Socket | undefined
    await using peer = await scriptedPeer((socket) => {
      upstream = socket
      socket.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n')
    })
    await using proxy = await proxyBefore(peer)
    const client = connect(proxy.port, '127.0.0.1')
    client.write(post('/p', 'k', '{}').replace('HTTP/1.1', `HTTP/${version}`))
    let got = ''
    const ended = new Promise<string>((resolve) => {
      client.on('data', (chunk: Buffer) => {
        got += chunk.toString()
        if (got.includes('one')) upstream?.destroy()
      })
      client.on('end', () => resolve('end')).on('error', (error: NodeJS.ErrnoException) => resolve(`${error.code}`))
    })
    const how = await ended
    t.match(got, 'one')
    // Without chunks only a reset tells that the body is not whole.
    if (version === '1.0') t.equal(how, 'ECONNRESET')
    else t.notMatch(got, /\r\n0\r\n/)
    const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
    t.match(retry, { code: 'idempotency_outcome_unknown', status: 409 })
    t.equal(peer.requests.length, 1)
  }
})

void t.test('P19 a client that reads too slowly is dropped while the upstream is drained', async (t) => {
  const size = 64 * 1024 * 1024
  const sent = Promise.withResolvers<void>()
  await using peer = await scriptedPeer((socket) => {
    socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${size}\r\n\r\n`)
    const piece = Buffer.alloc(1024 * 1024)
    let left = size
    const more = (): void => {
      while (left > 0) {
        left -= piece.length
        if (!socket.write(piece)) {
          socket.once('drain', more)
          return
        }
      }
      sent.resolve()
    }
    more()
  })
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 300ms' })
  const client = connect(proxy.port, '127.0.0.1')
  client.on('error', () => {})
  client.write(post('/p', 'k', '{}'))
  await once(client, 'readable')
  await sent.promise
  await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
  const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
  t.match(retry, { code: 'idempotency_response_unavailable', originalStatus: 200 })
  client.resume()
  await once(client, 'close')
  t.ok(client.bytesRead < size, 'it was dropped')
})

void t.test('P19 a replay to a client that stops reading is dropped, too', async (t) => {
  const size = 32 * 1024 * 1024
  await using peer = await answering(`HTTP/1.1 200 OK\r\nContent-Length: ${size}\r\n\r\n${'x'.repeat(size)}`)
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 300ms', more: 'limits: { response: 33MiB }' })
  const first = connect(proxy.port, '127.0.0.1')
  first.write(post('/p', 'k', '{}').replace('Host', 'Connection: close\r\nHost'))
  first.resume()
  await once(first, 'end')
  t.ok(first.bytesRead > size, 'the first answer was read whole')
  const client = connect(proxy.port, '127.0.0.1')
  client.on('error', () => {})
  client.write(post('/p', 'k', '{}'))
  await once(client, 'readable')
  const rest = once(client, 'close')
  // The socket is gone on the proxy's side before anything more is read here.
  while ((await connections(proxy.port)) > 1) await new Promise((resolve) => setTimeout(resolve, 20))
  client.resume()
  await rest
  t.ok(client.bytesRead < size)

  /** Established connections to the port, this one's question included. */
  async function connections(port: number): Promise<number> {
    const { readFile } = await import('node:fs/promises')
    const hex = `:${port.toString(16).toUpperCase().padStart(4, '0')}`
    const rows = (await readFile('/proc/net/tcp', 'utf8')).split('\n')
    // Local address of the server's side, state 01 (established).
    return rows.filter((row) => row.trim().split(/\s+/)[1]?.endsWith(hex) && row.trim().split(/\s+/)[3] === '01').length + 1
  }
})

void t.test('P27 requests on one connection stay independent, kept alive and pipelined', async (t) => {
  await using peer = await scriptedPeer((socket, request) => {
    const key = /idempotency-key: (\S+)/i.exec(request)?.[1] ?? 'none'
    socket.write(`HTTP/1.1 201 Created\r\nX-Key: ${key}\r\nContent-Length: ${key.length}\r\n\r\n${key}`)
  })
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  for (const key of ['a1', 'a2', 'a1']) {
    client.write(post('/p', key, '{}'))
    t.equal((await readAnswer(client)).body.toString(), key)
  }
  const pipelined = ['b1', 'b2', 'a2', null, 'b1', 'b3']
  client.write(pipelined.map((key) => post('/p', key, '{}')).join(''))
  for (const [i, key] of pipelined.entries()) {
    const { status, body } = await readAnswer(client)
    // The second b1 meets the first one finished or under way; in the order of its request all the same.
    if (i === 4 && status === 409) t.match(body.toString(), 'idempotency_key_in_progress')
    else t.equal(body.toString(), key ?? 'none')
  }
  client.destroy()
  const ran = peer.requests.filter((request) => /idempotency-key: b1/i.test(request))
  t.equal(ran.length, 1)
})

void t.test('P27 an idle connection that was answered keeps its keep-alive timeout', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok')
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  client.write(post('/p', 'k', '{}'))
  const first = await readAnswer(client)
  t.same(values(first, 'connection'), ['keep-alive'])
  client.write(post('/p', 'k', '{}'))
  t.equal((await readAnswer(client)).status, 201)
  client.destroy()
})

void t.test('P01 a client of HTTP/1.0 gets the same answers', async (t) => {
  const { live } = await twice(
    t,
    'HTTP/1.1 200 OK\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
    {},
    post('/p', 'k', '{}').replace('HTTP/1.1', 'HTTP/1.0'),
  )
  t.same(values(live, 'transfer-encoding'), [])
  t.same(values(live, 'connection'), ['close'])
  t.equal(live.body.toString(), 'ok')
})

void t.test('M03 PUT and HEAD are protected where a route says so', async (t) => {
  const routes = '{ name: r, match: { methods: [PUT, HEAD], path: /p } }'
  const put = post('/p', 'k', '{}').replace('POST', 'PUT')
  const { live } = await twice(t, 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok', { routes }, put)
  t.equal(live.body.toString(), 'ok')
  await using peer = await answering('HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 99999999\r\n\r\n')
  await using proxy = await proxyBefore(peer, { routes })
  const head = 'HEAD /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nConnection: close\r\n\r\n'
  const answers: string[] = []
  for (let i = 0; i < 2; i++) {
    const client = connect(proxy.port, '127.0.0.1')
    client.write(head)
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString('latin1')
    })
    await once(client, 'end')
    answers.push(got)
  }
  t.match(answers[0], /^HTTP\/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 99999999\r\n/)
  t.ok(answers[0]?.endsWith('\r\n\r\n'), 'no body')
  t.equal(answers[1]?.replace('Idempotent-Replayed: true\r\n', ''), answers[0])
  t.equal(peer.requests.length, 1)
})

void t.test('P01 status codes beyond the registry are passed as they are', async (t) => {
  for (const status of [299, 499, 600, 999]) {
    const { live } = await twice(t, `HTTP/1.1 ${status} Odd\r\nContent-Length: 2\r\n\r\nok`, {
      routes: `{ name: r, match: { path: /p }, outcomes: { "5xx": store } }`,
    })
    t.equal(live.statusLine, `HTTP/1.1 ${status} Odd`)
  }
})
