import { deferralOf } from '../core/chain.ts'
import { filterLines, firstOf, type RawHeaders } from '../core/headers.ts'
import { type Action, classify, type RoutePolicy } from '../core/policy.ts'
import type {
  CompletedResponse,
  IdempotencyRecord,
  Millis,
  NotKept,
  Outcome,
  RecordDraft,
  StoredResponse,
} from '../core/record.ts'
import { claimDraft, type OutcomeDraft, outcomeDraft } from '../core/settle.ts'
import type { Execution } from './request.ts'

/** The head of an answer, and its body where it was kept whole. */
interface Answered {
  readonly status: number
  readonly headers: RawHeaders
  readonly body?: Buffer
}

/**
 * What a complete answer means: the upstream's own word first, then that of a proxy behind this one, else its status
 * (contract §6, §7). `sent`: the lines of the request that it answers.
 */
export function outcomeOf(
  route: RoutePolicy,
  sent: RawHeaders,
  { status, headers, body }: Answered,
  declaredOutcome: string | null,
  result: CompletedResponse,
): Outcome {
  const word = WORDS.get(declaredOutcome)
  const deferral =
    word === undefined ? deferralOf({ status, headers, body: body ?? null }, route, sent) : null
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

/** `Idempotency-Outcome`, by which an upstream says what it did. */
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
    : { kept: true, response: replayable(route, response) }
}

/** What is stored is what is replayed: excluded lines never reach the store, nor leave it if they were stored before. */
export function replayable(route: RoutePolicy, response: StoredResponse): StoredResponse {
  if (route.excludeHeaders.size === 0) return response
  return { ...response, headers: filterLines(response.headers, (name) => !route.excludeHeaders.has(name)) }
}

/** The result of a response whose body is not kept. */
export function withoutBody(
  response: { readonly status: number; readonly headers: readonly string[] },
  why: NotKept,
): CompletedResponse {
  return { kept: false, why, status: response.status, location: firstOf(response.headers, 'location') }
}

export function keepsBody(outcome: Outcome): boolean {
  return outcome.kind === 'completed' && outcome.result.kept
}

/** The record as this replica knows it, without asking the store. Its time is 0: it does not expire by itself. */
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

/**
 * The record of an execution on this replica, without asking the store: as if its lease had just been renewed, or as its outcome leaves
 * it.
 */
export function runningRecord({ operation, attempt, createdAt, route, ended }: Execution): IdempotencyRecord {
  return ended === null
    ? asRecord(claimDraft(operation, attempt), route.lease)
    : heldRecord(outcomeDraft(operation, attempt, ended, createdAt))
}
