import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:http'
import type { Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import type { UpstreamConfig } from '../../src/config/config.ts'
import { openUpstream } from '../../src/upstream/pool.ts'
import { metricIs, problemOf, proxyBefore, scriptedPeer } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'

const config = (url: string, tls: Partial<UpstreamConfig['tls']> = {}): UpstreamConfig => ({
  url,
  connectTimeout: 1000,
  timeout: 1000,
  idleTimeout: 1000,
  connections: 2,
  tls: { ca: null, cert: null, key: null, servername: null, ...tls },
})

void t.test('P23 only a TLS upstream has a Host of its own, from its url', async (t) => {
  for (const [url, host] of [
    ['http://127.0.0.1:3000', null],
    ['https://api.test:8443', 'api.test:8443'],
    ['https://api.test', 'api.test'],
    ['unix:/run/app.sock', null],
  ] as const) {
    const upstream = await openUpstream(config(url))
    t.equal(upstream.host, host, url)
    await upstream.close()
  }
})

void t.test('U12 a TLS file that cannot be read fails openUpstream', async (t) => {
  for (const file of ['ca', 'cert', 'key'])
    await t.rejects(openUpstream(config('https://api.test', { [file]: '/no/such/file' })), { code: 'ENOENT' })
})

void t.test(
  'P01 an upstream behind a unix socket serves guarded and passed requests, and can be unreachable',
  async (t) => {
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
  },
)

void t.test(
  'P27 the proxy opens at most upstream.connections, with one request at a time on each',
  async (t) => {
    const held: Socket[] = []
    await using peer = await scriptedPeer((socket) => void held.push(socket))
    await using proxy = await proxyBefore(peer, { upstream: 'connections: 2' })
    const answers = Array.from({ length: 6 }, (_, i) => rawRequest(proxy.port, post('/p', `k-${i}`, '{}')))
    let answered = 0
    while (answered < 6) {
      while (held.length === 0) await new Promise((resolve) => setTimeout(resolve, 5))
      t.ok(held.length <= 2)
      held.shift()?.write('HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n')
      answered++
    }
    for (const answer of await Promise.all(answers)) t.equal(answer.status, 201)
    t.ok(peer.sockets.length <= 2, `${peer.sockets.length} connections`)
    t.equal(peer.requests.length, 6)
    await metricIs(proxy, 'idempotency_in_flight', 0)
  },
)
