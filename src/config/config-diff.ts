import { isDeepStrictEqual } from 'node:util'
import type { RoutePolicy } from '../core/policy.ts'
import { policiesOf, readsKeys } from '../core/route.ts'
import type { Config } from './config.ts'
import {
  FILE_IDENTIFIES,
  FILE_RELOAD_RULES,
  POLICY_RELOAD_RULES,
  type ReloadRule,
  ruleOf,
} from './reload-rules.ts'
import { routeDiff } from './route-diff.ts'

export interface Change {
  /** Such as `upstream.url` or `routes[pay].ttl`. */
  readonly path: string
  /** As the configuration holds them, secrets included: not to be shown as they are. Undefined: not there. */
  readonly was: unknown
  readonly now: unknown
  readonly effect: ReloadRule
  /** {@link Config.spelled} of both. */
  readonly spelled: Readonly<Record<'was' | 'now', Config['spelled']>>
  /** Which requests it is about, where the path does not say it. */
  readonly about: string | null
}

/** What differs between two configurations, and what each difference takes (effects.ts). */
export function changesBetween(before: Config, after: Config): Change[] {
  const spelled = { was: before.spelled, now: after.spelled }
  return [
    ...fileChanges(before, after),
    ...policyChanges(
      'defaults',
      before.defaults,
      after.defaults,
      [before, after].some(({ unmatched }) => unmatched === 'protect'),
    ),
    ...routeChanges(before.routes, after.routes),
    ...movedChanges(before, after),
  ].map((found) => ({ ...found, spelled }))
}

type Found = Omit<Change, 'spelled'>

/** As the file calls what the configuration keeps under another name. */
const FILE_NAMES: Readonly<Record<string, string>> = {
  'admin.token': 'admin.tokenFile',
  'store.secret': 'store.secretFile',
  'issuer.secret': 'issuer.secretFile',
  misuseStatus: 'misuse.status',
  excludeHeaders: 'replay.excludeHeaders',
}

function fileChanges(before: Config, after: Config): Found[] {
  const rest = ({ routes: _r, defaults: _d, warnings: _w, spelled: _s, ...own }: Config) => own
  const policies = [before, after].flatMap(policiesOf).filter(readsKeys)
  return differences(rest(before), rest(after), FILE_RELOAD_RULES).map(({ path, was, now }) => {
    const identifies = FILE_IDENTIFIES[path]
    const effect =
      identifies !== undefined && policies.some(identifies)
        ? 'identifies'
        : (ruleOf(FILE_RELOAD_RULES, path) ?? 'restart')
    return { path, was, now, effect, about: null }
  })
}

/** `used`: requests are decided by it. */
function policyChanges(base: string, before: RoutePolicy, after: RoutePolicy, used = true): Found[] {
  const moot = !used || (!readsKeys(before) && !readsKeys(after))
  return differences(before, after, POLICY_RELOAD_RULES).map(({ path, was, now }) => {
    const rule = ruleOf(POLICY_RELOAD_RULES, path) ?? 'restart'
    const effect = typeof rule === 'string' ? rule : rule.when(before, after) ? rule.effect : 'live'
    // Which requests a route gets decides about those of the others, too.
    const idle = moot && effect === 'identifies' && !path.startsWith('match')
    return { path: `${base}.${path}`, was, now, effect: idle ? 'live' : effect, about: null }
  })
}

/** Routes of the same name; those that come and go are told by what becomes of their requests, too. */
function routeChanges(before: readonly RoutePolicy[], after: readonly RoutePolicy[]): Found[] {
  const find = (routes: readonly RoutePolicy[], name: string) => routes.find((route) => route.name === name)
  const whole = (path: string, was: unknown, now: unknown): Found => ({
    path,
    was,
    now,
    effect: 'live',
    about: null,
  })
  const gone = before.filter(({ name }) => find(after, name) === undefined)
  const kept = before.filter((route) => !gone.includes(route)).map(({ name }) => name)
  const order = after.map(({ name }) => name).filter((name) => kept.includes(name))
  return [
    ...gone.map(({ name, match }) => whole(`routes[${name}]`, match, undefined)),
    ...after.flatMap((route) => {
      const base = `routes[${route.name}]`
      const same = find(before, route.name)
      return same === undefined ? [whole(base, undefined, route.match)] : policyChanges(base, same, route)
    }),
    ...(isDeepStrictEqual(kept, order) ? [] : [whole('routes', kept, order)]),
  ]
}

/**
 * Requests that another route, or `defaults`, decides about than before: they must find the records that they found before,
 * and be protected where they were.
 */
function movedChanges(before: Config, after: Config): Found[] {
  return routeDiff(before, after).flatMap(({ from, to, method, path }) => {
    const was = from !== null && readsKeys(from)
    const now = to !== null && readsKeys(to)
    const about = `${method} ${path}, of ${from === null ? 'no route' : `route ${from.name}`} before`
    const base = baseOf(to ?? from)
    if (!was && !now) return []
    if (!was || !now || from === null || to === null) {
      const said = (yes: boolean): string => (yes ? 'protected' : 'not protected')
      return [{ path: base, was: said(was), now: said(now), effect: 'identifies', about }]
    }
    return policyChanges(base, from, to)
      .filter(
        ({ effect, path: changed }) => effect === 'identifies' && !ROUTING.has(changed.slice(base.length)),
      )
      .map((change): Found => ({ ...change, about }))
  })
}

/** By which a route gets its requests. These two got the same ones. */
const ROUTING: ReadonlySet<string> = new Set(['.match.methods', '.match.path'])

function baseOf(policy: RoutePolicy | null): string {
  return policy === null || policy.name === 'default' ? 'defaults' : `routes[${policy.name}]`
}

interface Difference {
  readonly path: string
  readonly was: unknown
  readonly now: unknown
}

/** Down to the properties that the table names; what it does not name, to the values. */
function differences(before: object, after: object, table: Readonly<Record<string, unknown>>): Difference[] {
  const found: Difference[] = []
  const walk = (was: unknown, now: unknown, inner: string): void => {
    if (isDeepStrictEqual(was, now)) return
    const path = FILE_NAMES[inner] ?? inner
    const deeper = (isMapping(was) || was == null) && (isMapping(now) || now == null)
    if (!deeper || (Object.hasOwn(table, path) && !COARSE.has(path))) {
      found.push({ path, was: was ?? undefined, now: now ?? undefined })
      return
    }
    const names = new Set([...Object.keys(was ?? {}), ...Object.keys(now ?? {})])
    for (const name of names)
      walk(
        (was as Record<string, unknown> | null)?.[name],
        (now as Record<string, unknown> | null)?.[name],
        inner === '' ? name : `${inner}.${name}`,
      )
  }
  walk(before, after, '')
  return found
}

/** One rule for all below, told one by one. */
const COARSE: ReadonlySet<string> = new Set([
  'upstream',
  'issuer',
  'drain',
  'limits',
  'match',
  'fingerprint',
  'inFlight',
])

function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype
}
