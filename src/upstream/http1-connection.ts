import { connect, type NetConnectOpts, type Socket } from 'node:net'
import type { Readable } from 'node:stream'
import type { ConnectionOptions } from 'node:tls'
import errors from 'undici/lib/core/errors.js'
import type { Millis } from '../core/record.ts'
import type { ClientOptions } from './client-options.ts'
import type { DispatchedRequest } from './dispatched.ts'
import { expectsContent, messageOf } from './request-head.ts'
import { type AnswerParts, type Following, ResponseParser } from './response-parser.ts'
import { ENDING, upload } from './upload.ts'

/** An upstream that closes a connection this soon after a request had most likely closed it before. */
const AT_ONCE: Millis = 1000

/** undici's default. */
const USUAL_TIMEOUT: Millis = 300_000

/** Requests up to this size are written as one string, for which libuv needs no extra memory. */
const ONE_STRING = 16 * 1024

/** Shared read buffer: everything is copied out of it before the next read. */
const READ = Buffer.allocUnsafeSlow(64 * 1024)

/** What a connection needs of its client. */
interface Owner {
  readonly options: ClientOptions
  /** Resumed by the next TLS connection. */
  session: Buffer | undefined
  readonly generation: number
  idle(connection: UpstreamConnection): void
  unasked(): void
  lost(connection: UpstreamConnection): void
  gone(connection: UpstreamConnection): void
  wakeAt(time: Millis, now: Millis): void
}

type ConnectionPhase = 'connecting' | 'head' | 'body' | 'idle' | 'ending' | 'over'

/** One connection, with the request that it carries. */
export class UpstreamConnection implements AnswerParts {
  readonly #client: Owner
  readonly #socket: Socket
  readonly #parser: ResponseParser
  readonly #generation: number
  #request: DispatchedRequest | null
  #phase: ConnectionPhase = 'connecting'
  /** Whether it may carry another request after the current one. */
  #reusable = true
  /** Stops the body, if it is a stream that has not ended. */
  #upload: (() => void) | null = null
  /** How its last answer ended. */
  #following: Following = 'explicit'
  /** How long it had been idle before this request, until a byte of the answer has come; null: not at all. */
  #rested: Millis | null = null
  /** When the upstream last sent or accepted bytes, and how long to wait; 0: forever. */
  #since: Millis
  #patience: Millis

