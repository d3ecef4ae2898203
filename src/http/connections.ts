import { once } from 'node:events'
import type { Server as HttpServer, ServerOptions } from 'node:http'
import type { AddressInfo, Server as NetServer, Socket } from 'node:net'
import { setImmediate as immediately } from 'node:timers/promises'
import type { TLSSocket } from 'node:tls'
import type { Address, Config } from '../config/config.ts'
import type { Millis } from '../core/record.ts'
import { Batch } from '../runtime/scheduling.ts'
import { closeListener } from './close-listener.ts'
import { PlainConnection, type PlainHost, type PlainResponse } from './plain.ts'
import { StreamRequest, type TrafficRequest, type TrafficResponse } from './request.ts'
import type { Handshakes } from './tls.ts'

const { Server } = process.getBuiltinModule('node:http')
const { Server: Listener } = process.getBuiltinModule('node:net')

/** How many requests a connection may send ahead before it is no longer read. */
const READ_AHEAD = 16
/** While paused, it is read briefly every second, to notice a client that has left, up to this many requests. */
const HOLD: Millis = 1000
const FAR_AHEAD = 2_500
/** The same across all connections, since one read may hold 2,400 requests. Beyond it, the connection furthest ahead is cut. */
const MAX_READ_AHEAD = 10_000

/** How long the latest connections may take to send their request. */
const LAST: Millis = 1000

/** How often idle plain connections are checked. */
const SWEEP: Millis = 5000

/** A request that waits for its turn on its connection. */
interface QueuedRequest {
  readonly event: string
  readonly request: StreamRequest
  readonly response: TrafficResponse
}

/** Begins TLS on a listener; `secured` gets each connection after its handshake. */
export type Secure = (secured: (connection: Socket) => void) => Handshakes

/** Serves HTTP/2. */
export type Multiplex = Pick<typeof import('./http2.ts'), 'beginsHttp2' | 'serveHttp2'>

const kState = Symbol('state')
/** Stored on the connection: a set of all answers would keep dead ones alive (docs/adr/0017). */
interface TrackedSocket extends Socket {
  [kState]?: ConnectionState
}

interface ConnectionState {
  /** Open answers in the order of their requests; the first is being served. */
  readonly answers: TrafficResponse[]
  readonly waiting: QueuedRequest[]
  /** Set while reading is paused because the client is too far ahead. */
  held: NodeJS.Timeout | null
  isTunnel: boolean
  /** HTTP/2 only: lets its requests finish, and accepts no more. */
  goAway: (() => void) | null
  /** Bytes that had arrived when the last request was answered. */
  readBefore: number
}

/** The open answers on a connection of a {@link TrafficServer}, in the order of their requests. */
export function answersOn(socket: object): readonly TrafficResponse[] {
  return (socket as TrackedSocket)[kState]?.answers ?? []
}

/**
 * Serves the requests of a connection one at a time (RFC 9112 §9.3.2, docs/adr/0044), bounds how far ahead it reads, and ends every answer
 * of a connection that closes: after an upgrade or `CONNECT`, Node forgets queued ones.
 */
