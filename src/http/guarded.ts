import type { IncomingMessage, ServerResponse } from 'node:http'
import { firstOf } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Target } from '../core/target.ts'
import type { Call } from '../guard/call.ts'
import { guard, type Ports } from '../guard.ts'
import { readBody } from './body.ts'
import { type Peer, protectedLines, requestLines } from './headers.ts'
import type { Writer } from './write.ts'

export interface GuardedOptions {
  readonly ports: Ports
  readonly writer: Writer
  readonly upload: Millis
  /** `Host` for the upstream; null keeps the client's. */
  readonly host: string | null
  readonly onBug: (error: unknown) => void
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
  const headers = request.rawHeaders
  let gone = false
  response.once('close', () => {
    gone = !response.writableFinished
  })
  const call: Call = {
    route,
    method: request.method as string,
    target: target.origin,
    path: route.match.exact ? target.rawPath : target.path,
    query: target.query,
    headers,
    traceId: traceIdOf(firstOf(headers, 'traceparent')),
    readBody: () => readBody(request, route.limits.request, options.upload, options.ports.budget),
    upstreamHeaders: (id, key, fence) =>
      protectedLines(requestLines(headers, peer, options.host), route.key, key, id, fence),
    clientGone: () => gone,
  }
  try {
    options.writer.write(request, response, await guard(options.ports, call))
  } catch (error) {
    options.onBug(error)
    response.destroy()
  }
}

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}
