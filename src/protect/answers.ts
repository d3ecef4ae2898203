import { retryAfterSeconds } from '../core/decide.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { RecordId } from '../core/record.ts'
import { type RefusalCode, refusal } from '../core/refusal.ts'
import type { Budget } from '../runtime/limits.ts'
import type { Existing } from './claim.ts'
import { replayable } from './classify.ts'
import type { Latency } from './latency.ts'
import type { RequestOutcome } from './outcomes.ts'
import type { Answer, BodyReading, Observer, Problem, ProtectedRequest, Trace } from './request.ts'

/** What answering needs of the walk's ports. */
export interface AnswerPorts {
  readonly observer: Observer
  readonly latency: Latency
  /** Room for bodies (`limits.buffered`): a replay takes some until it has left. */
  readonly budget: Budget
}

/** Answers a request whose record was found (contract §6). */
export function answerFromRecord(
  ports: AnswerPorts,
  request: ProtectedRequest,
  trace: Trace,
  id: RecordId,
  existing: Existing,
): Answer {
  const { route } = request
  const { observer } = ports
  switch (existing.kind) {
    case 'replay': {
      observer.claimed(route.name, 'replay')
      observer.prevented(route.name)
      if (existing.now > 0) observer.retryAge(route.name, Math.max(0, existing.now - existing.createdAt))
      trace.before = trace.after = 'completed'
      trace.execution = existing.span ?? null
      if (!existing.result.kept) {
        const { status, location } = existing.result
        const detail = `the request was executed and answered ${status}; its response was not kept (${existing.result.why})`
        return refuse(trace, 'response_unavailable', 'idempotency_response_unavailable', detail, {
          instance: id,
          original: { status, location },
        })
      }
      const release = ports.budget.hold(existing.result.response.body.length)
      if (release === null) {
        const detail = 'no room to send the stored answer now; nothing was executed'
        return refuse(trace, 'overloaded', 'overloaded', detail, { retryAfter: 1, instance: id })
      }
      trace.outcome = 'replayed'
      return {
        kind: 'response',
        response: replayable(route, existing.result.response),
        replayed: true,
        proxyHeaders: [
          RESPONSE_HEADER.replayed,
          'true',
          ...statusHeaders('replayed', route, existing.expiresAt),
        ],
        release,
      }
    }
    case 'reused':
      observer.claimed(route.name, 'key_misuse')
      trace.before = trace.after = existing.read
      return refuse(
        trace,
        'misuse',
        'idempotency_key_reused',
        `this key was first used for another request: its ${comparedBy(route)} differs, or what else the route compares`,
        { status: route.misuseStatus, instance: id },
      )
    case 'in_progress': {
      observer.claimed(route.name, 'in_progress')
      observer.prevented(route.name)
      trace.before = trace.after = 'in_progress'
      const detail = 'a request with this key is still running; retry with the same key'
      const { status } = route.inFlight
      const answer = refuse(trace, 'in_progress', 'idempotency_key_in_progress', detail, {
        status,
        retryAfter: retryAfterSeconds(ports.latency.retryIn(route, existing.leaseLeft, existing.age)),
        instance: id,
      })
      return status === 202 ? { ...answer, proxyHeaders: request.statusLink } : answer
    }
    case 'unknown': {
      observer.claimed(route.name, 'unknown')
      observer.prevented(route.name)
      trace.before = trace.after = 'unknown'
      const checking = route.reconcile !== null
      const detail = checking
        ? 'whether the first request was executed is not known yet; retry with the same key, a new key is not safe'
        : 'whether the first request was executed is not known, and a person has to find out; a new key is not safe, the same key is'
      return refuse(trace, 'unknown', 'idempotency_outcome_unknown', detail, {
        retryAfter: retryAfterSeconds(existing.lookIn),
        instance: id,
        checking,
      })
    }
    case 'expired':
      observer.claimed(route.name, 'replay')
      observer.prevented(route.name)
      trace.before = trace.after = 'expired'
      return refuse(
        trace,
        'expired',
        'idempotency_key_expired',
        'the request with this key was executed; its response is no longer kept',
        { instance: id },
      )
  }
}

function comparedBy({ fingerprint: { body, query } }: RoutePolicy): string {
  const counted = [...(body === 'none' ? [] : ['body']), ...(query === 'ignore' ? [] : ['query'])]
  return counted.length === 0 ? 'media type' : `${counted.join(', ')} or media type`
}

export function statusHeaders(
  status: RequestOutcome,
  route: RoutePolicy,
  expiresAt: number | null,
): string[] {
  if (!route.statusHeader) return []
  const lines: string[] = [RESPONSE_HEADER.status, status]
  if (expiresAt !== null && Number.isFinite(expiresAt))
    lines.push(RESPONSE_HEADER.expires, new Date(expiresAt).toISOString())
  return lines
}

/** What is proved of a request that was sent, for its `detail`. */
export function sentUnanswered(timedOut: boolean): string {
  return `the request was sent, and ${timedOut ? 'no whole answer came in time' : 'its answer broke off'}`
}

export function refuse(
  trace: Trace,
  outcome: RequestOutcome,
  code: RefusalCode,
  detail: string,
  more: Parameters<typeof refusal>[2] = {},
): Problem {
  trace.outcome = outcome
  return { kind: 'problem', refusal: refusal(code, detail, more), proxyHeaders: [] }
}

export function overloaded({ maxInFlight }: { readonly maxInFlight: number }, trace: Trace): Problem {
  const detail = `${maxInFlight} protected requests are in flight, or this client has its share of them`
  return refuse(trace, 'overloaded', 'overloaded', detail, { retryAfter: 1 })
}

export function storeUnavailable(
  ports: Pick<AnswerPorts, 'observer'>,
  trace: Trace,
  id: RecordId | null,
  detail: string,
): Answer {
  ports.observer.claimed(trace.route, 'error')
  return refuse(trace, 'store_unavailable', 'idempotency_store_unavailable', detail, {
    retryAfter: 1,
    instance: id,
  })
}

export function refuseBody(
  trace: Trace,
  request: ProtectedRequest,
  why: Exclude<BodyReading['kind'], 'body'>,
): Answer {
  switch (why) {
    case 'too_large':
      return refuse(
        trace,
        'request_too_large',
        'request_too_large',
        `the body is over ${request.route.limits.request} bytes, the limit of route ${request.route.name}`,
      )
    case 'timeout':
      return refuse(
        trace,
        'request_timeout',
        'request_timeout',
        'the body did not arrive in time; nothing was executed',
      )
    case 'no_room':
      return refuse(trace, 'overloaded', 'overloaded', 'no room to buffer the body; nothing was executed', {
        retryAfter: 1,
      })
    case 'aborted':
      return { kind: 'none' }
  }
}

/** Lets go of an answer that nobody gets. */
export function discard(answer: Answer): void {
  if (answer.kind === 'response') answer.release()
  if (answer.kind === 'live') answer.live.drain()
}

export function statusOf(answer: Answer): number | null {
  switch (answer.kind) {
    case 'response':
      return answer.response.status
    case 'live':
      return answer.live.status
    case 'problem':
      return answer.refusal.status
    case 'none':
      return null
  }
}
