import { scopeOf } from '../core/chain.ts'
import { keepsBody, keptResult, outcomeOf, replayable, unknownBecause } from '../core/classify.ts'
import { RESPONSE_HEADER, statusHeaders } from '../core/headers.ts'
import { shortId } from '../core/identity.ts'
import {
  type CompletedResponse,
  type Millis,
  type Outcome,
  type RecordId,
  withoutBody,
} from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import { heldRecord, type OutcomeDraft } from '../core/settle.ts'
import { free } from '../runtime/body-memory.ts'
import { shared } from '../runtime/limits.ts'
import { type Soon, within } from '../runtime/scheduling.ts'
import type { Forwarded, UpstreamRequest } from '../upstream/port.ts'
import { discard, refuse, responseUnavailable, sentUnanswered } from './answers.ts'
import type { Ports } from './ports.ts'
import type { Answer, Execution, Facts, Progress, ProtectedRequest } from './request.ts'
import type { Settled } from './settler.ts'

/** Writes an attempt's outcome, releases the attempt and notifies the duplicates that wait for it. */
export function finish(
  { leases, settler, running, waiters }: Pick<Ports, 'leases' | 'settler' | 'running' | 'waiters'>,
  progress: Progress,
  execution: Execution,
  outcome: Outcome,
  release: () => void,
): Soon<Settled> {
  const { id, attempt } = execution
  execution.ended = outcome
  leases.release(id, attempt.token)
  const startedAt = performance.now()
  const over = (left: OutcomeDraft | null, expiresAt: Millis | null): void => {
    progress.storeMs += performance.now() - startedAt
    if (running.get(id) === execution) running.delete(id)
    if (!waiters.awaited.has(id)) return
    execution.isMet = true
    waiters.tell(id, left && heldRecord(left, expiresAt))
  }
  const done = (settled: Settled): Settled => {
    progress.state = settled.state
    over(settled.left, settled.expiresAt)
    return settled
  }
  const settling = settler.settle(execution, outcome, release)
  if (!(settling instanceof Promise)) return done(settling)
  return settling.then(done, (bug: unknown) => {
    over(null, null)
    throw bug
  })
}

/** Sends the request once and writes its outcome before the first byte of the answer leaves. */
export async function execute(
  ports: Ports,
  request: ProtectedRequest,
  execution: Execution,
  key: string,
  body: Buffer,
): Promise<Answer> {
  const { route, id, attempt, before, unclaimed } = execution
  const { progress } = request
  const fence = attempt.fence || null
  const isSure = ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, execution.askedAt)
  const sentAt = performance.now()
  let result: Forwarded
  try {
    const { method, target } = request
    const headers = request.upstreamHeaders({ id, key, fence: attempt.fence })
    const sent = { method, target, headers, responseLimit: route.limits.response, ...lent(progress, body) }
    // Without a claim there is no lease to lapse.
    result = await ports.forward(unclaimed === null ? { ...sent, mayBegin: isSure } : sent)
  } catch (error) {
    // A bug: what the upstream did is unknown.
    const outcome = unknownBecause(`internal error: ${String(error)}`, null)
    await finish(ports, progress, execution, outcome, NOTHING_HELD)
    throw error
  }
  // The body is not needed to write the outcome.
  if (!progress.isBodyOut) free(body)
  const upstreamMs = performance.now() - sentAt
  progress.upstreamMs += upstreamMs
  ports.observer.leaseUse(route.name, upstreamMs / route.lease)
  const outcome = unclaimed === null ? 'executed' : 'bypassed'
  switch (result.proof) {
    case 'not_sent': {
      const { reason } = result
      const ended = { kind: 'not_executed', reason } as const
      const { state } = await finish(ports, progress, execution, ended, NOTHING_HELD)
      return notSent(reason, id, { before, after: state, fence })
    }
    case 'unknown': {
      const ended = unknownBecause(result.reason, result.status)
      const { state, recorded, expiresAt } = await finish(ports, progress, execution, ended, NOTHING_HELD)
      // The upstream had ended the attempt itself before it fell silent.
      if (recorded !== null) return recordedAnswer(ports, execution, recorded, expiresAt, result.reason)
      const record = { instance: id, scope: scopeTold(execution) }
      return brokenOff(result, record, { before, after: state, fence })
    }
    case 'live': {
      const { live, why, declaredOutcome } = result
      const leave = ports.inFlight.remain()
      void live.done
        .then((end) => {
          const ended =
            end === 'complete'
              ? outcomeOf(route, request.headers, live, declaredOutcome, withoutBody(live, why))
              : unknownBecause('the upstream broke off its answer', live.status)
          return finish(ports, progress, execution, ended, NOTHING_HELD)
        })
        .finally(leave)
      const facts: Facts = { outcome, before, after: 'in_progress', fence }
      return { kind: 'live', live, proxyHeaders: statusHeaders(outcome, route, null), facts }
    }
    case 'responded': {
      const { response, declaredOutcome } = result
      ports.latency.saw(route.name, upstreamMs)
      const kept = keptResult(route, response)
      const ended = outcomeOf(route, request.headers, response, declaredOutcome, kept)
      let isStored = false
      // Up to two holders: the answer until it is sent, and the outcome until it is written.
      const share = shared(() => {
        result.release()
        // A held outcome may have answered retries.
        if (isStored && !execution.isMet) free(response.body)
      })
      const release = share()
      const held = keepsBody(ended) ? share() : NOTHING_HELD
      const settling = finish(ports, progress, execution, ended, held)
      const { state, expiresAt, recorded } = settling instanceof Promise ? await settling : settling
      isStored = expiresAt !== null
      // If the response is not kept, the one that just arrived is the only copy, provided it matches.
      if (recorded !== null && (recorded.kept || recorded.status !== response.status)) {
        release()
        return recordedAnswer(ports, execution, recorded, expiresAt)
      }
      const proxyHeaders = statusHeaders(outcome, route, expiresAt)
      const facts: Facts = { outcome, before, after: state, fence }
      return { kind: 'response', response, replayed: false, proxyHeaders, release, facts }
    }
  }
}

