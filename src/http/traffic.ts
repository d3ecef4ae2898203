import { randomInt } from 'node:crypto'
import type { Socket } from 'node:net'
import type { TLSSocket } from 'node:tls'
import { type FastifyBaseLogger, type FastifyInstance, fastify } from 'fastify'
import type { Config } from '../config/config.ts'
import type { Refusal } from '../core/refusal.ts'
import type { KeyIssuer } from '../protect/identify.ts'
import type { WalkPorts } from '../protect/ports.ts'
import { Shares } from '../runtime/limits.ts'
import type { Upstream } from '../upstream/pool.ts'
import { shownCertificate } from './client-certificate.ts'
import type { Multiplex, Secure, TrafficServer } from './connections.ts'
import { endpoints } from './endpoints.ts'
import { type LoopMark, type Peer, TrustedProxies } from './headers.ts'
import { refusedByHead, refuseUnread } from './heads.ts'
import { hijacking, Refused, requestOf, responseOf, takeAnyType } from './incoming.ts'
import { type PassOptions, passing, passingOn } from './pass.ts'
import { type ProtectOptions, protectedRoutes, type RequestSpans, type ShadowOptions } from './protected.ts'
import { isMultiplexed, type TrafficRequest, type TrafficResponse } from './request.ts'
import { type NearMissHandler, OTHER, Routing } from './routing.ts'
import { noRoute, trafficServer } from './server.ts'
import type { Stalled } from './stalled.ts'
import { breakOff, ResponseWriter } from './write.ts'

const { METHODS } = process.getBuiltinModule('node:http')

export interface TrafficOptions {
  readonly config: Config
  readonly log: FastifyBaseLogger
  readonly secure: Secure | null
  readonly multiplex: Multiplex | null
  /** While draining, connections are not kept alive, so that clients move on to other replicas. */
  readonly draining: () => boolean
  readonly ports: WalkPorts
  readonly upstream: Upstream
  readonly loop: LoopMark
  readonly issuer: KeyIssuer | null
  readonly stalled: Stalled
  readonly shadow: ShadowOptions
  readonly spans: RequestSpans | null
  readonly passed: PassOptions['passed']
  readonly passFailed: PassOptions['passFailed']
  /** Called when a request carries this proxy's own `CDN-Loop` entry. */
  readonly onLoop: (method: string) => void
  readonly onNearMiss: NearMissHandler
  /** Called when a replay has the CORS headers of another origin, while `cors` is off. */
  readonly onOtherOrigin: (route: string) => void
  readonly onBug: (error: unknown) => void
}

/** The application of one configuration. */
interface InForce {
  readonly app: FastifyInstance
  readonly config: Config
  readonly routing: Routing
}

/** A configuration that may be put in force, or not. */
export interface Prepared {
  readonly use: () => Promise<void>
  readonly drop: () => void
}

const kPeer = Symbol('peer')
interface PeerSocket {
  readonly remoteAddress?: string | undefined
  [kPeer]?: Peer
}

/** The traffic listener: a server, and the Fastify application of the configuration in force (docs/adr/0127). */
export class Traffic {
  readonly server: TrafficServer
  readonly #options: TrafficOptions
  readonly #writer: ResponseWriter
  readonly #proxies: TrustedProxies
  readonly #shares = new Shares(randomInt(2 ** 32))
  #now!: InForce
  #uploads: typeof import('./uploads.ts').uploads | null = null
  #turn: Promise<unknown> = Promise.resolve()

  static async open(options: TrafficOptions): Promise<Traffic> {
    const traffic = new Traffic(options)
    traffic.#now = await traffic.#build(options.config)
    return traffic
  }

  private constructor(options: TrafficOptions) {
    const { config, stalled, upstream, onBug } = options
    this.#options = options
    this.#writer = new ResponseWriter(config.problems.baseUrl, config.upstream.idleTimeout, stalled)
    this.#proxies = new TrustedProxies(config.trustProxy)
    this.server = trafficServer(
      {
        http: config.http,
        secure: options.secure,
        multiplex: options.multiplex,
        upstream,
        limitsNow: () => this.#now.config.upstream,
        writer: this.#writer,
        proxies: this.#proxies,
        peerOf: this.#peerOf,
        routing: () => this.#now.routing,
        refusedByHead: this.#refusedByHead,
        onBug,
      },
      (request, response) => this.#now.app.routing(request as never, response as never),
    )
  }

  readonly #peerOf = ({ socket }: TrafficRequest): Peer => {
    const peer = socket as PeerSocket
    return (peer[kPeer] ??= this.#proxies.peerOf(peer.remoteAddress, overTls(socket)))
  }

