import type { LookedUp } from './body/json-lookup.ts'
import { deferralOf, ownStatusOf } from './chain.ts'
import { classify, conditionsOf, isSuccess, ownRule } from './classify.ts'
import { filterLines, firstOf, type RawHeaders } from './headers.ts'
import type { Action, Retention, RoutePolicy } from './policy.ts'
import {
  type Attempt,
  type Completed,
  type CompletedResponse,
  type IdempotencyRecord,
  type Millis,
  type Operation,
  type Outcome,
  type RecordDraft,
  type RecordId,
  readAt,
  type Spans,
  type State,
  type StoredResponse,
  type Unknown,
  withoutBody,
} from './record.ts'
import type { RpcCode } from './rpc/codes.ts'
import type { RpcProtocol } from './rpc/protocol.ts'
import { hasMessage, rpcAction, rpcCodeOf } from './rpc/status.ts'

/** The states in which the outcome of the record's latest attempt is accepted (contract §2). */
export const ACCEPTING: readonly State[] = ['in_progress', 'unknown', 'failed_retryable']
/** The same for an uncertain outcome, which must not overwrite the reconciliation of an unknown record. */
export const ACCEPTING_UNKNOWN: readonly State[] = ['in_progress', 'failed_retryable']

/** States in which no attempt runs or may have executed. */
const UNHELD: readonly State[] = ['failed_retryable']

/** The record that a claim writes. */
export function claimDraft(operation: Operation, { fence, token, attempts }: Attempt): RecordDraft {
  // One spread only: each further one costs more than all named members.
  return { ...operation, fence, token, attempts, state: 'in_progress', lastError: null, createdAt: 0 }
}

export function claimSpans(retention: Retention): Spans {
  return { dueIn: retention.lease, dropIn: retention.unresolvedTtl }
}

/** The spans that keep a record's instants unchanged. */
export function remainingSpans(record: IdempotencyRecord, now: Millis): Spans {
  return { dueIn: dueOf(record) - now, dropIn: record.dropAt - now }
}

function dueOf(record: IdempotencyRecord): Millis {
  switch (record.state) {
    case 'in_progress':
      return record.leaseUntil
    case 'unknown':
      return record.nextLookAt
    case 'completed':
      return record.expiresAt
    case 'failed_retryable':
    case 'expired':
      return record.dropAt
  }
}

/** The record of an outcome. */
export type OutcomeDraft = Extract<RecordDraft, { state: 'completed' | 'failed_retryable' | 'unknown' }>

/** The record that an outcome of `attempt` writes, if §2 accepts it. */
export function outcomeDraft(
  operation: Operation,
  { fence, token, attempts }: Attempt,
  outcome: Outcome,
  createdAt: Millis,
): OutcomeDraft {
  switch (outcome.kind) {
    case 'completed': {
      const { result } = outcome
      return { ...operation, fence, token, attempts, createdAt, state: 'completed', result, lastError: null }
    }
    case 'not_executed': {
      const lastError = outcome.reason
      return { ...operation, fence, token, attempts, createdAt, state: 'failed_retryable', lastError }
    }
    case 'unknown':
      return {
        ...operation,
        fence,
        token,
        attempts,
        createdAt,
        state: 'unknown',
        leaseExpired: false,
        status: outcome.status,
        reconciliation: null,
        lastError: outcome.reason,
      }
  }
}

/** Adds an uncertain outcome to its own, already unknown record: only the reason changes. */
export function stillUnknown(
  found: Unknown,
  draft: Extract<RecordDraft, { state: 'unknown' }>,
  now: Millis,
): { readonly draft: RecordDraft; readonly spans: Spans } {
  return {
    draft: { ...draft, reconciliation: found.reconciliation },
    spans: { dueIn: found.nextLookAt - now, dropIn: found.dropAt - now },
  }
}

export function outcomeSpans(outcome: Outcome, retention: Retention): Spans {
  switch (outcome.kind) {
    case 'completed': {
      const ttl = ttlOf(outcome.result, retention)
      return { dueIn: ttl, dropIn: ttl + retention.tombstone }
    }
    case 'not_executed':
      return { dueIn: retention.ttl, dropIn: retention.ttl }
    case 'unknown':
      return { dueIn: retention.reconcile?.every ?? retention.lease, dropIn: retention.unresolvedTtl }
  }
}

