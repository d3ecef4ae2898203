import type { IncomingMessage, Server, ServerResponse } from 'node:http'
import type { Duplex } from 'node:stream'
import type { Config } from '../config/config.ts'
import { linesOf } from '../core/headers.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { Router } from '../core/route.ts'
import { normalisePath, parseTarget, type Target } from '../core/target.ts'
import type { Ports } from '../guard.ts'
import type { Upstream } from '../upstream/pool.ts'
import { type GuardedOptions, handleGuarded } from './guarded.ts'
import { type Peer, requestLines, trustTester } from './headers.ts'
import { type Passage, passthrough } from './passthrough.ts'
import { isWebSocket, TunnelServer, tunnel } from './upgrade.ts'
import { Writer } from './write.ts'

/** A head (request line and header lines) must be whole by then; bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

export interface DataOptions {
  readonly config: Config
  readonly ports: Ports
  readonly upstream: Upstream
  readonly passed: (route: string, milliseconds: number) => void
  readonly onBug: (error: unknown) => void
  /** While it drains, connections are not kept alive: clients move on to other replicas. */
  readonly draining: () => boolean
}

type Way =
  | { readonly kind: 'guard'; readonly route: RoutePolicy }
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }

/** The traffic server: says which request is guarded, which passes, which is refused (contract §3.1, §10). */
export async function dataServer(options: DataOptions): Promise<Server> {
  const { config, ports, upstream } = options
  const router = new Router(config.routes, normalisePath)
  const trusted = trustTester(config.trustProxy)
  const writer = new Writer(config.problems.baseUrl, config.upstream.idleTimeout)
  const passages = new WeakMap<IncomingMessage, Passage>()
  const guarded: GuardedOptions = {
    ports,
    writer,
    upload: config.limits.upload,
    host: upstream.host,
    onBug: options.onBug,
  }

  const { connectTimeout, timeout, idleTimeout } = config.upstream
  const tunnelling = { upstream, writer, connectTimeout, timeout }

  const peerOf = (request: IncomingMessage): Peer => {
    const address = request.socket.remoteAddress ?? 'unknown'
    return { address, trusted: trusted(address) }
  }
  const makeServer = (pass: (request: IncomingMessage, response: ServerResponse) => void): Server => {
    const server = new TunnelServer(
      {
        requestTimeout: 0,
        headersTimeout: HEAD_TIMEOUT,
        keepAliveTimeout: KEEP_ALIVE,
        shouldUpgradeCallback: isWebSocket,
      },
      (request, response) => {
        if (options.draining()) response.shouldKeepAlive = false
        const target = parseTarget(request.url as string)
        // Two `Host` lines are two opinions on whom the request is for (RFC 9112 §3.2).
        if (target === null || linesOf(request.rawHeaders, 'host').length > 1) {
          response.writeHead(400, ['Connection', 'close', 'Content-Length', '0'])
          response.end()
          return
        }
        const way = wayOf(config, router, request, target)
        switch (way.kind) {
          case 'guard':
            void handleGuarded(guarded, way.route, target, peerOf(request), request, response)
            return
          case 'refuse':
            writer.problem(request, response, noRoute(request, target))
            return
          case 'pass': {
            const startedAt = performance.now()
            const name = way.route?.name ?? config.defaults.name
            const lines = requestLines(request.rawHeaders, peerOf(request), upstream.host)
            const marks = way.ignored ? ['Idempotency-Status', 'ignored'] : []
            passages.set(request, { target: target.origin, lines, response, marks })
            response.once('close', () => options.passed(name, performance.now() - startedAt))
            // Fastify would refuse what it cannot parse; the upstream gets the line from the passage.
            delete request.headers['content-type']
            if (request.method === 'QUERY') request.headers['content-type'] = 'application/octet-stream'
            pass(request, response)
          }
        }
      },
    )
    server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
      // Node has taken its own listener off; a reset would end the process.
      socket.on('error', () => socket.destroy())
      const target = parseTarget(request.url as string)
      if (target === null) {
        socket.end('HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n')
        return
      }
      // No handshake is guarded, whatever key it carries; but what no route matches may be refused.
      if (wayOf(config, router, request, target).kind === 'refuse') {
        socket.end(writer.problemMessage(noRoute(request, target)))
        return
      }
      const lines = requestLines(request.rawHeaders, peerOf(request), upstream.host)
      server.keep(socket)
      tunnel(tunnelling, target.origin, lines, request, socket, head)
    })
    return server
  }
  const app = await passthrough({
    upstream,
    writer,
    passages,
    timeout,
    idleTimeout,
    makeServer,
    onBug: options.onBug,
  })
  return app.server
}

function noRoute(request: IncomingMessage, target: Target): Refusal {
  return refusal('route_not_found', `no route matches ${request.method} ${target.path}`)
}

function wayOf(config: Config, router: Router, request: IncomingMessage, target: Target): Way {
  const method = request.method as string
  const route = router.match(method, target)
  if (route === null) {
    if (config.unmatched === 'reject') return { kind: 'refuse' }
    const { defaults } = config
    const protectable = method === 'POST' || method === 'PATCH'
    const guards =
      config.unmatched === 'protect' &&
      protectable &&
      defaults.mode === 'enforce' &&
      defaults.key.presence !== 'ignored' &&
      carriesKey(request.rawHeaders, defaults.key.from)
    return guards ? { kind: 'guard', route: defaults } : { kind: 'pass', route: null, ignored: false }
  }
  if (route.mode === 'off' || route.key.presence === 'ignored') return { kind: 'pass', route, ignored: false }
  if (route.key.presence === 'required' || carriesKey(request.rawHeaders, route.key.from))
    return { kind: 'guard', route }
  return { kind: 'pass', route, ignored: route.statusHeader }
}