export class TrafficServer extends Server<typeof StreamRequest> implements PlainHost {
  readonly #connections = new Set<TrackedSocket>()
  #unanswered = 0
  #waiting = 0
  /** Until this time, connections may still send a last request. */
  #lastUntil = Number.POSITIVE_INFINITY
  readonly #sweepEvery: Millis
  readonly #onBug: (error: unknown) => void
  readonly #listener: (request: TrafficRequest, response: TrafficResponse) => void
  readonly #holds: boolean
  /** Null: Node handles every connection. */
  readonly #plain: Set<PlainConnection> | null
  readonly #served = new Batch<PlainResponse>((response) => {
    // Node reports the closed connection in a later phase of the event loop.
    this.#guard(response.req.socket, () => this.#listener(response.req, response))
  })
  /** Null: it does not speak HTTP/2. */
  readonly #multiplex: Multiplex | null
  /** Null: it speaks plain text. */
  readonly #handshakes: Handshakes | null
  clock: Millis = performance.now()

  /**
   * `onBug`: a listener threw; only its connection ends. `holds`: small bodies bypass streams; `plain`: so do whole requests in
   * the plainest form (docs/adr/0076).
   */
  constructor(
    {
      holds = false,
      plain = false,
      secure = null,
      multiplex = null,
      ...options
    }: ServerOptions<typeof StreamRequest> & {
      readonly holds?: boolean
      readonly plain?: boolean
      readonly secure?: Secure | null
      readonly multiplex?: Multiplex | null
    },
    listener: (request: TrafficRequest, response: TrafficResponse) => void,
    onBug: (error: unknown) => void,
  ) {
    super({ ...options, IncomingMessage: StreamRequest }, listener)
    this.#onBug = onBug
    this.#listener = listener
    this.#holds = holds
    this.#plain = plain ? new Set() : null
    this.#multiplex = multiplex
    this.#handshakes = secure?.((connection) => this.#open(connection)) ?? null
    this.#sweepEvery = options.connectionsCheckingInterval ?? SWEEP
    if (this.#plain !== null)
      this.once('listening', () => {
        const sweep = setInterval(() => this.#sweep(), this.#sweepEvery).unref()
        this.once('close', () => clearInterval(sweep))
      })
    this.prependListener('upgrade', (_request, connection: TrackedSocket) => {
      stateOf(connection).isTunnel = true
    })
  }

  /** Requests without a complete answer, those passed through included; WebSockets do not count. */
  get unanswered(): number {
    return this.#unanswered
  }

  override emit(event: string, ...args: unknown[]): boolean {
    if (event === 'connection') return this.#accept(args[0] as TrackedSocket)
    const isTaken = event === 'upgrade' || event === 'connect'
    if (!isTaken && event !== 'request' && event !== 'checkContinue' && event !== 'checkExpectation')
      return super.emit(event, ...args)
    const [request, response] = args as [StreamRequest, TrafficResponse]
    const connection = request.socket as TrackedSocket
    if (isTaken) return this.#tell(event, connection, args)
    const state = stateOf(connection)
    // Emitted again after `checkContinue`.
    if (state.answers[0] === response) return this.#tell(event, connection, args)
    // After `Connection: close` nobody would receive the answer.
    if (!connection.writable) {
      connection.destroy()
      return true
    }
    state.answers.push(response)
    this.#unanswered++
    response.on('close', () => this.#answered(connection, state, response))
    // It is not upgraded, and Node has discarded the bytes after it: no other request can follow.
    if (request.framing.upgrade) response.shouldKeepAlive = false
    if (this.#holds && event === 'request') request.hold()
    if (state.answers.length === 1) {
      this.#serve(event, request, response)
      return true
    }
    state.waiting.push({ event, request, response })
    this.#waiting++
    if (this.#waiting > MAX_READ_AHEAD) this.#cutFurthest()
    if (state.waiting.length >= READ_AHEAD) hold(connection, state)
    return true
  }

  /** Makes the open answers close their connections. Later ones do so by themselves. */
  endConnections(): void {
    for (const connection of this.#connections) {
      const { answers, goAway } = stateOf(connection)
      if (goAway !== null) goAway()
      else for (const response of answers) response.shouldKeepAlive = false
    }
  }

  /** Resolves once every request that has arrived by now is answered. */
  async allAnswered(): Promise<void> {
    const open = [...this.#connections].flatMap((connection) => stateOf(connection).answers)
    await Promise.all(open.map((response) => new Promise((resolve) => response.once('close', resolve))))
  }

  /** How many connections may be about to send a request: they are new, or part of one has arrived. */
  get awaiting(): number {
    let count = performance.now() < this.#lastUntil ? (this.#handshakes?.open ?? 0) : 0
    for (const connection of this.#connections) if (this.#isAwaited(connection)) count++
    return count
  }

  /** Closes only the listener; Node's own for HTTP ends idle connections first. */
  closeListener(): Promise<void> {
    return closeListener(this, () => Listener.prototype.close.call(this))
  }

  /** Serves the connections that another process accepts. */
  takeConnections(): void {
    this.emit('listening')
  }

  /** Serves a connection that another process has accepted, as if this server had. */
  take(connection: Socket): void {
    connection.allowHalfOpen = true
    connection.setNoDelay(true)
    this.emit('connection', connection)
  }

  override close(done?: (error?: Error) => void): this {
    this.#lastUntil = performance.now() + LAST
    return super.close(done)
  }

  /** Overridden, as `close` calls it too: Node's destroys connections whose answer has not left yet, or whose request is just arriving. */
  override closeIdleConnections(): void {
    for (const connection of this.#connections) {
      const { answers, isTunnel } = stateOf(connection)
      if (answers.length === 0 && !isTunnel && !this.#isAwaited(connection)) connection.destroy()
    }
  }

  /** Closes idle connections after reading what has arrived. */
  async closeIdle(): Promise<void> {
    await immediately()
    this.closeIdleConnections()
  }

  /** Including tunnels, which Node forgets. */
  override closeAllConnections(): void {
    for (const connection of this.#connections) connection.destroy()
    this.#handshakes?.destroy()
  }

  #isAwaited(connection: TrackedSocket): boolean {
    const { answers, isTunnel, readBefore } = stateOf(connection)
    const { bytesRead } = connection
    const isIdle = bytesRead > 0 && bytesRead === readBefore
    return answers.length === 0 && !isTunnel && !isIdle && performance.now() < this.#lastUntil
  }

  #accept(connection: TrackedSocket): boolean {
    if (this.#handshakes === null) return this.#open(connection)
    this.#handshakes.begin(connection)
    return true
  }

  #open(connection: TrackedSocket): boolean {
    this.#watch(connection)
    if (this.#multiplex === null) return this.#serveHttp1(connection)
    if (this.#handshakes === null) void this.#tellApart(connection, this.#multiplex)
    else if ((connection as TLSSocket).alpnProtocol === 'h2') this.#serveHttp2(connection, this.#multiplex)
    else this.#serveHttp1(connection)
    return true
  }

  async #tellApart(connection: TrackedSocket, multiplex: Multiplex): Promise<void> {
    const isHttp2 = await multiplex.beginsHttp2(connection, this.headersTimeout)
    if (isHttp2 === null || connection.destroyed) connection.destroy()
    else if (isHttp2) this.#serveHttp2(connection, multiplex)
    else this.#serveHttp1(connection)
  }

  #serveHttp2(connection: TrackedSocket, { serveHttp2 }: Multiplex): void {
    const session = serveHttp2(connection, this)
    stateOf(connection).goAway = () => session.close()
  }

  #serveHttp1(connection: TrackedSocket): boolean {
    if (this.#plain === null) return this.#giveToNode(connection)
    const plain = new PlainConnection(connection, this)
    this.#plain.add(plain)
    connection.once('close', () => this.#plain?.delete(plain))
    return true
  }

  serve(response: PlainResponse): void {
    stateOf(response.req.socket).answers.push(response)
    this.#unanswered++
    this.#served.add(response)
  }

  serveStream(response: TrafficResponse): void {
    const { req: request } = response
    const connection = request.socket as TrackedSocket
    const state = stateOf(connection)
    state.answers.push(response)
    this.#unanswered++
    response.once('close', () => this.#answered(connection, state, response))
    this.#guard(connection, () => this.#listener(request, response))
  }

  answered(response: PlainResponse): void {
    const connection = response.req.socket
    const state = stateOf(connection)
    this.#answered(connection, state, response)
    // The head had left before this was decided, so it could not say `Connection: close`. If Node has discarded what followed, no timeout
    // would end the connection.
    if (!response.shouldKeepAlive && state.answers.length === 0) connection.destroySoon()
  }

  handOver(connection: PlainConnection): void {
    this.#plain?.delete(connection)
    this.#giveToNode(connection.socket)
  }

  #giveToNode(connection: TrackedSocket): boolean {
    super.emit('connection', connection)
    // Node resumes a paused connection by itself, for example after a body. Added after Node's own listener, which starts reading.
    connection.on('resume', () => {
      if (stateOf(connection).held !== null) connection.pause()
    })
    return true
  }

  /** Does for plain connections what Node's timeouts do for its own. */
  #sweep(): void {
    this.clock = performance.now()
    // `since` may be one sweep too early.
    const before = this.clock - this.#sweepEvery
    for (const { idle, socket } of this.#plain ?? []) {
      if (idle === null) continue
      const waited = before - idle.since
      if (idle.isNew) {
        if (waited >= this.headersTimeout) this.emit('clientError', new HeadTimeout(), socket)
      } else if (waited >= this.keepAliveTimeout + this.keepAliveTimeoutBuffer) socket.destroy()
    }
  }

  #watch(connection: TrackedSocket): void {
    const state: ConnectionState = {
      answers: [],
      waiting: [],
      held: null,
      isTunnel: false,
      goAway: null,
      readBefore: 0,
    }
    connection[kState] = state
    this.#connections.add(connection)
    connection.once('close', () => {
      this.#connections.delete(connection)
      if (state.held !== null) clearInterval(state.held)
      for (const response of state.answers) response.destroy()
    })
  }

  #answered(connection: TrackedSocket, state: ConnectionState, response: TrafficResponse): void {
    const { answers, waiting } = state
    this.#unanswered--
    state.readBefore = connection.bytesRead
    if (answers[0] === response) answers.shift()
    else answers.splice(answers.indexOf(response), 1)
    if (waiting.length === 0) return
    const place = waiting.findIndex((one) => one.response === response)
    if (place >= 0) this.#leave(waiting, place)
    const [next] = waiting
    // Requests sent after `Connection: close` are not served.
    if (next === undefined || next.response !== answers[0] || !connection.writable) return
    this.#leave(waiting, 0)
    if (waiting.length === 0) readOn(connection, state)
    this.#serve(next.event, next.request, next.response)
  }

  #serve(event: string, request: StreamRequest, response: TrafficResponse): void {
    request.afterBody(() => this.#tell(event, request.socket, [request, response]))
  }

  #tell(event: string, connection: Socket, args: unknown[]): boolean {
    return this.#guard(connection, () => super.emit(event, ...args))
  }

  #guard(connection: Socket, listeners: () => unknown): boolean {
    try {
      listeners()
    } catch (error) {
      this.#onBug(error)
      connection.destroy()
    }
    return true
  }

  #cutFurthest(): void {
    let furthest: TrackedSocket | null = null
    let most = 0
    for (const connection of this.#connections) {
      const { length } = stateOf(connection).waiting
      if (length <= most) continue
      furthest = connection
      most = length
    }
    if (furthest === null) return
    // Now, since the answers emit `close` later.
    this.#waiting -= most
    stateOf(furthest).waiting.length = 0
    furthest.destroy()
  }

  #leave(waiting: QueuedRequest[], place: number): void {
    waiting.splice(place, 1)
    this.#waiting--
  }
}

