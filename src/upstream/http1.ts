import { connect, type NetConnectOpts, type Socket } from 'node:net'
import type { ConnectionOptions } from 'node:tls'
import { isFieldName, isFieldValue } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import type { Habits } from './habits.ts'
import { type AnswerParts, type Following, ResponseParser } from './response-parser.ts'
import { AnswerTimeout, type Carrier, type Exchanging, type Outgoing, type Transport } from './transport.ts'

export interface Http1Options {
  /** Where to connect: host and port, or the path of a socket. */
  readonly to: { readonly host: string; readonly port: number } | { readonly path: string }
  /** Null: no TLS. With it, certificates are verified. Asked for each connection. */
  readonly tls: () => ConnectionOptions | null
  /** The `Host` of requests without one. */
  readonly host: string
  readonly connectTimeout: Millis
  readonly places: Places
  readonly habits: Habits
  /** Bytes of a response's head; asked for each. */
  readonly mostHead: () => number
}

/** Whoever closes a connection this soon after a request had most likely closed it before. */
const AT_ONCE: Millis = 1000

/** How long the rest of a request may take to leave after its answer. */
const ENDING: Millis = 4000

/** Requests up to this size are written as one string, for which libuv needs no extra memory. */
const ONE_STRING = 16 * 1024

/**
 * HTTP/1.1 for complete requests, over TCP, TLS or a unix socket: one at a time per connection, never pipelined, never sent twice. A connection is
 * reused only if nothing can follow the answer on it (contract §15). Between an answer and the next request the event loop polls for input at least once:
 * bytes or a close after an answer must not be taken for the next answer (undici's GHSA-35p6-xmwp-9g52).
 */
export class Http1Client implements Transport, Sharer {
  readonly options: Http1Options
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  /** Grows with each {@link renew}. */
  generation = 0
  readonly #queue: Exchanging[] = []
  /** The connection used last comes first, so that unneeded ones expire. */
  readonly #idle: UpstreamConnection[] = []
  /** Connections whose answers have ended in this turn of the event loop. */
  readonly #resting: UpstreamConnection[] = []
  readonly #open: UpstreamConnection[] = []
  #flushing = false
  #timer: NodeJS.Timeout | null = null
  #timerAt = Number.POSITIVE_INFINITY
  #closed: (() => void) | null = null

  constructor(options: Http1Options) {
    this.options = options
    options.places.join(this)
  }

