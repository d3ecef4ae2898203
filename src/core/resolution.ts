import { firstOf } from './headers.ts'
import type { CompletedResponse, IdempotencyRecord, RecordDraft } from './record.ts'

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
