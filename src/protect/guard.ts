import type { DerivePolicy, RoutePolicy } from '../core/policy.ts'
import type { Refusal } from '../core/refusal.ts'
import { shared } from '../runtime/limits.ts'
import { overloaded, refuseBody, statusOf } from './answers.ts'
import { claim } from './claim.ts'
import { answerInTime, execute, passOn, UNCLAIMED_SCOPE } from './execute.ts'
import { duplicate } from './existing.ts'
import { callerName, DERIVED_HEADER, type Identified, identify, readHead } from './identify.ts'
import type { Ports } from './ports.ts'
import { type Answer, type ProtectedRequest, summarize } from './request.ts'

/** Everything that happens to a protected request: claim → forward → settle (contract §3). */
export async function guard(ports: Ports, request: ProtectedRequest): Promise<Answer> {
  let answer: Answer | null = null
  ports.inFlight.count++
  try {
    answer = inProfile(request.route, await walk(ports, request))
    return answer
  } finally {
    ports.inFlight.count--
    // After a bug nobody is answered; the request is reported all the same.
    ports.observer.answered(summarize(request, answer?.facts ?? {}, answer && statusOf(answer)))
  }
}

/** Clients of Stripe's know a failure by the member `error`, whatever the status (docs/adr/0015). */
function inProfile({ profile }: RoutePolicy, answer: Answer): Answer {
  if (profile !== 'stripe' || answer.kind !== 'problem') return answer
  return { ...answer, refusal: { ...answer.refusal, stripeError: true } }
}

/** THE WALK. Each step answers, or gives what the next one needs. */
async function walk(ports: Ports, request: ProtectedRequest): Promise<Answer> {
  const head = await readHead(ports, request)
  if (head.kind !== 'head') return head
  // Full already: nothing of the body is read.
  if (ports.inFlight.isFull(ports.maxInFlight)) return overloaded(ports)
  const received = await request.readBody()
  if (received.kind !== 'body') return refuseBody(request, received.kind)

  const { body } = received
  // Up to two holders: the walk, and the upstream call, which may outlast it.
  const hold = shared(received.release)
  const release = hold()
  // Only now: a client that sends no body takes no place from those that do.
  const leave = ports.inFlight.enter(ports.maxInFlight, request.client, callerName(head.caller))
  try {
    if (leave === null) return overloaded(ports)
    const identified = await identify(ports, request, head, body)
    if (identified.kind === 'no_key') return await passOn(ports, request, body)
    if (identified.kind !== 'identified') return identified
    return marked(await serve(ports, request, identified, body, hold), identified, request.route)
  } finally {
    leave?.()
    release()
  }
}

/** Claims; executes where the claim came through, else answers from the record. */
async function serve(
  ports: Ports,
  request: ProtectedRequest,
  identified: Identified,
  body: Buffer,
  hold: () => () => void,
): Promise<Answer> {
  const { route } = request
  const claimed = await claim(ports, request, identified)
  const execution =
    claimed.kind === 'existing' ? await duplicate(ports, request, identified, claimed.existing) : claimed
  if (execution.kind !== 'execution') return execution

  if (execution.before === 'absent' && ports.keyChurn.saw(execution, identified.caller))
    ports.observer.regenerated(route.name)
  const work = execute(ports, request, execution, identified.key, body).finally(hold())
  return route.respondWithin === null ? work : answerInTime(ports, execution, route.respondWithin, work)
}

/** Says of every answer that the proxy made the key, where it did (contract §4), and whether a retry meets the key's record. */
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
