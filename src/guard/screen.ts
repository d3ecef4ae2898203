import { type Decision, decide } from '../core/decide.ts'
import { callerBucket } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { type Claimed, isMet, notAsked } from './claim.ts'
import type { Named } from './name.ts'
import type { Ports } from './ports.ts'

/** Nothing was claimed: the caller's rate of new keys is spent, or the issued key has expired. */
export type Barred = { readonly kind: 'limited'; readonly wait: Millis } | { readonly kind: 'expired' }

/** True where not every key may make a record (contract §4 `issuedOnly`, §10 `newKeys`). */
export function isScreened({ limits }: RoutePolicy, { mayClaim }: Named): boolean {
  return limits.newKeys !== null || !mayClaim
}

/** Looks whether the record is there, and only where it is not, whether it may be made; then claims. */
export async function screened(
  ports: Pick<Ports, 'records' | 'secret' | 'turns'>,
  route: RoutePolicy,
  named: Named,
  token: Buffer,
  claim: () => Promise<Claimed>,
): Promise<Claimed | Barred> {
  // Duplicates of one new key spend one unit, not one each: each looks when the one before it has claimed.
  return ports.turns.take(named.id, async () => {
    try {
      return await look(ports, route, named, claim)
    } catch (error) {
      if (error instanceof CorruptRecord) return { kind: 'corrupt', error }
      if (error instanceof StoreUnavailable) return notAsked(token)
      throw error
    }
  })
}

async function look(
  { records, secret }: Pick<Ports, 'records' | 'secret'>,
  route: RoutePolicy,
  { id, asked, caller, mayClaim }: Named,
  claim: () => Promise<Claimed>,
): Promise<Claimed | Barred> {
  const find = async (): Promise<Decision> => {
    const { record, now } = await records.get(id)
    return record === null ? { kind: 'gone' } : decide(record, asked, route, now)
  }
  const found = await find()
  if (isMet(found)) return { kind: 'met', decision: found }
  if (!mayClaim) return { kind: 'expired' }
  const { newKeys } = route.limits
  if (newKeys === null || found.kind === 'take_over') return claim()
  const bucket = callerBucket(route, caller, secret)
  const wait = await records.throttle(bucket, newKeys, 1)
  if (wait > 0) {
    // Another replica may have claimed it meanwhile: then it is not new.
    const again = await find()
    return isMet(again) ? { kind: 'met', decision: again } : { kind: 'limited', wait }
  }
  const claimed = await claim()
  if (claimed.kind !== 'claimed' || claimed.before !== 'absent')
    // Lost where the store is: one key fewer for the caller, no more.
    void records.throttle(bucket, newKeys, -1).catch(() => {})
  return claimed
}
