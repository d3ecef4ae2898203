import { decide } from '../core/decide.ts'
import { type Admitted, admit } from './admit.ts'
import { answerFromRecord } from './answers.ts'
import { authorizeReplay } from './authorize.ts'
import type { Execute, Existing } from './claim.ts'
import type { Identified } from './identify.ts'
import type { Ports } from './ports.ts'
import type { Answer, ProtectedRequest, Trace } from './request.ts'
import type { Seat } from './waiting-room.ts'

type Running = Extract<Existing, { kind: 'in_progress' }>

/** Answers a request whose record is there; holds it first where the route says so (contract §6). */
export async function duplicate(
  ports: Ports,
  request: ProtectedRequest,
  trace: Trace,
  identified: Identified,
  found: Existing,
): Promise<Answer | Execute> {
  const refused = await authorizeReplay(ports, request, trace)
  if (refused !== null) return refused
  if (found.kind !== 'in_progress' || request.route.inFlight.mode === 'reject')
    return answerFromRecord(ports, request, trace, identified.id, found)
  if (request.clientGone()) return { kind: 'none' }
  const seat = ports.waiters.enter(identified.id, ports.running.has(identified.id))
  if (seat === null) return answerFromRecord(ports, request, trace, identified.id, found)
  const stop = request.onGone(() => seat.dismiss())
  const admitted = await wait(ports, request, trace, identified, found, seat).finally(() => {
    stop()
    seat.leave()
  })
  if (admitted.kind !== 'existing') return admitted
  // Held for a while: the credential may have been revoked since.
  const refusedNow = admitted.existing === found ? null : await authorizeReplay(ports, request, trace)
  if (refusedNow !== null) return refusedNow
  const answer = answerFromRecord(ports, request, trace, identified.id, admitted.existing)
  if (trace.outcome === 'replayed') trace.outcome = 'waited'
  return answer
}

/**
 * Until the record answers, the time is up or the client has gone. Where the attempt that was met did nothing, one of those
 * that wait claims anew, once; the others wait on for that one (contract §6).
 */
async function wait(
  ports: Ports,
  request: ProtectedRequest,
  trace: Trace,
  identified: Identified,
  found: Running,
  seat: Seat,
): Promise<Admitted> {
  const { route } = request
  const until = performance.now() + route.inFlight.wait
  const original = found.fence
  let running = found
  for (;;) {
    const news = await seat.next(until - performance.now())
    if (request.clientGone()) return { kind: 'none' }
    if (news === null) return { kind: 'existing', existing: running }
    // The store may have lost the record of an execution that goes on: only a client that asks again may claim over that.
    if (news.kind === 'absent') continue
    const decision = news.kind === 'corrupt' ? null : decide(news.record, identified.asked, route, news.now)
    if (decision?.kind === 'gone') continue
    if (decision?.kind === 'take_over') {
      // The one that took over did nothing, either.
      if (decision.from.fence !== original) return { kind: 'existing', existing: running }
      if (!seat.takesOver(original)) continue
    } else if (decision !== null) {
      if (decision.kind !== 'in_progress') return { kind: 'existing', existing: decision }
      running = decision
      continue
    }
    const admitted = await admit(ports, request, trace, identified)
    if (admitted.kind === 'existing' && admitted.existing.kind === 'in_progress') {
      running = admitted.existing
      if (!ports.running.has(identified.id)) seat.listen()
      continue
    }
    if (admitted.kind !== 'execute') seat.passesOn()
    return admitted
  }
}
