import type { Dispatcher as UndiciDispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import Dispatcher from 'undici/lib/dispatcher/dispatcher.js'
import type { ClientOptions } from './client-options.ts'
import { DispatchedRequest, type RawDispatchOptions } from './dispatched.ts'
import { Http2Connection, MOST_STREAMS } from './http2-connection.ts'

type Handler = UndiciDispatcher.DispatchHandler

/**
 * An undici dispatcher for HTTP/2 to one upstream, over TLS (ALPN), TCP or a unix socket (prior knowledge). As {@link Http1Client}, it never sends a
 * request twice, which undici's own does after a `GOAWAY` (docs/adr/0129); `onRequestStart` is called right before the first byte, and the error
 * {@link NotProcessed} proves that nothing was done after it, either. Requests share a connection; the first with room takes them.
 */
export class Http2Client extends Dispatcher {
  readonly options: ClientOptions
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  /** Grows with each {@link renew}. */
  generation = 0
  readonly #queue: DispatchedRequest[] = []
  readonly #open: Http2Connection[] = []
  #connections: number
  /** Requests that a new connection will carry, by what the upstream allowed last. */
  #perConnection = MOST_STREAMS
  #flushing = false
  /** Why no more requests are taken. */
  #closedBy: Error | null = null
  readonly #over = Promise.withResolvers<void>()

  constructor(options: ClientOptions) {
    super()
    this.options = options
    this.#connections = options.connections
  }

  /** Always true: there is no limit to what waits for a connection. */
  override dispatch(options: RawDispatchOptions, handler: Handler): boolean {
    const request = new DispatchedRequest(options, handler)
    if (this.#closedBy !== null) request.fail(this.#closedBy)
    else {
      this.#queue.push(request)
      this.#flushSoon()
    }
    return true
  }

  /** Forgets a request that still waits for a connection: nothing more is called. */
  cancel(handler: Handler): void {
    const at = this.#queue.findIndex((request) => request.handler === handler)
    if (at >= 0) this.#queue.splice(at, 1)
    this.#endIfOver()
  }

  /** Takes no more requests, and ends once those that it has are answered. */
  override close(callback?: () => void): Promise<void> {
    this.#closedBy ??= new errors.ClientClosedError()
    this.#endIfOver()
    if (callback !== undefined) void this.#over.promise.then(callback)
    return this.#over.promise
  }

  /** Aborts everything in progress, and ends once every connection is closed. */
  override destroy(error?: Error | null | (() => void), callback?: () => void): Promise<void> {
    if (typeof error === 'function') return this.destroy(null, error)
    const why = error ?? new errors.ClientDestroyedError('the proxy has closed its connections')
    this.#closedBy = why
    for (const request of this.#queue.splice(0)) request.fail(why)
    for (const connection of this.#open.slice()) connection.destroy(why)
    return this.close(callback)
  }

  #endIfOver(): void {
    if (this.#closedBy === null || this.#queue.length > 0) return
    for (const connection of this.#open.slice()) if (connection.isIdle) connection.destroy(null)
    if (this.#open.length === 0) this.#over.resolve()
  }

  /** Applies from now on; connections beyond it end with what they carry. */
  resize(connections: number): void {
    this.#connections = connections
    for (const surplus of this.#current().slice(connections)) surplus.end()
    this.#flushSoon()
  }

  /** `options.tls` has changed: connections made with the former certificates end with what they carry. */
  renew(): void {
    this.generation++
    this.session = undefined
    for (const connection of this.#open.slice()) connection.end()
    this.#flushSoon()
  }

  ready(): void {
    if (this.#queue.length > 0) this.#flushSoon()
  }

  idle(): boolean {
    return this.#closedBy !== null && this.#queue.length === 0
  }

  /** What waits has not been sent. It fails at once, as it does over HTTP/1.1. */
  failed(_connection: Http2Connection, error: Error): void {
    for (const request of this.#queue.splice(0)) request.fail(error)
  }

  gone(connection: Http2Connection): void {
    this.#open.splice(this.#open.indexOf(connection), 1)
    this.ready()
    this.#endIfOver()
  }

  #current(): Http2Connection[] {
    return this.#open.filter((connection) => connection.isCurrent)
  }

  #flushSoon(): void {
    if (this.#flushing) return
    this.#flushing = true
    setImmediate(this.#flush)
  }

  readonly #flush = (): void => {
    this.#flushing = false
    while (this.#queue.length > 0) {
      const connection = this.#open.find((one) => one.hasRoom)
      if (connection === undefined) return this.#connect()
      connection.begin(this.#queue.shift() as DispatchedRequest)
    }
  }

  /** Opens as many connections as what waits needs. */
  #connect(): void {
    const current = this.#current()
    let connecting = 0
    for (const one of current) {
      if (one.isConnecting) connecting++
      else this.#perConnection = one.most
    }
    // The upstream takes nothing for now: another connection would find the same.
    if (this.#perConnection === 0 && current.length > 0) return
    const needed = Math.ceil(this.#queue.length / Math.max(1, this.#perConnection)) - connecting
    const allowed = this.#connections - current.length
    for (let n = Math.min(needed, allowed); n > 0; n--) this.#open.push(new Http2Connection(this))
  }
}
