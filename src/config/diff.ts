import { isDeepStrictEqual } from 'node:util'
import type { RouteMatch, RoutePolicy } from '../core/policy.ts'
import { asksBy, asksByKey } from '../core/reconcile/answer.ts'
import { policiesOf, policyNamed, type Routes, readsKeys, routeCovers, routesOverlap } from '../core/route.ts'
import type { Config } from './config.ts'
import { FILE, ROUTE } from './properties.ts'
import { isMapping, memberOf, type PropertyRow, type Reload, type ReloadRule } from './rows.ts'
import { fileForm, policyForm, valueText } from './written.ts'

export interface ConfigChange {
  /** Such as `upstream.url` or `routes[pay].ttl`. */
  readonly path: string
  /** Raw values, including secrets: print them with {@link changeLine} only. Undefined: absent. */
  readonly was: unknown
  readonly now: unknown
  readonly effect: ReloadRule
  /** The requests affected, unless the path names them. */
  readonly about: string | null
}

/** A change in one line: path, old value, new value, as a file writes them. */
export function changeLine({ path, was, now, about }: ConfigChange): string {
  const [before, after] = [valueText(was, path), valueText(now, path)]
  const same = before === after ? ' (another value)' : ''
  return `${path}: ${before} → ${after}${same}${about === null ? '' : ` (${about})`}`
}

/** The differences between two configurations, each with its reload rule. */
export function changesBetween(before: Config, after: Config): ConfigChange[] {
  const isUsed = [before, after].some(({ unmatched }) => unmatched === 'protect')
  return [
    ...fileChanges(before, after),
    ...policyChanges('defaults', before.defaults, after.defaults, isUsed),
    ...routeChanges(before.routes, after.routes),
    ...movedChanges(before, after),
  ]
}

function fileChanges(before: Config, after: Config): ConfigChange[] {
  const policies = [before, after].flatMap(policiesOf).filter(readsKeys)
  const [was, now] = [before, after].map(fileForm).map(({ routes: _r, defaults: _d, ...own }) => own)
  return differences(was, now, FILE).map(({ rule, ...difference }) => {
    const effectOf = (): ReloadRule => {
      if (typeof rule === 'string' || rule.effect !== 'restart') return plainly(rule)
      if ('when' in rule) return rule.when(difference.was, difference.now) ? 'restart' : 'live'
      return policies.some(rule.identifiesFor) ? 'identifies' : 'restart'
    }
    return { ...difference, effect: effectOf(), about: null }
  })
}

/** `used`: the policy applies to some requests. */
function policyChanges(base: string, before: RoutePolicy, after: RoutePolicy, used = true): ConfigChange[] {
  const moot = !used || (!readsKeys(before) && !readsKeys(after))
  const changed = differences(policyForm(before), policyForm(after), { group: ROUTE })
  const found = changed.map(({ rule, path, was, now }): ConfigChange => {
    const matters = typeof rule === 'string' || rule.effect === 'restart' || rule.when(before, after)
    // A route's match also decides which requests other routes get.
    const idle = !matters || (moot && plainly(rule) === 'identifies' && !path.startsWith('match'))
    return { path: `${base}.${path}`, was, now, effect: idle ? 'live' : plainly(rule), about: null }
  })
  const [was, now] = [before, after].map(({ scope }) => scope.callerIsDefault)
  // Not a property: whether `scope.caller` is written decides about requests without a caller.
  return was === now ? found : [...found, live(`${base}.scope.callerIsDefault`, was, now)]
}

function live(path: string, was: unknown, now: unknown): ConfigChange {
  return { path, was, now, effect: 'live', about: null }
}

function plainly(rule: Reload): ReloadRule {
  return typeof rule === 'string' ? rule : rule.effect
}

/** Routes are compared by name. For the requests of added and removed ones, see {@link movedChanges}. */
function routeChanges(before: readonly RoutePolicy[], after: readonly RoutePolicy[]): ConfigChange[] {
  const find = (routes: readonly RoutePolicy[], name: string) => routes.find((route) => route.name === name)
  const gone = before.filter(({ name }) => find(after, name) === undefined)
  const kept = before.filter((route) => !gone.includes(route)).map(({ name }) => name)
  const order = after.map(({ name }) => name).filter((name) => kept.includes(name))
  return [
    ...gone.map(({ name, match }) => live(`routes[${name}]`, match, undefined)),
    ...after.flatMap((route) => {
      const base = `routes[${route.name}]`
      const same = find(before, route.name)
      return same === undefined ? live(base, undefined, route.match) : policyChanges(base, same, route)
    }),
    ...(isDeepStrictEqual(kept, order) ? [] : [live('routes', kept, order)]),
  ]
}

/** Requests to which a different policy applies now: they must still find their records, and stay protected. */
function movedChanges(before: Config, after: Config): ConfigChange[] {
  return routeDiff(before, after).flatMap(({ from, to, method, path }) => {
    const was = from !== null && readsKeys(from)
    const now = to !== null && readsKeys(to)
    const about = `${method} ${path}, previously of ${from === null ? 'no route' : `route ${from.name}`}`
    const policy = to ?? from
    const base = policy === null || policy.name === 'default' ? 'defaults' : `routes[${policy.name}]`
    if (!was && !now) return []
    if (!was || !now || from === null || to === null) {
      const word = (yes: boolean): string => (yes ? 'protected' : 'not protected')
      return [{ path: base, was: word(was), now: word(now), effect: 'identifies', about }]
    }
    // Two spellings of the same match.
    const routing = [`${base}.match.methods`, `${base}.match.path`]
    return policyChanges(base, from, to)
      .filter((change) => change.effect === 'identifies' && !routing.includes(change.path))
      .map((change): ConfigChange => ({ ...change, about }))
  })
}