type Ttl = Pick<Retention, 'ttl' | 'ttlFailed' | 'ttlBody'>

function ttlOf(result: CompletedResponse, { ttl, ttlFailed }: Pick<Ttl, 'ttl' | 'ttlFailed'>): Millis {
  return ttl === ttlFailed || (isSuccess(statusOf(result)) && !saysFailed(result)) ? ttl : ttlFailed
}

/** Whether it is the answer of a call that failed. */
function saysFailed(result: CompletedResponse): boolean {
  if (!result.kept) return false
  const { headers, trailers } = result.response
  return (firstOf(trailers, 'grpc-status') ?? firstOf(headers, 'grpc-status') ?? '0') !== '0'
}

/** The result of a kept response, for the route's retention. */
export function withBody(response: StoredResponse, retention: Ttl): CompletedResponse {
  const { ttlBody } = retention
  const afterBody = ttlBody === null ? 0 : ttlOf({ kept: true, response }, retention) - ttlBody
  return afterBody > 0 ? { kept: true, response, afterBody } : { kept: true, response }
}

/** Removes the response from a completed record past its time; null: there is nothing to remove. */
export function bodiless(
  record: IdempotencyRecord,
  now: Millis,
): { readonly draft: RecordDraft; readonly spans: Spans } | null {
  const read = readAt(record, now)
  if (record.state !== 'completed' || read?.state !== 'completed' || read.result === record.result)
    return null
  return { draft: read, spans: remainingSpans(read, now) }
}

/**
 * For an upstream that completes its record itself, in the store's database (contract §9): the spans of its answer, as in {@link
 * outcomeSpans}, and the largest body to keep (0: none); then how long the body is kept, if shorter.
 */
export function completionTerms(
  route: Retention & {
    readonly keep: RoutePolicy['keep']
    readonly limits: { readonly response: number }
  },
): string {
  const { ttl, ttlFailed, ttlBody, tombstone, keep, limits } = route
  const terms = [ttl, ttlFailed, tombstone, keep === 'outcome' ? 0 : limits.response]
  return [...terms, ...(ttlBody === null ? [] : [ttlBody])].join(' ')
}

export function statusOf(result: CompletedResponse): number {
  return result.kept ? result.response.status : result.status
}

/**
 * Whether the outcome of `draft`'s attempt may overwrite another attempt's record: the store has reverted to an earlier state (restored
 * from a snapshot, or failed over to a lagging replica). Only an answer may end another attempt's claim, since that attempt may be
 * executing; any other outcome only overwrites a record that nobody holds.
 */
export function isFromBefore(
  found: IdempotencyRecord,
  { fence, createdAt, state }: Pick<RecordDraft, 'fence' | 'createdAt' | 'state'>,
): boolean {
  // The store lost this record; the attempt of a later one with the same id did nothing, so nobody is executing it.
  const isAnother = createdAt !== 0 && found.createdAt > createdAt
  if (isAnother && found.state === 'failed_retryable' && state !== 'failed_retryable') return true
  const over = state === 'completed' ? ACCEPTING : UNHELD
  return over.includes(found.state) && found.fence < fence && found.createdAt <= createdAt
}

/**
 * Whether a refused outcome found its own attempt completed: by an earlier try whose reply was lost, or by the upstream in its own
 * transaction (contract §9). When an operator completes a record, the owner's token is removed, so the owner's late outcome is stale
 * (contract §2).
 */
export function isRecorded(
  current: IdempotencyRecord,
  { token }: Pick<OutcomeDraft, 'token'>,
): current is Completed {
  return current.state === 'completed' && current.token.equals(token)
}

/** An outcome not yet stored, with everything needed to write it: a later process may do so, under a configuration without this route. */
export interface PendingOutcome {
  readonly id: RecordId
  readonly draft: OutcomeDraft
  readonly spans: Spans
  /** False: the claim's reply never came, so an absent record is no loss. */
  readonly claimed: boolean
  /** Nothing was executed: only the claim is withdrawn. */
  readonly withdrawn: boolean
  /** The version that a takeover expected when its reply was lost: if the takeover still arrives, it must not win. */
  readonly over: number | null
  readonly onLeaseExpired: 'unknown' | 'retry'
  /** How long it is worth writing. */
  readonly usefulFor: Millis
}

