import { once } from 'node:events'
import { gzipSync } from 'node:zlib'
import t, { type Test } from 'tap'
import { answering, proxyBefore, values, without } from '../support/exchange.ts'
import { IS_HTTP2, sent } from '../support/front.ts'
import { http1Test } from '../support/http1-test.ts'
import { dial, post, rawRequest } from '../support/raw.ts'
import { IS_STOCK } from '../support/service.ts'
import { OWN, twice } from '../support/twice.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const OLD = post('/p', 'k', '{}').replace('HTTP/1.1', 'HTTP/1.0')
const EMPTY = 'Content-Length: 0\r\n\r\n'
const OK = 'Content-Length: 2\r\n\r\nok'
const ANY_BYTES = Buffer.from(Array.from({ length: 1024 }, (_, i) => i % 256)).toString('latin1')
const GZIP = gzipSync('{"hello":"world"}').toString('latin1')
const COOKIES = [
  'a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT',
  'b=2; Expires=Thu, 22 Oct 2026 07:28:00 GMT; Path=/',
]

/** What a client gets, the first time and again: {@link twice} compares the bytes. */
interface Got {
  readonly statusLine?: string
  readonly status?: number
  /** Of each line of these names. */
  readonly values?: Readonly<Record<string, readonly string[]>>
  /** All lines that the proxy has not added. */
  readonly lines?: readonly string[]
  readonly trailers?: readonly string[]
  readonly body?: string
}

type Row = readonly [answer: string, got: Got, request?: string]

// biome-ignore format: a table
const WIRE: Readonly<Record<string, readonly Row[]>> = {
  'P01 P04 P14 a 201 keeps its status and bytes, and its lines their order, case and number': [
    [
      'HTTP/1.1 201 Created\r\nLocation: /p/1\r\nX-b: 2\r\nETag: "v1"\r\nx-B: 1\r\nContent-Type: application/json\r\n' +
        'X-B: 2\r\nX-Empty:\r\nDATE: Tue, 03 Nov 2026 08:00:00 GMT\r\nContent-Length: 8\r\nWarning: a, b\r\n\r\n{"id":1}',
      {
        statusLine: 'HTTP/1.1 201 Created',
        lines: [
          ['Location', '/p/1', 'X-b', '2', 'ETag', '"v1"', 'x-B', '1', 'Content-Type', 'application/json'],
          ['X-B', '2', 'X-Empty', '', 'DATE', 'Tue, 03 Nov 2026 08:00:00 GMT', 'Warning', 'a, b'],
        ].flat(),
        values: { 'content-length': ['8'] },
        body: '{"id":1}',
      },
    ],
  ],
  'P01 a latin1 header value keeps its bytes': [
    [`HTTP/1.1 200 OK\r\nX-Name: caf\xe9 \xff\r\n${EMPTY}`, { values: { 'x-name': ['caf\xe9 \xff'] } }],
  ],
  'P02 a body of all 256 byte values stays unchanged': [
    [`HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n${ANY_BYTES}`, { body: ANY_BYTES }],
  ],
  'P03 Set-Cookie lines with commas stay separate': [
    [`HTTP/1.1 200 OK\r\nSet-Cookie: ${COOKIES[0]}\r\nX: 1\r\nSet-Cookie: ${COOKIES[1]}\r\n${EMPTY}`,
      { values: { 'set-cookie': COOKIES } }],
  ],
  'P05 a gzip body stays gzip, with its Content-Encoding': [
    [`HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: ${GZIP.length}\r\n\r\n${GZIP}`,
      { values: { 'content-encoding': ['gzip'] }, body: GZIP }],
  ],
  'P06 a chunked answer gets a Content-Length': [
    ['HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext="x"\r\nabc\r\n1\r\nd\r\n0\r\n\r\n',
      { values: { 'transfer-encoding': [], 'content-length': ['4'] }, body: 'abcd' }],
  ],
  'P07 204, 205 and 304 have no body, and 204 has no Content-Length': [
    ['HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n', { lines: ['X-A', '1'], values: { 'content-length': [] } }],
    [`HTTP/1.1 204 No Content\r\n${EMPTY}`, { values: { 'content-length': [] } }],
    // Node’s streams of HTTP/2 end with its head.
    [`HTTP/1.1 205 Reset Content\r\n${EMPTY}`, { status: 205, values: { 'content-length': IS_HTTP2 ? [] : ['0'] } }],
    ['HTTP/1.1 304 Not Modified\r\nETag: "a"\r\n\r\n', { status: 304 }],
    // RFC 9110 §8.6: the length of what would have been sent; even a large one announces no body.
    ['HTTP/1.1 304 Not Modified\r\nContent-Length: 99999999\r\nETag: "a"\r\n\r\n',
      { values: { 'content-length': ['99999999'], 'transfer-encoding': [] } }],
  ],
  // 307 and 308 say that nothing was done (config/policy.test.ts).
  'P08 a redirect is stored and not followed': [301, 302, 303].map(
    (status): Row => [
      `HTTP/1.1 ${status} Go\r\nLocation: /elsewhere\r\n${EMPTY}`,
      { status, values: { location: ['/elsewhere'] } },
    ],
  ),
  'P09 interim answers (100, 102, 103, or several of them) are not stored': [
    'HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n',
    'HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n',
  ].map((interim): Row => [`${interim}HTTP/1.1 201 Created\r\n${OK}`, { status: 201, values: { link: [] } }]),
  'P12 trailers are forwarded and replayed': ['', 'Trailer: X-Sum\r\n'].map(
    (announced): Row => [
      `HTTP/1.1 200 OK\r\n${announced}Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\nX-sum: 2\r\n\r\n`,
      { trailers: ['X-Sum', '1', 'X-sum', '2'], values: { trailer: announced === '' ? [] : ['X-Sum'] } },
    ],
  ),
  'P12 a client that is announced trailers that do not come gets the body': [
    ['HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n', { body: 'ok' }],
    ['HTTP/1.1 204 No\r\nTrailer: X-Sum\r\n\r\n', { status: 204 }],
  ],
  'P13 hop-by-hop lines are neither forwarded nor stored': [
    [
      'HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nConnection: x-other\r\nX-Hop: 1\r\nX-Other: 1\r\n' +
        'Keep-Alive: timeout=1\r\nProxy-Authenticate: Basic\r\nProxy-Connection: x\r\nTE: trailers\r\nUpgrade: h2c\r\n' +
        `X-End: 1\r\n${EMPTY}`,
      // The proxy’s own.
      { lines: ['X-End', '1'], ...(IS_HTTP2 ? {} : { values: { 'keep-alive': ['timeout=72'] } }) },
    ],
  ],
  'P15 the upstream’s Idempotency-Outcome is removed': [
    [`HTTP/1.1 500 No\r\nIdempotency-Outcome: applied\r\n${EMPTY}`, { values: { 'idempotency-outcome': [] } }],
  ],
  'P01 unregistered status codes are passed unchanged': [299, 499].map(
    (status): Row => [`HTTP/1.1 ${status} Odd\r\n${OK}`, { status, body: 'ok' }],
  ),
  'P01 status codes over 599 are passed unchanged, or as 500 where they cannot be (RFC 9110 §15)': [600, 999].map(
    (status): Row => [`HTTP/1.1 ${status} Odd\r\n${OK}`, { status: IS_HTTP2 ? 500 : status, body: 'ok' }],
  ),
}

