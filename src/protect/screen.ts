import { type Decision, decide } from '../core/decide.ts'
import { newKeysBucket } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { type ClaimOutcome, isExisting, notClaimed } from './claim.ts'
import type { Identified } from './identify.ts'
import type { Ports } from './ports.ts'

/** Nothing was claimed: the caller's rate of new keys is spent, or the issued key has expired. */
export type Barred = { readonly kind: 'limited'; readonly wait: Millis } | { readonly kind: 'expired' }

/** True where not every key may make a record (contract §4 `issuedOnly`, §10 `newKeys`). */
export function isScreened({ limits }: RoutePolicy, { mayClaim }: Identified): boolean {
  return limits.newKeys !== null || !mayClaim
}

/** Looks whether the record is there, and only where it is not, whether it may be made; then claims. */
export async function claimScreened(
  ports: Pick<Ports, 'records' | 'store' | 'namespace' | 'turns'>,
  route: RoutePolicy,
  identified: Identified,
  token: Buffer,
  claim: () => Promise<ClaimOutcome>,
): Promise<ClaimOutcome | Barred> {
  // Duplicates of one new key spend one unit, not one each: each looks when the one before it has claimed.
  return ports.turns.run(identified.id, async () => {
    try {
      return await look(ports, route, identified, claim)
    } catch (error) {
      if (error instanceof CorruptRecord) return { kind: 'corrupt', error }
      if (error instanceof StoreUnavailable) return notClaimed(token)
      throw error
    }
  })
}

async function look(
  { records, store, namespace }: Pick<Ports, 'records' | 'store' | 'namespace'>,
  route: RoutePolicy,
  { id, asked, caller, mayClaim }: Identified,
  claim: () => Promise<ClaimOutcome>,
): Promise<ClaimOutcome | Barred> {
  const find = async (): Promise<Decision> => {
    const { record, now } = await records.get(id)
    return record === null ? { kind: 'gone' } : decide(record, asked, route, now)
  }
  const found = await find()
  if (isExisting(found)) return { kind: 'existing', decision: found }
  if (!mayClaim) return { kind: 'expired' }
  const { newKeys } = route.limits
  if (newKeys === null || found.kind === 'take_over') return claim()
  const bucket = newKeysBucket(namespace, route, caller)
  const wait = await store.limits.take(bucket, newKeys, 1)
  if (wait > 0) {
    // Another replica may have claimed it meanwhile: then it is not new.
    const again = await find()
    return isExisting(again) ? { kind: 'existing', decision: again } : { kind: 'limited', wait }
  }
  const claimed = await claim()
  if (claimed.kind !== 'claimed' || claimed.before !== 'absent')
    // Lost where the store is: one key fewer for the caller, no more.
    void store.limits.take(bucket, newKeys, -1).catch(() => {})
  return claimed
}
