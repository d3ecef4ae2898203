import type { Action, OutcomeTable, Profile, RoutePolicy } from './policy.ts'
import type { Millis } from './record.ts'

/** What a profile decides where neither a route nor `defaults` says otherwise (contract §7). */
export interface ProfileDefaults {
  readonly onLeaseExpired: RoutePolicy['onLeaseExpired']
  readonly onStoreUnavailable: RoutePolicy['onStoreUnavailable']
  readonly anonymous: RoutePolicy['scope']['anonymous']
  readonly minLength: number
  /** 0: off. */
  readonly tombstone: Millis
  readonly misuseStatus: RoutePolicy['misuseStatus']
}

interface ProfileTable extends ProfileDefaults {
  readonly outcomes: OutcomeTable
  /** 503 is no entry of `outcomes`: with `Retry-After` it is the upstream's word, without it may be a proxy's. */
  readonly unavailable: { readonly retryAfter: Action; readonly otherwise: Action }
}

const DAY: Millis = 86_400_000

/** Answers to the caller's standing or timing, given before any work is done. */
const NOTHING_DONE = [401, 403, 407, 408, 421, 425, 429]

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

const STANDARD: ProfileTable = {
  outcomes: outcomes('store', { 502: 'unknown', 504: 'unknown' }),
  unavailable: { retryAfter: 'release', otherwise: 'unknown' },
  onLeaseExpired: 'unknown',
  onStoreUnavailable: 'reject',
  anonymous: 'share',
  minLength: 1,
  tombstone: 0,
  misuseStatus: 422,
}

const TABLES: Readonly<Record<Profile, ProfileTable>> = {
  standard: STANDARD,
  strict: {
    ...STANDARD,
    outcomes: outcomes('unknown', {}),
    unavailable: { retryAfter: 'unknown', otherwise: 'unknown' },
    anonymous: 'reject',
    minLength: 16,
    tombstone: 7 * DAY,
  },
  lenient: {
    ...STANDARD,
    outcomes: outcomes('release', {}),
    unavailable: { retryAfter: 'release', otherwise: 'release' },
    onLeaseExpired: 'retry',
    onStoreUnavailable: 'bypass',
  },
  stripe: {
    ...STANDARD,
    // A service that follows Stripe answers 409 while its own first attempt is still running.
    outcomes: outcomes('store', { 409: 'release' }),
    unavailable: { retryAfter: 'store', otherwise: 'store' },
    misuseStatus: 400,
  },
}

export function profileDefaults(profile: Profile): ProfileDefaults {
  return TABLES[profile]
}

/** What a complete response of the upstream becomes: the route's own entries first, exact before class, then the profile's. */
export function classify(
  policy: Pick<RoutePolicy, 'outcomes' | 'profile'>,
  status: number,
  hasRetryAfter: boolean,
): Action {
  const table = TABLES[policy.profile]
  const own = lookUp(policy.outcomes, status)
  if (own !== undefined) return own
  if (status === 503) return hasRetryAfter ? table.unavailable.retryAfter : table.unavailable.otherwise
  // Below 200 nothing is final: an answer that claims to be proves nothing.
  return lookUp(table.outcomes, status) ?? 'unknown'
}

/** A status beyond 599 counts as a 5xx (RFC 9110 §15). */
function lookUp(table: OutcomeTable, status: number): Action | undefined {
  return table.exact.get(status) ?? table.class.get(Math.min(Math.floor(status / 100), 5))
}
