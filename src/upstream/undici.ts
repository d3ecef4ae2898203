import { buildConnector, Client, Dispatcher, Pool } from 'undici'
import type { Millis } from '../core/record.ts'
import { rawLines } from './forward.ts'
import { AnswerRefused, headTooLarge } from './response-parser.ts'
import { withFixes } from './undici-fixes.ts'

/** Options with undici's names mean what they do there. */
export interface UndiciOptions {
  readonly origin: string
  /** Asked for each pool. */
  readonly connect: () => buildConnector.BuildOptions & { readonly servername?: string }
  readonly connections: number
  /** How long an idle connection is kept. */
  readonly keepAlive: Millis
  /** Bytes of a response's head; asked for each. */
  readonly maxHeaderSize: () => number
}

/** undici's own limit, which cannot change: above any `limits.responseHead`. */
const UNREACHED = 2 * 1024 ** 2

/** undici's own pool, for `http: node`. docs/adr/0128 lists what it promises less than `http1.ts`, and the tests that show it. */
export class UndiciClient extends Dispatcher {
  readonly #options: UndiciOptions
  #connections: number
  #servername: string | undefined
  #pool: Pool

  constructor(options: UndiciOptions) {
    super()
    this.#options = options
    this.#connections = options.connections
    this.#pool = this.#open()
  }

  override dispatch(options: Dispatcher.DispatchOptions, handler: Dispatcher.DispatchHandler): boolean {
    const { body } = options
    return this.#pool.dispatch(
      {
        ...options,
        // undici must never repeat it, whatever the method.
        idempotent: false,
        // False would also keep what undici closes of itself, as after HEAD.
        reset:
          this.#options.keepAlive === 0 ||
          (typeof body === 'object' && body !== null && 'pipe' in body) ||
          null,
        ...(this.#servername === undefined ? {} : { servername: this.#servername }),
      } as Dispatcher.DispatchOptions,
      new Carried(handler, this.#options.maxHeaderSize()),
    )
  }

  /** Opens its connections with `options.connect` as it is now. */
  renew(): void {
    const before = this.#pool
    this.#pool = this.#open()
    // Answers what it has.
    void before.close()
  }

  resize(connections: number): void {
    this.#connections = connections
    this.renew()
  }

  override close(): Promise<void> {
    return this.#pool.close()
  }

  override destroy(): Promise<void> {
    return this.#pool.destroy()
  }

  #open(): Pool {
    const { origin, keepAlive, connect } = this.#options
    const options = connect()
    this.#servername = options.servername
    const connector = buildConnector({ ...options, allowH2: false })
    return new Pool(origin, {
      connect: (to, callback) =>
        connector(to, (...[error, socket]) =>
          error === null ? callback(null, withFixes(socket)) : callback(error, null),
        ),
      factory: (url, own) => new SteadyClient(url, own),
      connections: this.#connections,
      keepAliveTimeout: keepAlive || 1,
      keepAliveMaxTimeout: keepAlive || 1,
      maxHeaderSize: UNREACHED,
      pipelining: 1,
      allowH2: false,
    })
  }
}

/**
 * A pool waits for `drain` after `dispatch` returned false. undici returns it for requests it refuses to send, too (an invalid path
 * or line), which never drain: each would cost the pool a connection for good.
 */
class SteadyClient extends Client {
  override dispatch(options: Dispatcher.DispatchOptions, handler: Dispatcher.DispatchHandler): boolean {
    return super.dispatch(options, handler) || this.stats.size === 0
  }
}

/** Gives a handler undici's answer as {@link Http1Client} would. */
class Carried implements Dispatcher.DispatchHandler {
  readonly #handler: Dispatcher.DispatchHandler
  readonly #mostHead: number
  #isOver = false

  constructor(handler: Dispatcher.DispatchHandler, mostHead: number) {
    this.#handler = handler
    this.#mostHead = mostHead
  }

  onRequestStart(controller: Dispatcher.DispatchController, context: unknown): void {
    this.#handler.onRequestStart?.(controller, context)
  }

  onResponseStart(
    controller: Dispatcher.DispatchController,
    status: number,
    headers: Record<string, string | string[]>,
    reason = '',
  ): void {
    if (status < 200) return
    if (this.#isTooLarge(reason, rawLines(controller.rawHeaders)))
      return controller.abort(headTooLarge('head', this.#mostHead))
    this.#handler.onResponseStart?.(controller, status, headers, reason)
    // undici would wait for what is announced; there is nothing (RFC 9110 §8.6), and whatever came would be the next answer.
    const announces = 'content-length' in headers || 'transfer-encoding' in headers
    if (status === 205 || ((status === 204 || status === 304) && announces)) {
      this.onResponseEnd(controller, {})
      controller.abort(new Error('nothing may follow the answer'))
    }
  }

  onResponseData(controller: Dispatcher.DispatchController, chunk: Buffer): void {
    this.#handler.onResponseData?.(controller, chunk)
  }

  onResponseEnd(
    controller: Dispatcher.DispatchController,
    trailers: Record<string, string | string[]>,
  ): void {
    this.#isOver = true
    this.#handler.onResponseEnd?.(controller, trailers)
  }

  onResponseError(controller: Dispatcher.DispatchController, error: Error): void {
    if (this.#isOver) return
    this.#isOver = true
    const { code, name, message } = error as NodeJS.ErrnoException
    const isMalformed = code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH' || name === 'HTTPParserError'
    this.#handler.onResponseError?.(
      controller,
      code === 'UND_ERR_HEADERS_OVERFLOW'
        ? headTooLarge('head', this.#mostHead)
        : isMalformed
          ? new AnswerRefused(`the response is malformed: ${message}`)
          : error,
    )
  }

  /** Counted as it is written. */
  #isTooLarge(reason: string, raw: readonly string[]): boolean {
    let size = 'HTTP/1.1 200 \r\n\r\n'.length + reason.length
    for (const text of raw) size += text.length + 2
    return size > this.#mostHead
  }
}
