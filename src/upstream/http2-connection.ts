import type { ClientHttp2Session, ClientHttp2Stream } from 'node:http2'
import { connect as connectTcp, type NetConnectOpts, type Socket } from 'node:net'
import type { Readable } from 'node:stream'
import type { TLSSocket } from 'node:tls'
import type { Dispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import { OF_CONNECTION } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import type { ClientOptions } from './client-options.ts'
import { type DispatchedRequest, NotProcessed } from './dispatched.ts'
import { UpstreamStream } from './http2-stream.ts'
import { expectsContent, invalid, partsOf } from './request-head.ts'

const { connect } = process.getBuiltinModule('node:http2')

/** Requests at one time on a connection, if the upstream allows as many. */
export const MAX_STREAMS = 100

/** Half of the streams that a connection can ever have. */
const MAX_EVER = 2 ** 29

/** Bytes of answers that may be under way: on a stream, where a slow client holds them, and on the connection. */
const STREAM_WINDOW = 256 * 1024
const CONNECTION_WINDOW = 1024 * 1024

/** What a connection needs of its client. */
interface Owner {
  readonly options: ClientOptions
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  readonly generation: number
  /** It can carry requests, or more of them. */
  ready(): void
  /** Nothing runs on it. True: it is not needed any more. */
  idle(): boolean
  /** There was no connection, or one that the upstream ended before any request. */
  failed(error: Error): void
  gone(connection: Http2Connection): void
}

/** A connection, with the requests that it carries. It takes them once the upstream's settings have come: before that nothing is sent that executes. */
export class Http2Connection {
  readonly mostHead: () => number
  isOver = false
  isConnecting = true
  readonly #client: Owner
  readonly #socket: Socket
  readonly #generation: number
  readonly #streams: UpstreamStream[] = []
  #session: ClientHttp2Session | null = null
  /** No further request begins on it. */
  #isEnding = false
  #begun = 0
  #idleSince: Millis | null = null
  #error: Error | null = null
  /** Connecting, idle, or waiting for the answer to a ping. */
  #timer: NodeJS.Timeout | null = null
  #isDoubted = false
  /** The proxy itself has ended it: not a failure. */
  #isUnwanted = false

  constructor(client: Owner) {
    this.#client = client
    this.#generation = client.generation
    this.mostHead = client.options.maxHeaderSize
    const { to, connectTimeout } = client.options
    const tls = client.options.tls()
    const options = { ...to, noDelay: true, keepAlive: true, keepAliveInitialDelay: 60_000 } as NetConnectOpts
    this.#socket = tls === null ? connectTcp(options) : this.#secured({ ...options, ...tls })
    this.#socket
      .once(tls === null ? 'connect' : 'secureConnect', () => this.#connected(tls !== null))
      .on('error', (error) => {
        this.#error ??= error
      })
      .once('close', () => this.#ended())
    if (connectTimeout > 0)
      this.#after(connectTimeout, () =>
        this.destroy(new errors.ConnectTimeoutError(`no connection within ${connectTimeout} ms`)),
      )
  }

  /** Requests at one time that the upstream allows; 0: none for now. */
  get most(): number {
    return Math.min(MAX_STREAMS, this.#session?.remoteSettings?.maxConcurrentStreams ?? MAX_STREAMS)
  }

  /** It counts as one of the client's connections. */
  get isCurrent(): boolean {
    // Node closes a session by itself after a head that is too large to send.
    const isEnding = this.isOver || this.#isEnding || this.#session?.closed === true
    return !isEnding && this.#generation === this.#client.generation
  }

  get isIdle(): boolean {
    return this.#streams.length === 0
  }

  get hasRoom(): boolean {
    return this.isCurrent && !this.isConnecting && !this.#isDoubted && this.#streams.length < this.most
  }

  begin(request: DispatchedRequest): void {
    const { host, tls } = this.#client.options
    let message: ReturnType<typeof headOf>
    try {
      message = headOf(request.options, tls() === null ? 'http' : 'https', host)
    } catch (error) {
      // Nothing was sent.
      return request.fail(error as Error)
    }
    if (!request.begins()) return
    const { head, body, length } = message
    const isEmpty = body instanceof Uint8Array && length === 0
    let stream: ClientHttp2Stream
    try {
      stream = (this.#session as ClientHttp2Session).request(head, { endStream: isEmpty })
    } catch (error) {
      return request.fail(new NotProcessed(`the request could not be sent: ${(error as Error).message}`))
    }
    this.#stopWaiting()
    this.#idleSince = null
    if (++this.#begun >= MAX_EVER) this.#isEnding = true
    const carried = new UpstreamStream(this, stream, request)
    carried.place = this.#streams.push(carried) - 1
    carried.send(body, length)
  }

  /** Closes the connection once its requests are answered. */
  end(): void {
    this.#isEnding = true
    if (this.isIdle) this.destroy(null)
  }

  /** Ends it, and its requests with this error; null: it has none. */
  destroy(error: Error | null): void {
    if (this.isOver) return
    this.#isUnwanted = error === null
    this.#error ??= error
    for (const stream of this.#streams.slice())
      stream.destroy(error ?? new Error('the connection to the upstream was closed'))
    this.#session?.destroy()
    this.#socket.destroy()
    this.#ended()
  }

  closed(stream: UpstreamStream): void {
    const last = this.#streams.pop() as UpstreamStream
    if (last !== stream) this.#streams[stream.place] = last
    last.place = stream.place
    if (this.isOver) return
    if (this.#streams.length > 0) return this.#client.ready()
    if (!this.isCurrent || this.#client.options.habits.keepFor(null) <= 0 || this.#client.idle())
      return this.destroy(null)
    if (!this.#isDoubted) this.#rest()
    this.#client.ready()
  }

  #rest(): void {
    this.#idleSince = performance.now()
    this.#after(this.#client.options.habits.keepFor(null), () => {
      // One that takes nothing for now is waited for: the next would be the same.
      if (this.isIdle && this.most > 0) this.destroy(null)
    })
  }

  get bytesRead(): number {
    return this.#socket.bytesRead
  }

  /** A silent connection may be dead: until it has answered a ping it takes no further request. Those that it has keep their own time. */
  unanswered(readBefore: number): void {
    if (this.isOver || this.#isDoubted || this.bytesRead !== readBefore || this.#session?.closed !== false)
      return
    this.#isDoubted = true
    const patience = this.#client.options.connectTimeout
    this.#after(patience, () => {
      this.end()
      this.#client.ready()
    })
    this.#session?.ping((error) => {
      if (error !== null || this.isOver) return
      this.#isDoubted = false
      this.#stopWaiting()
      if (this.isIdle) this.destroy(null)
      else this.#client.ready()
    })
  }

  #connected(isTls: boolean): void {
    if (this.isOver) return
    if (isTls && (this.#socket as TLSSocket).alpnProtocol !== 'h2')
      return this.destroy(new Error('the upstream does not speak HTTP/2 (ALPN)'))
    const options = {
      createConnection: () => this.#socket,
      settings: {
        enablePush: false,
        initialWindowSize: STREAM_WINDOW,
        // The exact limit is kept by the stream; this one bounds what Node gathers.
        maxHeaderListSize: 2 * this.mostHead() + 64 * 1024,
      },
      maxHeaderListPairs: 10_000,
      // In megabytes. Node would refuse what `limits` has let in.
      maxSessionMemory: 10_000,
      strictSingleValueFields: false,
    }
    const session = connect(`http://${this.#client.options.host}`, options)
    this.#session = session
    session
      .once('connect', () => session.setLocalWindowSize(CONNECTION_WINDOW))
      .on('error', (error) => {
        this.#error ??= error
      })
      .on('goaway', (code, last) => this.#goesAway(code, last))
      .on('remoteSettings', () => this.#settled())
      .once('close', () => this.#ended())
  }

  #settled(): void {
    this.isConnecting = false
    // Whoever asked for it may have left.
    if (this.isIdle && !this.#isDoubted) this.#rest()
    this.#client.ready()
  }

  #goesAway(code: number, last: number): void {
    this.#isEnding = true
    // Node reports heads that have come before it later.
    process.nextTick(() => {
      for (const stream of this.#streams.slice()) stream.goneAway(code, last)
      this.#client.ready()
    })
  }

  #ended(): void {
    if (this.isOver) return
    this.isOver = true
    this.#stopWaiting()
    const idle = this.#idleSince
    // One that says so beforehand costs no request.
    if (idle !== null && !this.#isEnding && this.#error === null)
      this.#client.options.habits.closedAfter(performance.now() - idle)
    this.#session?.destroy()
    this.#socket.destroy()
    // If it carried nothing the next would not, either.
    if (this.#begun === 0 && !this.#isUnwanted) {
      const why = this.#error ?? new Error('the upstream closed the connection')
      this.#client.failed(this.isConnecting && this.#session !== null ? notHttp2(why) : why)
    }
    this.#client.gone(this)
  }

  #secured(options: object): Socket {
    const client = this.#client
    // `node:tls` adds to the start, and is not needed without it.
    return process
      .getBuiltinModule('node:tls')
      .connect({
        ALPNProtocols: ['h2'],
        ...options,
        ...(client.session && { session: client.session }),
      })
      .on('session', (session) => {
        if (this.#generation === client.generation) client.session = session
      })
  }

  /** After a pause of the process, first read what arrived during it. */
  #after(time: Millis, act: () => void): void {
    this.#stopWaiting()
    const timer = setTimeout(
      () =>
        setImmediate(() => {
          if (this.#timer === timer) act()
        }),
      time,
    ).unref()
    this.#timer = timer
  }

  #stopWaiting(): void {
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = null
  }
}

function notHttp2(why: Error): Error {
  const { code } = why as NodeJS.ErrnoException
  return code === 'ERR_HTTP2_ERROR'
    ? new Error(`the upstream does not speak HTTP/2 (${why.message})`, { cause: why })
    : why
}

/** The request's fields (RFC 9113 §8.3.1), and its body with the length; infinite: known at its end. */
function headOf(
  options: Dispatcher.DispatchOptions,
  scheme: 'http' | 'https',
  defaultHost: string,
): { readonly head: string[]; readonly body: Uint8Array | Readable; readonly length: number } {
  const { method, path } = options
  const lines: string[] = []
  const { host, body, length } = partsOf(options, (line, value) => {
    const name = line.toLowerCase()
    if (!OF_CONNECTION.has(name) || (name === 'te' && value.toLowerCase() === 'trailers'))
      lines.push(name, value.replace(/^[\t ]+|[\t ]+$/g, ''))
  })
  const authority = host || defaultHost
  if (!AUTHORITY.test(authority)) throw invalid('host header')
  if (Number.isFinite(length) && (length > 0 || expectsContent(method)))
    lines.push('content-length', String(length))
  const pseudo = [':method', method, ':scheme', scheme, ':authority', authority, ':path', path]
  return { head: [...pseudo, ...lines], body, length }
}

/** Others would be malformed (RFC 9113 §8.3.1), and the stream be reset. */
const AUTHORITY = /^[^\0-\x20"#/<>?@\\^`{|}\x7f-\xff]+$/
