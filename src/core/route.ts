import type { RoutePolicy } from './policy.ts'

/** A route's path, compiled. Segments are compared exactly; `null` stands for `:name`. */
interface Pattern {
  readonly policy: RoutePolicy
  readonly methods: ReadonlySet<string>
  readonly segments: readonly (string | null)[]
  readonly rest: boolean
}

/** Routes in the order of the configuration: the first match wins (contract §10). */
export class Router {
  readonly #patterns: readonly Pattern[]

  constructor(routes: readonly RoutePolicy[]) {
    this.#patterns = routes.map((policy) => {
      const rest = policy.match.path.endsWith('/*')
      const fixed = rest ? policy.match.path.slice(0, -2) : policy.match.path
      const segments = fixed
        .split('/')
        .slice(1)
        .map((segment) => (/^:./.test(segment) ? null : segment))
      return {
        policy,
        methods: new Set(policy.match.methods),
        rest,
        segments: policy.match.exact ? segments : normalSegments(segments),
      }
    })
  }

  match(method: string, target: Target): RoutePolicy | null {
    for (const pattern of this.#patterns) {
      if (!pattern.methods.has(method)) continue
      if (matches(pattern, pattern.policy.match.exact ? target.rawPath : target.path)) return pattern.policy
    }
    return null
  }
}

/** What of a configuration says which policy decides about a request. */
export interface Routes {
  readonly routes: readonly RoutePolicy[]
  /** Named `default`; it matches every POST and PATCH. */
  readonly defaults: RoutePolicy
  readonly unmatched: 'protect' | 'pass' | 'reject'
}

/** The policies that decide about requests, in the order in which they are tried. */
export function policiesOf({ routes, defaults, unmatched }: Routes): readonly RoutePolicy[] {
  return unmatched === 'protect' ? [...routes, defaults] : routes
}

/** Whether keys are read at all: to protect, or in shadow mode to observe. */
export function readsKeys({ mode, key }: RoutePolicy): boolean {
  return mode !== 'off' && key.presence !== 'ignored'
}

export function isProtected(policy: RoutePolicy): boolean {
  return readsKeys(policy) && policy.mode === 'enforce'
}

/** The policy that a record's route is called by; null: there is no such route (any more). */
export function policyNamed(
  { routes, defaults }: Pick<Routes, 'routes' | 'defaults'>,
  name: string,
): RoutePolicy | null {
  return name === defaults.name ? defaults : (routes.find((route) => route.name === name) ?? null)
}

function normalSegments(segments: readonly (string | null)[]): (string | null)[] {
  return segments.filter((s) => s !== '').map((s) => (s === null ? null : normalisePath(`/${s}`).slice(1)))
}

function matches(pattern: Pattern, path: string): boolean {
  const { segments, rest } = pattern
  let at = 0
  for (const segment of segments) {
    if (path.charCodeAt(at) !== 0x2f) return false
    const next = path.indexOf('/', at + 1)
    const end = next < 0 ? path.length : next
    if (segment === null ? end === at + 1 : path.slice(at + 1, end) !== segment) return false
    at = end
  }
  // `/hooks/*` needs the slash, which a normalised path keeps only where something follows.
  if (rest) return path.charCodeAt(at) === 0x2f
  return at === path.length || (segments.length === 0 && path === '/')
}

/** A request target (RFC 9112 §3.2) taken apart. */
export interface Target {
  /** What the upstream gets: as sent, in origin form. */
  readonly origin: string
  /** Path as sent, without the query. */
  readonly rawPath: string
  /** Normalised path: what routes match and what identifies the record (contract §10). */
  readonly path: string
  /** Without the `?`; empty where there is none. */
  readonly query: string
}

/** Where `wellKnown: true` tells clients how keys are treated (RFC 8615). */
export const WELL_KNOWN = '/.well-known/idempotency'

/**
 * Takes a target apart. `null`: neither origin form nor an absolute http(s) URI, or one with a fragment, which no target
 * has and on whose end servers disagree.
 */
export function parseTarget(target: string): Target | null {
  if (target.includes('#')) return null
  let origin = target
  if (!origin.startsWith('/')) {
    // Absolute form is for proxies; what follows the authority is matched and forwarded, or it would dodge every route.
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

/** Already normal: the common case costs one scan. A dot after a slash may begin a dot segment. */
const NORMAL = /^(?:\/(?!\.)[A-Za-z0-9\-._~!$&'()*+,;=:@]+)+$/

/**
 * One spelling for every path that a server may take for the same: duplicate slashes, dot segments and a trailing slash
 * go, needless percent-encoding is undone. A backslash is a slash, as the URL standard of browsers and Node reads it. `%2F`
 * (and `%5C`, `%25`) stay data.
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

function normaliseSegment(segment: string): string {
  let out = ''
  for (let i = 0; i < segment.length; i++) {
    const char = segment[i] as string
    if (char !== '%') {
      out += isPathChar(char) ? char : percent(char)
      continue
    }
    const hex = segment.slice(i + 1, i + 3)
    if (!/^[0-9A-Fa-f]{2}$/.test(hex)) {
      out += '%25'
      continue
    }
    const decoded = String.fromCharCode(Number.parseInt(hex, 16))
    out += isPathChar(decoded) ? decoded : `%${hex.toUpperCase()}`
    i += 2
  }
  return out
}

/** RFC 3986 `pchar`, unencoded. */
function isPathChar(char: string): boolean {
  return /^[A-Za-z0-9\-._~!$&'()*+,;=:@]$/.test(char)
}

function percent(char: string): string {
  return `%${(char.charCodeAt(0) & 0xff).toString(16).toUpperCase().padStart(2, '0')}`
}

/** The segments of a record's path that its route calls `:name`, by name; percent-encoded as in the record. */
export type PathParameters = ReadonlyMap<string, string>

export const NO_PARAMETERS: PathParameters = new Map()

export function pathParameters(
  match: { readonly path: string; readonly exact: boolean },
  path: string,
): PathParameters {
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
