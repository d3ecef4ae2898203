import type { CallerSource, ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { isProtected, readsKeys } from '../core/route.ts'
import type { PolicyConfig } from './properties.ts'
import { asksByKeyAlone, queryByKey } from './reconcile.ts'
import { formatDuration } from './units.ts'
import { statusText } from './written.ts'

export interface Effective {
  readonly policy: RoutePolicy
  /** The explicit values of the route and `defaults`. */
  readonly written: PolicyConfig
}

/** Guarantees that a protected route waives (contract, promise). */
// biome-ignore format: a table
const WAIVERS: readonly [waives: (policy: RoutePolicy, written: PolicyConfig) => boolean, says: string][] = [
  [({ key }) => key.derive !== null && key.derive.bucket !== null,
    'key.derive with a bucket, so a retry that falls into the next bucket executes again.'],
  [({ profile }) => profile === 'lenient',
    'profile lenient, so a retry may execute again after a 5xx, an expired lease or an outage of the store.'],
  [(_, written) => written.onLeaseExpired === 'retry',
    'onLeaseExpired retry, so a retry executes again once the first attempt has fallen silent, even if it executed.'],
  [({ onResponseLost }) => onResponseLost === 'retry',
    'onResponseLost retry, so a retry executes again once the connection to the upstream broke or upstream.timeout passed, even if it executed.'],
  [(_, written) => written.onStoreUnavailable === 'bypass',
    'onStoreUnavailable bypass, so nothing is protected while the store is down.'],
  [({ fingerprint }) => fingerprint.body === 'raw',
    'fingerprint.body raw, so a retry of a multipart form, whose boundary differs each time, is refused with 422; auto compares its parts.'],
  [({ reconcile }) => reconcile?.identity.length === 0,
    'reconcile with identity none, so any response of the upstream counts as the outcome of the request.'],
  [({ reconcile, scope }) => reconcile !== null && scope.caller.length > 0 && asksByKeyAlone(reconcile),
    "reconcile asks by the key alone, which two callers may both have used, so one may get the outcome of the other's request unless the upstream distinguishes them; {record} does."],
  [({ reconcile, match }) => reconcile !== null && match.methods.length > 1 && asksByKeyAlone(reconcile),
    'reconcile asks by a key that requests of several methods (match.methods) may share, so one may be answered with the outcome of another; {record} distinguishes them, and so does a route for each method.'],
]

/** One sentence for every guarantee that the configuration waives, with the routes that do. */
export function warningsOf(
  effective: readonly Effective[],
  storeUrl: string,
  upstreamTimeout: Millis,
): string[] {
  const guarded = effective.filter(({ policy }) => isProtected(policy))
  // biome-ignore format: a table
  const waived: readonly (readonly [which: readonly Effective[], says: string])[] = [
    [effective.filter(({ policy }) => policy.mode === 'off'),
      'mode off, so a retry executes again.'],
    [effective.filter(({ policy }) => policy.mode === 'shadow' && readsKeys(policy)),
      'mode shadow, so a retry executes again.'],
    [effective.filter(({ policy }) => readsKeys(policy) && isForVisitors(policy)),
      'keys come from forms or links, so from browsers, whose cookies identify nobody while scope.caller is not set: such requests are refused (400). Set scope.caller: "cookie:<name>", or none if all visitors are one.'],
    ...[...Map.groupBy(effective.filter(({ policy }) => readsKeys(policy)), ({ policy }) => madeAnew(policy).join(', '))].map(([names, which]) => [
      names === '' ? [] : which, `${names}: such headers are new in each request, so a retry is not recognised: it executes again, or gets 422. Name what stays the same.`] as const),
    ...WAIVERS.map(([waives, says]) =>
      [guarded.filter(({ policy, written }) => waives(policy, written)), says] as const),
    ...sameQueries(guarded).map((which) => [which,
      "reconcile sends the same status query for equal keys, so a request of one route may be answered with the outcome of another's; {record} distinguishes them, and so does a different status query."] as const),
    [guarded.filter(({ policy: { reconcile } }) => reconcile?.notFound != null && reconcile.after < upstreamTimeout),
      `reconcile.after is less than upstream.timeout (${formatDuration(upstreamTimeout)}), so "not found" counts while the upstream may still be working on the request, and a retry then executes again.`],
    ...[...Map.groupBy(guarded, ({ policy }) => releasedBy(policy).join(', '))].map(([released, which]) => [
      released === '' ? [] : which, `outcomes release ${released}, so a retry executes again after such an answer.`] as const),
  ]
  return [
    ...waived
      .filter(([which]) => which.length > 0)
      .map(([which, says]) => {
        const names = which.map(({ policy }) => `\`${policy.name}\``).join(', ')
        return `${which.length === 1 ? 'Route' : 'Routes'} ${names}: ${says}`
      }),
    ...sharingWarning(guarded.map(({ policy }) => policy)),
    ...(storeUrl === 'memory:'
      ? ['The store is memory:, so every record is lost when the process ends, and no other process sees it.']
      : []),
  ]
}

/** Identifies a request, an attempt or a signature, not a caller or what it wants. */
const ANEW =
  /^(?:b3|date|dpop|signature(?:-input)?|traceparent|tracestate|x-amz-date|x-amzn-trace-id|x-b3-.*|x-cloud-trace-context|(?:x-)?(?:correlation|request|trace)-id|(?:x-)?(?:nonce|timestamp))$/

/** The settings that distinguish requests by such a header. */
function madeAnew({ scope, fingerprint, key }: RoutePolicy): string[] {
  const named: readonly (readonly [property: string, headers: readonly string[]])[] = [
    ['scope.caller', scope.caller.flatMap(({ kind, name }) => (kind === 'header' ? [name] : []))],
    ['fingerprint.headers', fingerprint.headers ?? []],
    ['key.derive.headers', key.derive?.headers ?? []],
  ]
  return named.flatMap(([property, headers]) =>
    headers.filter((name) => ANEW.test(name)).map((name) => `${property} ${name}`),
  )
}

/** Whether browsers send the key, which carry cookies (contract §15), while nothing defines what identifies a visitor. */
function isForVisitors({ key, scope }: RoutePolicy): boolean {
  return scope.callerIsDefault && key.from.some(({ kind }) => kind === 'form' || kind === 'query')
}

/** The policy of requests that match no route. */
export const UNMATCHED = 'default'

/** Groups of routes whose status queries are the same. */
function sameQueries(effective: readonly Effective[]): Effective[][] {
  const querying = effective.filter(
    ({ policy }) =>
      policy.name !== UNMATCHED && policy.reconcile !== null && queryByKey(policy.reconcile) !== null,
  )
  const groups = Map.groupBy(querying, ({ policy }) => queryByKey(policy.reconcile as ReconcilePolicy))
  return [...groups.values()].filter((group) => group.length > 1)
}

/** One warning for all routes: nearly every configuration has it. */
function sharingWarning(guarded: readonly RoutePolicy[]): string[] {
  const sharing = guarded.filter(({ scope }) => scope.anonymous === 'share' && scope.caller.length > 0)
  if (sharing.length === 0) return []
  const names = new Set(sharing.flatMap(({ scope }) => scope.caller.map(callerName)))
  const without = `without ${[...names].join(' or ')}`
  const shares = "share one key space, so one client may receive another's response"
  const byDefault = sharing.some(({ scope }) => scope.callerIsDefault)
  const cure = byDefault ? 'scope.caller, or scope.anonymous: reject' : 'scope.anonymous: reject'
  if (sharing.length === guarded.length) return [`Requests ${without} ${shares}. Set ${cure}.`]
  if (sharing.every(({ name }) => name === UNMATCHED)) {
    const shared = byDefault ? '`defaults.scope.caller`' : '`defaults.scope.anonymous: reject`'
    return [
      `Requests that match no route: those ${without} ${shares}; set ${shared} or \`unmatched: reject\`.`,
    ]
  }
  const routes = sharing.filter(({ name }) => name !== UNMATCHED).map(({ name }) => `\`${name}\``)
  const others = routes.length === sharing.length ? '' : ' and requests that match no route'
  return [
    `${routes.length === 1 ? 'Route' : 'Routes'} ${routes.join(', ')}${others}: requests ${without} ${shares}. Set ${cure}.`,
  ]
}

export function callerName({ kind, name }: CallerSource): string {
  return kind === 'header' && name === 'authorization' ? 'Authorization' : `${kind}:${name}`
}

function releasedBy({ outcomes }: RoutePolicy): string[] {
  return outcomes
    .filter(({ outcome }) => outcome === 'release')
    .map((rule) => {
      const when = rule.when.map(({ pointer, value }) => `${pointer} is ${value}`)
      return [statusText(rule), ...(when.length === 0 ? [] : [when.join(' and ')])].join(' where ')
    })
}
