import type { IncomingMessage } from 'node:http'
import type { Config, InForce } from '../config/config.ts'
import { linesOf } from '../core/headers.ts'
import { carriesKey, keyNeedsBody } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Refusal, refusal } from '../core/refusal.ts'
import { normalisePath, policiesOf, Router, readsKeys, type Target, WELL_KNOWN } from '../core/route.ts'
import { policyDocument } from '../describe/published.ts'
import { countedHeaders, type Forwarding } from './headers.ts'

/** What becomes of a request (contract §3.1, §10). */
export type Way =
  /** `shadow`: it passes, and is observed. */
  | { readonly kind: 'protect' | 'shadow'; readonly route: RoutePolicy }
  /** `ignored`: a protected route that says so of a request without a key. */
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }
  /** Endpoints of the proxy's own: keys are issued, the state of a record and the policy are read. */
  | { readonly kind: 'issue' | 'status' | 'policy' }

/** One configuration, as requests are dispatched by it. A request keeps the one that it came under. */
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

  /** What `GET /.well-known/idempotency` is answered. */
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
    // What no route matches never has to carry a key.
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

/** What the head does not show may be in the body, or be made of it. */
function mayHaveKey({ rawHeaders }: IncomingMessage, { query }: Target, { key }: RoutePolicy): boolean {
  return carriesKey({ headers: rawHeaders, query }, key.from) || keyNeedsBody(key) || key.derive !== null
}

/**
 * What makes a head unfit for any route, although Node's parser takes it; null: nothing. Whatever two servers may read in two
 * ways is refused here.
 */
export function refuseHead({ httpVersion, rawHeaders }: IncomingMessage): Refusal | null {
  if (httpVersion !== '1.1' && httpVersion !== '1.0')
    return malformed(505, `HTTP/${httpVersion} is not spoken here; send HTTP/1.1`)
  const hosts = linesOf(rawHeaders, 'host').length
  // Two of them are two opinions on whom the request is for (RFC 9112 §3.2).
  if (hosts > 1) return malformed(400, `${hosts} Host lines; one is allowed`)
  if (hosts === 0 && httpVersion === '1.1') return malformed(400, 'the Host line is missing')
  const codings = linesOf(rawHeaders, 'transfer-encoding').flatMap((line) => line.toLowerCase().split(','))
  if (codings.length === 0) return null
  if (httpVersion === '1.0') return malformed(400, 'HTTP/1.0 has no Transfer-Encoding')
  // Without it at the end nothing says where the body ends (RFC 9112 §6.3).
  if (codings.at(-1)?.trim() !== 'chunked') return malformed(400, 'Transfer-Encoding does not end in chunked')
  return codings.length === 1 ? null : malformed(501, 'a transfer coding other than chunked')
}

/** What Node's parser refuses, or does not get in time. Null: the connection itself broke. */
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
