import { buildConnector, Client, Dispatcher, Pool } from 'undici'
import WrapHandler from 'undici/lib/handler/wrap-handler.js'
import type { Millis } from '../core/record.ts'
import type { ClientOptions } from './client-options.ts'
import { AnswerRefused, headTooLarge } from './response-parser.ts'
import { withFixes } from './undici-fixes.ts'

/** undici's own pool (`http: node`). docs/adr/0128 lists its weaker guarantees compared with `http1.ts`, and the tests that show them. */
export class UndiciClient extends Dispatcher {
  readonly #options: ClientOptions
  #connections: number
  #pool: Pool
  readonly #former = new Set<Pool>()

  constructor(options: ClientOptions) {
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
        // Null, not false: false would keep even connections that undici closes by itself, as after HEAD.
        reset:
          this.#keepAlive() <= 0 || (typeof body === 'object' && body !== null && 'pipe' in body) || null,
        // Set, because undici would otherwise expect each client's `Host` in the upstream's certificate.
        servername: this.#options.host,
      } as Dispatcher.DispatchOptions,
      new Carried(handler, this.#options.maxHeaderSize),
    )
  }

  /** `options.tls` has changed. */
  renew(): void {
    const before = this.#pool
    this.#pool = this.#open()
    // The previous pool finishes its requests.
    this.#former.add(before)
    void before.close().then(() => this.#former.delete(before))
  }

  resize(connections: number): void {
    this.#connections = connections
    this.renew()
  }

  override close(): Promise<void> {
    return this.#pool.close()
  }

  override async destroy(): Promise<void> {
    await Promise.all([this.#pool, ...this.#former].map((pool) => pool.destroy()))
  }

  #keepAlive(): Millis {
    return this.#options.habits.keepFor(null)
  }

  #open(): Pool {
    const { to, host, tls: secured, connectTimeout, maxHeaderSize } = this.#options
    const tls = secured()
    const connector = buildConnector({
      ...tls,
      ...('path' in to ? { socketPath: to.path } : {}),
      timeout: connectTimeout,
      allowH2: false,
    } as buildConnector.BuildOptions)
    return new Pool(`http${tls === null ? '' : 's'}://${host}`, {
      connect: (options, callback) =>
        connector({ ...options, servername: tls?.servername ?? '' }, (...[error, socket]) =>
          error === null ? callback(null, withFixes(socket)) : callback(error, null),
        ),
      factory: (url, own) => new SteadyClient(url, { ...own, maxHeaderSize: maxHeaderSize() }),
      connections: this.#connections,
      keepAliveTimeout: this.#keepAlive() || 1,
      keepAliveMaxTimeout: this.#keepAlive() || 1,
      pipelining: 1,
      allowH2: false,
    })
  }
}

/**
 * A pool waits for `drain` after `dispatch` returned false. undici also returns false for requests that it refuses to send (an invalid path
 * or line), and these never drain: each would cost the pool a connection for good.
 */
class SteadyClient extends Client {
  override dispatch(options: Dispatcher.DispatchOptions, handler: Dispatcher.DispatchHandler): boolean {
    return super.dispatch(options, handler) || this.stats.size === 0
  }
}

/** Gives a handler undici's answer as {@link Http1Client} would. */
class Carried implements Dispatcher.DispatchHandler {
  readonly #handler: Dispatcher.DispatchHandler
  readonly #mostHead: () => number
  #isOver = false

  constructor(handler: Dispatcher.DispatchHandler, mostHead: () => number) {
    this.#handler = WrapHandler.wrap(handler)
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
    // undici reads it as UTF-8.
    this.#handler.onResponseStart?.(controller, status, headers, Buffer.from(reason).toString('latin1'))
    // undici would wait for the announced body; there is none (RFC 9110 §8.6), and further bytes would be the next answer.
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
    this.#handler.onResponseEnd?.(controller, trailers)
    this.#isOver = true
  }

  onResponseError(controller: Dispatcher.DispatchController, error: Error): void {
    if (this.#isOver) return
    this.#isOver = true
    const { code, name, message } = error as NodeJS.ErrnoException
    const isMalformed = code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH' || name === 'HTTPParserError'
    this.#handler.onResponseError?.(
      controller,
      code === 'UND_ERR_HEADERS_OVERFLOW'
        ? headTooLarge('head', this.#mostHead())
        : isMalformed
          ? new AnswerRefused(`the response is malformed: ${message}`)
          : error,
    )
  }
}
