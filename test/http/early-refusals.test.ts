import { once } from 'node:events'
import { createServer } from 'node:http'
import { type AddressInfo, connect, type Socket } from 'node:net'
import t from 'tap'
import { refusal } from '../../src/core/refusal.ts'
import { TrafficServer } from '../../src/http/connections.ts'
import { StreamRequest, type StreamResponse } from '../../src/http/request.ts'
import { ResponseWriter } from '../../src/http/write.ts'
import { metricIs, problemOf, proxyBefore, values } from '../support/exchange.ts'
import { dial, everything, get, post, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const REQUIRED = '{ name: r, match: { path: /p }, key: required, limits: { request: 1KiB } }'

function open(port: number): Socket {
  // Like a client that keeps sending after the proxy has ended its side.
  const client = connect({ port, host: '127.0.0.1', allowHalfOpen: true })
  client.on('error', () => {})
  return client
}

t.test('§6 a refusal before a small body was read keeps the connection, wherever it is cut', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  // The rest of the body looks like a request but is not one.
  const inner = post('/p', 'smuggled', 'x')
  const refusals = [
    { bytes: post('/p', null, inner), status: 400 },
    { bytes: post('/p', 'large', inner.repeat(20)), status: 413 },
  ]
  let n = 0
  for (const { bytes, status } of refusals) {
    const head = bytes.indexOf('\r\n\r\n') + 4
    for (const cut of [head, head + 1, head + inner.length, bytes.length - 1, bytes.length]) {
      const client = open(proxy.port)
      client.write(bytes.slice(0, cut))
      const refused = await readAnswer(client)
      t.strictSame([refused.status, values(refused, 'connection')], [status, ['keep-alive']])
      client.write(bytes.slice(cut) + post('/p', `k${++n}`, '{}'))
      t.equal((await readAnswer(client)).status, 201, `cut at ${cut - head} of the body`)
      client.destroy()
    }
  }
  t.equal(upstream.seen.length, 10)
  t.notOk(upstream.seen.some(({ headers }) => headers.includes('smuggled')))
})

t.test('§6 a refusal of a complete request keeps its connection as long as any other answer', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  const client = open(proxy.port)
  for (const body of ['{}', '']) {
    client.write(post('/p', null, body))
    t.equal((await readAnswer(client)).status, 400)
    // Longer than the proxy waits for the rest of a body.
    await new Promise((resolve) => setTimeout(resolve, 1200))
  }
  client.write(post('/p', 'k', '{}'))
  t.equal((await readAnswer(client)).status, 201)
  client.destroy()
})

void t.test('§6 the connection ends if the rest of a small body does not come', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  const client = open(proxy.port)
  client.write(post('/p', null, '{}').slice(0, -1))
  t.equal((await readAnswer(client)).status, 400)
  await once(client.resume(), 'end')
  client.destroy()
  t.equal(upstream.seen.length, 0)
})

for (const [what, framing, rest] of [
  ['large', `Content-Length: ${8 * 1024 ** 2}`, 'x'.repeat(8 * 1024 ** 2)],
  ['chunked', 'Transfer-Encoding: chunked', `100000\r\n${'x'.repeat(0x100000)}\r\n`],
] as const)
  t.test(`§6 a refusal before a ${what} body is read ends the connection`, async (t) => {
    await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
    await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
    for (let round = 0; round < 2; round++) {
      const client = open(proxy.port)
      client.write(`POST /p HTTP/1.1\r\nHost: a\r\n${framing}\r\n\r\n`)
      client.write(rest)
      // Everything is sent before anything is read.
      await new Promise((resolve) => setTimeout(resolve, 50))
      const refused = await readAnswer(client)
      t.match(problemOf(refused), { code: 'idempotency_key_missing' })
      t.strictSame(values(refused, 'connection'), ['close'])
      client.write(`${what === 'chunked' ? '0\r\n\r\n' : ''}${post('/p', 'behind', '{}')}`)
      // By its end, or by a reset.
      const ended = new Promise((resolve) => void client.resume().once('end', resolve).once('close', resolve))
      if (!client.readableEnded && !client.destroyed) await ended
      client.destroy()
    }
    await metricIs(proxy, 'idempotency_in_flight', 0)
    t.equal(upstream.seen.length, 0)
  })

void t.test('§6 a client that keeps sending for seconds can still read its refusal', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
  await using proxy = await proxyBefore(upstream, { routes: REQUIRED })
  const client = open(proxy.port)
  client.write(`POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: ${8 * 1024 ** 2}\r\n\r\n`)
  for (let n = 0; n < 25 && !client.destroyed; n++) {
    client.write('x'.repeat(65_536))
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  t.match(problemOf(await readAnswer(client)), { code: 'idempotency_key_missing' })
  client.destroy()
})

async function serving(
  answer: (request: StreamRequest, response: StreamResponse) => void,
  keepAliveTimeout = 60_000,
): Promise<{ port: number } & AsyncDisposable> {
  const server = createServer(
    { keepAliveTimeout, keepAliveTimeoutBuffer: 0, IncomingMessage: StreamRequest },
    answer,
  ).listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    port: (server.address() as AddressInfo).port,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

t.test('P27 the watch over a slow reader leaves the keep-alive timeout of its connection', async (t) => {
  const writer = new ResponseWriter('urn:x:', 60_000)
  await using server = await serving((request, response) => {
    request.resume().on('end', () => writer.problem(response, refusal('upstream_failed', 'x')))
  }, 300)
  const client = connect(server.port, '127.0.0.1')
  for (let i = 0; i < 2; i++) {
    client.write(post('/', null, '{}'))
    t.equal((await readAnswer(client)).status, 502)
  }
  client.resume()
  await once(client, 'end')
  t.pass('closed when idle')
  client.destroy()
})

void t.test('P24 a refusal before the upload is whole can be read, then the connection closes', async (t) => {
  const writer = new ResponseWriter('urn:x:', 60_000)
  await using server = await serving((_request, response) =>
    writer.problem(response, refusal('request_too_large', 'x')),
  )
  const client = dial(server.port, 'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n')
  const upload = setInterval(() => client.write(Buffer.alloc(1000)), 10)
  client.on('error', () => {})
  t.equal((await readAnswer(client)).status, 413)
  client.resume()
  await new Promise((resolve) => client.once('close', resolve))
  clearInterval(upload)
})

const UPGRADE = 'Connection: Upgrade\r\nUpgrade: websocket\r\n'

void t.test('a bug in any listener ends the connection and not the process', async (t) => {
  const bugs: unknown[] = []
  const wrong = (): never => {
    throw new Error('a bug')
  }
  const server = new TrafficServer({}, wrong, (error) => bugs.push(error))
  for (const event of ['upgrade', 'connect', 'checkContinue', 'checkExpectation']) server.on(event, wrong)
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  for (const request of [
    get('/'),
    `GET / HTTP/1.1\r\nHost: a\r\n${UPGRADE}\r\n`,
    'CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n',
    'PUT / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n',
    'PUT / HTTP/1.1\r\nHost: a\r\nExpect: more\r\nContent-Length: 1\r\n\r\n',
  ]) {
    bugs.length = 0
    t.equal(await everything(port, request), '', request)
    t.match(bugs, [{ message: 'a bug' }], request)
  }
  server.close()
  await once(server, 'close')
})
