import type { IncomingMessage, ServerResponse } from 'node:http'
import httpProxy from '@fastify/http-proxy'
import { fastify } from 'fastify'
import type { Upstream } from '../upstream/pool.ts'

const { METHODS } = process.getBuiltinModule('node:http')

type Dispatched = Parameters<Upstream['dispatcher']['dispatch']>
/** Sends a request whose body is the client's, and its answer to the client. */
export type Upload = (response: ServerResponse, ...exchange: Dispatched) => void

const kExchange = Symbol('exchange')
/** A member rather than a WeakMap: see docs/adr/0017. */
interface Passing extends IncomingMessage {
  [kExchange]?: Dispatched
}

/** reply-from sends no body with these methods. */
const WITHOUT_BODY: ReadonlySet<string> = new Set(['GET', 'HEAD', 'TRACE'])

/** http-proxy streams the body; the handler takes the answer, as http-proxy would write another head (docs/adr/0128). */
export async function uploads({ dispatcher, origin }: Upstream): Promise<Upload> {
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
    upstream: origin.origin,
    httpMethods: app.supportedMethods.filter((method) => !WITHOUT_BODY.has(method)),
    undici: dispatcher.compose((dispatch) => (options, handler) => {
      const [real, answered] = (options.body as Passing)[kExchange] ?? [options, handler]
      return dispatch(real, answered)
    }),
    handler: (_request, reply, destination, replyOptions) => {
      reply.hijack()
      return reply.from(destination, replyOptions)
    },
    disableRequestLogging: true,
    retryMethods: [],
  })
  await app.ready()
  return (response, ...exchange) => {
    const request: Passing = response.req
    if (WITHOUT_BODY.has(request.method as string)) return void dispatcher.dispatch(...exchange)
    request[kExchange] = exchange
    app.routing(request, response)
  }
}

function noSchemas(): never {
  throw new Error('no route has a schema')
}
