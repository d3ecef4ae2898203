import { shortId } from '../core/record.ts'
import { refuse, storeUnavailable } from './answers.ts'
import {
  type ClaimOutcome,
  claim,
  type Execute,
  type Existing,
  existing,
  giveBack,
  notClaimed,
} from './claim.ts'
import { runningRecord } from './classify.ts'
import { finish } from './execute.ts'
import type { Identified } from './identify.ts'
import type { Ports } from './ports.ts'
import type { Answer, Execution, ProtectedRequest, Trace } from './request.ts'
import { claimScreened, isScreened } from './screen.ts'

/** A record answers; or this request executes; or neither is possible, and the answer says why. */
export type Admitted = { readonly kind: 'existing'; readonly existing: Existing } | Execute | Answer

/** Claims the record, unless it is there and answers. */
export async function admit(
  ports: Ports,
  request: ProtectedRequest,
  trace: Trace,
  identified: Identified,
): Promise<Admitted> {
  const { route } = request
  const { id, operation, asked } = identified
  const known = meets(ports, request, identified, false)
  if (known !== null) return { kind: 'existing', existing: known }
  const earlier = ports.running.get(id)
  // What was not executed must be told to the store before anybody claims.
  const askedAt = performance.now()
  const settled = await ports.settler.flush(id)
  if (route.profile === 'strict' && ports.unfitForStrict())
    return storeUnavailable(
      ports,
      trace,
      id,
      'the store may evict unexpired records, or does not say that it keeps them, which profile strict does not accept (store.acceptRisk)',
    )

  const token = ports.newToken()
  const asking = (): Promise<ClaimOutcome> =>
    claim(ports.records, route, id, operation, asked, token, ports.pause)
  const claimed = !settled
    ? notClaimed(token)
    : isScreened(route, identified)
      ? await claimScreened(ports, route, identified, token, asking)
      : await asking()
  trace.storeMs += performance.now() - askedAt
  switch (claimed.kind) {
    case 'existing':
      return { kind: 'existing', existing: claimed.decision }
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
      const execution: Execution = {
        id,
        route,
        operation,
        attempt: claimed.attempt,
        createdAt: 0,
        ended: null,
      }
      const bypass =
        route.onStoreUnavailable === 'bypass' &&
        identified.mayClaim &&
        !ports.settler.full &&
        !request.clientGone()
      // Others may have come further while the store was asked.
      const own = meets(ports, request, identified, bypass)
      if (bypass && own === null) {
        ports.observer.claimed(route.name, 'error')
        ports.running.set(id, execution)
        ports.observer.began(execution, trace.before)
        return { kind: 'execute', execution, askedAt, unclaimed: claimed }
      }
      if (claimed.lost) ports.settler.withdraw(execution, claimed)
      if (own !== null) return { kind: 'existing', existing: own }
      trace.cause = (claimed.error as Error).message
      return storeUnavailable(
        ports,
        trace,
        id,
        'the store does not answer; nothing was executed for this request',
      )
    }
    case 'claimed': {
      const { execution, before } = claimed
      trace.before = before
      // Whatever the store says: what this replica knows to be under way, or to have ended while it asked, is not done twice.
      const other = ports.running.get(id) ?? earlier
      const own = other === undefined ? null : existing(runningRecord(other), asked, route)
      if (other !== undefined && own !== null) {
        await yieldTo(ports, other, claimed)
        return { kind: 'existing', existing: own }
      }
      if (claimed.lapsed) ports.observer.leaseExpired(route.name)
      ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
      if (!request.clientGone()) {
        ports.running.set(id, execution)
        ports.observer.began(execution, trace.before)
        return { kind: 'execute', execution, askedAt: claimed.askedAt, unclaimed: null }
      }
      const reason = 'the client left before the request was sent'
      trace.after = (await finish(ports, execution, null, { kind: 'not_executed', reason }, () => {})).state
      return { kind: 'none' }
    }
  }
}

/** A claim came through over an execution that this replica knows of, which is to have the record back. */
async function yieldTo(
  ports: Ports,
  other: Execution,
  { execution, version, before }: Extract<ClaimOutcome, { kind: 'claimed' }>,
): Promise<void> {
  const given = await giveBack(ports.records, version, other)
  ports.observer.trouble(
    'the store forgot a run of this replica; the retry that claimed its record executes nothing',
    {
      route: execution.route.name,
      record: shortId(execution.id),
      fence: other.attempt.fence,
      found: before,
    },
  )
  if (given) return
  const reason = 'claimed over a run whose record the store had lost'
  await ports.settler.settle(execution, { kind: 'unknown', reason, status: null }, () => {})
}

/**
 * What answers the request on this replica, whatever the store says: an unsettled outcome, or an execution without a claim; where
 * the store cannot be asked (`alone`) any execution.
 */
export function meets(
  ports: Ports,
  { route }: ProtectedRequest,
  { id, asked }: Identified,
  alone: boolean,
): Existing | null {
  const held = existing(ports.settler.held(id), asked, route)
  const running = ports.running.get(id)
  if (held !== null || running === undefined) return held
  return alone || running.attempt.fence === 0 ? existing(runningRecord(running), asked, route) : null
}
