import { randomInt } from 'node:crypto'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Duplex } from 'node:stream'
import type { Config, InForce } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { carriesKey, keyNeedsBody } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import {
  isProtected,
  normalisePath,
  parseTarget,
  policiesOf,
  Router,
  readsKeys,
  type Target,
} from '../core/route.ts'
import type { KeyIssuer } from '../protect/issue-key.ts'
import type { Ports } from '../protect/ports.ts'
import { Shares } from '../runtime/limits.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import type { Upstream } from '../upstream/pool.ts'
import { clientOf } from './client.ts'
import { answersOn, TrafficServer } from './connections.ts'
import { handleIssue, handleStatus } from './endpoints.ts'
import { callOf, type GuardedOptions, handleGuarded, handleTraced, type RequestSpans } from './guarded.ts'
import { malformed, refuseHead } from './head.ts'
import { countedHeaders, type Forwarding, type Peer, requestLines, trustTester } from './headers.ts'
import { cameRound, type LoopMark } from './loop.ts'
import { passthrough, setPassage } from './passthrough.ts'
import { asksForPolicy, sendPolicy } from './policy.ts'
import { type ShadowOptions, tapRequest } from './shadow.ts'
import type { Stalled } from './stalled.ts'
import { endRefused, isWebSocket, TunnelRoom, tunnel } from './upgrade.ts'
import { breakOff, continueInTurn, ResponseWriter } from './write.ts'

