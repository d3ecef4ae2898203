import type { RoutePolicy } from '../core/policy.ts'
import type { ReconcilePolicy } from '../core/reconcile.ts'
import { isProtecting } from './check.ts'
import type { PolicyConfig } from './schema-policy.ts'

export interface Effective {
  readonly policy: RoutePolicy
  /** What the route and `defaults` say outright. */
  readonly written: PolicyConfig
}

/** One sentence for every promise that the configuration gives up by name (contract, promise), with the routes that do. */
export function warningsOf(effective: readonly Effective[], storeUrl: string): string[] {
  const guarded = effective.filter(({ policy }) => isProtecting(policy))
  const namesOf = (which: readonly Effective[]): string =>
    which.map(({ policy }) => `\`${policy.name}\``).join(', ')
  const sentence = (which: readonly Effective[], say: (names: string) => string): string[] =>
    which.length === 0 ? [] : [say(`${which.length === 1 ? 'Route' : 'Routes'} ${namesOf(which)}`)]
  return [
    ...sentence(
      effective.filter(({ policy }) => policy.mode === 'off'),
      (routes) => `${routes}: mode off, so a retry executes again.`,
    ),
    ...sentence(
      effective.filter(({ policy }) => policy.mode === 'shadow' && policy.key.presence !== 'ignored'),
      (routes) => `${routes}: mode shadow, so a retry executes again.`,
    ),
    ...sentence(
      guarded.filter(({ policy }) => policy.key.derive !== null && policy.key.derive.bucket !== null),
      (routes) =>
        `${routes}: key.derive with a bucket, so a retry that falls into the next bucket executes again.`,
    ),
    ...sentence(
      guarded.filter(({ policy }) => policy.profile === 'lenient'),
      (routes) =>
        `${routes}: profile lenient, so a retry may execute again after a 5xx, an expired lease or an outage of the store.`,
    ),
    ...sentence(
      guarded.filter(({ written }) => written.onLeaseExpired === 'retry'),
      (routes) =>
        `${routes}: onLeaseExpired retry, so a retry executes again once the first attempt fell silent, whatever it did.`,
    ),
    ...sentence(
      guarded.filter(({ written }) => written.onStoreUnavailable === 'bypass'),
      (routes) => `${routes}: onStoreUnavailable bypass, so nothing is protected while the store is down.`,
    ),
    ...sentence(
      guarded.filter(({ policy }) => policy.reconcile !== null && policy.reconcile.identity.length === 0),
      (routes) =>
        `${routes}: reconcile with identity none, so whatever the upstream answers is taken for the answer of the request.`,
    ),
    ...sentence(
      guarded.filter(
        ({ policy }) =>
          policy.reconcile !== null && policy.scope.caller.length > 0 && !tellsCallersApart(policy.reconcile),
      ),
      (routes) =>
        `${routes}: reconcile asks by the key alone, which two callers may both have used: the one is then told what became of the other's request, unless the upstream tells them apart; {record} does.`,
    ),
    ...guarded.flatMap((route) => {
      const released = releasedBy(route.policy)
      return released.length === 0
        ? []
        : [
            `Route \`${route.policy.name}\`: outcomes release ${released.join(', ')}, so a retry executes again after such an answer.`,
          ]
    }),
    ...sentence(
      guarded.filter(({ policy }) => policy.scope.anonymous === 'share' && policy.scope.caller.length > 0),
      (routes) =>
        `${routes}: scope.anonymous share, so all callers without the attribute that tells callers apart have one set of keys, and one may be answered with what another was answered; scope: { anonymous: reject }, in the route or in defaults, refuses them.`,
    ),
    ...(storeUrl === 'memory:'
      ? ['The store is memory:, so every record is lost when the process ends, and no other process sees it.']
      : []),
  ]
}

/** The id of a record is that of one caller. */
function tellsCallersApart({ request, identity }: ReconcilePolicy): boolean {
  return [request.path, ...identity.map(({ value }) => value)].some((text) => text.includes('{record}'))
}

function releasedBy({ outcomes }: RoutePolicy): string[] {
  const entries = [
    ...[...outcomes.exact].map(([status, action]) => ({ status: String(status), action })),
    ...[...outcomes.class].map(([digit, action]) => ({ status: `${digit}xx`, action })),
  ]
  return entries.filter(({ action }) => action === 'release').map(({ status }) => status)
}