interface Difference {
  readonly path: string
  readonly was: unknown
  readonly now: unknown
  readonly rule: Reload
}

/** Compares down to single properties, or groups that are compared as one value. */
function differences(was: unknown, now: unknown, row: PropertyRow | undefined, path = ''): Difference[] {
  if (isDeepStrictEqual(was, now)) return []
  const sides = [was, now].map((side) => (isMapping(side) ? side : null))
  const isGroup = sides.every((side, i) => side !== null || [was, now][i] == null)
  if (!isGroup || row?.whole === true || (row !== undefined && row.group === undefined))
    return [{ path, was: was ?? undefined, now: now ?? undefined, rule: ruleOf(row) }]
  const names = new Set(sides.flatMap((side) => Object.keys(side ?? {})))
  return [...names].flatMap((name) =>
    differences(
      sides[0]?.[name],
      sides[1]?.[name],
      memberOf(row, name),
      path === '' ? name : `${path}.${name}`,
    ),
  )
}

/** A group compared as one has the rule of its first property; anything without a row requires a restart. */
export function ruleOf(row: PropertyRow | undefined): Reload {
  return row?.reload ?? (row?.group === undefined ? 'restart' : ruleOf(Object.values(row.group)[0]))
}

/** Requests that move from one policy to another; null: unprotected. */
export interface RouteChange {
  readonly from: RoutePolicy | null
  readonly to: RoutePolicy | null
  readonly method: string
  /** The narrower pattern of the two. */
  readonly path: string
}

/**
 * The requests that move between routes, by method. Errs on the side of reporting: an earlier route may or may not match the
 * whole overlap of two patterns.
 */
export function routeDiff(before: Routes, after: Routes): RouteChange[] {
  const written = [...before.routes, ...after.routes].flatMap(({ match }) => match.methods)
  const found = new Map<string, RouteChange>()
  for (const method of new Set(['POST', 'PATCH', ...written])) {
    const old = deciders(before, method)
    const next = deciders(after, method)
    for (const [i, from] of old.entries())
      for (const [j, to] of next.entries()) {
        if (from.policy?.name === to.policy?.name || !routesOverlap(from.match, to.match)) continue
        // An earlier route matches all of them.
        if (next.slice(0, j).some((earlier) => takesAll(earlier, from))) continue
        if (old.slice(0, i).some((earlier) => takesAll(earlier, to))) continue
        const pair = `${from.policy?.name} ${to.policy?.name}`
        const { path } = from.match.path === EVERYTHING.path ? to.match : from.match
        if (!found.has(pair)) found.set(pair, { from: from.policy, to: to.policy, method, path })
      }
  }
  return [...found.values()]
}

interface Decider {
  readonly policy: RoutePolicy | null
  readonly match: RouteMatch
}

const EVERYTHING: RouteMatch = {
  methods: [],
  path: '/*',
  exact: false,
  case: 'sensitive',
  parameters: 'keep',
}

/** In order: the first match decides. */
function deciders(routes: Routes, method: string): Decider[] {
  const deciding: Decider[] = policiesOf(routes)
    .filter(({ match }) => match.methods.includes(method))
    .map((policy) => ({ policy, match: policy.match }))
  const isComplete = deciding.at(-1)?.policy === routes.defaults
  return isComplete ? deciding : [...deciding, { policy: null, match: EVERYTHING }]
}

/** Normal and exact paths cannot be compared: an exact one may contain dot segments. */
function takesAll({ match: earlier }: Decider, { match: later }: Decider): boolean {
  return earlier.exact === later.exact && routeCovers(earlier, later)
}

/**
 * A sentence for each route whose unknown records are no longer asked about, or no longer freed by "not found". Records refer to
 * their route by name.
 */
export function orphanedBy(before: Routes, after: Routes): string[] {
  return policiesOf(before).flatMap((route) => {
    const why = whyOrphaned(route, after)
    return why === null
      ? []
      : [
          `Route \`${route.name}\`: ${why}, so its unknown records stay unknown until an operator resolves them.`,
        ]
  })
}

function whyOrphaned(route: RoutePolicy, after: Routes): string | null {
  if (route.mode !== 'enforce' || route.reconcile === null) return null
  const next = policyNamed(after, route.name)
  if (next === null) return 'no route has its name'
  if (next.mode !== 'enforce') return `mode ${next.mode}, which sends no status queries`
  if (next.reconcile === null) return 'it no longer has reconcile'
  if (asksByKey(next.reconcile) && !asksByKey(route.reconcile))
    return 'reconcile asks by {key}, which was not stored before'
  const asksByRecord = next.reconcile.notFound !== null && asksBy(next.reconcile).includes('record')
  return asksByRecord && !route.key.forwardFence
    ? 'reconcile asks by {record}, which was not sent to the upstream before, and "not found" proves nothing then'
    : null
}
