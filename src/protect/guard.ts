import { scopeOf } from '../core/chain.ts'
import { type RawHeaders, RESPONSE_HEADER, statusHeaders } from '../core/headers.ts'
import { changesCaller, shortId } from '../core/identity.ts'
import type { DerivePolicy, RoutePolicy } from '../core/policy.ts'
import {
  type CompletedResponse,
  type Millis,
  type Outcome,
  type RecordId,
  withoutBody,
} from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import { keepsBody, keptResult, lostResponse, replayable, unknownBecause } from '../core/settle.ts'
import { free, shared } from '../runtime/limits.ts'
import { after, within } from '../runtime/scheduling.ts'
import type { Forwarded, UpstreamRequest } from '../upstream/port.ts'
import {
  discard,
  nothingDone,
  overloaded,
  refuse,
  refuseBody,
  responseUnavailable,
  sentUnanswered,
} from './answers.ts'
import { claim } from './claim.ts'
import { duplicate } from './existing.ts'
import { finish, NOTHING_HELD } from './finish.ts'
import { callerName, DERIVED_HEADER, type Identified, identify, readHead } from './identify.ts'
import { meaningOf } from './meaning.ts'
import type { WalkPorts } from './ports.ts'
import { responding } from './receiving.ts'
import { hashOf } from './recent.ts'
import {
  type Answer,
  type Execution,
  type Facts,
  type Progress,
  type ProtectedRequest,
  type Reply,
  type RequestLabels,
  type RequestSummary,
  timeLeft,
} from './request.ts'

/** Handles a protected request: claim → forward → settle (contract §3). */
export function guard(ports: WalkPorts, request: ProtectedRequest): Promise<Answer> {
  const { inFlight, observer } = ports
  inFlight.count++
  const over = (facts: Facts, status: number | null): void => {
    inFlight.count--
    observer.answered(summarize(request, facts, status))
  }
  return walk(ports, request).then(
    (found) => {
      const answer = inProfile(request.route, found)
      over(answer.facts, statusOf(answer))
      return answer
    },
    // Nobody is answered, but the request is reported.
    (bug: unknown) => {
      over(factsAfterBug(request.progress), null)
      throw bug
    },
  )
}

/** The facts of a request whose walk ended with a bug. */
function factsAfterBug({ execution, state }: Progress): Facts {
  if (execution === null) return { outcome: null }
  const { before, attempt } = execution
  return { outcome: null, before, after: state, fence: attempt.fence || null }
}

/** Stripe's clients recognise a failure by the member `error`, whatever the status (docs/adr/0037). */
function inProfile({ profile }: RoutePolicy, answer: Answer): Answer {
  if (profile !== 'stripe' || answer.kind !== 'problem') return answer
  return { ...answer, refusal: { ...answer.refusal, stripeError: true } }
}

/** THE WALK. Each step either answers or returns what the next one needs. Only promises are awaited. */
async function walk(ports: WalkPorts, request: ProtectedRequest): Promise<Answer> {
  const { route } = request
  const reading = readHead(ports, request)
  const head = reading instanceof Promise ? await reading : reading
  if (head.kind !== 'head') return head
  // Already full: do not read the body.
  if (ports.inFlight.isFull()) return overloaded(ports)
  const receiving = request.readBody()
  const received = receiving instanceof Promise ? await receiving : receiving
  if (received.kind !== 'body') return refuseBody(request, received.kind)

  const { body } = received
  const done = (): void => {
    received.release()
    request.progress.letGo?.()
    if (!request.progress.isBodyOut) free(body)
  }
  // Two holders if the upstream call may outlast the walk.
  const hold = route.respondWithin === null && request.deadline === undefined ? null : shared(done)
  const release = hold === null ? done : hold()
  // Only now: a client that never sends its body must not take a place from others.
  const caller = callerName(head.caller)
  const leave = ports.inFlight.enter(request.client, caller)
  try {
    if (leave === null) return overloaded(ports)
    const identifying = identify(ports, request, head, body)
    const identified = identifying instanceof Promise ? await identifying : identifying
    if (identified.kind === 'no_key') return await passOn(ports, request, body)
    if (identified.kind !== 'identified') return identified

    const claiming = claim(ports, request, identified)
    const claimed = claiming instanceof Promise ? await claiming : claiming
    const found =
      claimed.kind === 'existing' ? duplicate(ports, request, identified, claimed.existing) : claimed
    const execution = found instanceof Promise ? await found : found
    if (execution.kind !== 'execution') return marked(execution, identified, route)

    noteOperation(ports, execution, identified.key, caller)
    const work = execute(ports, request, execution, identified.key, body)
    const answer = hold === null ? work : answerInTime(ports, request, execution, work.finally(hold()))
    return marked(await answer, identified, route)
  } finally {
    leave?.()
    release()
  }
}

