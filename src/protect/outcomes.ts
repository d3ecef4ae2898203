import type { RoutePolicy } from '../core/policy.ts'
import { isProtected } from '../core/route.ts'

/*
 * The public names of all outcomes (contract §13). Metrics, log, histories, commands, the operators' page, dashboards and documentation take
 * names and wording from these tables.
 */

interface OutcomeRow {
  /** For a record's history, and documentation. */
  readonly says: string
  /** How the page shows it. */
  readonly mood?: 'good' | 'bad'
}

interface RequestRow extends OutcomeRow {
  /** `served`: answered by the upstream, now or earlier. `client`, `error`: the side that has to fix something. */
  readonly group: 'served' | 'duplicate' | 'client' | 'error'
  /** How such a retry was answered; absent if the request was executed or refused. */
  readonly retry?: string
  /** Whether a route's settings allow it; if absent, it can happen on every protected route. */
  readonly when?: (policy: RoutePolicy) => boolean
}

interface ShadowRow {
  readonly says: string
  /** What `enforce` would have done. `prevented`: not executed a second time. */
  readonly effect: 'executed' | 'prevented' | 'refused' | 'unjudged'
}

/** Keeps a table's names as a type, and gives its rows the declared type. */
type Table<Row> = <Name extends string>(rows: Readonly<Record<Name, Row>>) => Readonly<Record<Name, Row>>
const requests: Table<RequestRow> = (rows) => rows
const results: Table<OutcomeRow> = (rows) => rows
const verdicts: Table<ShadowRow> = (rows) => rows

/** `outcome` of `idempotency_requests_total`: how a request was answered. */
export const REQUEST_OUTCOMES = requests({
  executed: { says: 'Executed: the upstream answered', group: 'served', mood: 'good' },
  replayed: {
    says: 'A retry received the stored response',
    group: 'served',
    mood: 'good',
    retry: 'with the stored response',
  },
  in_progress: {
    says: 'A duplicate arrived while the first request was running',
    group: 'duplicate',
    retry: 'as still running',
  },
  waited: {
    says: 'A duplicate waited for the first request and received its response',
    group: 'served',
    mood: 'good',
    retry: 'with the stored response after waiting for it',
    when: ({ inFlight }) => inFlight.mode === 'wait',
  },
  misuse: { says: 'Refused: the key was first used for a different request', group: 'client', mood: 'bad' },
  key_missing: {
    says: 'Refused: the key is missing',
    group: 'client',
    when: ({ key }) => key.presence === 'required',
  },
  key_invalid: { says: 'Refused: the key is invalid', group: 'client' },
  unknown: {
    says: 'A retry was told that the outcome is unknown',
    group: 'duplicate',
    mood: 'bad',
    retry: 'as unknown',
  },
  response_unavailable: {
    says: 'A retry was told that the request is done; its response was not kept',
    group: 'error',
    retry: 'as done, without the response',
  },
  expired: {
    says: 'A retry was told that the key has expired',
    group: 'duplicate',
    retry: 'as done, with the response no longer stored',
    when: ({ tombstone }) => tombstone > 0,
  },
  store_unavailable: { says: 'Refused: the store was unavailable', group: 'error', mood: 'bad' },
  bypassed: {
    says: 'Executed without the store',
    group: 'served',
    when: ({ onStoreUnavailable }) => onStoreUnavailable === 'bypass',
  },
  upstream_unreachable: {
    says: 'Not sent: the upstream could not be reached',
    group: 'error',
    mood: 'bad',
  },
  upstream_failed: {
    says: 'Sent, but no complete response came, or one that the proxy does not relay',
    group: 'error',
    mood: 'bad',
  },
  upstream_timeout: { says: 'Sent, but the upstream did not answer in time', group: 'error', mood: 'bad' },
  upstream_slow: {
    says: 'The client was answered early; the upstream was still working',
    group: 'error',
    mood: 'bad',
    when: ({ respondWithin, match }) => respondWithin !== null || match.grpc != null,
  },
  caller_missing: {
    says: 'Refused: the caller is not identified',
    group: 'client',
    when: ({ scope }) => scope.caller.length > 0,
  },
  request_too_large: { says: 'Refused: the request is too large', group: 'error' },
  request_timeout: { says: 'Refused: the request did not arrive in time', group: 'error' },
  rate_limited: {
    says: 'Refused: too many new keys',
    group: 'error',
    when: ({ limits }) => limits.newKeys !== null,
  },
  replay_forbidden: {
    says: 'A retry was refused: its caller may not see the stored response',
    group: 'error',
    mood: 'bad',
    when: ({ authorizeReplay }) => authorizeReplay !== null,
  },
  overloaded: { says: 'Refused: the proxy was at its limits', group: 'error', mood: 'bad' },
  passed: {
    says: 'Forwarded without protection',
    group: 'served',
    when: ({ key }) => key.presence === 'optional',
  },
})
export type RequestOutcome = keyof typeof REQUEST_OUTCOMES

/** `result` of `idempotency_claims_total`: what a claim found. */
export const CLAIM_RESULTS = results({
  created: { says: 'No record: the key is new' },
  replay: { says: 'A completed record, or the tombstone of one' },
  in_progress: { says: 'A request that is still running' },
  key_misuse: { says: 'A record of a different request' },
  failed_retry: { says: 'A record that may be executed again' },
  unknown: { says: 'A record whose outcome is unknown' },
  error: { says: 'No answer: the store was unavailable' },
})
export type ClaimResult = keyof typeof CLAIM_RESULTS

