import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import t from 'tap'
import { problemOf, proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { post, rawRequest, readAnswer } from '../support/raw.ts'
import { freePort } from '../support/redis.ts'
import { tcpStub, upstreamStub } from '../support/upstream.ts'

void t.test(
  'U05 an answer that the upstream breaks off never looks whole: by length, chunked, HTTP/1.0',
  async (t) => {
    for (const version of ['1.1', '1.0'])
      for (const head of [
        'Content-Length: 10\r\n\r\nabc',
        'Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n',
      ]) {
        await using peer = await scriptedPeer((socket) => {
          socket.write(`HTTP/1.1 200 OK\r\n${head}`)
          setTimeout(() => socket.destroy(), 20)
        })
        await using proxy = await proxyBefore(peer)
        const client = connect(proxy.port, '127.0.0.1')
        client.write(`GET / HTTP/${version}\r\nHost: a\r\n\r\n`)
        let got = ''
        let reset = false
        client.on('data', (chunk: Buffer) => {
          got += chunk.toString()
        })
        client.on('error', (error: NodeJS.ErrnoException) => {
          reset = error.code === 'ECONNRESET'
        })
        await new Promise((resolve) => client.once('close', resolve))
        t.match(got, 'abc')
        t.notMatch(got, /\r\n0\r\n/)
        t.ok(reset || /content-length: 10|chunked/i.test(got), 'the client can tell')
      }
  },
)

void t.test(
  'X01 a client that leaves before the head, in the answer or in the upload cancels the call',
  async (t) => {
    for (const [request, answer] of [
      ['GET /wait HTTP/1.1\r\nHost: a\r\n\r\n', ''],
      ['GET /some HTTP/1.1\r\nHost: a\r\n\r\n', 'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc'],
      ['POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc', ''],
    ] as const) {
      const arrived = Promise.withResolvers<Socket>()
      await using peer = await tcpStub((socket) => {
        socket.once('data', () => {
          if (answer !== '') socket.write(answer)
          arrived.resolve(socket)
        })
      })
      await using proxy = await proxyBefore(peer)
      const client = connect(proxy.port, '127.0.0.1')
      client.write(request)
      const upstream = await arrived.promise
      if (answer !== '') await once(client, 'data')
      const closed = once(upstream, 'close')
      client.destroy()
      await closed
      t.pass(request.slice(0, 10))
    }
  },
)

void t.test(
  'U02 a request that fails on a stale connection is not sent again, neither POST nor GET',
  async (t) => {
    for (const request of [post('/again', null, '{}'), 'GET /again HTTP/1.1\r\nHost: a\r\n\r\n']) {
      await using peer = await scriptedPeer((socket, got) => {
        if (got.includes('/again')) socket.destroy()
        else socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n')
      })
      await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
      await rawRequest(proxy.port, 'GET /warm HTTP/1.1\r\nHost: a\r\n\r\n')
      t.match(problemOf(await rawRequest(proxy.port, request)), { code: 'upstream_failed' })
      t.equal(peer.requests.filter((one) => one.includes('/again')).length, 1)
      t.equal((await rawRequest(proxy.port, 'GET /warm HTTP/1.1\r\nHost: a\r\n\r\n')).status, 200)
    }
  },
)

void t.test(
  'U07 an answer before the upload is whole arrives, and the connection is not reused',
  async (t) => {
    await using peer = await tcpStub((socket) => {
      socket.once('data', () => socket.write('HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno'))
    })
    await using proxy = await proxyBefore(peer)
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    client.write('POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nabc')
    const answer = await readAnswer(client)
    t.equal(answer.status, 413)
    t.equal(answer.body.toString(), 'no')
    t.same(values(answer, 'connection'), ['close'])
    client.destroy()
  },
)

void t.test('P27 pipelined pass-through requests are answered in order', async (t) => {
  await using upstream = await upstreamStub((seen, response) => void response.end(seen.target))
  await using proxy = await proxyBefore(upstream)
  const client = connect(proxy.port, '127.0.0.1')
  client.write(['/1', '/2', '/3'].map((target) => `GET ${target} HTTP/1.1\r\nHost: a\r\n\r\n`).join(''))
  for (const target of ['/1', '/2', '/3']) t.equal((await readAnswer(client)).body.toString(), target)
  client.destroy()
})

void t.test(
  'U01 U04 errors of the upstream are problems: 502 unreachable, 502 failed, 504 timeout',
  async (t) => {
    await using nobody = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
    t.match(problemOf(await rawRequest(nobody.port, 'GET / HTTP/1.1\r\nHost: a\r\n\r\n')), {
      type: 'urn:idempotency-proxy:upstream_unreachable',
      code: 'upstream_unreachable',
      status: 502,
    })
    t.match(problemOf(await rawRequest(nobody.port, post('/x', null, 'x'.repeat(10)))), {
      code: 'upstream_unreachable',
      retry: 'same-key',
      detail: 'no byte of the request was sent',
    })
    await using silent = await tcpStub(() => {})
    await using slow = await proxyBefore(silent, { upstream: 'timeout: 200ms' })
    t.match(problemOf(await rawRequest(slow.port, 'GET / HTTP/1.1\r\nHost: a\r\n\r\n')), {
      code: 'upstream_timeout',
      status: 504,
      retry: 'same-key',
    })
    // Nothing is recorded, so a retry may execute it again.
    t.match(problemOf(await rawRequest(slow.port, post('/x', null, '{}'))), {
      code: 'upstream_timeout',
      retry: 'no',
      detail: /a retry may execute it again/,
    })
    for (const bytes of ['', 'garbage\r\n\r\n', 'HTTP/1.1 200 OK\r\nX: \x01\r\n\r\n']) {
      await using peer = await scriptedPeer((socket) => void socket.end(bytes, 'latin1'))
      await using proxy = await proxyBefore(peer)
      for (const [request, retry] of [
        ['GET / HTTP/1.1\r\nHost: a\r\n\r\n', 'same-key'],
        [post('/x', null, '{}'), 'no'],
      ] as const)
        t.match(problemOf(await rawRequest(proxy.port, request)), {
          code: 'upstream_failed',
          status: 502,
          retry,
          detail: /^the request was sent, but the upstream closed the connection before a complete response/,
        })
      t.equal(peer.requests.length, 2, 'nothing is tried again')
    }
  },
)

void t.test(
  'U01 an upload to an unreachable upstream is answered, and the proxy keeps working',
  async (t) => {
    await using proxy = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
    const client = connect(proxy.port, '127.0.0.1')
    client.on('error', () => {})
    client.write('POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc')
    const answer = await readAnswer(client)
    t.match(problemOf(answer), { code: 'upstream_unreachable' })
    t.same(values(answer, 'connection'), ['close'])
    client.resume()
    await once(client, 'close')
    t.match(problemOf(await rawRequest(proxy.port, post('/x', null, '{}'))), { code: 'upstream_unreachable' })
  },
)

void t.test(
  'P15 P13 trailers of a pass-through answer lose hop-by-hop lines and the replay marker',
  async (t) => {
    await using peer = await scriptedPeer(
      (socket) =>
        void socket.write(
          'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\nIdempotent-Replayed: true\r\nKeep-Alive: x\r\n\r\n',
        ),
    )
    await using proxy = await proxyBefore(peer)
    const answer = await rawRequest(proxy.port, 'GET / HTTP/1.1\r\nHost: a\r\n\r\n')
    t.same(
      answer.trailers.map((part) => part.toLowerCase()),
      ['x-t', '1'],
    )
  },
)

void t.test('U01 a stalled upload is ended, and keeps no protected request waiting meanwhile', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
  await using proxy = await proxyBefore(upstream, { upstream: 'connections: 1, idleTimeout: 300ms' })
  const client = connect(proxy.port, '127.0.0.1')
  client.write('POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\na')
  const ended = readAnswer(client)
  t.equal((await rawRequest(proxy.port, post('/p', 'key-1', '{}'))).status, 201, 'other connections')
  const answer = await ended
  t.match(problemOf(answer), { code: 'request_timeout', status: 408, retry: 'same-key' })
  client.destroy()
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'U01 an upload given up while it waits behind another answer does not crash the proxy',
  async (t) => {
    const slow = Promise.withResolvers<Socket>()
    await using peer = await tcpStub((socket) => {
      socket.on('error', () => {})
      socket.once('data', (request: Buffer) => {
        if (request.includes('/slow')) slow.resolve(socket)
        else socket.destroy()
      })
    })
    await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 100ms' })
    const client = connect(proxy.port, '127.0.0.1')
    client.write(
      'GET /slow HTTP/1.1\r\nHost: a\r\n\r\nPOST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc',
    )
    const upstream = await slow.promise
    await new Promise((resolve) => setTimeout(resolve, 500))
    upstream.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
    t.equal((await readAnswer(client)).body.toString(), 'ok')
    t.match(problemOf(await readAnswer(client)), { code: 'upstream_failed' })
    client.destroy()
  },
)

void t.test('U05 an answer that breaks off while it waits behind another ends the connection', async (t) => {
  await using peer = await scriptedPeer((socket, request) => {
    if (request.includes('/slow'))
      setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), 200)
    else {
      const type = request.includes('POST') ? 'Content-Type: text/event-stream\r\n' : ''
      socket.write(`HTTP/1.1 200 OK\r\n${type}Content-Length: 10\r\n\r\nabc`)
      setTimeout(() => socket.destroy(), 20)
    }
  })
  await using proxy = await proxyBefore(peer)
  for (const request of ['GET /cut HTTP/1.1\r\nHost: a\r\n\r\n', post('/p', 'k', '{}')]) {
    const client = connect(proxy.port, '127.0.0.1')
    client.write(`GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${request}`)
    t.equal((await readAnswer(client)).body.toString(), 'ok')
    const ended = Promise.race([
      once(client.resume(), 'close'),
      new Promise((resolve) => setTimeout(resolve, 2000, null)),
    ])
    t.not(await ended, null, 'the connection ends')
    client.destroy()
  }
})

