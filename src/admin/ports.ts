import type { Config } from '../config/config.ts'
import type { Verification } from '../core/reconcile/verify.ts'
import type { Completed, Millis, RecordId } from '../core/record.ts'
import type { Audit } from '../observe/audit.ts'
import type { History } from '../observe/history.ts'
import type { WaitingRoom } from '../protect/waiting-room.ts'
import type { Records } from '../store/records.ts'
import type { Store } from '../store/register.ts'
import type { RecordLookup } from './lookup.ts'

/** What the admin API needs of the process. */
export interface AdminPorts {
  /** What is in force: asked for anew by each request. */
  readonly config: Config
  /** False: `config` is all defaults, so nothing is known of the routes. */
  readonly isConfigured?: boolean
  readonly records: Records
  readonly store: Pick<Store, 'list' | 'remove' | 'ping' | 'history'>
  readonly subjects: RecordLookup
  readonly waiters: Pick<WaitingRoom, 'tell'>
  readonly own: OwnAttempts
  readonly audit: Audit
  readonly history: Pick<History, 'add'>
  /** Readiness fails from now on; everything is still served. */
  readonly announceDrain: () => void
  /** What this process has counted since it started; without it a report tells of the store alone. */
  readonly counters?: () => Promise<{ readonly since: Millis; readonly samples: readonly CounterSample[] }>
  /** Without it nobody is asked: no upstream is known here. */
  readonly recheck?: Recheck
}

/** Asks the upstream about completed records. */
export interface Recheck {
  /** How old a record of the route must be to be asked about; null: it cannot be. */
  readonly from: (route: string) => Millis | null
  readonly ask: (id: RecordId, record: Completed) => Promise<Verification>
}

/** What this process knows of a record beyond the store. */
export interface OwnAttempts {
  /** An attempt of it is under way here. */
  readonly isRunning: (id: RecordId) => boolean
  /** Writes the outcome that is held here, if there is one. False: the store does not take it. */
  readonly tell: (id: RecordId) => Promise<boolean>
}

export interface CounterSample {
  readonly name: string
  readonly labels: Readonly<Record<string, string>>
  readonly value: number
}

/** A request that has passed the gate: token, host, origin. */
export interface AdminRequest {
  /** Of a path that names one. */
  readonly id: string
  readonly query: URLSearchParams
  readonly ifMatch: string | null
  /** Parsed JSON; undefined: there was none. */
  readonly body: unknown
  /** Where it came from. */
  readonly address: string
}
