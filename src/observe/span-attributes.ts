import type { Attributes } from '@opentelemetry/api'
import type { Config } from '../config/config.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { shortId } from '../core/record.ts'
import type { Trace } from '../protect/request.ts'
import type { Forwarded } from '../upstream/port.ts'

/*
 * Attributes of spans, by the semantic conventions for HTTP and databases (1.29 and later). A path may hold a key or a token in
 * any of its segments, so that no span has the path that was sent: where a route leaves something open it says REDACTED. No
 * span has a query, a header or a body (contract §14; conformance K22).
 */

export const REDACTED = 'REDACTED'

/** Others are `_OTHER`, so that a client cannot make up names. */
const METHODS: ReadonlySet<string> = new Set([
  'CONNECT',
  'DELETE',
  'GET',
  'HEAD',
  'OPTIONS',
  'PATCH',
  'POST',
  'PUT',
  'QUERY',
  'TRACE',
])

/** Such as `POST /v1/payments`, for both sides of a request. */
export function spanName(method: string, route: RoutePolicy): string {
  const verb = METHODS.has(method) ? method : 'HTTP'
  return isDefault(route) ? verb : `${verb} ${route.match.path}`
}

function methodOf(method: string): string {
  return METHODS.has(method) ? method : '_OTHER'
}

function isDefault({ name }: RoutePolicy): boolean {
  return name === 'default'
}

/** The path as far as the configuration says it. */
function knownPath({ match }: RoutePolicy): string {
  return match.path.replaceAll(/(?<=\/)(?::[^/]+|\*$)/g, REDACTED)
}

export function serverAttributes(method: string, route: RoutePolicy, version: string): Attributes {
  return {
    'http.request.method': methodOf(method),
    'url.scheme': 'http',
    'url.path': knownPath(route),
    'network.protocol.version': version,
    ...(isDefault(route) ? {} : { 'http.route': route.match.path }),
    'idempotency.route': route.name,
  }
}

/** What became of a request, once that is known. */
export function outcomeAttributes({ id, outcome, before, after, fence }: Trace): Attributes {
  return {
    'idempotency.outcome': outcome ?? 'aborted',
    ...(id === null ? {} : { 'idempotency.record': shortId(id) }),
    ...(before === null ? {} : { 'idempotency.state.before': before }),
    ...(after === null ? {} : { 'idempotency.state.after': after }),
    ...(fence === null ? {} : { 'idempotency.fence': fence }),
  }
}

/** Where the upstream is. */
export interface UpstreamPlace {
  readonly origin: string
  readonly attributes: Attributes
}

export function upstreamPlace({ url }: Config['upstream']): UpstreamPlace {
  if (url.startsWith('unix:'))
    return {
      origin: 'http://localhost',
      attributes: { 'server.address': url.slice('unix:'.length), 'network.transport': 'unix' },
    }
  const { origin, hostname, port, protocol } = new URL(url)
  return { origin, attributes: { 'server.address': hostname, 'server.port': portOf(port, protocol) } }
}

/** `target`: as it is sent. The one of `authorizeReplay` is the configuration's own. */
export function clientAttributes(
  { origin, attributes }: UpstreamPlace,
  method: string,
  target: string,
  route: RoutePolicy,
): Attributes {
  const own = target === route.authorizeReplay?.path
  const path = own ? (target.split('?', 1)[0] as string) : knownPath(route)
  return { ...attributes, 'http.request.method': methodOf(method), 'url.full': `${origin}${path}` }
}

/** Of an exchange with the upstream: its status, or `error.type`. */
export function exchangeAttributes(result: Forwarded): Attributes {
  switch (result.proof) {
    case 'responded':
      return statusAttributes(result.response.status, 400)
    case 'live':
      return statusAttributes(result.live.status, 400)
    case 'not_sent':
      return { 'error.type': 'not_sent' }
    case 'unknown':
      return { 'error.type': result.timedOut ? 'timeout' : 'broken_off' }
  }
}

/** A client's span takes 4xx for an error, a server's only 5xx. */
export function statusAttributes(status: number, errorFrom: 400 | 500): Attributes {
  return {
    'http.response.status_code': status,
    ...(status >= errorFrom ? { 'error.type': String(status) } : {}),
  }
}

/** Where the store is; null: in this process, where a span would tell nothing. */
export function storeAttributes({ url }: Config['store']): Attributes | null {
  if (url.startsWith('sqlite:')) return { 'db.system.name': 'sqlite' }
  if (!/^rediss?:/.test(url)) return null
  const { hostname, port, pathname } = new URL(url)
  return {
    'db.system.name': 'redis',
    'db.namespace': pathname.slice(1) || '0',
    'server.address': hostname,
    'server.port': port === '' ? 6379 : Number(port),
  }
}

function portOf(port: string, protocol: string): number {
  return port === '' ? (protocol === 'https:' ? 443 : 80) : Number(port)
}
