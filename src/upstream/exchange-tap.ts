import type { IncomingHttpHeaders } from 'node:http'
import type { Dispatcher } from 'undici'
import type { Budget } from '../runtime/limits.ts'
import { Exchange, rawLines } from './forward.ts'
import type { Forwarded, TappedExchange, UpstreamRequest } from './port.ts'

type Controller = Dispatcher.DispatchController
type Handler = Dispatcher.DispatchHandler

const UNSEEN = { target: '', headers: [], body: Buffer.alloc(0) }

/**
 * Observes an exchange for shadow mode, and reports what it proved by the guard's own rules. It never delays, aborts or withholds
 * anything; a bug here ends the observation, not the exchange.
 */
export class ExchangeTap implements TappedExchange, Controller {
  readonly ended: Promise<Forwarded>
  readonly #exchange: Exchange
  readonly #onBug: (error: unknown) => void
  #sent = false
  #over = false
  rawHeaders: string[] = []
  rawTrailers: string[] = []
  readonly paused = false
  readonly aborted = false
  readonly reason = null

  constructor(
    request: Pick<UpstreamRequest, 'method' | 'responseLimit' | 'stream' | 'streams'>,
    budget: Budget,
    onBug: (error: unknown) => void,
  ) {
    this.#onBug = onBug
    const { promise, resolve } = Promise.withResolvers<Forwarded>()
    this.ended = promise
    const limits = { timeout: () => Number.POSITIVE_INFINITY, budget }
    this.#exchange = new Exchange({ ...UNSEEN, ...request }, null, limits, resolve)
  }

  get over(): boolean {
    return this.#over
  }

  /** Wraps `owner`, to send once: this object observes each event after `owner`. */
  handlerFor(owner: Handler): Handler {
    this.#sent = true
    return new Tapped(owner, this)
  }

  hear(event: (exchange: Exchange) => void): void {
    if (this.#over) return
    try {
      event(this.#exchange)
    } catch (error) {
      this.#giveUp(error as Error)
      this.#onBug(error)
    }
  }

  end(how: (exchange: Exchange) => void): void {
    if (this.#over) return
    this.hear(how)
    this.#over = true
  }

  /** The client left. A request that has been handed over may still be sent. */
  gone(): void {
    if (!this.#sent) this.#giveUp(new Error('the client left before its request was sent'))
  }

  ignore(): void {
    this.#giveUp(new Error('nobody is listening any more'))
  }

  /** The exchange is not ours to abort: observation ends. */
  abort(error: Error): void {
    this.end((exchange) => exchange.onResponseError(this, error))
  }

  pause(): void {}

  resume(): void {}

  /** An unobserved exchange proves nothing, least of all "not sent". */
  #giveUp(error: Error): void {
    if (this.#over) return
    this.#over = true
    this.#exchange.onRequestStart(this)
    this.#exchange.onResponseError(this, error)
  }
}

/** Passes each event to the handler, then to the observer. */
class Tapped implements Handler {
  readonly #owner: Handler
  readonly #tap: ExchangeTap

  constructor(owner: Handler, tap: ExchangeTap) {
    this.#owner = owner
    this.#tap = tap
  }

  onRequestStart(controller: Controller, context: unknown): void {
    this.#owner.onRequestStart?.(controller, context)
    this.#tap.hear((heard) => heard.onRequestStart(this.#tap))
  }

  onResponseStart(
    controller: Controller,
    status: number,
    headers: IncomingHttpHeaders,
    reason?: string,
  ): void {
    this.#owner.onResponseStart?.(controller, status, headers, reason)
    this.#tap.rawHeaders = rawLines(controller.rawHeaders)
    this.#tap.hear((heard) => heard.onResponseStart(this.#tap, status, headers, reason))
  }

  onResponseData(controller: Controller, bytes: Buffer): void {
    this.#owner.onResponseData?.(controller, bytes)
    this.#tap.hear((heard) => heard.onResponseData(this.#tap, bytes))
  }

  onResponseEnd(controller: Controller, trailers: IncomingHttpHeaders): void {
    this.#owner.onResponseEnd?.(controller, trailers)
    this.#tap.rawTrailers = rawLines(controller.rawTrailers)
    this.#tap.end((heard) => heard.onResponseEnd(this.#tap))
  }

  onResponseError(controller: Controller, error: Error): void {
    this.#owner.onResponseError?.(controller, error)
    this.#tap.end((heard) => heard.onResponseError(this.#tap, error))
  }
}
