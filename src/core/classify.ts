import { allMatch } from './body/conditions.ts'
import type { LookedUp } from './body/json-lookup.ts'
import type { Action, OutcomeRule, Profile, RoutePolicy } from './policy.ts'
import type { RpcCode } from './rpc/codes.ts'

/** A profile's outcome of each status: exact ones before classes. */
interface OutcomeTable {
  readonly exact: ReadonlyMap<number, Action>
  /** Classes by first digit. */
  readonly class: ReadonlyMap<number, Action>
}

/** A profile's outcomes of upstream responses (contract §7). Its other values are in config/properties.ts. */
interface ProfileTable {
  readonly outcomes: OutcomeTable
  /** 503 is not in `outcomes`: with `Retry-After` it comes from the upstream, otherwise perhaps from a proxy. */
  readonly unavailable: { readonly retryAfter: Action; readonly otherwise: Action }
}

/**
 * Statuses whose definitions say that nothing was done (contract §7, §15): the request is wanted elsewhere, from another sender, at another
 * time, under another condition or in another form. A 303 is an answer: it points to a result of the request.
 */
const NOTHING_DONE = [307, 308, 401, 403, 407, 408, 412, 417, 421, 425, 426, 428, 429, 431]
/** Statuses that mean the same if they come with `Retry-After`: the resource is busy. */
const BUSY: ReadonlySet<number> = new Set([409, 423])

function outcomes(serverError: Action, exact: Readonly<Record<number, Action>>): OutcomeTable {
  return {
    exact: new Map([
      ...NOTHING_DONE.map((status): [number, Action] => [status, 'release']),
      ...Object.entries(exact).map(([status, action]): [number, Action] => [Number(status), action]),
    ]),
    class: new Map([
      [2, 'store'],
      [3, 'store'],
      [4, 'store'],
      [5, serverError],
    ]),
  }
}

const TABLES: Readonly<Record<Profile, ProfileTable>> = {
  standard: {
    outcomes: outcomes('store', { 502: 'unknown', 504: 'unknown' }),
    unavailable: { retryAfter: 'release', otherwise: 'unknown' },
  },
  strict: {
    outcomes: outcomes('unknown', {}),
    unavailable: { retryAfter: 'unknown', otherwise: 'unknown' },
  },
  lenient: {
    outcomes: outcomes('release', {}),
    unavailable: { retryAfter: 'release', otherwise: 'release' },
  },
  stripe: {
    // A service that follows Stripe answers 409 while its own first attempt is still running.
    outcomes: outcomes('store', { 409: 'release' }),
    unavailable: { retryAfter: 'store', otherwise: 'store' },
  },
}

/**
 * The action for a complete response: the route's own entries decide, then the profile's. `json`: the body, for entries with conditions.
 */
export function classify(
  policy: Pick<RoutePolicy, 'outcomes' | 'profile'>,
  status: number,
  hasRetryAfter: boolean,
  json: LookedUp | null = null,
): Action {
  const table = TABLES[policy.profile]
  const own = ownRule(policy, status, json)
  if (own !== undefined) return own.outcome
  if (hasRetryAfter && BUSY.has(status)) return 'release'
  if (status === 503) return hasRetryAfter ? table.unavailable.retryAfter : table.unavailable.otherwise
  // A status below 200 is not final and proves nothing.
  return lookUp(table.outcomes, status) ?? 'unknown'
}

/** The route's own entry that applies. */
export function ownRule(
  { outcomes }: Pick<RoutePolicy, 'outcomes'>,
  status: number | RpcCode,
  json: LookedUp | null,
): OutcomeRule | undefined {
  return outcomes.find((rule) => concerns(rule, status) && allMatch(rule.when, json))
}

/** The conditions that matched the body, as configured. */
export function conditionsOf(rule: OutcomeRule | undefined): string {
  const when = rule?.when.map(({ pointer, value }) => `${pointer} is ${value}`) ?? []
  return when.length === 0 ? '' : ` with a body in which ${when.join(' and ')}`
}

function lookUp(table: OutcomeTable, status: number): Action | undefined {
  return table.exact.get(status) ?? table.class.get(classOf(status))
}

export function isSuccess(status: number): boolean {
  return status >= 200 && status < 300
}

/** A status above 599 counts as a 5xx (RFC 9110 §15). */
function classOf(status: number): number {
  return Math.min(Math.floor(status / 100), 5)
}

/** Whether the rule is about answers of that status, or of calls with that code. */
export function concerns(rule: Pick<OutcomeRule, 'status'>, status: number | RpcCode): boolean {
  return rule.status === status || (typeof status === 'number' && rule.status === classOf(status))
}

/** The JSON pointers at which the route's `outcomes` read the body of an answer of that status. */
export function pointersInto({ outcomes }: Pick<RoutePolicy, 'outcomes'>, status: number): string[] {
  const pointers: string[] = []
  for (const rule of outcomes)
    if (rule.when.length > 0 && concerns(rule, status))
      pointers.push(...rule.when.map(({ pointer }) => pointer))
  return pointers
}
