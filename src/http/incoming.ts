import type {
  FastifyInstance,
  FastifyReply,
  FastifyRequest,
  preParsingHookHandler,
  RouteHandlerMethod,
} from 'fastify'
import type { Refusal } from '../core/refusal.ts'
import type { RequestTarget } from '../core/route.ts'
import type { Peer } from './headers.ts'
import type { Arrival, TrafficRequest, TrafficResponse, Way } from './request.ts'
import { breakOff } from './write.ts'

/** A request with an acceptable head. */
export interface Incoming {
  /** Its `req` is the request. */
  readonly response: TrafficResponse
  readonly target: RequestTarget
  readonly way: Way
  readonly peer: Peer
}

/** Thrown by hooks and handlers; the error handler answers it with a problem document. */
export class Refused extends Error {
  readonly refusal: Refusal

  constructor(refusal: Refusal) {
    super(refusal.detail)
    this.refusal = refusal
  }
}

export function requestOf({ raw }: FastifyRequest): TrafficRequest {
  return raw as unknown as TrafficRequest
}

export function responseOf({ raw }: FastifyReply): TrafficResponse {
  return raw as unknown as TrafficResponse
}

/** Makes a route handler whose answers go through the one writer. */
export type Hijacking = (serve: (incoming: Incoming) => unknown) => RouteHandlerMethod

export function hijacking(
  peerOf: (request: TrafficRequest) => Peer,
  onBug: (error: unknown) => void,
): Hijacking {
  return (serve) => (request, reply) => {
    reply.hijack()
    const response = responseOf(reply)
    const failed = (error: unknown): void => {
      onBug(error)
      breakOff(response)
    }
    const raw = requestOf(request)
    const { target, way } = raw.arrival as Arrival
    try {
      const answering = serve({ response, target, way, peer: peerOf(raw) })
      if (answering instanceof Promise) answering.catch(failed)
    } catch (error) {
      failed(error)
    }
  }
}

/**
 * A `preParsing` hook that hides the content type from Fastify, which refuses some types, and QUERY without one: the type is for the
 * upstream to judge. A body that came with its head needs no parser, and without these headers Fastify runs none; that would double its
 * cost per request.
 */
export const takeAnyType: preParsingHookHandler = (request, _reply, payload, done) => {
  const { headers } = request.raw
  request.body = requestOf(request).peekBody()
  const isHere = request.body !== null && request.method !== 'QUERY'
  headers['content-type'] = isHere ? undefined : 'application/octet-stream'
  if (isHere) headers['content-length'] = undefined
  done(null, payload)
}

/** `request.body` is a body that came with its head, or null: others are read after their heads are checked. */
export function takeAnyBody(app: FastifyInstance): void {
  app.addHook('preParsing', takeAnyType)
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('*', ({ body }, _payload, done) => done(null, body))
}
