import type {
  Attempt,
  CompletedResponse,
  IdempotencyRecord,
  Millis,
  Operation,
  Outcome,
  RecordDraft,
  Spans,
  State,
  Unknown,
} from './record.ts'

/** The retention settings of a route that a record's life depends on (contract §10). */
export interface Retention {
  readonly lease: Millis
  readonly ttl: Millis
  readonly ttlFailed: Millis
  readonly tombstone: Millis
  readonly unresolvedTtl: Millis
  /** Where unknown records are asked about: how soon for the first time. */
  readonly reconcile: { readonly every: Millis } | null
}

/** The states in which the outcome of the record's latest attempt is accepted (contract §2). */
export const ACCEPTING: readonly State[] = ['in_progress', 'unknown', 'failed_retryable']
/** The same for one that is itself uncertain: what has been found out about an unknown record must not be lost by it. */
export const ACCEPTING_UNKNOWN: readonly State[] = ['in_progress', 'failed_retryable']

/** The state in which no attempt runs, and none may have executed. */
const UNHELD: readonly State[] = ['failed_retryable']

/** The record that a claim writes. */
export function claimDraft(operation: Operation, attempt: Attempt): RecordDraft {
  return { ...operation, ...attempt, state: 'in_progress', lastError: null, createdAt: 0 }
}

export function claimSpans(retention: Retention): Spans {
  return { dueIn: retention.lease, dropIn: retention.unresolvedTtl }
}

/** The record of an outcome. */
export type OutcomeDraft = Extract<RecordDraft, { state: 'completed' | 'failed_retryable' | 'unknown' }>

/** The record that an outcome of `attempt` writes, where §2 accepts it. */
export function outcomeDraft(
  operation: Operation,
  attempt: Attempt,
  outcome: Outcome,
  createdAt: Millis,
): OutcomeDraft {
  const base = { ...operation, ...attempt, createdAt }
  switch (outcome.kind) {
    case 'completed':
      return { ...base, state: 'completed', result: outcome.result, lastError: null }
    case 'not_executed':
      return { ...base, state: 'failed_retryable', lastError: outcome.reason }
    case 'unknown':
      return {
        ...base,
        state: 'unknown',
        leaseExpired: false,
        status: outcome.status,
        reconciliation: null,
        lastError: outcome.reason,
      }
  }
}

/** What an uncertain outcome makes of its own record where that is unknown already: it says why, the rest stays. */
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
      const ttl = isSuccess(statusOf(outcome.result)) ? retention.ttl : retention.ttlFailed
      return { dueIn: ttl, dropIn: ttl + retention.tombstone }
    }
    case 'not_executed':
      return { dueIn: retention.ttl, dropIn: retention.ttl }
    case 'unknown':
      return { dueIn: retention.reconcile?.every ?? retention.lease, dropIn: retention.unresolvedTtl }
  }
}

export function statusOf(result: CompletedResponse): number {
  return result.kept ? result.response.status : result.status
}

export function isSuccess(status: number): boolean {
  return status >= 200 && status < 300
}

/**
 * Whether the outcome of `draft`'s attempt may be written over another attempt's record: the store has gone back to a state from
 * before it (restored from a snapshot, or failed over to a replica that lagged). Only an answer may end another attempt's claim,
 * since that attempt may be executing; what says nothing about it goes over a record that nobody holds.
 */
export function isFromBefore(
  found: IdempotencyRecord,
  { fence, createdAt, state }: Pick<RecordDraft, 'fence' | 'createdAt' | 'state'>,
): boolean {
  const over = state === 'completed' ? ACCEPTING : UNHELD
  return over.includes(found.state) && found.fence < fence && found.createdAt <= createdAt
}

/**
 * What a refused outcome means: the store found `current` where it expected the attempt in a state of {@link ACCEPTING}.
 * `duplicate`: this very attempt already completed it, its reply was lost. A resolution by an operator takes the
 * owner's token away when it completes a record, so the owner's late outcome is `stale` then (contract §2).
 */
export function judgeRefusal(
  current: IdempotencyRecord,
  { token, state }: Pick<OutcomeDraft, 'token' | 'state'>,
): 'duplicate' | 'stale' {
  const own = current.token.equals(token)
  return own && current.state === 'completed' && state === 'completed' ? 'duplicate' : 'stale'
}
