import { asksByKey, type ReconcilePolicy, whyUntold } from './reconcile/answer.ts'
import type { QuestionResult } from './reconcile/schedule.ts'
import type { Completed, IdempotencyRecord, Millis } from './record.ts'
import { NOBODY } from './resolution.ts'
import { statusOf } from './settle.ts'

/** What a question is worth: whether it finds what the upstream is known to have done. */
export type Proof =
  | { readonly kind: 'proven' }
  /** It finds nothing of it: a mistyped path, credentials that see nothing, an upstream that forgets. */
  | { readonly kind: 'refuted' }
  /** It could not be told now. */
  | { readonly kind: 'unanswered'; readonly why: string }
  /** There is nothing that it should find, or what it found decides nothing. */
  | { readonly kind: 'untested' }

/** `heard`: the answers about records that are known to be done. One that was found is enough; upstreams forget others. */
export function proofOf(heard: readonly QuestionResult[]): Proof {
  if (heard.some(({ kind }) => kind === 'completed')) return { kind: 'proven' }
  if (heard.some(({ kind }) => kind === 'not_found')) return { kind: 'refuted' }
  for (const one of heard)
    if (one.kind === 'not_sent' || one.kind === 'unusable') return { kind: 'unanswered', why: one.why }
  return { kind: 'untested' }
}

/**
 * Whether the upstream must know of the record: it answered the request with a success itself, and was told what it is asked by.
 * Refusals need not be remembered anywhere, and what a person resolved may never have been done.
 */
export function isKnownUpstream(
  record: IdempotencyRecord | null,
  route: string,
  policy: ReconcilePolicy,
  now: Millis,
  upstream: string,
): record is Completed {
  if (record?.state !== 'completed' || record.route !== route || now >= record.expiresAt) return false
  const status = statusOf(record.result)
  if (status < 200 || status > 299 || record.token.equals(NOBODY)) return false
  return whyUntold(policy, record, upstream) === null && (record.key !== null || !asksByKey(policy))
}
