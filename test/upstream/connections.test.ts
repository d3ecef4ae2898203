import { once } from 'node:events'
import { createServer as createTls } from 'node:https'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import t from 'tap'
import { certificate } from '../support/certificates.ts'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer } from '../support/exchange.ts'
import { faulty, OK, poolWorks, REQUEST, seen, unknownNow } from '../support/faulty.ts'
import { post, type RawAnswer, rawRequest } from '../support/raw.ts'
import { freePort } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

void t.test('U01 a refused connection gets 502 and frees the key, and the retry executes', async (t) => {
  const port = await freePort()
  await using proxy = await proxyBefore({ url: `http://127.0.0.1:${port}` })
  const first = problemOf(await rawRequest(proxy.port, REQUEST))
  t.match(first, { code: 'upstream_unreachable', status: 502, retry: 'same-key', title: String })
  t.notMatch(JSON.stringify(first), /ECONNREFUSED|127\.0\.0\.1/, 'addresses are for operators')
  await proxy.logged(({ cause }) => /ECONNREFUSED/.test(String(cause)))
  t.equal(await proxy.metric('idempotency_completions_total{route="r",result="released"}'), 1)
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k-1', '{"a":2}'))), {
    code: 'idempotency_key_reused',
  })
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('ok'), port)
  t.equal((await rawRequest(proxy.port, REQUEST)).status, 201)
  t.equal((await rawRequest(proxy.port, REQUEST)).status, 201)
  t.equal(upstream.seen.length, 1, 'N=1')
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('U01 a name that does not resolve gets 502 and frees the key', async (t) => {
  await using proxy = await proxyBefore(
    { url: 'http://no-such-host.invalid:80' },
    { upstream: 'connectTimeout: 20s' },
  )
  for (let i = 0; i < 2; i++)
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), { code: 'upstream_unreachable', status: 502 })
  t.equal(await proxy.metric('idempotency_completions_total{route="r",result="released"}'), 2)
})

void t.test('U01 a connection that is not made in time gets 502 and frees the key', async (t) => {
  const server = createServer(() => {}).listen({ port: 0, host: '127.0.0.1', backlog: 1 })
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  const { spawn } = await import('node:child_process')
  server.close()
  // A process that listens and never accepts: SIGSTOP keeps the kernel's queue full.
  const child = spawn(process.execPath, [
    '-e',
    `require('net').createServer().listen({port:${port},host:'127.0.0.1',backlog:1},()=>console.log('up'))`,
  ])
  await once(child.stdout, 'data')
  child.kill('SIGSTOP')
  const fillers = Array.from({ length: 8 }, () => connect(port, '127.0.0.1').on('error', () => {}))
  await Promise.race(fillers.map((socket) => once(socket, 'connect')))
  await new Promise((resolve) => setTimeout(resolve, 200))
  await using proxy = await proxyBefore(
    { url: `http://127.0.0.1:${port}` },
    { upstream: 'connectTimeout: 300ms' },
  )
  const problem = problemOf(await rawRequest(proxy.port, REQUEST))
  t.match(problem, { code: 'upstream_unreachable', status: 502 })
  t.equal(await proxy.metric('idempotency_completions_total{route="r",result="released"}'), 1)
  for (const socket of fillers) socket.destroy()
  child.kill('SIGKILL')
})

void t.test('U01 a reset while connecting or right after leads to at most one execution', async (t) => {
  // Whether the request's first bytes were sent before the reset came is a race; the answer tells which.
  await using peer = await faulty((socket) => socket.resetAndDestroy())
  await using proxy = await proxyBefore(peer)
  const { code } = problemOf(await rawRequest(proxy.port, REQUEST))
  if (code === 'upstream_unreachable') t.equal((await rawRequest(proxy.port, REQUEST)).status, 201)
  else {
    t.equal(code, 'upstream_failed')
    await unknownNow(t, proxy)
  }
  t.ok(seen(peer.requests) <= 1)
  await poolWorks(t, proxy)
})

