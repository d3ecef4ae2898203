import type { DerivePolicy, RoutePolicy } from '../core/policy.ts'
import type { Refusal } from '../core/refusal.ts'
import { free } from '../runtime/body-memory.ts'
import { shared } from '../runtime/limits.ts'
import { overloaded, refuseBody } from './answers.ts'
import { claim } from './claim.ts'
import { answerInTime, execute, passOn, UNCLAIMED_SCOPE } from './execute.ts'
import { duplicate } from './existing.ts'
import { callerName, DERIVED_HEADER, type Identified, identify, readHead } from './identify.ts'
import type { Ports } from './ports.ts'
import type {
  Answer,
  Facts,
  Progress,
  ProtectedRequest,
  Reply,
  RequestLabels,
  RequestSummary,
} from './request.ts'

/** Handles a protected request: claim → forward → settle (contract §3). */
export function guard(ports: Ports, request: ProtectedRequest): Promise<Answer> {
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

/** Stripe's clients recognise a failure by the member `error`, whatever the status (docs/adr/0015). */
function inProfile({ profile }: RoutePolicy, answer: Answer): Answer {
  if (profile !== 'stripe' || answer.kind !== 'problem') return answer
  return { ...answer, refusal: { ...answer.refusal, stripeError: true } }
}

/** THE WALK. Each step either answers or returns what the next one needs. Only promises are awaited. */
async function walk(ports: Ports, request: ProtectedRequest): Promise<Answer> {
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
    if (!request.progress.isBodyOut) free(body)
  }
  // Two holders where the upstream call may outlast the walk.
  const hold = route.respondWithin === null ? null : shared(done)
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

    if (execution.before === 'absent' && ports.keyChurn.saw(execution, caller))
      ports.observer.regenerated(route.name)
    const work = execute(ports, request, execution, identified.key, body)
    const answer = hold === null ? work : answerInTime(ports, execution, work.finally(hold()))
    return marked(await answer, identified, route)
  } finally {
    leave?.()
    release()
  }
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
  }
}

export function summarize(
  { route, method, traceId, progress }: RequestLabels,
  facts: Partial<Facts>,
  status: number | null,
): RequestSummary {
  const { startedAt, id, storeMs, upstreamMs } = progress
  const { outcome = null, before = null, after = null, fence = null, cause = null, replayOf = null } = facts
  const { name } = route
  // No spread: it would cost more than the rest of the log line.
  return {
    startedAt,
    id,
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
