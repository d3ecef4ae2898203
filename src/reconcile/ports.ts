import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import type { Proof } from '../core/reconcile/verify.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { StoreClock } from '../core/store-clock.ts'
import type { ReconcileResult } from '../protect/outcomes.ts'
import type { Records } from '../store/records.ts'
import type { Register } from '../store/register.ts'
import type { Forward } from '../upstream/port.ts'

/** Observes unresolved records; must not throw. */
export interface ReconcileObserver {
  /** A lapsed lease was recorded. */
  leaseExpired(route: string, id: RecordId): void
  reconciled(route: string, result: ReconcileResult, id: RecordId): void
  /** The record will be dropped unresolved at `dropAt`. Called once. */
  expiring(route: string, id: RecordId, dropAt: Millis): void
  trouble(message: string, detail: Readonly<Record<string, unknown>>): void
}

/** Timeout of a status query. It can be repeated, so it is tighter than `upstream.timeout`. */
export const STATUS_QUERY_TIMEOUT: Millis = 10_000

/** The ports of the workers on unresolved records. */
export interface ReconcilePorts {
  readonly records: Pick<Records, 'get' | 'replace'>
  readonly store: Pick<Register, 'due' | 'ping' | 'pingOther'>
  readonly forward: Forward
  /** Tag of the upstream that status queries go to. */
  readonly upstream: string
  /** How long `forward` may take. */
  readonly queryTimeout: () => Millis
  /** Null: the configuration no longer has such a route. */
  readonly policyOf: (route: string) => RoutePolicy | null
  /** This replica runs the attempt or holds its outcome, and will write it. */
  readonly isOwn: (id: RecordId) => boolean
  /** Whether the route's status query finds known requests, so that its "not found" may free a key. */
  readonly prove: (route: RoutePolicy, policy: ReconcilePolicy) => Promise<Proof>
  /** Wakes duplicates waiting on this replica. */
  readonly wake: (id: RecordId) => void
  readonly observer: ReconcileObserver
  /** 0 to below 1. */
  readonly random: () => number
  /** This process's observations of the store's clock, by `monotonic`. */
  readonly clock: StoreClock
  /** The same for `pingOther`, if there is one. */
  readonly otherClock: StoreClock
  readonly monotonic: () => Millis
}
