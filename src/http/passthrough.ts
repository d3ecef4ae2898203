import type { IncomingMessage, ServerResponse } from 'node:http'
import httpProxy from '@fastify/http-proxy'
import { fastify } from 'fastify'
import type { Dispatcher } from 'undici'
import { filterLines, firstOf, hopByHop, isNeverUpstreams } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { sentUnanswered } from '../protect/answers.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import { errorText, isTrailer, lines, reasonPhrase } from '../upstream/forward.ts'
import type { Upstream } from '../upstream/pool.ts'
import { hasBody } from './bodies.ts'
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

const { METHODS } = process.getBuiltinModule('node:http')

export interface PassthroughOptions {
  readonly upstream: Upstream
  readonly writer: ResponseWriter
  readonly timeout: Millis
  readonly idleTimeout: Millis
  readonly onBug: (error: unknown) => void
  /** Why there was no answer: for operators, as it may name addresses. */
  readonly onFailed: (method: string, cause: string) => void
}

/** What a request that passes has besides what Node parsed. */
export interface Passage {
  readonly target: string
  readonly lines: readonly string[]
  /** The proxy's own header lines on the answer. */
  readonly proxyHeaders: readonly string[]
  /** Overhears the exchange, in shadow mode. */
  readonly tap: ExchangeTap | null
}

export type Pass = (response: ServerResponse, passage: Passage) => void

/** A body up to this size that came with its head goes upstream with it, without a stream in between. */
const WHOLE_BODY = 16 * 1024

/**
 * Sends what is not protected to the upstream as the client sent it, and gives the client the upstream's answer: target, lines,
 * bytes and trailers unchanged, bodies never buffered, nothing ever retried. undici carries it; bodies that stream go through
 * @fastify/http-proxy (docs/adr/0064).
 */
export async function passthrough(options: PassthroughOptions): Promise<Pass> {
  const upload = await uploads(options.upstream)
  return (response, passage) => {
    const { req: request } = response
    const exchange = new PassedExchange(options, response, passage)
    const stream = (): void => {
      endIdleUpload(response, options)
      upload(response, exchange)
    }
    if (!hasBody(request)) return exchange.dispatch(null)
    const length = Number(request.headers['content-length'] ?? Number.POSITIVE_INFINITY)
    if (length > WHOLE_BODY) return stream()
    // What came with the head has been read by then.
    process.nextTick(() => {
      const whole = request.readableLength === length ? (request.read() as Buffer | null) : null
      if (whole === null) return stream()
      // Shadow mode waits for `end`.
      request.resume()
      exchange.dispatch(whole)
    })
  }
}

const kExchange = Symbol('exchange')
/** A member rather than a WeakMap: see docs/adr/0017. */
interface Upload extends IncomingMessage {
  [kExchange]?: PassedExchange
}

/** reply-from sends no body with these methods. */
const WITHOUT_BODY: ReadonlySet<string> = new Set(['GET', 'HEAD', 'TRACE'])

/** http-proxy streams a body and {@link PassedExchange} takes the answer: http-proxy would write another head (docs/adr/0064). */
async function uploads({ origin, pool }: Upstream) {
  const app = fastify({
    // find-my-way and `new URL` would refuse or change some targets; the exchange sends the real one.
    rewriteUrl: () => '/',
    bodyLimit: Number.MAX_SAFE_INTEGER,
    exposeHeadRoutes: false,
    logger: false,
    // There are no schemas, and what compiles them takes longer to load than the framework.
    schemaController: { compilersFactory: { buildValidator: noSchemas, buildSerializer: noSchemas } },
  })
  for (const method of METHODS)
    if (!app.supportedMethods.includes(method)) app.addHttpMethod(method, { hasBody: true })
  app.addHook('onRequest', (request, _reply, done) => {
    // The catch-all parser takes any body as a stream, but Fastify refuses malformed types before asking it.
    request.raw.headers['content-type'] = 'application/octet-stream'
    done()
  })
  await app.register(httpProxy, {
    upstream: origin.origin,
    httpMethods: app.supportedMethods.filter((method) => !WITHOUT_BODY.has(method)),
    undici: pool.compose(() => ({ body }) => {
      const request = body as Upload
      return request[kExchange]?.dispatch(request) ?? true
    }),
    handler: (_request, reply, destination, replyOptions) => {
      reply.hijack()
      return reply.from(destination, replyOptions)
    },
    disableRequestLogging: true,
    retryMethods: [],
  })
  await app.ready()
  return (response: ServerResponse, exchange: PassedExchange): void => {
    const request: Upload = response.req
    if (WITHOUT_BODY.has(request.method as string)) return void exchange.dispatch(request)
    request[kExchange] = exchange
    app.routing(request, response)
  }
}

