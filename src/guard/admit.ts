import { decide } from '../core/decide.ts'
import { callerBucket } from '../core/identity.ts'
import { type Millis, shortId } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { refuse, storeUnavailable } from './answers.ts'
import type { Answer, Call, Run, Trace } from './call.ts'
import { claim, type Execute, giveBack, isMet, type Met, met, notAsked } from './claim.ts'
import { finish } from './execute.ts'
import type { Named } from './name.ts'
import { runningRecord } from './outcome.ts'
import type { Ports } from './ports.ts'

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
  const screened: Screened = settled ? await screen(ports, call, named) : { kind: 'unavailable' }
  const claimed =
    screened.kind === 'pass'
      ? await claim(ports.records, route, id, operation, asked, token, ports.pause)
      : screened.kind === 'unavailable'
        ? notAsked(token)
        : screened
  trace.storeMs += performance.now() - askedAt
  if (screened.kind === 'pass' && (claimed.kind !== 'claimed' || claimed.before !== 'absent'))
    screened.giveBack()
  switch (claimed.kind) {
    case 'met':
      return { kind: 'met', met: claimed.decision }
    case 'limited':
      return refuse(trace, 'rate_limited', 'rate_limited', 'too many new keys; nothing was executed', {
        retryAfter: Math.ceil(claimed.wait / 1000),
        instance: id,
      })
    case 'expired': {
      const detail = 'the issued key has expired, and nothing is known under it'
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
        return { kind: 'execute', run, unclaimed: claimed }
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
      if (before === 'unknown') ports.observer.leaseExpired(route.name)
      ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
      if (!call.clientGone()) {
        ports.running.set(id, run)
        return { kind: 'execute', run, unclaimed: null }
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

type Screened =
  /** `giveBack` returns the unit that a new key takes from the caller's rate, if one was taken. */
  | { readonly kind: 'pass'; readonly giveBack: () => void }
  | { readonly kind: 'met'; readonly decision: Met }
  | { readonly kind: 'limited'; readonly wait: Millis }
  | { readonly kind: 'expired' }
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }
  | { readonly kind: 'unavailable' }

const PASS: Screened = { kind: 'pass', giveBack: () => {} }

/** Where not every key may make a record: looks whether there is one before it claims (contract §4 `issuedOnly`, §10 `newKeys`). */
async function screen(ports: Ports, { route }: Call, named: Named): Promise<Screened> {
  const { newKeys } = route.limits
  if (newKeys === null && named.mayClaim) return PASS
  try {
    const { record, now } = await ports.records.get(named.id)
    const decision = record === null ? null : decide(record, named.asked, route, now)
    if (decision !== null && isMet(decision)) return { kind: 'met', decision }
    if (!named.mayClaim) return { kind: 'expired' }
    if (newKeys === null || decision?.kind === 'take_over') return PASS
    const bucket = callerBucket(route, named.caller, ports.secret)
    const wait = await ports.records.throttle(bucket, newKeys, 1)
    if (wait > 0) return { kind: 'limited', wait }
    // Lost where the store is: one key fewer for the caller, no more.
    const giveBack = (): void => void ports.records.throttle(bucket, newKeys, -1).catch(() => {})
    return { kind: 'pass', giveBack }
  } catch (error) {
    if (error instanceof CorruptRecord) return { kind: 'corrupt', error }
    if (error instanceof StoreUnavailable) return { kind: 'unavailable' }
    throw error
  }
}
