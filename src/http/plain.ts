import type { IncomingHttpHeaders } from 'node:http'
import type { Socket } from 'node:net'
import { Readable } from 'node:stream'
import { fieldLines, isFieldName, isFieldValue, TOKEN } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import type { Arrival, Carrier, Framing, TrafficRequest, TrafficResponse } from './request.ts'
import { HeadWriter } from './response.ts'

/** Serves the requests of plain connections. */
export interface PlainHost {
  readonly keepAliveTimeout: Millis
  /** A coarse clock. */
  readonly clock: Millis
  /** Answers `response.req`, at the end of this turn of the event loop. */
  serve(response: PlainResponse): void
  answered(response: PlainResponse): void
  /** Node handles the connection from here on. */
  handOver(connection: PlainConnection): void
}

/**
 * A connection on which every request so far arrived whole, in the plainest form, and after the previous answer. The first other bytes, and
 * everything after them, go to Node's parser (docs/adr/0076).
 */
export class PlainConnection {
  readonly socket: Socket
  readonly #host: PlainHost
  #response: PlainResponse | null = null
  /** When it was accepted, or last answered. */
  #since: Millis
  #isNew = true
  /** Bytes for Node's parser, until the connection is handed over. */
  #others: Buffer[] = []

  constructor(socket: Socket, host: PlainHost) {
    this.socket = socket
    this.#host = host
    this.#since = host.clock
    socket.on('data', this.#read).on('end', this.#ended).on('drain', this.#drained).on('error', ignore)
  }

  /** If idle: since when, and whether it never carried a request. */
  get idle(): { readonly since: Millis; readonly isNew: boolean } | null {
    return this.#response === null ? { since: this.#since, isNew: this.#isNew } : null
  }

  readonly #read = (bytes: Buffer): void => {
    // After `Connection: close` nobody would receive an answer.
    if (!this.socket.writable) return
    if (this.#others.length > 0) return void this.#others.push(bytes)
    const request = this.#response === null ? plainRequest(bytes, this.socket) : null
    if (request === null) return this.#handOver(bytes)
    this.#isNew = false
    const response = new PlainResponse(request, this.#host.keepAliveTimeout, this.#answered)
    this.#response = response
    this.#host.serve(response)
  }

  /**
   * Hands the connection to Node, even after an unanswered request: the host queues later requests. It takes two ticks: the stream asks for
   * more data in the next one, and would keep reading into a paused parser.
   */
  #handOver(bytes: Buffer): void {
    this.#others.push(bytes)
    process.nextTick(() => process.nextTick(this.#give))
  }

  readonly #give = (): void => {
    const { socket } = this
    if (socket.destroyed) return
    socket.off('data', this.#read).off('end', this.#ended).off('error', ignore)
    this.#host.handOver(this)
    // Emptied, since this object lives as long as the connection.
    const others = this.#others
    this.#others = []
    // `unshift` would also make the stream ask for more.
    for (const bytes of others) socket.emit('data', bytes)
  }

  readonly #answered = (): void => {
    const response = this.#response as PlainResponse
    this.#response = null
    this.#since = this.#host.clock
    if (response.writableFinished && response.isLast) this.socket.destroySoon()
    this.#host.answered(response)
  }

  /** As in Node: a client that ends its side gets no further answer. */
  readonly #ended = (): void => void this.socket.end()

  readonly #drained = (): void => this.#response?.drained()
}

/** After an error the connection closes by itself. */
function ignore(): void {}

const { maxHeaderSize } = process.getBuiltinModule('node:http')

/** Longer heads are left to Node, to read or refuse. */
const MAX_HEAD = Math.min(4096, maxHeaderSize >> 1)
const LONGEST_LENGTH = 5

/** The part of RFC 9112's grammar that every parser understands alike. */
const PLAIN_HEAD = new RegExp(
  String.raw`^(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) /[\w!$%&'()*+,./:;=?@~-]* HTTP/1\.1(?:\r\n${TOKEN}:[\t\x20-\x7e\x80-\xff]*)+$`,
)

/** A client's request that arrived whole: over HTTP/1.1 in the plainest form (docs/adr/0076). */
export class PlainRequest implements TrafficRequest {
  readonly httpVersion: string = '1.1'
  readonly isHere = true
  readonly method: string
  url: string
  /** Set by Fastify. */
  originalUrl = ''
  arrival: Arrival | undefined = undefined
  refusal?: Refusal
  readonly rawHeaders: string[]
  readonly framing: Framing
  readonly socket: Socket
  #body: Buffer
  #headers: IncomingHttpHeaders | null = null
  #stream: Readable | null = null

  constructor(
    method: string,
    url: string,
    rawHeaders: string[],
    framing: Framing,
    socket: Socket,
    body: Buffer,
  ) {
    this.method = method
    this.url = url
    this.rawHeaders = rawHeaders
    this.framing = framing
    this.socket = socket
    this.#body = body
  }

  get destroyed(): boolean {
    return this.socket.destroyed
  }

  get carrier(): Carrier {
    return this.socket
  }

  get headers(): IncomingHttpHeaders {
    return (this.#headers ??= headersOf(this.rawHeaders))
  }

  takeBody(): Buffer {
    const body = this.#body
    this.#body = NOTHING
    return body
  }

  peekBody(): Buffer {
    return this.#body
  }

  resume(): void {
    if (this.#stream === null) this.#body = NOTHING
    else this.#stream.resume()
  }

  /* For Fastify's own parsers, the body as a stream. */

  on(event: string, listener: (...args: unknown[]) => void): this {
    this.#stream ??= Readable.from(this.#body.length === 0 ? [] : [this.takeBody()])
    this.#stream.on(event, listener)
    return this
  }

  removeListener(event: string, listener: (...args: unknown[]) => void): this {
    this.#stream?.removeListener(event, listener)
    return this
  }
}

const NOTHING = Buffer.alloc(0)

/** Names of which Node keeps only the first line. */
const SINGLE: ReadonlySet<string> = new Set(
  'age authorization content-length content-type etag expires from host if-modified-since if-unmodified-since last-modified location max-forwards proxy-authorization referer retry-after server user-agent'.split(
    ' ',
  ),
)

/** As Node's `request.headers`, but for `Set-Cookie`, which no request has. */
export function headersOf(lines: readonly string[]): IncomingHttpHeaders {
  const headers: Record<string, string> = {}
  for (let i = 0; i < lines.length; i += 2) {
    const name = (lines[i] as string).toLowerCase()
    const value = lines[i + 1] as string
    const before = headers[name]
    if (before === undefined) headers[name] = value
    else if (!SINGLE.has(name)) headers[name] = `${before}${name === 'cookie' ? '; ' : ', '}${value}`
  }
  return headers
}

/** The one request that `bytes` contain. Null: none, part of one, more than one, or one that only Node's parser should read. */
export function plainRequest(bytes: Buffer, socket: Socket): PlainRequest | null {
  const text = bytes.toString('latin1', 0, Math.min(bytes.length, MAX_HEAD))
  const headEnd = text.indexOf('\r\n\r\n')
  if (headEnd < 0) return null
  const head = text.slice(0, headEnd)
  if (!PLAIN_HEAD.test(head)) return null
  const methodEnd = head.indexOf(' ')
  const targetEnd = head.indexOf(' ', methodEnd + 1)
  const lines = fieldLines(head, head.indexOf('\r\n', targetEnd))
  const length = lengthOf(lines)
  const bodyStart = headEnd + 4
  if (length === null || bytes.length !== bodyStart + length) return null
  return new PlainRequest(
    head.slice(0, methodEnd),
    head.slice(methodEnd + 1, targetEnd),
    lines,
    { hosts: 1, length, codings: [], upgrade: false },
    socket,
    length === 0 ? NOTHING : bytes.subarray(bodyStart),
  )
}

/** The announced body length. Null: other lines affect how the message is read, or what happens to its connection. */
function lengthOf(lines: readonly string[]): number | null {
  let hosts = 0
  let length: number | null = null
  for (let i = 0; i < lines.length; i += 2) {
    const name = lines[i] as string
    switch (name.length) {
      case 4:
        if (name.toLowerCase() === 'host' && ++hosts > 1) return null
        break
      case 6:
      case 7:
      case 16:
      case 17:
        if (NOT_PLAIN.has(name.toLowerCase())) return null
        break
      case 10:
        if (name.toLowerCase() === 'connection' && (lines[i + 1] as string).toLowerCase() !== 'keep-alive')
          return null
        break
      case 14: {
        if (name.toLowerCase() !== 'content-length') break
        const value = lines[i + 1] as string
        if (length !== null || value.length > LONGEST_LENGTH || !/^\d+$/.test(value)) return null
        length = Number(value)
      }
    }
  }
  return hosts === 1 ? (length ?? 0) : null
}

const NOT_PLAIN: ReadonlySet<string> = new Set(['expect', 'upgrade', 'proxy-connection', 'transfer-encoding'])

/** Up to this size copying bytes is cheaper than a second write. */
const ONE_STRING = 16 * 1024

/**
 * The answer to a {@link PlainRequest}: the parts of Node's `ServerResponse` that this proxy and `reply.send()` use, with the same bytes and
 * events.
 */
export class PlainResponse extends HeadWriter implements TrafficResponse {
  readonly req: PlainRequest
  /** Null: the answer has left. */
  socket: Socket | null
  shouldKeepAlive = true
  writableEnded = false
  writableFinished = false
  destroyed = false
  closed = false
  /** The connection ends with this answer. */
  isLast = false
  readonly #keepAlive: Millis
  readonly #onClosed: () => void
  /** The head, held back until the first bytes of the body. */
  #head = ''
  #hasBody = true
  #isChunked = false
  #trailers = ''
  #isFull = false

  constructor(req: PlainRequest, keepAlive: Millis, onClosed: () => void) {
    super()
    this.req = req
    this.socket = req.socket
    this.#keepAlive = keepAlive
    this.#onClosed = onClosed
  }

  protected begin(status: number, reason: string, lines: readonly string[]): void {
    let head = `HTTP/1.1 ${status} ${reason}\r\n`
    let hasLength = false
    let hasDate = false
    let isLast = !this.shouldKeepAlive
    let saysLast = false
    for (let i = 0; i < lines.length; i += 2) {
      const name = lines[i] as string
      const value = lines[i + 1] as string
      if (!isFieldName(name) || !isFieldValue(value)) throw new Error(`invalid ${name} header`)
      switch (name.length) {
        case 4:
          if (name.toLowerCase() === 'date') hasDate = true
          break
        case 10:
          if (name.toLowerCase() !== 'connection') break
          if (value !== 'close') throw new Error('invalid Connection header')
          isLast = true
          saysLast = true
          break
        case 14:
          if (name.toLowerCase() === 'content-length') hasLength = true
          break
        case 17:
          if (name.toLowerCase() === 'transfer-encoding')
            throw new Error('framing lines are set by the proxy')
      }
      head += `${name}: ${value}\r\n`
    }
    if (!hasDate) head += `Date: ${httpDate()}\r\n`
    if (!isLast)
      head += `Connection: keep-alive\r\nKeep-Alive: timeout=${Math.floor(this.#keepAlive / 1000)}\r\n`
    else if (!saysLast) head += 'Connection: close\r\n'
    this.#hasBody = this.req.method !== 'HEAD' && status !== 204 && status !== 304
    this.#isChunked = this.#hasBody && !hasLength
    if (this.#isChunked) head += 'Transfer-Encoding: chunked\r\n'
    this.#head = `${head}\r\n`
    this.isLast = isLast
  }

  addTrailers(lines: readonly (readonly [string, string])[]): void {
    for (const [name, value] of lines) {
      if (!isFieldName(name) || !isFieldValue(value)) throw new Error(`invalid ${name} trailer`)
      this.#trailers += `${name}: ${value}\r\n`
    }
  }

  /** False: wait for `drain`. */
  write(chunk: Buffer): boolean {
    if (this.writableEnded || this.destroyed) return false
    this.beginSet()
    const before = this.#takeHead()
    const isEmpty = chunk.length === 0 || !this.#hasBody
    if (isEmpty && before === '') return true
    let hasRoom: boolean
    if (isEmpty) hasRoom = this.#send(before, NOTHING, '')
    else if (this.#isChunked) hasRoom = this.#send(`${before}${chunk.length.toString(16)}\r\n`, chunk, '\r\n')
    else hasRoom = this.#send(before, chunk, '')
    if (!hasRoom) this.#isFull = true
    return hasRoom
  }

  /** A `latin1` string has one character per byte. */
  end(given: Buffer | string = NOTHING, encoding?: 'latin1' | null): this {
    if (this.writableEnded) return this
    const last = typeof given === 'string' && encoding !== 'latin1' ? Buffer.from(given) : given
    this.beginSet()
    this.writableEnded = true
    if (this.destroyed) return this
    let before = this.#takeHead()
    let after = ''
    const body = this.#hasBody ? last : NOTHING
    if (this.#isChunked) {
      if (body.length > 0) {
        before += `${body.length.toString(16)}\r\n`
        after = '\r\n'
      }
      after += `0\r\n${this.#trailers}\r\n`
    }
    // Also if nothing is left to send: earlier bytes have not left yet.
    this.#send(before, body, after, this.#left)
    return this
  }

  destroy(): this {
    if (this.destroyed) return this
    this.destroyed = true
    this.socket?.destroy()
    process.nextTick(() => this.#close())
    return this
  }

  /** The connection has room again. */
  drained(): void {
    if (!this.#isFull || this.writableEnded) return
    this.#isFull = false
    this.emit('drain')
  }

  #takeHead(): string {
    const head = this.#head
    this.#head = ''
    return head
  }

  #send(
    before: string,
    body: Buffer | string,
    after: string,
    left?: (error?: Error | null) => void,
  ): boolean {
    const socket = this.socket as Socket
    if (typeof body === 'string') return socket.write(before + body + after, 'latin1', left)
    if (body.length <= ONE_STRING)
      return socket.write(before + body.toString('latin1') + after, 'latin1', left)
    socket.cork()
    if (before !== '') socket.write(before, 'latin1')
    const hasRoom = after === '' ? socket.write(body, left) : socket.write(body)
    if (after !== '') socket.write(after, 'latin1', left)
    socket.uncork()
    return hasRoom
  }

  /** The kernel has all of it. Anything that could not be written ends with its connection. */
  readonly #left = (error?: Error | null): void => {
    if (error || this.destroyed) return
    this.writableFinished = true
    this.emit('finish')
    this.socket = null
    this.#close()
  }

  #close(): void {
    if (this.closed) return
    this.destroyed = true
    this.closed = true
    this.emit('close')
    this.#onClosed()
  }
}

let second = 0
let date = ''

function httpDate(): string {
  const now = Date.now()
  if (now - second >= 1000 || now < second) {
    second = now - (now % 1000)
    date = new Date(now).toUTCString()
  }
  return date
}
