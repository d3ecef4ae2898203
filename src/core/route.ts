import type { RouteMatch, RoutePolicy } from './policy.ts'

/** The part of a configuration that decides which policy applies to a request. */
export interface Routes {
  /** The first that matches decides (contract §10). */
  readonly routes: readonly RoutePolicy[]
  /** Named `default`; it matches every POST and PATCH. */
  readonly defaults: RoutePolicy
  readonly unmatched: 'protect' | 'pass' | 'reject'
}

/** All policies, in matching order. */
export function policiesOf({ routes, defaults, unmatched }: Routes): readonly RoutePolicy[] {
  return unmatched === 'protect' ? [...routes, defaults] : routes
}

/** Whether keys are read at all, to protect or (in shadow mode) to observe. */
export function readsKeys({ mode, key }: RoutePolicy): boolean {
  return mode !== 'off' && key.presence !== 'ignored'
}

export function isProtected(policy: RoutePolicy): boolean {
  return readsKeys(policy) && policy.mode === 'enforce'
}

/** The policy of a record's route; null: no route has that name any more. */
export function policyNamed(
  { routes, defaults }: Omit<Routes, 'unmatched'>,
  name: string,
): RoutePolicy | null {
  return name === defaults.name ? defaults : (routes.find((route) => route.name === name) ?? null)
}

interface CompiledRoute {
  readonly policy: RoutePolicy
  readonly methods: ReadonlySet<string>
  readonly pattern: PathPattern
}

/** The name of the policy of requests that match no route. */
const DEFAULT_NAME = 'default'

export type Folding = Pick<RouteMatch, 'case' | 'parameters'>
export const LOOSE: Folding = { case: 'insensitive', parameters: 'strip' }
/** The characters that {@link LOOSE} or a file extension can change. */
const UNUSUAL = /[A-Z;.]/

/** A normalised path as the route compares it. */
export function foldedPath({ case: cases, parameters }: Folding, path: string): string {
  const bare =
    parameters === 'strip' && path.includes(';') ? normalisePath(path.replace(/;[^/]*/g, '')) : path
  return cases === 'insensitive' ? bare.toLowerCase() : bare
}

/** The path that a route compares, and that identifies records: as sent under `match.exact`, else in normal form. */
export function comparedPath(match: RouteMatch, target: RequestTarget): string {
  return match.exact ? target.rawPath : foldedPath(match, target.path)
}

export function patternOf(match: RouteMatch): PathPattern {
  const { segments, rest } = pathPattern(match.path, match.exact)
  if (match.exact) return { segments, rest }
  const folded = segments.map((segment) =>
    segment === null ? null : foldedPath(match, `/${segment}`).slice(1),
  )
  return { segments: folded, rest }
}

/** Finds the route of a request. */
export class Router {
  readonly #routes: readonly CompiledRoute[]
  /** For near misses. */
  readonly #loose: readonly CompiledRoute[]
  /** No route's path has anything {@link UNUSUAL}, so that a request without it cannot be a near miss. */
  readonly #isUsuallyPlain: boolean

