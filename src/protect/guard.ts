import type { DerivePolicy, RoutePolicy } from '../core/policy.ts'
import type { Refusal } from '../core/refusal.ts'
import { shared } from '../runtime/limits.ts'
import { admit } from './admit.ts'
import { overloaded, refuse, refuseBody, statusOf } from './answers.ts'
import { callerName } from './caller.ts'
import { duplicate } from './duplicate.ts'
import { execute, passOn, scopeTold, UNCLAIMED_SCOPE, within } from './execute.ts'
import { DERIVED_HEADER, type Identified, identify, readHead } from './identify.ts'
import type { Ports } from './ports.ts'
import { type Answer, newTrace, type ProtectedRequest, type Trace } from './request.ts'

/** Everything that happens to a protected request: claim → forward → settle (contract §3). */
export async function guard(ports: Ports, request: ProtectedRequest): Promise<Answer> {
  const trace = newTrace(request)
  ports.inFlight.count++
  let answer: Answer
  try {
    answer = asSpokenBy(request.route, await walk(ports, request, trace))
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

/** Clients of Stripe's know a failure by the member `error`, whatever the status (docs/adr/0015). */
function asSpokenBy({ profile }: RoutePolicy, answer: Answer): Answer {
  if (profile !== 'stripe' || answer.kind !== 'problem') return answer
  return { ...answer, refusal: { ...answer.refusal, stripeError: true } }
}

/** THE WALK. Each step answers, or gives what the next one needs. */
async function walk(ports: Ports, request: ProtectedRequest, trace: Trace): Promise<Answer> {
  const head = await readHead(ports, request, trace)
  if (head.kind !== 'head') return head
  // Full already: nothing of the body is read.
  if (ports.inFlight.isFull(ports.maxInFlight)) return overloaded(ports, trace)
  const received = await request.readBody()
  if (received.kind !== 'body') return refuseBody(trace, request, received.kind)

  const { body } = received
  // Up to two holders: the walk, and the upstream call, which may outlast it.
  const hold = shared(received.release)
  const release = hold()
  // Only now: a client that sends no body takes no place from those that do.
  const leave = ports.inFlight.enter(ports.maxInFlight, request.client, callerName(head.caller))
  try {
    if (leave === null) return overloaded(ports, trace)
    const identified = await identify(ports, request, trace, head, body)
    if (identified.kind === 'no_key') return await passOn(ports, request, trace, body)
    if (identified.kind !== 'identified') return identified
    return marked(await serve(ports, request, trace, identified, body, hold), identified, request.route)
  } finally {
    leave?.()
    release()
  }
}

/** Claims; executes where the claim came through, else answers from the record. */
async function serve(
  ports: Ports,
  request: ProtectedRequest,
  trace: Trace,
  identified: Identified,
  body: Buffer,
  hold: () => () => void,
): Promise<Answer> {
  const { route } = request
  const admitted = await admit(ports, request, trace, identified)
  const way =
    admitted.kind === 'existing'
      ? await duplicate(ports, request, trace, identified, admitted.existing)
      : admitted
  if (way.kind !== 'execute') return way

  const { execution } = way
  trace.fence = execution.attempt.fence || null
  if (trace.before === 'absent' && ports.regenerated.saw(execution, identified.caller))
    ports.observer.regenerated(route.name)
  const own = { ...trace }
  const work = execute(ports, request, own, way, identified.key, body).finally(hold())
  const answer =
    route.respondWithin === null ? await work : await within(ports, route.respondWithin, execution, work)
  if (answer !== null) {
    Object.assign(trace, own)
    return answer
  }
  trace.after = 'in_progress'
  const detail = `no answer within ${route.respondWithin} ms; the upstream is still working, retry with the same key`
  return refuse(trace, 'upstream_slow', 'upstream_slow', detail, {
    instance: execution.id,
    scope: scopeTold(way),
  })
}

/** Says of every answer that the proxy made the key, where it did (contract §4), and whether the key's record is met again. */
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
  // Derived again later, the key is another one.
  if (derived && (key.derive as DerivePolicy).bucket !== null) return false
  return scope === null ? onStoreUnavailable !== 'bypass' : scope !== UNCLAIMED_SCOPE
}
