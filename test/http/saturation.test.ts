import { once } from 'node:events'
import { type Socket } from 'node:net'
import t from 'tap'
import { gate, until } from '../support/e2e.ts'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { dial, get, post, rawRequest, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

function open(port: number, bytes: string): Socket {
  return dial(port, bytes).on('error', () => {})
}

const stub = () => upstreamStub((_, response) => void response.writeHead(201).end('ok'))

/** All but the last byte of a keyed POST. */
function short(key: string, size: number, more: readonly string[] = []): string {
  return post('/p', key, 'x'.repeat(size), more).slice(0, -1)
}

void t.test('X02 requests that wait for their body take no place of limits.inFlight', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { more: 'limits: { inFlight: 3 }' })
  const clients = Array.from({ length: 20 }, (_, n) =>
    open(proxy.port, post('/p', `slow${n}`, '').replace('Content-Length: 0', 'Content-Length: 10')),
  )
  for (let n = 0; n < 5; n++)
    t.equal((await rawRequest(proxy.port, post('/p', `k${n}`, '{}'))).status, 201, 'others are served')
  clients[0]?.write('0123456789')
  t.equal((await readAnswer(clients[0] as Socket)).status, 201)
  for (const client of clients) client.destroy()
})

void t.test('X02 stalled uploads make room for others, and no answer is lost to them', async (t) => {
  await using upstream = await upstreamStub(
    (_, response) => void response.writeHead(201).end('y'.repeat(5000)),
  )
  await using proxy = await proxyBefore(upstream, {
    more: 'limits: { request: 8KiB, response: 8KiB, buffered: 64KiB }',
  })
  const clients = Array.from({ length: 9 }, (_, n) => open(proxy.port, short(`slow${n}`, 8192)))
  await until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 50_000)
  await until(async () => (await rawRequest(proxy.port, post('/p', 'other', '{}'))).status === 201)
  t.equal((await rawRequest(proxy.port, post('/p', 'other', '{}'))).body.length, 5000, 'it was stored')
  // Those that were given up get a refusal; the others go on.
  const answers = await Promise.all(
    clients.map((client) => {
      client.write('x')
      return readAnswer(client)
    }),
  )
  const given = answers.filter(({ status }) => status === 503)
  t.ok(given.length > 0)
  for (const one of given) t.match(problemOf(one), { code: 'overloaded', retry: 'same-key' })
  t.ok(answers.every(({ status }) => status === 503 || status === 201))
  for (const client of clients) client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('X02 uploads that make progress are not given up for others', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, {
    more: 'limits: { request: 40KiB, response: 8KiB, buffered: 64KiB }',
  })
  // The first scrape loads code, which may take longer than an upload may stall.
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  const steady = open(proxy.port, post('/p', 'steady', 'x'.repeat(40_960)).slice(0, -36_864))
  const stalled = open(proxy.port, short('stalled', 30_000))
  await until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 33_000)
  for (let n = 0; n < 8; n++) {
    steady.write('x'.repeat(4096))
    await new Promise((resolve) => setTimeout(resolve, 150))
  }
  steady.write('x'.repeat(4096))
  t.equal((await readAnswer(steady)).status, 201)
  t.match(problemOf(await readAnswer(stalled)), { code: 'overloaded' })
  steady.destroy()
  stalled.destroy()
})

for (const [who, line] of [
  ['address', (n: number): string => `X-Forwarded-For: 10.0.0.${n}`],
  ['caller', (n: number): string => `Authorization: Bearer ${n}`],
] as const)
  void t.test(`X02 one ${who} cannot take all places of limits.inFlight`, async (t) => {
    const held = gate()
    await using upstream = await upstreamStub(async (_, response) => {
      await held.opened
      response.writeHead(201).end('ok')
    })
    await using proxy = await proxyBefore(upstream, {
      more: 'limits: { inFlight: 64 }\ntrustProxy: [127.0.0.0/8]',
    })
    let sent = 0
    const send = (n: number) => {
      // The other of the two differs each time.
      const other =
        who === 'address' ? `Authorization: Bearer o${++sent}` : `X-Forwarded-For: 10.9.${++sent}.1`
      return rawRequest(proxy.port, post('/p', `k${sent}`, '{}', [line(n), other]))
    }
    const running = Array.from({ length: 60 }, () => send(1))
    t.match(await Promise.race([upstream.arrived(60), ...running]), { method: 'POST' }, 'nobody is refused')
    t.match(problemOf(await send(1)), { code: 'overloaded', status: 503, retry: 'same-key' })
    const others = Array.from({ length: 4 }, () => send(2))
    await upstream.arrived(64)
    t.match(problemOf(await send(3)), { code: 'overloaded' })
    held.open()
    for (const answer of await Promise.all([...running, ...others])) t.equal(answer.status, 201)
  })

void t.test('X02 one address cannot take all of limits.buffered, though a single body may', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, {
    more: 'limits: { request: 64KiB, response: 8KiB, buffered: 64KiB, upload: 60s }\ntrustProxy: [127.0.0.0/8]',
  })
  t.equal((await rawRequest(proxy.port, post('/p', 'whole', 'x'.repeat(65_000)))).status, 201)
  const from = (address: string): string[] => [`X-Forwarded-For: ${address}`]
  // The first scrape loads code, which may take longer than an upload may stall.
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  const first = open(proxy.port, short('first', 40_000, from('10.0.0.1')))
  await metricIs(proxy, 'idempotency_buffered_bytes', 39_999)
  const [greedy, other] = await Promise.all([
    rawRequest(proxy.port, post('/p', 'greedy', 'x'.repeat(22_000), from('10.0.0.1'))),
    rawRequest(proxy.port, post('/p', 'other', 'x'.repeat(3000), from('10.0.0.2'))),
  ])
  t.match(problemOf(greedy), { code: 'overloaded' })
  t.equal(other.status, 201)
  first.write('x')
  t.equal((await readAnswer(first)).status, 201)
  first.destroy()
})

