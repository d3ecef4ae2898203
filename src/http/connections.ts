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

/** How many requests a connection may send ahead of the one that is served, before it is no longer read. */
const READ_AHEAD = 16
/** Then a little more is read: only who reads is told that the client has left. */
const HOLD: Millis = 1000
/**
 * The same over all connections: what was read in one piece is parsed in one piece, 2,400 requests of 1.6 KB each at worst.
 * Beyond it, the connection that is furthest ahead is cut.
 */
const MOST_READ_AHEAD = 10_000

/** A request that waits until those before it on its connection are answered. */
interface Waiting {
  readonly event: string
  readonly request: IncomingMessage
  readonly response: ServerResponse
}

const kState = Symbol('state')
/**
 * Kept on the connection: a set of all answers, which grows and shrinks with every request, keeps V8 from letting go of them
 * (docs/internals/performance.md).
 */
interface Connection extends Socket {
  [kState]?: ConnectionState
}

interface ConnectionState {
  /** Answers under way, in the order of their requests; the first one is being served. */
  readonly answers: ServerResponse[]
  readonly waiting: Waiting[]
  /** Too far ahead: nothing is read until it fires, or all that wait have had their turn. */
  held: NodeJS.Timeout | null
  isTunnel: boolean
}

/** The answers under way on a connection of a {@link TrafficServer}, in the order of their requests. */
export function answersOn(socket: object): readonly ServerResponse[] {
  return (socket as Connection)[kState]?.answers ?? []
}

/**
 * A server that owns what its connections hold. It serves the requests of one connection one after the other (RFC 9112 §9.3.2),
 * reads no further than a bound, and ends every answer of a connection that closes: Node forgets the answers that wait behind
 * another one once the connection was upgraded or asked for `CONNECT`.
 */
export class TrafficServer extends Server {
  readonly #connections = new Set<Connection>()
  #unanswered = 0
  #waiting = 0
  readonly #onBug: (error: unknown) => void

  /** `onBug`: a listener threw; its connection is ended, and the others go on. */
  constructor(options: ServerOptions, listener: RequestListener, onBug: (error: unknown) => void) {
    super(options, listener)
    this.#onBug = onBug
    this.on('connection', (connection: Connection) => this.#watch(connection))
    this.prependListener('upgrade', (_request, connection: Connection) => {
      stateOf(connection).isTunnel = true
    })
  }

  /** Requests that wait for the end of their answer, passed ones too; WebSockets, which have no end, do not count. */
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
    // Told of again by who heard `checkContinue`.
    if (state.answers[0] === response) return this.#tell(event, connection, args)
    // `Connection: close` was said: nobody would get its answer.
    if (!connection.writable) {
      connection.destroy()
      return true
    }
    state.answers.push(response)
    this.#unanswered++
    response.once('close', () => this.#answered(connection, state, response))
    // It is not upgraded here, and what came with it Node has thrown away.
    if (request.headers.upgrade !== undefined) response.shouldKeepAlive = false
    if (state.answers.length === 1) return this.#tell(event, connection, args)
    state.waiting.push({ event, request, response })
    this.#waiting++
    if (this.#waiting > MOST_READ_AHEAD) this.#cutFurthest()
    if (state.waiting.length >= READ_AHEAD) hold(connection, state)
    return true
  }

  /** The answers under way say that their connections close; those that begin later say so by themselves. */
  endConnections(): void {
    for (const { answers } of this.#states()) for (const response of answers) response.shouldKeepAlive = false
  }

  /** Node's own, which `close` calls too, takes a connection for idle whose answer is handed over and has not left yet. */
  override closeIdleConnections(): void {
    for (const connection of this.#connections) {
      const { answers, isTunnel } = stateOf(connection)
      if (answers.length === 0 && !isTunnel) connection.destroy()
    }
  }

  /** Tunnels too, which Node forgets. */
  override closeAllConnections(): void {
    for (const connection of this.#connections) connection.destroy()
  }

  *#states(): Iterable<ConnectionState> {
    for (const connection of this.#connections) yield stateOf(connection)
  }

  #watch(connection: Connection): void {
    const state: ConnectionState = { answers: [], waiting: [], held: null, isTunnel: false }
    connection[kState] = state
    this.#connections.add(connection)
    // Node resumes it for reasons of its own, such as a body that was read.
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
    // At once: its answers hear of their end later.
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
 * Where it listens, as a URL.
 * @throws with the name of the `property` that cannot be listened on.
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

/** No new connections; resolves when those that are there have ended. */
export function closeServer(server: HttpServer): Promise<void> {
  return new Promise((resolve) => {
    if (!server.listening) return resolve()
    server.close(() => resolve())
    server.closeIdleConnections()
  })
}
