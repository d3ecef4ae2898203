import type { RoutePolicy } from '../core/policy.ts'
import { asksBy, asksByKey } from '../core/reconcile/answer.ts'
import { policiesOf, policyNamed, type Routes } from '../core/route.ts'

/**
 * Routes whose records that are unknown now nobody asks about any more, or whose "not found" frees none of them, one sentence each.
 * A record finds its route by the name.
 */
export function orphanedBy(before: Routes, after: Routes): string[] {
  return policiesOf(before).flatMap((route) => {
    const why = whyOrphaned(route, after)
    return why === null
      ? []
      : [
          `Route \`${route.name}\`: ${why}, so its records that are unknown now stay so until a person decides.`,
        ]
  })
}

function whyOrphaned(route: RoutePolicy, after: Routes): string | null {
  if (route.mode !== 'enforce' || route.reconcile === null) return null
  const next = policyNamed(after, route.name)
  if (next === null) return 'no route has its name any more'
  if (next.mode !== 'enforce') return `mode ${next.mode}, in which nobody asks the upstream`
  if (next.reconcile === null) return 'it has no reconcile any more'
  if (asksByKey(next.reconcile) && !asksByKey(route.reconcile))
    return 'reconcile asks by {key}, which was not kept before'
  if (
    next.reconcile.notFound !== null &&
    asksBy(next.reconcile).includes('record') &&
    !route.key.forwardFence
  )
    return 'reconcile asks by {record}, which the upstream was not told before, and "not found" proves nothing then'
  return null
}
