import { connect, type Socket } from 'node:net'
import t from 'tap'
import { gate, until } from '../support/e2e.ts'
import { metricIs, problemOf, proxyBefore } from '../support/exchange.ts'
import { post, rawRequest, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

function open(port: number, bytes: string): Socket {
  const client = connect(port, '127.0.0.1')
  client.on('error', () => {})
  client.write(bytes)
  return client
}

/** All but the last byte of a keyed POST. */
function short(key: string, size: number, more: readonly string[] = []): string {
  return post('/p', key, 'x'.repeat(size), more).slice(0, -1)
}

void t.test('X02 requests that wait for their body take no place of limits.inFlight', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
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
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
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
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
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
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end('ok'))
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
