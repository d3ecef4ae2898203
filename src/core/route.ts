import type { RoutePolicy } from './policy.ts'
import type { Target } from './target.ts'

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

  constructor(routes: readonly RoutePolicy[], normalise: (path: string) => string) {
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
        segments: policy.match.exact ? segments : normalSegments(segments, normalise),
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

/** The policy that a record's route is called by; null: there is no such route (any more). */
export function policyNamed(
  { routes, defaults }: { readonly routes: readonly RoutePolicy[]; readonly defaults: RoutePolicy },
  name: string,
): RoutePolicy | null {
  return name === defaults.name ? defaults : (routes.find((route) => route.name === name) ?? null)
}

function normalSegments(
  segments: readonly (string | null)[],
  normalise: (path: string) => string,
): (string | null)[] {
  return segments.filter((s) => s !== '').map((s) => (s === null ? null : normalise(`/${s}`).slice(1)))
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
