import { once } from 'node:events'
import { type Socket } from 'node:net'
import t from 'tap'
import { gate } from '../support/e2e.ts'
import { metricIs, proxyBefore, values } from '../support/exchange.ts'
import { dial, everything, get, post, rawRequest, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const HANDSHAKE =
  'GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n'
const CONNECT = 'CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n'

function open(port: number, bytes: string): Socket {
  return dial(port, bytes).on('error', () => {})
}

for (const [name, last] of [
  ['a WebSocket handshake', HANDSHAKE],
  ['CONNECT', CONNECT],
] as const)
  t.test(`V10 a client that pipelines ${name} behind slow answers and leaves holds nothing`, async (t) => {
    const large = Buffer.alloc(4 * 1024 ** 2, 'x')
    const held = gate()
    await using upstream = await upstreamStub(async ({ target }, response) => {
      if (target === '/slow') await held.opened
      response.end(large)
    })
    await using proxy = await proxyBefore(upstream, {
      upstream: 'connections: 4',
      more: 'limits: { buffered: 24MiB }',
    })
    t.equal((await rawRequest(proxy.port, post('/p', 'stored', '{}'))).status, 200)
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    const replay = post('/p', 'stored', '{}')
    for (let round = 0; round < 1; round++)
      for (const first of [
        get('/slow'),
        get('/large'),
        get('/large') + get('/slow'),
        replay,
        replay.repeat(3),
        post('/p', `slow-${round}`, '{}'),
        get('/large') + replay,
      ]) {
        const client = open(proxy.port, first + last)
        // Nobody reads an answer, so each is under way or cut off.
        await new Promise((resolve) => setTimeout(resolve, 20))
        client.destroy()
      }
    held.open()
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    await metricIs(proxy, 'idempotency_in_flight', 0)
    // Every upstream slot is free.
    const answers = await Promise.all(
      Array.from({ length: 8 }, (_, n) =>
        rawRequest(proxy.port, n % 2 ? get('/') : post('/p', `k${n}`, '{}')),
      ),
    )
    t.ok(answers.every(({ status }) => status === 200))
  })

void t.test('V10 a handshake behind an unanswered request does not overtake its answer', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target, headers }, response) => {
    if (target === '/slow') await held.opened
    const upgrade = headers.some((name) => name.toLowerCase() === 'upgrade')
    response.writeHead(upgrade ? 500 : 200).end(target)
  })
  await using proxy = await proxyBefore(upstream)
  const client = open(proxy.port, get('/slow') + get('/after') + HANDSHAKE)
  await upstream.arrived(1)
  held.open()
  for (const target of ['/slow', '/after', '/ws']) {
    const { status, body } = await readAnswer(client)
    t.strictSame([status, body.toString()], [200, target])
  }
  await once(client.resume(), 'close')
})

void t.test('V10 CONNECT alone is refused, and the connection ends', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.end())
  await using proxy = await proxyBefore(upstream)
  t.match(await everything(proxy.port, CONNECT), /^HTTP\/1.1 501 /)
})

void t.test('V10 one connection takes one place of limits.inFlight, however much it pipelines', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/held') await held.opened
    response.writeHead(201).end('ok')
  })
  await using proxy = await proxyBefore(upstream, { more: 'limits: { inFlight: 10 }' })
  const keyed = Array.from({ length: 300 }, (_, n) => post(n === 0 ? '/held' : '/p', `k${n}`, '{}'))
  const client = open(proxy.port, keyed.join(''))
  await upstream.arrived(1)
  t.equal((await rawRequest(proxy.port, post('/p', 'other', '{}'))).status, 201)
  await metricIs(proxy, 'idempotency_in_flight', 1)
  held.open()
  for (let n = 0; n < keyed.length; n++) t.equal((await readAnswer(client)).status, 201)
  client.destroy()
  t.equal(upstream.seen.length, 301)
})

