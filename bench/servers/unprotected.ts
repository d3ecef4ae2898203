/**
 * This proxy's own unprotected, buffered POST: its server, reading, upstream call, writer and the two metrics of a passed
 * request, without key, fingerprint, claim and settling. Arguments: port, upstream's port, and `node` for undici's own pool.
 */

import { loadConfig } from '../../src/config/load.ts'
import { parseTarget } from '../../src/core/route.ts'
import { TrafficServer } from '../../src/http/connections.ts'
import { identifyingHeaders, loopMarkOf, requestLines, TrustedProxies } from '../../src/http/headers.ts'
import { readBody } from '../../src/http/protected.ts'
import type { TrafficResponse } from '../../src/http/request.ts'
import { Stalled } from '../../src/http/stalled.ts'
import { ResponseWriter } from '../../src/http/write.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { Budget, Shares } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import { Habits } from '../../src/upstream/habits.ts'
import { openUpstream } from '../../src/upstream/pool.ts'

const [port = '', upstreamPort = '', http] = process.argv.slice(2)
const loaded = loadConfig({
  text: '',
  env: {},
  flags: { upstream: `http://127.0.0.1:${upstreamPort}`, listen: undefined, store: undefined },
})
if (!loaded.ok) throw new Error('the defaults do not load')
const { config } = loaded
const budget = new Budget(config.limits.buffered)
const uploads = { stalled: new Stalled(), shares: new Shares(0) }
const metrics = new Metrics()
const upstream = await openUpstream(config.upstream, {
  material: {},
  habits: new Habits(config.upstream.keepAlive),
  mostHead: () => config.limits.responseHead,
  http: http === 'node' ? 'node' : 'plain',
})
const forward = forwarder(upstream.dispatcher, {
  timeout: () => config.upstream.timeout,
  idleTimeout: config.upstream.idleTimeout,
  budget,
})
const writer = new ResponseWriter(config.problems.baseUrl, config.upstream.idleTimeout)
const peers = new TrustedProxies([])
const limit = config.defaults.limits
const forwarding = {
  host: upstream.host,
  takesTrailers: false,
  loop: loopMarkOf(config),
  counted: identifyingHeaders(config),
}

const server = new TrafficServer(
  { holds: true, plain: true, requestTimeout: 0, keepAliveTimeout: 72_000 },
  (request, response) => {
    const startedAt = performance.now()
    const headers = requestLines(request.rawHeaders, peers.peerOf(request.socket.remoteAddress), forwarding)
    void serve(headers, startedAt, response)
  },
  (error) => {
    throw error
  },
)

async function serve(headers: string[], startedAt: number, response: TrafficResponse): Promise<void> {
  const { req: request } = response
  const target = parseTarget(request.url as string)?.origin ?? '/'
  const read = await readBody(request, limit.request, config.limits.upload, budget, uploads, '')
  if (read.kind !== 'body') return void response.destroy()
  const method = request.method as string
  const result = await forward({ method, target, headers, body: read.body, responseLimit: limit.response })
  read.release()
  if (result.proof !== 'responded') return void response.destroy()
  const { response: whole, release } = result
  writer.write(response, {
    kind: 'response',
    response: whole,
    replayed: false,
    proxyHeaders: [],
    release,
  })
  const labels = { route: 'default', outcome: 'passed' }
  metrics.count('idempotency_requests_total', labels)
  metrics.observe('idempotency_request_duration_seconds', labels, (performance.now() - startedAt) / 1000)
}

server.listen(Number(port), '127.0.0.1')
