import type { Readable } from 'node:stream'
import type { Dispatcher } from 'undici'
import { filterLines, firstOf, hopByHop, isNeverUpstreams } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { nothingDone, sentUnanswered } from '../protect/answers.ts'
import { NotProcessed } from '../upstream/dispatched.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import { errorText, isTimeout, isTrailer, rawLines, reasonPhrase } from '../upstream/forward.ts'
import type { Upstream } from '../upstream/pool.ts'
import { AnswerRefused } from '../upstream/response-parser.ts'
import { isMultiplexed, type StreamResponse, type TrafficResponse } from './request.ts'
import {
  breakOff,
  chunkable,
  endMessage,
  hasContent,
  lingeringClose,
  pairs,
  type ResponseWriter,
  sendHead,
  withProxyHeaders,
} from './write.ts'

export interface PassthroughOptions {
  readonly upstream: Upstream
  readonly writer: ResponseWriter
  /** From the request to the head of its answer. */
  readonly timeout: Millis
  readonly idleTimeout: Millis
  readonly onBug: (error: unknown) => void
  /** Why there was no answer. For operators only: it may name addresses. */
  readonly onFailed: (method: string, cause: string) => void
}

/** An unprotected request's settings, in addition to the parsed request. */
export interface Passage {
  readonly target: string
  readonly lines: readonly string[]
  /** The proxy's own header lines on the answer. */
  readonly proxyHeaders: readonly string[]
  /** Observes the exchange in shadow mode. */
  readonly tap: ExchangeTap | null
}

/** Sends a request whose body has arrived. Otherwise returns a function that sends it, streaming the body. */
export type Pass = (response: TrafficResponse, passage: Passage) => (() => void) | null

/**
 * Forwards unprotected requests as the client sent them, and the upstream's answers: target, lines, bytes and trailers unchanged, bodies
 * never buffered, nothing ever retried. Streamed bodies go through @fastify/http-proxy (docs/adr/0128).
 */
export function passthrough(options: PassthroughOptions): Pass {
  return (response, passage) => {
    const { tap, target: path, lines } = passage
    const { req: request } = response
    const exchange = new PassedExchange(options, response, passage)
    const handler = tap === null ? exchange : tap.handlerFor(exchange)
    const send = (headers: readonly string[], body: Buffer | Readable): void =>
      void options.upstream.dispatcher.dispatch(
        {
          method: request.method as string,
          path,
          headers: headers as string[],
          body,
          headersTimeout: options.timeout,
          bodyTimeout: options.idleTimeout,
          responseHeaders: 'raw',
        },
        handler,
      )
    const whole = request.takeBody()
    if (whole !== null) {
      send(lines, whole)
      return null
    }
    const streamed = response as StreamResponse
    const length = streamed.req.headers['content-length']
    endIdleUpload(streamed, options)
    return () => send(length === undefined ? lines : [...lines, 'Content-Length', length], streamed.req)
  }
}

/** One unprotected exchange. If the client leaves, the upstream's answer ends; if the upstream breaks off, so does the client's answer. */
class PassedExchange implements Dispatcher.DispatchHandler {
  readonly #options: PassthroughOptions
  readonly #response: TrafficResponse
  readonly #passage: Passage
  #controller: Dispatcher.DispatchController | null = null
  /** Over HTTP/1.1 only a chunked answer does. */
  #takesTrailers = false
  /** The head is written; once it is on its way, {@link #headLeft}. */
  #begun = false
  #headLeft = false
  /** The answer has ended, or has no body: further bytes are not for the client. */
  #ended = false
  /** The first bytes, which leave with the head, and with the end if that comes in the same turn. */
  #first: Buffer | null = null
  #isFull = false