void t.test('U02 a connection closed at once is unknown, unless nothing was sent', async (t) => {
  await using peer = await faulty((socket) => socket.destroy())
  await using proxy = await proxyBefore(peer)
  const { code } = problemOf(await rawRequest(proxy.port, REQUEST))
  if (code === 'upstream_unreachable') t.equal((await rawRequest(proxy.port, REQUEST)).status, 201)
  else {
    t.equal(code, 'upstream_failed')
    await unknownNow(t, proxy)
  }
  t.ok(seen(peer.requests) <= 1)
  await poolWorks(t, proxy)
})

void t.test(
  'P09 an unsolicited 100 Continue is not an error, whole, in pieces, twice or with the answer',
  async (t) => {
    const interim = 'HTTP/1.1 100 Continue\r\n\r\n'
    const scripts: string[][] = [
      [interim, OK],
      [interim + OK],
      [interim + interim + OK],
      ['HTTP/1.0 100 Go On\r\nX: 1\r\n\r\n', OK],
      ['HTTP/1.1 100\r\n\r\n', OK],
    ]
    const all = interim + OK
    for (let i = 1; i < all.length; i++) scripts.push([all.slice(0, i), all.slice(i)])
    scripts.push(all.split(''))
    let script: string[] = []
    await using peer = await scriptedPeer((socket) => {
      socket.setNoDelay(true)
      const pieces = [...script]
      const next = (): void => {
        const piece = pieces.shift()
        if (piece !== undefined) socket.write(piece, () => setImmediate(next))
      }
      next()
    })
    // One connection: every request after the first reuses it.
    await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
    for (const [i, one] of scripts.entries()) {
      script = one
      const answer = await rawRequest(proxy.port, post('/p', `k-${i}`, '{}'))
      if (answer.status !== 201 || answer.body.toString() !== 'ok') t.fail(JSON.stringify(one))
    }
    t.equal(peer.requests.length, scripts.length)
    t.equal(peer.sockets.length, 1, 'the connection was kept')
  },
)

void t.test('U02 a request is not resent if the peer closes the kept connection it reuses', async (t) => {
  for (const how of ['end', 'destroy', 'reset'] as const) {
    await using peer = await scriptedPeer((socket, request) => {
      if (request.includes('k-1')) {
        if (how === 'end') socket.end()
        else if (how === 'destroy') socket.destroy()
        else socket.resetAndDestroy()
      } else socket.write(OK)
    })
    await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
    t.equal((await rawRequest(proxy.port, post('/p', 'before', '{}'))).status, 201)
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), { code: 'upstream_failed' })
    await unknownNow(t, proxy)
    t.equal(seen(peer.requests), 1, 'N=1')
    await poolWorks(t, proxy)
  }
})

void t.test(
  'U02 requests that race the close of an idle kept connection execute at most once per key',
  async (t) => {
    const requests = new Map<string, number>()
    await using peer = await scriptedPeer((socket, request) => {
      const key = /idempotency-key: (\S+)/i.exec(request)?.[1] as string
      requests.set(key, (requests.get(key) ?? 0) + 1)
      socket.write(OK)
      setImmediate(() => setImmediate(() => socket.end()))
    })
    await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
    for (let i = 0; i < 200; i++) {
      const answer = await rawRequest(proxy.port, post('/p', `r-${i}`, '{}'))
      if (answer.status === 201) continue
      const { code } = problemOf(answer)
      const retry: RawAnswer = await rawRequest(proxy.port, post('/p', `r-${i}`, '{}'))
      if (code === 'upstream_unreachable') continue
      t.match(problemOf(retry), { code: 'idempotency_outcome_unknown' })
    }
    t.ok(
      [...requests.values()].every((n) => n === 1),
      'no key executed twice',
    )
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  },
)

void t.test('U01 a request that gets no connection before its timeout is not sent', async (t) => {
  let held: Socket | undefined
  await using peer = await scriptedPeer((socket, request) => {
    if (request.includes('holder')) held = socket
    else socket.write(OK)
  })
  await using proxy = await proxyBefore(peer, { upstream: 'connections: 1, timeout: 500ms, idleTimeout: 5s' })
  const holder = rawRequest(proxy.port, post('/holder', 'holder-key', '{}'))
  while (peer.requests.length === 0) await new Promise((resolve) => setTimeout(resolve, 5))
  // A stream is not bounded by the timeout: it keeps the one connection.
  held?.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\n')
  const problem = problemOf(await rawRequest(proxy.port, REQUEST))
  t.match(problem, { code: 'upstream_unreachable', status: 502 })
  held?.write('ok')
  t.equal((await holder).status, 200)
  t.equal((await rawRequest(proxy.port, REQUEST)).status, 201, 'the retry executes')
  t.equal(seen(peer.requests), 1)
  await poolWorks(t, proxy)
})

