import type { Budget } from '../runtime/limits.ts'
import { Exchange } from './forward.ts'
import type { Forwarded, TappedExchange, UpstreamRequest } from './port.ts'
import type { Carrier, Exchanging, Outgoing, Patience, Transport } from './transport.ts'

const ENDLESS: Patience = { head: 0, idle: 0 }
const UNSEEN = { target: '', headers: [], body: Buffer.alloc(0) }

/**
 * Observes an exchange for shadow mode, and reports what it proved by the guard's own rules. It never delays, aborts or withholds
 * anything; a bug here ends the observation, not the exchange.
 */
export class ExchangeTap implements TappedExchange, Carrier {
  readonly ended: Promise<Forwarded>
  readonly #exchange: Exchange
  readonly #onBug: (error: unknown) => void
  #sent = false
  #over = false

  constructor(
    request: Pick<UpstreamRequest, 'method' | 'responseLimit'>,
    budget: Budget,
    onBug: (error: unknown) => void,
  ) {
    this.#onBug = onBug
    const { promise, resolve } = Promise.withResolvers<Forwarded>()
    this.ended = promise
    const limits = { timeout: () => Number.POSITIVE_INFINITY, budget }
    this.#exchange = new Exchange({ ...UNSEEN, ...request }, null, ENDLESS, limits, resolve)
  }

  get over(): boolean {
    return this.#over
  }

  /** Sends it once, observed. */
  send(transport: Transport, exchange: Exchanging): void {
    this.#sent = true
    transport.send(new Tapped(exchange, this))
  }

  began(): void {
    this.hear((exchange) => void exchange.onBegin(this))
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
    this.#giveUp(new Error('nobody listens any more'))
  }

  /** The exchange is not ours to abort: observation ends. */
  abort(exchange: Exchanging, error: Error): void {
    this.end(() => exchange.onError(error))
  }

  pause(): void {}

  resume(): void {}

  /** An unobserved exchange proves nothing, least of all "not sent". */
  #giveUp(error: Error): void {
    if (this.#over) return
    this.#over = true
    this.#exchange.onBegin(this)
    this.#exchange.onError(error)
  }
}

/** An exchange with an observer that is notified after its owner. */
class Tapped implements Exchanging, Carrier {
  readonly request: Outgoing
  readonly patience: Patience
  readonly #owner: Exchanging
  readonly #tap: ExchangeTap
  #carrier: Carrier | null = null

  constructor(owner: Exchanging, tap: ExchangeTap) {
    this.request = owner.request
    this.patience = owner.patience
    this.#owner = owner
    this.#tap = tap
  }

  onBegin(carrier: Carrier): boolean {
    this.#carrier = carrier
    if (!this.#owner.onBegin(this)) {
      // Aborted while waiting for a connection: it is not sent.
      this.#tap.end((heard) => heard.onError(new Error('the client left before its request was sent')))
      return false
    }
    this.#tap.began()
    return true
  }

  onHead(status: number, reason: string, lines: string[]): void {
    this.#owner.onHead(status, reason, lines)
    this.#tap.hear((heard) => heard.onHead(status, reason, lines))
  }

  onData(bytes: Buffer): void {
    this.#owner.onData(bytes)
    this.#tap.hear((heard) => heard.onData(bytes))
  }

  onEnd(trailers: string[]): void {
    this.#owner.onEnd(trailers)
    this.#tap.end((heard) => heard.onEnd(trailers))
  }

  onError(error: Error): void {
    this.#owner.onError(error)
    this.#tap.end((heard) => heard.onError(error))
  }

  abort(_owner: Exchanging, error: Error): void {
    this.#carrier?.abort(this, error)
  }

  pause(): void {
    this.#carrier?.pause(this)
  }

  resume(): void {
    this.#carrier?.resume(this)
  }
}
