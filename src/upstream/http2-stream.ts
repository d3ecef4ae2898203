import type { ClientHttp2Stream, IncomingHttpHeaders, IncomingHttpStatusHeader } from 'node:http2'
import { Readable } from 'node:stream'
import errors from 'undici/lib/core/errors.js'
import type { Millis } from '../core/record.ts'
import { type DispatchedRequest, NotProcessed } from './dispatched.ts'
import { headTooLarge } from './response-parser.ts'
import { ENDING, upload } from './upload.ts'

const { constants } = process.getBuiltinModule('node:http2')

type Headers = IncomingHttpHeaders & IncomingHttpStatusHeader

/** undici's own. */
const USUAL_TIMEOUT: Millis = 300_000

/** What a stream needs of its connection. */
interface StreamOwner {
  /** Bytes of a response's head. */
  readonly mostHead: () => number
  /** The connection has ended. */
  readonly isOver: boolean
  /** Received so far. */
  readonly bytesRead: number
  /** A request was given up before anything of its answer came. `readBefore`: the {@link bytesRead} when it was sent. */
  unanswered(readBefore: number): void
  /** It is closed on both sides. */
  closed(stream: UpstreamStream): void
}

const CARRIED = Symbol('carried')

/** Its listeners are shared, and this reference ends with it: Node's map of streams keeps closed ones alive for long (docs/adr/0017). */
type Carrying = ClientHttp2Stream & { [CARRIED]: UpstreamStream | null }

function carriedBy<T extends unknown[]>(
  then: (carried: UpstreamStream, ...args: T) => void,
): (this: Carrying, ...args: T) => void {
  return function (...args) {
    const carried = this[CARRIED]
    if (carried !== null) then(carried, ...args)
  }
}

/**
 * One request on a stream of its own, and the answer. Whether the upstream may have processed it is decided here (RFC 9113 §8.7): only a refused
 * stream, or one above the last of a `GOAWAY`, on which nothing was received, was not.
 */
export class UpstreamStream {
  /** Among those of its connection. */
  place = 0
  readonly #owner: StreamOwner
  readonly #stream: ClientHttp2Stream
  readonly #readBefore: number
  /** Null: it is settled. */
  #request: DispatchedRequest | null
  #stopUpload: (() => void) | null = null
  /** Something came on the stream. */
  #isHeard = false
  #hasHead = false
  /** The upstream itself has ended its answer. */
  #isWhole = false
  #trailers: string[] = []
  #error: Error | null = null
  #timer: NodeJS.Timeout | null = null
  #since: Millis = performance.now()
  /** 0: forever. */
  #patience: Millis = 0

