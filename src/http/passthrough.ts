import { EventEmitter } from 'node:events'
import { type IncomingMessage, METHODS, type Server, type ServerResponse } from 'node:http'
import httpProxy from '@fastify/http-proxy'
import { type FastifyInstance, fastify } from 'fastify'
import type { Dispatcher } from 'undici'
import type { Millis } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import type { Upstream } from '../upstream/pool.ts'
import type { Witness } from '../upstream/witness.ts'
import { hasBody } from './body.ts'
import { passedAnswer } from './passed.ts'
import type { Writer } from './write.ts'

/** What a passed request needs beyond the wire. Looked up by the raw request, so that fastify's routing never sees it. */
export interface Passage {
  readonly target: string
  readonly lines: readonly string[]
  readonly response: ServerResponse
  /** Header lines of the proxy's own on the answer. */
  readonly marks: readonly string[]
  /** Overhears the exchange, in shadow mode. */
  readonly witness: Witness | null
  answer?: Dispatcher.ResponseData
}

export type PassageOf = WeakMap<IncomingMessage, Passage>

const kRequest = Symbol('raw request')

export interface PassthroughOptions {
  readonly upstream: Upstream
  readonly writer: Writer
  readonly passages: PassageOf
  readonly timeout: Millis
  readonly idleTimeout: Millis
  readonly onBug: (error: unknown) => void
  readonly makeServer: (handler: (request: IncomingMessage, response: ServerResponse) => void) => Server
}

/**
 * What is not protected streams through @fastify/http-proxy, bodies never buffered, nothing ever retried. Fastify sees
 * every request as `/`, without a content type: target, lines and body go upstream as the client sent them, so no
 * decoding, routing or content-type parsing of the framework can refuse or change one (docs/adr/0003). The answer is
 * written by {@link passedAnswer}: what the framework cannot write (status 999, two `Connection` lines) it never sees.
 */
export async function passthrough(options: PassthroughOptions): Promise<FastifyInstance> {
  const { upstream, writer, passages } = options
  const app = fastify({
    serverFactory: options.makeServer,
    rewriteUrl: () => '/',
    bodyLimit: Number.MAX_SAFE_INTEGER,
    exposeHeadRoutes: false,
    forceCloseConnections: false,
    return503OnClosing: false,
    logger: false,
  })
  for (const method of METHODS)
    if (!app.supportedMethods.includes(method)) app.addHttpMethod(method, { hasBody: true })
  await app.register(httpProxy, {
    upstream: upstream.origin.origin,
    httpMethods: [...app.supportedMethods],
    undici: agentOf(options) as never,
    disableRequestLogging: true,
    disableCache: true,
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
        const { answer, marks } = passages.get(request.raw) as Passage
        try {
          passedAnswer(writer, request.raw, reply.raw, answer as Dispatcher.ResponseData, marks)
        } catch (error) {
          // A bug; undici would let it end the process.
          options.onBug(error)
          reply.raw.destroy()
        }
      },
      onError: (
        reply: { hijack(): void; raw: ServerResponse; request: { raw: IncomingMessage } },
        { error }: { error: Error },
      ) => {
        reply.hijack()
        if (reply.raw.headersSent) reply.raw.destroy()
        else writer.problem(reply.request.raw, reply.raw, passError(error))
      },
    } as never,
  })
  await app.ready()
  return app
}

interface AgentRequest {
  readonly headers: { readonly [kRequest]?: IncomingMessage }
}
type AgentReply = (error: Error | null, data: Dispatcher.ResponseData | null) => void

/** The pool, as http-proxy asks it: with the request's real target, lines and body put in. */
function agentOf(options: PassthroughOptions): { request(request: AgentRequest, done: AgentReply): void } {
  const { pool, tls } = options.upstream
  return {
    request({ headers }, done) {
      const raw = headers[kRequest] as IncomingMessage
      const passage = options.passages.get(raw) as Passage
      const body = hasBody(raw)
      const length = raw.headers['content-length']
      const gone = new EventEmitter()
      passage.response.once('close', () => gone.emit('abort'))
      if (body) endIdleUpload(raw, passage.response, options)
      const dispatcher = passage.witness?.beside(pool) ?? pool
      dispatcher.request(
        {
          method: raw.method as Dispatcher.HttpMethod,
          path: passage.target,
          headers:
            body && length !== undefined ? [...passage.lines, 'Content-Length', length] : [...passage.lines],
          body: body ? raw : null,
          idempotent: false,
          responseHeaders: 'raw',
          signal: gone,
          headersTimeout: options.timeout,
          bodyTimeout: options.idleTimeout,
          ...(tls.servername === undefined ? {} : { servername: tls.servername }),
        },
        (error: Error | null, data: Dispatcher.ResponseData) => {
          if (error !== null) {
            passage.witness?.failed(error)
            return done(error, null)
          }
          passage.answer = data
          done(null, { ...data, statusCode: 200, headers: {} })
        },
      )
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
  let heard = request.socket.bytesRead
  const timer = setInterval(() => {
    if (request.complete) clearInterval(timer)
    else if (request.socket.bytesRead > heard) heard = request.socket.bytesRead
    else {
      clearInterval(timer)
      if (response.headersSent) response.destroy()
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

function passError(error: Error): ReturnType<typeof refusal> {
  const cause = (error.cause ?? error) as NodeJS.ErrnoException
  const detail = cause.code === undefined ? cause.message : `${cause.message} (${cause.code})`
  const code = cause.code ?? ''
  if (TIMEOUT.has(code)) return refusal('upstream_timeout', detail)
  const unsent = UNSENT.has(code) || cause.syscall === 'connect' || TLS_FAILED.test(code)
  return refusal(unsent ? 'upstream_unreachable' : 'upstream_failed', detail)
}