void t.test(
  'U12 TLS: nothing is sent to a wrong certificate, a wrong name or a peer without TLS',
  async (t) => {
    using good = certificate('IP:127.0.0.1')
    using wrongName = certificate('DNS:elsewhere.test')
    using named = certificate('DNS:api.internal')
    const cases = [
      { server: good, ca: good, reached: true },
      { server: good, ca: null, reached: false },
      { server: good, ca: wrongName, reached: false },
      { server: wrongName, ca: wrongName, reached: false },
      { server: named, ca: named, reached: false },
      { server: named, ca: named, servername: 'api.internal', reached: true },
    ]
    for (const { server: own, ca, servername, reached } of cases) {
      let n = 0
      const server = createTls({ cert: own.cert, key: own.key }, (request, response) => {
        request.resume().on('end', () => {
          n++
          response.writeHead(201).end('ok')
        })
      }).listen(0, '127.0.0.1')
      await once(server, 'listening')
      const url = `https://127.0.0.1:${(server.address() as AddressInfo).port}`
      const tls = [
        ca === null ? '' : `ca: "${ca.certFile}"`,
        servername === undefined ? '' : `servername: ${servername}`,
      ]
      await using proxy = await proxyBefore(
        { url },
        { upstream: `tls: { ${tls.filter(Boolean).join(', ')} }` },
      )
      for (let i = 0; i < 2; i++) {
        const answer = await rawRequest(proxy.port, REQUEST)
        if (reached) t.equal(answer.status, 201)
        else t.match(problemOf(answer), { code: 'upstream_unreachable', status: 502 })
        const passed = await rawRequest(proxy.port, post('/other', null, '{}'))
        if (!reached) t.match(problemOf(passed), { code: 'upstream_unreachable', status: 502 })
      }
      t.equal(n, reached ? 3 : 0, 'N')
      server.closeAllConnections()
      server.close()
    }
    await using plain = await answering(OK)
    await using proxy = await proxyBefore(
      { url: plain.url.replace('http:', 'https:') },
      { upstream: 'connectTimeout: 500ms' },
    )
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), { code: 'upstream_unreachable' })
  },
)

void t.test(
  'U13 respondWithin: the client gets 504 upstream_slow, and the later answer is stored and replayed',
  async (t) => {
    let held: Socket | undefined
    await using peer = await scriptedPeer((socket) => {
      held = socket
    })
    await using proxy = await proxyBefore(peer, {
      routes: '{ name: r, match: { path: /p }, respondWithin: 150ms }',
    })
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), {
      code: 'upstream_slow',
      status: 504,
      retry: 'same-key',
    })
    t.match(problemOf(await rawRequest(proxy.port, REQUEST)), { code: 'idempotency_key_in_progress' })
    held?.write(OK)
    await metricIs(proxy, 'idempotency_completions_total{route="r",result="stored"}', 1)
    t.equal((await rawRequest(proxy.port, REQUEST)).body.toString(), 'ok')
    t.equal(peer.requests.length, 1)
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  },
)

void t.test('X01 when the client leaves, the call goes on and its answer is stored', async (t) => {
  let held: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    held = socket
  })
  await using proxy = await proxyBefore(peer)
  const client = connect(proxy.port, '127.0.0.1')
  client.write(REQUEST)
  while (peer.requests.length === 0) await new Promise((resolve) => setTimeout(resolve, 5))
  client.destroy()
  await once(client, 'close')
  held?.write(OK)
  await metricIs(proxy, 'idempotency_completions_total{route="r",result="stored"}', 1)
  t.equal((await rawRequest(proxy.port, REQUEST)).body.toString(), 'ok')
  t.equal(peer.requests.length, 1)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})
