import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import { asksBy, parametersIn } from '../core/reconcile/answer.ts'

type Asked = Pick<RoutePolicy, 'match' | 'scope'> & { readonly reconcile: ReconcilePolicy }

/**
 * Whether the question may find another record's operation. The record id is one record's. The key alone is not: equal keys are
 * different records wherever the scope tells them apart.
 */
export function asksByKeyAlone({ request, identity }: ReconcilePolicy): boolean {
  return ![request.path, ...identity.map(({ value }) => value)].some((text) => text.includes('{record}'))
}

/** What of the route's path tells records apart, and is named neither in the question's path nor in its `identity`. */
export function unnamedSegments({ match, scope, reconcile }: Asked): string[] {
  if (scope.path !== 'exact') return []
  const named = parametersIn(reconcile)
  return match.path
    .split('/')
    .filter((part) => part === '*' || (part.startsWith(':') && !named.includes(part.slice(1))))
}

/** Names in `{:name}` that the route's path does not have. */
export function unknownSegments({ match, reconcile }: Pick<Asked, 'match' | 'reconcile'>): string[] {
  const parts = match.path.split('/')
  return parametersIn(reconcile).filter((name) => !parts.includes(`:${name}`))
}

/** Equal for routes that ask the same about equal keys; null: about one record alone. */
export function questionByKey(policy: ReconcilePolicy): string | null {
  const { method, path } = policy.request
  return asksBy(policy).includes('key') && asksByKeyAlone(policy) ? `${method} ${path}` : null
}
