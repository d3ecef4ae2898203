import { decide } from '../core/decide.ts'
import { type Admitted, admit } from './admit.ts'
import { answerMet } from './answers.ts'
import { mayBeTold } from './authorize.ts'
import type { Answer, Call, Trace } from './call.ts'
import type { Execute, Met } from './claim.ts'
import type { Named } from './name.ts'
import type { Ports } from './ports.ts'
import type { Seat } from './waiters.ts'

type Running = Extract<Met, { kind: 'in_progress' }>

/** Answers a request whose record is there; holds it first where the route says so (contract §6). */
export async function duplicate(
  ports: Ports,
  call: Call,
  trace: Trace,
  named: Named,
  found: Met,
): Promise<Answer | Execute> {
  const refused = await mayBeTold(ports, call, trace)
  if (refused !== null) return refused
  if (found.kind !== 'in_progress' || call.route.inFlight.mode === 'reject')
    return answerMet(ports, call, trace, named.id, found)
  if (call.clientGone()) return { kind: 'none' }
  const seat = ports.waiters.enter(named.id, ports.running.has(named.id))
  if (seat === null) return answerMet(ports, call, trace, named.id, found)
  const stop = call.onGone(() => seat.dismiss())
  const admitted = await wait(ports, call, trace, named, found, seat).finally(() => {
    stop()
    seat.leave()
  })
  if (admitted.kind !== 'met') return admitted
  // Held for a while: the credential may have been revoked since.
  const refusedNow = admitted.met === found ? null : await mayBeTold(ports, call, trace)
  if (refusedNow !== null) return refusedNow
  const answer = answerMet(ports, call, trace, named.id, admitted.met)
  if (trace.outcome === 'replayed') trace.outcome = 'waited'
  return answer
}

/**
 * Until the record answers, the time is up or the client has gone. Where the attempt that was met did nothing, one of those
 * that wait claims anew, once; the others wait on for that one (contract §6).
 */
async function wait(
  ports: Ports,
  call: Call,
  trace: Trace,
  named: Named,
  found: Running,
  seat: Seat,
): Promise<Admitted> {
  const { route } = call
  const until = performance.now() + route.inFlight.wait
  const original = found.fence
  let running = found
  for (;;) {
    const news = await seat.next(until - performance.now())
    if (call.clientGone()) return { kind: 'none' }
    if (news === null) return { kind: 'met', met: running }
    // The store may have lost the record of a run that goes on: only a client that asks again may claim over that.
    if (news.kind === 'absent') continue
    const decision = news.kind === 'corrupt' ? null : decide(news.record, named.asked, route, news.now)
    if (decision?.kind === 'gone') continue
    if (decision?.kind === 'take_over') {
      // The one that took over did nothing, either.
      if (decision.from.fence !== original) return { kind: 'met', met: running }
      if (!seat.takesOver(original)) continue
    } else if (decision !== null) {
      if (decision.kind !== 'in_progress') return { kind: 'met', met: decision }
      running = decision
      continue
    }
    const admitted = await admit(ports, call, trace, named)
    if (admitted.kind === 'met' && admitted.met.kind === 'in_progress') {
      running = admitted.met
      if (!ports.running.has(named.id)) seat.listen()
      continue
    }
    if (admitted.kind !== 'execute') seat.passesOn()
    return admitted
  }
}
