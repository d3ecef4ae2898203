import type { FastifyInstance } from 'fastify'
import type { Config } from '../config/config.ts'
import { essence, firstOf } from '../core/headers.ts'
import { carriesKey, keyNeedsBody } from '../core/key.ts'
import type { RouteMatch, RoutePolicy } from '../core/policy.ts'
import {
  comparedPath,
  normalisePath,
  parseTarget,
  patternOf,
  policiesOf,
  type RequestTarget,
  Router,
  readsKeys,
  WELL_KNOWN,
} from '../core/route.ts'
import { methodName } from '../core/rpc/protocol.ts'
import { streamRefused } from '../protect/answers.ts'
import { type Forwarding, identifyingHeaders } from './headers.ts'
import { adopt, type TrafficRequest, type Way } from './request.ts'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** The policy of a route of the configuration. */
    readonly policy?: string
  }
}

/** Constraints of routes without a policy. Names of policies have no brackets. */
export const OTHER = { unmatched: '(unmatched)', upload: '(upload)', preflight: '(preflight)' } as const

/** Called for a request that matches no route, but would match this one if case, `;parameters` or an extension did not count. */
export type NearMissHandler = (route: string, method: string, path: string) => void

/** http-proxy sends no body with these methods. */
export const WITHOUT_BODY: ReadonlySet<string> = new Set(['GET', 'HEAD', 'TRACE'])

/**
 * Chooses the way of each request before Fastify's router does: in a file the first match wins, in find-my-way the most specific. The
 * constraint keeps the router to that choice (docs/adr/0127).
 */
export class Routing {
  readonly forwarding: Forwarding
  /** The application has http-proxy. */
  readonly hasUploads: boolean
  readonly router: Router
  readonly #config: Config
  readonly #onNearMiss: NearMissHandler
  /** `GET /status` */
  readonly #own: ReadonlySet<string>

  constructor(
    config: Config,
    upstream: Omit<Forwarding, 'counted'>,
    onNearMiss: NearMissHandler = () => {},
    hasUploads = false,
  ) {
    const { issuer, status, wellKnown } = config
    this.forwarding = { ...upstream, counted: identifyingHeaders(config) }
    this.hasUploads = hasUploads
    this.#config = config
    this.router = new Router(policiesOf(config))
    this.#onNearMiss = onNearMiss
    this.#own = new Set([
      ...(issuer === null ? [] : [`POST ${normalisePath(issuer.path)}`]),
      ...(status.path === null ? [] : [`GET ${normalisePath(status.path)}`]),
      ...(wellKnown ? [`GET ${WELL_KNOWN}`, `HEAD ${WELL_KNOWN}`] : []),
    ])
  }

  /** Fastify's `rewriteUrl`: the path as the chosen route compares it. The target stays in the {@link Arrival}. */
  readonly rewriteUrl = (request: TrafficRequest): string => {
    adopt(request)
    const target = parseTarget(request.url as string)
    // Refused by `refuseHeads`.
    if (target === null) return '/'
    const way = this.wayOf(request, target)
    const policy = this.hasUploads && isUpload(way, request) ? OTHER.upload : policyOf(way)
    request.arrival = { target, way, policy }
    // http-proxy would refuse or change some paths. It does not need the path: the request is forwarded by its `Arrival`.
    if (policy === OTHER.upload) return '/'
    const route = 'route' in way ? way.route : null
    return routerUrl(route === null ? target.path : comparedPath(route.match, target), target.query)
  }

  /** Makes find-my-way return the route that was chosen. */
  readonly constraint = {
    name: 'policy',
    storage: () => new Map(),
    deriveConstraint: (request: TrafficRequest) => request.arrival?.policy as string,
  } as unknown as Parameters<FastifyInstance['addConstraintStrategy']>[0]

  wayOf(request: TrafficRequest, target: RequestTarget): Way {
    const { cors, defaults, unmatched } = this.#config
    const method = request.method as string
    if (this.#isOwn(method, target)) return { kind: 'own' }
    const asked = cors === null ? null : preflightFor(method, request.rawHeaders)
    const preflight = asked === null ? null : ({ kind: 'preflight', method: asked } as const)
    if (preflight !== null && this.#isOwn(preflight.method, target)) return preflight
    const route = this.router.match(method, target)
    if (route === null || route === defaults) {
      const near = this.router.nearMiss(method, target)
      if (near !== null) this.#onNearMiss(near.name, method, target.path)
    }
    if (route === null && unmatched === 'reject') return preflight ?? { kind: 'refuse' }
    if (route === null || !readsKeys(route)) return { kind: 'pass', route, ignored: false }
    if (this.#streams(target) || isConnectStream(request, route)) {
      if (route.key.presence === 'required' && route.mode === 'enforce') request.refusal ??= streamRefused()
      return { kind: 'pass', route, ignored: false }
    }
    // Only routes can require a key.
    const isMatched = route !== defaults
    if ((isMatched && route.key.presence === 'required') || mayHaveKey(request, target, route))
      return { kind: route.mode === 'shadow' ? 'shadow' : 'protect', route }
    return { kind: 'pass', route, ignored: isMatched && route.statusHeader }
  }

  /** Whether the descriptors say that the method has a stream, which is not protected. */
  #streams({ origin }: RequestTarget): boolean {
    const method = this.#config.grpc.descriptors?.methods.get(methodName(origin))
    return method !== undefined && method.streams !== 'none'
  }

  #isOwn(method: string, { path }: RequestTarget): boolean {
    return this.#own.size > 0 && this.#own.has(`${method} ${path}`)
  }
}

