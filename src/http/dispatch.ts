import type { IncomingMessage } from 'node:http'
import type { Config, InForce } from '../config/config.ts'
import { linesOf } from '../core/headers.ts'
import { carriesKey, keyNeedsBody } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { normalisePath, policiesOf, Router, readsKeys, type Target, WELL_KNOWN } from '../core/route.ts'
import { policyDocument } from '../describe/published.ts'
import { countedHeaders, type Forwarding } from './headers.ts'

/** How a request is handled (contract §3.1, §10). */
export type Way =
  /** `shadow`: passed, and observed. */
  | { readonly kind: 'protect' | 'shadow'; readonly route: RoutePolicy }
  /** `ignored`: the answer says that a protected route got no key. */
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }
  /** The proxy's own endpoints. */
  | { readonly kind: 'issue' | 'status' | 'policy' }

/** Dispatches requests by one configuration. A request keeps the routing it arrived under. */
export class Routing {
  readonly config: Config
  readonly router: Router
  readonly forwarding: Forwarding
  #policy: string | null = null

  constructor(config: Config, upstream: Pick<Forwarding, 'host' | 'loop'>) {
    this.config = config
    this.router = new Router(policiesOf(config))
    this.forwarding = { ...upstream, counted: countedHeaders(config) }
  }

  /** The body of `GET /.well-known/idempotency`. */
  get policy(): string {
    return (this.#policy ??= `${JSON.stringify(policyDocument(this.config))}\n`)
  }

  wayOf(request: IncomingMessage, target: Target): Way {
    const { config } = this
    const method = request.method as string
    const own = ownEndpoint(config, method, target)
    if (own !== null) return { kind: own }
    const route = this.router.match(method, target)
    if (route === null && config.unmatched === 'reject') return { kind: 'refuse' }
    if (route === null || !readsKeys(route)) return { kind: 'pass', route, ignored: false }
    // Only routes can require a key.
    const isMatched = route !== config.defaults
    if ((isMatched && route.key.presence === 'required') || mayHaveKey(request, target, route))
      return { kind: route.mode === 'shadow' ? 'shadow' : 'protect', route }
    return { kind: 'pass', route, ignored: isMatched && route.statusHeader }
  }
}

/** The routing of the configuration in force. */
export function routingOf(
  inForce: InForce,
  upstream: ConstructorParameters<typeof Routing>[1],
): () => Routing {
  let routing = new Routing(inForce.config, upstream)
  return () => {
    if (routing.config !== inForce.config) routing = new Routing(inForce.config, upstream)
    return routing
  }
}

function ownEndpoint(
  { issuer, status, wellKnown }: Config,
  method: string,
  { path }: Target,
): 'issue' | 'status' | 'policy' | null {
  if (issuer !== null && method === 'POST' && path === normalisePath(issuer.path)) return 'issue'
  if (status.path !== null && method === 'GET' && path === normalisePath(status.path)) return 'status'
  return wellKnown && (method === 'GET' || method === 'HEAD') && path === WELL_KNOWN ? 'policy' : null
}

/** A key that is not in the head may be in the body, or be derived from it. */
function mayHaveKey({ rawHeaders }: IncomingMessage, { query }: Target, { key }: RoutePolicy): boolean {
  return carriesKey({ headers: rawHeaders, query }, key.from) || keyNeedsBody(key) || key.derive !== null
}

/** Refuses heads that Node's parser accepts but that another server may read differently; null: fine. */
export function refuseHead({ httpVersion, rawHeaders }: IncomingMessage): Refusal | null {
  if (httpVersion !== '1.1' && httpVersion !== '1.0')
    return malformed(505, `HTTP/${httpVersion} is not spoken here; send HTTP/1.1`)
  const hosts = linesOf(rawHeaders, 'host').length
  // Two of them name two recipients (RFC 9112 §3.2).
  if (hosts > 1) return malformed(400, `${hosts} Host lines; one is allowed`)
  if (hosts === 0 && httpVersion === '1.1') return malformed(400, 'the Host line is missing')
  const codings = linesOf(rawHeaders, 'transfer-encoding').flatMap((line) => line.toLowerCase().split(','))
  if (codings.length === 0) return null
  if (httpVersion === '1.0') return malformed(400, 'HTTP/1.0 has no Transfer-Encoding')
  // Otherwise nothing marks the end of the body (RFC 9112 §6.3).
  if (codings.at(-1)?.trim() !== 'chunked') return malformed(400, 'Transfer-Encoding does not end in chunked')
  return codings.length === 1 ? null : malformed(501, 'a transfer coding other than chunked')
}

/** The refusal for a parser error or a timeout of Node's. Null: the connection itself broke. */
export function refusalOfParser({ code = '' }: NodeJS.ErrnoException): Refusal | null {
  switch (code) {
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return refusal('request_timeout', 'the head of the request did not arrive in time')
    case 'HPE_HEADER_OVERFLOW':
      return refusal('request_too_large', 'the request line and the header lines are over 16 KiB', {
        status: 431,
      })
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return refusal('request_too_large', 'the chunk extensions are over 16 KiB')
    default:
      return code.startsWith('HPE_') ? malformed(400, `the bytes are not HTTP/1.1 (${code})`) : null
  }
}

export function malformed(status: 400 | 417 | 501 | 505, detail: string): Refusal {
  return refusal('request_malformed', detail, { status })
}
