import { once } from 'node:events'
import { createServer, type IncomingMessage, type Server } from 'node:http'
import { createServer as createTls } from 'node:https'
import { type AddressInfo, connect, type Socket } from 'node:net'
import t from 'tap'
import { WebSocket, WebSocketServer } from 'ws'
import { firstOf } from '../../src/core/headers.ts'
import { certificate } from '../support/certificates.ts'
import { until } from '../support/e2e.ts'
import { problemOf, proxyBefore, values } from '../support/exchange.ts'
import { type TestProxy } from '../support/proxy.ts'
import { dial, get, post, rawRequest, readAnswer } from '../support/raw.ts'
import { freePort } from '../support/redis.ts'
import { tcpStub } from '../support/upstream.ts'

t.setTimeout(300_000)

interface Echo extends AsyncDisposable {
  readonly url: string
  /** Raw header lines of the handshakes. */
  readonly handshakes: string[][]
  readonly targets: string[]
}

/** Echoes messages; closes with 4001 on `bye`; refuses `/no` with 401. */
async function echo(server: Server = createServer()): Promise<Echo> {
  const handshakes: string[][] = []
  const targets: string[] = []
  const sockets = new WebSocketServer({
    noServer: true,
    handleProtocols: (offered) => [...offered][1] ?? false,
  })
  server.on('upgrade', (request, socket, head) => {
    handshakes.push(request.rawHeaders)
    targets.push(request.url ?? '')
    if (request.url === '/no') {
      socket.on('error', () => {})
      socket.end(
        'HTTP/1.1 401 Who\xe9\r\nWWW-Authenticate: Basic realm="caf\xe9"\r\nIdempotent-Replayed: true\r\nContent-Length: 6\r\n\r\nsecret',
        'latin1',
      )
      return
    }
    sockets.handleUpgrade(request, socket, head, (ws) => {
      ws.on('error', () => {})
      ws.on('message', (data: Buffer, binary) => {
        if (data.toString() === 'bye') ws.close(4001, 'so long')
        else ws.send(data, { binary })
      })
    })
  })
  server.on('request', (request, response) => {
    request.resume()
    response.writeHead(201).end('plain')
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const scheme = 'setSecureContext' in server ? 'https' : 'http'
  return {
    url: `${scheme}://127.0.0.1:${(server.address() as AddressInfo).port}`,
    handshakes,
    targets,
    async [Symbol.asyncDispose]() {
      for (const client of sockets.clients) client.terminate()
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

/** An open WebSocket to the proxy. */
async function opened(
  { url }: TestProxy,
  path: string,
  protocols: string[] = [],
  headers: Record<string, string> = {},
): Promise<WebSocket> {
  const ws = new WebSocket(`${url.replace('http', 'ws')}${path}`, protocols, { headers })
  await once(ws, 'open')
  return ws
}

const SWITCHES = 'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n'
const HANDSHAKE = [
  'Connection: Upgrade',
  'Upgrade: websocket',
  'Sec-WebSocket-Version: 13',
  'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
].join('\r\n')

t.test('M10 a WebSocket passes with key, text, binary, subprotocol, close code and reason', async (t) => {
  await using upstream = await echo()
  await using proxy = await proxyBefore(upstream, {
    routes: '{ name: r, match: { methods: [GET], path: "/*" }, key: required }',
  })
  const sent = {
    'Idempotency-Key': 'k',
    'Idempotency-Fence': '7',
    'X-Forwarded-For': '1.2.3.4',
    'X-Mine': '1',
  }
  const ws = await opened(proxy, '/a//b/c?x=%2F', ['one', 'two'], sent)
  t.equal(ws.protocol, 'two')
  const large = 'x'.repeat(300_000)
  for (const message of ['hello', large, '']) {
    ws.send(message)
    const [data, binary] = (await once(ws, 'message')) as [Buffer, boolean]
    t.equal(data.toString(), message)
    t.equal(binary, false)
  }
  const bytes = Buffer.from(Array.from({ length: 256 }, (_, i) => i))
  ws.send(bytes)
  const [data, binary] = (await once(ws, 'message')) as [Buffer, boolean]
  t.ok(binary)
  t.same(data, bytes)
  ws.send('bye')
  const [code, reason] = (await once(ws, 'close')) as [number, Buffer]
  t.equal(code, 4001)
  t.equal(reason.toString(), 'so long')
  const lines = (upstream.handshakes[0] ?? []).map((part) => part.toLowerCase())
  t.same(upstream.targets, ['/a//b/c?x=%2F'], 'the target as sent')
  t.ok(lines.includes('idempotency-key') && lines.includes('x-mine'))
  t.notOk(lines.includes('idempotency-fence'))
  t.equal(firstOf(lines, 'x-forwarded-for'), '127.0.0.1')
  t.equal(firstOf(lines, 'host'), `127.0.0.1:${proxy.port}`)
})

t.test('M10 two WebSocket clients get their own messages, and a client may close first', async (t) => {
  await using upstream = await echo()
  await using proxy = await proxyBefore(upstream)
  const clients = await Promise.all(
    ['a', 'b'].map(async (name) => {
      const ws = await opened(proxy, `/${name}`)
      ws.send(name)
      t.equal(String((await once(ws, 'message'))[0]), name)
      return ws
    }),
  )
  for (const ws of clients) {
    ws.close(3000, 'done')
    const [code] = (await once(ws, 'close')) as [number]
    t.equal(code, 3000)
  }
})

void t.test('M10 a refused handshake reaches the client as the upstream wrote it', async (t) => {
  await using upstream = await echo()
  await using proxy = await proxyBefore(upstream)
  const ws = new WebSocket(`${proxy.url.replace('http', 'ws')}/no`)
  const [, response] = (await once(ws, 'unexpected-response')) as [unknown, IncomingMessage]
  t.equal(response.statusCode, 401)
  response.resume()
  const raw = await rawRequest(proxy.port, get('/no', HANDSHAKE))
  t.equal(raw.statusLine, 'HTTP/1.1 401 Who\xe9')
  t.same(values(raw, 'www-authenticate'), ['Basic realm="caf\xe9"'])
  t.same(values(raw, 'idempotent-replayed'), [])
  t.equal(raw.body.toString(), 'secret')
})

void t.test('U01 U04 a handshake with an absent, silent or broken upstream gets a problem', async (t) => {
  const handshake = get('/x', HANDSHAKE)
  await using nobody = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
  t.match(problemOf(await rawRequest(nobody.port, handshake)), { code: 'upstream_unreachable', status: 502 })
  await using silent = await tcpStub(() => {})
  await using slow = await proxyBefore(silent, { upstream: 'timeout: 200ms' })
  t.match(problemOf(await rawRequest(slow.port, handshake)), { code: 'upstream_timeout', status: 504 })
  await using closing = await tcpStub((socket) => void socket.once('data', () => socket.end()))
  await using broken = await proxyBefore(closing)
  t.match(problemOf(await rawRequest(broken.port, handshake)), { code: 'upstream_failed', status: 502 })
  t.equal((await rawRequest(broken.port, get('ftp://x', HANDSHAKE))).status, 400)
})

t.test('§15.14 the answer to a handshake is carried up to limits.responseHead, or refused', async (t) => {
  const handshake = get('/x', HANDSHAKE)
  for (const [bytes, expected] of [
    [`HTTP/1.1 401 No\r\nX: ${'x'.repeat(40_000)}\r\nContent-Length: 0\r\n\r\n`, 401],
    [`HTTP/1.1 401 No\r\nX: ${'x'.repeat(70_000)}\r\nContent-Length: 0\r\n\r\n`, /HPE_HEADER_OVERFLOW/],
    ['HTTP/1.1 401 No\nContent-Length: 0\n\n', /HPE_/],
  ] as const) {
    await using peer = await tcpStub((socket) => void socket.once('data', () => socket.end(bytes)))
    await using proxy = await proxyBefore(peer)
    const answer = await rawRequest(proxy.port, handshake)
    if (typeof expected === 'number') t.equal(answer.status, expected)
    else t.match(problemOf(answer), { code: 'upstream_failed', detail: expected })
  }
})

t.test('X01 a client that leaves in a handshake or after closes the upstream’s connection', async (t) => {
  for (const answer of ['', SWITCHES]) {
    const arrived = Promise.withResolvers<Socket>()
    await using upstream = await tcpStub((socket) => {
      socket.once('data', () => {
        if (answer !== '') socket.write(answer)
        arrived.resolve(socket)
      })
    })
    await using proxy = await proxyBefore(upstream)
    const client = dial(proxy.port, get('/x', HANDSHAKE))
    const socket = await arrived.promise
    if (answer !== '')
      t.match(String((await once(client, 'data'))[0]), /^HTTP\/1.1 101 Switching Protocols\r\n/)
    socket.resume()
    const closed = once(socket, 'close')
    client.destroy()
    await closed
    t.pass('closed')
  }
})

t.test('M10 bytes behind a handshake arrive; behind a refused one they are no request', async (t) => {
  const seen: string[] = []
  await using upstream = await tcpStub((socket) => {
    socket.on('data', (chunk: Buffer) => {
      seen.push(chunk.toString())
      if (seen.length === 1) socket.write(`${SWITCHES}hello`)
    })
  })
  await using proxy = await proxyBefore(upstream)
  const client = dial(proxy.port, `GET /x HTTP/1.1\r\nHost: a\r\n${HANDSHAKE}\r\n\r\nearly`)
  let got = ''
  while (!got.includes('hello')) got += String((await once(client, 'data'))[0])
  while (!seen.join('').endsWith('early')) await new Promise((resolve) => setTimeout(resolve, 5))
  client.destroy()
  const requests: string[] = []
  await using refusing = await tcpStub((socket) => {
    socket.on('data', (chunk: Buffer) => {
      requests.push(chunk.toString())
      socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
    })
  })
  await using other = await proxyBefore(refusing)
  const smuggler = dial(
    other.port,
    `GET /x HTTP/1.1\r\nHost: a\r\n${HANDSHAKE}\r\n\r\n${post('/p', 'k', '{}')}`,
  )
  t.equal((await readAnswer(smuggler)).body.toString(), 'ok')
  smuggler.resume()
  await once(smuggler, 'close')
  t.equal(requests.length, 1)
  t.notMatch(requests.join(''), 'POST')
})

void t.test('M10 a WebSocket passes over TLS to the upstream, verified', async (t) => {
  using good = certificate('IP:127.0.0.1')
  await using upstream = await echo(createTls({ cert: good.cert, key: good.key }))
  await using proxy = await proxyBefore(upstream, { upstream: `tls: { ca: "${good.certFile}" }` })
  const ws = await opened(proxy, '/x')
  ws.send('hi')
  t.equal(String((await once(ws, 'message'))[0]), 'hi')
  ws.close()
  await once(ws, 'close')
  await using blind = await proxyBefore(upstream)
  t.match(problemOf(await rawRequest(blind.port, get('/x', HANDSHAKE))), {
    code: 'upstream_unreachable',
  })
})

void t.test('X04 an open WebSocket does not keep the proxy from stopping', async (t) => {
  await using upstream = await echo()
  const proxy = await proxyBefore(upstream)
  const ws = await opened(proxy, '/x')
  const closed = once(ws, 'close')
  await proxy.drain()
  await closed
  t.pass('stopped')
})

void t.test('M10 clients that reset their handshake at any moment do the proxy no harm', async (t) => {
  await using server = await echo()
  await using proxy = await proxyBefore(server)
  for (let round = 0; round < 96; round++) {
    const target = ['/ws', '/no', '*', '/gone'][round % 4]
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    await once(client, 'connect')
    client.write(get(String(target), HANDSHAKE))
    for (let turns = round % 12; turns > 0; turns--) await new Promise((resolve) => setImmediate(resolve))
    client.resetAndDestroy()
  }
  const socket = await opened(proxy, '/ws')
  t.pass('the proxy is alive and upgrades')
  socket.terminate()
})

void t.test('V10 handshakes beyond upstream.connections get 503, until tunnels are freed', async (t) => {
  await using silent = await tcpStub((socket) => void socket.resume())
  await using proxy = await proxyBefore(silent, { upstream: 'connections: 4' })
  const ask = (): Socket => {
    const client = dial(proxy.port, get('/ws', HANDSHAKE)).on('error', () => {})
    return client
  }
  const held = Array.from({ length: 4 }, ask)
  while (silent.sockets.length < 4) await new Promise((resolve) => setTimeout(resolve, 5))
  for (let n = 0; n < 50; n++) {
    const client = ask()
    const answer = await readAnswer(client)
    client.destroy()
    if (n > 0) continue
    t.match(problemOf(answer), { code: 'overloaded', status: 503, retry: 'same-key' })
    t.match(values(answer, 'retry-after'), ['1'])
  }
  t.equal(silent.sockets.length, 4)
  for (const client of held) client.destroy()
  await until(() => silent.sockets.every(({ destroyed }) => destroyed))
  const again = ask()
  while (silent.sockets.length < 5) await new Promise((resolve) => setTimeout(resolve, 5))
  again.destroy()
})

void t.test('M10 a handshake with a Trailer line is tunnelled without it', async (t) => {
  await using server = await echo()
  await using proxy = await proxyBefore(server)
  const client = dial(proxy.port, `GET /x HTTP/1.1\r\nHost: a\r\nTrailer: x\r\n${HANDSHAKE}\r\n\r\n`)
  t.match(String((await once(client, 'data'))[0]), /^HTTP\/1.1 101 /)
  client.destroy()
  t.notOk(server.handshakes[0]?.some((name) => /^trailer$/i.test(name)))
})

void t.test('V10 one address cannot take every tunnel', async (t) => {
  await using silent = await tcpStub((socket) => void socket.resume())
  await using proxy = await proxyBefore(silent, { upstream: 'connections: 64' })
  const ask = (localAddress: string): Socket => {
    const client = connect({ port: proxy.port, host: '127.0.0.1', localAddress })
    client.on('error', () => {})
    client.write(get('/ws', HANDSHAKE))
    return client
  }
  const held = Array.from({ length: 60 }, () => ask('127.0.0.1'))
  while (silent.sockets.length < 60) await new Promise((resolve) => setTimeout(resolve, 5))
  const excess = ask('127.0.0.1')
  t.match(problemOf(await readAnswer(excess)), { code: 'overloaded', status: 503 })
  held.push(ask('127.0.0.2'))
  while (silent.sockets.length < 61) await new Promise((resolve) => setTimeout(resolve, 5))
  // A client that leaves makes room in the share.
  held[0]?.destroy()
  await until(() => silent.sockets.some(({ destroyed }) => destroyed))
  held.push(ask('127.0.0.1'))
  while (silent.sockets.length < 62) await new Promise((resolve) => setTimeout(resolve, 5))
  for (const client of [...held, excess]) client.destroy()
})
