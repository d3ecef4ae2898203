import type { Config } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import type { Upstream } from '../upstream/pool.ts'
import { requestLines } from './headers.ts'
import type { Incoming } from './incoming.ts'
import { type Pass, passthrough } from './passthrough.ts'
import { type ProtectOptions, type ShadowOptions, tapRequest } from './protected.ts'
import type { TrafficResponse } from './request.ts'
import { isUpload } from './routing.ts'
import type { ResponseWriter } from './write.ts'

export interface PassOptions {
  readonly config: Config
  readonly upstream: Upstream
  readonly writer: ResponseWriter
  readonly protecting: ProtectOptions
  readonly shadow: ShadowOptions
  readonly passed: (route: string, milliseconds: Millis) => void
  readonly passFailed: (method: string, cause: string) => void
  readonly onBug: (error: unknown) => void
}

/** Forwards unprotected; in shadow mode, observes. */
export type Passing = (incoming: Incoming) => ReturnType<Pass>

export function passing({
  config,
  protecting,
  shadow,
  passed,
  passFailed,
  ...options
}: PassOptions): Passing {
  const { timeout, idleTimeout } = config.upstream
  const pass: Pass = passthrough({ ...options, timeout, idleTimeout, onFailed: passFailed })
  return (incoming) => {
    const { response, target, way, peer } = incoming
    const startedAt = performance.now()
    const route = ('route' in way ? way.route : null) ?? config.defaults
    response.on('close', () => passed(route.name, performance.now() - startedAt))
    return pass(response, {
      target: target.origin,
      lines: requestLines(response.req.rawHeaders, peer, protecting.forwarding),
      proxyHeaders: way.kind === 'pass' && way.ignored ? [RESPONSE_HEADER.status, 'ignored'] : [],
      tap: way.kind === 'shadow' ? tapRequest(protecting, shadow, route, incoming) : null,
    })
  }
}

/** Serves passed requests, except for bodies that http-proxy streams. `upload`: http-proxy is not loaded yet. */
export function passingOn(
  pass: Passing,
  upload: (response: TrafficResponse) => Promise<void>,
): (incoming: Incoming) => Promise<void> | undefined {
  return (incoming) => {
    const { response, way } = incoming
    if (isUpload(way, response.req)) return upload(response)
    pass(incoming)?.()
    return
  }
}
