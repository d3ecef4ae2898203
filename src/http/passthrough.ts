import type { IncomingMessage, Server, ServerResponse } from 'node:http'
import httpProxy from '@fastify/http-proxy'
import { type FastifyInstance, fastify } from 'fastify'
import type { Dispatcher } from 'undici'
import type { Millis } from '../core/record.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { sentUnanswered } from '../protect/answers.ts'
import type { ExchangeTap } from '../upstream/exchange-tap.ts'
import type { Upstream } from '../upstream/pool.ts'
import { hasBody } from './body.ts'
import { clientErrorHandler } from './client-error.ts'
import { PassedExchange } from './passed.ts'
import { breakOff, type ResponseWriter } from './write.ts'

const { METHODS } = process.getBuiltinModule('node:http')

/** What a passed request needs beyond the wire: it travels on the raw request, so that fastify's routing never sees it. */
export interface Passage {
  readonly target: string
  readonly lines: readonly string[]
  readonly response: ServerResponse
  /** Header lines of the proxy's own on the answer. */
  readonly proxyHeaders: readonly string[]
  /** Overhears the exchange, in shadow mode. */
  readonly witness: ExchangeTap | null
  exchange?: PassedExchange
}

const kPassage = Symbol('passage')
/** A member and no WeakMap: a young collection takes the values of one for alive, and with them every request (docs/internals/performance.md). */
interface Passing extends IncomingMessage {
  [kPassage]?: Passage
}

/** To be called before fastify gets the request. */
export function setPassage(request: IncomingMessage, passage: Passage): void {
  ;(request as Passing)[kPassage] = passage
}

function passageOf(request: IncomingMessage): Passage {
  return (request as Passing)[kPassage] as Passage
}

const kRequest = Symbol('raw request')

export interface PassthroughOptions {
  readonly upstream: Upstream
  readonly writer: ResponseWriter
  readonly timeout: Millis
  readonly idleTimeout: Millis
  readonly onBug: (error: unknown) => void
  /** Why there was no answer: for operators, as it may name addresses. */
  readonly onFailed: (method: string, cause: string) => void
  readonly makeServer: (handler: (request: IncomingMessage, response: ServerResponse) => void) => Server
}

/**
 * What is not protected streams through @fastify/http-proxy, bodies never buffered, nothing ever retried. Fastify sees
 * every request as `/`, without a content type: target, lines and body go upstream as the client sent them, so no
 * decoding, routing or content-type parsing of the framework can refuse or change one (docs/adr/0003). The answer is
 * written by {@link PassedExchange}: what the framework cannot write (status 999, two `Connection` lines) it never sees.
 */
export async function passthrough(options: PassthroughOptions): Promise<FastifyInstance> {
  const { upstream, writer } = options
  const failed = (request: IncomingMessage, error: Error): Refusal => {
    const cause = (error.cause ?? error) as NodeJS.ErrnoException
    const said = cause.code === undefined ? cause.message : `${cause.message} (${cause.code})`
    options.onFailed(request.method as string, said)
    return passError(request.method as string, cause)
  }
  const app = fastify({
    serverFactory: options.makeServer,
    clientErrorHandler: clientErrorHandler(writer),
    rewriteUrl: () => '/',
    bodyLimit: Number.MAX_SAFE_INTEGER,
    exposeHeadRoutes: false,
    forceCloseConnections: false,
    return503OnClosing: false,
    logger: false,
    // There are no schemas, and what compiles them takes longer to load than the framework.
    schemaController: { compilersFactory: { buildValidator: noSchemas, buildSerializer: noSchemas } },
  })
  for (const method of METHODS)
    if (!app.supportedMethods.includes(method)) app.addHttpMethod(method, { hasBody: true })
  await app.register(httpProxy, {
    upstream: upstream.origin.origin,
    httpMethods: [...app.supportedMethods],
    undici: agentOf(options) as never,
    disableRequestLogging: true,
    internalRewriteLocationHeader: false,
    retryMethods: [],
    replyOptions: {
      retryDelay: () => null,
      rewriteRequestHeaders: (request: { raw: IncomingMessage }) => ({ [kRequest]: request.raw }),
      rewriteHeaders: () => ({}),
      onResponse: (
        request: { raw: IncomingMessage },
        reply: { hijack(): void; raw: ServerResponse },
      ): void => {
        reply.hijack()
        try {
          passageOf(request.raw).exchange?.begin()
        } catch (error) {
          // A bug; undici would let it end the process.
          options.onBug(error)
          breakOff(request.raw, reply.raw)
        }
      },
      onError: (
        reply: { hijack(): void; raw: ServerResponse; request: { raw: IncomingMessage } },
        { error }: { error: Error },
      ) => {
        reply.hijack()
        // The refusal of an idle upload stands; whatever began otherwise is broken off where it was begun.
        if (reply.raw.headersSent) return
        // undici gives up a body that it streams: nobody reads that to its end.
        if (!reply.request.raw.complete) reply.raw.shouldKeepAlive = false
        writer.problem(reply.request.raw, reply.raw, failed(reply.request.raw, error))
      },
    } as never,
  })
  await app.ready()
  return app
}

