import type { IncomingMessage, ServerResponse } from 'node:http'
import { firstOf, linesOf, type RawHeaders } from '../core/headers.ts'
import { normaliseHost } from '../core/identity.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Target } from '../core/route.ts'
import { guard } from '../protect/guard.ts'
import type { Ports } from '../protect/ports.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import { readBody, type Uploads } from './body.ts'
import { type Forwarding, type Peer, protectedLines, requestLines } from './headers.ts'
import { breakOff, type ResponseWriter } from './write.ts'

/** Makes spans of protected requests, where the user has loaded an SDK (docs/tracing.md). */
export interface RequestSpans {
  /** Calls `handle`, which serves the request. */
  serve(route: RoutePolicy, request: IncomingMessage, response: ServerResponse, handle: () => void): void
  /** `traceparent` of the request that is being served; null: none is. */
  current(): string | null
}

export interface GuardedOptions {
  readonly ports: Ports
  readonly writer: ResponseWriter
  readonly upload: Millis
  readonly forwarding: Forwarding
  readonly uploads: Uploads
  /** Whose share of the limits a request takes. */
  readonly clientOf: (headers: RawHeaders, peer: Peer) => string
  /** Where clients ask for a record's state; null: nowhere. */
  readonly statusPath: string | null
  readonly onBug: (error: unknown) => void
  readonly spans: RequestSpans | null
}

/** A protected request of the wire → the walk → the writer. */
export async function handleGuarded(
  options: GuardedOptions,
  route: RoutePolicy,
  target: Target,
  peer: Peer,
  request: IncomingMessage,
  response: ServerResponse,
): Promise<void> {
  const call = callOf(options, route, request.method as string, target, peer, request, response)
  try {
    options.writer.write(request, response, await guard(options.ports, call))
  } catch (error) {
    options.onBug(error)
    breakOff(request, response)
  }
}

/** The same under a span. A function of its own, so that nothing is made for it where there are no spans. */
export function handleTraced(
  spans: RequestSpans,
  options: GuardedOptions,
  route: RoutePolicy,
  target: Target,
  peer: Peer,
  request: IncomingMessage,
  response: ServerResponse,
): void {
  const handle = (): void => void handleGuarded(options, route, target, peer, request, response)
  spans.serve(route, request, response, handle)
}

/** The request as the walk sees it. `method` and `target` are those of the operation that it is about. */
export function callOf(
  options: GuardedOptions,
  route: RoutePolicy,
  method: string,
  target: Target,
  peer: Peer,
  request: IncomingMessage,
  response: ServerResponse,
): ProtectedRequest {
  const headers = request.rawHeaders
  const path = route.match.exact ? target.rawPath : target.path
  const { forwarding } = options
  const own = options.spans?.current() ?? null
  const client = options.clientOf(headers, peer)
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
    readBody: () =>
      readBody(request, route.limits.request, options.upload, options.ports.budget, options.uploads, client),
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

/**
 * The host that the client asked, as far as it can be believed: a trusted proxy may have put its own in the place of `Host`. Blanks
 * name none; lines that disagree count together, since nobody knows which of them the upstream believes.
 */
function hostOf(headers: RawHeaders, { trusted }: Peer): string | null {
  const named = trusted ? linesOf(headers, 'x-forwarded-host').map(firstNamed) : []
  const hosts = new Set(named.filter((host) => host !== null))
  return hosts.size > 0 ? [...hosts].join() : normaliseHost(firstOf(headers, 'host'))
}

function firstNamed(line: string): string | null {
  for (const host of line.split(',')) {
    const named = normaliseHost(host)
    if (named !== null) return named
  }
  return null
}

/** The lowest bit of the flags. */
const SAMPLED = /[13579bdf]$/

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}