/**
 * Counts an operation that this replica has executed shortly before, under another key or for another caller. Returns whether it was under
 * another key.
 */
export function noteOperation(
  { keyChurn, callerChanges, observer }: Pick<WalkPorts, 'keyChurn' | 'callerChanges' | 'observer'>,
  execution: Execution,
  key: string,
  caller: string | null,
): boolean {
  const { id, route, before } = execution
  if (before !== 'absent') return false
  const hashed = hashOf(caller ?? '')
  if (callerChanges.saw(execution, key, hashed)) observer.callerChanged(route.name, id)
  const regenerated = keyChurn.saw(execution, hashed)
  if (regenerated) observer.regenerated(route.name)
  return regenerated
}

/** Counts a stored response whose client will be another caller from now on. */
export function noteCaller(
  { observer }: Pick<WalkPorts, 'observer'>,
  { id, route }: Pick<Execution, 'id' | 'route'>,
  sent: RawHeaders,
  answer: RawHeaders,
  ended: Outcome,
): void {
  if (ended.kind === 'completed' && changesCaller(route.scope, sent, answer))
    observer.callerChanged(route.name, id)
}

/** Adds to each answer whether the proxy made the key (contract §4), and whether a retry will find the key's record. */
function marked(answer: Answer, { derived }: Identified, route: RoutePolicy): Answer {
  if (answer.kind === 'none') return answer
  const proxyHeaders = derived ? [...answer.proxyHeaders, ...DERIVED_HEADER] : answer.proxyHeaders
  if (answer.kind !== 'problem') return derived ? { ...answer, proxyHeaders } : answer
  const remembered = isRemembered(answer.refusal, derived, route)
  return { ...answer, proxyHeaders, refusal: { ...answer.refusal, remembered } }
}

function isRemembered(
  { scope }: Refusal,
  derived: boolean,
  { key, onStoreUnavailable }: RoutePolicy,
): boolean {
  // A key derived later would be a different one.
  if (derived && (key.derive as DerivePolicy).bucket !== null) return false
  return scope === null ? onStoreUnavailable !== 'bypass' : scope !== UNCLAIMED_SCOPE
}

