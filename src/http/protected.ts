import { firstOf, type RawHeaders } from '../core/headers.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Target } from '../core/route.ts'
import { guard, newProgress } from '../protect/guard.ts'
import type { Ports } from '../protect/ports.ts'
import { type BodyReading, type ProtectedRequest, type SentAttempt } from '../protect/request.ts'
import type { Budget } from '../runtime/limits.ts'
import type { Shadow } from '../shadow/shadow.ts'
import { ExchangeTap } from '../upstream/exchange-tap.ts'
import { observeBody, readBody, type Uploads } from './bodies.ts'
import {
  type Forwarding,
  hostOf,
  type Peer,
  protectedLines,
  requestLines,
  type TrustedProxies,
} from './headers.ts'
import type { TrafficRequest, TrafficResponse } from './request.ts'
import { breakOff, type ResponseWriter } from './write.ts'

/** A request with an acceptable head. */
export interface Incoming {
  /** Its `req` is the request. */
  readonly response: TrafficResponse
  readonly target: Target
  readonly peer: Peer
}

/** Makes spans for protected requests, if an OpenTelemetry SDK is loaded (docs/tracing.md). */
export interface RequestSpans {
  /** Calls `handle`, which serves the request. */
  serve(route: RoutePolicy, request: TrafficRequest, response: TrafficResponse, handle: () => void): void
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
  /** Where clients ask for a record's state; null: not offered. */
  readonly statusPath: string | null
  readonly onBug: (error: unknown) => void
  readonly spans: RequestSpans | null
}

/** From the wire through the guard to the writer. */
export function serveProtected(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): void {
  const { spans } = options
  // No tracing, no span objects.
  if (spans === null) void protect(options, route, incoming)
  else
    spans.serve(route, incoming.response.req, incoming.response, () => void protect(options, route, incoming))
}

async function protect(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): Promise<void> {
  const { response } = incoming
  try {
    options.writer.write(response, await guard(options.ports, new Asked(options, route, incoming)))
  } catch (error) {
    options.onBug(error)
    breakOff(response)
  }
}

/** The request as the guard sees it. */
export class Asked implements ProtectedRequest {
  readonly route: RoutePolicy
  readonly method: string
  readonly target: string
  readonly path: string
  readonly query: string
  readonly host: string | null
  readonly headers: RawHeaders
  readonly client: string
  readonly traceId: string | null
  readonly span: string | undefined
  readonly progress = newProgress()
  readonly #response: TrafficResponse
  readonly #peer: Peer
  readonly #options: ProtectOptions
  /** The settings in force when the request arrived. */
  readonly #forwarding: Forwarding
  readonly #upload: Millis

  /** `method` and target are those of the operation that the request is about. */
  constructor(
    options: ProtectOptions,
    route: RoutePolicy,
    { response, target, peer }: Incoming,
    method = response.req.method as string,
  ) {
    const { rawHeaders } = response.req
    const own = options.spans?.current() ?? null
    this.route = route
    this.method = method
    this.target = target.origin
    this.path = route.match.exact ? target.rawPath : target.path
    this.query = target.query
    this.host = route.scope.host ? hostOf(rawHeaders, peer) : null
    this.headers = rawHeaders
    this.client = options.proxies.clientOf(rawHeaders, peer)
    this.traceId = traceIdOf(own ?? firstOf(rawHeaders, 'traceparent'))
    this.span = own !== null && SAMPLED.test(own) ? own : undefined
    this.#response = response
    this.#peer = peer
    this.#options = options
    this.#forwarding = options.forwarding
    this.#upload = options.upload
  }

  get statusLink(): readonly string[] {
    const { statusPath } = this.#options
    const { headers, method, path, route } = this
    // Without a key in the head a status request has no key, and a key in the query would appear in the link.
    if (statusPath === null || !carriesKey({ headers, query: '' }, route.key.from)) return []
    return ['Location', `${statusPath}?${new URLSearchParams({ method, path }).toString()}`]
  }

  readBody(): BodyReading | Promise<BodyReading> {
    const { ports, uploads } = this.#options
    const limit = this.route.limits.request
    return readBody(this.#response.req, limit, this.#upload, ports.budget, uploads, this.client)
  }

  upstreamHeaders(attempt: SentAttempt | null): string[] {
    const lines = requestLines(this.headers, this.#peer, this.#forwarding, attempt !== null)
    return attempt === null ? lines : protectedLines(lines, this.route.key, attempt)
  }

  clientGone(): boolean {
    return this.#response.closed && !this.#response.writableFinished
  }

  onGone(left: () => void): () => void {
    this.#response.once('close', left)
    return () => this.#response.off('close', left)
  }
}

/** Shadow mode's view of a forwarded request. */
class ObservedRequest extends Asked {
  body: BodyReading | Promise<BodyReading> = { kind: 'aborted' }

  override readBody(): BodyReading | Promise<BodyReading> {
    return this.body
  }

  /** A sent request cannot be cancelled. */
  override clientGone(): boolean {
    return false
  }
}

export interface ShadowOptions {
  readonly shadow: Shadow
  /** Shadow mode's own, so that it takes no room from protected requests. */
  readonly budget: Budget
}

/** Lets shadow mode observe a forwarded request; null: it has no capacity. It decides once the request is on its way. */
export function tapRequest(
  options: ProtectOptions,
  { shadow, budget }: ShadowOptions,
  route: RoutePolicy,
  incoming: Incoming,
): ExchangeTap | null {
  const { response } = incoming
  const asked = new ObservedRequest(options, route, incoming)
  if (!shadow.enter(asked)) return null
  const { limits } = route
  const tap = new ExchangeTap({ method: asked.method, responseLimit: limits.response }, budget, options.onBug)
  response.once('close', () => tap.gone())
  asked.body = observeBody(response.req, limits.request, budget)
  setImmediate(() => void shadow.observe(asked, tap))
  return tap
}

/** The lowest bit of the flags. */
const SAMPLED = /[13579bdf]$/

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}
