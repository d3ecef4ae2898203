import type { Dispatcher } from 'undici'
import type { Budget } from '../runtime/limits.ts'
import { Exchange, type ExchangeRequest } from './forward.ts'
import type { Forwarded, TappedExchange } from './port.ts'

/** The events of the exchange, as its owner gets them. */
export type Handler = Required<
  Pick<
    Dispatcher.DispatchHandler,
    'onRequestStart' | 'onResponseStart' | 'onResponseData' | 'onResponseEnd' | 'onResponseError'
  >
>

/**
 * Observes another's exchange for shadow mode, and says what it proved by the guard's own rules. It never delays, aborts or holds
 * back anything; a bug here ends the observation, not the exchange.
 */
export class ExchangeTap implements TappedExchange {
  readonly ended: Promise<Forwarded>
  readonly #exchange: Exchange
  readonly #onBug: (error: unknown) => void
  readonly #controller: Dispatcher.DispatchController & { rawHeaders: Buffer[]; rawTrailers: Buffer[] }
  #dispatched = false
  #over = false

  constructor(request: ExchangeRequest, budget: Budget, onBug: (error: unknown) => void) {
    this.#onBug = onBug
    const { promise, resolve } = Promise.withResolvers<Forwarded>()
    this.ended = promise
    this.#exchange = new Exchange(request, { timeout: Number.POSITIVE_INFINITY, budget }, resolve)
    this.#controller = {
      aborted: false,
      paused: false,
      reason: null,
      rawHeaders: [],
      rawTrailers: [],
      // Not ours to abort: it is no longer observed.
      abort: (reason) => this.#end(() => this.#exchange.failed(reason)),
      pause: () => {},
      resume: () => {},
    }
  }

  get over(): boolean {
    return this.#over
  }

  /** Dispatches once, observed. */
  dispatch(dispatcher: Dispatcher, options: Dispatcher.DispatchOptions, handler: Handler): boolean {
    return dispatcher.dispatch(options, this.#tee(handler))
  }

  /** The exchange could not be dispatched. */
  failed(error: Error): void {
    this.#end(() => this.#exchange.failed(error))
  }

  /** The client left. A request that has been dispatched may still be sent. */
  gone(): void {
    if (!this.#dispatched) this.#giveUp(new Error('the client left before its request was sent'))
  }

  ignore(): void {
    this.#giveUp(new Error('nobody listens any more'))
  }

  #tee(handler: Handler): Handler {
    this.#dispatched = true
    const controller = this.#controller
    const exchange = this.#exchange
    return {
      onRequestStart: (real, context) => {
        handler.onRequestStart(real, context)
        // Aborted while it waited for a connection: it is not sent.
        if (!real.aborted) this.#hear(() => exchange.onRequestStart(controller))
      },
      onResponseStart: (real, status, headers, reason) => {
        handler.onResponseStart(real, status, headers, reason)
        this.#hear(() => {
          controller.rawHeaders = real.rawHeaders as Buffer[]
          exchange.onResponseStart(controller, status, null, reason)
        })
      },
      onResponseData: (real, chunk) => {
        handler.onResponseData(real, chunk)
        this.#hear(() => exchange.onResponseData(controller, chunk))
      },
      onResponseEnd: (real, trailers) => {
        handler.onResponseEnd(real, trailers)
        this.#hear(() => {
          controller.rawTrailers = (real.rawTrailers ?? []) as Buffer[]
          this.#end(() => exchange.onResponseEnd(controller))
        })
      },
      onResponseError: (real, error) => {
        handler.onResponseError(real, error)
        this.#end(() => exchange.onResponseError(controller, error))
      },
    }
  }

  #end(how: () => void): void {
    if (this.#over) return
    this.#hear(how)
    this.#over = true
  }

  #hear(event: () => void): void {
    if (this.#over) return
    try {
      event()
    } catch (error) {
      this.#giveUp(error as Error)
      this.#onBug(error)
    }
  }

  /** What was not observed proves nothing, least of all "not sent". */
  #giveUp(error: Error): void {
    if (this.#over) return
    this.#over = true
    this.#exchange.onRequestStart(this.#controller)
    this.#exchange.failed(error)
  }
}
