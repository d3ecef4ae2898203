import type { Dispatcher, Pool } from 'undici'
import {
  filterLines,
  firstOf,
  HOP_BY_HOP,
  hopByHop,
  isFieldValue,
  isNeverUpstreams,
  linesOf,
} from '../core/headers.ts'
import type { Millis, StoredResponse } from '../core/record.ts'
import { BodyBuffer } from '../runtime/body-buffer.ts'
import type { Budget } from '../runtime/limits.ts'
import type { Forward, Forwarded, LiveResponse, LiveSink, UpstreamRequest } from './port.ts'

export interface ForwardLimits {
  /** Bounds the whole call, or up to the head of a streamed answer. Infinity: somebody else does. */
  readonly timeout: Millis
  /** Between two bytes of the answer. */
  readonly idleTimeout: Millis
  readonly budget: Budget
  readonly servername: string | null
}

/** The port {@link Forward} on undici: one dispatch, never a second one. */
export function forwarder(pool: Pool, limits: ForwardLimits): Forward {
  return (request) =>
    new Promise((resolve) => {
      const exchange = new Exchange(request, limits, resolve)
      try {
        pool.dispatch(
          {
            method: request.method,
            path: request.target,
            headers: request.headers as string[],
            body: request.body.length === 0 ? null : request.body,
            // undici must never repeat it, whatever the method.
            idempotent: false,
            headersTimeout: 0,
            bodyTimeout: limits.idleTimeout,
            ...(limits.servername === null ? {} : { servername: limits.servername }),
          },
          exchange,
        )
      } catch (error) {
        exchange.failed(error as Error)
      }
    })
}

/** Bytes of a live answer that are queued before a sink is attached. */
const LIVE_QUEUE = 64 * 1024

/** What the answer's handling depends on. */
export type ExchangeRequest = Pick<UpstreamRequest, 'method' | 'responseLimit' | 'mayBegin'>

/**
 * One exchange. The witness is `onRequestStart`: undici calls it on a connected (and, with TLS, authenticated) socket,
 * right before it writes the first byte. Error codes prove nothing: the same ones occur before and after.
 */
export class Exchange implements Dispatcher.DispatchHandler {
  readonly #request: ExchangeRequest
  readonly #limits: Pick<ForwardLimits, 'timeout' | 'budget'>
  #resolve: ((result: Forwarded) => void) | null
  #timer: NodeJS.Timeout | null
  #timedOut = false
  #controller: Dispatcher.DispatchController | null = null
  #status: number | null = null
  #head: ResponseHead | null = null
  #declaredOutcome: string | null = null
  readonly #chunks = new BodyBuffer()
  #size = 0
  #live: Live | null = null

