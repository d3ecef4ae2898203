import { connect, type Socket } from 'node:net'
import t from 'tap'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

const OK = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'

void t.test('X02 limits.inFlight: requests beyond it are refused and not executed', async (t) => {
  const held: Socket[] = []
  await using peer = await scriptedPeer((socket) => void held.push(socket))
  await using proxy = await proxyBefore(peer, { more: 'limits: { inFlight: 2 }' })
  const running = ['a', 'b'].map((key) => rawRequest(proxy.port, post('/p', key, '{}')))
  while (peer.requests.length < 2) await new Promise((resolve) => setTimeout(resolve, 5))
  const refused = await rawRequest(proxy.port, post('/p', 'c', '{}'))
  t.match(problemOf(refused), { code: 'overloaded', status: 503, retry: 'same-key' })
  t.match(values(refused, 'retry-after')[0], /^[1-9]\d*$/)
  for (const socket of held) socket.write(OK)
  for (const answer of await Promise.all(running)) t.equal(answer.status, 201)
  t.equal(peer.requests.length, 2)
  t.equal((await rawRequest(proxy.port, post('/p', 'a', '{}'))).status, 201)
})

void t.test('X02 limits.buffered: a body without room is refused, an executed request never', async (t) => {
  const body = 'y'.repeat(600)
  await using peer = await scriptedPeer((socket) => {
    socket.write(`HTTP/1.1 201 Created\r\nLocation: /done\r\nContent-Length: 5000\r\n\r\n${'z'.repeat(5000)}`)
  })
  await using proxy = await proxyBefore(peer, {
    more: 'limits: { request: 2KiB, response: 4KiB, buffered: 4KiB }\nproblems: { baseUrl: "urn:idempotency-proxy:" }',
    routes: '{ name: r, match: { path: /p } }',
  })
  // The first scrape loads code, which may take longer than an upload may stall.
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  // Uploads under way fill the buffer.
  const fillers = Array.from({ length: 3 }, (_, i) => {
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    client.write(
      `POST /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: f${i}\r\nContent-Length: 1300\r\n\r\n${'x'.repeat(1200)}`,
    )
    return client
  })
  await metricIs(proxy, 'idempotency_buffered_bytes', 3600)
  const refused = await rawRequest(proxy.port, post('/p', 'k', body))
  t.match(problemOf(refused), { code: 'overloaded', status: 503, retry: 'same-key' })
  t.match(values(refused, 'retry-after')[0], /^[1-9]\d*$/)
  t.equal(peer.requests.length, 0)
  const executed = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.equal(executed.status, 201)
  t.equal(executed.body.length, 5000, 'the first client gets all of it')
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), {
    code: 'idempotency_response_unavailable',
    originalStatus: 201,
    location: '/done',
  })
  t.equal(peer.requests.length, 1)
  for (const client of fillers) client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('X02 a response without room is passed on live and recorded as done', async (t) => {
  await using peer = await answering(
    `HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\nfa0\r\n${'z'.repeat(4000)}\r\n0\r\n\r\n`,
  )
  await using proxy = await proxyBefore(peer, {
    more: 'limits: { request: 2KiB, response: 4000B, buffered: 4KiB }',
  })
  // The first scrape loads code, which may take longer than an upload may stall.
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  const client = connect(proxy.port, '127.0.0.1')
  client.on('error', () => {})
  client.write(
    `POST /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: f\r\nContent-Length: 1300\r\n\r\n${'x'.repeat(1200)}`,
  )
  await metricIs(proxy, 'idempotency_buffered_bytes', 1200)
  const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.equal(live.status, 201)
  t.equal(live.body.length, 4000)
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), {
    code: 'idempotency_response_unavailable',
  })
  t.equal(peer.requests.length, 1)
  client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('X02 clients that leave while their token is verified free their places', async (t) => {
  await using peer = await answering(OK)
  const asked = Promise.withResolvers<void>()
  const letGo = Promise.withResolvers<void>()
  await using keys = await upstreamStub(async (_seen, response) => {
    asked.resolve()
    await letGo.promise
    response.writeHead(200, { 'content-type': 'application/json' }).end('{"keys":[]}')
  })
  await using proxy = await proxyBefore(peer, {
    routes: `{ name: r, match: { path: /p }, scope: { caller: "jwt:sub", jwt: { jwks: "${keys.url}/jwks" } } }`,
  })
  const token = 'eyJhbGciOiJSUzI1NiIsImtpZCI6ImEifQ.eyJzdWIiOiIxIn0.AAAA'
  const clients = Array.from({ length: 5 }, (_, i) => {
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    client.write(
      `POST /p HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${token}\r\nIdempotency-Key: k${i}\r\nContent-Length: 9\r\n\r\n`,
    )
    return client
  })
  await asked.promise
  await metricIs(proxy, 'idempotency_in_flight', 5)
  for (const client of clients) client.destroy()
  letGo.resolve()
  // Without waiting for limits.upload, which is 30 s.
  await metricIs(proxy, 'idempotency_in_flight', 0)
  t.equal(peer.requests.length, 0)
})
