import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import t from 'tap'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { BEHIND_FRONT } from '../support/front.ts'
import { http1Test } from '../support/http1-test.ts'
import { dial, post, rawRequest, readAnswer } from '../support/raw.ts'
import { twice } from '../support/twice.ts'

t.setTimeout(300_000)

async function piece(socket: Socket): Promise<string> {
  const [chunk] = (await once(socket, 'data')) as [Buffer]
  return chunk.toString('latin1')
}

t.test('P16 statusHeader: Idempotency-Expires is one on the first answer and on the replay', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n')
  await using proxy = await proxyBefore(peer, {
    routes: '{ name: r, match: { path: /p }, statusHeader: true, ttl: 2h }',
  })
  const before = Date.now()
  const live = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  const replay = await rawRequest(proxy.port, post('/p', 'k', '{}'))
  const ignored = await rawRequest(proxy.port, post('/p', null, '{}'))
  t.same(values(live, 'idempotency-status'), ['executed'])
  t.same(values(replay, 'idempotency-status'), ['replayed'])
  t.same(values(ignored, 'idempotency-status'), ['ignored'])
  const [expires = ''] = values(live, 'idempotency-expires')
  t.match(expires, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/)
  t.ok(Date.parse(expires) >= before + 7_200_000 && Date.parse(expires) <= Date.now() + 7_200_000)
  t.same(values(replay, 'idempotency-expires'), [expires])
  t.same(values(ignored, 'idempotency-expires'), [])
})

t.test('P19 a response at the limit is kept; one byte more passes live, in each framing', async (t) => {
  const framed = (size: number, chunked: boolean): string =>
    chunked
      ? `Transfer-Encoding: chunked\r\n\r\n${size.toString(16)}\r\n${'x'.repeat(size)}\r\n0\r\n\r\n`
      : `Content-Length: ${size}\r\n\r\n${'x'.repeat(size)}`
  const limit = 'limits: { response: 64KiB }'
  for (const chunked of [false, true]) {
    const { live } = await twice(t, `HTTP/1.1 201 Created\r\n${framed(65_536, chunked)}`, { more: limit })
    t.equal(live.body.length, 65_536)
    await using peer = await answering(`HTTP/1.1 201 Created\r\nLocation: /big\r\n${framed(65_537, chunked)}`)
    await using proxy = await proxyBefore(peer, { more: limit })
    const over = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    t.equal(over.body.length, 65_537, 'the first client gets all of it')
    await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
    const retry = await rawRequest(proxy.port, post('/p', 'k', '{}'))
    const done = { code: 'idempotency_response_unavailable', originalStatus: 201, location: '/big' }
    t.match(problemOf(retry), done)
    t.equal(peer.requests.length, 1, 'N=1')
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  }
})

t.test('P21 events reach the client as they are sent; a retry learns that it was done', async (t) => {
  let upstream: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    upstream = socket
    const head = 'Content-Type: text/event-stream; charset=utf-8\r\nLocation: /s\r\nX-L: \xe9\r\n'
    socket.write(`HTTP/1.1 200 OK\r\n${head}`, 'latin1')
    socket.write('Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n')
  })
  await using proxy = await proxyBefore(peer)
  const client = dial(proxy.port, post('/p', 'k', '{}'))
  let got = ''
  while (!got.includes('data: 1\n\n')) got += await piece(client)
  t.match(got, /^HTTP\/1.1 200 OK\r\n/)
  t.match(got, /X-L: \xe9\r\n/i)
  const running = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
  t.equal(running.code, 'idempotency_key_in_progress')
  upstream?.write('9\r\ndata: 2\n\n\r\n0\r\n\r\n')
  while (!got.endsWith('0\r\n\r\n')) got += await piece(client)
  t.match(got, 'data: 2\n\n')
  client.destroy()
  await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
  const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
  t.match(retry, { code: 'idempotency_response_unavailable', originalStatus: 200, location: '/s' })
  t.equal(peer.requests.length, 1)
})

void t.test('U05 a broken live answer is never ended cleanly, and its record is unknown', async (t) => {
  for (const version of ['1.1', '1.0']) {
    let upstream: Socket | undefined
    await using peer = await scriptedPeer((socket) => {
      upstream = socket
      socket.write(
        'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n',
      )
    })
    await using proxy = await proxyBefore(peer)
    const client = dial(proxy.port, post('/p', 'k', '{}').replace('HTTP/1.1', `HTTP/${version}`))
    let got = ''
    client.on('data', (chunk: Buffer) => {
      got += chunk.toString()
      if (got.includes('one')) upstream?.destroy()
    })
    const how = await once(client, 'end').then(
      () => 'end',
      (error: NodeJS.ErrnoException) => error.code,
    )
    t.match(got, 'one')
    // Without chunks only a reset shows that the body is not whole.
    if (version === '1.0') t.equal(how, 'ECONNRESET')
    else t.notMatch(got, /\r\n0\r\n/)
    const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
    t.match(retry, { code: 'idempotency_outcome_unknown', status: 409 })
    t.equal(peer.requests.length, 1)
  }
})