  constructor(
    request: ExchangeRequest,
    limits: Pick<ForwardLimits, 'timeout' | 'budget'>,
    resolve: (result: Forwarded) => void,
  ) {
    this.#request = request
    this.#limits = limits
    this.#resolve = resolve
    this.#timer = Number.isFinite(limits.timeout) ? setTimeout(() => this.#timeout(), limits.timeout) : null
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    // Given up while it waited for a connection: it must not be sent.
    if (this.#resolve === null) controller.abort(new Error('given up before it was sent'))
    else if (this.#request.mayBegin?.() === false)
      controller.abort(new Error('it could not be sent while its lease was sure to last'))
    else this.#controller = controller
  }

  onResponseStart(
    controller: Dispatcher.DispatchController,
    status: number,
    _headers: unknown,
    reason?: string,
  ): void {
    if (status < 200) return
    this.#status = status
    const raw = lines(controller.rawHeaders)
    const coding = linesOf(raw, 'transfer-encoding').join(',').trim()
    if (!/^(?:chunked)?$/i.test(coding)) {
      // The proxy removes framing; no client could learn of a coding that stays on the bytes.
      controller.abort(
        new Error(`the upstream used the transfer coding ${coding}; only chunked is understood`),
      )
      return
    }
    this.#declaredOutcome = firstOf(raw, 'idempotency-outcome')?.trim().toLowerCase() ?? null
    const hop = hopByHop(raw)
    // The original framing goes; where there is no body, a length only describes the representation (RFC 9110 §8.6).
    const describes = this.#request.method === 'HEAD' || status === 304
    const headers = filterLines(
      raw,
      (name) => !hop.has(name) && !isTakenOff(name) && (name !== 'content-length' || describes),
    )
    // RFC 9110 §6.6.1: a recipient with a clock adds the missing Date; once, so that replays carry the same.
    if (firstOf(headers, 'date') === null) headers.push('Date', new Date().toUTCString())
    this.#head = { status, reason: reasonPhrase(reason), headers }
    const announced = describes ? 0 : Number(firstOf(raw, 'content-length') ?? 0)
    if (/^text\/event-stream\b/i.test(firstOf(headers, 'content-type') ?? '')) this.#goLive('streamed')
    else if (announced > this.#request.responseLimit) this.#goLive('too_large')
  }

  onResponseData(_controller: Dispatcher.DispatchController, chunk: Buffer): void {
    if (this.#live !== null) {
      this.#live.push(chunk)
      return
    }
    // undici's chunk is a view of the socket's buffer, which it does not use again.
    this.#chunks.push(chunk)
    const fits = this.#limits.budget.take(chunk.length)
    if (fits) this.#size += chunk.length
    if (!fits) this.#goLive('no_room')
    else if (this.#size > this.#request.responseLimit) this.#goLive('too_large')
  }

  onResponseEnd(controller: Dispatcher.DispatchController): void {
    const trailers = filterLines(
      lines(controller.rawTrailers),
      (name) => isTrailer(name) && !isTakenOff(name),
    )
    if (this.#live !== null) {
      this.#live.end(trailers)
      return
    }
    let held = this.#size
    this.#settle({
      proof: 'responded',
      declaredOutcome: this.#declaredOutcome,
      response: { ...(this.#head as ResponseHead), body: this.#chunks.take(), trailers },
      // Once: an answer that is dropped releases, and releases again when it closes.
      release: () => {
        this.#limits.budget.give(held)
        held = 0
      },
    })
  }

  onResponseError(controller: Dispatcher.DispatchController, error: Error): void {
    // undici misses the bytes that the `Content-Length` of a 304 announces; there are none (RFC 9110 §8.6).
    const { code } = error as NodeJS.ErrnoException
    if (this.#status === 304 && code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH') this.onResponseEnd(controller)
    else this.failed(error)
  }

  failed(error: Error): void {
    if (this.#live !== null) {
      this.#live.fail()
      return
    }
    this.#limits.budget.give(this.#size)
    this.#size = 0
    if (this.#controller === null) this.#settle({ proof: 'not_sent', reason: errorText(error) })
    else
      this.#settle({
        proof: 'unknown',
        reason: errorText(error),
        timedOut: this.#timedOut || (error as NodeJS.ErrnoException).code === 'UND_ERR_BODY_TIMEOUT',
        status: this.#status,
      })
  }

  #timeout(): void {
    this.#timedOut = true
    const { timeout } = this.#limits
    if (this.#controller === null)
      this.#settle({
        proof: 'not_sent',
        reason: `no connection to the upstream was free within ${timeout} ms`,
      })
    else this.#controller.abort(new Error(`the upstream did not finish its answer within ${timeout} ms`))
  }

  #goLive(why: 'streamed' | 'too_large' | 'no_room'): void {
    this.#limits.budget.give(this.#size)
    this.#size = 0
    const live = new Live(this.#controller as Dispatcher.DispatchController, this.#head as ResponseHead)
    this.#live = live
    const begun = this.#chunks.take()
    if (begun.length > 0) live.push(begun)
    this.#settle({ proof: 'live', why, live, declaredOutcome: this.#declaredOutcome })
  }

  #settle(result: Forwarded): void {
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = null
    this.#resolve?.(result)
    this.#resolve = null
  }
}

/** Lines that this proxy sets, or reads for itself. */
function isTakenOff(name: string): boolean {
  return isNeverUpstreams(name) || name === 'idempotency-outcome'
}

/** Whether the upstream's trailer reaches the client. */
export function isTrailer(name: string): boolean {
  return !HOP_BY_HOP.has(name) && !isNeverUpstreams(name) && name !== 'trailer' && name !== 'content-length'
}

type ResponseHead = Pick<StoredResponse, 'status' | 'reason' | 'headers'>

class Live implements LiveResponse {
  readonly status: number
  readonly reason: string
  readonly headers: readonly string[]
  readonly done: Promise<'complete' | 'broken'>
  readonly #controller: Dispatcher.DispatchController
  readonly #finish: (end: 'complete' | 'broken') => void
  #queue: Buffer[] = []
  #queued = 0
  #sink: LiveSink | null = null
  #ended: readonly string[] | null = null
  #broken = false

  constructor(controller: Dispatcher.DispatchController, { status, reason, headers }: ResponseHead) {
    this.#controller = controller
    this.status = status
    this.reason = reason
    this.headers = headers
    const { promise, resolve } = Promise.withResolvers<'complete' | 'broken'>()
    this.done = promise
    this.#finish = resolve
  }

  attach(sink: LiveSink): void {
    this.#sink = sink
    sink.start(() => this.#controller.resume())
    let room = true
    for (const chunk of this.#queue) room = sink.write(chunk)
    this.#queue = []
    if (this.#broken) sink.abort()
    else if (this.#ended !== null) sink.end(this.#ended)
    else if (room) this.#controller.resume()
  }

  drain(): void {
    this.attach({ start() {}, write: () => true, end() {}, abort() {} })
  }

  abandon(): void {
    this.#controller.abort(new Error('nobody reads the answer'))
  }

  push(chunk: Buffer): void {
    if (this.#sink !== null) {
      if (!this.#sink.write(chunk)) this.#controller.pause()
      return
    }
    this.#queue.push(chunk)
    this.#queued += chunk.length
    if (this.#queued > LIVE_QUEUE) this.#controller.pause()
  }

  end(trailers: readonly string[]): void {
    this.#ended = trailers
    this.#sink?.end(trailers)
    this.#finish('complete')
  }

  fail(): void {
    this.#broken = true
    this.#sink?.abort()
    this.#finish('broken')
  }
}

/** undici hands header bytes over in pairs. Header values are latin1 on the wire and here. */
export function lines(raw: Dispatcher.DispatchController['rawHeaders']): string[] {
  if (!Array.isArray(raw)) return []
  return (raw as (Buffer | string)[]).map((part) =>
    typeof part === 'string' ? part : part.toString('latin1'),
  )
}

/** The phrase as latin1 (see undici-fixes.ts). What cannot be written again is left out. */
export function reasonPhrase(text = ''): string {
  return isFieldValue(text) ? text : ''
}

export function errorText(error: Error): string {
  const { code } = error as NodeJS.ErrnoException
  return code === undefined ? error.message : `${error.message} (${code})`
}
