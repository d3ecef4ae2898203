import { shortId } from '../core/record.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Answer, Call, Run, Trace } from './call.ts'
import {
  type ClaimOutcome,
  claim,
  type Execute,
  type Existing,
  existing,
  giveBack,
  notClaimed,
} from './claim.ts'
import { finish } from './execute.ts'
import type { Identified } from './identify.ts'
import { runningRecord } from './outcome.ts'
import type { Ports } from './ports.ts'
import { claimScreened, isScreened } from './screen.ts'

/** A record answers; or this request executes; or neither is possible, and the answer says why. */
export type Admitted = { readonly kind: 'existing'; readonly existing: Existing } | Execute | Answer

/** Claims the record, unless it is there and answers. */
export async function admit(
  ports: Ports,
  call: Call,
  trace: Trace,
  identified: Identified,
): Promise<Admitted> {
  const { route } = call
  const { id, operation, asked } = identified
  const known = meets(ports, call, identified, false)
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
      const run: Run = { id, route, operation, attempt: claimed.attempt, createdAt: 0, ended: null }
      const bypass =
        route.onStoreUnavailable === 'bypass' &&
        identified.mayClaim &&
        !ports.settler.full &&
        !call.clientGone()
      // Others may have come further while the store was asked.
      const own = meets(ports, call, identified, bypass)
      if (bypass && own === null) {
        ports.observer.claimed(route.name, 'error')
        ports.running.set(id, run)
        ports.observer.began(run, trace.before)
        return { kind: 'execute', run, askedAt, unclaimed: claimed }
      }
      if (claimed.lost) ports.settler.withdraw(run, claimed)
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
      const { run, before } = claimed
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

/** A claim came through over a run that this replica knows of, which is to have the record back. */
async function yieldTo(
  ports: Ports,
  other: Run,
  { run, version, before }: Extract<ClaimOutcome, { kind: 'claimed' }>,
): Promise<void> {
  const given = await giveBack(ports.records, version, other)
  ports.observer.trouble(
    'the store forgot a run of this replica; the retry that claimed its record executes nothing',
    {
      route: run.route.name,
      record: shortId(run.id),
      fence: other.attempt.fence,
      found: before,
    },
  )
  if (given) return
  const reason = 'claimed over a run whose record the store had lost'
  await ports.settler.settle(run, { kind: 'unknown', reason, status: null }, () => {})
}

/**
 * What answers the request on this replica, whatever the store says: an unsettled outcome, or a run without a claim; where
 * the store cannot be asked (`alone`) any run.
 */
export function meets(
  ports: Ports,
  { route }: Call,
  { id, asked }: Identified,
  alone: boolean,
): Existing | null {
  const held = existing(ports.settler.held(id), asked, route)
  const running = ports.running.get(id)
  if (held !== null || running === undefined) return held
  return alone || running.attempt.fence === 0 ? existing(runningRecord(running), asked, route) : null
}