/** A head (request line and header lines) must be whole by then; bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

export interface DataOptions {
  readonly inForce: InForce
  readonly ports: Ports
  readonly upstream: Upstream
  readonly loop: LoopMark
  readonly issuer: KeyIssuer | null
  readonly stalled: Stalled
  readonly shadow: ShadowOptions
  readonly spans: RequestSpans | null
  readonly passed: (route: string, milliseconds: number) => void
  readonly passFailed: (method: string, cause: string) => void
  /** A request carries this proxy's own mark. */
  readonly onLoop: (method: string) => void
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
export async function dataServer(options: DataOptions): Promise<TrafficServer> {
  const { ports, upstream } = options
  const { config } = options.inForce
  const common = { host: upstream.host, loop: options.loop }
  let routing = routingBy(config, common)
  /** By the configuration in force; the policy that a request finds there is its own to the end. */
  const routed = (): Routing => {
    if (routing.config !== options.inForce.config) routing = routingBy(options.inForce.config, common)
    return routing
  }
  const trusted = trustTester(config.trustProxy)
  const writer = new ResponseWriter(config.problems.baseUrl, config.upstream.idleTimeout, options.stalled)
  const guarded: GuardedOptions = {
    ports,
    writer,
    get upload() {
      return options.inForce.config.limits.upload
    },
    get forwarding() {
      return routed().forwarding
    },
    uploads: { stalled: options.stalled, shares: new Shares(randomInt(2 ** 32)) },
    clientOf: (headers, peer) => clientOf(headers, peer.address, trusted),
    statusPath: config.status.path,
    onBug: options.onBug,
    spans: options.spans,
  }

  const { connectTimeout, timeout, idleTimeout } = config.upstream
  const { connections } = config.upstream
  const tunnelling = {
    upstream,
    writer,
    connectTimeout,
    timeout,
    room: new TunnelRoom(connections, randomInt(2 ** 32)),
  }

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
    const route = target === null ? null : routed().router.match(method, target)
    if (target === null || route === null || !isProtected(route)) {
      const detail = `no protected route matches ${method} ${target?.path ?? 'without a path'}; ask with ?method=…&path=/…`
      writer.problem(request, response, refusal('route_not_found', detail))
      return
    }
    const call = callOf(guarded, route, method, target, peerOf(request), request, response)
    await handleStatus(ports, writer, call, request, response)
  }
  const watch = (
    route: RoutePolicy,
    target: Target,
    request: IncomingMessage,
    response: ServerResponse,
  ): ExchangeTap | null => {
    const peer = peerOf(request)
    const call = callOf(guarded, route, request.method as string, target, peer, request, response)
    return tapRequest(options.shadow, options.onBug, call, request, response)
  }
  const readHead = (request: IncomingMessage): Target | Refusal => {
    const refused = refuseHead(request)
    if (refused !== null) return refused
    if (cameRound(request.rawHeaders, options.loop)) {
      options.onLoop(request.method as string)
      return refusal('loop_detected', 'its `CDN-Loop` line names this proxy: the upstream leads back here')
    }
    return (
      parseTarget(request.url as string) ??
      malformed(400, 'the request target is neither a path nor an http(s) URL')
    )
  }
  const makeServer = (pass: (request: IncomingMessage, response: ServerResponse) => void): TrafficServer => {
    const server = new TrafficServer(
      {
        requestTimeout: 0,
        headersTimeout: HEAD_TIMEOUT,
        keepAliveTimeout: KEEP_ALIVE,
        // Behind a request that is not answered yet, a handshake is a GET like any other: its answer must not overtake.
        shouldUpgradeCallback: (request) => isWebSocket(request) && answersOn(request.socket).length === 0,
        // Refused by refuseHead, in the form of the other refusals.
        requireHostHeader: false,
      },
      (request, response) => {
        if (options.draining()) response.shouldKeepAlive = false
        const target = readHead(request)
        if ('code' in target) {
          response.shouldKeepAlive = false
          writer.problem(request, response, target)
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
            const lines = requestLines(request.rawHeaders, peerOf(request), routed().forwarding)
            const proxyHeaders = way.kind === 'pass' && way.ignored ? [RESPONSE_HEADER.status, 'ignored'] : []
            const witness = way.kind === 'shadow' ? watch(way.route, target, request, response) : null
            setPassage(request, { target: target.origin, lines, response, proxyHeaders, witness })
            response.once('close', () => options.passed(name, performance.now() - startedAt))
            // Fastify would refuse what it cannot parse; the upstream gets the line from the passage.
            delete request.headers['content-type']
            if (request.method === 'QUERY') request.headers['content-type'] = 'application/octet-stream'
            pass(request, response)
          }
        }
      },
      options.onBug,
    )
    // All of them: Node would leave out what comes after 2000 without a word, framing and keys included.
    server.maxHeadersCount = 0
    server.on('checkContinue', (request: IncomingMessage, response: ServerResponse) => {
      // Its refusal is the answer.
      if (refuseHead(request) === null) continueInTurn(response)
      server.emit('request', request, response)
    })
    server.on('checkExpectation', (request: IncomingMessage, response: ServerResponse) => {
      response.shouldKeepAlive = false
      writer.problem(request, response, malformed(417, 'an expectation other than 100-continue'))
    })
    server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
      // Node has taken its own listener off; a reset would end the process.
      socket.on('error', () => socket.destroy())
      const target = readHead(request)
      if ('code' in target) {
        endRefused(socket, writer.problemMessage(target))
        return
      }
      // No handshake is guarded, whatever key it carries; but what no route matches may be refused.
      if (wayOf(routed(), request, target).kind === 'refuse') {
        endRefused(socket, writer.problemMessage(noRoute(request.method as string, target)))
        return
      }
      const lines = requestLines(request.rawHeaders, peerOf(request), routed().forwarding)
      const holder = clientOf(request.rawHeaders, peerOf(request).address, trusted)
      tunnel(tunnelling, holder, target.origin, lines, request, socket, head)
    })
    // Node has given up the connection: what was asked for before on it can't be answered any more.
    server.on('connect', (_request: IncomingMessage, socket: Duplex) => {
      socket.on('error', () => socket.destroy())
      if (answersOn(socket).length > 0) socket.destroy()
      else endRefused(socket, writer.problemMessage(malformed(501, 'the method CONNECT')))
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
  return app.server as TrafficServer
}

interface Routing {
  readonly config: Config
  readonly router: Router
  readonly forwarding: Forwarding
}

function routingBy(config: Config, common: Pick<Forwarding, 'host' | 'loop'>): Routing {
  return {
    config,
    router: new Router(policiesOf(config)),
    forwarding: { ...common, counted: countedHeaders(config) },
  }
}

function noRoute(method: string, target: Target): Refusal {
  return refusal('route_not_found', `no route matches ${method} ${target.path}`)
}

/** What the head does not show may be in the body, or be made of it. */
function mayHaveKey({ rawHeaders }: IncomingMessage, { query }: Target, { key }: RoutePolicy): boolean {
  return carriesKey({ headers: rawHeaders, query }, key.from) || keyNeedsBody(key) || key.derive !== null
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
  if (route === null)
    return config.unmatched === 'reject' ? { kind: 'refuse' } : { kind: 'pass', route, ignored: false }
  if (!readsKeys(route)) return { kind: 'pass', route, ignored: false }
  // What no route matches never has to carry a key.
  const isMatched = route !== config.defaults
  if ((isMatched && route.key.presence === 'required') || mayHaveKey(request, target, route))
    return { kind: route.mode === 'shadow' ? 'shadow' : 'guard', route }
  return { kind: 'pass', route, ignored: isMatched && route.statusHeader }
}
