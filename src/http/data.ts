import type { IncomingMessage, Server, ServerResponse } from 'node:http'
import type { Duplex } from 'node:stream'
import type { Config, InForce } from '../config/config.ts'
import { linesOf } from '../core/headers.ts'
import { carriesKey, keyNeedsBody } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { Router } from '../core/route.ts'
import { normalisePath, parseTarget, type Target } from '../core/target.ts'
import type { KeyIssuer } from '../guard/issue.ts'
import type { Ports } from '../guard/ports.ts'
import type { Upstream } from '../upstream/pool.ts'
import type { Witness } from '../upstream/witness.ts'
import { callOf, type GuardedOptions, handleGuarded, handleTraced, type RequestSpans } from './guarded.ts'
import { type Peer, requestLines, trustTester } from './headers.ts'
import { handleIssue, handleStatus } from './own.ts'
import { passthrough, setPassage } from './passthrough.ts'
import { asksForPolicy, sendPolicy } from './policy.ts'
import { overhear, type ShadowOptions } from './shadow.ts'
import { isWebSocket, TunnelServer, tunnel } from './upgrade.ts'
import { breakOff, continueInTurn, Writer } from './write.ts'

/** A head (request line and header lines) must be whole by then; bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

export interface DataOptions {
  readonly inForce: InForce
  readonly ports: Ports
  readonly upstream: Upstream
  readonly issuer: KeyIssuer | null
  readonly shadow: ShadowOptions
  readonly spans: RequestSpans | null
  readonly passed: (route: string, milliseconds: number) => void
  readonly passFailed: (method: string, cause: string) => void
  readonly onBug: (error: unknown) => void
  /** While it drains, connections are not kept alive: clients move on to other replicas. */
  readonly draining: () => boolean
}

type Way =
  /** `shadow`: it passes, and is looked at. */
  | { readonly kind: 'guard' | 'shadow'; readonly route: RoutePolicy }
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }
  /** At paths of the proxy's own: a key is made, the state of a record is told, or what clients have to know. */
  | { readonly kind: 'issue' }
  | { readonly kind: 'status' }
  | { readonly kind: 'policy' }

/** The traffic server: says which request is guarded, which passes, which is refused (contract §3.1, §10). */
export async function dataServer(options: DataOptions): Promise<Server> {
  const { ports, upstream } = options
  const { config } = options.inForce
  let routing = routingBy(config)
  /** By the configuration in force; the policy that a request finds there is its own to the end. */
  const routed = (): Routing => {
    if (routing.config !== options.inForce.config) routing = routingBy(options.inForce.config)
    return routing
  }
  const trusted = trustTester(config.trustProxy)
  const writer = new Writer(config.problems.baseUrl, config.upstream.idleTimeout)
  const guarded: GuardedOptions = {
    ports,
    writer,
    get upload() {
      return options.inForce.config.limits.upload
    },
    host: upstream.host,
    statusPath: config.status.path,
    onBug: options.onBug,
    spans: options.spans,
  }

  const { connectTimeout, timeout, idleTimeout } = config.upstream
  const tunnelling = { upstream, writer, connectTimeout, timeout }

  const peerOf = (request: IncomingMessage): Peer => {
    const address = request.socket.remoteAddress ?? 'unknown'
    return { address, trusted: trusted(address) }
  }
  const own = (request: IncomingMessage, response: ServerResponse, answering: Promise<void>): void =>
    void answering.catch((error: unknown) => {
      options.onBug(error)
      breakOff(request, response)
    })
  const tellStatus = async (
    asked: Target,
    request: IncomingMessage,
    response: ServerResponse,
  ): Promise<void> => {
    const query = new URLSearchParams(asked.query)
    const method = query.get('method') ?? 'POST'
    const target = parseTarget(query.get('path') ?? '')
    const way = target === null ? null : policyOf(routed(), method, target)
    if (target === null || way === null || way.mode !== 'enforce' || way.key.presence === 'ignored') {
      const detail = `no protected route matches ${method} ${target?.path ?? 'without a path'}; ask with ?method=…&path=/…`
      writer.problem(request, response, refusal('route_not_found', detail))
      return
    }
    const call = callOf(guarded, way, method, target, peerOf(request), request, response)
    await handleStatus(ports, writer, call, request, response)
  }
  const watch = (
    route: RoutePolicy,
    target: Target,
    request: IncomingMessage,
    response: ServerResponse,
  ): Witness | null => {
    const peer = peerOf(request)
    const call = callOf(guarded, route, request.method as string, target, peer, request, response)
    return overhear(options.shadow, options.onBug, call, request, response)
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
        const way = wayOf(routed(), request, target)
        switch (way.kind) {
          case 'guard':
            if (options.spans === null)
              void handleGuarded(guarded, way.route, target, peerOf(request), request, response)
            else handleTraced(options.spans, guarded, way.route, target, peerOf(request), request, response)
            return
          case 'refuse':
            writer.problem(request, response, noRoute(request.method as string, target))
            return
          case 'issue':
            own(request, response, handleIssue(ports, writer, options.issuer as KeyIssuer, request, response))
            return
          case 'status':
            own(request, response, tellStatus(target, request, response))
            return
          case 'policy':
            sendPolicy(routed().config, request, response)
            return
          case 'shadow':
          case 'pass': {
            const startedAt = performance.now()
            const name = way.route?.name ?? config.defaults.name
            const lines = requestLines(request.rawHeaders, peerOf(request), upstream.host)
            const marks = way.kind === 'pass' && way.ignored ? ['Idempotency-Status', 'ignored'] : []
            const witness = way.kind === 'shadow' ? watch(way.route, target, request, response) : null
            setPassage(request, { target: target.origin, lines, response, marks, witness })
            response.once('close', () => options.passed(name, performance.now() - startedAt))
            // Fastify would refuse what it cannot parse; the upstream gets the line from the passage.
            delete request.headers['content-type']
            if (request.method === 'QUERY') request.headers['content-type'] = 'application/octet-stream'
            pass(request, response)
          }
        }
      },
    )
    server.on('checkContinue', (request: IncomingMessage, response: ServerResponse) => {
      continueInTurn(response)
      server.emit('request', request, response)
    })
    server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
      // Node has taken its own listener off; a reset would end the process.
      socket.on('error', () => socket.destroy())
      const target = parseTarget(request.url as string)
      if (target === null) {
        socket.end('HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n')
        return
      }
      // No handshake is guarded, whatever key it carries; but what no route matches may be refused.
      if (wayOf(routed(), request, target).kind === 'refuse') {
        socket.end(writer.problemMessage(noRoute(request.method as string, target)))
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
    timeout,
    idleTimeout,
    makeServer,
    onBug: options.onBug,
    onFailed: options.passFailed,
  })
  return app.server
}

