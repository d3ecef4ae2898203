import { firstOf } from './headers.ts'
import type {
  Attempt,
  CompletedResponse,
  IdempotencyRecord,
  Millis,
  Operation,
  Outcome,
  RecordDraft,
  RecordId,
  Spans,
} from './record.ts'
import { type OutcomeDraft, outcomeDraft, outcomeSpans, type Retention } from './settle.ts'

/**
 * An outcome that no store has taken yet, with all that writing it needs: so that it can be written by a later process, whose
 * configuration may have lost the route.
 */
export interface PendingOutcome {
  readonly id: RecordId
  readonly draft: OutcomeDraft
  readonly spans: Spans
  /** False: the claim's reply was lost or never came, so an absent record is no loss. */
  readonly claimed: boolean
  /** Nothing was tried: the claim alone is taken back. It says nothing about the record. */
  readonly withdrawn: boolean
  /** Version that a claim over it expected, if its reply was lost: a late arrival of that claim must not win. */
  readonly over: number | null
  readonly onLeaseExpired: 'unknown' | 'retry'
  /** How long from now it is worth writing. */
  readonly usefulFor: Millis
}

interface Attempted {
  readonly id: RecordId
  readonly route: Retention & Pick<PendingOutcome, 'onLeaseExpired'>
  readonly operation: Operation
  readonly attempt: Attempt
  readonly createdAt: Millis
}

/** What is to be written of an attempt that ended so. */
export function pendingOutcome(
  { id, route, operation, attempt, createdAt }: Attempted,
  outcome: Outcome,
  how: Partial<Pick<PendingOutcome, 'claimed' | 'withdrawn' | 'over'>>,
): PendingOutcome {
  const spans = outcomeSpans(outcome, route)
  return {
    id,
    draft: outcomeDraft(operation, attempt, outcome, createdAt),
    spans,
    claimed: false,
    withdrawn: false,
    over: null,
    onLeaseExpired: route.onLeaseExpired,
    // As long as the claim that it would leave behind, which reads as unknown: a truth that is told late beats none.
    usefulFor: route.unresolvedTtl,
    ...how,
  }
}

/** What of a record its writer says; null where no outcome says it. The stamps are the store's. */
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

/** What somebody other than the owner found out or decided: the reconciler, an operator, a report from outside. */
export type Resolution =
  | { readonly kind: 'completed'; readonly result: CompletedResponse }
  | { readonly kind: 'not_executed'; readonly reason: string }

/** In no claim: an owner whose attempt was resolved as completed is refused by it (contract §2). */
export const NOBODY = Buffer.alloc(16)

/**
 * The record that a resolution of `record` writes, which must be at its version still; its spans are those of the outcome (`outcomeSpans`). Completed is final, for the owner too:
 * its token is taken away. Not executed keeps the token: until a retry claims, a late proof of the owner beats it.
 */
export function resolvedDraft(record: IdempotencyRecord, resolution: Resolution): RecordDraft {
  const { route, method, path, fingerprint, rawDigest, recipe, key, keySent, told, toldTo } = record
  const { fence, attempts, createdAt } = record
  const base = {
    ...(keySent === undefined ? {} : { keySent }),
    ...(told === undefined ? {} : { told }),
    ...(toldTo === undefined ? {} : { toldTo }),
    route,
    method,
    path,
    fingerprint,
    rawDigest,
    recipe,
    key,
    fence,
    attempts,
    createdAt,
  }
  return resolution.kind === 'completed'
    ? { ...base, token: NOBODY, state: 'completed', result: resolution.result, lastError: null }
    : { ...base, token: record.token, state: 'failed_retryable', lastError: resolution.reason }
}

/** The same for a store that has no room for the response; null: there is none in it. Done stays done (contract §3). */
export function withoutResponse(resolution: Resolution): Resolution | null {
  if (resolution.kind !== 'completed' || !resolution.result.kept) return null
  const { status, headers } = resolution.result.response
  const result = { kept: false, why: 'no_room', status, location: firstOf(headers, 'location') } as const
  return { kind: 'completed', result }
}
