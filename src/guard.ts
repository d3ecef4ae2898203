import { shared } from './core/budget.ts'
import type { Asked } from './core/decide.ts'
import { fingerprintOf, rawDigestOf, recipeOf } from './core/fingerprint.ts'
import { readCaller, recordId } from './core/identity.ts'
import { readKey } from './core/key.ts'
import type { RoutePolicy } from './core/policy.ts'
import { type Millis, type Operation, type Outcome, type RecordId, shortId } from './core/record.ts'
import {
  answerMet,
  discard,
  marks,
  refuse,
  refuseBody,
  statusOf,
  storeUnavailable,
  type Teller,
} from './guard/answers.ts'
import { type Answer, type Call, newTrace, type Run, type Trace } from './guard/call.ts'
import { claim, giveBack, type Met, met, notAsked, type Unclaimed } from './guard/claim.ts'
import type { Leases } from './guard/leases.ts'
import {
  keepsBody,
  keptResult,
  outcomeOf,
  runningRecord,
  unknownBecause,
  withoutBody,
} from './guard/outcome.ts'
import type { Settled, Settler } from './guard/settler.ts'
import type { Records } from './store/records.ts'
import type { Forward, Forwarded } from './upstream/port.ts'

/** What the walk needs of the world. */
export interface Ports extends Teller {
  readonly records: Records
  readonly forward: Forward
  readonly leases: Leases
  readonly settler: Settler
  /** Attempts under way; the drain waits for them. */
  readonly running: Map<RecordId, Run>
  /** Key of the record ids, where `store.secretFile` is set. */
  readonly secret: Buffer | null
  /** The store may drop unexpired records and nobody accepted that risk: `strict` routes refuse (contract §9). */
  readonly unfitForStrict: () => boolean
  readonly pause: (time: Millis) => Promise<unknown>
  /** 16 random bytes. */
  readonly newToken: () => Buffer
  readonly maxInFlight: number
  /** Requests of the walk now, whatever they wait for. */
  readonly inFlight: { count: number }
}

/** Everything that happens to a protected request: claim → forward → settle (contract §3). */
export async function guard(ports: Ports, call: Call): Promise<Answer> {
  const trace = newTrace(call.route.name, call.traceId)
  ports.inFlight.count++
  let answer: Answer
  try {
    answer = await walk(ports, call, trace)
  } catch (error) {
    // A bug; nobody is answered, and the request is told of all the same.
    ports.observer.answered(trace)
    throw error
  } finally {
    ports.inFlight.count--
  }
  trace.status = statusOf(answer)
  ports.observer.answered(trace)
  return answer
}

async function walk(ports: Ports, call: Call, trace: Trace): Promise<Answer> {
  const { route } = call
  const reading = readKey(call.headers, route.key)
  if (reading.kind === 'missing')
    return refuse(
      trace,
      'key_missing',
      'idempotency_key_missing',
      `send one of: ${route.key.from.join(', ')}`,
    )
  if (reading.kind === 'invalid')
    return refuse(trace, 'key_invalid', 'idempotency_key_invalid', reading.detail)
  const caller = readCaller(call.headers, route.scope)
  if (caller.kind === 'missing')
    return refuse(trace, 'caller_missing', 'idempotency_caller_missing', caller.detail, {
      status: caller.status,
    })
  if (ports.inFlight.count > ports.maxInFlight)
    return refuse(
      trace,
      'overloaded',
      'overloaded',
      `more than ${ports.maxInFlight} protected requests are in flight`,
      {
        retryAfter: 1,
      },
    )

  const received = await call.readBody()
  if (received.kind !== 'body') return refuseBody(trace, call, received.kind)
  const { body, release } = received
  const admitted = await admit(ports, call, trace, caller.parts, reading.key, body).catch(
    (error: unknown) => {
      release()
      throw error
    },
  )
  if (admitted.kind !== 'execute') {
    release()
    return admitted
  }
  const { run, unclaimed } = admitted
  trace.fence = run.attempt.fence || null
  const own = { ...trace }
  const work = execute(ports, call, own, run, reading.key, body, unclaimed).finally(release)
  const answer =
    route.respondWithin === null ? await work : await within(ports, route.respondWithin, run, work)
  if (answer !== null) {
    Object.assign(trace, own)
    return answer
  }
  trace.after = 'in_progress'
  const detail = `no answer within ${route.respondWithin} ms; the upstream is still working, retry with the same key`
  return refuse(trace, 'upstream_slow', 'upstream_slow', detail, { instance: run.id })
}

