import type { Duplex } from 'node:stream'
import type { Config } from '../config/config.ts'
import { malformed, type Refusal, refusal, unmetExpectation } from '../core/refusal.ts'
import type { Upstream } from '../upstream/pool.ts'
import { answersOn, type Multiplex, type Secure, TrafficServer } from './connections.ts'
import { type Peer, requestLines, type TrustedProxies } from './headers.ts'
import { refuseHead } from './heads.ts'
import type { Arrival, StreamRequest, StreamResponse, TrafficRequest, TrafficResponse } from './request.ts'
import type { Routing } from './routing.ts'
import { endRefused, isWebSocket, tunnels } from './tunnel.ts'
import type { ResponseWriter } from './write.ts'

/** For the head (request line and headers); bodies have `limits.upload` or stream. */
const HEAD_TIMEOUT = 30_000
/** Longer than the idle timeout of common load balancers (60 s), so that they close first. */
const KEEP_ALIVE = 72_000

export interface ServerOptions {
  /** `plain`: with our own reader in front of Node's parser (docs/adr/0076). */
  readonly http: Config['http']
  readonly secure: Secure | null
  readonly multiplex: Multiplex | null
  readonly limitsNow: () => Config['upstream']
  readonly upstream: Upstream
  readonly writer: ResponseWriter
  readonly proxies: TrustedProxies
  readonly peerOf: (request: TrafficRequest) => Peer
  /** The routing of the current Fastify application. */
  readonly routing: () => Routing
  readonly refusedByHead: (request: TrafficRequest) => Refusal | null
  readonly onBug: (error: unknown) => void
}

/** The server for `serverFactory`. It also handles what never reaches Fastify: upgrades, `CONNECT` and expectations. */
export function trafficServer(
  options: ServerOptions,
  handler: (request: TrafficRequest, response: TrafficResponse) => void,
): TrafficServer {
  const { writer, upstream, routing, proxies } = options
  const tunnel = tunnels(upstream, writer, options.limitsNow)
  const server = new TrafficServer(
    {
      holds: true,
      plain: options.http === 'plain',
      secure: options.secure,
      multiplex: options.multiplex,
      requestTimeout: 0,
      headersTimeout: HEAD_TIMEOUT,
      keepAliveTimeout: KEEP_ALIVE,
      // After an unanswered request a handshake is an ordinary GET: its answer must not overtake the earlier one.
      shouldUpgradeCallback: (request) => isWebSocket(request) && answersOn(request.socket).length === 0,
      // `refuseHead` does this, with a problem document.
      requireHostHeader: false,
    },
    handler,
    options.onBug,
  )
  // Unlimited: Node would silently drop lines after the 2000th, framing and keys included.
  server.maxHeadersCount = 0
  server.on('checkContinue', (request: StreamRequest, response: StreamResponse) => {
    // If the head is refused, the client gets the refusal instead of `100 Continue`.
    if (refuseHead(request) === null) response.writeContinue()
    server.emit('request', request, response)
  })
  server.on('checkExpectation', (request: StreamRequest, response: StreamResponse) => {
    request.refusal = unmetExpectation()
    server.emit('request', request, response)
  })
  server.on('upgrade', (request: StreamRequest, socket: Duplex, head: Buffer) => {
    // Node has removed its own listener; without one, a reset would end the process.
    socket.on('error', () => socket.destroy())
    routing().rewriteUrl(request)
    const refused = options.refusedByHead(request)
    if (refused !== null) return endRefused(socket, writer.problemMessage(refused))
    const { target, way } = request.arrival as Arrival
    // Handshakes are never protected, whatever key they carry, but `unmatched: reject` applies.
    if (way.kind === 'refuse') return endRefused(socket, writer.problemMessage(noRoute(request)))
    const peer = options.peerOf(request)
    const client = proxies.clientOf(request.rawHeaders, peer)
    // A tunnel is HTTP/1.1.
    const forwarding = { ...routing().forwarding, takesTrailers: false }
    const lines = requestLines(request.rawHeaders, peer, forwarding)
    tunnel(client, { request, target: target.origin, lines, socket, head })
  })
  server.on('connect', (_request: TrafficRequest, socket: Duplex) => {
    socket.on('error', () => socket.destroy())
    const refuse = (): void => endRefused(socket, writer.problemMessage(malformed(501, 'the method CONNECT')))
    const last = answersOn(socket).at(-1)
    if (last === undefined) return refuse()
    // Node has released the connection, so nothing else reads it or passes `drain` on to its answers.
    socket.on('drain', () => answersOn(socket)[0]?.emit('drain'))
    socket.resume()
    last.once('close', () => {
      // Not writable if that answer closed the connection.
      if (socket.writable) refuse()
    })
  })
  return server
}

export function noRoute({ method, arrival }: TrafficRequest): Refusal {
  return refusal('route_not_found', `no route matches ${method} ${arrival?.target.path}`)
}
