import { once } from 'node:events'
import type {
  Server as HttpServer,
  IncomingMessage,
  RequestListener,
  ServerOptions,
  ServerResponse,
} from 'node:http'
import type { AddressInfo, Socket } from 'node:net'
import type { Address } from '../config/config.ts'
import type { Millis } from '../core/record.ts'

const { Server } = process.getBuiltinModule('node:http')

/** Requests that a connection may send ahead before it is no longer read. */
const READ_AHEAD = 16
/** Then reading resumes briefly: only a reader learns that the client has left. */
const HOLD: Millis = 1000
/** The same over all connections, since one read may hold 2,400 requests. Beyond it, the connection furthest ahead is cut. */
const MOST_READ_AHEAD = 10_000

/** A request that waits for its turn on its connection. */
interface Waiting {
  readonly event: string
  readonly request: IncomingMessage
  readonly response: ServerResponse
}

const kState = Symbol('state')
/** On the connection itself: a set of all answers would keep dead ones alive (docs/adr/0017). */
interface Connection extends Socket {
  [kState]?: ConnectionState
}

interface ConnectionState {
  /** Open answers in the order of their requests; the first is being served. */
  readonly answers: ServerResponse[]
  readonly waiting: Waiting[]
  /** Set while nothing is read: the client is too far ahead. */
  held: NodeJS.Timeout | null
  isTunnel: boolean
}

/** The open answers on a connection of a {@link TrafficServer}, in the order of their requests. */
export function answersOn(socket: object): readonly ServerResponse[] {
  return (socket as Connection)[kState]?.answers ?? []
}

/**
 * Serves the requests of a connection one at a time (RFC 9112 §9.3.2, docs/adr/0043), bounds how far ahead it reads, and ends every
 * answer of a connection that closes: after an upgrade or `CONNECT`, Node forgets those that waited.
 */
export class TrafficServer extends Server {
  readonly #connections = new Set<Connection>()
  #unanswered = 0
  #waiting = 0
  readonly #onBug: (error: unknown) => void

  /** `onBug`: a listener threw. Only its connection ends. */
  constructor(options: ServerOptions, listener: RequestListener, onBug: (error: unknown) => void) {
    super(options, listener)
    this.#onBug = onBug
    this.on('connection', (connection: Connection) => this.#watch(connection))
    this.prependListener('upgrade', (_request, connection: Connection) => {
      stateOf(connection).isTunnel = true
    })
  }

  /** Requests without a complete answer, passed ones included; WebSockets do not count. */
  get unanswered(): number {
    return this.#unanswered
  }

  override emit(event: string, ...args: unknown[]): boolean {
    const isTaken = event === 'upgrade' || event === 'connect'
    if (!isTaken && event !== 'request' && event !== 'checkContinue' && event !== 'checkExpectation')
      return super.emit(event, ...args)
    const [request, response] = args as [IncomingMessage, ServerResponse]
    const connection = request.socket as Connection
    if (isTaken) return this.#tell(event, connection, args)
    const state = stateOf(connection)
    // Emitted again after `checkContinue`.
    if (state.answers[0] === response) return this.#tell(event, connection, args)
    // After `Connection: close` nobody would get its answer.
    if (!connection.writable) {
      connection.destroy()
      return true
    }
    state.answers.push(response)
    this.#unanswered++
    response.once('close', () => this.#answered(connection, state, response))
    // Not upgraded, and Node has discarded what came with it.
    if (request.headers.upgrade !== undefined) response.shouldKeepAlive = false
    if (state.answers.length === 1) return this.#tell(event, connection, args)
    state.waiting.push({ event, request, response })
    this.#waiting++
    if (this.#waiting > MOST_READ_AHEAD) this.#cutFurthest()
    if (state.waiting.length >= READ_AHEAD) hold(connection, state)
    return true
  }

  /** Has the open answers close their connections; later ones do so by themselves. */
  endConnections(): void {
    for (const connection of this.#connections)
      for (const response of stateOf(connection).answers) response.shouldKeepAlive = false
  }

  /** Node's own, which `close` calls too, destroys connections whose answer has not left yet. */
  override closeIdleConnections(): void {
    for (const connection of this.#connections) {
      const { answers, isTunnel } = stateOf(connection)
      if (answers.length === 0 && !isTunnel) connection.destroy()
    }
  }

  /** Including tunnels, which Node forgets. */
  override closeAllConnections(): void {
    for (const connection of this.#connections) connection.destroy()
  }

  #watch(connection: Connection): void {
    const state: ConnectionState = { answers: [], waiting: [], held: null, isTunnel: false }
    connection[kState] = state
    this.#connections.add(connection)
    // Node resumes it by itself, for example after a body.
    connection.on('resume', () => {
      if (state.held !== null) connection.pause()
    })
    connection.once('close', () => {
      this.#connections.delete(connection)
      if (state.held !== null) clearTimeout(state.held)
      for (const response of state.answers) response.destroy()
    })
  }

  #answered(connection: Connection, state: ConnectionState, response: ServerResponse): void {
    const { answers, waiting } = state
    answers.splice(answers.indexOf(response), 1)
    this.#unanswered--
    const place = waiting.findIndex((one) => one.response === response)
    if (place >= 0) this.#leave(waiting, place)
    const [next] = waiting
    // After `Connection: close`, what was sent behind it is not served.
    if (next === undefined || next.response !== answers[0] || !connection.writable) return
    this.#leave(waiting, 0)
    if (waiting.length === 0) readOn(connection, state)
    this.#tell(next.event, connection, [next.request, next.response])
  }

  #tell(event: string, connection: Connection, args: unknown[]): boolean {
    try {
      return super.emit(event, ...args)
    } catch (error) {
      this.#onBug(error)
      connection.destroy()
      return true
    }
  }

  #cutFurthest(): void {
    let furthest: Connection | null = null
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

  #leave(waiting: Waiting[], place: number): void {
    waiting.splice(place, 1)
    this.#waiting--
  }
}

function hold(connection: Connection, state: ConnectionState): void {
  state.held ??= setTimeout(() => readOn(connection, state), HOLD)
  connection.pause()
}

function readOn(connection: Connection, state: ConnectionState): void {
  if (state.held === null) return
  clearTimeout(state.held)
  state.held = null
  connection.resume()
}

function stateOf(connection: Connection): ConnectionState {
  return connection[kState] as ConnectionState
}

/**
 * Listens, and returns the URL.
 * @throws with the name of the `property` whose address cannot be used.
 */
export async function listen(server: HttpServer, property: string, { host, port }: Address): Promise<string> {
  server.listen({ host, port })
  try {
    await once(server, 'listening')
  } catch (error) {
    throw new Error(`${property}: ${(error as Error).message}`, { cause: error })
  }
  const { address, port: chosen, family } = server.address() as AddressInfo
  return `http://${family === 'IPv6' ? `[${address}]` : address}:${chosen}`
}

/** Accepts no new connections; resolves when the existing ones have ended. */
export function closeServer(server: HttpServer): Promise<void> {
  return new Promise((resolve) => {
    if (!server.listening) return resolve()
    server.close(() => resolve())
    server.closeIdleConnections()
  })
}
