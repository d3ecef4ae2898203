import type { IncomingHttpHeaders } from 'node:http'
import type { IncomingHttpHeaders as Headers2, ServerHttp2Session, ServerHttp2Stream } from 'node:http2'
import type { Socket } from 'node:net'
import { Readable } from 'node:stream'
import { isFieldName, isFieldValue, OF_CONNECTION } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { malformed, type Refusal, unmetExpectation } from '../core/refusal.ts'
import { headersOf, PlainRequest } from './plain.ts'
import type { Arrival, Carrier, Framing, TrafficRequest, TrafficResponse } from './request.ts'
import { HeadWriter } from './response.ts'

const { METHODS } = process.getBuiltinModule('node:http')
const { constants, performServerHandshake } = process.getBuiltinModule('node:http2')

/** Serves the requests of HTTP/2 connections. */
export interface StreamHost {
  readonly keepAliveTimeout: Millis
  serveStream(response: TrafficResponse): void
}

const NOTHING = Buffer.alloc(0)

/** How a client that knows in advance begins HTTP/2 (RFC 9113 §3.4); no HTTP/1.1 request begins so. */
const PREFACE = Buffer.from('PRI * ')

/** Whether a new connection begins HTTP/2, by its first bytes, which stay unread; null: it ended before that, or took `timeout`. */
export function beginsHttp2(connection: Socket, timeout: Millis): Promise<boolean | null> {
  return new Promise((resolve) => {
    const done = (found: boolean | null): void => {
      clearTimeout(timer)
      connection.off('readable', look).off('end', fail).off('close', fail).off('error', fail)
      resolve(found)
    }
    const fail = (): void => done(null)
    let seen = NOTHING
    const look = (): void => {
      const bytes = connection.read() as Buffer | null
      if (bytes === null) return
      seen = Buffer.concat([seen, bytes])
      const length = Math.min(seen.length, PREFACE.length)
      const isPreface = seen.compare(PREFACE, 0, length, 0, length) === 0
      if (isPreface && length < PREFACE.length) return
      connection.unshift(seen)
      done(isPreface)
    }
    const timer = setTimeout(fail, timeout)
    connection.on('readable', look).once('end', fail).once('close', fail).once('error', fail)
  })
}

/** Limits of a connection: running requests, and bytes of a head. */
const MAX_STREAMS = 100
const MAX_HEAD = 32 * 1024

/** Time for an idle client to read that its connection ends. */
const GOING: Millis = 1000

/** The requests of a connection that speaks HTTP/2 (RFC 9113, docs/adr/0129), whose preface it may have sent. Node bounds resets, pings and frames without end. */
export function serveHttp2(connection: Socket, host: StreamHost): ServerHttp2Session {
  const session = performServerHandshake(connection, {
    settings: { enablePush: false, maxConcurrentStreams: MAX_STREAMS, maxHeaderListSize: MAX_HEAD },
    maxHeaderListPairs: 2000,
    // In megabytes. With ten of unread answers, which `limits` already bounds, Node would refuse requests and soon end the connection.
    maxSessionMemory: 10_000,
    // An upstream may send `X-Content-Type-Options` twice.
    strictSingleValueFields: false,
  })
  let open = 0
  const closed = (): void => void open--
  session.setTimeout(host.keepAliveTimeout, () => {
    if (open > 0) return
    session.close()
    // Node would wait for the client to close its side too.
    setTimeout(() => connection.destroy(), GOING).unref()
  })
  // Its connection closes with it.
  session.on('error', () => {})
  // As over HTTP/1.1, a client that ends its side gets no further answer.
  connection.once('end', () => connection.end())
  session.on('stream', (stream, headers, flags, rawHeaders) => {
    open++
    stream.on('error', ignore).on('close', closed).on('aborted', destroySoon)
    const serve = (body: Buffer | null, begun: readonly Buffer[]): void => {
      if (isCut(stream)) return void stream.destroy()
      const head = headOf(rawHeaders, body !== null && body.length === 0)
      const request =
        body === null
          ? new UploadRequest(head, stream, connection, begun)
          : new WholeRequest(head, stream, connection, body)
      // Node's HTTP/1.1 parser knows no others.
      if (!METHODS.includes(head.method) || head.method === 'CONNECT')
        request.refusal = malformed(501, `the method ${head.method}`)
      if (headers.expect !== undefined && headers.expect.toLowerCase() !== '100-continue')
        request.refusal ??= unmetExpectation()
      else if (headers.expect !== undefined && body === null && request.refusal === undefined)
        stream.additionalHeaders({ ':status': 100 })
      host.serveStream(new Http2Response(request, stream, session))
    }
    if ((flags & constants.NGHTTP2_FLAG_END_STREAM) !== 0) serve(NOTHING, [])
    else withBody(stream, serve)
  })
  return session
}

function ignore(): void {}

/** Reset, even by NO_ERROR: Node would wait until the rest of the body is read. Deferred, since the stream is still closing. */
function destroySoon(this: ServerHttp2Stream): void {
  process.nextTick(() => this.destroy())
}