function noSchemas(): never {
  throw new Error('no route has a schema')
}

/**
 * One exchange that is not protected. A client that leaves ends the upstream's answer; an upstream that breaks off breaks off the
 * client's.
 */
class PassedExchange implements Dispatcher.DispatchHandler {
  readonly #options: PassthroughOptions
  readonly #response: ServerResponse
  readonly #passage: Passage
  #controller: Dispatcher.DispatchController | null = null
  #chunked = false
  /** The head is written; {@link #headLeft}: it is on its way, too. */
  #begun = false
  #headLeft = false
  /** The answer is at its end, or has no body: what still comes is not for the client. */
  #ended = false
  /** The first bytes: they leave with the head, and with the end where that comes in the same turn. */
  #first: Buffer | null = null

  constructor(options: PassthroughOptions, response: ServerResponse, passage: Passage) {
    this.#options = options
    this.#response = response
    this.#passage = passage
    response.once('close', () => {
      this.#ended = true
      if (!response.writableFinished) this.#controller?.abort(new Error('the client left'))
    })
  }

  dispatch(body: IncomingMessage | Buffer | null): boolean {
    const { req: request } = this.#response
    const { upstream, timeout, idleTimeout } = this.#options
    const { target, lines, tap } = this.#passage
    const length = request.headers['content-length']
    const options: Dispatcher.DispatchOptions = {
      method: request.method as Dispatcher.HttpMethod,
      path: target,
      headers:
        body === request && length !== undefined ? [...lines, 'Content-Length', length] : (lines as string[]),
      body,
      idempotent: false,
      headersTimeout: timeout,
      bodyTimeout: idleTimeout,
      ...(upstream.tls.servername === undefined ? {} : { servername: upstream.tls.servername }),
    }
    try {
      return tap === null ? upstream.pool.dispatch(options, this) : tap.dispatch(upstream.pool, options, this)
    } catch (error) {
      tap?.failed(error as Error)
      this.onResponseError(null, error as Error)
      return true
    }
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
    reason?: string,
  ): void {
    if (status < 200) return
    // The client has already been answered about its idle upload.
    if (this.#response.headersSent) {
      this.#ended = true
      controller.abort(new Error('the client was answered'))
      return
    }
    try {
      this.#begin(lines(controller.rawHeaders), status, reasonPhrase(reason))
    } catch (error) {
      // undici would let a bug here end the process.
      this.#options.onBug(error)
      breakOff(this.#response)
    }
  }

  /** Writes the head. */
  #begin(raw: readonly string[], status: number, reason: string): void {
    const response = this.#response
    const { req: request } = response
    const hop = hopByHop(raw)
    this.#chunked = chunkable(response, status) && firstOf(raw, 'content-length') === null
    const kept = filterLines(raw, (name) => {
      if (name === 'trailer') return this.#chunked
      return !hop.has(name) && !isNeverUpstreams(name) && (name !== 'content-length' || status !== 204)
    })
    // The unread rest of the upload would precede the next request.
    if (!request.complete) {
      kept.push('Connection', 'close')
      lingeringClose(response)
    }
    response.writeHead(status, reason, withProxyHeaders(kept, this.#passage.proxyHeaders))
    this.#begun = true
    if (!hasContent(response, status)) this.#end(null)
    // Without a body so far, the head leaves alone at the end of this turn.
    else
      setImmediate(() => {
        if (!this.#ended && !this.#headLeft) this.#leave()
      })
  }

  /** The head, with the first bytes where they are there. */
  #leave(): void {
    this.#headLeft = true
    if (this.#first === null) sendHead(this.#response)
    else this.#write(this.#first)
    this.#first = null
    this.#options.writer.watch(this.#response)
  }

  #write(chunk: Buffer): void {
    const response = this.#response
    if (response.write(chunk)) return
    this.#controller?.pause()
    // It holds an upstream connection, so an occasional byte is not enough.
    const timer = setTimeout(() => breakOff(response), this.#options.idleTimeout)
    const stop = (): void => clearTimeout(timer)
    response.once('close', stop)
    response.once('drain', () => {
      stop()
      response.off('close', stop)
      this.#controller?.resume()
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
    if (this.#chunked)
      this.#response.addTrailers(pairs(filterLines(lines(controller.rawTrailers), isTrailer)))
    this.#end(this.#first)
  }

  #end(last: Buffer | null): void {
    this.#ended = true
    endMessage(this.#response, last)
    if (!this.#headLeft) this.#options.writer.watch(this.#response)
  }

  onResponseError(_controller: Dispatcher.DispatchController | null, error: Error): void {
    // Complete with its head: undici takes a 304 with a `Content-Length` for a truncated answer.
    if (this.#ended) return
    this.#ended = true
    const response = this.#response
    if (this.#begun) {
      if (!this.#headLeft) this.#leave()
      breakOff(response)
      return
    }
    // The refusal of an idle upload stands.
    if (response.headersSent) return
    // undici stops reading a body it streams; nobody else reads the rest.
    if (!response.req.complete) response.shouldKeepAlive = false
    const method = response.req.method as string
    this.#options.onFailed(method, errorText(error))
    this.#options.writer.problem(response, refusalOf(method, error))
  }
}

/**
 * Ends an upload that has been idle for `idleTimeout`. It would hold an upstream connection indefinitely: undici's own timeouts
 * start only after the whole request is written.
 */
function endIdleUpload(response: ServerResponse, { idleTimeout, writer }: PassthroughOptions): void {
  const { req: request } = response
  // Taken here: undici takes it away from a request whose body it gave up.
  const { socket } = request
  let heard = socket.bytesRead
  const timer = setInterval(() => {
    // A finished answer only waits to be read.
    if (request.complete || response.writableEnded) clearInterval(timer)
    else if (socket.bytesRead > heard) heard = socket.bytesRead
    else {
      clearInterval(timer)
      const detail = `no byte of the body arrived within ${idleTimeout} ms`
      if (response.headersSent) breakOff(response)
      else writer.problem(response, refusal('request_timeout', detail))
    }
  }, idleTimeout)
  response.once('close', () => clearInterval(timer))
}

const TIMEOUT: ReadonlySet<string> = new Set(['UND_ERR_HEADERS_TIMEOUT', 'UND_ERR_BODY_TIMEOUT'])
const UNSENT: ReadonlySet<string> = new Set([
  'ECONNREFUSED',
  'ENOTFOUND',
  'EAI_AGAIN',
  'EHOSTUNREACH',
  'ENETUNREACH',
  'UND_ERR_CONNECT_TIMEOUT',
])
/** OpenSSL's and Node's names for a handshake that failed: nothing was sent. */
const TLS_FAILED = /^(?:ERR_TLS_|ERR_SSL_|CERT_|DEPTH_ZERO_|SELF_SIGNED_|UNABLE_TO_)/

/**
 * Nothing is recorded of what passes: if it may have been executed, a retry executes it again, except for idempotent methods
 * (RFC 9110 §9.2.2).
 */
function refusalOf(method: string, { code = '', syscall }: NodeJS.ErrnoException): Refusal {
  if (UNSENT.has(code) || syscall === 'connect' || TLS_FAILED.test(code))
    return refusal('upstream_unreachable', 'no byte of the request was sent')
  const late = TIMEOUT.has(code)
  const what = sentUnanswered(late)
  const once = method === 'POST' || method === 'PATCH' || method === 'CONNECT'
  return refusal(
    late ? 'upstream_timeout' : 'upstream_failed',
    once ? `${what}; it is not protected: sent again, it may be executed again` : what,
    once ? { retry: 'no' } : {},
  )
}
