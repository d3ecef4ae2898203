import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:http'
import { createServer as createTls } from 'node:https'
import { type AddressInfo, type Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { certificate } from '../support/certificates.ts'
import { answering, metricIs, problemOf, proxyBefore, scriptedPeer } from '../support/exchange.ts'
import { faulty, OK, poolWorks, REQUEST, seen, unknownNow } from '../support/faulty.ts'
import { post, rawRequest } from '../support/raw.ts'
import { freePort } from '../support/redis.ts'
import { tcpStub, upstreamStub, wholeRequest } from '../support/upstream.ts'
import { until } from './support.ts'

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

t.test('U04 U05 a silent upstream is a 504, a cut answer a 502, both unknown', async (t) => {
  const cut = 'HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nabc'
  for (const [code, status, bytes, upstream] of [
    ['upstream_timeout', 504, null, 'timeout: 300ms'],
    ['upstream_failed', 502, cut, ''],
  ] as const) {
    await using peer = await faulty(
      (socket) => void wholeRequest(socket).then(() => bytes !== null && socket.end(bytes)),
    )
    await using proxy = await proxyBefore(peer, { upstream })
    const problem = problemOf(await rawRequest(proxy.port, REQUEST))
    t.match(problem, { code, status, retry: 'same-key' })
    t.notMatch(JSON.stringify(problem), /abc/)
    await unknownNow(t, proxy)
    t.equal(seen(peer.requests), 1, 'N=1')
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  }
})

void t.test('P09 an unsolicited 100 Continue is not an error, whole, in pieces or twice', async (t) => {
  const interim = 'HTTP/1.1 100 Continue\r\n\r\n'
  const scripts: string[][] = [
    [interim, OK],
    [interim + OK],
    [interim + interim + OK],
    ['HTTP/1.0 100 Go On\r\nX: 1\r\n\r\n', OK],
    ['HTTP/1.1 100\r\n\r\n', OK],
  ]
  const all = interim + OK
  for (const at of [1, 9, 12, 22, 24, 25, 34]) scripts.push([all.slice(0, at), all.slice(at)])
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
})

void t.test('U12 TLS: nothing is sent to a wrong certificate, a wrong name or without TLS', async (t) => {
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
    await using proxy = await proxyBefore({ url }, { upstream: `tls: { ${tls.filter(Boolean).join(', ')} }` })
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
})

void t.test('U07 an answer before the request was read is replayed, or the outcome unknown', async (t) => {
  await using early = await tcpStub((socket) => {
    socket.on('data', (chunk: Buffer) => {
      if (chunk.includes('HTTP/1.1\r\n')) socket.write(OK)
    })
  })
  await using proxy = await proxyBefore(early)
  const big = post('/p', 'k-1', JSON.stringify({ a: 'x'.repeat(900_000) }))
  const first = await rawRequest(proxy.port, big)
  const second = await rawRequest(proxy.port, big)
  // A complete answer counts if it came through; a broken one is unknown.
  if (first.status === 201) t.equal(second.body.toString(), 'ok')
  else t.match(problemOf(second), { code: 'idempotency_outcome_unknown' })
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  t.equal((await rawRequest(proxy.port, post('/p', 'after', '{}'))).status, 201)
})

void t.test('U07 a second answer to one request reaches nobody', async (t) => {
  const two = `${OK}HTTP/1.1 500 Second\r\nContent-Length: 6\r\n\r\nsecond`
  await using peer = await faulty((socket) => void wholeRequest(socket).then(() => socket.write(two)))
  await using proxy = await proxyBefore(peer)
  const first = await rawRequest(proxy.port, REQUEST)
  t.equal(first.status, 201)
  const other = await rawRequest(proxy.port, post('/p', 'k-2', '{}'))
  t.notMatch(other.bytes.toString(), 'second')
  t.equal((await rawRequest(proxy.port, REQUEST)).body.toString(), 'ok')
  t.equal(seen(peer.requests), 1)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('P01 an upstream behind a unix socket serves requests, and can be unreachable', async (t) => {
  const dir = mkdtempSync(join(tmpdir(), 'sock-'))
  const path = join(dir, 'app.sock')
  let n = 0
  const server = createServer((request, response) => {
    n++
    request.resume()
    response.writeHead(201, { 'X-Host': request.headers.host }).end(request.url)
  }).listen(path)
  await once(server, 'listening')
  await using proxy = await proxyBefore({ url: `unix:${path}` })
  for (let i = 0; i < 2; i++) {
    const answer = await rawRequest(proxy.port, post('/p?x', 'k', '{}'))
    t.equal(answer.body.toString(), '/p?x')
    t.ok(answer.headers.includes('api.test'))
  }
  t.equal((await rawRequest(proxy.port, post('/other', null, '{}'))).body.toString(), '/other')
  t.equal(n, 2)
  server.closeAllConnections()
  await new Promise((resolve) => server.close(resolve))
  t.match(problemOf(await rawRequest(proxy.port, post('/p', 'k2', '{}'))), { code: 'upstream_unreachable' })
  rmSync(dir, { recursive: true })
})

void t.test('P27 at most upstream.connections are open, with one request at a time on each', async (t) => {
  const held: Socket[] = []
  await using peer = await scriptedPeer((socket) => void held.push(socket))
  await using proxy = await proxyBefore(peer, { upstream: 'connections: 2' })
  const answers = Array.from({ length: 6 }, (_, i) => rawRequest(proxy.port, post('/p', `k-${i}`, '{}')))
  for (let answered = 0; answered < 6; answered++) {
    await until(() => held.length > 0)
    t.ok(held.length <= 2)
    held.shift()?.write('HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n')
  }
  for (const answer of await Promise.all(answers)) t.equal(answer.status, 201)
  t.ok(peer.sockets.length <= 2, `${peer.sockets.length} connections`)
  t.equal(peer.requests.length, 6)
  await metricIs(proxy, 'idempotency_in_flight', 0)
})
