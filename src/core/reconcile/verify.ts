import { canonicalJson } from '../body/json.ts'
import { lookUp } from '../body/json-lookup.ts'
import { isSuccess } from '../classify.ts'
import type { ReconcilePolicy } from '../policy.ts'
import type { Completed, CompletedResponse, IdempotencyRecord, Millis } from '../record.ts'
import { NOBODY, statusOf } from '../settle.ts'
import { atOnce } from '../steps.ts'
import { type AnswerMeaning, asksByKey, whyUnproven } from './answer.ts'
import type { StatusQueryResult } from './schedule.ts'

/** The result of asking again about a completed record. `why`, for people, quotes no body. */
export type Verification =
  | { readonly kind: 'agrees' }
  /** Done, with success or refusal as stored, but the stored value differs. */
  | { readonly kind: 'differs'; readonly why: string }
  /** Not done, done as something else, or another operation's. */
  | { readonly kind: 'disagrees'; readonly why: string }
  /** The answer is inconclusive. */
  | { readonly kind: 'undecided'; readonly why: string }
  | { readonly kind: 'not_asked'; readonly why: string }

/**
 * Whether the upstream's answer agrees with the record. Statuses are compared as success (2xx) or not, since a status query rarely
 * gets the request's own status; bodies only if both are JSON, as values.
 */
export function verifyStored(stored: CompletedResponse, verdict: AnswerMeaning): Verification {
  switch (verdict.kind) {
    case 'not_found':
      return { kind: 'disagrees', why: 'the upstream does not know of it' }
    case 'mismatch':
      return { kind: 'disagrees', why: verdict.why }
    case 'pending':
    case 'unusable':
      return { kind: 'undecided', why: verdict.why }
    case 'completed': {
      const [was, is] = [statusOf(stored), statusOf(verdict.result)]
      if (isSuccess(was) !== isSuccess(is))
        return { kind: 'disagrees', why: `status ${is} where ${was} is stored` }
      return sameValue(stored, verdict.result)
        ? { kind: 'agrees' }
        : { kind: 'differs', why: 'a different value from the stored one' }
    }
  }
}

/** True also if they cannot be compared. */
function sameValue(stored: CompletedResponse, found: CompletedResponse): boolean {
  const [was, is] = [valueOf(stored), valueOf(found)]
  return was === null || is === null || was === is
}

function valueOf(result: CompletedResponse): string | null {
  if (!result.kept) return null
  const { headers, body } = result.response
  const json = atOnce(lookUp(headers, body, []))
  return json === null ? null : (canonicalJson(body)?.toString() ?? json.text)
}

/** Whether a status query finds requests that the upstream is known to have done. */
export type Proof =
  | { readonly kind: 'proven' }
  /** It finds none: a mistyped path, insufficient credentials, or an upstream that forgets. */
  | { readonly kind: 'refuted' }
  /** Unknown for now. */
  | { readonly kind: 'unanswered'; readonly why: string }
  /** There is no known request to find, or the answers are inconclusive. */
  | { readonly kind: 'untested' }

/** `results` of status queries about records known to be done. One found is enough: upstreams forget others. */
export function proofOf(results: readonly (StatusQueryResult | { readonly kind: 'unaskable' })[]): Proof {
  if (results.some(({ kind }) => kind === 'completed')) return { kind: 'proven' }
  if (results.some(({ kind }) => kind === 'not_found')) return { kind: 'refuted' }
  for (const one of results)
    if (one.kind === 'not_sent' || one.kind === 'unusable') return { kind: 'unanswered', why: one.why }
  return { kind: 'untested' }
}

/**
 * Whether the upstream must know of the record: it answered the request with a success, and received the identifiers of the query.
 * Refusals need not be remembered anywhere, and a request resolved by a person may never have been done.
 */
export function isKnownUpstream(
  record: IdempotencyRecord | null,
  route: string,
  policy: ReconcilePolicy,
  now: Millis,
  upstream: string,
): record is Completed {
  if (record?.state !== 'completed' || record.route !== route || now >= record.expiresAt) return false
  if (!isSuccess(statusOf(record.result)) || record.token.equals(NOBODY)) return false
  return whyUnproven(policy, record, upstream) === null && (record.key !== null || !asksByKey(policy))
}