/** Connect streams have media types of their own. */
function isConnectStream({ rawHeaders }: TrafficRequest, { match }: RoutePolicy): boolean {
  return match.grpc != null && essence(rawHeaders).startsWith('application/connect+')
}

/** Whether the body streams, and http-proxy sends one with this method. */
export function isUpload({ kind }: Way, request: TrafficRequest): boolean {
  return (
    (kind === 'pass' || kind === 'shadow') &&
    request.peekBody() === null &&
    !WITHOUT_BODY.has(request.method as string)
  )
}

function policyOf(way: Way): string | undefined {
  switch (way.kind) {
    case 'protect':
    case 'shadow':
      return way.route.name
    case 'pass':
      return way.route?.name ?? OTHER.unmatched
    case 'refuse':
      return OTHER.unmatched
    case 'preflight':
      return OTHER.preflight
    case 'own':
      return undefined
  }
}

/** The method that a CORS preflight asks for; null: not a preflight. */
function preflightFor(method: string, headers: readonly string[]): string | null {
  return method === 'OPTIONS' && firstOf(headers, 'origin') !== null
    ? firstOf(headers, 'access-control-request-method')
    : null
}

/** A key that is not in the head may be in the body, or be derived from it. */
function mayHaveKey({ rawHeaders }: TrafficRequest, { query }: RequestTarget, { key }: RoutePolicy): boolean {
  return carriesKey({ headers: rawHeaders, query }, key.from) || keyNeedsBody(key) || key.derive !== null
}

/** Characters with a meaning in a URL or a Fastify pattern. Only exact paths have others than `%` and `*`. */
const SPECIAL = /[*?#]/g

/** find-my-way compares escaped percent signs: otherwise it would refuse a path that is not UTF-8. */
function routerUrl(path: string, query: string): string {
  const url = /[%*?#]/.test(path) ? literal(path).replaceAll('%', '%25') : path
  return query === '' ? url : `${url}?${query}`
}

function literal(path: string): string {
  return path.replace(SPECIAL, (char) => `%${char.charCodeAt(0).toString(16).toUpperCase()}`)
}

/** A Fastify pattern that matches only this path. */
export function pathPattern(path: string): string {
  return literal(normalisePath(path)).replaceAll(':', '::')
}

/** A route's path as a Fastify pattern. */
export function routePattern(match: RouteMatch): string {
  const { segments, rest } = patternOf(match)
  const names = match.path.matchAll(/\/:([^/]+)/g)
  const parts = segments.map((segment) =>
    segment === null
      ? `:${(names.next().value?.[1] ?? '').replace(/\W/g, '_')}`
      : literal(segment).replaceAll(':', '::'),
  )
  return `/${[...parts, ...(rest ? ['*'] : [])].join('/')}`
}