/** Answers with the recorded response, like every later answer (contract §7). `cause`: why there is no other. */
function recordedAnswer(
  { budget }: Pick<Ports, 'budget'>,
  { id, route, attempt: { fence }, before }: Execution,
  recorded: CompletedResponse,
  expiresAt: Millis | null,
  cause: string | null = null,
): Answer {
  const facts = { before, after: 'completed', fence, cause } as const
  if (!recorded.kept) return responseUnavailable(id, recorded, facts)
  return {
    kind: 'response',
    response: replayable(route, recorded.response),
    replayed: false,
    proxyHeaders: statusHeaders('executed', route, expiresAt),
    // An executed request is never answered `overloaded` (contract §3).
    release: budget.hold(recorded.response.body.length) ?? NOTHING_HELD,
    facts: { ...facts, outcome: 'executed' },
  }
}

export const NOTHING_HELD = (): void => {}

/** Answers within `respondWithin` at the latest; the execution continues, and its outcome is stored (contract §3). */
export async function answerInTime(
  ports: Ports,
  execution: Execution,
  work: Promise<Answer>,
): Promise<Answer> {
  const { route, id, before, attempt } = execution
  const limit = route.respondWithin as Millis
  const answer = await within(limit, work)
  if (answer !== null) return answer
  const leave = ports.inFlight.remain()
  const failed = (error: unknown): void =>
    ports.observer.trouble('internal error after the client was answered', {
      route: route.name,
      record: shortId(id),
      error: String(error),
    })
  void work.then(discard, failed).finally(leave)
  const detail = `no answer within ${limit} ms; the upstream is still working, retry with the same key`
  const more = { instance: id, scope: scopeTold(execution) }
  const facts: Omit<Facts, 'outcome'> = { before, after: 'in_progress', fence: attempt.fence || null }
  return refuse('upstream_slow', 'upstream_slow', detail, more, facts)
}

/** Forwards, unprotected, a request whose body holds no key (contract §3.1). */
export async function passOn(
  { forward }: Pick<Ports, 'forward'>,
  request: ProtectedRequest,
  body: Buffer,
): Promise<Answer> {
  const { route, progress } = request
  const sentAt = performance.now()
  const result = await forward({
    method: request.method,
    target: request.target,
    headers: request.upstreamHeaders(null),
    responseLimit: route.limits.response,
    ...lent(progress, body),
  })
  progress.upstreamMs += performance.now() - sentAt
  const proxyHeaders = route.statusHeader ? [RESPONSE_HEADER.status, 'ignored'] : []
  const facts: Facts = { outcome: 'passed' }
  switch (result.proof) {
    case 'not_sent':
      return notSent(result.reason, null, {})
    case 'unknown':
      return brokenOff(result, null, {})
    case 'live':
      return { kind: 'live', live: result.live, proxyHeaders, facts }
    case 'responded': {
      const { response, release } = result
      return { kind: 'response', response, replayed: false, proxyHeaders, release, facts }
    }
  }
}

/** The body to send; from here on `progress` says whether a socket may hold it. */
function lent(progress: Progress, body: Buffer): Pick<UpstreamRequest, 'body' | 'onTaken'> {
  progress.isBodyOut = true
  return {
    body,
    onTaken: () => {
      progress.isBodyOut = false
    },
  }
}

function notSent(cause: string, id: RecordId | null, facts: Omit<Facts, 'outcome'>): Answer {
  const detail = 'no byte of the request was sent'
  const all = { ...facts, cause }
  return refuse('upstream_unreachable', 'upstream_unreachable', detail, { instance: id }, all)
}

function brokenOff(
  { reason, timedOut }: Extract<Forwarded, { proof: 'unknown' }>,
  record: Pick<Refusal, 'instance' | 'scope'> | null,
  facts: Omit<Facts, 'outcome'>,
): Answer {
  const code = timedOut ? 'upstream_timeout' : 'upstream_failed'
  const detail = sentUnanswered(timedOut)
  const all = { ...facts, cause: reason }
  return record === null
    ? refuse(
        code,
        code,
        `${detail}; it carried no key, so a retry may execute it again`,
        { retry: 'no' },
        all,
      )
    : refuse(code, code, `${detail}; whether it was executed is not known`, record, all)
}

/** The `scope` of an execution without a claim; it equals no other. */
export const UNCLAIMED_SCOPE = 'none'

/** Tells a proxy in front of this one how this one recognises a retry. Without a claim it may not. */
function scopeTold({ route, unclaimed }: Execution): string {
  return unclaimed === null ? scopeOf(route) : UNCLAIMED_SCOPE
}
