/**
 * Compares requests that this proxy reads itself with the same ones behind an empty line, which Node's parser reads: both must be
 * understood and answered in the same way. Other bytes: the fuzz target `http-head`.
 */
import { once } from 'node:events'
import { type AddressInfo, connect, type Socket } from 'node:net'
import t from 'tap'
import { answersOn, TrafficServer } from '../../src/http/connections.ts'
import { PlainRequest } from '../../src/http/plain.ts'
import type { StreamRequest, TrafficRequest, TrafficResponse } from '../../src/http/request.ts'
import { chunkable } from '../../src/http/write.ts'
import { values } from '../support/exchange.ts'
import { dial, get, readAnswer } from '../support/raw.ts'

t.setTimeout(300_000)

type Listener = (request: TrafficRequest, response: TrafficResponse) => void
type Options = ConstructorParameters<typeof TrafficServer>[0]

async function serving(listener: Listener, options: Options = {}) {
  const bugs: unknown[] = []
  const server = new TrafficServer(
    { holds: true, plain: true, requireHostHeader: false, ...options },
    listener,
    (error) => bugs.push(error),
  )
  server.maxHeadersCount = 0
  const sockets = new Map<number, Socket>()
  const emit = server.emit.bind(server)
  server.emit = (event: string, ...args: unknown[]) => {
    if (event === 'connection') sockets.set((args[0] as Socket).remotePort as number, args[0] as Socket)
    return emit(event, ...args)
  }
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    server,
    sockets,
    bugs,
    port: (server.address() as AddressInfo).port,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

const LARGE = Buffer.alloc(100_000, 'l')
// biome-ignore format: a list
const WAYS = [
  'whole', 'buffer', 'large', 'none', 'chunks', 'trailers', 'late', 'head', 'close', 'last', 'empty',
]

/** The answer that the request's path asks for. */
function answer(way: string, response: TrafficResponse): void {
  const length = (body: { length: number }): string[] => ['Content-Length', String(body.length)]
  switch (way) {
    case 'whole':
      response.writeHead(201, 'Made', ['X-A', 'caf\xe9', ...length('b\xe4h')])
      response.end('b\xe4h', 'latin1')
      break
    case 'buffer':
      response.writeHead(200, ['Set-Cookie', 'a=b', 'Set-Cookie', 'c=d', ...length('body')])
      response.end(Buffer.from('body'))
      break
    case 'large':
      response.writeHead(200, length(LARGE))
      response.end(LARGE)
      break
    case 'none':
      response.writeHead(204, ['Date', 'today'])
      response.end()
      break
    case 'empty':
      response.writeHead(200, 'OK', length(''))
      response.end()
      break
    case 'chunks':
      response.writeHead(200, '', [])
      response.write(Buffer.from('one'))
      response.write(Buffer.alloc(0))
      response.write(LARGE)
      response.end(Buffer.from('last'))
      break
    case 'trailers':
      // Only a chunked answer may announce them.
      response.writeHead(200, chunkable(response, 200) ? ['Trailer', 'X-T'] : [])
      response.write(Buffer.from('one'))
      response.addTrailers([['X-T', 'caf\xe9']])
      response.end()
      break
    case 'late':
      response.writeHead(200, length('12'))
      response.write(Buffer.alloc(0))
      setImmediate(() => {
        response.write(Buffer.from('1'))
        setImmediate(() => response.end(Buffer.from('2')))
      })
      break
    case 'head':
      response.writeHead(304, ['Content-Length', '5'])
      response.end(Buffer.from('never'))
      break
    case 'close':
      response.writeHead(200, ['Connection', 'close', ...length('x')])
      response.end('x', 'latin1')
      break
    default:
      response.shouldKeepAlive = false
      response.writeHead(400, ['Content-Length', '0'])
      response.end()
  }
}

interface Heard {
  readonly isPlain: boolean
  readonly request: unknown
  readonly events: string[]
}

/** What the server makes of the bytes, and what the client gets. */
async function exchange(on: Awaited<ReturnType<typeof serving>>, heard: Map<number, Heard[]>, bytes: string) {
  const client = connect(on.port, '127.0.0.1').on('error', () => {})
  const closed = once(client, 'close')
  await once(client, 'connect')
  let got = ''
  client.on('data', (chunk) => {
    got += chunk.toString('latin1')
  })
  client.write(bytes, 'latin1')
  const port = client.localPort as number
  const turn = async (): Promise<void> => void (await new Promise((resolve) => setTimeout(resolve, 2)))
  while (!on.sockets.has(port)) await turn()
  const socket = on.sockets.get(port) as Socket
  const all = heard.get(port) ?? []
  heard.set(port, all)
  while (!socket.writableEnded && !socket.destroyed && socket.bytesRead < bytes.length) await turn()
  // Whatever it does about them, it has begun by then.
  for (let i = 0; i < 5; i++) await turn()
  while (!socket.destroyed && all.some(({ events }) => events.length < 4)) await turn()
  while (!socket.destroyed && client.bytesRead < socket.bytesWritten) await turn()
  const isClosed = socket.writableEnded || socket.destroyed
  if (isClosed) await closed
  client.destroy()
  // The next client may get the same port.
  heard.delete(port)
  on.sockets.delete(port)
  return {
    plain: all.filter(({ isPlain }) => isPlain).length,
    requests: all.map(({ request, events }) => ({ request, events })),
    got: got.replaceAll(/Date: \w{3}, [^\r]*/g, 'Date: now'),
    isClosed,
  }
}

/** Of a request: what the parser and the answer depend on. */
interface Asked {
  readonly method?: string
  readonly target?: string
  readonly version?: string
  /** Between the Host line and the length. */
  readonly lines?: readonly string[]
  readonly host?: string
  readonly body?: string
  /** Instead of the line that says it. */
  readonly length?: string
  readonly after?: string
}

function asked(one: Asked): string {
  const {
    method = 'POST',
    target = '/whole',
    version = 'HTTP/1.1',
    lines = [],
    body = '{}',
    after = '',
  } = one
  const { host = 'Host: a', length = body === '' ? '' : `Content-Length: ${body.length}` } = one
  const head = [`${method} ${target} ${version}`, host, ...lines, length].filter((line) => line !== '')
  return `${head.join('\r\n')}\r\n\r\n${body}${after}`
}

// biome-ignore format: lists
const ODD = {
  target: [
    '*', 'http://a/whole', '/a b', '/caf\xe9', '/a#b', '/a?b=c&d=%20', '//a', '/"<>', 'whole', '/\x7f', '/a[1]',
  ],
  method: ['QUERY', 'post', 'POSTS', 'PRI', 'TRACE', 'M-SEARCH', 'G\0T', 'PUT', 'PATCH', 'DELETE'],
  version: ['HTTP/1.0', 'HTTP/1.2', 'HTTP/2.0', 'http/1.1', 'HTTP/1.1 ', 'HTTP/01.1', 'RTSP/1.1'],
  host: ['host:a', 'HOST: a:1 ', 'Host:', ''],
  body: ['', '\r\n\r\n', 'x'.repeat(3000), `caf\xe9${'y'.repeat(40)}`],
  after: ['\r\n', 'x', asked({ body: '' }), `\r\n\r\n${asked({ body: '' })}`],
  length: [
    'content-length:2', 'Content-Length:  2', 'Content-Length: +2', 'Content-Length: 0x2', 'Content-Length:',
    'Content-Length: 2 2', 'Content-Length: 2,2', 'Content-Length: 02', 'Content-Length: 2\t',
    'Content-Length: 99999', 'Content-Length: 1', 'Content-Length: 2\r\nContent-Length: 2',
    'Transfer-Encoding: chunked', 'Content-Length: 2\r\nTransfer-Encoding: chunked', 'Transfer-Encoding: gzip',
  ],
  line: [
    'X-A: 1', 'x-a:2', 'X-A: \t 3 \t', 'Cookie: a=1\r\nCookie: b=2', 'Authorization: a', 'Content-Type: x/y',
    'X-Empty:', 'X-Blank: \t', 'X-Latin: caf\xe9', 'Host: b', 'Expect: 100-continue', 'Expect: x', 'Upgrade: h2c',
    'Proxy-Connection: close', 'X-Fold: a\r\n b', 'X Y: 1', ' X: 1', 'no colon', ': 1', 'X: a\0b', 'X : 1',
    'X: \x7f', 'X: a\rb', 'X: a\nb', 'Trailer: a', 'TE: trailers', 'Keep-Alive: 1', 'Accept: a\r\nAccept: b',
    ...[3000, 4100, 9000].map((length) => `X-Long: ${'l'.repeat(length)}`),
  ],
} as const
const CONNECTIONS = [
  '',
  'Connection: keep-alive',
  'connection:Keep-Alive',
  'Connection: close',
  'Connection: x',
]

/** Every way to answer, to every kind of client; then everything odd, alone and with a body that another line announces. */
const REQUESTS: readonly string[] = [
  ...WAYS.flatMap((way) =>
    ['GET', 'HEAD', 'POST', 'OPTIONS'].flatMap((method) =>
      CONNECTIONS.map((line) =>
        asked({ method, target: `/${way}`, lines: [line], body: method === 'POST' ? '{}' : '' }),
      ),
    ),
  ),
  ...Object.entries(ODD).flatMap(([what, all]) =>
    all.flatMap((odd) =>
      ['/whole', '/chunks'].map((target) =>
        asked({ target, ...(what === 'line' ? { lines: [odd] } : { [what]: odd }) }),
      ),
    ),
  ),
]

void t.test('a request read here is understood and answered exactly as with Node’s parser', async (t) => {
  const heard = new Map<number, Heard[]>()
  await using on = await serving((request, response) => {
    const { method, url, httpVersion, rawHeaders, headers, framing, isHere, socket } = request
    const events: string[] = []
    const head = {
      method,
      url,
      httpVersion,
      rawHeaders: [...rawHeaders],
      headers: { ...headers },
      framing: { ...framing },
    }
    const note = (body: Buffer | null): void => {
      const all = heard.get(socket.remotePort as number) ?? []
      heard.set(socket.remotePort as number, all)
      all.push({
        isPlain: request instanceof PlainRequest,
        request: { ...head, isHere, body: body?.toString('latin1') },
        events,
      })
    }
    for (const event of ['finish', 'close'])
      response.on(event, () => {
        const { headersSent, writableEnded, writableFinished, destroyed, closed } = response
        events.push(
          event,
          JSON.stringify({ headersSent, writableEnded, writableFinished, destroyed, closed }),
        )
      })
    const whole = request.takeBody()
    note(whole)
    if (whole === null) (request as StreamRequest).resume()
    answer((url as string).slice(1), response)
  })
  let plain = 0
  let answered = 0
  const run = async (bytes: string): Promise<void> => {
    const [ours, theirs] = await Promise.all([
      exchange(on, heard, bytes),
      exchange(on, heard, `\r\n${bytes}`),
    ])
    plain += ours.plain
    if (ours.got !== '') answered++
    t.equal(theirs.plain, 0, 'Node reads what begins with an empty line')
    if (JSON.stringify({ ...ours, plain: 0 }) !== JSON.stringify(theirs))
      t.fail(JSON.stringify(bytes.slice(0, 200)), { bytes, ours, theirs })
  }
  for (let n = 0; n < REQUESTS.length; n += 100) await Promise.all(REQUESTS.slice(n, n + 100).map(run))
  t.comment(`${plain} of ${REQUESTS.length} plain, ${answered} answered`)
  t.ok(plain > REQUESTS.length / 3, 'many are plain')
  t.ok(plain < REQUESTS.length - 50, 'and many are not')
  t.same(on.bugs, [])
})

t.test('a request whose connection closes in the same turn is served, and then closed', async (t) => {
  const closed: boolean[] = []
  await using on = await serving((_request, response) => {
    closed.push(response.closed)
    response.once('close', () => closed.push(response.closed))
  })
  const client = connect(on.port, '127.0.0.1').on('error', () => {})
  while (on.sockets.size < 1) await new Promise((resolve) => setTimeout(resolve, 2))
  const [socket] = on.sockets.values()
  socket?.on('data', () => socket.destroy())
  client.write(get('/'))
  await once(client.resume(), 'close')
  while (on.server.unanswered > 0) await new Promise((resolve) => setTimeout(resolve, 2))
  t.same(closed, [false, true])
})

void t.test('a request behind an unanswered one waits for its answer', async (t) => {
  const first = get('/first')
  for (const [behind, statuses] of [
    [get('/second'), [200, 200]],
    ['POST /second HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}', [200, 200]],
    // Nobody knows where another request would begin.
    ['nonsense\r\n\r\n', [200]],
  ] as const) {
    const waiting: (() => void)[] = []
    await using on = await serving((request, response) => {
      const served = (): void => {
        response.writeHead(200, ['X-Target', request.url as string, 'Content-Length', '0'])
        response.end()
      }
      if (request.url === '/first') waiting.push(served)
      else served()
    })
    on.server.on('clientError', (_error, socket) => {
      for (const answer of answersOn(socket)) answer.shouldKeepAlive = false
    })
    const client = dial(on.port, first)
    while (waiting.length === 0) await new Promise((resolve) => setTimeout(resolve, 2))
    client.write(behind)
    const [socket] = on.sockets.values()
    while ((socket as Socket).bytesRead < first.length + behind.length)
      await new Promise((resolve) => setTimeout(resolve, 2))
    waiting.pop()?.()
    const targets = []
    for (const status of statuses) {
      const got = await readAnswer(client)
      t.equal(got.status, status)
      targets.push(...values(got, 'x-target'))
    }
    t.strictSame(targets, ['/first', '/second'].slice(0, statuses.length))
    if (statuses.length === 1) await once(client.resume(), 'close')
    client.destroy()
  }
})

void t.test('idle connections are closed', async (t) => {
  await using on = await serving(
    (_request, response) => {
      response.writeHead(200, ['Content-Length', '0'])
      response.end()
    },
    {
      connectionsCheckingInterval: 10,
      headersTimeout: 40,
      keepAliveTimeout: 20,
      keepAliveTimeoutBuffer: 20,
    },
  )
  const errors: unknown[] = []
  on.server.on('clientError', (error, socket) => {
    errors.push((error as NodeJS.ErrnoException).code)
    socket.destroy()
  })
  const silent = connect(on.port, '127.0.0.1')
  await once(silent.resume(), 'close')
  t.strictSame(errors, ['ERR_HTTP_REQUEST_TIMEOUT'], 'one that never sends a request')
  const answered = dial(on.port, get('/'))
  t.equal((await readAnswer(answered)).status, 200)
  await once(answered.resume(), 'close')
  t.strictSame(errors.length, 1, 'one that sends no other')
})

void t.test('a connection ends with its answer if the bytes behind the request were given up', async (t) => {
  for (const behind of ['GET / HTTP/1.1\r\n', '\r\n', 'nonsense\r\n\r\n']) {
    const answers: TrafficResponse[] = []
    await using on = await serving(
      (_request, response) => {
        answers.push(response)
        response.writeHead(200, ['Content-Length', '2'])
        response.write(Buffer.from('a'))
      },
      { connectionsCheckingInterval: 10, headersTimeout: 40 },
    )
    // As the traffic server does it: the answer's end shows where the connection may end.
    const givenUp = new Promise<void>((resolve) => {
      on.server.on('clientError', (_error, socket) => {
        for (const answer of answersOn(socket)) answer.shouldKeepAlive = false
        resolve()
      })
    })
    const client = dial(on.port, get('/'))
    while (answers.length === 0) await new Promise((resolve) => setTimeout(resolve, 2))
    client.write(behind)
    await givenUp
    answers[0]?.end(Buffer.from('b'))
    t.equal((await readAnswer(client)).body.toString(), 'ab')
    await once(client.resume(), 'close')
    t.equal(answers.length, 1)
  }
})

void t.test('a header that would split a line or change the framing is refused', async (t) => {
  const refused: unknown[] = []
  await using on = await serving((_request, response) => {
    for (const lines of [
      ['X-A', 'a\r\nX-B: b'],
      ['X A', 'a'],
      ['X-A', '\u0100'],
      ['Transfer-Encoding', 'chunked'],
      ['Connection', 'upgrade'],
    ])
      t.throws(() => response.writeHead(200, lines))
    t.throws(() => response.writeHead(200, 'OK\r\nX-B: b', []))
    t.throws(() => response.writeHead(100, []))
    t.throws(() => response.addTrailers([['X-A', 'a\r\n']]))
    response.writeHead(200, ['Content-Length', '0'])
    t.throws(() => response.writeHead(200, []))
    response.end()
    t.equal(response.write(Buffer.from('x')), false)
    response.end()
    refused.push(response.headersSent)
  })
  const client = dial(on.port, get('/'))
  t.equal((await readAnswer(client)).status, 200)
  client.destroy()
  t.strictSame(refused, [true])
})
