import { randomInt } from 'node:crypto'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Duplex } from 'node:stream'
import type { InForce } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { isProtected, parseTarget, type Target } from '../core/route.ts'
import type { KeyIssuer } from '../protect/identify.ts'
import type { Ports } from '../protect/ports.ts'
import { Shares } from '../runtime/limits.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import type { Upstream } from '../upstream/pool.ts'
import type { Stalled } from './bodies.ts'
import { answersOn, TrafficServer } from './connections.ts'
import { malformed, refusalOfParser, refuseHead, routingOf } from './dispatch.ts'
import { answerIssue, answerPolicy, answerStatus } from './endpoints.ts'
import { isLoop, type LoopMark, requestLines, TrustedProxies } from './headers.ts'
import { passthrough } from './passthrough.ts'
import {
  type Incoming,
  type ProtectOptions,
  protectedRequest,
  type RequestSpans,
  type ShadowOptions,
  serveProtected,
  tapRequest,
} from './protected.ts'
import { endRefused, isWebSocket, tunnels } from './tunnel.ts'
import { breakOff, ResponseWriter } from './write.ts'

/** For the head (request line and header lines); bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

export interface TrafficOptions {
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
  /** A request carries this proxy's own `CDN-Loop` entry. */
  readonly onLoop: (method: string) => void
  readonly onBug: (error: unknown) => void
  /** While draining, connections are not kept alive, so that clients move on to other replicas. */
  readonly draining: () => boolean
}

/** The server for client traffic: each request is handled as {@link routingOf} says. */
export async function trafficServer(options: TrafficOptions): Promise<TrafficServer> {
  const { inForce, loop, ports, upstream, onBug } = options
  const { config } = inForce
  const routing = routingOf(inForce, { host: upstream.host, loop })
  const proxies = new TrustedProxies(config.trustProxy)
  const writer = new ResponseWriter(config.problems.baseUrl, config.upstream.idleTimeout, options.stalled)
  const tunnel = tunnels(upstream, writer, config.upstream)
  const pass = await passthrough({
    ...config.upstream,
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

  const readHead = (request: IncomingMessage): Target | Refusal => {
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
    response.once('close', () => options.passed(name, performance.now() - startedAt))
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
    const asked = protectedRequest(protecting, route, { ...incoming, target }, method)
    await answerStatus(ports, writer, asked, response)
  }

  const serve = (request: IncomingMessage, response: ServerResponse): void => {
    if (options.draining()) response.shouldKeepAlive = false
    const target = readHead(request)
    if ('code' in target) {
      response.shouldKeepAlive = false
      writer.problem(response, target)
      return
    }
    const incoming = { response, target, peer: proxies.peerOf(request.socket.remoteAddress) }
    const orBreakOff = (answering: Promise<void>): void =>
      void answering.catch((error: unknown) => {
        onBug(error)
        breakOff(response)
      })
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
        return orBreakOff(answerIssue(ports, writer, options.issuer as KeyIssuer, response))
      case 'status':
        return orBreakOff(status(incoming))
      case 'policy':
        return answerPolicy(routing().policy, response)
    }
  }

  const server = new TrafficServer(
    {
      requestTimeout: 0,
      headersTimeout: HEAD_TIMEOUT,
      keepAliveTimeout: KEEP_ALIVE,
      // Behind an unanswered request a handshake is an ordinary GET: its answer must not overtake.
      shouldUpgradeCallback: (request) => isWebSocket(request) && answersOn(request.socket).length === 0,
      // refuseHead does this, as a problem document.
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
  server.on('checkContinue', (request: IncomingMessage, response: ServerResponse) => {
    // Otherwise the refusal is the answer.
    if (refuseHead(request) === null) response.writeContinue()
    server.emit('request', request, response)
  })
  server.on('checkExpectation', (_request: IncomingMessage, response: ServerResponse) => {
    response.shouldKeepAlive = false
    writer.problem(response, malformed(417, 'an expectation other than 100-continue'))
  })
  server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
    // Node has removed its own listener; without one, a reset would end the process.
    socket.on('error', () => socket.destroy())
    const target = readHead(request)
    if ('code' in target) return endRefused(socket, writer.problemMessage(target))
    // Handshakes are never protected, whatever key they carry, but `unmatched: reject` applies.
    if (routing().wayOf(request, target).kind === 'refuse')
      return endRefused(socket, writer.problemMessage(noRoute(request, target)))
    const peer = proxies.peerOf(request.socket.remoteAddress)
    const client = proxies.clientOf(request.rawHeaders, peer)
    const lines = requestLines(request.rawHeaders, peer, routing().forwarding)
    tunnel(client, { request, target: target.origin, lines, socket, head })
  })
  // Node has released the connection, so earlier requests on it can no longer be answered.
  server.on('connect', (_request: IncomingMessage, socket: Duplex) => {
    socket.on('error', () => socket.destroy())
    if (answersOn(socket).length > 0) socket.destroy()
    else endRefused(socket, writer.problemMessage(malformed(501, 'the method CONNECT')))
  })
  return server
}

function noRoute({ method }: IncomingMessage, { path }: Target): Refusal {
  return refusal('route_not_found', `no route matches ${method} ${path}`)
}

/**
 * Answers parser errors and late heads with a problem document and ends the connection, since nobody knows where the next request
 * would begin. Behind an unanswered request nothing is sent: the client would take it for that request's answer.
 */
function refuseUnread(writer: ResponseWriter, error: NodeJS.ErrnoException, socket: Duplex): void {
  const refused = refusalOfParser(error)
  if (refused === null || socket.destroyed) return void socket.destroy()
  // The parser repeats the error for every further chunk.
  if (socket.writableEnded) return
  const answers = answersOn(socket)
  const [first] = answers
  const last = answers.at(-1)
  if (first === undefined || last === undefined) return endRefused(socket, writer.problemMessage(refused))
  if (first === last && !first.req.complete && !first.headersSent) {
    socket.end(writer.problemMessage(refused))
    socket.destroy()
    return
  }
  // Earlier requests are answered; the last of them ends the connection.
  last.shouldKeepAlive = false
  if (answers.some(({ req }) => !req.complete)) socket.destroy()
}
