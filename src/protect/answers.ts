import { retryAfterSeconds } from '../core/decide.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis, RecordId, State } from '../core/record.ts'
import { type RefusalCode, refusal } from '../core/refusal.ts'
import type { Budget } from '../runtime/limits.ts'
import { replayable } from './classify.ts'
import type { ClaimResult, RequestOutcome } from './outcomes.ts'
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

/** What answering needs of the walk's ports. */
export interface AnswerPorts {
  readonly observer: Observer
  readonly latency: Latency
  /** Room for bodies (`limits.buffered`): a replay takes some until it has left. */
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
  { route, statusLink }: ProtectedRequest,
  id: RecordId,
  existing: Existing,
): Answer {
  observer.claimed(route.name, CLAIM_RESULTS[existing.kind])
  if (existing.kind !== 'reused') observer.prevented(route.name)
  const state = stateFound(existing)
  const found = { before: state, after: state }
  switch (existing.kind) {
    case 'replay': {
      const { result, now, createdAt, expiresAt, span } = existing
      if (now > 0) observer.retryAge(route.name, Math.max(0, now - createdAt))
      const replay = { ...found, replayOf: span ?? null }
      if (!result.kept) {
        const { status, location, why } = result
        const detail = `the request was executed and answered ${status}; its response was not kept (${why})`
        const more = { instance: id, original: { status, location } }
        return refuse('response_unavailable', 'idempotency_response_unavailable', detail, more, replay)
      }
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
        facts: { ...replay, outcome: 'replayed' },
      }
    }
    case 'reused': {
      const detail = `this key was first used for another request: its ${comparedBy(route)} differs, or what else the route compares`
      const more = { status: route.misuseStatus, instance: id }
      return refuse('misuse', 'idempotency_key_reused', detail, more, found)
    }
    case 'in_progress': {
      const detail = 'a request with this key is still running; retry with the same key'
      const { status } = route.inFlight
      const retryAfter = retryAfterSeconds(latency.retryIn(route, existing.leaseLeft, existing.age))
      const more = { status, retryAfter, instance: id }
      const answer = refuse('in_progress', 'idempotency_key_in_progress', detail, more, found)
      return status === 202 ? { ...answer, proxyHeaders: statusLink } : answer
    }
    case 'unknown': {
      const checking = route.reconcile !== null
      const detail = checking
        ? 'whether the first request was executed is not known yet; retry with the same key, a new key is not safe'
        : 'whether the first request was executed is not known, and a person has to find out; a new key is not safe, the same key is'
      const more = { retryAfter: retryAfterSeconds(existing.lookIn), instance: id, checking }
      return refuse('unknown', 'idempotency_outcome_unknown', detail, more, found)
    }
    case 'expired': {
      const detail = 'the request with this key was executed; its response is no longer kept'
      return refuse('expired', 'idempotency_key_expired', detail, { instance: id }, found)
    }
  }
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

/** What is proven of a request that was sent, for its `detail`. */
export function sentUnanswered(timedOut: boolean): string {
  return `the request was sent, and ${timedOut ? 'no whole answer came in time' : 'its answer broke off'}`
}

/** An answer by the proxy itself. */
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

/** The client has gone. */
export function nobody(facts: Omit<Facts, 'outcome'> = {}): Answer {
  return { kind: 'none', facts: { ...facts, outcome: null } }
}

export function overloaded({ maxInFlight }: { readonly maxInFlight: number }): Answer {
  const detail = `${maxInFlight} protected requests are in flight, or this client has its share of them`
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

/** Lets go of an answer that nobody gets. */
export function discard(answer: Reply): void {
  if (answer.kind === 'response') answer.release()
  if (answer.kind === 'live') answer.live.drain()
}

export function statusOf(answer: Reply): number | null {
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

/** How many of a route's answers count: few, so that a change shows soon. */
const ANSWERS_COUNTED = 16
/** Most answers take no longer than this part of them. One very slow answer among a few does not make a route slow. */
const USUAL = 0.75

interface RecentAnswers {
  readonly took: Float64Array
  answers: number
}

/** How long the upstream takes, per route, from the first answer on: for `Retry-After` (contract §6). */
export class Latency {
  readonly #recent = new Map<string, RecentAnswers>()

  saw(route: string, took: Millis): void {
    let recent = this.#recent.get(route)
    if (recent === undefined) {
      recent = { took: new Float64Array(ANSWERS_COUNTED), answers: 0 }
      this.#recent.set(route, recent)
    }
    recent.took[recent.answers++ % ANSWERS_COUNTED] = took
  }

  /**
   * When to retry after meeting an attempt of that age: never later than its lease ends, nor than a whole lease from now,
   * whatever the store's clock did.
   */
  retryIn({ name, lease }: Pick<RoutePolicy, 'name' | 'lease'>, leaseLeft: Millis, age: Millis): Millis {
    return Math.min(leaseLeft, lease, this.remaining(name, age))
  }

  /** What an attempt of that age will still take; Infinity: unknown. */
  remaining(route: string, age: Millis): Millis {
    const recent = this.#recent.get(route)
    if (recent === undefined) return Number.POSITIVE_INFINITY
    const known = Math.min(recent.answers, ANSWERS_COUNTED)
    const usual = recent.took.slice(0, known).sort()[Math.ceil(known * USUAL) - 1] as Millis
    // Slower than usual: it may well take as long again.
    return age < usual ? usual - age : age
  }
}