  constructor(client: Owner, request: DispatchedRequest) {
    this.#client = client
    this.#generation = client.generation
    this.#request = request
    this.#parser = new ResponseParser(this, client.options.maxHeaderSize)
    const { to, connectTimeout } = client.options
    const tls = client.options.tls()
    const read = (bytes: number): boolean => this.#read(bytes)
    const options = {
      ...to,
      noDelay: true,
      keepAlive: true,
      keepAliveInitialDelay: 60_000,
      onread: { buffer: READ, callback: read },
    } as NetConnectOpts
    this.#socket = (tls === null ? connect(options) : this.#secured({ ...options, ...tls }))
      .on(tls === null ? 'connect' : 'secureConnect', () => this.#connected())
      .on('end', () => this.#ended())
      .on('error', (error) => this.#closedBy(error))
      .on('close', () => this.#closed())
    this.#since = performance.now()
    this.#patience = connectTimeout
    this.#wake()
  }

  begin(request: DispatchedRequest): void {
    const { options } = request
    const { method } = options
    let message: { readonly head: string; readonly body: Uint8Array | Readable; readonly length: number }
    try {
      message = messageOf(options, this.#client.options.host)
    } catch (error) {
      // Nothing was sent.
      this.#free()
      return request.fail(error as Error)
    }
    const { head, body, length } = message
    this.#request = request
    if (!request.begins()) return this.#free()
    request.connection = this
    const now = performance.now()
    this.#rested = this.#phase === 'idle' ? now - this.#since : null
    this.#phase = 'head'
    this.#reusable = method !== 'HEAD' && (length === 0 || expectsContent(method))
    this.#parser.expect(method)
    this.#since = now
    this.#patience = options.headersTimeout ?? USUAL_TIMEOUT
    this.#wake()
    const socket = this.#socket
    if (!(body instanceof Uint8Array)) {
      socket.write(head, 'latin1')
      this.#stream(body, length)
    } else if (length === 0) socket.write(head, 'latin1')
    else if (body instanceof Buffer && length + head.length <= ONE_STRING)
      socket.write(head + body.toString('latin1'), 'latin1')
    else {
      socket.cork()
      socket.write(head, 'latin1')
      socket.write(body)
      socket.uncork()
    }
  }

  /** `length`: as announced; infinite: in chunks. */
  #stream(body: Readable, length: number): void {
    const socket = this.#socket
    const isChunked = length === Number.POSITIVE_INFINITY
    let isOver = false
    const stop = upload(body, length, {
      writable: socket,
      write: (chunk) => {
        this.#heard()
        if (!isChunked) return void socket.write(chunk)
        socket.cork()
        socket.write(`${chunk.length.toString(16)}\r\n`, 'latin1')
        socket.write(chunk)
        socket.write('\r\n', 'latin1')
        socket.uncork()
      },
      end: () => {
        isOver = true
        this.#upload = null
        this.#heard()
        if (isChunked) socket.write('0\r\n\r\n', 'latin1')
      },
      broken: (error) => {
        isOver = true
        this.destroy(error)
      },
    })
    // The body may have ended before.
    if (!isOver) this.#upload = stop
  }

  #stopUpload(): void {
    this.#upload?.()
    this.#upload = null
  }

  /** More of the request has been sent: restarts the timeout of the answer. */
  #heard(): void {
    if (this.#phase === 'head') this.#since = performance.now()
  }

  isOverdue(now: Millis): boolean {
    return now >= this.#since + this.#patience
  }

  distrust(): void {
    if (this.#following !== 'explicit') this.destroy(null)
  }

  /** Ends the connection and its request with this error; null: it has none. */
  destroy(error: Error | null): void {
    if (this.#phase === 'over') return
    if (this.#phase === 'idle') this.#client.lost(this)
    this.#phase = 'over'
    this.#parser.stop()
    this.#stopUpload()
    const request = this.#request
    this.#request = null
    this.#socket.destroy()
    if (error !== null) request?.fail(error)
  }

  pause(): void {
    this.#socket.pause()
  }

  resume(): void {
    this.#since = performance.now()
    this.#wake()
    this.#socket.resume()
  }

  onInterim(): void {
    this.#since = performance.now()
  }

  onHead(status: number, reason: string, lines: string[]): void {
    const request = this.#request as DispatchedRequest
    this.#phase = 'body'
    this.#since = performance.now()
    this.#patience = request.options.bodyTimeout ?? USUAL_TIMEOUT
    this.#wake()
    request.headed(status, reason, lines)
  }

  onBody(bytes: Buffer, from: number, to: number): void {
    const request = this.#request
    request?.handler.onResponseData?.(request, bytes.subarray(from, to))
  }

  onUnasked(): void {
    this.#client.unasked()
  }

  onComplete(trailers: string[], following: Following): void {
    const request = this.#request as DispatchedRequest
    this.#request = null
    request.connection = null
    const isSent = this.#upload === null
    request.isTaken = isSent && this.#socket.writableLength === 0
    this.#following = this.#reusable && isSent ? following : 'nothing'
    const isTrusted = following === 'explicit' || !this.#client.options.habits.sendsUnasked
    // The last bytes of the answer have paused it: without reading, a close would go unnoticed.
    if (request.paused) this.#socket.resume()
    if (this.#following !== 'nothing' && isTrusted) this.#keep()
    else this.destroy(null)
    request.ended(trailers)
  }

  /** Aborts a request that has waited too long; returns when to check again. */
  look(now: Millis): Millis {
    if (this.#phase === 'over' || this.#patience === 0 || this.#request?.paused)
      return Number.POSITIVE_INFINITY
    // The upstream waits for the client.
    if (this.#upload !== null && this.#phase === 'head' && !this.#socket.writableNeedDrain) this.#since = now
    const due = this.#since + this.#patience
    if (now < due) return due
    const within = `within ${this.#patience} ms`
    if (this.#phase === 'idle' || this.#phase === 'ending') this.destroy(null)
    else if (this.#phase === 'connecting')
      this.destroy(new errors.ConnectTimeoutError(`no connection ${within}`))
    else if (this.#phase === 'head')
      this.destroy(new errors.HeadersTimeoutError(`no head of an answer ${within}`))
    else this.destroy(new errors.BodyTimeoutError(`no further byte of the answer ${within}`))
    return Number.POSITIVE_INFINITY
  }

  #wake(): void {
    if (this.#patience > 0) this.#client.wakeAt(this.#since + this.#patience, this.#since)
  }

  #secured(options: ConnectionOptions): Socket {
    const client = this.#client
    // `node:tls` adds to the start, and is not needed without it.
    return process
      .getBuiltinModule('node:tls')
      .connect({
        ALPNProtocols: ['http/1.1'],
        ...options,
        ...(client.session && { session: client.session }),
      })
      .on('session', (session) => {
        if (this.#generation === client.generation) client.session = session
      })
  }

  #connected(): void {
    if (this.#phase === 'connecting') this.begin(this.#request as DispatchedRequest)
  }

  /** True: continue reading. */
  #read(length: number): boolean {
    if (this.#request === null) {
      // Bytes for an aborted request: TLS still delivers what it has decrypted.
      if (this.#phase === 'over') return false
      // Unsolicited bytes must not be mistaken for the answer to the next request.
      this.destroy(null)
      this.#client.unasked()
      return true
    }
    this.#rested = null
    if (this.#phase === 'body') this.#since = performance.now()
    try {
      this.#parser.execute(READ, length)
    } catch (error) {
      this.destroy(error as Error)
    }
    return !this.#request?.paused
  }

  #ended(): void {
    const isConnecting = this.#phase === 'connecting'
    if (this.#request === null || (!isConnecting && this.#parser.finish())) this.#closedBy(null)
    else this.#closedBy(new Error('the upstream closed the connection'))
  }

  #closed(): void {
    this.#closedBy(new Error('the connection to the upstream was closed'))
    this.#client.gone(this)
  }

  /** The upstream closed the connection, or the network broke it. */
  #closedBy(error: Error | null): void {
    const now = performance.now()
    const { habits } = this.#client.options
    if (this.#phase === 'idle') habits.closedAfter(now - this.#since)
    else if (this.#phase === 'head' && this.#rested !== null && now - this.#since < AT_ONCE)
      habits.closedAfter(this.#rested)
    this.destroy(error)
  }

  /** The request it was opened for did not begin. */
  #free(): void {
    this.#request = null
    if (this.#phase !== 'over') this.#keep()
  }

  #keep(): void {
    this.#since = performance.now()
    // The answer came before the whole request was sent: the rest is sent, but no further request.
    if (this.#socket.writableLength > 0) {
      this.#phase = 'ending'
      this.#patience = ENDING
      this.#socket.end()
      return this.#wake()
    }
    const isFormer = this.#generation !== this.#client.generation
    this.#patience = isFormer ? 0 : this.#client.options.habits.keepFor(this.#parser.keepAlive)
    if (this.#patience <= 0) return this.destroy(null)
    this.#phase = 'idle'
    this.#wake()
    this.#client.idle(this)
  }
}