void t.test(
  'U05 an answer that waits for its turn is whole if the upstream closes, and broken if it resets',
  async (t) => {
    const SIZE = 120_000
    const body = 'x'.repeat(SIZE)
    for (const [name, head, ends] of [
      ['closed, with a length', `Content-Length: ${SIZE}\r\nConnection: close\r\n`, 'end'],
      ['closed, without a length', 'Connection: close\r\n', 'end'],
      ['closed, though keep-alive', `Content-Length: ${SIZE}\r\n`, 'end'],
      ['reset, without a length', 'Connection: close\r\n', 'resetAndDestroy'],
    ] as const) {
      await using peer = await scriptedPeer((socket, request) => {
        if (request.includes('/slow'))
          setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), 300)
        else {
          socket.write(`HTTP/1.1 200 OK\r\n${head}\r\n${body}`)
          if (ends === 'end') socket.end()
          else setTimeout(() => socket.resetAndDestroy(), 100)
        }
      })
      await using proxy = await proxyBefore(peer, { more: 'limits: { response: 64KiB }' })
      for (const request of ['GET /big HTTP/1.1\r\nHost: a\r\n\r\n', post('/p', 'k', '{}')]) {
        const client = connect(proxy.port, '127.0.0.1')
        // Nobody reads an answer that waits for its turn.
        client.write(`GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${request}`)
        t.equal((await readAnswer(client)).body.toString(), 'ok')
        if (ends === 'end') t.equal((await readAnswer(client)).body.length, SIZE, `${name}: whole`)
        else await t.rejects(readAnswer(client), `${name}: not taken for whole`)
        client.destroy()
      }
    }
  },
)

