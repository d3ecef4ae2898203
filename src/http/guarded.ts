import type { IncomingMessage, ServerResponse } from 'node:http'
import { firstOf } from '../core/headers.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Target } from '../core/target.ts'
import type { Call } from '../guard/call.ts'
import type { Ports } from '../guard/ports.ts'
import { guard } from '../guard.ts'
import { readBody } from './body.ts'
import { type Peer, protectedLines, requestLines } from './headers.ts'
import { breakOff, type Writer } from './write.ts'

/** Makes spans of protected requests, where the user has loaded an SDK (docs/tracing.md). */
export interface RequestSpans {
  /** Calls `handle`, which serves the request. */
  serve(route: RoutePolicy, request: IncomingMessage, response: ServerResponse, handle: () => void): void
  /** `traceparent` of the request that is being served; null: none is. */
  current(): string | null
}

export interface GuardedOptions {
  readonly ports: Ports
  readonly writer: Writer
  readonly upload: Millis
  /** `Host` for the upstream; null keeps the client's. */
  readonly host: string | null
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
): Call {
  const headers = request.rawHeaders
  const path = route.match.exact ? target.rawPath : target.path
  const own = options.spans?.current() ?? null
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
    headers,
    traceId: traceIdOf(own ?? firstOf(headers, 'traceparent')),
    span: own !== null && SAMPLED.test(own) ? own : undefined,
    statusLink:
      // A key in the body, or none, cannot be asked about.
      options.statusPath === null || !carriesKey(headers, route.key.from)
        ? []
        : ['Location', `${options.statusPath}?${new URLSearchParams({ method, path }).toString()}`],
    readBody: () => readBody(request, route.limits.request, options.upload, options.ports.budget),
    upstreamHeaders: (attempt) => {
      const lines = requestLines(headers, peer, options.host)
      return attempt === null ? lines : protectedLines(lines, route.key, attempt)
    },
    clientGone: () => gone,
    onGone: (left) => {
      response.once('close', left)
      return () => response.off('close', left)
    },
  }
}

/** The lowest bit of the flags. */
const SAMPLED = /[13579bdf]$/

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}
