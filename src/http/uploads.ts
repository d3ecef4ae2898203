import type { IncomingMessage, ServerResponse } from 'node:http'
import httpProxy from '@fastify/http-proxy'
import { fastify } from 'fastify'
import type { Upstream } from '../upstream/pool.ts'
import type { Transport } from '../upstream/transport.ts'

const { METHODS } = process.getBuiltinModule('node:http')

/** Sends a request with a streamed body, and the answer to the client. */
export interface Streamed {
  stream(transport: Transport): void
}

export type Upload = (response: ServerResponse, exchange: Streamed) => void

const kExchange = Symbol('exchange')
/** A member rather than a WeakMap: see docs/adr/0017. */
interface Passing extends IncomingMessage {
  [kExchange]?: Streamed
}

/** reply-from sends no body with these methods. */
const WITHOUT_BODY: ReadonlySet<string> = new Set(['GET', 'HEAD', 'TRACE'])

/** http-proxy streams the body; the exchange takes the answer, as http-proxy would write another head (docs/adr/0064). */
export async function uploads(upstream: Upstream): Promise<Upload> {
  const streams = await upstream.streams()
  const app = fastify({
    // find-my-way and `new URL` would refuse or change some targets; the exchange sends the real one.
    rewriteUrl: () => '/',
    bodyLimit: Number.MAX_SAFE_INTEGER,
    exposeHeadRoutes: false,
    logger: false,
    // There are no schemas, and their compiler takes longer to load than the framework.
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
    upstream: upstream.origin.origin,
    httpMethods: app.supportedMethods.filter((method) => !WITHOUT_BODY.has(method)),
    undici: streams.pool.compose(() => ({ body }) => {
      const request = body as Passing
      request[kExchange]?.stream(streams)
      return true
    }),
    handler: (_request, reply, destination, replyOptions) => {
      reply.hijack()
      return reply.from(destination, replyOptions)
    },
    disableRequestLogging: true,
    retryMethods: [],
  })
  await app.ready()
  return (response, exchange) => {
    const request: Passing = response.req
    if (WITHOUT_BODY.has(request.method as string)) return exchange.stream(streams)
    request[kExchange] = exchange
    app.routing(request, response)
  }
}

function noSchemas(): never {
  throw new Error('no route has a schema')
}