/** Whether the client has left. The end of its body may mean so: Node ends the bodies of streams that are reset. */
function isCut(stream: ServerHttp2Stream): boolean {
  return stream.aborted || stream.destroyed
}

/** Most bodies arrive with their heads: `serve` gets those whole, of others the part that has arrived. */
function withBody(
  stream: ServerHttp2Stream,
  serve: (body: Buffer | null, begun: readonly Buffer[]) => void,
): void {
  const begun: Buffer[] = []
  let isWhole = false
  const onData = (chunk: Buffer): void => void begun.push(chunk)
  const onEnd = (): void => void (isWhole = !isCut(stream))
  stream.on('data', onData).once('end', onEnd)
  setImmediate(() => {
    stream.off('data', onData).off('end', onEnd)
    stream.pause()
    serve(isWhole ? Buffer.concat(begun) : null, isWhole ? [] : begun)
  })
}

/** An HTTP/2 request in the form of HTTP/1.1, whose body came with its head. */
class WholeRequest extends PlainRequest {
  override readonly httpVersion = '2.0'
  readonly httpVersionMajor = 2
  readonly #stream: ServerHttp2Stream

  constructor(
    { method, path, lines, framing }: Head,
    stream: ServerHttp2Stream,
    socket: Socket,
    body: Buffer,
  ) {
    super(method, path, lines, framing, socket, body)
    this.#stream = stream
  }

  override get destroyed(): boolean {
    return this.#stream.destroyed
  }

  override get carrier(): Carrier {
    return this.#stream as unknown as Carrier
  }
}

/** An HTTP/2 request in the form of HTTP/1.1, whose body is a stream. */
class UploadRequest extends Readable implements TrafficRequest, Carrier {
  readonly httpVersion = '2.0'
  readonly httpVersionMajor = 2
  readonly method: string
  url: string
  /** Set by Fastify. */
  originalUrl = ''
  arrival: Arrival | undefined = undefined
  refusal?: Refusal
  readonly rawHeaders: string[]
  readonly framing: Framing
  readonly socket: Socket
  bytesRead = 0
  complete = false
  #headers: IncomingHttpHeaders | null = null

  constructor(
    { method, path, lines, framing }: Head,
    stream: ServerHttp2Stream,
    socket: Socket,
    begun: readonly Buffer[],
  ) {
    super({
      read: () => void stream.resume(),
      // Code that destroys it, as undici does, may leave no listener for its errors. The rest is discarded.
      destroy: (_error, done) => {
        stream.resume()
        done(null)
      },
      highWaterMark: 64 * 1024,
    })
    this.method = method
    this.url = path
    this.rawHeaders = lines
    this.framing = framing
    this.socket = socket
    const receive = (chunk: Buffer): void => {
      this.bytesRead += chunk.length
      if (!this.destroyed && !this.push(chunk)) stream.pause()
    }
    for (const chunk of begun) receive(chunk)
    stream
      .on('data', receive)
      .on('end', () => {
        if (isCut(stream)) return
        this.complete = true
        this.push(null)
      })
      .on('close', () => this.destroy())
  }

  get carrier(): Carrier {
    return this
  }

  get isHere(): boolean {
    return this.complete
  }

  get headers(): IncomingHttpHeaders {
    return (this.#headers ??= headersOf(this.rawHeaders))
  }

  takeBody(): null {
    return null
  }

  peekBody(): null {
    return null
  }
}

interface Head {
  readonly method: string
  readonly path: string
  readonly lines: string[]
  readonly framing: Framing
}

/** `:authority` becomes `Host` (RFC 9113 §8.3.1), and the crumbs of a cookie one line (§8.2.3). */
function headOf(raw: readonly string[], isEmpty: boolean): Head {
  let method = ''
  let path = ''
  let authority: string | null = null
  let cookie = -1
  const lines: string[] = []
  const framing: Framing = { hosts: 0, length: 0, codings: [], upgrade: false }
  // Pseudo-header fields come first (§8.3).
  for (let i = 0; i + 1 < raw.length; i += 2) {
    const name = raw[i] as string
    const value = raw[i + 1] as string
    if (name === ':method') method = value
    else if (name === ':path') path = value
    else if (name === ':authority') authority = value
    if (name === ':authority' || (name === 'host' && value !== authority)) {
      framing.hosts++
      lines.push('host', value)
    } else if (name === 'cookie' && cookie >= 0) lines[cookie] += `; ${value}`
    else if (!name.startsWith(':') && name !== 'host') {
      lines.push(name, value)
      if (name === 'content-length') framing.length = Number(value)
      else if (name === 'cookie') cookie = lines.length - 1
    }
  }
  // As HTTP/1.1 would frame it.
  if (!isEmpty && framing.length === 0) framing.codings.push('chunked')
  return { method, path, lines, framing }
}

const RESPONSE = Symbol('response')

/** Its listeners are shared, and this reference ends with it: Node's map of streams keeps closed ones alive for long (docs/adr/0017). */
type Answered = ServerHttp2Stream & { [RESPONSE]: Http2Response | null }

function answeredBy(then: (response: Http2Response) => void): (this: Answered) => void {
  return function () {
    const response = this[RESPONSE]
    if (response !== null) then(response)
  }
}

/** The answer on an HTTP/2 stream. */
export class Http2Response extends HeadWriter implements TrafficResponse {
  readonly req: WholeRequest | UploadRequest
  /** The stream takes the place of the connection: it has its own timeouts and unsent bytes. */
  readonly socket: Socket
  writableEnded = false
  writableFinished = false
  destroyed = false
  closed = false
  readonly #stream: ServerHttp2Stream
  readonly #session: ServerHttp2Session
  #head: string[] | null = null
  #hasBody = true
  #trailers: Record<string, string[]> = {}

