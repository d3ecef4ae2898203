import { randomInt } from 'node:crypto'
import type { Socket } from 'node:net'
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
  type RequestTarget,
  Router,
  readsKeys,
  WELL_KNOWN,
} from '../core/route.ts'
import { policyDocument } from '../describe/published.ts'
import type { KeyIssuer } from '../protect/identify.ts'
import type { WalkPorts } from '../protect/ports.ts'
import { Shares } from '../runtime/limits.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import type { Upstream } from '../upstream/pool.ts'
import { answersOn, TrafficServer } from './connections.ts'
import { Cors, preflightFor } from './cors.ts'
import { answerIssue, answerPolicy, answerPreflight, answerStatus } from './endpoints.ts'
import {
  type Forwarding,
  identifyingHeaders,
  isLoop,
  type LoopMark,
  type Peer,
  requestLines,
  TrustedProxies,
} from './headers.ts'
import { passthrough } from './passthrough.ts'
import {
  type Incoming,
  type ProtectOptions,
  ReceivedRequest,
  type RequestSpans,
  type ShadowOptions,
  serveProtected,
  tapRequest,
} from './protected.ts'
import {
  type StreamRequest,
  type StreamResponse,
  type TrafficRequest,
  type TrafficResponse,
} from './request.ts'
import type { Stalled } from './stalled.ts'
import { endRefused, isWebSocket, tunnels } from './tunnel.ts'
import { breakOff, ResponseWriter } from './write.ts'

/** For the head (request line and headers); bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

const kPeer = Symbol('peer')
interface PeerSocket extends Socket {
  [kPeer]?: Peer
}

export interface TrafficOptions {
  /** While draining, connections are not kept alive, so that clients move on to other replicas. */
  readonly inForce: InForce & { readonly draining: boolean }
  readonly ports: WalkPorts
  readonly upstream: Upstream
  readonly loop: LoopMark
  readonly issuer: KeyIssuer | null
  readonly stalled: Stalled
  readonly shadow: ShadowOptions
  readonly spans: RequestSpans | null
  readonly passed: (route: string, milliseconds: number) => void
  readonly passFailed: (method: string, cause: string) => void
  /** Called when a request carries this proxy's own `CDN-Loop` entry. */
  readonly onLoop: (method: string) => void
  readonly onNearMiss: NearMissHandler
  readonly onBug: (error: unknown) => void
}

