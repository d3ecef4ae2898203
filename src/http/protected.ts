import type { IncomingMessage, ServerResponse } from 'node:http'
import { firstOf } from '../core/headers.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Target } from '../core/route.ts'
import { guard } from '../protect/guard.ts'
import type { Ports } from '../protect/ports.ts'
import { newProgress, type ProtectedRequest } from '../protect/request.ts'
import type { Budget } from '../runtime/limits.ts'
import type { Shadow } from '../shadow/shadow.ts'
import { ExchangeTap } from '../upstream/exchange-tap.ts'
import { overhearBody, readBody, type Uploads } from './bodies.ts'
import {
  type Forwarding,
  hostOf,
  type Peer,
  protectedLines,
  requestLines,
  type TrustedProxies,
} from './headers.ts'
import { breakOff, type ResponseWriter } from './write.ts'

/** A request with an acceptable head. */
export interface Incoming {
  /** Its `req` is the request. */
  readonly response: ServerResponse
  readonly target: Target
  readonly peer: Peer
}

/** Makes spans for protected requests, if an OpenTelemetry SDK is loaded (docs/tracing.md). */
export interface RequestSpans {
  /** Calls `handle`, which serves the request. */
  serve(route: RoutePolicy, request: IncomingMessage, response: ServerResponse, handle: () => void): void
  /** `traceparent` of the request being served; null: none. */
  current(): string | null
}

export interface ProtectOptions {
  readonly ports: Ports
  readonly writer: ResponseWriter
  /** `limits.upload` in force. */
  readonly upload: Millis
  readonly forwarding: Forwarding
  readonly uploads: Uploads
  readonly proxies: TrustedProxies
  /** Where clients ask for a record's state; null: nowhere. */
  readonly statusPath: string | null
  readonly onBug: (error: unknown) => void
  readonly spans: RequestSpans | null
}

/** From the wire through the guard to the writer. */
export function serveProtected(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): void {
  const { spans } = options
  // Nothing is made for spans where there are none.
  if (spans === null) void protect(options, route, incoming)
  else
    spans.serve(route, incoming.response.req, incoming.response, () => void protect(options, route, incoming))
}

async function protect(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): Promise<void> {
  const { response } = incoming
  const asked = protectedRequest(options, route, incoming)
  try {
    options.writer.write(response, await guard(options.ports, asked))
  } catch (error) {
    options.onBug(error)
    breakOff(response)
  }
}

/** The request as the guard sees it. `method` and `target` are those of the operation that it is about. */
export function protectedRequest(
  options: ProtectOptions,
  route: RoutePolicy,
  { response, target, peer }: Incoming,
  method = response.req.method as string,
): ProtectedRequest {
  const { req: request } = response
  const headers = request.rawHeaders
  const path = route.match.exact ? target.rawPath : target.path
  const { forwarding, ports, upload, uploads } = options
  const own = options.spans?.current() ?? null
  const client = options.proxies.clientOf(headers, peer)
  let gone = false
  response.once('close', () => {
    gone = !response.writableFinished
  })
  return {
    route,
    method,
    target: target.origin,
    path,
    query: target.query,
    host: route.scope.host ? hostOf(headers, peer) : null,
    headers,
    client,
    traceId: traceIdOf(own ?? firstOf(headers, 'traceparent')),
    span: own !== null && SAMPLED.test(own) ? own : undefined,
    statusLink:
      // A key in the body, or none, cannot be asked about; one in the query would stand in the link.
      options.statusPath === null || !carriesKey({ headers, query: '' }, route.key.from)
        ? []
        : ['Location', `${options.statusPath}?${new URLSearchParams({ method, path }).toString()}`],
    progress: newProgress(),
    readBody: () => readBody(request, route.limits.request, upload, ports.budget, uploads, client),
    upstreamHeaders: (attempt) => {
      const lines = requestLines(headers, peer, forwarding)
      return attempt === null ? lines : protectedLines(lines, route.key, attempt)
    },
    clientGone: () => gone,
    onGone: (left) => {
      response.once('close', left)
      return () => response.off('close', left)
    },
  }
}

export interface ShadowOptions {
  readonly shadow: Shadow
  /** Shadow mode's own, so that it takes no room from protected requests. */
  readonly budget: Budget
}

/** Lets shadow mode observe a request that passes; null: it has no capacity. It decides once the request is on its way. */
export function tapRequest(
  options: ProtectOptions,
  { shadow, budget }: ShadowOptions,
  route: RoutePolicy,
  incoming: Incoming,
): ExchangeTap | null {
  const { response } = incoming
  const asked = protectedRequest(options, route, incoming)
  if (!shadow.enter(asked)) return null
  const { limits } = route
  const tap = new ExchangeTap({ method: asked.method, responseLimit: limits.response }, budget, options.onBug)
  response.once('close', () => tap.gone())
  const body = overhearBody(response.req, limits.request, budget)
  const heard: ProtectedRequest = { ...asked, readBody: () => body, clientGone: () => false }
  setImmediate(() => void shadow.observe(heard, tap))
  return tap
}

/** The lowest bit of the flags. */
const SAMPLED = /[13579bdf]$/

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}
