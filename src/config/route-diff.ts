import type { RouteMatch, RoutePolicy } from '../core/policy.ts'
import { overlaps, pathPattern, policiesOf, type Routes, routeCovers } from '../core/route.ts'

/** Requests that one policy decided about, and another one will. Null: nothing does. */
export interface RouteChange {
  readonly from: RoutePolicy | null
  readonly to: RoutePolicy | null
  readonly method: string
  /** Pattern of the narrower one of the two. */
  readonly path: string
}

/**
 * Which requests change hands between two configurations, method by method. Where that is not certain they are said to: two
 * patterns may overlap, and routes before them may or may not take all of the overlap.
 */
export function routeDiff(before: Routes, after: Routes): RouteChange[] {
  const methods = new Set(['POST', 'PATCH', ...[...before.routes, ...after.routes].flatMap(methodsOf)])
  const found: RouteChange[] = []
  const told = new Set<string>()
  for (const method of methods) {
    const old = deciders(before, method)
    const next = deciders(after, method)
    for (const [i, from] of old.entries())
      for (const [j, to] of next.entries()) {
        if (from.policy?.name === to.policy?.name) continue
        if (!mayOverlap(from.match, to.match)) continue
        // What a route before it takes never comes here.
        if (next.slice(0, j).some((earlier) => takesAll(earlier, from))) continue
        if (old.slice(0, i).some((earlier) => takesAll(earlier, to))) continue
        const pair = `${from.policy?.name} ${to.policy?.name}`
        if (told.has(pair)) continue
        told.add(pair)
        const path = from.match.path === EVERYTHING.path ? to.match.path : from.match.path
        found.push({ from: from.policy, to: to.policy, method, path })
      }
  }
  return found
}

interface Decider {
  readonly policy: RoutePolicy | null
  readonly match: RouteMatch
}

const EVERYTHING: RouteMatch = { methods: [], path: '/*', exact: false }

/** In their order: the first that matches decides. */
function deciders(routes: Routes, method: string): Decider[] {
  const deciding: Decider[] = policiesOf(routes)
    .filter((policy) => methodsOf(policy).includes(method))
    .map((policy) => ({ policy, match: policy.match }))
  const isComplete = deciding.at(-1)?.policy === routes.defaults
  return isComplete ? deciding : [...deciding, { policy: null, match: EVERYTHING }]
}

function methodsOf({ match }: RoutePolicy): readonly string[] {
  return match.methods
}

/** Between normal and exact paths nothing is certain: an exact one may hold dot segments. */
function takesAll(earlier: Decider, later: Decider): boolean {
  return earlier.match.exact === later.match.exact && routeCovers(earlier.match, later.match)
}

function mayOverlap(a: RouteMatch, b: RouteMatch): boolean {
  return a.exact !== b.exact || overlaps(pathPattern(a.path, a.exact), pathPattern(b.path, b.exact))
}
