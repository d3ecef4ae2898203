import { lookUp } from '../core/body/json-lookup.ts'
import { pointersInto } from '../core/classify.ts'
import { isEncoded } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { CompletedResponse, Outcome } from '../core/record.ts'
import { type AnsweredHead, outcomeOf, type SentRequest } from '../core/settle.ts'
import { readableBody } from '../runtime/coding.ts'
import { inSteps, type MaybePromise } from '../runtime/scheduling.ts'

/**
 * {@link outcomeOf} for a complete answer. If the route's `outcomes` look into the body, or it is that of a call, it is decoded first. A
 * body that was not kept, decodes to more than `limits.response` bytes or is not JSON matches no condition.
 */
export function meaningOf(
  route: RoutePolicy,
  sent: SentRequest,
  answer: AnsweredHead,
  declaredOutcome: string | null,
  result: CompletedResponse,
): MaybePromise<Outcome> {
  const { status, headers, body } = answer
  const pointers = body === undefined ? [] : pointersInto(route, status)
  const isCall = isEncoded(headers) && sent.protocol !== null
  if (body === undefined || (pointers.length === 0 && !isCall))
    return outcomeOf(route, sent, answer, declaredOutcome, result)
  return readableBody(headers, body, route.limits.response).then(async (readable) => {
    const json = await inSteps(lookUp(readable.headers, readable.body, pointers))
    return outcomeOf(route, sent, { ...answer, ...readable }, declaredOutcome, result, json)
  })
}