t.test('P19 a client that reads too slowly is dropped, and the upstream is read to the end', async (t) => {
  const size = 64 * 1024 * 1024
  const sent = Promise.withResolvers<void>()
  await using peer = await scriptedPeer((socket) => {
    socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${size}\r\n\r\n`)
    const piece = Buffer.alloc(1024 * 1024)
    let left = size
    const more = (): void => {
      while (left > 0) {
        left -= piece.length
        if (!socket.write(piece)) {
          socket.once('drain', more)
          return
        }
      }
      sent.resolve()
    }
    more()
  })
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 300ms' })
  const client = dial(proxy.port, post('/p', 'k', '{}')).on('error', () => {})
  await once(client, 'readable')
  await sent.promise
  await metricIs(proxy, 'idempotency_completions_total{route="r",result="too_large"}', 1)
  const retry = problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}')))
  t.match(retry, { code: 'idempotency_response_unavailable', originalStatus: 200 })
  client.resume()
  await new Promise((resolve) => client.once('close', resolve))
  t.ok(client.bytesRead < size, 'it was dropped')
})

t.test('P19 a replay to a client that stops reading is dropped, too', { skip: BEHIND_FRONT }, async (t) => {
  const size = 32 * 1024 * 1024
  await using peer = await answering(`HTTP/1.1 200 OK\r\nContent-Length: ${size}\r\n\r\n${'x'.repeat(size)}`)
  await using proxy = await proxyBefore(peer, {
    upstream: 'idleTimeout: 300ms',
    more: 'limits: { response: 33MiB }',
  })
  const first = dial(proxy.port, post('/p', 'k', '{}').replace('Host', 'Connection: close\r\nHost'))
  first.resume()
  await once(first, 'end')
  t.ok(first.bytesRead > size, 'the first answer was read whole')
  const client = dial(proxy.port, post('/p', 'k', '{}')).on('error', () => {})
  await once(client, 'readable')
  const rest = new Promise((resolve) => client.once('close', resolve))
  // The socket is gone on the proxy's side before anything more is read here.
  while ((await connections(proxy.port)) > 1) await new Promise((resolve) => setTimeout(resolve, 20))
  client.resume()
  await rest
  t.ok(client.bytesRead < size)

  /** Established connections to the port, this one's question included. */
  async function connections(port: number): Promise<number> {
    const { readFile } = await import('node:fs/promises')
    const hex = `:${port.toString(16).toUpperCase().padStart(4, '0')}`
    const rows = (await readFile('/proc/net/tcp', 'utf8')).split('\n').map((row) => row.trim().split(/\s+/))
    // Local address of the server's side, state 01 (established).
    return rows.filter(([, local, , state]) => local?.endsWith(hex) && state === '01').length + 1
  }
})

void t.test('P27 requests on one connection stay independent, whether kept alive or pipelined', async (t) => {
  await using peer = await scriptedPeer((socket, request) => {
    const key = /idempotency-key: (\S+)/i.exec(request)?.[1] ?? 'none'
    socket.write(`HTTP/1.1 201 Created\r\nX-Key: ${key}\r\nContent-Length: ${key.length}\r\n\r\n${key}`)
  })
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  for (const key of ['a1', 'a2', 'a1']) {
    client.write(post('/p', key, '{}'))
    t.equal((await readAnswer(client)).body.toString(), key)
  }
  const pipelined = ['b1', 'b2', 'a2', null, 'b1', 'b3']
  client.write(pipelined.map((key) => post('/p', key, '{}')).join(''))
  for (const [i, key] of pipelined.entries()) {
    const { status, body } = await readAnswer(client)
    // The second b1 meets the first one finished or still running; it is answered in its turn either way.
    if (i === 4 && status === 409) t.match(body.toString(), 'idempotency_key_in_progress')
    else t.equal(body.toString(), key ?? 'none')
  }
  client.destroy()
  const ran = peer.requests.filter((request) => /idempotency-key: b1/i.test(request))
  t.equal(ran.length, 1)
})

http1Test('P27 an answered connection is kept alive for the next request', async (t) => {
  await using peer = await answering('HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok')
  await using proxy = await proxyBefore(peer)
  const client = dial(proxy.port, post('/p', 'k', '{}'))
  const first = await readAnswer(client)
  t.same(values(first, 'connection'), ['keep-alive'])
  client.write(post('/p', 'k', '{}'))
  t.equal((await readAnswer(client)).status, 201)
  client.destroy()
})
