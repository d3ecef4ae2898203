import { retryAfterSeconds } from '../core/decide.ts'
import { RESPONSE_HEADER, statusHeaders } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { CompletedResponse, RecordId, State } from '../core/record.ts'
import { malformed, type Refusal, type RefusalCode, refusal } from '../core/refusal.ts'
import { replayable } from '../core/settle.ts'
import type { Budget, InFlight } from '../runtime/limits.ts'
import type { ClaimResult, RequestOutcome } from './outcomes.ts'
import type { Latency } from './recent.ts'
import type {
  Answer,
  BodyReading,
  Existing,
  Facts,
  Observer,
  Problem,
  ProtectedRequest,
  Reply,
} from './request.ts'

/** The ports that answering needs. */
export interface AnswerPorts {
  readonly observer: Observer
  readonly latency: Latency
  /** Room for bodies (`limits.buffered`): a replay holds some until it has been sent. */
  readonly budget: Budget
}

const CLAIM_RESULTS: Readonly<Record<Existing['kind'], ClaimResult>> = {
  replay: 'replay',
  reused: 'key_misuse',
  in_progress: 'in_progress',
  unknown: 'unknown',
  expired: 'replay',
}

/** Answers a request whose record exists (contract §6). */
export function answerFromRecord(
  { observer, budget, latency }: AnswerPorts,
  request: ProtectedRequest,
  id: RecordId,
  existing: Existing,
): Answer {
  const { route } = request
  observer.claimed(route.name, CLAIM_RESULTS[existing.kind])
  if (existing.kind !== 'reused') observer.prevented(route.name)
  const state = stateFound(existing)
  const found = { before: state, after: state }
  switch (existing.kind) {
    case 'replay': {
      const { result, now, createdAt, expiresAt, span } = existing
      if (now > 0) observer.retryAge(route.name, Math.max(0, now - createdAt))
      const replay = { ...found, replayOf: span ?? null }
      if (!result.kept) return responseUnavailable(id, result, replay)
      const release = budget.hold(result.response.body.length)
      if (release === null) {
        const detail = 'no room to send the stored answer now; nothing was executed'
        return refuse('overloaded', 'overloaded', detail, { retryAfter: 1, instance: id }, replay)
      }
      return {
        kind: 'response',
        response: replayable(route, result.response),
        replayed: true,
        proxyHeaders: [RESPONSE_HEADER.replayed, 'true', ...statusHeaders('replayed', route, expiresAt)],
        release,
        facts: { outcome: 'replayed', before: state, after: state, replayOf: replay.replayOf },
      }
    }
    case 'reused': {
      const { differing, byBytes } = existing
      const what =
        differing === null
          ? `its ${comparedBy(route)} differs, or something else that the route compares`
          : `its ${differing.join(' and ')} ${differing.length === 1 ? 'differs' : 'differ'}`
      // Other bytes may be the same request: a new key would execute it again.
      const how = byBytes
        ? '; bodies could only be compared as bytes, which may differ although they mean the same'
        : ''
      const detail = `this key was first used for another request: ${what}${how}`
      const more = {
        status: route.misuseStatus,
        instance: id,
        ...(byBytes ? ({ retry: 'no' } as const) : {}),
      }
      return refuse('misuse', 'idempotency_key_reused', detail, more, found)
    }
    case 'in_progress': {
      const detail = 'a request with this key is still running; retry with the same key'
      const { status } = route.inFlight
      const retryAfter = retryAfterSeconds(latency.retryIn(route, existing.leaseLeft, existing.age))
      const more = { status, retryAfter, instance: id }
      const answer = refuse('in_progress', 'idempotency_key_in_progress', detail, more, found)
      return status === 202 ? { ...answer, proxyHeaders: request.statusLink } : answer
    }
    case 'unknown': {
      const checking = route.reconcile !== null
      const detail = checking
        ? 'it is not known yet whether the first request was executed; retry with the same key: a new key is not safe'
        : 'it is not known whether the first request was executed, and an operator must find out. Keep retrying with the same key: a new key is not safe, and may execute the request twice'
      const more = { retryAfter: retryAfterSeconds(existing.checkIn), instance: id, checking }
      return refuse('unknown', 'idempotency_outcome_unknown', detail, more, found)
    }
    case 'expired': {
      const detail = 'the request with this key was executed; its response is no longer kept'
      return refuse('expired', 'idempotency_key_expired', detail, { instance: id }, found)
    }
  }
}

