import { scopeOf } from '../core/chain.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { type Millis, type Outcome, type RecordId, shortId } from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import { within } from '../runtime/deadline.ts'
import { shared } from '../runtime/limits.ts'
import type { Forwarded } from '../upstream/port.ts'
import { discard, refuse, sentUnanswered, statusHeaders } from './answers.ts'
import { keepsBody, keptResult, outcomeOf, unknownBecause, withoutBody } from './classify.ts'
import type { Ports } from './ports.ts'
import type { Answer, Execution, Facts, ProtectedRequest } from './request.ts'
import type { Settled } from './settler.ts'

/** Writes an attempt's outcome, lets go of the attempt and tells the duplicates that wait for it. */
export async function finish(
  { leases, settler, running, waiters }: Pick<Ports, 'leases' | 'settler' | 'running' | 'waiters'>,
  execution: Execution,
  outcome: Outcome,
  release: () => void,
): Promise<Settled> {
  const { id, attempt } = execution
  execution.ended = outcome
  leases.release(id, attempt.token)
  let settled: Settled | null = null
  try {
    settled = await settler.settle(execution, outcome, release)
    return settled
  } finally {
    if (running.get(id) === execution) running.delete(id)
    waiters.tell(id, settled?.record ?? null)
  }
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
  const settle = (outcome: Outcome, release = (): void => {}): Promise<Settled> => {
    const startedAt = performance.now()
    return finish(ports, execution, outcome, release).finally(() => {
      progress.storeMs += performance.now() - startedAt
    })
  }
  const sentAt = performance.now()
  let result: Forwarded
  try {
    result = await ports.forward({
      method: request.method,
      target: request.target,
      headers: request.upstreamHeaders({ id, key, fence: attempt.fence }),
      body,
      responseLimit: route.limits.response,
      // Without a claim there is no lease that could have lapsed.
      ...(unclaimed === null ? { mayBegin: isSure } : {}),
    })
  } catch (error) {
    // A bug; what happened at the upstream is not known.
    await settle({ kind: 'unknown', reason: `internal error: ${String(error)}`, status: null })
    throw error
  }
  const upstreamMs = performance.now() - sentAt
  progress.upstreamMs += upstreamMs
  ports.observer.leaseUse(route.name, upstreamMs / route.lease)
  const outcome = unclaimed === null ? 'executed' : 'bypassed'
  switch (result.proof) {
    case 'not_sent': {
      const { state } = await settle({ kind: 'not_executed', reason: result.reason })
      return notSent(result.reason, id, { before, after: state, fence })
    }
    case 'unknown': {
      const { state } = await settle(unknownBecause(result.reason, result.status))
      const record = { instance: id, scope: scopeTold(execution) }
      return brokenOff(result, record, { before, after: state, fence })
    }
    case 'live': {
      const { live, why, declaredOutcome } = result
      const leave = ports.inFlight.remain()
      void live.done
        .then((end) =>
          settle(
            end === 'complete'
              ? outcomeOf(route, request.headers, live, declaredOutcome, withoutBody(live, why))
              : unknownBecause('the upstream broke off its answer', live.status),
          ),
        )
        .finally(leave)
      const facts: Facts = { outcome, before, after: 'in_progress', fence }
      return { kind: 'live', live, proxyHeaders: statusHeaders(outcome, route, null), facts }
    }
    case 'responded': {
      const { response, declaredOutcome } = result
      ports.latency.saw(route.name, upstreamMs)
      const kept = keptResult(route, response)
      const ended = outcomeOf(route, request.headers, response, declaredOutcome, kept)
      // The body has up to two holders: the answer until it has left, the outcome that keeps it until it is written.
      const share = shared(result.release)
      const release = share()
      const { state, expiresAt } = await settle(ended, keepsBody(ended) ? share() : undefined)
      const proxyHeaders = statusHeaders(outcome, route, expiresAt)
      const facts: Facts = { outcome, before, after: state, fence }
      return { kind: 'response', response, replayed: false, proxyHeaders, release, facts }
    }
  }
}

/** Answers after `respondWithin` at the latest: the execution goes on, and its outcome is stored (contract §3). */
export async function answerInTime(
  ports: Ports,
  execution: Execution,
  limit: Millis,
  work: Promise<Answer>,
): Promise<Answer> {
  const { route, id, before, attempt } = execution
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

/** A request whose body was read in search of a key that was not there: forwarded as an unprotected one (contract §3.1). */
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
    body,
    responseLimit: route.limits.response,
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
  const what = sentUnanswered(timedOut)
  const all = { ...facts, cause: reason }
  return record === null
    ? refuse(
        code,
        code,
        `${what}; it carried no key: sent again, it may be executed again`,
        { retry: 'no' },
        all,
      )
    : refuse(code, code, `${what}; whether it was executed is not known`, record, all)
}

/** The `scope` of an execution without a claim: equal to nobody's. */
export const UNCLAIMED_SCOPE = 'none'

/** For a proxy in front of this one: by what a retry is recognised here. Without a claim it may not be. */
function scopeTold({ route, unclaimed }: Execution): string {
  return unclaimed === null ? scopeOf(route) : UNCLAIMED_SCOPE
}
