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

/** An outcome not yet stored, with all that writing it needs: a later process may write it, whose configuration lacks the route. */
export interface PendingOutcome {
  readonly id: RecordId
  readonly draft: OutcomeDraft
  readonly spans: Spans
  /** False: the claim's reply never came, so an absent record is no loss. */
  readonly claimed: boolean
  /** Nothing was tried: only the claim is taken back. */
  readonly withdrawn: boolean
  /** Version that a takeover expected whose reply was lost: if it arrives late it must not win. */
  readonly over: number | null
  readonly onLeaseExpired: 'unknown' | 'retry'
  /** How long it is worth writing. */
  readonly usefulFor: Millis
}

interface Attempted {
  readonly id: RecordId
  readonly route: Retention & Pick<PendingOutcome, 'onLeaseExpired'>
  readonly operation: Operation
  readonly attempt: Attempt
  readonly createdAt: Millis
}

/** The outcome of an attempt, to be written later. */
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
    // As long as the claim that it would replace, which reads as unknown.
    usefulFor: route.unresolvedTtl,
    ...how,
  }
}

/** A record's outcome without the store's stamps; null: its state is no outcome. */
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

/** What the reconciler, an operator or a report from outside found or decided. */
export type Resolution =
  | { readonly kind: 'completed'; readonly result: CompletedResponse }
  | { readonly kind: 'not_executed'; readonly reason: string }

/** A token of no claim: with it, a late outcome of the owner is refused (contract §2). */
export const NOBODY = Buffer.alloc(16)

/**
 * The record that a resolution writes over `record` at its version. Completed is final for the owner too, whose token is taken
 * away. Not executed keeps the token: until a retry claims, a late proof by the owner wins.
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

/** The same for a store without room for the response; null: it has none. Done stays done (contract §3). */
export function withoutResponse(resolution: Resolution): Resolution | null {
  if (resolution.kind !== 'completed' || !resolution.result.kept) return null
  const { status, headers } = resolution.result.response
  const result = { kept: false, why: 'no_room', status, location: firstOf(headers, 'location') } as const
  return { kind: 'completed', result }
}