/** The server for client traffic: each request is handled as {@link routingOf} says. */
export function trafficServer(options: TrafficOptions): TrafficServer {
  const { inForce, loop, ports, upstream, onBug } = options
  const { config } = inForce
  const routing = routingOf(inForce, { host: upstream.host, loop }, options.onNearMiss)
  const proxies = new TrustedProxies(config.trustProxy)
  const peerOf = (connection: PeerSocket): Peer =>
    (connection[kPeer] ??= proxies.peerOf(connection.remoteAddress))
  const { problems, upstream: patience } = config
  const cors = (): Cors | null => routing().cors
  const writer = new ResponseWriter(problems.baseUrl, patience.idleTimeout, options.stalled, cors)
  const tunnel = tunnels(upstream, writer, () => inForce.config.upstream)
  const pass = passthrough({
    timeout: () => inForce.config.upstream.timeout,
    idleTimeout: config.upstream.idleTimeout,
    upstream,
    writer,
    onBug,
    onFailed: options.passFailed,
  })
  const protecting: ProtectOptions = {
    ports,
    writer,
    proxies,
    get upload() {
      return inForce.config.limits.upload
    },
    get forwarding() {
      return routing().forwarding
    },
    uploads: { stalled: options.stalled, shares: new Shares(randomInt(2 ** 32)) },
    statusPath: config.status.path,
    onBug,
    spans: options.spans,
  }

  const readHead = (request: TrafficRequest): RequestTarget | Refusal => {
    const refused = refuseHead(request)
    if (refused !== null) return refused
    if (isLoop(request.rawHeaders, loop)) {
      options.onLoop(request.method as string)
      return refusal('loop_detected', 'its `CDN-Loop` line names this proxy: the upstream leads back here')
    }
    return (
      parseTarget(request.url as string) ??
      malformed(400, 'the request target is neither a path nor an http(s) URL')
    )
  }

  const passOn = (
    { response, target, peer }: Incoming,
    route: RoutePolicy | null,
    proxyHeaders: readonly string[],
    tap: ExchangeTap | null,
  ): void => {
    const startedAt = performance.now()
    const name = route?.name ?? config.defaults.name
    response.on('close', () => options.passed(name, performance.now() - startedAt))
    const lines = requestLines(response.req.rawHeaders, peer, routing().forwarding)
    pass(response, { target: target.origin, lines, proxyHeaders, tap })
  }

  const status = async (incoming: Incoming): Promise<void> => {
    const { response } = incoming
    const query = new URLSearchParams(incoming.target.query)
    const method = query.get('method') ?? 'POST'
    const target = parseTarget(query.get('path') ?? '')
    const route = target === null ? null : routing().router.match(method, target)
    if (target === null || route === null || !isProtected(route)) {
      const detail = `no protected route matches ${method} ${target?.path ?? 'without a path'}; ask with ?method=…&path=/…`
      writer.problem(response, refusal('route_not_found', detail))
      return
    }
    const asked = new ReceivedRequest(protecting, route, { ...incoming, target }, method)
    await answerStatus(ports, writer, asked, response)
  }

  const orBreakOff = (response: TrafficResponse, answering: Promise<void>): void =>
    void answering.catch((error: unknown) => {
      onBug(error)
      breakOff(response)
    })

  const serve = (request: TrafficRequest, response: TrafficResponse): void => {
    if (inForce.draining) response.shouldKeepAlive = false
    const target = readHead(request)
    if ('code' in target) {
      response.shouldKeepAlive = false
      writer.problem(response, target)
      return
    }
    const incoming = { response, target, peer: peerOf(request.socket) }
    const way = routing().wayOf(request, target)
    switch (way.kind) {
      case 'protect':
        return serveProtected(protecting, way.route, incoming)
      case 'shadow':
        return passOn(incoming, way.route, [], tapRequest(protecting, options.shadow, way.route, incoming))
      case 'pass':
        return passOn(incoming, way.route, way.ignored ? [RESPONSE_HEADER.status, 'ignored'] : [], null)
      case 'refuse':
        return writer.problem(response, noRoute(request, target))
      case 'issue':
        return orBreakOff(response, answerIssue(ports, writer, options.issuer as KeyIssuer, response))
      case 'status':
        return orBreakOff(response, status(incoming))
      case 'policy':
        return answerPolicy(writer, routing().policy, response)
      case 'preflight':
        return answerPreflight(way.cors, way.method, response)
    }
  }

  const server = new TrafficServer(
    {
      holds: true,
      requestTimeout: 0,
      headersTimeout: HEAD_TIMEOUT,
      keepAliveTimeout: KEEP_ALIVE,
      // Behind an unanswered request a handshake is an ordinary GET: its answer must not overtake.
      shouldUpgradeCallback: (request) => isWebSocket(request) && answersOn(request.socket).length === 0,
      // `refuseHead` does this, as a problem document.
      requireHostHeader: false,
    },
    serve,
    onBug,
  )
  // Unlimited: Node would silently drop lines after the 2000th, framing and keys included.
  server.maxHeadersCount = 0
  server.on('clientError', (error: NodeJS.ErrnoException, socket: Duplex) =>
    refuseUnread(writer, error, socket),
  )
  server.on('checkContinue', (request: StreamRequest, response: StreamResponse) => {
    // Otherwise the refusal is the answer.
    if (refuseHead(request) === null) response.writeContinue()
    server.emit('request', request, response)
  })
  server.on('checkExpectation', (_request: TrafficRequest, response: TrafficResponse) => {
    response.shouldKeepAlive = false
    writer.problem(response, malformed(417, 'an expectation other than 100-continue'))
  })
  server.on('upgrade', (request: StreamRequest, socket: Duplex, head: Buffer) => {
    // Node has removed its own listener; without one, a reset would end the process.
    socket.on('error', () => socket.destroy())
    const target = readHead(request)
    if ('code' in target) return endRefused(socket, writer.problemMessage(target))
    // Handshakes are never protected, whatever key they carry, but `unmatched: reject` applies.
    if (routing().wayOf(request, target).kind === 'refuse')
      return endRefused(socket, writer.problemMessage(noRoute(request, target)))
    const peer = peerOf(request.socket)
    const client = proxies.clientOf(request.rawHeaders, peer)
    const lines = requestLines(request.rawHeaders, peer, routing().forwarding)
    tunnel(client, { request, target: target.origin, lines, socket, head })
  })
  server.on('connect', (_request: TrafficRequest, socket: Duplex) => {
    socket.on('error', () => socket.destroy())
    const refuse = (): void => endRefused(socket, writer.problemMessage(malformed(501, 'the method CONNECT')))
    const last = answersOn(socket).at(-1)
    if (last === undefined) return refuse()
    // Node has released the connection: nobody else reads it, or tells its answers that it has room.
    socket.on('drain', () => answersOn(socket)[0]?.emit('drain'))
    socket.resume()
    last.once('close', () => {
      // Unless the answer was the last of its connection.
      if (socket.writable) refuse()
    })
  })
  return server
}

