import type { Attempt, IdempotencyRecord, Millis, Operation, Outcome, RecordId, Spans } from './record.ts'
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
