import type { Dispatcher as UndiciDispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import Dispatcher from 'undici/lib/dispatcher/dispatcher.js'
import type { ClientOptions } from './client-options.ts'
import { DispatchedRequest, type RawDispatchOptions } from './dispatched.ts'

type Handler = UndiciDispatcher.DispatchHandler

/** What our dispatchers have in common: a queue of requests that wait for a connection, and an orderly close. */
export abstract class UpstreamClient<
  Connection extends { destroy(error: Error | null): void },
> extends Dispatcher {
  readonly options: ClientOptions
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  /** Grows with each renewal of the certificates. */
  generation = 0
  protected readonly queue: DispatchedRequest[] = []
  protected readonly open: Connection[] = []
  /** Maximum number of connections. */
  protected connections: number
  /** Why no more requests are accepted. */
  protected closedBy: Error | null = null
  #flushing = false
  readonly #over = Promise.withResolvers<void>()

  constructor(options: ClientOptions) {
    super()
    this.options = options
    this.connections = options.connections
  }

  /** Gives waiting requests to connections. */
  protected abstract flush(): void

  /** Closes the connections that carry nothing. */
  protected abstract closeIdle(): void

  /** Always true: any number of requests may wait for a connection. */
  override dispatch(options: RawDispatchOptions, handler: Handler): boolean {
    const request = new DispatchedRequest(options, handler)
    if (this.closedBy !== null) request.fail(this.closedBy)
    else {
      this.queue.push(request)
      this.flushSoon()
    }
    return true
  }

  /** Forgets a request that still waits for a connection: nothing more is called. undici's own abort it when its turn comes. */
  cancel(handler: Handler): void {
    const at = this.queue.findIndex((request) => request.handler === handler)
    if (at >= 0) this.queue.splice(at, 1)
    this.#endIfOver()
  }

  /** Accepts no more requests, and ends once the current ones are answered. */
  override close(callback?: () => void): Promise<void> {
    this.closedBy ??= new errors.ClientClosedError()
    this.#endIfOver()
    if (callback !== undefined) void this.#over.promise.then(callback)
    return this.#over.promise
  }

  /** Aborts everything in progress, and ends once every connection is closed. */
  override destroy(error?: Error | null | (() => void), callback?: () => void): Promise<void> {
    if (typeof error === 'function') return this.destroy(null, error)
    const why = error ?? new errors.ClientDestroyedError('the proxy has closed its connections')
    this.closedBy = why
    for (const request of this.queue.splice(0)) request.fail(why)
    for (const connection of this.open.slice()) connection.destroy(why)
    return this.close(callback)
  }

  gone(connection: Connection): void {
    this.open.splice(this.open.indexOf(connection), 1)
    if (this.queue.length > 0) this.flushSoon()
    this.#endIfOver()
  }

  protected flushSoon(): void {
    if (this.#flushing) return
    this.#flushing = true
    setImmediate(this.#flushNow)
  }

  readonly #flushNow = (): void => {
    this.#flushing = false
    this.flush()
  }

  #endIfOver(): void {
    if (this.closedBy === null || this.queue.length > 0) return
    this.closeIdle()
    if (this.open.length === 0) this.#over.resolve()
  }
}