  readonly #refusedByHead = (request: TrafficRequest): Refusal | null =>
    refusedByHead(request, this.#options.loop, this.#options.onLoop)

  /** @fastify/http-proxy and undici are loaded with the first body that streams (docs/adr/0074). */
  readonly #upload = async (response: TrafficResponse): Promise<void> => {
    const { req: request } = response
    this.#uploads ??= (await import('./uploads.ts')).uploads
    if (!this.#now.routing.hasUploads)
      await this.#inTurn(async () => this.#use(await this.#build(this.#now.config)))
    request.url = request.originalUrl
    this.#now.app.routing(request as never, response as never)
  }

  get app(): FastifyInstance {
    return this.#now.app
  }

  /** Makes an application of this configuration. Once used, it gets further requests; the previous one finishes its own. */
  async prepare(config: Config): Promise<Prepared> {
    const next = await this.#inTurn(() => this.#build(config))
    return {
      use: () => this.#inTurn(async () => this.#use(next)),
      drop: () => void next.app.close(),
    }
  }

  #use(next: InForce): void {
    const before = this.#now
    this.#now = next
    void this.server.allAnswered().then(() => before.app.close())
  }

  #inTurn<T>(make: () => Promise<T>): Promise<T> {
    const made = this.#turn.then(make)
    this.#turn = made.catch(() => {})
    return made
  }

  async close(): Promise<void> {
    await this.#now.app.close()
  }

  /** Hooks and plugins in the order in which they see a request (docs/internals/fastify-and-ioredis.md). */
  async #build(config: Config): Promise<InForce> {
    const { upstream, loop, onNearMiss, onOtherOrigin, log, draining, ports, stalled, spans, issuer, onBug } =
      this.#options
    const writer = this.#writer
    const uploads = this.#uploads
    if (writer.rpc === null && config.routes.some(({ match }) => match.grpc != null))
      writer.rpc = (await import('./rpc-answers.ts')).rpcRefusal
    const { host, isHttp2: takesTrailers } = upstream
    const routing = new Routing(config, { host, takesTrailers, loop }, onNearMiss, uploads !== null)
    // Each Fastify instance adds a listener to the shared server.
    this.server.removeAllListeners('clientError')
    const app = fastify({
      serverFactory: () => this.server,
      clientErrorHandler: (error, socket) => refuseUnread(writer, error, socket),
      rewriteUrl: routing.rewriteUrl as never,
      exposeHeadRoutes: false,
      routerOptions: { maxParamLength: Number.MAX_SAFE_INTEGER },
      bodyLimit: Number.MAX_SAFE_INTEGER,
      // There are no schemas, and the compiler takes longer to load than the framework.
      schemaController: { compilersFactory: { buildValidator: noSchemas, buildSerializer: noSchemas } },
    })
    for (const method of METHODS)
      if (!app.supportedMethods.includes(method)) app.addHttpMethod(method, { hasBody: true })
    app.addConstraintStrategy(routing.constraint)

    app.setErrorHandler((error, request, reply) => {
      reply.hijack()
      const response = responseOf(reply)
      // No route has an unknown method.
      const refused = error instanceof Refused ? error.refusal : requestOf(request).refusal
      if (refused !== undefined) return writer.problem(response, refused)
      onBug(error)
      breakOff(response)
    })

    // `loggerInstance` would make a child and two listeners for each request; the guard logs a line for each protected one.
    app.log = log
    app.addHook('onRequest', (request, reply, done) => {
      request.log = log
      reply.log = log
      if (draining()) responseOf(reply).shouldKeepAlive = false
      done()
    })
    if (config.cors !== null) (await import('./cors.ts')).cors(app, config.cors, config)
    app.addHook('onRequest', (request, reply, done) => {
      const raw = requestOf(request)
      const refused = this.#refusedByHead(raw)
      if (refused === null) return done()
      if (!isMultiplexed(raw)) responseOf(reply).shouldKeepAlive = false
      done(new Refused(refused))
    })

    const handle = hijacking(this.#peerOf, onBug)
    const protecting: ProtectOptions = {
      ports,
      writer,
      proxies: this.#proxies,
      upload: config.limits.upload,
      forwarding: routing.forwarding,
      uploads: { stalled, shares: this.#shares },
      statusPath: config.status.path,
      onOtherOrigin: config.cors === null ? onOtherOrigin : null,
      onBug,
      spans,
    }
    const pass = passing({ ...this.#options, config, writer, protecting })
    const passOn = passingOn(pass, this.#upload)
    const passUnmatched = handle(passOn)
    app.setNotFoundHandler((request, reply) => {
      const raw = requestOf(request)
      if (raw.arrival?.way.kind === 'refuse') throw new Refused(noRoute(raw))
      // Otherwise the router has missed a route: the request must not pass unprotected.
      if (raw.arrival?.policy !== OTHER.unmatched) throw new Error(`no route takes ${raw.arrival?.policy}`)
      return passUnmatched.call(app, request, reply)
    })
    // Plugins with routes install their own parsers.
    app.addHook('preParsing', function (request, reply, payload, done) {
      if (request.is404) takeAnyType.call(this, request, reply, payload, done)
      else done(null, payload)
    })
    app.register(endpoints, { config, routing, issuer, protecting, handle })
    app.register(protectedRoutes, { config, protecting, passOn, handle })
    if (uploads !== null) app.register(uploads, { upstream, pass, handle })
    await app.ready()
    return { app, config, routing }
  }
}

function overTls(connection: Socket): Pick<Peer, 'scheme' | 'certificate'> | undefined {
  if (!('encrypted' in connection)) return undefined
  return { scheme: 'https', certificate: shownCertificate(connection as TLSSocket) }
}

function noSchemas(): never {
  throw new Error('no route has a schema')
}