  constructor(options: PassthroughOptions, response: TrafficResponse, passage: Passage) {
    this.#options = options
    this.#response = response
    this.#passage = passage
    response.once('close', () => {
      this.#ended = true
      if (response.writableFinished) return
      if (this.#controller === null) options.upstream.dispatcher.cancel?.(this)
      else this.#controller.abort(new Error('the client left'))
    })
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    // The client left while the request waited for a connection: it must not be sent.
    if (this.#response.destroyed) controller.abort(new Error('the client left'))
    else this.#controller = controller
  }

  onResponseStart(
    controller: Dispatcher.DispatchController,
    status: number,
    _headers: unknown,
    reason = '',
  ): void {
    if (status < 200) return
    // The client has already been answered about its idle upload.
    if (this.#response.headersSent) {
      this.#ended = true
      controller.abort(new Error('the client was answered'))
      return
    }
    try {
      this.#begin(rawLines(controller.rawHeaders), status, reasonPhrase(reason))
    } catch (error) {
      this.#options.onBug(error)
      breakOff(this.#response)
    }
  }

  /** Writes the head. */
  #begin(raw: readonly string[], status: number, reason: string): void {
    const response = this.#response
    const { req: request } = response
    const hop = hopByHop(raw)
    // A 205 has no content (RFC 9110 §15.3.6), and none is read; a client would wait for the length that it announces.
    const isEmpty = status === 205
    const isFramed = isMultiplexed(request) || firstOf(raw, 'content-length') === null
    this.#takesTrailers = !isEmpty && chunkable(response, status) && isFramed
    const kept = filterLines(raw, (name) => {
      if (name === 'trailer') return this.#takesTrailers
      return (
        !hop.has(name) &&
        !isNeverUpstreams(name) &&
        (name !== 'content-length' || !(isEmpty || status === 204))
      )
    })
    if (isEmpty) kept.push('Content-Length', '0')
    // The unread rest of the upload would precede the next request.
    if (!request.isHere && !isMultiplexed(request)) {
      kept.push('Connection', 'close')
      lingeringClose(response)
    }
    response.writeHead(status, reason, withProxyHeaders(kept, this.#passage.proxyHeaders))
    this.#begun = true
    if (!hasContent(response, status)) this.#end(null)
    // If no body arrives in this turn, the head is sent alone.
    else
      setImmediate(() => {
        if (!this.#ended && !this.#headLeft) this.#leave()
      })
  }

  /** Writes the head, with the first bytes if there are any. */
  #leave(): void {
    this.#headLeft = true
    if (this.#first === null) sendHead(this.#response)
    else this.#write(this.#first)
    this.#first = null
    this.#options.writer.watch(this.#response)
  }

  #write(chunk: Buffer): void {
    const response = this.#response
    if (response.write(chunk) || this.#isFull) return
    this.#isFull = true
    this.#controller?.pause()
    // A slow reader occupies an upstream connection, so an occasional byte is not enough.
    const timer = setTimeout(() => breakOff(response), this.#options.idleTimeout)
    const stop = (): void => clearTimeout(timer)
    response.once('close', stop)
    response.once('drain', () => {
      stop()
      response.off('close', stop)
      this.#isFull = false
      this.#controller?.resume()
    })
  }

  onResponseData(_controller: unknown, bytes: Buffer): void {
    if (this.#ended) return
    const chunk = Buffer.from(bytes)
    if (!this.#headLeft && this.#first === null) this.#first = chunk
    else {
      if (!this.#headLeft) this.#leave()
      this.#write(chunk)
    }
  }

  onResponseEnd({ rawTrailers }: Dispatcher.DispatchController): void {
    if (this.#ended) return
    if (this.#takesTrailers) this.#response.addTrailers(pairs(filterLines(rawLines(rawTrailers), isTrailer)))
    this.#end(this.#first)
  }

  #end(last: Buffer | null): void {
    this.#ended = true
    endMessage(this.#response, last)
    if (!this.#headLeft) this.#options.writer.watch(this.#response)
  }

  onResponseError(_controller: unknown, error: Error): void {
    // Complete with the head.
    if (this.#ended) return
    this.#ended = true
    const response = this.#response
    if (this.#begun) {
      if (!this.#headLeft) this.#leave()
      breakOff(response)
      return
    }
    // The idle upload was already refused.
    if (response.headersSent) return
    // Nobody reads the rest of a streamed body.
    if (!response.req.isHere && !isMultiplexed(response.req)) response.shouldKeepAlive = false
    const method = response.req.method as string
    this.#options.onFailed(method, errorText(error))
    const isRefused = error instanceof NotProcessed
    const refused =
      this.#controller === null || isRefused
        ? refusal('upstream_unreachable', nothingDone(isRefused))
        : refusalOf(method, error)
    this.#options.writer.problem(response, refused)
  }
}

/**
 * Ends an upload that has been idle for `idleTimeout`. It would hold an upstream connection indefinitely: a dispatcher's own timeouts
 * start only after the whole request is written.
 */
function endIdleUpload(response: StreamResponse, { idleTimeout, writer }: PassthroughOptions): void {
  const { req: request } = response
  // Kept here: undici removes the `socket` of a request whose body it gave up on.
  const { carrier } = request
  let heard = carrier.bytesRead
  const timer = setInterval(() => {
    // A finished answer only has to be read.
    if (request.complete || response.writableEnded) clearInterval(timer)
    // Once the answer has begun, its own pauses count: a client may only listen.
    else if (carrier.bytesRead > heard || response.headersSent) heard = carrier.bytesRead
    else {
      clearInterval(timer)
      const detail = `no byte of the body arrived within ${idleTimeout} ms`
      writer.problem(response, refusal('request_timeout', detail))
    }
  }, idleTimeout)
  response.once('close', () => clearInterval(timer))
}

/**
 * Unprotected requests are not recorded: if one may have executed, a retry executes it again, unless its method is idempotent (RFC 9110
 * §9.2.2).
 */
function refusalOf(method: string, error: Error): Refusal {
  const late = isTimeout(error)
  const detail = sentUnanswered(late, error instanceof AnswerRefused ? error.message : null)
  const once = method === 'POST' || method === 'PATCH' || method === 'CONNECT'
  return refusal(
    late ? 'upstream_timeout' : 'upstream_failed',
    once ? `${detail}; it is not protected, so a retry may execute it again` : detail,
    once ? { retry: 'no' } : {},
  )
}