void t.test('U05 an answer without a length that ends in a reset is not taken for whole', async (t) => {
  await using peer = await scriptedPeer((socket) => {
    socket.write('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc')
    setTimeout(() => socket.resetAndDestroy(), 50)
  })
  await using proxy = await proxyBefore(peer)
  await t.rejects(rawRequest(proxy.port, 'GET / HTTP/1.1\r\nHost: a\r\n\r\n'))
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k', '{}'))), { code: 'upstream_failed' })
})

void t.test('U01 an upload refused for stalling gets no late answer', async (t) => {
  await using peer = await tcpStub((socket) => {
    socket.on('error', () => {})
    socket.once('data', (request: Buffer) => {
      const later = request.includes('/slow') ? 800 : 500
      setTimeout(() => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'), later)
    })
  })
  await using proxy = await proxyBefore(peer, { upstream: 'idleTimeout: 200ms' })
  const client = connect(proxy.port, '127.0.0.1')
  // The refusal waits for its turn, and meanwhile the upstream answers.
  client.write(
    'GET /slow HTTP/1.1\r\nHost: a\r\n\r\nPOST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc',
  )
  t.equal((await readAnswer(client)).body.toString(), 'ok')
  t.match(problemOf(await readAnswer(client)), { code: 'request_timeout' })
  client.destroy()
  t.notOk(proxy.log.some(({ msg }) => msg === 'internal error'))
})