  constructor(routes: readonly RoutePolicy[]) {
    this.#routes = routes.map((policy) => ({
      policy,
      methods: new Set(policy.match.methods),
      pattern: patternOf(policy.match),
    }))
    this.#loose = routes
      .filter((policy) => policy.name !== DEFAULT_NAME && readsKeys(policy))
      .map((policy) => ({
        policy,
        methods: new Set(policy.match.methods),
        pattern: patternOf({ ...policy.match, ...LOOSE, exact: false }),
      }))
    this.#isUsuallyPlain = this.#loose.every(({ policy }) => !UNUSUAL.test(policy.match.path))
  }

  match(method: string, target: RequestTarget): RoutePolicy | null {
    for (const { policy, methods, pattern } of this.#routes)
      if (methods.has(method) && matches(pattern, comparedPath(policy.match, target))) return policy
    return null
  }

  /**
   * The route that a request which matches none would match if letter case, `;parameters` and a file extension did not count (contract §15);
   * null: none.
   */
  nearMiss(method: string, { path }: RequestTarget): RoutePolicy | null {
    if (this.#isUsuallyPlain && !UNUSUAL.test(path)) return null
    const loose = foldedPath(LOOSE, path)
    const bare = loose.replace(/\.[a-z0-9]+$/, '')
    for (const { policy, methods, pattern } of this.#loose)
      if (methods.has(method) && (matches(pattern, loose) || matches(pattern, bare))) return policy
    return null
  }
}

/** A route's path, compiled: `/v1/payments/:id`, `/hooks/*`. */
export interface PathPattern {
  /** Segments, compared exactly; null stands for `:name`, any non-empty segment. */
  readonly segments: readonly (string | null)[]
  /** Ends in `/*`: anything may follow, but the slash must. */
  readonly rest: boolean
}

/** `exact`: literal segments are compared as written, not normalised. */
export function pathPattern(path: string, exact: boolean): PathPattern {
  const rest = path.endsWith('/*')
  const segments = (rest ? path.slice(0, -2) : path)
    .split('/')
    .slice(1)
    .map((segment) => (/^:./.test(segment) ? null : segment))
  const normal = (): PathPattern['segments'] =>
    segments.filter((s) => s !== '').map((s) => (s === null ? null : normalisePath(`/${s}`).slice(1)))
  return { segments: exact ? segments : normal(), rest }
}

function matches({ segments, rest }: PathPattern, path: string): boolean {
  let at = 0
  for (const segment of segments) {
    if (path.charCodeAt(at) !== 0x2f) return false
    const next = path.indexOf('/', at + 1)
    const end = next < 0 ? path.length : next
    if (segment === null ? end === at + 1 : path.slice(at + 1, end) !== segment) return false
    at = end
  }
  // A normalised path ends with the slash that `/*` needs only if something follows it.
  if (rest) return path.charCodeAt(at) === 0x2f
  return at === path.length || path === '/'
}

/** Whether every path that `narrow` matches is matched by `wide` as well. */
export function covers(wide: PathPattern, narrow: PathPattern): boolean {
  const [most, least] = [narrow.segments.length, wide.segments.length]
  const lengths = wide.rest
    ? least === 0 || most > least || (most === least && narrow.rest)
    : most === least && !narrow.rest
  return (
    lengths &&
    wide.segments.every((segment, n) =>
      segment === null ? narrow.segments[n] !== '' : segment === narrow.segments[n],
    )
  )
}

/** Whether some path matches both. */
export function overlaps(a: PathPattern, b: PathPattern): boolean {
  const common = Math.min(a.segments.length, b.segments.length)
  for (let n = 0; n < common; n++) {
    const [one, other] = [a.segments[n], b.segments[n]]
    if (one !== null && other !== null && one !== other) return false
  }
  if (a.segments.length > common) return b.rest
  if (b.segments.length > common) return a.rest
  return a.rest === b.rest || common === 0
}

/** {@link covers}, for routes. A route that matches fewer spellings of its literal segments covers none that matches more. */
export function routeCovers(wide: RouteMatch, narrow: RouteMatch): boolean {
  if (wide.exact && !narrow.exact) return false
  const foldsLess =
    !narrow.exact &&
    ((narrow.case === 'insensitive' && wide.case === 'sensitive') ||
      (narrow.parameters === 'strip' && wide.parameters === 'keep'))
  if (foldsLess && patternOf(wide).segments.some((segment) => segment !== null)) return false
  return routeTakes(wide, narrow)
}

/** Whether `wide` matches what `narrow` does in the spelling of its path in the file, as nearly all clients write it. */
export function routeTakes(wide: RouteMatch, narrow: RouteMatch): boolean {
  const spelled = { ...narrow, ...(wide.exact ? {} : wide), path: narrow.path, exact: wide.exact }
  return covers(patternOf(wide), patternOf(spelled))
}

/**
 * {@link overlaps}, for routes: whether some request matches both. Exact paths may have dot segments, so they are not compared with others.
 */
export function routesOverlap(a: RouteMatch, b: RouteMatch): boolean {
  if (a.exact !== b.exact) return true
  const folding = {
    case: a.case === 'insensitive' ? a.case : b.case,
    parameters: a.parameters === 'strip' ? a.parameters : b.parameters,
  }
  return overlaps(patternOf({ ...a, ...folding }), patternOf({ ...b, ...folding }))
}

/** The segments of a record's path that its route calls `:name`, by name; percent-encoded as in the record. */
export type PathParameters = ReadonlyMap<string, string>

export const NO_PARAMETERS: PathParameters = new Map()

export function pathParameters(match: Pick<RouteMatch, 'path' | 'exact'>, path: string): PathParameters {
  if (!match.path.includes('/:')) return NO_PARAMETERS
  const segments = path.split('/')
  const pattern = match.exact ? match.path : normalisePath(match.path)
  const found = new Map<string, string>()
  for (const [i, part] of pattern.split('/').entries()) {
    const segment = segments[i]
    if (part.startsWith(':') && segment !== undefined) found.set(part.slice(1), segment)
  }
  return found
}

/** A request target (RFC 9112 §3.2) taken apart. */
export interface RequestTarget {
  /** What is sent upstream: the target as received, in origin form. */
  readonly origin: string
  /** Path as sent, without the query. */
  readonly rawPath: string
  /** Normalised path: what routes match and what identifies the record (contract §10). */
  readonly path: string
  /** Without the `?`; empty if there is none. */
  readonly query: string
}

/** Where `wellKnown: true` publishes how keys are treated (RFC 8615). */
export const WELL_KNOWN = '/.well-known/idempotency'

/** Null: neither origin form nor an absolute http(s) URI; or it has a fragment, on whose end servers disagree. */
export function parseTarget(target: string): RequestTarget | null {
  if (target.includes('#')) return null
  let origin = target
  if (!origin.startsWith('/')) {
    // Absolute form: the part after the authority is matched and forwarded; otherwise it would evade every route.
    const absolute = /^https?:\/\/[^/?]*/i.exec(origin)
    if (absolute === null) return null
    origin = origin.slice(absolute[0].length)
    if (!origin.startsWith('/')) origin = `/${origin}`
  }
  const mark = origin.indexOf('?')
  const rawPath = mark < 0 ? origin : origin.slice(0, mark)
  const query = mark < 0 ? '' : origin.slice(mark + 1)
  return { origin, rawPath, path: normalisePath(rawPath), query }
}

/** Already normal, the common case: one scan. A dot after a slash may begin a dot segment. */
const NORMAL = /^(?:\/(?!\.)[A-Za-z0-9\-._~!$&'()*+,;=:@]+)+$/

/**
 * One spelling for all paths that a server may treat as the same: removes duplicate slashes, dot segments and a trailing slash,
 * and undoes needless percent-encoding. A backslash is a slash, as in the URL standard of browsers and Node. `%2F` (and `%5C`,
 * `%25`) stay data.
 */
export function normalisePath(rawPath: string): string {
  if (NORMAL.test(rawPath)) return rawPath
  const out: string[] = []
  for (const raw of rawPath.split(/[/\\]/)) {
    const segment = normaliseSegment(raw)
    if (segment === '..') out.pop()
    else if (segment !== '' && segment !== '.') out.push(segment)
  }
  return `/${out.join('/')}`
}

/** RFC 3986 `pchar`, unencoded. */
const PATH_CHAR = /^[A-Za-z0-9\-._~!$&'()*+,;=:@]$/

function normaliseSegment(segment: string): string {
  return segment.replace(/%([0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~!$&'()*+,;=:@]/g, (char, hex?: string) => {
    if (hex === undefined)
      return `%${(char.charCodeAt(0) & 0xff).toString(16).toUpperCase().padStart(2, '0')}`
    const decoded = String.fromCharCode(Number.parseInt(hex, 16))
    return PATH_CHAR.test(decoded) ? decoded : char.toUpperCase()
  })
}