/** Refuses heads that Node's parser accepts but that another server may read differently; null: fine. */
function refuseHead({ httpVersion, framing, refusal: found }: TrafficRequest): Refusal | null {
  if (found !== undefined) return found
  if (httpVersion !== '1.1' && httpVersion !== '1.0')
    return malformed(505, `HTTP/${httpVersion} is not spoken here; send HTTP/1.1`)
  const { hosts, codings } = framing
  // Two `Host` lines name two recipients (RFC 9112 §3.2).
  if (hosts > 1) return malformed(400, `${hosts} Host lines; one is allowed`)
  if (hosts === 0 && httpVersion === '1.1') return malformed(400, 'the Host line is missing')
  if (codings.length === 0) return null
  if (httpVersion === '1.0') return malformed(400, 'HTTP/1.0 has no Transfer-Encoding')
  // Otherwise nothing marks the end of the body (RFC 9112 §6.3).
  if (codings.at(-1)?.trim() !== 'chunked') return malformed(400, 'Transfer-Encoding does not end in chunked')
  return codings.length === 1 ? null : malformed(501, 'a transfer coding other than chunked')
}

/** The refusal for a parser error or timeout. Null: the connection itself broke. */
function refusalOfParser({ code = '' }: NodeJS.ErrnoException): Refusal | null {
  switch (code) {
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return refusal('request_timeout', 'the head of the request did not arrive in time')
    case 'HPE_HEADER_OVERFLOW':
      return refusal('request_too_large', 'the request line and the header lines are over 16 KiB', {
        status: 431,
      })
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return refusal('request_too_large', 'the chunk extensions are over 16 KiB')
    default:
      return code.startsWith('HPE_') ? malformed(400, `the bytes are not HTTP/1.1 (${code})`) : null
  }
}

function malformed(status: 400 | 417 | 501 | 505, detail: string): Refusal {
  return refusal('request_malformed', detail, { status })
}

function noRoute({ method }: TrafficRequest, { path }: RequestTarget): Refusal {
  return refusal('route_not_found', `no route matches ${method} ${path}`)
}

/**
 * Answers parser errors and late heads with a problem document and ends the connection, since nobody knows where the next request would
 * begin. Behind an unanswered request, only a request whose head was read is refused, in its turn: the client would take anything else for that
 * request's answer.
 */
function refuseUnread(writer: ResponseWriter, error: NodeJS.ErrnoException, socket: Duplex): void {
  const refused = refusalOfParser(error)
  if (refused === null || socket.destroyed) return void socket.destroy()
  // The parser repeats the error for every further chunk.
  if (socket.writableEnded) return
  const answers = answersOn(socket)
  const last = answers.at(-1)
  if (last === undefined) endRefused(socket, writer.problemMessage(refused))
  // Earlier requests are answered; the last of them ends the connection.
  else if (last.req.isHere) last.shouldKeepAlive = false
  // The unreadable body is the last one's, which waits for its turn, or is being answered.
  else if (answers.length > 1) last.req.refusal = refused
  else {
    if (!last.headersSent) socket.end(writer.problemMessage(refused))
    socket.destroy()
  }
}