/** `result` of `idempotency_completions_total`: how the outcome of an execution was recorded. */
export const COMPLETION_RESULTS = results({
  stored: { says: 'The outcome was stored', mood: 'good' },
  released: { says: 'The key was released: nothing was done', mood: 'good' },
  unknown: { says: 'Recorded as unknown', mood: 'bad' },
  too_large: { says: 'Done; the response was too large to keep' },
  stale: { says: 'A late outcome was refused: a newer one stands', mood: 'bad' },
  recovered: { says: 'The record was gone; its outcome was written again', mood: 'good' },
  deferred: { says: 'The store did not accept the outcome; it is held', mood: 'bad' },
})
export type CompletionResult = keyof typeof COMPLETION_RESULTS

/** `result` of `idempotency_reconcile_total`: the result of asking the upstream about an unknown record. */
export const RECONCILE_RESULTS = results({
  scheduled: { says: 'The upstream will be asked' },
  completed: { says: 'The upstream says that it was done', mood: 'good' },
  retryable: { says: 'The upstream says that it was not done', mood: 'good' },
  pending: { says: 'Asked: the upstream has not decided' },
  failed: { says: 'Asked: the answer was inconclusive', mood: 'bad' },
  dead_lettered: { says: 'All status queries are used up: a person has to decide', mood: 'bad' },
})
export type ReconcileResult = keyof typeof RECONCILE_RESULTS

/** `verdict` of `idempotency_shadow_total`: what `enforce` would have done with a request that shadow mode forwarded. */
export const SHADOW_VERDICTS = verdicts({
  first: { effect: 'executed', says: 'New request: executed' },
  retry: {
    effect: 'executed',
    says: 'Retry after an attempt that did nothing (or, with onLeaseExpired: retry, one that fell silent): executed',
  },
  replay_same: {
    effect: 'prevented',
    says: 'Retry of a completed request: replayed. The second response equals the first, so the upstream is idempotent here, or its responses look alike',
  },
  replay_differs: {
    effect: 'prevented',
    says: 'Retry of a completed request: replayed. The second response differs: something was probably done twice',
  },
  not_compared: {
    effect: 'prevented',
    says: 'Retry of a completed request: replayed. The second response cannot be compared: streamed, over limits.response, or broken off',
  },
  response_unavailable: {
    effect: 'prevented',
    says: 'Retry of a completed request whose response was not kept: 409',
  },
  in_progress: { effect: 'prevented', says: 'Arrived while the first request was running: 409' },
  waited: {
    effect: 'prevented',
    says: 'The same, on a route with inFlight: wait: held until the first request has finished',
  },
  unknown: { effect: 'prevented', says: 'Retry of a request whose outcome is unknown: 409' },
  misuse: { effect: 'refused', says: 'Different request under the same key: 422' },
  expired: { effect: 'prevented', says: 'Found a tombstone, or its issued key has expired: 409 or 412' },
  passed: { effect: 'executed', says: 'No key, found only by reading the body: forwarded' },
  key_missing: { effect: 'refused', says: 'No key where one is required: 400' },
  key_invalid: { effect: 'refused', says: 'Invalid key: 400' },
  caller_missing: { effect: 'refused', says: 'Caller not identified: 400 or 401' },
  request_too_large: { effect: 'refused', says: 'Body over limits.request: 413' },
  request_aborted: {
    effect: 'unjudged',
    says: 'Incomplete: the client left, or the upstream answered or broke off before it had read the body',
  },
  rate_limited: { effect: 'refused', says: 'One new key too many (limits.newKeys): 429' },
  overloaded: {
    effect: 'unjudged',
    says: 'Not judged: limits.inFlight requests are being judged already, or there is no room for the body',
  },
  store_unavailable: {
    effect: 'unjudged',
    says: 'The store did not answer, the record cannot be read, or the store is unfit for a strict route: 503, or bypassed',
  },
  upstream_unreachable: { effect: 'executed', says: 'Executed, but not a byte was sent: 502' },
  upstream_failed: { effect: 'executed', says: 'Executed, without a complete response: 502 or 504' },
  error: { effect: 'unjudged', says: 'Bug in shadow mode, see the log; traffic is unaffected' },
})
export type ShadowVerdict = keyof typeof SHADOW_VERDICTS

/** Other events in a record's history. */
export const OTHER_EVENTS = results({
  claimed: { says: 'Claimed, and sent to the upstream' },
  aborted: { says: 'The client went away' },
  lease_expired: { says: 'Its owner fell silent: the lease expired', mood: 'bad' },
})

/** The outcomes that a route's settings allow. */
export function possibleOutcomes(policy: RoutePolicy): RequestOutcome[] {
  if (!isProtected(policy)) return ['passed']
  return namesOf(REQUEST_OUTCOMES).filter((outcome) => REQUEST_OUTCOMES[outcome].when?.(policy) ?? true)
}

/** Whether an event in a record's history is a retry that was not executed again. */
export function isPrevented(event: string): boolean {
  return REQUEST_OUTCOMES[event as RequestOutcome]?.retry !== undefined
}

export function namesOf<Name extends string>(table: Readonly<Record<Name, unknown>>): Name[] {
  return Object.keys(table) as Name[]
}