/** The request was executed, but its response is no longer available. */
export function responseUnavailable(
  id: RecordId,
  { status, location, why }: Extract<CompletedResponse, { kept: false }>,
  facts: Omit<Facts, 'outcome'>,
): Answer {
  const gone = why === 'past_ttl' ? 'is no longer kept' : `was not kept (${why})`
  const detail = `the request was executed and answered ${status}; its response ${gone}`
  const more = { instance: id, original: { status, location } }
  return refuse('response_unavailable', 'idempotency_response_unavailable', detail, more, facts)
}

/** The state of the record that answers. */
export function stateFound(existing: Existing): State {
  switch (existing.kind) {
    case 'replay':
      return 'completed'
    case 'reused':
      return existing.read
    case 'in_progress':
    case 'unknown':
    case 'expired':
      return existing.kind
  }
}

function comparedBy({ fingerprint: { body, query } }: RoutePolicy): string {
  const counted = [...(body === 'none' ? [] : ['body']), ...(query === 'ignore' ? [] : ['query'])]
  return counted.length === 0 ? 'media type' : `${counted.join(', ')} or media type`
}

/** The `detail` of a request of which nothing was done. `isRefused`: the upstream said so, after a part was sent. */
export function nothingDone(isRefused: boolean): string {
  return isRefused ? 'the upstream refused the request unprocessed' : 'no byte of the request was sent'
}

/** The `detail` of a request that was sent without a complete response. `refused`: why the response was not taken. */
export function sentUnanswered(timedOut: boolean, refused: string | null): string {
  const why = timedOut
    ? 'no complete response came in time'
    : (refused ?? 'the upstream closed the connection before a complete response')
  return `the request was sent, but ${why}`
}

/** An answer from the proxy itself. */
export function refuse(
  outcome: RequestOutcome,
  code: RefusalCode,
  detail: string,
  more: Parameters<typeof refusal>[2] = {},
  facts: Omit<Facts, 'outcome'> = {},
): Problem & { readonly facts: Facts } {
  return {
    kind: 'problem',
    refusal: refusal(code, detail, more),
    proxyHeaders: [],
    facts: { ...facts, outcome },
  }
}

/** A call with a stream, on a route that requires a key. */
export function streamRefused(): Refusal {
  return malformed(501, 'a stream cannot be made safe to retry, and this route requires a key')
}

/** The answer to a client that has left. */
export function nobody(facts: Omit<Facts, 'outcome'> = {}): Answer {
  return { kind: 'none', facts: { ...facts, outcome: null } }
}

export function overloaded({ inFlight }: { readonly inFlight: InFlight }): Answer {
  const detail = `${inFlight.most} protected requests are in flight, or this client has used up its share`
  return refuse('overloaded', 'overloaded', detail, { retryAfter: 1 })
}

export function storeUnavailable(
  { observer }: Pick<AnswerPorts, 'observer'>,
  { route }: Pick<ProtectedRequest, 'route'>,
  id: RecordId | null,
  detail: string,
  cause: string | null = null,
): Answer {
  observer.claimed(route.name, 'error')
  const more = { retryAfter: 1, instance: id }
  return refuse('store_unavailable', 'idempotency_store_unavailable', detail, more, { cause })
}

export function refuseBody({ route }: ProtectedRequest, why: Exclude<BodyReading['kind'], 'body'>): Answer {
  switch (why) {
    case 'too_large': {
      const detail = `the body is over ${route.limits.request} bytes, the limit of route ${route.name}`
      return refuse('request_too_large', 'request_too_large', detail)
    }
    case 'timeout': {
      const detail = 'the body did not arrive in time; nothing was executed'
      return refuse('request_timeout', 'request_timeout', detail)
    }
    case 'no_room': {
      const detail = 'no room to buffer the body; nothing was executed'
      return refuse('overloaded', 'overloaded', detail, { retryAfter: 1 })
    }
    case 'aborted':
      return nobody()
  }
}

/** Releases an answer that nobody receives. */
export function discard(answer: Reply): void {
  if (answer.kind === 'response') answer.release()
  if (answer.kind === 'live') answer.live.drain()
}