function statusOf(answer: Reply): number | null {
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

export function newProgress(): Progress {
  return {
    startedAt: performance.now(),
    id: null,
    execution: null,
    isBodyOut: false,
    state: null,
    storeMs: 0,
    upstreamMs: 0,
    heldMs: 0,
  }
}

export function summarize(
  { route, method, traceId, progress }: RequestLabels,
  facts: Partial<Facts>,
  status: number | null,
): RequestSummary {
  const { startedAt, id, label, storeMs, upstreamMs } = progress
  const { outcome = null, before = null, after = null, fence = null, cause = null, replayOf = null } = facts
  const { name } = route
  // No spread: it would cost more than the rest of the log line.
  return {
    startedAt,
    id,
    label,
    storeMs,
    upstreamMs,
    outcome,
    before,
    after,
    fence,
    cause,
    replayOf,
    route: name,
    method,
    traceId,
    status,
  }
}

/** Sends the request once and writes its outcome before the first byte of the answer leaves. */
export async function execute(
  ports: WalkPorts,
  request: ProtectedRequest,
  execution: Execution,
  key: string,
  body: Buffer,
): Promise<Answer> {
  const { route, id, attempt, before, unclaimed } = execution
  const { progress } = request
  const fence = attempt.fence || null
  const isSure = ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, execution.requestedAt)
  const sentAt = performance.now()
  let result: Forwarded
  try {
    const { method, target } = request
    const headers = request.upstreamHeaders({ id, key, fence: attempt.fence })
    const sent = { method, target, headers, ...responding(request), ...lent(progress, body) }
    // Without a claim there is no lease to lapse.
    const mayBegin = (): boolean => (unclaimed !== null || isSure()) && timeLeft(request) > 0
    result = await ports.forward({ ...sent, mayBegin })
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
  switch (result.proof) {
    case 'not_sent': {
      const ended = { kind: 'not_executed', reason: result.reason } as const
      const { state } = await finish(ports, progress, execution, ended, NOTHING_HELD)
      return notSent(result, id, { before, after: state, fence })
    }
    case 'unknown': {
      const ended = lostResponse(route, result.reason, result.status)
      const { state, recorded, expiresAt } = await finish(ports, progress, execution, ended, NOTHING_HELD)
      // The upstream had ended the attempt itself before it fell silent.
      if (recorded !== null) return recordedAnswer(ports, execution, recorded, expiresAt, result.reason)
      const record = { instance: id, scope: scopeTold(execution) }
      return brokenOff(result, record, { before, after: state, fence })
    }
    case 'live':
      return answerLive(ports, request, execution, result)
    case 'responded':
      ports.latency.saw(route.name, upstreamMs)
      return answerWhole(ports, request, execution, result)
  }
}

/** The answer leaves while it arrives; the outcome is written at its end. */
function answerLive(
  ports: WalkPorts,
  request: ProtectedRequest,
  execution: Execution,
  { live, why }: Extract<Forwarded, { proof: 'live' }>,
): Answer {
  const { route, id, attempt, before } = execution
  const leave = ports.inFlight.remain()
  void live.done
    .then((end) => {
      const { kept } = live
      // The request was logged when its streamed answer began; only a break is reported now.
      if (end === 'broken')
        ports.observer.trouble('the response broke off while it was streamed; the outcome is unknown', {
          route: route.name,
          record: shortId(id),
          cause: live.brokenBy,
        })
      const result = kept === null ? withoutBody(live, why) : keptResult(route, kept)
      const meaning =
        end === 'complete'
          ? meaningOf(route, request, kept ?? live, live.declaredOutcome, result)
          : lostResponse(route, `the response broke off: ${live.brokenBy}`, live.status)
      const held = shared(() => live.release())()
      return after(meaning, (ended) => {
        noteCaller(ports, execution, request.headers, live.headers, ended)
        return finish(ports, request.progress, execution, ended, held)
      })
    })
    .finally(leave)
  const outcome = outcomeOf(execution)
  const facts: Facts = { outcome, before, after: 'in_progress', fence: attempt.fence || null }
  return { kind: 'live', live, proxyHeaders: statusHeaders(outcome, route, null), facts }
}

async function answerWhole(
  ports: WalkPorts,
  request: ProtectedRequest,
  execution: Execution,
  result: Extract<Forwarded, { proof: 'responded' }>,
): Promise<Answer> {
  const { route, attempt, before } = execution
  const { response, declaredOutcome } = result
  const kept = keptResult(route, response)
  const meaning = meaningOf(route, request, response, declaredOutcome, kept)
  const ended = meaning instanceof Promise ? await meaning : meaning
  noteCaller(ports, execution, request.headers, response.headers, ended)
  let isStored = false
  // Up to two holders: the answer until it is sent, and the outcome until it is written.
  const share = shared(() => {
    result.release()
    // A held outcome may have answered retries.
    if (isStored && !execution.isShared) free(response.body)
  })
  const release = share()
  const held = keepsBody(ended) ? share() : NOTHING_HELD
  const settling = finish(ports, request.progress, execution, ended, held)
  const { state, expiresAt, recorded } = settling instanceof Promise ? await settling : settling
  isStored = expiresAt !== null
  // If the response is not kept, the one that just arrived is the only copy, provided it matches.
  if (recorded !== null && (recorded.kept || recorded.status !== response.status)) {
    release()
    return recordedAnswer(ports, execution, recorded, expiresAt)
  }
  const outcome = outcomeOf(execution)
  const proxyHeaders = statusHeaders(outcome, route, expiresAt)
  const facts: Facts = { outcome, before, after: state, fence: attempt.fence || null }
  return { kind: 'response', response, replayed: false, proxyHeaders, release, facts }
}

function outcomeOf({ unclaimed }: Execution): 'executed' | 'bypassed' {
  return unclaimed === null ? 'executed' : 'bypassed'
}

/** Answers with the recorded response, like every later answer (contract §7). `cause`: why there is no other. */
function recordedAnswer(
  { budget }: Pick<WalkPorts, 'budget'>,
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

/**
 * Answers within `respondWithin`, and by the deadline of a call, at the latest; the execution continues, and its outcome is stored (contract
 * §3).
 */
export async function answerInTime(
  ports: WalkPorts,
  request: Pick<ProtectedRequest, 'deadline'>,
  execution: Execution,
  work: Promise<Answer>,
): Promise<Answer> {
  const { route, id, before, attempt } = execution
  const limit = Math.min(route.respondWithin ?? Number.POSITIVE_INFINITY, timeLeft(request))
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
  const detail = `no answer within ${Math.max(0, Math.round(limit))} ms; the upstream is still working, retry with the same key`
  const more = { instance: id, scope: scopeTold(execution) }
  const facts: Omit<Facts, 'outcome'> = { before, after: 'in_progress', fence: attempt.fence || null }
  return refuse('upstream_slow', 'upstream_slow', detail, more, facts)
}

/** Forwards, unprotected, a request whose body holds no key (contract §3.1). */
export async function passOn(
  { forward }: Pick<WalkPorts, 'forward'>,
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
      return notSent(result, null, {})
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

/** The body to send; from now on `progress` says whether a socket may hold it. */
function lent(progress: Progress, body: Buffer): Pick<UpstreamRequest, 'body' | 'onTaken'> {
  progress.isBodyOut = true
  return {
    body,
    onTaken: () => {
      progress.isBodyOut = false
    },
  }
}

function notSent(
  { reason, isRefused = false }: Extract<Forwarded, { proof: 'not_sent' }>,
  id: RecordId | null,
  facts: Omit<Facts, 'outcome'>,
): Answer {
  const detail = nothingDone(isRefused)
  const all = { ...facts, cause: reason }
  return refuse('upstream_unreachable', 'upstream_unreachable', detail, { instance: id }, all)
}

function brokenOff(
  { reason, timedOut, isRefused }: Extract<Forwarded, { proof: 'unknown' }>,
  record: Pick<Refusal, 'instance' | 'scope'> | null,
  facts: Omit<Facts, 'outcome'>,
): Answer {
  const code = timedOut ? 'upstream_timeout' : 'upstream_failed'
  const detail = sentUnanswered(timedOut, isRefused ? reason : null)
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

/** Tells a proxy in front of this one the scope in which this one recognises a retry. Without a claim it may not recognise one. */
function scopeTold({ route, unclaimed }: Execution): string {
  return unclaimed === null ? scopeOf(route) : UNCLAIMED_SCOPE
}