interface Routing {
  readonly config: Config
  readonly router: Router
}

function routingBy(config: Config): Routing {
  return { config, router: new Router(config.routes, normalisePath) }
}

function noRoute(method: string, target: Target): Refusal {
  return refusal('route_not_found', `no route matches ${method} ${target.path}`)
}

/** The policy of a request that carries a key; null: nothing is protected there. */
function policyOf({ config, router }: Routing, method: string, target: Target): RoutePolicy | null {
  const route = router.match(method, target)
  if (route !== null) return route
  const protectable = method === 'POST' || method === 'PATCH'
  return config.unmatched === 'protect' && protectable ? config.defaults : null
}

/** What the head does not show may be in the body, or be made of it. */
function mayHaveKey({ rawHeaders }: IncomingMessage, { key }: RoutePolicy): boolean {
  return carriesKey(rawHeaders, key.from) || keyNeedsBody(key) || key.derive !== null
}

function wayOf(routing: Routing, request: IncomingMessage, target: Target): Way {
  const { config, router } = routing
  const method = request.method as string
  const { issuer, status } = config
  if (issuer !== null && method === 'POST' && target.path === normalisePath(issuer.path))
    return { kind: 'issue' }
  if (status.path !== null && method === 'GET' && target.path === normalisePath(status.path))
    return { kind: 'status' }
  if (asksForPolicy(config, method, target)) return { kind: 'policy' }
  const route = router.match(method, target)
  if (route === null) {
    if (config.unmatched === 'reject') return { kind: 'refuse' }
    const defaults = policyOf(routing, method, target)
    const looksAt =
      defaults !== null &&
      defaults.mode !== 'off' &&
      defaults.key.presence !== 'ignored' &&
      mayHaveKey(request, defaults)
    return looksAt
      ? { kind: defaults.mode === 'shadow' ? 'shadow' : 'guard', route: defaults }
      : { kind: 'pass', route: null, ignored: false }
  }
  if (route.mode === 'off' || route.key.presence === 'ignored') return { kind: 'pass', route, ignored: false }
  if (route.key.presence === 'required' || mayHaveKey(request, route))
    return { kind: route.mode === 'shadow' ? 'shadow' : 'guard', route }
  return { kind: 'pass', route, ignored: route.statusHeader }
}
