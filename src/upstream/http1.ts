import type { Dispatcher as UndiciDispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import Dispatcher from 'undici/lib/dispatcher/dispatcher.js'
import type { Millis } from '../core/record.ts'
import type { ClientOptions } from './client-options.ts'
import { DispatchedRequest, type RawDispatchOptions } from './dispatched.ts'
import { UpstreamConnection } from './http1-connection.ts'

type Handler = UndiciDispatcher.DispatchHandler

/**
 * An undici dispatcher for HTTP/1.1 to one upstream, over TCP, TLS or a unix socket: one request at a time per connection, never pipelined, never sent
 * twice. A connection is reused only if nothing can follow the answer on it (contract §3). Between an answer and the next request the event loop polls
 * for input at least once: bytes or a close after an answer must not be taken for the next answer (undici's GHSA-35p6-xmwp-9g52).
 *
 * `onRequestStart` is called right before the first byte is written, on a connected (and, with TLS, authenticated) socket; a handler that aborts there
 * proves that nothing was sent. `controller.rawHeaders` are strings, as received. Bytes for `onResponseData` are valid only during the call. Interim answers
 * are not reported, upgrades are refused, and a stream that is not read to its end is left to its owner.
 */
export class Http1Client extends Dispatcher {
  readonly options: ClientOptions
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  /** Grows with each {@link renew}. */
  generation = 0
  readonly #queue: DispatchedRequest[] = []
  /** The connection used last comes first, so that unneeded ones expire. */
  readonly #idle: UpstreamConnection[] = []
  /** Connections whose answers have ended in this turn of the event loop. */
  readonly #resting: UpstreamConnection[] = []
  readonly #open: UpstreamConnection[] = []
  #connections: number
  #flushing = false
  #timer: NodeJS.Timeout | null = null
  #timerAt = Number.POSITIVE_INFINITY
  /** Why no more requests are accepted. */
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

  /** Forgets a request that still waits for a connection: nothing more is called. undici's own abort it when its turn comes. */
  cancel(handler: Handler): void {
    const at = this.#queue.findIndex((request) => request.handler === handler)
    if (at >= 0) this.#queue.splice(at, 1)
    this.#endIfOver()
  }

  /** Accepts no more requests, and ends once the current ones are answered. */
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
    for (const connection of this.#open) connection.destroy(why)
    return this.close(callback)
  }

  #endIfOver(): void {
    if (this.#closedBy === null || this.#queue.length > 0) return
    for (const connection of [...this.#idle, ...this.#resting]) connection.destroy(null)
    if (this.#open.length === 0) this.#over.resolve()
  }

  /** Applies from now on; busy connections beyond it are closed once they are idle. */
  resize(connections: number): void {
    this.#connections = connections
    for (let surplus = this.#open.length - connections; surplus > 0; surplus--)
      (this.#idle[0] ?? this.#resting[0])?.destroy(null)
    this.#flushSoon()
  }

  /** `options.tls` has changed: connections made with the former certificates end with the exchange that they carry. */
  renew(): void {
    this.generation++
    this.session = undefined
    for (const connection of [...this.#idle, ...this.#resting]) connection.destroy(null)
  }

  /** The connection can carry another request. */
  idle(connection: UpstreamConnection): void {
    if (this.#open.length > this.#connections || (this.#closedBy !== null && this.#queue.length === 0))
      return connection.destroy(null)
    this.#resting.push(connection)
    this.#flushSoon()
  }

  /** An unsolicited byte arrived: connections whose last answer did not end explicitly are no longer trusted. */
  unasked(): void {
    this.options.habits.sendsUnasked = true
    for (const connection of [...this.#idle, ...this.#resting]) connection.distrust()
  }

  /** The connection can carry no more requests. */
  lost(connection: UpstreamConnection): void {
    for (const list of [this.#idle, this.#resting]) {
      const at = list.indexOf(connection)
      if (at >= 0) list.splice(at, 1)
    }
  }

  gone(connection: UpstreamConnection): void {
    this.#open.splice(this.#open.indexOf(connection), 1)
    if (this.#queue.length > 0) this.#flushSoon()
    this.#endIfOver()
  }

  /** One timer for all connections: most deadlines pass unused. */
  wakeAt(time: Millis, now: Millis): void {
    if (time >= this.#timerAt) return
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timerAt = time
    // After a pause of the process, first read what arrived during it.
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
    const now = performance.now()
    while (this.#queue.length > 0) {
      const connection = this.#idle.pop()
      // Its timer may be late.
      if (connection?.isOverdue(now)) connection.destroy(null)
      else if (connection !== undefined) connection.begin(this.#queue.shift() as DispatchedRequest)
      else if (!this.#connects()) break
    }
    for (let rested = this.#resting.pop(); rested !== undefined; rested = this.#resting.pop())
      this.#idle.push(rested)
    if (this.#queue.length > 0 && this.#idle.length > 0) this.#flushSoon()
  }

  /** Opens a connection for the next request if one is needed and allowed. */
  #connects(): boolean {
    if (this.#queue.length <= this.#resting.length || this.#open.length >= this.#connections) return false
    this.#open.push(new UpstreamConnection(this, this.#queue.shift() as DispatchedRequest))
    return true
  }
}
