import { scopeOf } from '../core/chain.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { type Millis, type Outcome, shortId } from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import { shared } from '../runtime/limits.ts'
import type { Forwarded } from '../upstream/port.ts'
import { discard, refuse, sentUnanswered, statusHeaders } from './answers.ts'
import type { Execute, Unclaimed } from './claim.ts'
import { keepsBody, keptResult, outcomeOf, unknownBecause, withoutBody } from './classify.ts'
import type { Settled } from './outcome-writer.ts'
import type { Ports } from './ports.ts'
import type { Answer, Execution, ProtectedRequest, Trace } from './request.ts'

/** Writes an attempt's outcome, lets go of the attempt and tells the duplicates that wait for it. */
export async function finish(
  ports: Ports,
  execution: Execution,
  unclaimed: Unclaimed | null,
  outcome: Outcome,
  release: () => void,
): Promise<Settled> {
  const { id, attempt } = execution
  execution.ended = outcome
  ports.leases.release(id, attempt.token)
  let settled: Settled | null = null
  try {
    settled = await (unclaimed === null
      ? ports.settler.settle(execution, outcome, release)
      : ports.settler.settleUnclaimed(execution, outcome, release, unclaimed))
    return settled
  } finally {
    if (ports.running.get(id) === execution) ports.running.delete(id)
    ports.waiters.tell(id, settled?.record ?? null)
  }
}

/** Sends the request once and writes its outcome before the first byte of the answer leaves. */
export async function execute(
  ports: Ports,
  request: ProtectedRequest,
  trace: Trace,
  way: Execute,
  key: string,
  body: Buffer,
): Promise<Answer> {
  const { execution, askedAt, unclaimed } = way
  const { route, id, attempt } = execution
  const sentAt = performance.now()
  const isSure = ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, askedAt)
  const settle = async (outcome: Outcome, release = (): void => {}): Promise<Settled> => {
    const startedAt = performance.now()
    const settled = await finish(ports, execution, unclaimed, outcome, release)
    trace.storeMs += performance.now() - startedAt
    return settled
  }
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
    // A bug: what it proves is not known.
    await settle({ kind: 'unknown', reason: `internal error: ${String(error)}`, status: null })
    throw error
  }
  trace.upstreamMs = performance.now() - sentAt
  ports.observer.leaseUse(route.name, trace.upstreamMs / route.lease)
  switch (result.proof) {
    case 'not_sent':
      trace.after = (await settle({ kind: 'not_executed', reason: result.reason })).state
      return notSent(trace, result.reason, execution)
    case 'unknown':
      trace.after = (await settle({ kind: 'unknown', reason: result.reason, status: result.status })).state
      return brokenOff(trace, result, { instance: execution.id, scope: scopeTold(way) })
    case 'live': {
      const { live, why } = result
      trace.outcome = unclaimed === null ? 'executed' : 'bypassed'
      trace.after = 'in_progress'
      const leave = ports.inFlight.remain()
      void live.done
        .then((end) =>
          settle(
            end === 'complete'
              ? outcomeOf(route, request.headers, live, result.declaredOutcome, withoutBody(live, why))
              : unknownBecause('the upstream broke off its answer', live.status),
          ),
        )
        .finally(leave)
      return { kind: 'live', live, proxyHeaders: statusHeaders(trace.outcome, route, null) }
    }
    case 'responded': {
      const { response, declaredOutcome } = result
      ports.latency.saw(route.name, trace.upstreamMs)
      const outcome = outcomeOf(
        route,
        request.headers,
        response,
        declaredOutcome,
        keptResult(route, response),
      )
      // The body has up to two holders: the answer until it has left, the outcome that keeps it until it is written.
      const share = shared(result.release)
      const release = share()
      const settled = await settle(outcome, keepsBody(outcome) ? share() : undefined)
      trace.outcome = unclaimed === null ? 'executed' : 'bypassed'
      trace.after = settled.state
      const own = statusHeaders(trace.outcome, route, settled.expiresAt)
      return { kind: 'response', response, replayed: false, proxyHeaders: own, release }
    }
  }
}

/** The work's answer, or null where it takes longer: the work goes on, and its outcome is stored (contract §3). */
export async function within(
  ports: Ports,
  limit: Millis,
  execution: Execution,
  work: Promise<Answer>,
): Promise<Answer | null> {
  let timer: NodeJS.Timeout | undefined
  const slow = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, limit, null)
  })
  const first = await Promise.race([work, slow]).finally(() => clearTimeout(timer))
  if (first !== null) return first
  const leave = ports.inFlight.remain()
  const failed = (error: unknown): void =>
    ports.observer.trouble('internal error after the client was answered', {
      route: execution.route.name,
      record: shortId(execution.id),
      error: String(error),
    })
  void work.then(discard, failed).finally(leave)
  return null
}

/** A request whose body was read for a key that was not there: it goes on as one that is not protected (contract §3.1). */
export async function passOn(
  ports: Pick<Ports, 'forward'>,
  request: ProtectedRequest,
  trace: Trace,
  body: Buffer,
): Promise<Answer> {
  const { route } = request
  const sentAt = performance.now()
  const result = await ports.forward({
    method: request.method,
    target: request.target,
    headers: request.upstreamHeaders(null),
    body,
    responseLimit: route.limits.response,
  })
  trace.upstreamMs = performance.now() - sentAt
  trace.outcome = 'passed'
  const own = route.statusHeader ? [RESPONSE_HEADER.status, 'ignored'] : []
  switch (result.proof) {
    case 'not_sent':
      return notSent(trace, result.reason, null)
    case 'unknown':
      return brokenOff(trace, result, null)
    case 'live':
      return { kind: 'live', live: result.live, proxyHeaders: own }
    case 'responded': {
      const { response, release } = result
      return { kind: 'response', response, replayed: false, proxyHeaders: own, release }
    }
  }
}

function notSent(trace: Trace, reason: string, execution: Execution | null): Answer {
  trace.cause = reason
  const detail = 'no byte of the request was sent'
  return refuse(trace, 'upstream_unreachable', 'upstream_unreachable', detail, {
    instance: execution?.id ?? null,
  })
}

function brokenOff(
  trace: Trace,
  { reason, timedOut }: Extract<Forwarded, { proof: 'unknown' }>,
  record: Pick<Refusal, 'instance' | 'scope'> | null,
): Answer {
  trace.cause = reason
  const code = timedOut ? 'upstream_timeout' : 'upstream_failed'
  const what = sentUnanswered(timedOut)
  return record === null
    ? refuse(trace, code, code, `${what}; it carried no key: sent again, it may be executed again`, {
        retry: 'no',
      })
    : refuse(trace, code, code, `${what}; whether it was executed is not known`, record)
}

/** The `scope` of an execution without a claim: equals nobody's. */
export const UNCLAIMED_SCOPE = 'none'

/** For a proxy in front of this one: by what a retry is recognised here. Without a claim it may not be. */
export function scopeTold({ execution, unclaimed }: Execute): string {
  return unclaimed === null ? scopeOf(execution.route) : UNCLAIMED_SCOPE
}
