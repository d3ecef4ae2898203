import { canonicalJson } from '../body/json.ts'
import { jsonText } from '../body/json-pointer.ts'
import { NOBODY } from '../outcome.ts'
import type { ReconcilePolicy } from '../policy.ts'
import type { Completed, CompletedResponse, IdempotencyRecord, Millis } from '../record.ts'
import { statusOf } from '../settle.ts'
import { type AnswerMeaning, asksByKey, whyUntold } from './answer.ts'
import type { QuestionResult } from './schedule.ts'

/** What asking anew about a completed record showed. `why` is for people: pointers and statuses, nothing of a body. */
export type Verification =
  | { readonly kind: 'agrees' }
  /** Done, and as a success or a refusal as stored; but what it is now is not what retries are answered. */
  | { readonly kind: 'differs'; readonly why: string }
  /** Not done, done as something else, or another operation's. */
  | { readonly kind: 'disagrees'; readonly why: string }
  /** The answer decides nothing. */
  | { readonly kind: 'undecided'; readonly why: string }
  | { readonly kind: 'not_asked'; readonly why: string }

/**
 * Whether the upstream's answer is what the record says. Careful: a status is compared as a success (2xx) or none, since a
 * question is rarely answered with the status that the request was; a body only where both are JSON, as values.
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
        : { kind: 'differs', why: 'another value than the one that is stored' }
    }
  }
}

function isSuccess(status: number): boolean {
  return status >= 200 && status < 300
}

/** True where they cannot be compared, too. */
function sameValue(stored: CompletedResponse, found: CompletedResponse): boolean {
  const [was, is] = [valueOf(stored), valueOf(found)]
  return was === null || is === null || was === is
}

function valueOf(result: CompletedResponse): string | null {
  if (!result.kept) return null
  const { headers, body } = result.response
  const json = jsonText(headers, body)
  return json === null ? null : (canonicalJson(body)?.toString() ?? json)
}

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
export function proofOf(heard: readonly (QuestionResult | { readonly kind: 'unaskable' })[]): Proof {
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