interface AttemptedRequest {
  readonly id: RecordId
  readonly route: Retention & Pick<PendingOutcome, 'onLeaseExpired'>
  readonly operation: Operation
  readonly attempt: Attempt
  readonly createdAt: Millis
}

/** The outcome of an attempt, to be written later. */
export function pendingOutcome(
  { id, route, operation, attempt, createdAt }: AttemptedRequest,
  outcome: Outcome,
  {
    claimed = false,
    withdrawn = false,
    over = null,
  }: Partial<Pick<PendingOutcome, 'claimed' | 'withdrawn' | 'over'>>,
): PendingOutcome {
  return {
    id,
    draft: outcomeDraft(operation, attempt, outcome, createdAt),
    spans: outcomeSpans(outcome, route),
    claimed,
    withdrawn,
    over,
    onLeaseExpired: route.onLeaseExpired,
    // As long as the claim it replaces, which reads as unknown.
    usefulFor: route.unresolvedTtl,
  }
}

/** A record's outcome without the store's stamps; null: its state is not an outcome. */
export function outcomeDraftOf(record: IdempotencyRecord): OutcomeDraft | null {
  switch (record.state) {
    case 'completed': {
      const { version: _v, updatedAt: _u, dropAt: _d, expiresAt: _e, ...draft } = record
      return draft
    }
    case 'unknown': {
      const { version: _v, updatedAt: _u, dropAt: _d, nextLookAt: _n, ...draft } = record
      return draft
    }
    case 'failed_retryable': {
      const { version: _v, updatedAt: _u, dropAt: _d, ...draft } = record
      return draft
    }
    case 'in_progress':
    case 'expired':
      return null
  }
}

/** A decision of the reconciler, an operator or a report from outside. */
export type Resolution =
  | { readonly kind: 'completed'; readonly result: CompletedResponse }
  | { readonly kind: 'not_executed'; readonly reason: string }

/** A token that no claim has: it makes the store refuse the owner's late outcome (contract §2). */
export const NOBODY = Buffer.alloc(16)

/**
 * The record that a resolution writes over `record` at its version. Completed is final, for the owner too: its token is removed. Not
 * executed keeps the token: until a retry claims, late proof by the owner wins.
 */
export function resolvedDraft(record: IdempotencyRecord, resolution: Resolution): RecordDraft {
  const kept = withoutState(record)
  return resolution.kind === 'completed'
    ? { ...kept, token: NOBODY, state: 'completed', result: resolution.result, lastError: null }
    : { ...kept, state: 'failed_retryable', lastError: resolution.reason }
}

/** The fields common to all states: the request, its latest attempt and its age; not those of one execution. */
function withoutState(record: InAnyState): Operation & Attempt & Pick<IdempotencyRecord, 'createdAt'> {
  const { state: _s, lastError: _e, version: _v, updatedAt: _u, dropAt: _d, ...rest } = record
  const { leaseUntil: _l, expiresAt: _x, result: _r, reconciliation: _c, nextLookAt: _n, ...more } = rest
  const { leaseExpired: _le, status: _st, lease: _p, span: _t, ...kept } = more
  return kept
}

type Members<R> = R extends unknown ? keyof R : never
type InAnyState = IdempotencyRecord & Partial<Record<Members<IdempotencyRecord>, unknown>>

/** The same resolution for a store without room for the response; null if it has no response. Completed stays completed (contract §3). */
export function withoutResponse(resolution: Resolution): Resolution | null {
  if (resolution.kind !== 'completed' || !resolution.result.kept) return null
  return { kind: 'completed', result: withoutBody(resolution.result.response, 'no_room') }
}

/** The record as this replica knows it, without asking the store. Read at time 0, so that it never expires. */
export function heldRecord(draft: OutcomeDraft, expiresAt: Millis | null = null): IdempotencyRecord {
  const record = asRecord(draft, 0)
  return record.state === 'completed' && expiresAt !== null ? { ...record, expiresAt } : record
}

