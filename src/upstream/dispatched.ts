import type { IncomingHttpHeaders } from 'node:http'
import type { Dispatcher } from 'undici'
import WrapHandler from 'undici/lib/handler/wrap-handler.js'
import { headersOf } from './request-head.ts'

/** The upstream has proved that it processed nothing of the request, though a part of it was sent (RFC 9113 §8.7). */
export class NotProcessed extends Error {}

/** Members that undici's own dispatchers ignore are options of this client. */
export interface RawDispatchOptions extends Dispatcher.DispatchOptions {
  /** `raw`: the handler is given `controller.rawHeaders` and `rawTrailers` only, in place of objects made from them. */
  readonly responseHeaders?: 'raw' | null
}

/** The connection that carries a request. */
interface Carrier {
  destroy(reason: Error): void
  pause(): void
  resume(): void
}

/** A request, and undici's controller of it. Calls after the request has ended do nothing. */
export class DispatchedRequest implements Dispatcher.DispatchController {
  readonly options: RawDispatchOptions
  readonly handler: Dispatcher.DispatchHandler
  /** The connection that carries it, once it has begun. */
  connection: Carrier | null = null
  paused = false
  aborted = false
  reason: Error | null = null
  rawHeaders: string[] | null = null
  rawTrailers: string[] | null = null
  /** The answer is complete, and no socket holds any of the body. */
  isTaken = false

  readonly #isRaw: boolean

  constructor(options: RawDispatchOptions, handler: Dispatcher.DispatchHandler) {
    this.options = options
    this.handler = WrapHandler.wrap(handler)
    // undici's wrapper of an old handler needs the object of headers.
    this.#isRaw = options.responseHeaders === 'raw' && this.handler === handler
  }

  abort(reason: Error): void {
    if (this.connection !== null) this.connection.destroy(reason)
    // In `onRequestStart`.
    else if (this.rawTrailers === null) this.fail(reason)
  }

  pause(): void {
    this.paused = true
    this.connection?.pause()
  }

  resume(): void {
    if (!this.paused) return
    this.paused = false
    this.connection?.resume()
  }

  begins(): boolean {
    try {
      this.handler.onRequestStart?.(this, undefined)
    } catch (error) {
      this.fail(error as Error)
    }
    return !this.aborted
  }

  headed(status: number, reason: string, lines: string[]): void {
    this.rawHeaders = lines
    this.handler.onResponseStart?.(this, status, this.#read(lines), reason)
  }

  ended(trailers: string[]): void {
    this.rawTrailers = trailers
    try {
      this.handler.onResponseEnd?.(this, this.#read(trailers))
    } catch (error) {
      this.fail(error as Error)
    }
  }

  fail(error: Error): void {
    if (this.aborted) return
    this.aborted = true
    this.reason = error
    this.connection = null
    this.handler.onResponseError?.(this, error)
  }

  #read(lines: string[]): IncomingHttpHeaders {
    return this.#isRaw ? NONE : headersOf(lines)
  }
}

const NONE: IncomingHttpHeaders = Object.freeze({})
