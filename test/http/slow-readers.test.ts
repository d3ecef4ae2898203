import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import t from 'tap'
import { until } from '../support/e2e.ts'
import { metricIs, proxyBefore } from '../support/exchange.ts'
import { post } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

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
  const client = connect(port, '127.0.0.1')
  client.write(request.replace('Host:', 'Connection: close\r\nHost:'))
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
  const client = connect(proxy.port, '127.0.0.1')
  client.write(post('/p', 'k', '{}'))
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
  const clients = [1, 2].map(() => {
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    client.write(post('/p', 'k', '{}'))
    return client
  })
  await metricIs(proxy, 'idempotency_buffered_bytes', 2 * LARGE.length)
  await until(async () => (await sizeOf(proxy.port, post('/p', 'k', '{}'))) > LARGE.length)
  for (const client of clients) client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test(
  'V10 a pass-through answer read a little at a time is cut off and frees its connection',
  async (t) => {
    await using upstream = await upstreamStub(({ target }, response) => {
      response.on('error', () => {})
      response.end(target === '/large' ? LARGE : 'ok')
    })
    await using proxy = await proxyBefore(upstream, { upstream: 'connections: 1, idleTimeout: 200ms' })
    const client = connect(proxy.port, '127.0.0.1')
    client.write('GET /large HTTP/1.1\r\nHost: a\r\n\r\n')
    await once(client, 'readable')
    const reading = trickle(client, 1024, 20)
    t.ok((await sizeOf(proxy.port, 'GET /other HTTP/1.1\r\nHost: a\r\n\r\n')) > 0)
    client.destroy()
    t.ok((await reading) < LARGE.length)
  },
)