  constructor(owner: StreamOwner, stream: ClientHttp2Stream, request: DispatchedRequest) {
    this.#owner = owner
    this.#stream = stream
    this.#request = request
    this.#readBefore = owner.bytesRead
    request.connection = this
    Object.assign(stream, { [CARRIED]: this }, UpstreamStream.#own)
    for (const [event, listener] of UpstreamStream.#listeners) stream.on(event, listener)
    this.#wait(request.options.headersTimeout ?? USUAL_TIMEOUT)
  }

  /** Shared by all streams. */
  static readonly #listeners = [
    ['headers', carriedBy((carried) => carried.#interim())],
    [
      'response',
      carriedBy((carried, headers: Headers, _flags, raw: string[]) => carried.#headed(headers, raw)),
    ],
    ['trailers', carriedBy((carried, _headers, _flags, raw: string[]) => carried.#trailed(raw))],
    ['end', carriedBy((carried) => carried.#ended())],
    ['error', carriedBy((carried, error: Error) => carried.#broke(error))],
    ['frameError', carriedBy((carried, type: number) => carried.#unsent(type))],
    ['close', carriedBy((carried) => carried.#closed())],
  ] as const
  static readonly #onData = carriedBy((carried, chunk: Buffer) => carried.#received(chunk))

  static readonly #own = {
    /** Node ends the body of a stream that is reset, even by NO_ERROR, like one that is complete: only the order tells. */
    push(this: Carrying, chunk: unknown, encoding?: BufferEncoding): boolean {
      const carried = this[CARRIED]
      if (chunk === null && carried !== null && !this.closed) carried.#isWhole = true
      return Readable.prototype.push.call(this, chunk, encoding)
    },
  }

  send(body: Uint8Array | Readable, length: number): void {
    const stream = this.#stream
    if (body instanceof Uint8Array) {
      if (length > 0) stream.end(body)
      return
    }
    let isOver = false
    const stop = upload(body, length, {
      writable: stream,
      write: (chunk) => {
        this.#heard()
        stream.write(chunk)
      },
      end: () => {
        isOver = true
        this.#stopUpload = null
        this.#heard()
        stream.end()
      },
      broken: (error) => {
        isOver = true
        this.destroy(error)
      },
    })
    if (!isOver) this.#stopUpload = stop
  }

  /** Resets the stream: its request may have been processed. */
  destroy(reason: Error): void {
    if (this.#request === null) return
    if (!this.#isHeard) this.#owner.unanswered(this.#readBefore)
    this.#fail(reason)
  }

  /** The upstream processes no stream above `last`; unless `code` is 0, the connection has ended. */
  goneAway(code: number, last: number): void {
    if (this.#request === null) return
    const how = `GOAWAY${code === 0 ? '' : `, ${nameOf(code)}`}`
    if (!this.#isHeard && (this.#stream.id ?? 0) > last)
      this.#fail(new NotProcessed(`the upstream ended its connection before it took the request (${how})`))
    else if (code !== 0 && !this.#isWhole) this.#fail(new Error(`the upstream ended its connection (${how})`))
  }

  pause(): void {
    this.#stream.pause()
  }

  resume(): void {
    this.#since = performance.now()
    this.#stream.resume()
  }

  #interim(): void {
    this.#isHeard = true
    this.#since = performance.now()
  }

  #headed({ ':status': status = 0 }: Headers, raw: string[]): void {
    this.#isHeard = true
    const request = this.#request
    // An interim answer is not the answer, even if it ends the stream.
    if (request === null || status < 200 || this.#hasHead) return
    const lines = withoutPseudo(raw)
    const most = this.#owner.mostHead()
    if (sizeOf(lines) > most) return this.destroy(headTooLarge('head', most))
    this.#hasHead = true
    this.#wait(request.options.bodyTimeout ?? USUAL_TIMEOUT)
    this.#stream.on('data', UpstreamStream.#onData)
    if (request.paused) this.#stream.pause()
    this.#guarded(() => request.headed(status, '', lines))
    // It has no content (RFC 9110 §15.3.6), whatever comes.
    if (status === 205 && this.#request !== null) this.#complete()
  }

  #trailed(lines: string[]): void {
    const most = this.#owner.mostHead()
    if (sizeOf(lines) > most) this.destroy(headTooLarge('trailers', most))
    else this.#trailers = lines
  }

  #received(chunk: Buffer): void {
    const request = this.#request
    if (request === null) return
    this.#since = performance.now()
    this.#guarded(() => request.handler.onResponseData?.(request, chunk))
  }

  /** A frame of ours that could not be sent: without its head, there was no request. */
  #unsent(type: number): void {
    if (type === FRAME_HEADERS && !this.#isHeard && this.#request !== null)
      this.#fail(new NotProcessed('the head of the request is larger than HTTP/2 carries'))
  }

  /** The stream brings nothing more. */
  #ended(): void {
    if (this.#request === null) return
    if (this.#isWhole && this.#hasHead) this.#complete()
    else this.#fail(this.#whyBroken())
  }

  #broke(error: Error): void {
    this.#error = error
  }

  #closed(): void {
    ;(this.#stream as Carrying)[CARRIED] = null
    // What had arrived when the connection ended, and was not read yet.
    const rest = this.#isWhole && this.#hasHead ? (this.#stream.read() as Buffer | null) : null
    if (rest !== null) this.#received(rest)
    this.#ended()
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#owner.closed(this)
  }

  #whyBroken(): Error {
    const { id, rstCode } = this.#stream
    if (id === undefined) return new NotProcessed('the connection ended before the request was sent')
    // A stream that ends with its connection has the connection's error.
    const isReset = this.#error === null || (this.#error as NodeJS.ErrnoException).code === STREAM_ERROR
    if (!isReset || this.#owner.isOver)
      return new Error(`the connection to the upstream broke: ${this.#error?.message ?? 'it was closed'}`)
    if (rstCode === constants.NGHTTP2_REFUSED_STREAM && !this.#isHeard)
      return new NotProcessed('the upstream refused the request (REFUSED_STREAM)')
    return new Error(`the stream was reset (${nameOf(rstCode)})`)
  }

  #complete(): void {
    const request = this.#request as DispatchedRequest
    const stream = this.#stream
    request.isTaken = this.#stopUpload === null && stream.writableFinished
    this.#settle()
    request.connection = null
    // Nobody reads the rest of the request.
    if (!stream.writableEnded || !this.#isWhole) stream.close(constants.NGHTTP2_CANCEL)
    else if (!stream.writableFinished)
      this.#timer = setTimeout(() => stream.close(constants.NGHTTP2_CANCEL), ENDING).unref()
    request.ended(this.#trailers)
  }

  #fail(error: Error): void {
    const request = this.#request as DispatchedRequest
    this.#settle()
    if (!this.#stream.closed) this.#stream.close(constants.NGHTTP2_CANCEL)
    request.fail(error)
  }

  #settle(): void {
    this.#request = null
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = null
    this.#stopUpload?.()
    this.#stopUpload = null
    // What is still to come is dropped, or the stream would never close.
    this.#stream.resume()
  }

  #guarded(call: () => void): void {
    try {
      call()
    } catch (error) {
      this.destroy(error as Error)
    }
  }

  /** More of the request has left: the time for an answer begins again. */
  #heard(): void {
    if (!this.#hasHead) this.#since = performance.now()
  }

  #wait(patience: Millis): void {
    this.#patience = patience
    this.#since = performance.now()
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = patience > 0 ? this.#lookIn(patience) : null
  }

  /** After a pause of the process, first read what arrived during it. */
  #lookIn(time: Millis): NodeJS.Timeout {
    return setTimeout(() => setImmediate(() => this.#look()), time)
  }

  #look(): void {
    if (this.#request === null || this.#patience === 0) return
    const now = performance.now()
    // The upstream waits for the client.
    const isWaitedFor = this.#stopUpload !== null && !this.#hasHead && !this.#stream.writableNeedDrain
    if (this.#request.paused || isWaitedFor) this.#since = now
    const left = this.#since + this.#patience - now
    const within = `within ${this.#patience} ms`
    if (left > 0) this.#timer = this.#lookIn(left)
    else if (this.#hasHead)
      this.destroy(new errors.BodyTimeoutError(`no further byte of the answer ${within}`))
    else this.destroy(new errors.HeadersTimeoutError(`no head of an answer ${within}`))
  }
}

/** RFC 9113 §6.2. */
const FRAME_HEADERS = 1

/** Node's, for a reset by either side. */
const STREAM_ERROR = 'ERR_HTTP2_STREAM_ERROR'

/** Pseudo-header fields come first (RFC 9113 §8.3). */
function withoutPseudo(raw: readonly string[]): string[] {
  let at = 0
  while (raw[at]?.startsWith(':')) at += 2
  return raw.slice(at)
}

/** As HTTP/1.1 lines. */
function sizeOf(lines: readonly string[]): number {
  return lines.reduce((sum, part) => sum + part.length + 2, 0)
}

/** RFC 9113 §7. */
const ERRORS = [
  'NO_ERROR',
  'PROTOCOL_ERROR',
  'INTERNAL_ERROR',
  'FLOW_CONTROL_ERROR',
  'SETTINGS_TIMEOUT',
  'STREAM_CLOSED',
  'FRAME_SIZE_ERROR',
  'REFUSED_STREAM',
  'CANCEL',
  'COMPRESSION_ERROR',
  'CONNECT_ERROR',
  'ENHANCE_YOUR_CALM',
  'INADEQUATE_SECURITY',
  'HTTP_1_1_REQUIRED',
]

function nameOf(code: number): string {
  return ERRORS[code] ?? `error ${code}`
}