function asRecord(draft: RecordDraft, leaseUntil: Millis): IdempotencyRecord {
  const common = { ...draft, version: 0, updatedAt: 0, dropAt: Number.POSITIVE_INFINITY }
  switch (common.state) {
    case 'completed':
      return { ...common, expiresAt: Number.POSITIVE_INFINITY }
    case 'unknown':
      return { ...common, nextLookAt: 0 }
    case 'in_progress':
      return { ...common, leaseUntil }
    case 'failed_retryable':
    case 'expired':
      return common
  }
}

/** The record of an execution on this replica, without asking the store: with a freshly renewed lease, or as its outcome leaves it. */
export function runningRecord({
  operation,
  attempt,
  createdAt,
  route,
  ended,
}: AttemptedRequest & { readonly ended: Outcome | null }): IdempotencyRecord {
  return ended === null
    ? asRecord(claimDraft(operation, attempt), route.lease)
    : heldRecord(outcomeDraft(operation, attempt, ended, createdAt))
}

/* What an answer of the upstream means. */

/** What decides, besides the answer. */
export interface SentRequest {
  readonly headers: RawHeaders
  /** Null: it is no remote procedure call. */
  readonly protocol: RpcProtocol | null
}

/** The head of an answer, its body if it was kept whole, and its trailers if it ended. */
export interface AnsweredHead {
  readonly status: number
  readonly headers: RawHeaders
  readonly body?: Buffer | undefined
  readonly trailers?: RawHeaders
}

/**
 * The outcome of a complete answer: the upstream's own declaration comes first, then that of a proxy behind this one, then the status, or
 * the code of a call (contract §6, §7). `json`: the body, for `outcomes` with conditions.
 */
export function outcomeOf(
  route: RoutePolicy,
  sent: SentRequest,
  answer: AnsweredHead,
  declaredOutcome: string | null,
  result: CompletedResponse,
  json: LookedUp | null = null,
): Outcome {
  const { protocol } = sent
  const { status, headers, body } = answer
  const code = protocol === null ? null : rpcCodeOf(protocol, answer)
  const word = WORDS.get(declaredOutcome)
  const isRefusal = word === undefined && firstOf(headers, 'idempotency-retry') !== null
  const refused = {
    status: protocol === null && isSuccess(status) ? status : ownStatusOf(headers, status),
    headers,
    body: body ?? null,
  }
  const deferral = isRefusal ? deferralOf(refused, route, sent.headers) : null
  const found = code === 'none' || code === null ? status : code
  if (deferral === 'free') return { kind: 'not_executed', reason: deferred(found) }
  if (code === 'none' && word === undefined)
    return unknownBecause('the answer has no clear grpc-status, or is truncated', status)
  const rule = word === undefined ? ownRule(route, found, json) : undefined
  const why = `the upstream answered ${found}${conditionsOf(rule)}`
  const action = word ?? rule?.outcome ?? usual(route, found, sent, answer)
  // The refusal of another proxy is never the answer to the request.
  if (deferral === 'uncertain' && action === 'store') return unknownBecause(deferred(found), status)
  switch (action) {
    case 'store':
      return { kind: 'completed', result }
    case 'release':
      return { kind: 'not_executed', reason: why }
    case 'unknown':
      return unknownBecause(why, status)
  }
}

function usual(
  route: RoutePolicy,
  found: number | RpcCode,
  { protocol }: SentRequest,
  answer: AnsweredHead,
): Action {
  return typeof found === 'number'
    ? classify(route, found, firstOf(answer.headers, 'retry-after') !== null)
    : rpcAction(route.profile, found, hasMessage(protocol as RpcProtocol, answer))
}

function deferred(status: number | RpcCode): string {
  return `the proxy behind this one refused the request with ${status}`
}

/** Values of `Idempotency-Outcome`, with which an upstream declares what it did. */
const WORDS: ReadonlyMap<string | null, Action> = new Map([
  ['applied', 'store'],
  ['not-applied', 'release'],
])

/** The outcome of an attempt whose response did not arrive whole. */
export function lostResponse(
  { onResponseLost }: Pick<RoutePolicy, 'onResponseLost'>,
  reason: string,
  status: number | null,
): Outcome {
  return onResponseLost === 'retry'
    ? { kind: 'not_executed', reason: `${reason}; onResponseLost: retry` }
    : unknownBecause(reason, status)
}

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
