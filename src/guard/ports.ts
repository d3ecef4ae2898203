import type { ByRecord } from '../core/by-record.ts'
import type { Verified } from '../core/claims.ts'
import type { RawHeaders } from '../core/headers.ts'
import type { JwtPolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Records } from '../store/records.ts'
import type { Forward } from '../upstream/port.ts'
import type { Teller } from './answers.ts'
import type { ReplayGrants } from './authorize.ts'
import type { Run } from './call.ts'
import type { Leases } from './leases.ts'
import type { RegeneratedKeys } from './regenerated.ts'
import type { Settler } from './settler.ts'
import type { Turns } from './turns.ts'
import type { Waiters } from './waiters.ts'

/** What the walk needs of the world. */
export interface Ports extends Teller {
  readonly records: Records
  readonly forward: Forward
  readonly leases: Leases
  readonly settler: Settler
  readonly waiters: Waiters
  readonly turns: Turns
  readonly grants: ReplayGrants
  readonly regenerated: RegeneratedKeys
  /** Attempts under way; the drain waits for them. */
  readonly running: ByRecord<Run>
  /** Key of the record ids, where `store.secretFile` is set. */
  readonly secret: Buffer | null
  /** The store may drop unexpired records and nobody accepted that risk: `strict` routes refuse (contract §9). */
  readonly unfitForStrict: () => boolean
  readonly verifyToken: (policy: JwtPolicy, headers: RawHeaders) => Promise<Verified>
  /** Whether the key is one of this proxy's issuer. `now` is the store's time. */
  readonly checkIssued: (key: string, now: Millis) => Promise<'valid' | 'expired' | 'forged'>
  readonly pause: (time: Millis) => Promise<unknown>
  /** 16 random bytes. */
  readonly newToken: () => Buffer
  /** As the configuration has it now. */
  readonly maxInFlight: number
  /** Requests of the walk now, whatever they wait for. */
  readonly inFlight: { count: number }
}
