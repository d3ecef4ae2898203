import { hash, scryptSync } from 'node:crypto'
import type { RouteMatch, RoutePolicy } from './policy.ts'
import {
  covers,
  LOOSE,
  overlaps,
  type PathPattern,
  patternOf,
  policiesOf,
  type Routes,
  readsKeys,
  routeCovers,
} from './route.ts'

/* What a configuration says about which record a request finds: replicas that differ in it must not claim side by side (contract §15). */

/** The part of a configuration that identifies records. */
export interface Identifying extends Routes {
  /** Whose `X-Forwarded-Host` counts, if the host is part of a scope. */
  readonly trustProxy: readonly string[]
  readonly store: { readonly secret: Buffer | null }
  readonly issuer: { readonly secret: Buffer } | null
}

export interface Identification {
  /** 32 bytes. Equal for configurations under which every request finds the same record. */
  readonly digest: Buffer
  /** Short digests by property, to show what differs. */
  readonly parts: IdentificationParts
}

export type IdentificationParts = Readonly<Record<string, readonly string[]>>

/** Changes with the meaning of a configuration: the normal form of a path, or what a record id is made of. */
const FORMAT = 'identification/1'

/**
 * Secrets are stretched (scrypt, Node's default cost), so that a reader of the store cannot guess them faster here than from record ids.
 * Keys that verify tokens are not part of it: rotating them changes no caller.
 */
export function identificationOf(config: Identifying): Identification {
  const { routes, defaults, unmatched, trustProxy, store, issuer } = config
  const isIssued = policiesOf(config).some(({ key }) => key.issuedOnly)
  const secrets = {
    'store.secretFile': stretched(store.secret),
    'issuer.secretFile': stretched(isIssued && issuer !== null ? issuer.secret : null),
  }
  const digest = hash('sha256', JSON.stringify([FORMAT, rulesOf(config), secrets]), 'buffer')
  const each = [
    ...routes.map((route) => [`routes[${route.name}]`, route] as const),
    ['defaults', defaults] as const,
  ]
  return {
    digest,
    parts: {
      ...Object.fromEntries(
        each.map(([name, policy]) => [
          name,
          [matchOf(policy), keyOf(policy), scopeOf(policy, trustProxy)].map((part) =>
            short(JSON.stringify(part)),
          ),
        ]),
      ),
      unmatched: [unmatched],
      ...Object.fromEntries(Object.entries(secrets).map(([name, secret]) => [name, [short(String(secret))]])),
    },
  }
}

/** By position in {@link IdentificationParts}. */
const PARTS = ['.match', '.key', '.scope']

/** What differs, by its path in the file, such as `routes[pay].scope`. */
export function differencesBetween(own: IdentificationParts, other: IdentificationParts): string[] {
  const names = new Set([...Object.keys(own), ...Object.keys(other)])
  const found = [...names].flatMap((name) => {
    const [a, b] = [own[name], other[name]]
    if (a === undefined || b === undefined) return [name]
    const isOne = a.length === 1
    return a.flatMap((part, n) => (part === b[n] ? [] : [`${name}${isOne ? '' : PARTS[n]}`]))
  })
  return found.length > 0 ? found : ['the order of routes']
}

/** Which keys such differences concern. */
export function keysUnder(differences: readonly string[]): string {
  const routes = differences.map(
    (one) => /^routes\[(.*)\]/.exec(one)?.[1] ?? (/^defaults\b/.test(one) ? 'default' : null),
  )
  return routes.includes(null) ? 'all keys' : `keys of ${[...new Set(routes)].join(', ')}`
}

function stretched(secret: Buffer | null): string | null {
  return secret && scryptSync(secret, FORMAT, 32).toString('base64url')
}

function short(text: string): string {
  return hash('sha256', text, 'base64url').slice(0, 6)
}

function matchOf(policy: RoutePolicy): unknown {
  const { match } = policy
  return [readsKeys(policy), match.methods.toSorted(), patternOf(match), foldingOf(match)]
}

function keyOf({ key: { from, derive } }: RoutePolicy): unknown {
  const sources = from.map((source) =>
    [source.kind, source.kind === 'json' ? source.pointer : source.name].join(':'),
  )
  return [sources.toSorted(), derive && [derive.json, derive.form, derive.headers, derive.bucket]]
}