  constructor(req: WholeRequest | UploadRequest, stream: ServerHttp2Stream, session: ServerHttp2Session) {
    super()
    this.req = req
    this.socket = stream as unknown as Socket
    this.#stream = stream
    this.#session = session
    Object.assign(stream, { [RESPONSE]: this })
    for (const [event, listener] of Http2Response.#listeners) stream.on(event, listener)
  }

  /** Shared by all streams. */
  static readonly #listeners = [
    ['drain', answeredBy((response) => response.emit('drain'))],
    ['finish', answeredBy((response) => response.#left())],
    ['wantTrailers', answeredBy((response) => response.#stream.sendTrailers(response.#trailers))],
    ['close', answeredBy((response) => response.#close())],
  ] as const

  get shouldKeepAlive(): boolean {
    return !this.#session.closed
  }

  /** Refused once: the client opens another connection, and this one ends with its last answer. */
  set shouldKeepAlive(keeps: boolean) {
    if (!keeps && !this.#session.destroyed) this.#session.close()
  }

  protected begin(status: number, _reason: string, lines: readonly string[]): void {
    // Node's sessions carry no others; a client takes them for a 5xx (RFC 9110 §15).
    const head = [':status', String(status > 599 ? 500 : status)]
    for (let i = 0; i < lines.length; i += 2) {
      const name = (lines[i] as string).toLowerCase()
      const value = lines[i + 1] as string
      if (!isFieldName(name) || !isFieldValue(value)) throw new Error(`invalid ${name} header`)
      // Node ends the stream of a 205 with its head, as content is not allowed there (RFC 9110 §15.3.6).
      if (!OF_CONNECTION.has(name) && (status !== 205 || name !== 'content-length')) head.push(name, value)
    }
    this.#head = head
    this.#hasBody = this.req.method !== 'HEAD' && status !== 204 && status !== 205 && status !== 304
  }

  addTrailers(lines: readonly (readonly [string, string])[]): void {
    for (const [name, value] of lines) {
      if (!isFieldName(name) || !isFieldValue(value)) throw new Error(`invalid ${name} trailer`)
      if (!OF_CONNECTION.has(name.toLowerCase())) (this.#trailers[name.toLowerCase()] ??= []).push(value)
    }
  }

  /** False: wait for `drain`. */
  write(chunk: Buffer): boolean {
    if (this.writableEnded || this.destroyed) return false
    this.beginSet()
    this.#respond(false)
    return chunk.length === 0 || !this.#hasBody || this.#stream.write(chunk)
  }

  /** A `latin1` string has one character per byte. */
  end(given: Buffer | string = NOTHING, encoding?: 'latin1' | null): this {
    if (this.writableEnded) return this
    const last = typeof given === 'string' ? Buffer.from(given, encoding ?? 'utf8') : given
    this.beginSet()
    this.writableEnded = true
    // Nobody reads the rest.
    if (this.req instanceof UploadRequest && !this.req.complete) this.req.destroy()
    const stream = this.#stream
    if (this.destroyed || stream.closed) return this
    const body = this.#hasBody ? last : NOTHING
    const isWhole = body.length === 0 && Object.keys(this.#trailers).length === 0
    if (this.#head !== null && isWhole) this.#respond(true)
    else {
      this.#respond(false)
      if (body.length > 0) stream.end(body)
      else stream.end()
    }
    // Node ends a stream that carries no body with its head, and with that of a HEAD request.
    if (stream.writableFinished) process.nextTick(() => this.#left())
    return this
  }

  destroy(): this {
    if (this.destroyed) return this
    this.destroyed = true
    this.#stream.close(constants.NGHTTP2_INTERNAL_ERROR)
    return this
  }

  #respond(isLast: boolean): void {
    const head = this.#head
    const stream = this.#stream
    if (head === null || stream.closed) return
    this.#head = null
    // The types only allow objects.
    const lines = head as unknown as Headers2
    if (isLast) return stream.respond(lines, { endStream: true })
    // Even without trailers: if a stream ends with its content, Node at times keeps the last frame back.
    stream.respond(lines, { waitForTrailers: true })
  }

  #close(): void {
    ;(this.#stream as Answered)[RESPONSE] = null
    this.destroyed = true
    this.closed = true
    this.emit('close')
  }

  #left(): void {
    if (this.destroyed || this.writableFinished || !this.writableEnded) return
    this.writableFinished = true
    this.emit('finish')
    // Nobody reads the rest (RFC 9113 §8.1).
    if (!this.req.isHere) this.#stream.close(constants.NGHTTP2_NO_ERROR)
  }
}