void t.test('V10 100,000 pipelined requests leave memory bounded and are answered in order', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/0') await held.opened
    response.end(target)
  })
  await using proxy = await proxyBefore(upstream)
  const before = process.memoryUsage().rss
  const client = open(proxy.port, Array.from({ length: 100_000 }, (_, n) => get(`/${n}`)).join(''))
  await upstream.arrived(1)
  // Long enough to read all of it if nothing stops the reading.
  await new Promise((resolve) => setTimeout(resolve, 500))
  const grown = (process.memoryUsage().rss - before) / 1024 ** 2
  t.ok(grown < 150, `${Math.round(grown)} MiB more`)
  held.open()
  const told: string[] = []
  for (let n = 0; n < 1500; n++) told.push((await readAnswer(client)).body.toString())
  client.destroy()
  t.strictSame(
    told,
    told.map((_, n) => `/${n}`),
  )
})

void t.test('V10 requests pipelined by a client that left are not executed', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/held') await held.opened
    response.end(target)
  })
  await using proxy = await proxyBefore(upstream)
  const client = open(proxy.port, get('/held') + post('/p', 'left', '{}') + get('/left'))
  await upstream.arrived(1)
  client.destroy()
  await metricIs(proxy, 'idempotency_requests_total{route="default",outcome="passed"}', 1)
  held.open()
  await rawRequest(proxy.port, get('/last'))
  t.strictSame(
    upstream.seen.map(({ target }) => target),
    ['/held', '/last'],
  )
})

t.test('V10 when many clients pipeline too far, some are cut off and another is served', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/held') await held.opened
    response.end(target)
  })
  await using proxy = await proxyBefore(upstream)
  const greedy = get('/held') + get('/').repeat(5000)
  const cut = Promise.withResolvers<void>()
  const clients = Array.from({ length: 20 }, () =>
    open(proxy.port, greedy).once('close', () => cut.resolve()),
  )
  await cut.promise
  t.equal((await rawRequest(proxy.port, get('/other'))).body.toString(), '/other')
  for (const client of clients) client.destroy()
  held.open()
})

void t.test('V10 a client that leaves is noticed, however far ahead it has pipelined', async (t) => {
  await using upstream = await upstreamStub(({ target }, response) => {
    // The others never get an answer.
    if (target === '/quick') response.end('quick')
  })
  await using proxy = await proxyBefore(upstream, { upstream: 'connections: 4, timeout: 600s' })
  const clients = Array.from({ length: 4 }, () => open(proxy.port, get('/never').repeat(18)))
  await upstream.arrived(4)
  for (const client of clients) client.resetAndDestroy()
  t.equal((await rawRequest(proxy.port, get('/quick'))).body.toString(), 'quick')
})

void t.test('V10 clients that pipeline far ahead are cut off before those that do not', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/held') await held.opened
    response.end(target)
  })
  await using proxy = await proxyBefore(upstream, { upstream: 'connections: 700' })
  const cut = Promise.withResolvers<void>()
  const greedy = Array.from({ length: 640 }, () =>
    open(proxy.port, get('/held').repeat(17)).once('close', () => cut.resolve()),
  )
  await cut.promise
  const client = open(proxy.port, get('/1') + get('/2'))
  for (const target of ['/1', '/2']) t.equal((await readAnswer(client)).body.toString(), target)
  for (const one of [...greedy, client]) one.destroy()
  held.open()
})

void t.test('V10 nothing is read behind an Upgrade that is not tunnelled', async (t) => {
  await using upstream = await upstreamStub(({ target }, response) => void response.end(target))
  await using proxy = await proxyBefore(upstream)
  for (const first of ['GET /1', 'POST /1', 'POST /p']) {
    const before = upstream.seen.length
    const head = `${first} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nIdempotency-Key: ${first}\r\n`
    const body = first.startsWith('POST') ? 'Content-Length: 3\r\n\r\nabc' : '\r\n'
    // The first part of the second request is lost; its second part must not be taken for another one.
    const client = open(proxy.port, `${head}${body}GET /2 HTTP/1.1\r\nHost: a\r\nX: `)
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString()
      if (!client.destroyed) client.write(get('/smuggled'))
    })
    await once(client, 'close')
    t.match(got, /^HTTP\/1.1 200 [^]*\r\nConnection: close\r\n/i)
    t.equal(upstream.seen.length, before + 1)
  }
})

const BEHIND = 'behind'
const CHUNKED = `Host: a\r\nTransfer-Encoding: chunked\r\nIdempotency-Key: ${BEHIND}\r\n\r\n`