  send(exchange: Exchanging): void {
    if (this.#closed !== null) exchange.onError(new Error('the proxy has closed its connections'))
    else {
      this.#queue.push(exchange)
      this.#flushSoon()
    }
  }

  cancel(exchange: Exchanging): void {
    const at = this.#queue.indexOf(exchange)
    if (at < 0) return
    this.#queue.splice(at, 1)
    if (this.#queue.length === 0) this.options.places.leave(this)
  }

  close(): Promise<void> {
    const { promise, resolve } = Promise.withResolvers<void>()
    this.#closed = resolve
    const why = new Error('the proxy has closed its connections')
    for (const exchange of this.#queue.splice(0)) exchange.onError(why)
    for (const connection of this.#open) connection.destroy(why)
    if (this.#open.length === 0) resolve()
    return promise
  }

  /** `options.tls` has changed: connections made with the former certificates end with the exchange that they carry. */
  renew(): void {
    this.generation++
    this.session = undefined
    for (const connection of [...this.#idle, ...this.#resting]) connection.destroy(null)
  }

  /** Resting connections rest until the event loop has turned. */
  offer(): void {
    if (this.#closed === null && this.#idle.length === 0) while (this.#connects());
  }

  closeIdle(): boolean {
    const connection = this.#idle[0] ?? this.#resting[0]
    connection?.destroy(null)
    return connection !== undefined
  }

  /** The connection can carry another exchange. */
  idle(connection: UpstreamConnection): void {
    if (this.options.places.isWanted(this)) return connection.destroy(null)
    this.#resting.push(connection)
    this.#flushSoon()
  }

  /** A byte came that nobody had asked for: connections whose last answer did not end explicitly are not trusted any more. */
  unasked(): void {
    this.options.habits.sendsUnasked = true
    for (const connection of [...this.#idle, ...this.#resting]) connection.distrust()
  }

  /** It can carry no more. */
  lost(connection: UpstreamConnection): void {
    for (const list of [this.#idle, this.#resting]) {
      const at = list.indexOf(connection)
      if (at >= 0) list.splice(at, 1)
    }
  }

  gone(connection: UpstreamConnection): void {
    this.#open.splice(this.#open.indexOf(connection), 1)
    this.options.places.give()
    if (this.#queue.length > 0) this.#flushSoon()
    if (this.#open.length === 0) this.#closed?.()
  }

  /** One timer for all connections: most deadlines pass unused. */
  wakeAt(time: Millis, now: Millis): void {
    if (time >= this.#timerAt) return
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timerAt = time
    // A process that stood still first reads what came meanwhile.
    this.#timer = setTimeout(() => setImmediate(this.#look), time - now).unref()
  }

  readonly #look = (): void => {
    this.#timer = null
    this.#timerAt = Number.POSITIVE_INFINITY
    const now = performance.now()
    let next = Number.POSITIVE_INFINITY
    for (const connection of this.#open) next = Math.min(next, connection.look(now))
    if (next !== Number.POSITIVE_INFINITY) this.wakeAt(next, now)
  }

  #flushSoon(): void {
    if (this.#flushing) return
    this.#flushing = true
    setImmediate(this.#flush)
  }

  readonly #flush = (): void => {
    this.#flushing = false
    if (this.#closed !== null) return
    const now = performance.now()
    while (this.#queue.length > 0) {
      const connection = this.#idle.pop()
      // Its timer may be late.
      if (connection?.isOverdue(now)) connection.destroy(null)
      else if (connection !== undefined) connection.begin(this.#queue.shift() as Exchanging)
      else if (!this.#connects()) break
    }
    for (let rested = this.#resting.pop(); rested !== undefined; rested = this.#resting.pop())
      this.#idle.push(rested)
    if (this.#queue.length > 0 && this.#idle.length > 0) this.#flushSoon()
  }

  /** Opens a connection for the next exchange if one is needed and allowed. */
  #connects(): boolean {
    if (this.#queue.length <= this.#resting.length || !this.options.places.take(this)) return false
    this.#open.push(new UpstreamConnection(this, this.#queue.shift() as Exchanging))
    return true
  }
}

/** Shared read buffer: everything is copied out of it before the next read. */
const READ = Buffer.allocUnsafeSlow(64 * 1024)

type ConnectionPhase = 'connecting' | 'head' | 'body' | 'idle' | 'ending' | 'over'

/** One connection, with the exchange that it carries. */
class UpstreamConnection implements Carrier, AnswerParts {
  readonly #client: Http1Client
  readonly #socket: Socket
  readonly #parser: ResponseParser
  readonly #generation: number
  #exchange: Exchanging | null
  #phase: ConnectionPhase = 'connecting'
  /** Whether it may carry another exchange after this one. */
  #reusable = true
  /** How its last answer ended. */
  #following: Following = 'explicit'
  /** How long it had been idle before this exchange, until a byte of the answer has come; null: not at all. */
  #rested: Millis | null = null
  #isPaused = false
  /** When the awaited peer was last heard, and how long to wait; 0: forever. */
  #since: Millis
  #patience: Millis

  constructor(client: Http1Client, exchange: Exchanging) {
    this.#client = client
    this.#generation = client.generation
    this.#exchange = exchange
    this.#parser = new ResponseParser(this, client.options.mostHead)
    const { to, connectTimeout } = client.options
    const tls = client.options.tls()
    const read = (bytes: number): boolean => this.#read(bytes)
    const options = {
      ...to,
      noDelay: true,
      keepAlive: true,
      keepAliveInitialDelay: 60_000,
      onread: { buffer: READ, callback: read },
    } as NetConnectOpts
    this.#socket = (tls === null ? connect(options) : this.#secured({ ...options, ...tls }))
      .on(tls === null ? 'connect' : 'secureConnect', () => this.#connected())
      .on('end', () => this.#ended())
      .on('error', (error) => this.#closedBy(error))
      .on('close', () => this.#closed())
    this.#since = performance.now()
    this.#patience = connectTimeout
    this.#wake()
  }

  begin(exchange: Exchanging): void {
    this.#exchange = exchange
    const { request, patience } = exchange
    let message: string
    try {
      message = requestHead(request, this.#client.options.host)
      if (!exchange.onBegin(this)) return this.#free()
      // The exchange aborted itself.
      if (this.#exchange === null) return
    } catch (error) {
      // Nothing was sent.
      this.#free()
      exchange.onError(error as Error)
      return
    }
    const { method } = request
    const body = request.body as Buffer | null
    const size = body === null ? 0 : body.length
    const now = performance.now()
    this.#rested = this.#phase === 'idle' ? now - this.#since : null
    this.#phase = 'head'
    this.#reusable = method !== 'HEAD' && (size === 0 || expectsContent(method))
    this.#parser.expect(method)
    this.#since = now
    this.#patience = patience.head
    this.#wake()
    const socket = this.#socket
    if (size === 0) socket.write(message, 'latin1')
    else if (size + message.length <= ONE_STRING)
      socket.write(message + (body as Buffer).toString('latin1'), 'latin1')
    else {
      socket.cork()
      socket.write(message, 'latin1')
      socket.write(body as Buffer)
      socket.uncork()
    }
  }

  isOverdue(now: Millis): boolean {
    return now >= this.#since + this.#patience
  }

  distrust(): void {
    if (this.#following !== 'explicit') this.destroy(null)
  }

  /** Ends the connection and its exchange with this error; null: it has none. */
  destroy(error: Error | null): void {
    if (this.#phase === 'over') return
    if (this.#phase === 'idle') this.#client.lost(this)
    this.#phase = 'over'
    this.#parser.stop()
    const exchange = this.#exchange
    this.#exchange = null
    this.#socket.destroy()
    if (error !== null) exchange?.onError(error)
  }

  abort(exchange: Exchanging, error: Error): void {
    if (this.#exchange === exchange) this.destroy(error)
  }

  pause(exchange: Exchanging): void {
    if (this.#exchange !== exchange) return
    this.#isPaused = true
    this.#socket.pause()
  }

  resume(exchange: Exchanging): void {
    if (this.#exchange !== exchange || !this.#isPaused) return
    this.#isPaused = false
    this.#since = performance.now()
    this.#wake()
    this.#socket.resume()
  }

  onInterim(): void {
    this.#since = performance.now()
  }

  onHead(status: number, reason: string, lines: string[]): void {
    const exchange = this.#exchange as Exchanging
    this.#phase = 'body'
    this.#since = performance.now()
    this.#patience = exchange.patience.idle
    this.#wake()
    exchange.onHead(status, reason, lines)
  }

  onBody(bytes: Buffer, from: number, to: number): void {
    this.#exchange?.onData(bytes.subarray(from, to))
  }

  onUnasked(): void {
    this.#client.unasked()
  }

  onComplete(trailers: string[], following: Following): void {
    const exchange = this.#exchange as Exchanging
    this.#exchange = null
    if (this.#socket.writableLength === 0) exchange.request.onTaken?.()
    this.#following = this.#reusable ? following : 'nothing'
    const isTrusted = following === 'explicit' || !this.#client.options.habits.sendsUnasked
    if (this.#following !== 'nothing' && isTrusted) this.#keep()
    else this.destroy(null)
    try {
      exchange.onEnd(trailers)
    } catch (error) {
      exchange.onError(error as Error)
    }
  }

  /** Aborts what has waited too long; returns when to check again. */
  look(now: Millis): Millis {
    if (this.#phase === 'over' || this.#patience === 0 || this.#isPaused) return Number.POSITIVE_INFINITY
    const due = this.#since + this.#patience
    if (now < due) return due
    const within = `within ${this.#patience} ms`
    if (this.#phase === 'idle' || this.#phase === 'ending') this.destroy(null)
    else if (this.#phase === 'connecting')
      this.destroy(
        Object.assign(new Error(`no connection ${within}`), { syscall: 'connect', code: 'ETIMEDOUT' }),
      )
    else if (this.#phase === 'head') this.destroy(new AnswerTimeout(`no head of an answer ${within}`))
    else this.destroy(new AnswerTimeout(`no further byte of the answer ${within}`))
    return Number.POSITIVE_INFINITY
  }

  #wake(): void {
    if (this.#patience > 0) this.#client.wakeAt(this.#since + this.#patience, this.#since)
  }

  #secured(options: ConnectionOptions): Socket {
    const client = this.#client
    // `node:tls` adds to the start, and is not needed without it.
    return process
      .getBuiltinModule('node:tls')
      .connect({
        ALPNProtocols: ['http/1.1'],
        ...options,
        ...(client.session && { session: client.session }),
      })
      .on('session', (session) => {
        if (this.#generation === client.generation) client.session = session
      })
  }

  #connected(): void {
    if (this.#phase === 'connecting') this.begin(this.#exchange as Exchanging)
  }

  /** True: read on. */
  #read(length: number): boolean {
    if (this.#exchange === null) {
      // Of an exchange that was aborted: TLS goes on with what it has decrypted.
      if (this.#phase === 'over') return false
      // It must not be taken for the answer to the next request.
      this.destroy(null)
      this.#client.unasked()
      return true
    }
    this.#rested = null
    if (this.#phase === 'body') this.#since = performance.now()
    try {
      this.#parser.execute(READ, length)
    } catch (error) {
      this.destroy(error as Error)
    }
    return !this.#isPaused
  }

  #ended(): void {
    const isConnecting = this.#phase === 'connecting'
    if (this.#exchange === null || (!isConnecting && this.#parser.finish())) this.#closedBy(null)
    else this.#closedBy(new Error('the upstream closed the connection'))
  }

  #closed(): void {
    this.#closedBy(new Error('the connection to the upstream was closed'))
    this.#client.gone(this)
  }

  /** The upstream ended it, or the network did. */
  #closedBy(error: Error | null): void {
    const now = performance.now()
    const { habits } = this.#client.options
    if (this.#phase === 'idle') habits.closedAfter(now - this.#since)
    else if (this.#phase === 'head' && this.#rested !== null && now - this.#since < AT_ONCE)
      habits.closedAfter(this.#rested)
    this.destroy(error)
  }

  /** The exchange it was opened for did not begin. */
  #free(): void {
    this.#exchange = null
    this.#keep()
  }

  #keep(): void {
    this.#since = performance.now()
    // Paused by the last bytes of the answer: without reading, a close would go unnoticed.
    if (this.#isPaused) this.#socket.resume()
    this.#isPaused = false
    // An answer that arrived before the whole request was sent: the server gets the rest, and no further request.
    if (this.#socket.writableLength > 0) {
      this.#phase = 'ending'
      this.#patience = ENDING
      this.#socket.end()
      return this.#wake()
    }
    const isFormer = this.#generation !== this.#client.generation
    this.#patience = isFormer ? 0 : this.#client.options.habits.keepFor(this.#parser.keepAlive)
    if (this.#patience <= 0) return this.destroy(null)
    this.#phase = 'idle'
    this.#wake()
    this.#client.idle(this)
  }
}

/** Lines about message length or the connection: this client sets those itself. */
const FRAMING = /^(?:connection|content-length|expect|host|keep-alive|transfer-encoding|upgrade)$/i

/**
 * The request's head (RFC 9112 §3 and §5).
 *
 * @throws if a part could be read as something else: nothing is sent then.
 */
function requestHead({ method, target, headers, body }: Outgoing, defaultHost: string): string {
  if (!isFieldName(method)) throw new Error('invalid request method')
  if (!/^\/[\x21-\xff]*$/.test(target)) throw new Error('invalid request path')
  let host: string | null = null
  let lines = ''
  for (let i = 0; i < headers.length; i += 2) {
    const name = headers[i] as string
    const value = headers[i + 1] as string
    if (!isFieldName(name) || !isFieldValue(value)) throw new Error(`invalid ${name} header`)
    if (!FRAMING.test(name)) lines += `${name}: ${value}\r\n`
    else if (host === null && name.toLowerCase() === 'host') host = value
    else throw new Error(`invalid ${name} header`)
  }
  const size = body === null ? 0 : (body as Buffer).length
  // RFC 9110 §8.6: a length of 0 where the method leads one to expect content.
  const length = size > 0 || expectsContent(method) ? `content-length: ${size}\r\n` : ''
  // Some servers answer HEAD with content, which would be taken for the next answer.
  const connection = method === 'HEAD' ? 'close' : 'keep-alive'
  return `${method} ${target} HTTP/1.1\r\nhost: ${host ?? defaultHost}\r\nconnection: ${connection}\r\n${lines}${length}\r\n`
}

/** Methods whose content every server reads. After other methods, a server may take it for the next request. */
function expectsContent(method: string): boolean {
  switch (method) {
    case 'POST':
    case 'PUT':
    case 'PATCH':
    case 'QUERY':
    case 'PROPFIND':
    case 'PROPPATCH':
      return true
    default:
      return false
  }
}

/** One of the clients that share {@link Places}. */
export interface Sharer {
  /** A place is free, or may be soon: take it or leave it. */
  offer(): void
  /** Closes a connection that carries nothing. False: there is none. */
  closeIdle(): boolean
}

/**
 * The connections that the clients of one upstream may open together. A client that finds none free waits in line, and an idle connection of
 * the others is closed for it.
 */
export class Places {
  #most: number
  /** Below 0: as many too many are open. */
  #free: number
  readonly #sharers: Sharer[] = []
  readonly #line: Sharer[] = []

  constructor(most: number) {
    this.#most = most
    this.#free = most
  }

  /** From now on; what is busy beyond it is closed once it carries nothing. */
  resize(most: number): void {
    this.#free += most - this.#most
    this.#most = most
    for (let surplus = -this.#free; surplus > 0; surplus--)
      if (!this.#sharers.some((sharer) => sharer.closeIdle())) break
    this.#serve()
  }

  join(sharer: Sharer): void {
    this.#sharers.push(sharer)
  }

  /** False: none is free; the sharer is offered one when its turn comes. */
  take(sharer: Sharer): boolean {
    if (this.#free > 0) {
      this.#free--
      return true
    }
    if (!this.#line.includes(sharer)) this.#line.push(sharer)
    for (const other of this.#sharers) if (other !== sharer && other.closeIdle()) break
    return false
  }

  give(): void {
    this.#free++
    this.#serve()
  }

  #serve(): void {
    // A sharer that no longer needs it leaves it to the next.
    while (this.#free > 0 && this.#line.length > 0) this.#line.shift()?.offer()
  }

  /** The sharer stops waiting. */
  leave(sharer: Sharer): void {
    const at = this.#line.indexOf(sharer)
    if (at >= 0) this.#line.splice(at, 1)
  }

  /** Whether there are too many, or another sharer has waited longer: then this one must close a connection it no longer needs. */
  isWanted(sharer: Sharer): boolean {
    if (this.#free < 0) return true
    const first = this.#line[0]
    if (first === undefined) return false
    if (first !== sharer) return true
    // It keeps using its own connection: that was its turn.
    this.#line.shift()
    return false
  }
}
