import { shortId } from '../core/record.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Answer, Call, Run, Trace } from './call.ts'
import { type Claimed, claim, type Execute, giveBack, type Met, met, notAsked } from './claim.ts'
import { finish } from './execute.ts'
import type { Named } from './name.ts'
import { runningRecord } from './outcome.ts'
import type { Ports } from './ports.ts'
import { isScreened, screened } from './screen.ts'

/** A record answers; or this request executes; or neither is possible, and the answer says why. */
export type Admitted = { readonly kind: 'met'; readonly met: Met } | Execute | Answer

/** Claims the record, unless it is there and answers. */
export async function admit(ports: Ports, call: Call, trace: Trace, named: Named): Promise<Admitted> {
  const { route } = call
  const { id, operation, asked } = named
  const known = meets(ports, call, named, false)
  if (known !== null) return { kind: 'met', met: known }
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
  const asking = (): Promise<Claimed> => claim(ports.records, route, id, operation, asked, token, ports.pause)
  const claimed = !settled
    ? notAsked(token)
    : isScreened(route, named)
      ? await screened(ports, route, named, token, asking)
      : await asking()
  trace.storeMs += performance.now() - askedAt
  switch (claimed.kind) {
    case 'met':
      return { kind: 'met', met: claimed.decision }
    case 'limited':
      return refuse(trace, 'rate_limited', 'rate_limited', 'too many new keys; nothing was executed', {
        retryAfter: Math.ceil(claimed.wait / 1000),
        instance: id,
      })
    case 'expired': {
      const detail = 'the issued key has expired: it claims nothing any more'
      return refuse(trace, 'expired', 'idempotency_key_expired', detail, { status: 412, instance: id })
    }
    case 'corrupt':
      ports.observer.trouble('a stored record cannot be read; it is refused and left as it is', {
        route: route.name,
        record: shortId(id),
        error: String(claimed.error),
      })
      return storeUnavailable(ports, trace, id, 'the stored record cannot be read by this version')
    case 'unavailable': {
      const run: Run = { id, route, operation, attempt: claimed.attempt, createdAt: 0 }
      const bypass =
        route.onStoreUnavailable === 'bypass' && named.mayClaim && !ports.settler.full && !call.clientGone()
      // Others may have come further while the store was asked.
      const own = meets(ports, call, named, bypass)
      if (bypass && own === null) {
        ports.observer.claimed(route.name, 'error')
        ports.running.set(id, run)
        ports.observer.began(run, trace.before)
        return { kind: 'execute', run, askedAt, unclaimed: claimed }
      }
      if (claimed.lost) ports.settler.withdraw(run, claimed)
      if (own !== null) return { kind: 'met', met: own }
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
        return { kind: 'met', met: own }
      }
      if (claimed.lapsed) ports.observer.leaseExpired(route.name)
      ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
      if (!call.clientGone()) {
        ports.running.set(id, run)
        ports.observer.began(run, trace.before)
        return { kind: 'execute', run, askedAt: claimed.askedAt, unclaimed: null }
      }
      const reason = 'the client left before the request was sent'
      trace.after = (await finish(ports, run, null, { kind: 'not_executed', reason }, () => {})).state
      return { kind: 'none' }
    }
  }
}

/**
 * What answers the request on this replica, whatever the store says: an unsettled outcome, or a run without a claim; where
 * the store cannot be asked (`alone`) any run.
 */
export function meets(ports: Ports, { route }: Call, { id, asked }: Named, alone: boolean): Met | null {
  const held = met(ports.settler.held(id), asked, route)
  const running = ports.running.get(id)
  if (held !== null || running === undefined) return held
  return alone || running.attempt.fence === 0 ? met(runningRecord(running), asked, route) : null
}
