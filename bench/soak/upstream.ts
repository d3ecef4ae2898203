import { once } from 'node:events'
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import type { Ledger } from './ledger.ts'

/** undici closes its idle connections 2 s before that, so that they are gone at a quiet point. */
const KEEP_ALIVE = 3000
const CHUNK = Buffer.alloc(64 * 1024, 'u')
const EVENT = 'data: an event of some length, as they are\n\n'

/** How the upstream answers, as the client's `X-Act` says: `name` or `name:number`. */
type Act = (response: ServerResponse, number: number, request: IncomingMessage) => Promise<void> | void

const status =
  (code: number, headers: Readonly<Record<string, string>> = {}): Act =>
  (response) => {
    response.writeHead(code, { 'content-type': 'application/json', ...headers })
    response.end('{"said":"no"}')
  }

const ACTS: Readonly<Record<string, Act>> = {
  /** So many bytes, with their length. */
  ok(response, size) {
    response.writeHead(201, { 'content-type': 'application/json', 'content-length': size })
    pour(response, size)
  },
  /** So many bytes, chunked. */
  chunks(response, size) {
    response.writeHead(200, { 'content-type': 'application/octet-stream' })
    pour(response, size)
  },
  /** After so many milliseconds. */
  async late(response, time) {
    await wait(time)
    response.writeHead(201, { 'content-type': 'application/json' })
    response.end('{"late":true}')
  },
  async events(response, count) {
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    for (let n = 0; n < count && !response.destroyed; n++) {
      response.write(EVENT)
      await wait(5)
    }
    response.end()
  },
  /** An event, and silence. */
  stall(response) {
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    response.write(EVENT)
  },
  hang() {},
  reset: (response) => void response.socket?.resetAndDestroy(),
  close: (response) => void response.socket?.destroy(),
  truncate(response) {
    response.writeHead(200, { 'content-length': 1000 })
    response.write('truncated')
    response.socket?.end()
  },
  unauthorized: status(401),
  failed: status(500),
  unavailable: status(503),
  busy: status(503, { 'retry-after': '1' }),
  empty: (response) => void response.writeHead(204).end(),
  trailers(response) {
    response.writeHead(200, { trailer: 'x-sum' })
    response.write('body')
    response.addTrailers({ 'x-sum': '1' })
    response.end()
  },
}

function pour(response: ServerResponse, size: number): void {
  let left = size
  const go = (): void => {
    while (left > 0 && !response.destroyed) {
      const piece = CHUNK.subarray(0, Math.min(left, CHUNK.length))
      left -= piece.length
      if (!response.write(piece) && left > 0) return void response.once('drain', go)
    }
    response.end()
  }
  go()
}

/** The API behind the proxy. It records its work in the ledger. */
export class SoakUpstream implements AsyncDisposable {
  readonly #ledger: Ledger
  #server: Server
  port = 0

  constructor(ledger: Ledger) {
    this.#ledger = ledger
    this.#server = this.#make()
  }

  async open(): Promise<void> {
    this.#server = this.#make()
    this.#server.listen(this.port, '127.0.0.1')
    await once(this.#server, 'listening')
    this.port = (this.#server.address() as AddressInfo).port
  }

  /** Refuses connections from now on. */
  async refuse(): Promise<void> {
    const closed = once(this.#server, 'close')
    this.#server.close()
    this.#server.closeAllConnections()
    await closed
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#server.listening) await this.refuse()
  }

  #make(): Server {
    const server = createServer({ keepAliveTimeout: KEEP_ALIVE })
    server.on('request', (request, response) => this.#answer(request, response))
    server.on('upgrade', (_request, socket) => {
      socket.on('error', () => {})
      socket.write('HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n')
      socket.pipe(socket)
    })
    return server
  }

  #answer(request: IncomingMessage, response: ServerResponse): void {
    const { headers, url = '' } = request
    const header = (name: string): string | null => (headers[name] as string | undefined) ?? null
    request.on('error', () => {})
    response.on('error', () => {})
    const [act = 'ok', number] = (header('x-act') ?? 'ok:300').split(':')
    const operation = header('x-operation')
    if (operation === null || url === '/authorize') {
      request.resume()
      request.once('end', () => void ACTS[act]?.(response, Number(number), request))
      return
    }
    const path = url.split('?', 1)[0] as string
    const attempt = this.#ledger.arrived(operation, path, header('idempotency-record'))
    response.setHeader('x-execution', `${operation}.${attempt.n}`)
    const retryAfter = (): boolean => response.hasHeader('retry-after')
    response.once('finish', () => this.#ledger.ended(attempt, response.statusCode, retryAfter()))
    response.once('close', () => this.#ledger.ended(attempt, null, false))
    if (act === 'cut') {
      // Before the body is read.
      request.socket.resetAndDestroy()
      return
    }
    request.resume()
    request.once('end', () => {
      attempt.whole = true
      // `once-busy`: nothing was done the first time, and all is well the second.
      const own = act === 'once-busy' ? (attempt.n === 1 ? 'busy' : 'ok') : act
      void ACTS[own]?.(response, Number(number ?? 300), request)
    })
  }
}
