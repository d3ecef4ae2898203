/**
 * This proxy's own unprotected, buffered POST: its server, its reading, its upstream call, its writer and the two metrics of a
 * passed request, without key, fingerprint, claim and settling. Arguments: port, upstream's port, folder of the built JavaScript.
 */
import type { ServerResponse } from 'node:http'
import { pathToFileURL } from 'node:url'

const [port = '', upstreamPort = '', dist = ''] = process.argv.slice(2)
const built = <M>(module: string): Promise<M> => import(`${pathToFileURL(dist).href}/${module}`) as Promise<M>
const { loadConfig } = await built<typeof import('../../src/config/load.ts')>('config/load.js')
const { Budget, Shares } = await built<typeof import('../../src/runtime/limits.ts')>('runtime/limits.js')
const { parseTarget } = await built<typeof import('../../src/core/route.ts')>('core/route.js')
const { readBody, Stalled } = await built<typeof import('../../src/http/bodies.ts')>('http/bodies.js')
const { countedHeaders, loopMarkOf, requestLines } =
  await built<typeof import('../../src/http/headers.ts')>('http/headers.js')
const { TrafficServer } = await built<typeof import('../../src/http/connections.ts')>('http/connections.js')
const { ResponseWriter } = await built<typeof import('../../src/http/write.ts')>('http/write.js')
const { Metrics } = await built<typeof import('../../src/observe/metrics.ts')>('observe/metrics.js')
const { forwarder } = await built<typeof import('../../src/upstream/forward.ts')>('upstream/forward.js')
const { openUpstream } = await built<typeof import('../../src/upstream/pool.ts')>('upstream/pool.js')

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
const upstream = openUpstream(config.upstream)
const forward = forwarder(upstream.pool, { ...config.upstream, budget, servername: null })
const writer = new ResponseWriter(config.problems.baseUrl, config.upstream.idleTimeout)
const limit = config.defaults.limits
const forwarding = { host: upstream.host, loop: loopMarkOf(config), counted: countedHeaders(config) }

const server = new TrafficServer(
  { requestTimeout: 0, keepAliveTimeout: 72_000 },
  (request, response) => {
    const startedAt = performance.now()
    const headers = requestLines(
      request.rawHeaders,
      { address: request.socket.remoteAddress ?? '', isTrusted: false },
      forwarding,
    )
    void serve(headers, startedAt, request, response)
  },
  (error) => {
    throw error
  },
)

async function serve(
  headers: string[],
  startedAt: number,
  request: Parameters<typeof readBody>[0],
  response: ServerResponse,
): Promise<void> {
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
