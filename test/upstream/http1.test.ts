import { once } from 'node:events'
import type { Socket } from 'node:net'
import { Readable } from 'node:stream'
import t, { type Test } from 'tap'
import { request } from 'undici'
import type { Upstream } from '../../src/upstream/pool.ts'
import { InterimFilter } from '../../src/upstream/undici-fixes.ts'
import { words } from '../core/fixtures.ts'
import { answering, scriptedPeer } from '../support/exchange.ts'
import { tcpStub, wholeRequest } from '../support/upstream.ts'
import { Asked, DISPATCHERS, GET, onBoth, opened as openedFor, until } from './support.ts'

const OK = 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'

async function opened(t: Test, ...how: Parameters<typeof openedFor>): Promise<Upstream> {
  const upstream = await openedFor(...how)
  t.teardown(() => upstream.close())
  return upstream
}

void t.test('P01 our client and undici send a request as the same bytes', async (t) => {
  const peer = await scriptedPeer((socket, request) => {
    socket.write(request.startsWith('HEAD') ? 'HTTP/1.1 200 OK\r\n\r\n' : OK)
  })
  t.teardown(() => peer[Symbol.asyncDispose]())
  const both = await Promise.all(DISPATCHERS.map((http) => opened(t, peer.url, {}, http)))
  const lines = [...words`X-A 1 x-a 2 Cookie a=b Host b.test:8`, 'X-Latin', 'caf\xe9\t\xff', 'x-empty', '']
  const bodies = [null, Buffer.alloc(0), Buffer.from('caf\xe9 \u20ac\0'), Buffer.alloc(40_000, 'x')]
  const targets = ['/', '/%zz?a=b#c', '/caf\xe9']
  const requests: ConstructorParameters<typeof Asked>[1][] = [
    ...words`GET HEAD POST PUT PATCH DELETE OPTIONS QUERY PROPFIND M-SEARCH`.flatMap((method) =>
      bodies.map((body) => ({ method, body, headers: lines })),
    ),
    ...targets.flatMap((path) => [lines, []].map((headers) => ({ method: 'POST', path, headers }))),
  ]
  for (const one of requests) for (const { dispatcher } of both) await new Asked(dispatcher, one).end
  for (let i = 0; i + 1 < peer.requests.length; i += 2) t.equal(peer.requests[i], peer.requests[i + 1])
  t.equal(peer.requests.length, 2 * requests.length)
})

void t.test('U01 a request that could be read as something else is not sent', async (t) => {
  await using peer = await answering(OK)
  const { dispatcher } = await opened(t, peer.url)
  for (const wrong of [
    { method: 'G T' },
    { method: '' },
    { method: 'GET\r\n' },
    { path: 'http://b/' },
    { path: '*' },
    { path: '/a b' },
    { path: '/\r\nX: 1' },
    { path: '/\0' },
    { path: '/\u0161' },
    { headers: ['', 'a'] },
    { headers: ['X:', 'a'] },
    { headers: ['X', 'a\0'] },
    { headers: ['X', 'a\nb'] },
    { headers: ['X', '\u0161'] },
    { headers: ['Host', 'a', 'host', 'b'] },
    { headers: ['Host', 'a\r\n'] },
    ['Connection', 'Content-Length', 'Transfer-Encoding', 'Upgrade', 'Keep-Alive', 'Expect'].map((name) => ({
      headers: [name, '1'],
    })),
  ].flat())
    t.match(await new Asked(dispatcher, wrong).end, /^not sent/, JSON.stringify(wrong))
  t.equal(peer.requests.length, 0)
  t.equal(await new Asked(dispatcher).end, '200 ok')
  t.equal(peer.sockets.length, 1, 'the connection was kept for the next one')
})

void t.test('requests are sent in order, and a cancelled one is not sent', async (t) => {
  const held: Socket[] = []
  await using peer = await scriptedPeer((socket) => void held.push(socket))
  const { dispatcher } = await opened(t, peer.url)
  const asked = ['/1', '/2', '/3'].map((target) => new Asked(dispatcher, { path: target }))
  await until(() => held.length > 0)
  dispatcher.cancel?.(asked[1] as Asked)
  for (const one of [asked[0], asked[2]]) {
    await until(() => held.length > 0)
    held.shift()?.write(OK)
    t.equal(await one?.end, '200 ok')
  }
  t.same(
    peer.requests.map((request) => request.split(' ')[1]),
    ['/1', '/3'],
  )
})