/** `unclaimed`: why there is no claim, where the route goes on without one. */
type Admitted = Answer | { readonly kind: 'execute'; readonly run: Run; readonly unclaimed: Unclaimed | null }

/** Claims, or says why not. */
async function admit(
  ports: Ports,
  call: Call,
  trace: Trace,
  caller: readonly (string | null)[],
  key: string,
  body: Buffer,
): Promise<Admitted> {
  const { route, method, path } = call
  const content = { ...call, body }
  const id = recordId(route, caller, method, path, key, ports.secret)
  const recipe = recipeOf(route.fingerprint)
  const operation: Operation = {
    route: route.name,
    method,
    path,
    fingerprint: fingerprintOf(content, route.fingerprint),
    rawDigest: rawDigestOf(content, recipe),
    recipe,
  }
  const asked = { ...operation, rawDigestUnder: (other: string) => rawDigestOf(content, other) }
  trace.id = id
  const known = meets(ports, id, asked, route, false)
  if (known !== null) return answerMet(ports, call, trace, id, known)
  // What was not executed must be told to the store before anybody claims.
  const askedAt = performance.now()
  const settled = await ports.settler.flush(id)
  if (route.profile === 'strict' && ports.unfitForStrict())
    return storeUnavailable(
      ports,
      trace,
      id,
      'the store may evict unexpired records, which profile strict does not accept (store.acceptRisk)',
    )

  const token = ports.newToken()
  const claimed = settled
    ? await claim(ports.records, route, id, operation, asked, token, ports.pause)
    : notAsked(token)
  trace.storeMs += performance.now() - askedAt
  switch (claimed.kind) {
    case 'met':
      return answerMet(ports, call, trace, id, claimed.decision)
    case 'corrupt':
      ports.observer.trouble('a stored record cannot be read; it is refused and left as it is', {
        route: route.name,
        record: shortId(id),
        error: String(claimed.error),
      })
      return storeUnavailable(ports, trace, id, 'the stored record cannot be read by this version')
    case 'unavailable': {
      const run: Run = { id, route, operation, attempt: claimed.attempt, createdAt: 0 }
      const bypass = route.onStoreUnavailable === 'bypass' && !ports.settler.full && !call.clientGone()
      // Others may have come further while the store was asked.
      const own = meets(ports, id, asked, route, bypass)
      if (bypass && own === null) {
        ports.observer.claimed(route.name, 'error')
        ports.running.set(id, run)
        return { kind: 'execute', run, unclaimed: claimed }
      }
      if (claimed.lost) ports.settler.withdraw(run, claimed)
      if (own !== null) return answerMet(ports, call, trace, id, own)
      trace.cause = (claimed.error as Error).message
      return storeUnavailable(
        ports,
        trace,
        id,
        'the store does not answer; nothing was executed for this request',
      )
    }
    case 'claimed': {
      const { run, before } = claimed
      trace.before = before
      const lost = before === 'absent' ? ports.running.get(id) : undefined
      const found = lost === undefined || lost.attempt.fence === 0 ? null : lost
      const own = met(found && runningRecord(found), asked, route)
      if (found !== null && own !== null) {
        await giveBack(ports.records, claimed.version, found)
        ports.observer.trouble('the store had lost the record of a run under way; it was written again', {
          route: route.name,
          record: shortId(id),
        })
        return answerMet(ports, call, trace, id, own)
      }
      if (before === 'unknown') ports.observer.leaseExpired(route.name)
      ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
      if (!call.clientGone()) {
        ports.running.set(id, run)
        return { kind: 'execute', run, unclaimed: null }
      }
      const reason = 'the client left before the request was sent'
      trace.after = (await ports.settler.settle(run, { kind: 'not_executed', reason }, () => {})).state
      return { kind: 'none' }
    }
  }
}

