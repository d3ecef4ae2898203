import type { RawHeaders } from '../core/headers.ts'
import type { Namespace, VerifiedToken } from '../core/identity.ts'
import type { JwtPolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Descriptors } from '../core/rpc/descriptors.ts'
import type { InFlight } from '../runtime/limits.ts'
import type { RecordMap } from '../runtime/record-map.ts'
import type { KeyedMutex } from '../runtime/scheduling.ts'
import type { Records } from '../store/records.ts'
import type { Store, StoreFitness } from '../store/register.ts'
import type { Forward } from '../upstream/port.ts'
import type { AnswerPorts } from './answers.ts'
import type { Leases } from './leases.ts'
import type { CallerChanges, KeyChurn, RecentGrants } from './recent.ts'
import type { Execution } from './request.ts'
import type { Settler } from './settler.ts'
import type { WaitingRoom } from './waiting-room.ts'

/** The ports of the walk. */
export interface WalkPorts extends AnswerPorts {
  readonly records: Records
  readonly store: Pick<Store, 'ping' | 'limits'>
  readonly forward: Forward
  /** Tag of the upstream, stored in records to name where their request was sent. */
  readonly upstream: string
  readonly leases: Leases
  readonly settler: Settler
  readonly waiters: WaitingRoom
  readonly locks: KeyedMutex
  readonly grants: RecentGrants
  readonly keyChurn: KeyChurn
  readonly callerChanges: CallerChanges
  /** Running attempts; the drain waits for them. */
  readonly running: RecordMap<Execution>
  readonly namespace: Namespace
  /** `grpc.descriptors`; null: none are given. */
  readonly descriptors: Descriptors | null
  /** Unless it is fit, or the risk was accepted, `strict` routes refuse (contract §9). */
  readonly storeFitness: () => StoreFitness
  readonly verifyToken: (policy: JwtPolicy, headers: RawHeaders) => Promise<VerifiedToken>
  /** Whether this proxy's issuer made the key. `now` is the store's time. */
  readonly checkIssued: (key: string, now: Millis) => Promise<'valid' | 'expired' | 'forged'>
  readonly pause: (time: Millis) => Promise<unknown>
  /** How long a request waits in all for claims that a grace holds back: twice its length, to which rewritten claims can extend it. */
  readonly holdAtMost: Millis
  /** 16 random bytes. */
  readonly newToken: () => Buffer
  /** Requests in the walk now, including those that wait. */
  readonly inFlight: InFlight
}
