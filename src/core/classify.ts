import { deferralOf } from './chain.ts'
import { filterLines, firstOf, type RawHeaders } from './headers.ts'
import type { Action, OutcomeTable, Profile, RoutePolicy } from './policy.ts'
import { type CompletedResponse, type Outcome, type StoredResponse, withoutBody } from './record.ts'
import { withBody } from './settle.ts'

/** The head of an answer, and its body if it was kept whole. */
interface Answered {
  readonly status: number
  readonly headers: RawHeaders
  readonly body?: Buffer
}

/**
 * The outcome of a complete answer: the upstream's own declaration comes first, then that of a proxy behind this one, then the status
 * (contract §6, §7). `sent`: the header lines of the request.
 */
export function outcomeOf(
  route: RoutePolicy,
  sent: RawHeaders,
  { status, headers, body }: Answered,
  declaredOutcome: string | null,
  result: CompletedResponse,
): Outcome {
  const word = WORDS.get(declaredOutcome)
  const isRefusal = word === undefined && firstOf(headers, 'idempotency-retry') !== null
  const deferral = isRefusal ? deferralOf({ status, headers, body: body ?? null }, route, sent) : null
  if (deferral === 'free') return { kind: 'not_executed', reason: deferred(status) }
  const action = word ?? classify(route, status, firstOf(headers, 'retry-after') !== null)
  // The refusal of another proxy is never the answer to the request.
  if (deferral === 'uncertain' && action === 'store') return unknownBecause(deferred(status), status)
  switch (action) {
    case 'store':
      return { kind: 'completed', result }
    case 'release':
      return { kind: 'not_executed', reason: `the upstream answered ${status}` }
    case 'unknown':
      return unknownBecause(`the upstream answered ${status}`, status)
  }
}

function deferred(status: number): string {
  return `the proxy behind this one refused the request with ${status}`
}

/** Values of `Idempotency-Outcome`, with which an upstream declares what it did. */
const WORDS: ReadonlyMap<string | null, Action> = new Map([
  ['applied', 'store'],
  ['not-applied', 'release'],
])

export function unknownBecause(reason: string, status: number | null): Outcome {
  return { kind: 'unknown', reason, status }
}

export function keptResult(route: RoutePolicy, response: StoredResponse): CompletedResponse {
  return route.keep === 'outcome'
    ? withoutBody(response, 'outcome_only')
    : withBody(replayable(route, response), route)
}

/** Drops excluded lines, both before a response is stored and before it is replayed: it may have been stored under another setting. */
export function replayable(route: RoutePolicy, response: StoredResponse): StoredResponse {
  if (route.excludeHeaders.size === 0) return response
  return { ...response, headers: filterLines(response.headers, (name) => !route.excludeHeaders.has(name)) }
}

export function keepsBody(outcome: Outcome): boolean {
  return outcome.kind === 'completed' && outcome.result.kept
}

/** A profile's outcomes of upstream responses (contract §7). Its other values are in config/properties.ts. */
interface ProfileTable {
  readonly outcomes: OutcomeTable
  /** 503 is not in `outcomes`: with `Retry-After` it comes from the upstream, without it may come from a proxy. */
  readonly unavailable: { readonly retryAfter: Action; readonly otherwise: Action }
}

/** Statuses about the caller's standing or timing, sent before any work is done. */
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

/** The action for a complete response: the route's own entries decide, exact statuses before classes, then the profile's. */
export function classify(
  policy: Pick<RoutePolicy, 'outcomes' | 'profile'>,
  status: number,
  hasRetryAfter: boolean,
): Action {
  const table = TABLES[policy.profile]
  const own = lookUp(policy.outcomes, status)
  if (own !== undefined) return own
  if (status === 503) return hasRetryAfter ? table.unavailable.retryAfter : table.unavailable.otherwise
  // A status below 200 is not final and proves nothing.
  return lookUp(table.outcomes, status) ?? 'unknown'
}

/** A status above 599 counts as a 5xx (RFC 9110 §15). */
function lookUp(table: OutcomeTable, status: number): Action | undefined {
  return table.exact.get(status) ?? table.class.get(Math.min(Math.floor(status / 100), 5))
}