function scopeOf({ name, scope }: RoutePolicy, trustProxy: readonly string[]): unknown {
  const { caller, path, host, anonymous, jwt } = scope
  return [
    caller.map(({ kind, name: of }) => `${kind}:${of}`),
    caller.length > 0 && anonymous,
    jwt && [jwt.issuer, jwt.audience.toSorted()],
    path === 'route' ? [path, name] : path,
    host && trustProxy,
  ]
}

/** The requests that match a route and none before it. */
interface Rule {
  readonly match: RouteMatch
  readonly pattern: PathPattern
  /** With every spelling that some route treats as equal. */
  readonly loose: PathPattern
  /** How they are identified. */
  readonly as: string
  /** The whole rule as text, for comparison. */
  readonly text: string
}

/** Requests that get no record. */
const UNPROTECTED = ''

/** By method, in an order that does not depend on how the file writes them. Methods without rules are left out. */
function rulesOf(config: Identifying): readonly unknown[] {
  const policies = policiesOf(config)
  const methods = new Set(policies.flatMap(({ match }) => match.methods))
  const other = config.unmatched === 'reject' ? 'refused' : UNPROTECTED
  const all = policies.map((policy) => ruleOf(policy, config.trustProxy))
  return [
    other,
    ...[...methods].toSorted().flatMap((method) => {
      const rules = all.filter(({ match }) => match.methods.includes(method))
      const needed = inNormalOrder(withoutNeedless(withoutUnreachable(rules), other))
      return needed.length === 0 ? [] : [[method, needed.map(({ text }) => text)]]
    }),
  ]
}

function ruleOf(policy: RoutePolicy, trustProxy: readonly string[]): Rule {
  const { match, scope } = policy
  const path = scope.path === 'exact' && foldingOf(match)
  const as = readsKeys(policy)
    ? JSON.stringify([keyOf(policy), scopeOf(policy, trustProxy), path])
    : UNPROTECTED
  const pattern = patternOf(match)
  const loose = patternOf({ ...match, ...LOOSE })
  return { match, pattern, loose, as, text: JSON.stringify([pattern, foldingOf(match), as]) }
}

function foldingOf({ exact, case: cases, parameters }: RouteMatch): unknown {
  return exact ? 'exact' : [cases, parameters]
}

/** Errs on the side of no. An exact path may have dot segments: it is not compared with others. */
function takesAll(wide: Rule, narrow: Rule): boolean {
  const [a, b] = [wide.match, narrow.match]
  if (a.exact !== b.exact) return false
  const isAlike = a.exact || (a.case === b.case && a.parameters === b.parameters)
  return isAlike ? covers(wide.pattern, narrow.pattern) : routeCovers(a, b)
}

/** Whether some request matches both and is identified differently. Errs on the side of yes. */
function differ(a: Rule, b: Rule): boolean {
  return a.as !== b.as && (a.match.exact !== b.match.exact || overlaps(a.loose, b.loose))
}

function withoutUnreachable(rules: readonly Rule[]): Rule[] {
  return rules.filter((rule, n) => !rules.slice(0, n).some((earlier) => takesAll(earlier, rule)))
}

/**
 * The rules without redundant ones: those whose requests would be identified alike without them, as for a route that only changes limits.
 */
function withoutNeedless(rules: readonly Rule[], other: string): Rule[] {
  const needed: Rule[] = []
  for (const rule of rules.toReversed()) if (!isNeedless(rule, needed, other)) needed.unshift(rule)
  return needed
}

function isNeedless(rule: Rule, later: readonly Rule[], other: string): boolean {
  for (const next of later) {
    if (differ(rule, next)) return false
    if (next.as === rule.as && takesAll(next, rule)) return true
  }
  return rule.as === other
}

/** Puts rules whose order makes no difference in a fixed order: of the rules that may be next, the one with the least text comes next. */
function inNormalOrder(rules: readonly Rule[]): Rule[] {
  const left = new Set(rules.toSorted((a, b) => (a.text < b.text ? -1 : 1)))
  const before = new Map(
    rules.map((rule, n) => [rule, rules.slice(0, n).filter((earlier) => differ(earlier, rule))]),
  )
  const ordered: Rule[] = []
  while (left.size > 0) {
    // At least the first remaining rule of the file has none before it.
    const next = [...left].find((rule) => !before.get(rule)?.some((earlier) => left.has(earlier))) as Rule
    left.delete(next)
    ordered.push(next)
  }
  return ordered
}