void t.test('X02 creeping uploads make room for others when none is stalled', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, {
    more: 'limits: { request: 800KiB, response: 8KiB, buffered: 1MiB, upload: 60s }\ntrustProxy: [127.0.0.0/8]',
  })
  const from = (address: string): string[] => [`X-Forwarded-For: ${address}`]
  const creeping = [1, 2].map((n) =>
    open(proxy.port, post('/p', `creeps${n}`, 'x'.repeat(700_000), from(`10.0.0.${n}`)).slice(0, -300_000)),
  )
  const drip = setInterval(() => {
    for (const client of creeping) client.write('x'.repeat(4200))
  }, 300)
  await until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 850_000)
  const statuses: number[] = []
  while (statuses.length < 6 && statuses.at(-1) !== 201) {
    const large = post('/p', 'large', 'x'.repeat(300_000), from('10.0.0.3'))
    statuses.push((await rawRequest(proxy.port, large)).status)
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
  clearInterval(drip)
  t.equal(statuses.at(-1), 201, `after ${statuses.join()}`)
  for (const client of creeping) client.destroy()
})

const FILLER = 'x'.repeat(1300)
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
  const fillers = ['f0', 'f1', 'f2'].map((key) => open(proxy.port, post('/p', key, FILLER).slice(0, -100)))
  await metricIs(proxy, 'idempotency_buffered_bytes', 3600)
  const refused = await rawRequest(proxy.port, post('/p', 'k', body))
  t.match(problemOf(refused), { code: 'overloaded', status: 503, retry: 'same-key' })
  t.match(values(refused, 'retry-after')[0], /^[1-9]\d*$/)
  t.equal(peer.requests.length, 0)
  const executed = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  t.equal(executed.status, 201)
  t.equal(executed.body.length, 5000, 'the first client gets all of it')
  const done = { code: 'idempotency_response_unavailable', originalStatus: 201, location: '/done' }
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), done)
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
  const client = open(proxy.port, post('/p', 'f', FILLER).slice(0, -100))
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
  const clients = ['k0', 'k1', 'k2', 'k3', 'k4'].map((key) =>
    open(proxy.port, post('/p', key, 'x'.repeat(9), [`Authorization: Bearer ${token}`]).slice(0, -9)),
  )
  await asked.promise
  await metricIs(proxy, 'idempotency_in_flight', 5)
  for (const client of clients) client.destroy()
  letGo.resolve()
  // Without waiting for limits.upload, which is 30 s.
  await metricIs(proxy, 'idempotency_in_flight', 0)
  t.equal(peer.requests.length, 0)
})

const LARGE = Buffer.alloc(16 * 1024 ** 2, 'x')

/** A client that reads a piece now and then until the connection ends. Resolves with the number of bytes read. */
async function trickle(client: Socket, piece: number, pause: number): Promise<number> {
  let got = 0
  client.on('error', () => {})
  client.on('readable', () => {})
  while (!client.destroyed && !client.readableEnded) {
    got += (client.read(piece) as Buffer | null)?.length ?? 0
    await new Promise((resolve) => setTimeout(resolve, pause))
  }
  return got
}

/** Bytes of the answer, head and body; the connection ends with it. */
async function sizeOf(port: number, request: string): Promise<number> {
  const client = dial(port, request.replace('Host:', 'Connection: close\r\nHost:'))
  let got = 0
  for await (const chunk of client) got += (chunk as Buffer).length
  return got
}

void t.test('V10 a replay read a little at a time is cut off and frees its bytes', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.end(LARGE))
  await using proxy = await proxyBefore(upstream, {
    upstream: 'idleTimeout: 250ms',
    more: 'limits: { response: 32MiB, buffered: 64MiB }',
  })
  t.ok((await sizeOf(proxy.port, post('/p', 'k', '{}'))) > LARGE.length)
  const client = dial(proxy.port, post('/p', 'k', '{}'))
  // Some progress within each idle time.
  t.ok((await trickle(client, 16 * 1024, 20)) < LARGE.length)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  t.ok((await sizeOf(proxy.port, post('/p', 'k', '{}'))) > LARGE.length, 'a retry gets it')
})

void t.test('V10 whole answers that nobody reads make room for others', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.end(LARGE))
  await using proxy = await proxyBefore(upstream, {
    more: 'limits: { response: 32MiB, request: 1MiB, buffered: 40MiB }',
  })
  t.ok((await sizeOf(proxy.port, post('/p', 'k', '{}'))) > LARGE.length)
  const clients = [1, 2].map(() => open(proxy.port, post('/p', 'k', '{}')))
  await metricIs(proxy, 'idempotency_buffered_bytes', 2 * LARGE.length)
  await until(async () => (await sizeOf(proxy.port, post('/p', 'k', '{}'))) > LARGE.length)
  for (const client of clients) client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

t.test('V10 a pass-through answer read bit by bit is cut off and frees its connection', async (t) => {
  await using upstream = await upstreamStub(({ target }, response) => {
    response.on('error', () => {})
    response.end(target === '/large' ? LARGE : 'ok')
  })
  await using proxy = await proxyBefore(upstream, { upstream: 'connections: 1, idleTimeout: 200ms' })
  const client = dial(proxy.port, get('/large'))
  await once(client, 'readable')
  const reading = trickle(client, 1024, 20)
  t.ok((await sizeOf(proxy.port, get('/other'))) > 0)
  client.destroy()
  t.ok((await reading) < LARGE.length)
})
