import type { RawHeaders } from '../core/headers.ts'
import type { Namespace, VerifiedToken } from '../core/identity.ts'
import type { JwtPolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { KeyedMutex } from '../runtime/keyed-mutex.ts'
import type { InFlight } from '../runtime/limits.ts'
import type { RecordMap } from '../runtime/record-map.ts'
import type { Records } from '../store/records.ts'
import type { Store } from '../store/register.ts'
import type { Forward } from '../upstream/port.ts'
import type { AnswerPorts } from './answers.ts'
import type { KeyChurn } from './key-churn.ts'
import type { Leases } from './leases.ts'
import type { Execution } from './request.ts'
import type { Settler } from './settler.ts'
import type { WaitingRoom } from './waiting-room.ts'

/** What the walk needs of the world. */
export interface Ports extends AnswerPorts {
  readonly records: Records
  readonly store: Pick<Store, 'ping' | 'limits'>
  readonly forward: Forward
  /** Tag of the upstream: records name the one that their request was sent to. */
  readonly upstream: string
  readonly leases: Leases
  readonly settler: Settler
  readonly waiters: WaitingRoom
  readonly turns: KeyedMutex
  readonly grants: ReplayGrants
  readonly keyChurn: KeyChurn
  /** Attempts under way; the drain waits for them. */
  readonly running: RecordMap<Execution>
  readonly namespace: Namespace
  /** The store may evict unexpired records and nobody accepted that risk: `strict` routes refuse (contract §9). */
  readonly unfitForStrict: () => boolean
  readonly verifyToken: (policy: JwtPolicy, headers: RawHeaders) => Promise<VerifiedToken>
  /** Whether this proxy's issuer made the key. `now` is the store's time. */
  readonly checkIssued: (key: string, now: Millis) => Promise<'valid' | 'expired' | 'forged'>
  readonly pause: (time: Millis) => Promise<unknown>
  /** 16 random bytes. */
  readonly newToken: () => Buffer
  /** As the configuration has it now. */
  readonly maxInFlight: number
  /** Requests in the walk now, whatever they wait for. */
  readonly inFlight: InFlight
}

/** Callers whom the upstream has lately allowed to see a replay (`authorizeReplay.cache`). */
export interface ReplayGrants {
  has(caller: string): boolean
  add(caller: string, time: Millis): void
}