function noSchemas(): never {
  throw new Error('no route has a schema')
}

interface AgentRequest {
  readonly headers: { readonly [kRequest]?: IncomingMessage }
}
/** What http-proxy looks at of an answer, before it hands over to `onResponse`. */
interface Answered {
  readonly statusCode: number
  readonly headers: Record<string, never>
  readonly body: { destroy(): void }
}
type AgentReply = (error: Error | null, answered: Answered | null) => void

/** Up to here a body that came with its head goes upstream with it, without a stream in between. */
const WHOLE_BODY = 16 * 1024

/** The pool, as http-proxy asks it: with the request's real target, lines and body put in. */
function agentOf(options: PassthroughOptions): { request(request: AgentRequest, done: AgentReply): void } {
  const { pool, tls } = options.upstream
  return {
    request({ headers }, done) {
      const raw = headers[kRequest] as IncomingMessage
      const passage = passageOf(raw)
      const { response, proxyHeaders, witness } = passage
      const exchange = new PassedExchange({
        writer: options.writer,
        request: raw,
        response,
        proxyHeaders,
        // The client's going is heard by the exchange itself.
        onAnswer: () => done(null, { statusCode: 200, headers: {}, body: { destroy() {} } }),
        onError: (error) => done(error, null),
      })
      passage.exchange = exchange
      const send = (body: IncomingMessage | Buffer | null): void => {
        const length = raw.headers['content-length']
        const asked: Dispatcher.DispatchOptions = {
          method: raw.method as Dispatcher.HttpMethod,
          path: passage.target,
          headers:
            body === raw && length !== undefined
              ? [...passage.lines, 'Content-Length', length]
              : (passage.lines as string[]),
          body,
          idempotent: false,
          headersTimeout: options.timeout,
          bodyTimeout: options.idleTimeout,
          ...(tls.servername === undefined ? {} : { servername: tls.servername }),
        }
        try {
          if (witness === null) pool.dispatch(asked, exchange)
          else witness.dispatch(pool, asked, exchange)
        } catch (error) {
          witness?.failed(error as Error)
          exchange.failed(error as Error)
        }
      }
      if (!hasBody(raw)) send(null)
      else {
        const length = Number(raw.headers['content-length'] ?? Number.POSITIVE_INFINITY)
        if (length > WHOLE_BODY) stream()
        else
          process.nextTick(() => {
            // What came with the head is read by then.
            const whole = raw.readableLength === length ? (raw.read() as Buffer | null) : null
            if (whole === null) return stream()
            // So that its end is told to those who hear it, too.
            raw.resume()
            send(whole)
          })
      }
      function stream(): void {
        endIdleUpload(raw, response, options)
        send(raw)
      }
    },
  }
}

/**
 * Ends an upload that has stood still for `idleTimeout`: it would hold a connection to the upstream for as long as the
 * client likes, as undici looks at its own timeouts only after the whole request is written.
 */
function endIdleUpload(
  request: IncomingMessage,
  response: ServerResponse,
  options: PassthroughOptions,
): void {
  // undici takes the socket away from a request whose body it gave up, and the answer may still wait for its turn.
  const { socket } = request
  let heard = socket.bytesRead
  const timer = setInterval(() => {
    // An answer that is given already only waits for its turn, or for its reader.
    if (request.complete || response.writableEnded) clearInterval(timer)
    else if (socket.bytesRead > heard) heard = socket.bytesRead
    else {
      clearInterval(timer)
      if (response.headersSent) breakOff(request, response)
      else {
        const detail = `no byte of the body arrived within ${options.idleTimeout} ms`
        options.writer.problem(request, response, refusal('request_timeout', detail))
      }
    }
  }, options.idleTimeout)
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
 * What the client is told. Nobody remembers what passes: where it may have been executed, sending it again executes it again,
 * but for methods that may be repeated by their meaning (RFC 9110 §9.2.2).
 */
function passError(method: string, { code = '', syscall }: NodeJS.ErrnoException): Refusal {
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