/** Requests that cannot be read, and the status of their refusal; null: nothing shows that it is a request. */
const UNREADABLE: readonly (readonly [bytes: string, status: number | null])[] = [
  [`POST /p HTTP/1.1\r\n${CHUNKED}zz\r\n`, 400],
  [`POST /p HTTP/1.1\r\n${CHUNKED}2\r\nabc\r\n0\r\n\r\n`, 400],
  [`POST /p HTTP/1.1\r\n${CHUNKED}2\r\nab\r\n-1\r\n${post('/p', 'smuggled', '{}')}`, 400],
  [`POST /other HTTP/1.1\r\n${CHUNKED}fffffffffffffffff\r\n`, 400],
  [`POST /p HTTP/1.1\r\nExpect: 100-continue\r\n${CHUNKED}2\r\nabc\r\n`, 400],
  [`POST /p HTTP/1.1\r\n${CHUNKED}1;${'x'.repeat(20_000)}\r\na\r\n0\r\n\r\n`, 413],
  [CONNECT, 501],
  [`${CONNECT}${post('/p', 'smuggled', '{}')}`, 501],
  ['garbage\r\n\r\n', null],
  ['GET / HTTP/1.1\r\nX Y: 1\r\n\r\n', null],
  ['GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n', null],
  [`GET / HTTP/1.1\r\nHost: a\r\nX: ${'x'.repeat(20_000)}\r\n\r\n`, null],
]

void t.test('Y22 V10 what cannot be read behind an unanswered request costs no earlier answer', async (t) => {
  // More than the kernel takes of one that nobody reads.
  const large = Buffer.alloc(8 * 1024 ** 2, 'x')
  let held = gate()
  await using upstream = await upstreamStub(async ({ target }, response) => {
    await held.opened
    response.writeHead(201).end(target === '/large' ? large : target)
  })
  await using proxy = await proxyBefore(upstream)
  for (const [unreadable, status] of UNREADABLE)
    for (const how of ['at once', 'later', 'in pieces', 'behind two', 'behind a large one'] as const) {
      // One of each kind is enough.
      if (how === 'behind a large one' && ![CONNECT, UNREADABLE[0]?.[0]].includes(unreadable)) continue
      held = gate()
      const before = upstream.seen.length
      const keyed = post('/p', `first-${before}`, '{}')
      const bytes = unreadable.replaceAll(BEHIND, `${BEHIND}-${before}`)
      const first =
        keyed + (how === 'behind a large one' ? get('/large') : how === 'behind two' ? get('/second') : '')
      const client = open(proxy.port, how === 'later' ? first : first + (how === 'in pieces' ? '' : bytes))
      await upstream.arrived(before + 1)
      if (how === 'later') client.write(bytes)
      if (how === 'in pieces')
        for (let at = 0; at < bytes.length; at += 1 + (bytes.length >> 4)) {
          client.write(bytes.slice(at, at + 1 + (bytes.length >> 4)))
          await new Promise((resolve) => setImmediate(resolve))
        }
      // Reads what was sent behind it.
      await metricIs(proxy, 'idempotency_in_flight', 1)
      held.open()
      const name = `${how}: ${JSON.stringify(bytes.slice(0, 60))}`
      t.strictSame([(await readAnswer(client)).status], [201], name)
      if (how === 'behind a large one') {
        await new Promise((resolve) => setTimeout(resolve, 20))
        t.equal((await readAnswer(client)).body.length, large.length, name)
      }
      if (how === 'behind two') t.equal((await readAnswer(client)).body.toString(), '/second', name)
      const refused = status === null ? null : await readAnswer(client)
      t.equal(refused?.status ?? null, status, name)
      if (refused !== null) t.strictSame(values(refused, 'connection'), ['close'], name)
      if (!client.closed) await once(client.resume(), 'close')
      t.equal(upstream.seen.length - before, how.startsWith('behind') ? 2 : 1, name)
      const again = await rawRequest(proxy.port, keyed)
      t.strictSame(values(again, 'idempotent-replayed'), ['true'], name)
      const behind = await rawRequest(proxy.port, post('/p', `${BEHIND}-${before}`, '{}'))
      t.strictSame([behind.status, values(behind, 'idempotent-replayed')], [201, []], 'it claimed nothing')
      await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    }
})
