import httpProxy from '@fastify/http-proxy'
import type { FastifyInstance } from 'fastify'
import { Dispatcher } from 'undici'
import type { Upstream } from '../upstream/pool.ts'
import { type Hijacking, takeAnyType } from './incoming.ts'
import type { Passing } from './pass.ts'
import { OTHER, WITHOUT_BODY } from './routing.ts'

const kStream = Symbol('stream')
/** A member rather than a WeakMap: see docs/adr/0017. */
interface Uploading {
  [kStream]?: (() => void) | null
}

/** http-proxy streams the body; the exchange handles the answer, since http-proxy would write a different head (docs/adr/0128). */
export async function uploads(
  app: FastifyInstance,
  {
    upstream,
    pass,
    handle,
  }: { readonly upstream: Upstream; readonly pass: Passing; readonly handle: Hijacking },
): Promise<void> {
  class Handing extends Dispatcher {
    override dispatch({ body }: Dispatcher.DispatchOptions): boolean {
      ;(body as Uploading)[kStream]?.()
      return true
    }
    // The upstream's connections outlive this application.
    override async close(): Promise<void> {}
    override async destroy(): Promise<void> {}
  }
  app.addHook('preParsing', takeAnyType)
  await app.register(httpProxy, {
    upstream: upstream.origin.origin,
    routes: ['*'],
    constraints: { policy: OTHER.upload },
    httpMethods: app.supportedMethods.filter((method) => !WITHOUT_BODY.has(method)),
    undici: new Handing(),
    handler(request, reply, destination, options) {
      const send = handle((incoming) => {
        const raw = request.raw as Uploading
        raw[kStream] = pass(incoming)
        reply.from(destination, options)
      })
      send.call(app, request, reply)
    },
    disableRequestLogging: true,
    retryMethods: [],
  })
}