/** A copy of Node's own, which is not exported. */
class HeadTimeout extends Error {
  readonly code = 'ERR_HTTP_REQUEST_TIMEOUT'
}

function hold(connection: TrackedSocket, state: ConnectionState): void {
  state.held ??= setInterval(() => {
    if (state.waiting.length < FAR_AHEAD) readOn(connection, state)
  }, HOLD)
  connection.pause()
}

function readOn(connection: TrackedSocket, state: ConnectionState): void {
  if (state.held === null) return
  clearInterval(state.held)
  state.held = null
  connection.resume()
}

function stateOf(connection: Socket): ConnectionState {
  return (connection as TrackedSocket)[kState] as ConnectionState
}

/** Under TLS a reset is the TCP connection's, which Node calls `_parent`; an HTTP/2 stream ends alone. */
export function resetConnection(connection: Socket): void {
  const { _parent: under } = connection as { readonly _parent?: Socket | null }
  if (under?.resetAndDestroy !== undefined) under.resetAndDestroy()
  else if ('encrypted' in connection || !('resetAndDestroy' in connection)) connection.destroy()
  else connection.resetAndDestroy()
}

/**
 * Listens, and returns the URL.
 * @throws with the name of the `property` whose address cannot be used.
 */
export async function listen(
  server: NetServer,
  property: string,
  { address, tls }: Config['ops']['listen'],
): Promise<string> {
  const { host, port } = address as Address
  server.listen({ host, port })
  try {
    await once(server, 'listening')
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException
    const others = property === 'listen' ? ', in the file or as --listen' : ', or none, in the file'
    const hint = code === 'EADDRINUSE' ? `; give \`${property}\` another address${others}` : ''
    throw new Error(`${property}: ${message}${hint}`, { cause: error })
  }
  const { address: bound, port: chosen, family } = server.address() as AddressInfo
  return `${tls === null ? 'http' : 'https'}://${family === 'IPv6' ? `[${bound}]` : bound}:${chosen}`
}

/** Accepts no new connections; resolves when the existing ones have ended. */
export function closeServer(server: HttpServer): Promise<void> {
  return new Promise((resolve) => {
    server.close(() => resolve())
    server.closeIdleConnections()
  })
}