/** The same, of what HTTP/2 does not have. */
// biome-ignore format: a table
const HTTP1_WIRE: typeof WIRE = {
  'P01 the reason phrase is the upstream’s: custom, empty, latin1, UTF-8': [
    'Made It So',
    '',
    // undici reads UTF-8.
    ...(IS_STOCK ? [] : ['Cr\xe9\xe9']),
    Buffer.from('Créé').toString('latin1'),
    'a  b\tc',
  ].map((reason): Row => [`HTTP/1.1 201 ${reason}\r\n${OK}`, { statusLine: `HTTP/1.1 201 ${reason}` }]),
  'P01 P12 an HTTP/1.0 client gets the same answers, without trailers': [
    [
      'HTTP/1.1 200 OK\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
      { values: { 'transfer-encoding': [], connection: ['close'] }, body: 'ok' },
      OLD,
    ],
    [
      'HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n',
      { body: 'ok', values: { trailer: [] } },
      OLD,
    ],
  ],
}

async function same(t: Test, rows: readonly Row[]): Promise<void> {
  for (const [answer, got, request] of rows) {
    const routes = '{ name: r, match: { path: /p }, outcomes: { "5xx": store } }'
    const { live } = await twice(t, answer, { routes }, request)
    for (const name of ['statusLine', 'status'] as const) if (name in got) t.equal(live[name], got[name])
    for (const [name, all] of Object.entries(got.values ?? {})) t.same(values(live, name), all, name)
    // A Date of the upstream's own stands among its lines.
    const own = OWN.filter((name) => name !== 'date' || !answer.includes('\r\nDATE: '))
    if (got.lines !== undefined) t.same(without(live, ...own), sent(got.lines))
    if (got.trailers !== undefined) t.same(live.trailers, sent(got.trailers))
    if (got.body !== undefined) t.equal(live.body.toString('latin1'), got.body)
  }
}

for (const [title, rows] of Object.entries(WIRE)) void t.test(title, (t) => same(t, rows))
for (const [title, rows] of Object.entries(HTTP1_WIRE)) http1Test(title, (t) => same(t, rows))

http1Test('P13 hop-by-hop lines of the request do not reach the upstream', async (t) => {
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
  t.same(without(live, ...OWN), sent(['X', '1']))
  await using peer = await answering(bytes)
  await using proxy = await proxyBefore(peer)
  for (const request of [
    post('/other', null, '{}'),
    'GET /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n\r\n',
  ])
    t.same(values(await rawRequest(proxy.port, request), 'idempotent-replayed'), [])
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
    const client = dial(proxy.port, head)
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString('latin1')
    })
    await once(client, 'end')
    answers.push(got)
  }
  t.match(answers[0], /^HTTP\/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 99999999\r\n/i)
  t.ok(answers[0]?.endsWith('\r\n\r\n'), 'no body')
  t.equal(answers[1]?.replace(/Idempotent-Replayed: true\r\n/i, ''), answers[0])
  t.equal(peer.requests.length, 1)
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