/** How a request is handled (contract §3.1, §10). */
export type Way =
  /** `shadow`: forwarded and observed. */
  | { readonly kind: 'protect' | 'shadow'; readonly route: RoutePolicy }
  /** `ignored`: the answer says that a protected route got no key. */
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }
  /** The proxy's own endpoints. */
  | { readonly kind: 'issue' | 'status' | 'policy' }
  /** CORS, for this method. */
  | { readonly kind: 'preflight'; readonly cors: Cors; readonly method: string }

/** Called for a request that matches no route, and would match this one if case, `;parameters` or an extension did not count. */
export type NearMissHandler = (route: string, method: string, path: string) => void

/** Dispatches requests by one configuration. A request keeps the routing it arrived under. */
export class Routing {
  readonly config: Config
  readonly router: Router
  readonly forwarding: Forwarding
  readonly cors: Cors | null
  #policy: string | null = null
  readonly #onNearMiss: NearMissHandler
  readonly #issuerPath: string | null
  readonly #statusPath: string | null

  constructor(
    config: Config,
    upstream: Pick<Forwarding, 'host' | 'loop'>,
    onNearMiss: NearMissHandler = () => {},
  ) {
    this.config = config
    this.#onNearMiss = onNearMiss
    this.router = new Router(policiesOf(config))
    this.forwarding = { ...upstream, counted: identifyingHeaders(config) }
    const { issuer, status, cors } = config
    this.cors = cors === null ? null : new Cors(cors, config)
    this.#issuerPath = issuer === null ? null : normalisePath(issuer.path)
    this.#statusPath = status.path === null ? null : normalisePath(status.path)
  }

  /** The body of `GET /.well-known/idempotency`. */
  get policy(): string {
    return (this.#policy ??= `${JSON.stringify(policyDocument(this.config))}\n`)
  }

  wayOf(request: TrafficRequest, target: RequestTarget): Way {
    const { config, cors } = this
    const method = request.method as string
    const own = this.#ownEndpoint(method, target)
    if (own !== null) return { kind: own }
    const asked = cors === null ? null : preflightFor(method, request.rawHeaders)
    const preflight =
      cors === null || asked === null ? null : ({ kind: 'preflight', cors, method: asked } as const)
    if (preflight !== null && this.#ownEndpoint(preflight.method, target) !== null) return preflight
    const route = this.router.match(method, target)
    if (route === null || route === config.defaults) {
      const near = this.router.nearMiss(method, target)
      if (near !== null) this.#onNearMiss(near.name, method, target.path)
    }
    if (route === null && config.unmatched === 'reject') return preflight ?? { kind: 'refuse' }
    if (route === null || !readsKeys(route)) return { kind: 'pass', route, ignored: false }
    // Only routes can require a key.
    const isMatched = route !== config.defaults
    if ((isMatched && route.key.presence === 'required') || mayHaveKey(request, target, route))
      return { kind: route.mode === 'shadow' ? 'shadow' : 'protect', route }
    return { kind: 'pass', route, ignored: isMatched && route.statusHeader }
  }

  #ownEndpoint(method: string, { path }: RequestTarget): 'issue' | 'status' | 'policy' | null {
    if (method === 'POST') return path === this.#issuerPath ? 'issue' : null
    if (method === 'GET' && path === this.#statusPath) return 'status'
    const isAsked = path === WELL_KNOWN && (method === 'GET' || method === 'HEAD')
    return isAsked && this.config.wellKnown ? 'policy' : null
  }
}

/** The routing of the configuration in force. */
export function routingOf(
  inForce: InForce,
  upstream: ConstructorParameters<typeof Routing>[1],
  onNearMiss?: NearMissHandler,
): () => Routing {
  let routing = new Routing(inForce.config, upstream, onNearMiss)
  return () => {
    if (routing.config !== inForce.config) routing = new Routing(inForce.config, upstream, onNearMiss)
    return routing
  }
}

/** A key that is not in the head may be in the body, or be derived from it. */
function mayHaveKey({ rawHeaders }: TrafficRequest, { query }: RequestTarget, { key }: RoutePolicy): boolean {
  return carriesKey({ headers: rawHeaders, query }, key.from) || keyNeedsBody(key) || key.derive !== null
}