onBoth('U07 unsolicited bytes end an idle connection', async (t) => {
  let last: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    last = socket
    socket.write(OK)
  })
  const { dispatcher } = await opened(t, peer.url)
  t.equal(await new Asked(dispatcher).end, '200 ok')
  last?.write('HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil')
  await once(last as Socket, 'close')
  t.equal(await new Asked(dispatcher).end, '200 ok')
  t.equal(peer.sockets.length, 2)
})

void t.test('malformed transfer codings are refused, unless no body follows', async (t) => {
  for (const coding of ['chunked, gzip', 'gzip,chunked,x', '\xa0chunked', 'chunked\xa0', 'chun ked'])
    for (const [method, status] of [
      ['GET', 200],
      ['GET', 204],
      ['GET', 205],
      ['GET', 304],
      ['HEAD', 200],
    ] as const) {
      await using peer = await answering(
        `HTTP/1.1 ${status} x\r\nTransfer-Encoding: ${coding}\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
      )
      const { dispatcher } = await opened(t, peer.url)
      t.equal(
        await new Asked(dispatcher, { method }).end,
        method === 'GET' && status === 200
          ? 'broken: the transfer codings of the response are malformed'
          : `${status} `,
        `${method} ${status} ${JSON.stringify(coding)}`,
      )
    }
})

onBoth('white space within a connection option makes it another one', async (t) => {
  for (const [version, options, isKept] of [
    ['1.1', 'x, close', false],
    ['1.1', 'Close ,x', false],
    ['1.1', 'clo se', true],
    ['1.0', 'x ,\tKeep-Alive', true],
    ['1.0', 'keep- alive', false],
  ] as const) {
    await using peer = await answering(
      `HTTP/${version} 200 OK\r\nConnection: ${options}\r\nContent-Length: 2\r\n\r\nok`,
    )
    const { dispatcher } = await opened(t, peer.url)
    for (let i = 0; i < 2; i++) t.equal(await new Asked(dispatcher).end, '200 ok')
    t.equal(peer.sockets.length, isKept ? 1 : 2, options)
  }
})

t.test('after an early answer the server gets the rest of the request, and no other', async (t) => {
  let read = 0
  await using peer = await tcpStub((socket, n) => {
    if (n > 1) return void wholeRequest(socket).then(() => socket.write(OK))
    socket.once('data', () => {
      socket.pause()
      socket.write(OK)
      setTimeout(() => socket.on('data', (chunk: Buffer) => void (read += chunk.length)).resume(), 100)
    })
  })
  const { dispatcher } = await opened(t, peer.url)
  const size = 16 * 1024 * 1024
  for (const [body, isTaken] of [
    // The socket still holds some of it.
    [Buffer.alloc(size), false],
    [Buffer.alloc(size >> 8), true],
  ] as const) {
    const asked = new Asked(dispatcher, { method: 'POST', body })
    t.equal(await asked.end, '200 ok')
    t.match(asked.controller, { isTaken })
  }
  t.equal(peer.sockets.length, 2)
  t.ok(read > size / 2)
})

onBoth('the idle timeout starts with the head, not with the request', async (t) => {
  await using peer = await scriptedPeer((socket) => void setTimeout(() => socket.write(OK), 300))
  const { dispatcher } = await opened(t, peer.url, { connectTimeout: 200 })
  t.equal(await new Asked(dispatcher, { bodyTimeout: 200 }).end, '200 ok')
})

onBoth('calls on an exchange that is over do not affect the next one', async (t) => {
  await using peer = await answering(OK)
  const { dispatcher } = await opened(t, peer.url)
  const first = new Asked(dispatcher)
  t.equal(await first.end, '200 ok')
  const second = new Asked(dispatcher)
  await until(() => second.controller !== null)
  first.controller?.pause()
  first.controller?.resume()
  first.controller?.abort(new Error('late'))
  t.equal(await second.end, '200 ok')
  t.equal(peer.sockets.length, 1)
})

onBoth('a bug in any callback ends its exchange, and the client goes on', async (t) => {
  await using peer = await answering(OK)
  const { dispatcher } = await opened(t, peer.url)
  for (const event of ['onRequestStart', 'onResponseStart', 'onResponseData', 'onResponseEnd'] as const) {
    const { promise, resolve } = Promise.withResolvers<Error>()
    dispatcher.dispatch(GET, {
      onRequestStart() {},
      onResponseError: (_controller, error) => resolve(error),
      [event]: () => {
        throw new Error(event)
      },
    })
    t.match(await promise, { message: event })
    t.equal(await new Asked(dispatcher).end, '200 ok')
  }
})

onBoth('closing breaks off the running exchange, and a waiting one is not sent', async (t) => {
  await using peer = await scriptedPeer(() => {})
  const upstream = await opened(t, peer.url)
  const asked = [0, 1].map(() => new Asked(upstream.dispatcher))
  await until(() => peer.requests.length > 0)
  const closed = upstream.close()
  t.match(await asked[0]?.end, /^broken/)
  t.match(await asked[1]?.end, /^not sent/)
  await closed
  t.match(await new Asked(upstream.dispatcher).end, /^not sent/)
})

/** Pieces that arrive one by one, and then the end or an error. */
async function* pieces(...all: (string | Error)[]): AsyncGenerator<Buffer> {
  for (const piece of all) {
    await new Promise((resolve) => setImmediate(resolve))
    if (piece instanceof Error) throw piece
    yield Buffer.from(piece)
  }
}

onBoth(
  'P17 a stream is sent in chunks, or with the length announced, and then the next request',
  async (t) => {
    const chunks = '\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n'
    for (const [length, sent] of [
      [[], `transfer-encoding: chunked${chunks}`],
      [['Content-Length', '5'], 'content-length: 5\r\n\r\nabcde'],
    ] as const) {
      let got = ''
      await using peer = await tcpStub(
        (socket) =>
          void socket.on('data', (bytes: Buffer) => {
            got += bytes.toString()
            if (got.endsWith(sent) || got.endsWith('keep-alive\r\n\r\n')) socket.write(OK)
          }),
      )
      const { dispatcher } = await opened(t, peer.url)
      const body = Readable.from(pieces('abc', '', 'de'))
      t.equal(
        await new Asked(dispatcher, { method: 'POST', headers: ['Host', 'a', ...length], body }).end,
        '200 ok',
      )
      t.equal(await new Asked(dispatcher).end, '200 ok')
    }
  },
)

onBoth('a stream that breaks off, or is not as long as announced, is no whole request', async (t) => {
  for (const [body, length] of [
    [['abc', new Error('gone')], []],
    [
      ['abc', new Error('gone')],
      ['Content-Length', '5'],
    ],
    [['abc'], ['Content-Length', '5']],
    [
      ['abc', 'def'],
      ['Content-Length', '5'],
    ],
  ] as const) {
    let got = ''
    await using peer = await tcpStub(
      (socket, n) =>
        void socket.on('data', (bytes: Buffer) => {
          if (n === 1) got += bytes.toString()
          else socket.write(OK)
        }),
    )
    const { dispatcher } = await opened(t, peer.url)
    const headers = ['Host', 'a', ...length]
    const asked = new Asked(dispatcher, { method: 'POST', headers, body: Readable.from(pieces(...body)) })
    t.match(await asked.end, /^broken/)
    t.equal(await new Asked(dispatcher).end, '200 ok')
    t.notMatch(got, /0\r\n\r\n$|abcdef/)
    t.equal(peer.sockets.length, 2)
  }
})

onBoth('a stream waits for an upstream that does not read', async (t) => {
  const held = Promise.withResolvers<Socket>()
  await using peer = await tcpStub((socket) => {
    socket.once('data', () => held.resolve(socket.pause()))
  })
  const { dispatcher } = await opened(t, peer.url)
  const size = 64 * 1024 ** 2
  let read = 0
  const body = new Readable({
    read(most) {
      read += most
      this.push(read < size ? Buffer.alloc(most) : null)
    },
  })
  const asked = new Asked(dispatcher, { method: 'POST', body })
  const socket = await held.promise
  // It stands still once the buffers of both sides are full.
  for (let before = -1; before !== read; ) {
    before = read
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  t.ok(read < size / 2, `${read}`)
  socket.on('end', () => {}).resume()
  await until(() => read >= size)
  socket.write(OK)
  t.equal(await asked.end, '200 ok')
})

onBoth('whatever takes one of undici’s dispatchers takes it', async (t) => {
  await using peer = await answering(
    'HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nset-cookie: b\r\nX: y\r\nContent-Length: 2\r\n\r\nok',
  )
  const { dispatcher, origin } = await opened(t, peer.url)
  for (const headers of [['X', '1', 'x', '2'], { X: ['1', '2'], none: undefined }, new Headers({ X: '1' })])
    for (const responseHeaders of [null, 'raw'] as const) {
      const answer = await request(origin, {
        dispatcher,
        method: 'POST',
        headers,
        body: 'caf\xe9',
        responseHeaders,
      })
      t.equal(await answer.body.text(), 'ok')
      if (responseHeaders === null) t.strictSame(answer.headers['set-cookie'], ['a', 'b'])
      t.match(peer.requests.at(-1), /^x: 1\r\n[^]*\r\n\r\ncaf\xc3\xa9$/im)
    }
  await t.rejects(request(origin, { dispatcher, headers: { 'X Y': '1' } }), { code: 'UND_ERR_INVALID_ARG' })
  await dispatcher.close()
  await t.rejects(request(origin, { dispatcher }))
})

const CONTINUE = 'HTTP/1.1 100 Continue\r\n\r\n'
const ANSWER = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'

/** What the parser sees of these pieces after a request was written. */
function filtered(...pieces: string[]): string {
  const filter = new InterimFilter()
  filter.expectHead()
  return pieces.map((piece) => filter.pass(Buffer.from(piece, 'latin1'))?.toString('latin1') ?? '').join('')
}

void t.test('P09 interim heads are removed, however they are cut into pieces', (t) => {
  for (const interim of [
    '',
    CONTINUE,
    CONTINUE + CONTINUE,
    'HTTP/1.0 100\r\n\r\n',
    'HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nLink: </b>\r\n\r\n',
    `HTTP/1.1 102 Processing\r\n\r\n${CONTINUE}`,
    'HTTP/1.1 199 \r\nX: 1\r\n\r\n',
  ]) {
    const all = interim + ANSWER
    t.equal(filtered(all), ANSWER)
    t.equal(filtered(...all.split('')), ANSWER)
    for (let i = 1; i < all.length; i++) t.equal(filtered(all.slice(0, i), all.slice(i)), ANSWER)
  }
  t.end()
})

void t.test('P09 interim heads are removed only at the start of an expected answer', (t) => {
  const body = `HTTP/1.1 201 Created\r\nContent-Length: ${CONTINUE.length}\r\n\r\n${CONTINUE}`
  t.equal(filtered(body), body)
  t.equal(filtered(...body.split('')), body)
  const filter = new InterimFilter()
  t.equal(filter.pass(Buffer.from(CONTINUE))?.toString(), CONTINUE, 'nothing is expected: unchanged')
  t.end()
})

void t.test('P09 interim heads are removed for each request of a kept connection', (t) => {
  const filter = new InterimFilter()
  for (let i = 0; i < 3; i++) {
    filter.expectHead()
    t.equal(filter.pass(Buffer.from(CONTINUE)), null)
    t.equal(filter.pass(Buffer.from(ANSWER))?.toString(), ANSWER)
  }
  t.end()
})

void t.test('U07 what is not an interim head reaches the parser unchanged', (t) => {
  for (const bytes of [
    'garbage',
    '\r\n\r\n',
    'HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n',
    `HTTP/1.1 100 Continue\n\nHTTP/1.1 201 Created\r\n\r\n${ANSWER}`,
    `HTTP/1.1 100 Continue\r\nX: 1\nHTTP/1.1 200 OK\r\n\r\n${ANSWER}`,
    `HTTP/1.1 1000 Odd\r\n\r\n${ANSWER}`,
    `HTTP/1.1 10\r\n\r\n${ANSWER}`,
    `HTTP/1.1 100 ${'x'.repeat(20_000)}`,
  ])
    t.equal(filtered(bytes), bytes)
  t.equal(filtered('HTTP/1.1 2', '\r\nx'), 'HTTP/1.1 2\r\nx')
  t.equal(filtered('HTTP/1.1 10', '1 Switching'), 'HTTP/1.1 101 Switching')
  t.equal(filtered('HTT', 'Q'), 'HTTQ')
  t.equal(filtered(''), '')
  t.end()
})
