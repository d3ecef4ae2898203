import { shared } from './core/budget.ts'
import type { RoutePolicy } from './core/policy.ts'
import { admit } from './guard/admit.ts'
import { overloaded, refuse, refuseBody, statusOf } from './guard/answers.ts'
import { type Answer, type Call, newTrace, type Trace } from './guard/call.ts'
import { duplicate } from './guard/duplicate.ts'
import { execute, passOn, within } from './guard/execute.ts'
import { DERIVED_MARK, introduce, type Named, name } from './guard/name.ts'
import type { Ports } from './guard/ports.ts'

/** Everything that happens to a protected request: claim → forward → settle (contract §3). */
export async function guard(ports: Ports, call: Call): Promise<Answer> {
  const trace = newTrace(call.route.name, call.traceId)
  ports.inFlight.count++
  let answer: Answer
  try {
    answer = asSpokenBy(call.route, await walk(ports, call, trace))
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
async function walk(ports: Ports, call: Call, trace: Trace): Promise<Answer> {
  const introduced = await introduce(ports, call, trace)
  if (introduced.kind !== 'introduced') return introduced
  if (ports.inFlight.count > ports.maxInFlight) return overloaded(ports, trace)
  const received = await call.readBody()
  if (received.kind !== 'body') return refuseBody(trace, call, received.kind)

  const { body } = received
  // Up to two holders: the walk, and the upstream call, which may outlast it.
  const hold = shared(received.release)
  const release = hold()
  try {
    const named = await name(ports, call, trace, introduced, body)
    if (named.kind === 'unnamed') return await passOn(ports, call, trace, body)
    if (named.kind !== 'named') return named
    return marked(await serve(ports, call, trace, named, body, hold), named)
  } finally {
    release()
  }
}

/** Claims; executes where the claim came through, else answers from the record. */
async function serve(
  ports: Ports,
  call: Call,
  trace: Trace,
  named: Named,
  body: Buffer,
  hold: () => () => void,
): Promise<Answer> {
  const { route } = call
  const admitted = await admit(ports, call, trace, named)
  const way = admitted.kind === 'met' ? await duplicate(ports, call, trace, named, admitted.met) : admitted
  if (way.kind !== 'execute') return way

  const { run } = way
  trace.fence = run.attempt.fence || null
  if (trace.before === 'absent' && ports.regenerated.saw(run, named.caller))
    ports.observer.regenerated(route.name)
  const own = { ...trace }
  const work = execute(ports, call, own, way, named.key, body).finally(hold())
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

/** Says of every answer that the proxy made the key, where it did (contract §4). */
function marked(answer: Answer, { derived }: Named): Answer {
  if (!derived || answer.kind === 'none') return answer
  return { ...answer, marks: [...answer.marks, ...DERIVED_MARK] }
}
