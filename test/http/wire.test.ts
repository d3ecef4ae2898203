import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { connect } from 'node:net'
import { gzipSync } from 'node:zlib'
import t from 'tap'
import { answering, proxyBefore, values, without } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { OWN, twice } from '../support/twice.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

void t.test(
  'P01 P04 P14 a 201 is replayed with its status and bytes, and its lines in order, case and number',
  async (t) => {
    const { live } = await twice(
      t,
      'HTTP/1.1 201 Created\r\nLocation: /p/1\r\nX-b: 2\r\nETag: "v1"\r\nx-B: 1\r\nContent-Type: application/json\r\n' +
        'X-B: 2\r\nX-Empty:\r\nDATE: Tue, 03 Nov 2026 08:00:00 GMT\r\nContent-Length: 8\r\nWarning: a, b\r\n\r\n{"id":1}',
    )
    t.equal(live.statusLine, 'HTTP/1.1 201 Created')
    t.same(without(live, 'connection', 'keep-alive', 'content-length'), [
      'Location',
      '/p/1',
      'X-b',
      '2',
      'ETag',
      '"v1"',
      'x-B',
      '1',
      'Content-Type',
      'application/json',
      'X-B',
      '2',
      'X-Empty',
      '',
      'DATE',
      'Tue, 03 Nov 2026 08:00:00 GMT',
      'Warning',
      'a, b',
    ])
    t.same(values(live, 'content-length'), ['8'])
    t.equal(live.body.toString(), '{"id":1}')
  },
)

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

void t.test('P02 a body of all 256 byte values is replayed unchanged', async (t) => {
  const bytes = Buffer.from(Array.from({ length: 1024 }, (_, i) => i % 256))
  const { live, replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1024\r\n\r\n${bytes.toString('latin1')}`,
  )
  const digest = (of: Buffer): string => createHash('sha256').update(of).digest('hex')
  t.equal(digest(live.body), digest(bytes))
  t.equal(digest(replay.body), digest(bytes))
})

void t.test('P03 Set-Cookie lines with commas stay separate', async (t) => {
  const cookies = [
    'a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT',
    'b=2; Expires=Thu, 22 Oct 2026 07:28:00 GMT; Path=/',
  ]
  const { replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nSet-Cookie: ${cookies[0]}\r\nX: 1\r\nSet-Cookie: ${cookies[1]}\r\nContent-Length: 0\r\n\r\n`,
  )
  t.same(values(replay, 'set-cookie'), cookies)
})

void t.test('P05 a gzip body stays gzip, with its Content-Encoding', async (t) => {
  const packed = gzipSync('{"hello":"world"}')
  const { replay } = await twice(
    t,
    `HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: ${packed.length}\r\n\r\n${packed.toString('latin1')}`,
  )
  t.same(values(replay, 'content-encoding'), ['gzip'])
  t.same(replay.body, packed)
})

void t.test('P06 a chunked answer is replayed with a Content-Length', async (t) => {
  const { replay } = await twice(
    t,
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext="x"\r\nabc\r\n1\r\nd\r\n0\r\n\r\n',
  )
  t.same(values(replay, 'transfer-encoding'), [])
  t.same(values(replay, 'content-length'), ['4'])
  t.equal(replay.body.toString(), 'abcd')
})

void t.test('P07 204, 205 and 304 have no body, and 204 has no Content-Length', async (t) => {
  const none = await twice(t, 'HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n')
  t.same(without(none.live, 'date', 'connection', 'keep-alive'), ['X-A', '1'])
  const zero = await twice(t, 'HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n')
  t.same(values(zero.live, 'content-length'), [])
  const reset = await twice(t, 'HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n')
  t.equal(reset.live.status, 205)
  t.same(values(reset.live, 'content-length'), ['0'])
  const fresh = await twice(t, 'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\n\r\n')
  t.equal(fresh.live.status, 304)
  // RFC 9110 §8.6: the length of what would have been sent; even a large one announces no body.
  const told = await twice(t, 'HTTP/1.1 304 Not Modified\r\nContent-Length: 99999999\r\nETag: "a"\r\n\r\n')
  t.same(values(told.live, 'content-length'), ['99999999'])
  t.same(values(told.live, 'transfer-encoding'), [])
})

