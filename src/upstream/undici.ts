import { buildConnector, Client, type Dispatcher, Pool } from 'undici'
import type { Places, Sharer } from './http1.ts'
import { headTooLarge } from './response-parser.ts'
import { AnswerRefused, type Carrier, type Exchanging, type Transport } from './transport.ts'
import { withFixes } from './undici-fixes.ts'

export interface UndiciOptions {
  readonly origin: string
  readonly connect: buildConnector.BuildOptions
  /** For SNI, if it differs from the origin's host. */
  readonly servername: string | undefined
  readonly places: Places
  /** Bytes of a response's head; asked for each. */
  readonly mostHead: () => number
}

/** undici's own limit, which cannot change: above any `limits.responseHead`. */
const UNREACHED = 2 * 1024 ** 2

/**
 * HTTP/1.1 on undici, for streamed bodies. Each connection carries one: undici does not tell whether something may follow an answer, nor what came
 * unasked.
 */
export class UndiciClient implements Transport, Sharer {
  readonly pool: Pool
  readonly #servername: string | undefined
  #connector: buildConnector.connector
  readonly #places: Places
  readonly #mostHead: () => number
  #waiting: (() => void)[] = []

  constructor({ origin, connect, servername, places, mostHead }: UndiciOptions) {
    this.#mostHead = mostHead
    this.#servername = servername
    this.#connector = buildConnector({ ...connect, allowH2: false })
    this.#places = places
    places.join(this)
    this.pool = new Pool(origin, {
      connect: (...call) => this.#connect(...call),
      factory: (url, options) => new SteadyClient(url, options),
      maxHeaderSize: UNREACHED,
      pipelining: 1,
      allowH2: false,
    })
  }

  send(exchange: Exchanging): void {
    const { request, patience } = exchange
    const carried = new Carried(exchange, this.#mostHead())
    try {
      this.pool.dispatch(
        {
          method: request.method,
          path: request.target,
          headers: request.headers as string[],
          body: request.body,
          // undici must never repeat it, whatever the method.
          idempotent: false,
          reset: true,
          headersTimeout: patience.head,
          bodyTimeout: patience.idle,
          ...(this.#servername === undefined ? {} : { servername: this.#servername }),
        },
        carried,
      )
    } catch (error) {
      carried.onResponseError(null, error as Error)
    }
  }

  /** undici cannot cancel a queued request: {@link Exchanging.onBegin} refuses when its turn comes. */
  cancel(): void {}

  /** Connects with these from now on. */
  renew(connect: buildConnector.BuildOptions): void {
    this.#connector = buildConnector({ ...connect, allowH2: false })
  }

  async close(): Promise<void> {
    this.#waiting = []
    await this.pool.destroy()
  }

  offer(): void {
    while (this.#waiting.length > 0 && this.#places.take(this)) this.#waiting.shift()?.()
  }

  /** It has none. */
  closeIdle(): boolean {
    return false
  }

  #connect(...[options, callback]: Parameters<buildConnector.connector>): void {
    this.#waiting.push(() => {
      this.#connector(options, (...result) => {
        const [error, socket] = result
        if (error !== null) {
          this.#places.give()
          callback(error, null)
        } else {
          socket.once('close', () => this.#places.give())
          callback(null, withFixes(socket))
        }
      })
    })
    this.offer()
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

/** An exchange in undici's terms. Its witness is `onRequestStart`, which undici calls right before it writes the first byte. */
class Carried implements Dispatcher.DispatchHandler, Carrier {
  readonly #exchange: Exchanging
  #controller: Dispatcher.DispatchController | null = null
  readonly #mostHead: number
  #status = 0
  #isOver = false

  constructor(exchange: Exchanging, mostHead: number) {
    this.#exchange = exchange
    this.#mostHead = mostHead
  }

  abort(_exchange: Exchanging, error: Error): void {
    if (!this.#isOver) this.#controller?.abort(error)
  }

  pause(): void {
    if (!this.#isOver) this.#controller?.pause()
  }

  resume(): void {
    if (!this.#isOver) this.#controller?.resume()
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller
    if (this.#exchange.onBegin(this)) return
    this.#isOver = true
    controller.abort(new Error('it must not be sent'))
  }

  onResponseStart(
    controller: Dispatcher.DispatchController,
    status: number,
    _headers: unknown,
    reason = '',
  ): void {
    this.#status = status
    if (status < 200) return
    const raw = lines(controller.rawHeaders)
    if (this.#isTooLarge(reason, raw)) controller.abort(headTooLarge('head', this.#mostHead))
    else this.#exchange.onHead(status, reason, raw)
  }

  onResponseData(_controller: Dispatcher.DispatchController, chunk: Buffer): void {
    this.#exchange.onData(chunk)
  }

  onResponseEnd(controller: Dispatcher.DispatchController): void {
    this.#isOver = true
    this.#exchange.onEnd(lines(controller.rawTrailers))
  }

  onResponseError(_controller: Dispatcher.DispatchController | null, error: Error): void {
    if (this.#isOver) return
    this.#isOver = true
    const { code, name, message } = error as NodeJS.ErrnoException
    const isMismatch = code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH'
    // undici expects the bytes that the `Content-Length` of a 304 announces; there are none (RFC 9110 §8.6).
    if (this.#status === 304 && isMismatch) this.#exchange.onEnd([])
    else if (isMismatch || name === 'HTTPParserError')
      this.#exchange.onError(new AnswerRefused(`the response is malformed: ${message}`))
    else if (code === 'UND_ERR_HEADERS_OVERFLOW') this.#exchange.onError(headTooLarge('head', this.#mostHead))
    else this.#exchange.onError(error)
  }

  /** Counted as it is written. */
  #isTooLarge(reason: string, raw: readonly string[]): boolean {
    let size = 'HTTP/1.1 200 \r\n\r\n'.length + reason.length
    for (const text of raw) size += text.length + 2
    return size > this.#mostHead
  }
}

/** undici hands header bytes over in pairs. Header values are latin1 on the wire and here. */
function lines(raw: Dispatcher.DispatchController['rawHeaders']): string[] {
  if (!Array.isArray(raw)) return []
  return (raw as (Buffer | string)[]).map((part) =>
    typeof part === 'string' ? part : part.toString('latin1'),
  )
}