/**
 * What answers the request on this replica, whatever the store says: an unsettled outcome, or a run without a claim; where
 * the store cannot be asked (`alone`) any run.
 */
function meets(ports: Ports, id: RecordId, asked: Asked, route: RoutePolicy, alone: boolean): Met | null {
  const held = met(ports.settler.held(id), asked, route)
  const running = ports.running.get(id)
  if (held !== null || running === undefined) return held
  return alone || running.attempt.fence === 0 ? met(runningRecord(running), asked, route) : null
}

/** Sends the request once and writes its outcome before the first byte of the answer leaves. */
async function execute(
  ports: Ports,
  call: Call,
  trace: Trace,
  run: Run,
  key: string,
  body: Buffer,
  unclaimed: Unclaimed | null,
): Promise<Answer> {
  const { route, id, attempt } = run
  const sentAt = performance.now()
  ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl)
  const settle = async (outcome: Outcome, release = (): void => {}): Promise<Settled> => {
    const startedAt = performance.now()
    ports.leases.release(id, attempt.token)
    try {
      if (unclaimed === null) return await ports.settler.settle(run, outcome, release)
      return ports.settler.settleUnclaimed(run, outcome, release, unclaimed)
    } finally {
      trace.storeMs += performance.now() - startedAt
      if (ports.running.get(id) === run) ports.running.delete(id)
    }
  }
  let result: Forwarded
  try {
    result = await ports.forward({
      method: call.method,
      target: call.target,
      headers: call.upstreamHeaders(id, key, attempt.fence),
      body,
      responseLimit: route.limits.response,
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
      trace.cause = result.reason
      return refuse(
        trace,
        'upstream_unreachable',
        'upstream_unreachable',
        'no byte of the request was sent',
        { instance: id },
      )
    case 'unknown': {
      const { reason, status, timedOut } = result
      trace.after = (await settle({ kind: 'unknown', reason, status })).state
      trace.cause = reason
      const code = timedOut ? 'upstream_timeout' : 'upstream_failed'
      const detail = `the request was sent, and ${timedOut ? 'no whole answer came in time' : 'its answer broke off'}; whether it was executed is not known`
      return refuse(trace, code, code, detail, { instance: id })
    }
    case 'live': {
      const { live, why } = result
      trace.outcome = unclaimed === null ? 'executed' : 'bypassed'
      trace.after = 'in_progress'
      ports.inFlight.count++
      void live.done
        .then((end) =>
          settle(
            end === 'complete'
              ? outcomeOf(route, live.status, live.headers, result.said, withoutBody(live, why))
              : unknownBecause('the upstream broke off its answer', live.status),
          ),
        )
        .finally(() => ports.inFlight.count--)
      return { kind: 'live', live, marks: marks(trace.outcome, route, null) }
    }
    case 'responded': {
      const { response, said } = result
      ports.latency.saw(route.name, trace.upstreamMs)
      const outcome = outcomeOf(route, response.status, response.headers, said, keptResult(route, response))
      // The body has up to two holders: the answer until it has left, the outcome that keeps it until it is written.
      const share = shared(result.release)
      const release = share()
      const settled = await settle(outcome, keepsBody(outcome) ? share() : undefined)
      trace.outcome = unclaimed === null ? 'executed' : 'bypassed'
      trace.after = settled.state
      const own = marks(trace.outcome, route, settled.expiresAt)
      return { kind: 'response', response, replayed: false, marks: own, release }
    }
  }
}

/** The work's answer, or null where it takes longer: the work goes on, and its outcome is stored (contract §3). */
async function within(ports: Ports, limit: Millis, run: Run, work: Promise<Answer>): Promise<Answer | null> {
  let timer: NodeJS.Timeout | undefined
  const slow = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, limit, null)
  })
  const first = await Promise.race([work, slow]).finally(() => clearTimeout(timer))
  if (first !== null) return first
  ports.inFlight.count++
  const failed = (error: unknown): void =>
    ports.observer.trouble('internal error after the client was answered', {
      route: run.route.name,
      record: shortId(run.id),
      error: String(error),
    })
  void work.then(discard, failed).finally(() => ports.inFlight.count--)
  return null
}