void t.test('P08 a redirect is stored and not followed', async (t) => {
  // 307 and 308 say that nothing was done (e2e/edges.test.ts).
  for (const status of [301, 302, 303]) {
    const { live } = await twice(
      t,
      `HTTP/1.1 ${status} Go\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n`,
    )
    t.equal(live.status, status)
    t.same(values(live, 'location'), ['/elsewhere'])
  }
})

void t.test('P09 interim answers (100, 102, 103, or several of them) are not stored', async (t) => {
  for (const interim of [
    'HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n',
    'HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n',
  ]) {
    const { live } = await twice(t, `${interim}HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok`)
    t.equal(live.status, 201)
    t.same(values(live, 'link'), [])
  }
})

void t.test('P12 trailers are forwarded and replayed', async (t) => {
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

void t.test('P12 a client that cannot take trailers still gets the body', async (t) => {
  const bytes =
    'HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n'
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
  const hop = [
    'Connection: X-Mine, close',
    'X-Mine: 1',
    'Keep-Alive: 5',
    'TE: trailers',
    'Proxy-Authorization: Basic x',
  ]
  await rawRequest(proxy.port, post('/p', 'k', '{}', hop))
  await rawRequest(proxy.port, post('/other', null, '{}', hop))
  for (const request of peer.requests)
    t.notMatch(request, /x-mine|keep-alive: 5|\r\nte:|proxy-authorization/i)
  t.equal(peer.requests.length, 2)
})

void t.test('P14 an answer without Date gets one from the proxy, which its replay keeps', async (t) => {
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
  for (const request of [
    post('/other', null, '{}'),
    'GET /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n\r\n',
  ])
    t.same(values(await rawRequest(proxy.port, request), 'idempotent-replayed'), [])
})

void t.test('P15 the upstream’s Idempotency-Outcome is removed', async (t) => {
  const { live } = await twice(
    t,
    'HTTP/1.1 500 No\r\nIdempotency-Outcome: applied\r\nContent-Length: 0\r\n\r\n',
  )
  t.same(values(live, 'idempotency-outcome'), [])
})

void t.test('P01 an HTTP/1.0 client gets the same answers', async (t) => {
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

void t.test('P01 unregistered status codes are passed unchanged', async (t) => {
  for (const status of [299, 499, 600, 999]) {
    const { live } = await twice(t, `HTTP/1.1 ${status} Odd\r\nContent-Length: 2\r\n\r\nok`, {
      routes: `{ name: r, match: { path: /p }, outcomes: { "5xx": store } }`,
    })
    t.equal(live.statusLine, `HTTP/1.1 ${status} Odd`)
  }
})

void t.test('a header that this proxy sets replaces that of a proxy behind it', async (t) => {
  await using inner = await upstreamStub((seen, response) => {
    const type = seen.target.endsWith('live') ? { 'Content-Type': 'text/event-stream' } : {}
    const expires = new Date(0).toISOString()
    response
      .writeHead(201, { 'Idempotency-Status': 'replayed', 'Idempotency-Expires': expires, ...type })
      .end('ok')
  })
  for (const says of [true, false]) {
    await using proxy = await proxyBefore(inner, {
      routes: `{ name: r, match: { path: "/*" }, statusHeader: ${says} }`,
    })
    for (const [path, key, own] of [
      ['/p', 'k', 'executed'],
      ['/p', 'k', 'replayed'],
      ['/live', 'k', 'executed'],
      ['/p', null, 'ignored'],
    ] as const) {
      const answer = await rawRequest(proxy.port, post(path, key, '{}'))
      t.same(values(answer, 'idempotency-status'), [says ? own : 'replayed'], `${path} ${own}`)
      const expires = values(answer, 'idempotency-expires')
      if (!says) t.same(expires, [new Date(0).toISOString()])
      else t.equal(expires.length, path === '/p' && key !== null ? 1 : 0)
      t.notOk(says && expires.includes(new Date(0).toISOString()))
    }
  }
})
