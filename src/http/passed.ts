import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Dispatcher } from 'undici'
import { filterLines, firstOf, HOP_BY_HOP, hopByHop, isNeverUpstreams } from '../core/headers.ts'
import { lines, reasonPhrase } from '../upstream/forward.ts'
import {
  breakOff,
  chunkable,
  lingeringClose,
  ONE_WRITE,
  pairs,
  type ResponseWriter,
  sendHead,
  withProxyHeaders,
} from './write.ts'

export interface PassedOptions {
  readonly writer: ResponseWriter
  readonly request: IncomingMessage
  readonly response: ServerResponse
  /** Header lines of the proxy's own on the answer. */
  readonly proxyHeaders: readonly string[]
  /** The upstream answers: {@link PassedExchange.begin} is to be called before this returns. */
  readonly onAnswer: () => void
  /** There is no answer. */
  readonly onError: (error: Error) => void
}

/**
 * One exchange that is not protected. Gives the client the upstream's answer: status, reason, lines in their order, case and
 * number, the bytes as they come, trailers. A client that leaves ends the upstream's answer; an upstream that breaks off
 * breaks off the client's.
 */
export class PassedExchange implements Dispatcher.DispatchHandler {
  readonly #options: PassedOptions
  #controller: Dispatcher.DispatchController | null = null
  #status = 0
  #reason = ''
  #chunked = false
  /** What is sent has no body, or the answer is at its end: what still comes is not for the client. */
  #ended = false
  #begun = false
  #headLeft = false
  /** The first bytes: they leave with the head, and with the end where that comes in the same turn. */
  #first: Buffer | null = null

  constructor(options: PassedOptions) {
    this.#options = options
    options.response.once('close', () => {
      this.#ended = true
      if (!options.response.writableFinished) this.#controller?.abort(new Error('the client left'))
    })
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    // Left while the request waited for a connection: not a byte may leave any more.
    if (this.#options.response.destroyed) controller.abort(new Error('the client left'))
    else this.#controller = controller
  }

  onResponseStart(
    controller: Dispatcher.DispatchController,
    status: number,
    _headers: unknown,
    reason?: string,
  ): void {
    if (status < 200) return
    // The client was told of an upload that stood still: it hears nothing else.
    if (this.#options.response.headersSent) {
      this.#ended = true
      controller.abort(new Error('the client was answered'))
      return
    }
    this.#status = status
    this.#reason = reasonPhrase(reason ?? '')
    this.#options.onAnswer()
  }

  /** Writes the head. */
  begin(): void {
    const { writer, request, response, proxyHeaders } = this.#options
    const status = this.#status
    const raw = lines((this.#controller as Dispatcher.DispatchController).rawHeaders)
    const hop = hopByHop(raw)
    const chunked = chunkable(request, status) && firstOf(raw, 'content-length') === null
    const kept = filterLines(raw, (name) => {
      if (name === 'trailer') return chunked
      return !hop.has(name) && !isNeverUpstreams(name) && (name !== 'content-length' || status !== 204)
    })
    // What is left of an upload that nobody reads stands between this answer and the next request.
    if (!request.complete) {
      kept.push('Connection', 'close')
      lingeringClose(request, response)
    }
    response.writeHead(
      status,
      this.#reason,
      proxyHeaders.length === 0 ? kept : withProxyHeaders(kept, proxyHeaders),
    )
    this.#chunked = chunked
    this.#begun = true
    if (request.method === 'HEAD' || status === 204 || status === 304) {
      this.#ended = true
      response.end()
      writer.watch(response)
      return
    }
    // A head that waits for its body leaves in this turn of the event loop, too.
    setImmediate(() => {
      if (this.#ended || this.#headLeft) return
      this.#leave()
    })
  }

  /** The head, with the first bytes where they are there. */
  #leave(): void {
    this.#headLeft = true
    const { writer, response } = this.#options
    const first = this.#first
    this.#first = null
    if (first === null) sendHead(response)
    else this.#write(first)
    writer.watch(response)
  }

  #write(chunk: Buffer): void {
    const { request, response, writer } = this.#options
    if (response.write(chunk)) return
    const controller = this.#controller as Dispatcher.DispatchController
    controller.pause()
    // It holds a connection to the upstream: a byte now and then is not enough.
    const timer = setTimeout(() => breakOff(request, response), writer.idleTimeout)
    const stop = (): void => clearTimeout(timer)
    response.once('close', stop)
    response.once('drain', () => {
      stop()
      response.off('close', stop)
      controller.resume()
    })
  }

  onResponseData(_controller: Dispatcher.DispatchController, chunk: Buffer): void {
    if (this.#ended) return
    if (!this.#headLeft && this.#first === null) this.#first = chunk
    else {
      if (!this.#headLeft) this.#leave()
      this.#write(chunk)
    }
  }

  onResponseEnd(controller: Dispatcher.DispatchController): void {
    if (this.#ended) return
    this.#ended = true
    const { writer, response } = this.#options
    if (this.#chunked) response.addTrailers(pairs(filterLines(lines(controller.rawTrailers), passes)))
    const first = this.#first
    // Node joins head and body where the body is a string: one buffer for the kernel instead of two.
    if (first !== null && first.length <= ONE_WRITE) response.end(first.toString('latin1'), 'latin1')
    else if (first !== null) response.end(first)
    else response.end()
    if (!this.#headLeft) writer.watch(response)
  }

  onResponseError(_controller: Dispatcher.DispatchController, error: Error): void {
    this.failed(error)
  }

  failed(error: Error): void {
    // Ended at its head: undici takes a 304 with a `Content-Length` for a truncated answer; there is no body to miss.
    if (this.#ended) return
    this.#ended = true
    const { request, response, onError } = this.#options
    if (this.#begun) {
      if (!this.#headLeft) this.#leave()
      breakOff(request, response)
    } else onError(error)
  }
}

function passes(name: string): boolean {
  return !HOP_BY_HOP.has(name) && !isNeverUpstreams(name) && name !== 'trailer' && name !== 'content-length'
}
