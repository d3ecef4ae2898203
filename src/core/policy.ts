import type { Millis } from './record.ts'
import type { Retention } from './settle.ts'

export type Action = 'store' | 'release' | 'unknown'
export type Profile = 'standard' | 'strict' | 'lenient' | 'stripe'
export const PROFILES: readonly Profile[] = ['standard', 'strict', 'lenient', 'stripe']

/** One attribute of the caller, by which two equal keys are told apart (contract §5). */
export type CallerSource =
  | { readonly kind: 'header'; readonly name: string }
  | { readonly kind: 'cookie'; readonly name: string }

export interface KeyPolicy {
  readonly presence: 'required' | 'optional' | 'ignored'
  /** Lower-case header names, any of which may carry the key. */
  readonly from: readonly string[]
  readonly syntax: 'lenient' | 'strict'
  readonly minLength: number
  readonly maxLength: number
  readonly pattern: RegExp | null
  /** The header line sent upstream: as received, none, or under another name. */
  readonly forward: 'same' | 'none' | { readonly header: string }
  readonly forwardFence: boolean
}

export interface ScopePolicy {
  /** Empty: `none`. */
  readonly caller: readonly CallerSource[]
  /** True where the configuration did not set `scope.caller`. */
  readonly callerIsDefault: boolean
  readonly path: 'exact' | 'route' | 'none'
  readonly anonymous: 'share' | 'reject'
}

export interface FingerprintPolicy {
  readonly body: 'auto' | 'json' | 'raw' | 'none'
  /** JSON pointers (RFC 6901). At most one of `ignore` and `only` is not empty. */
  readonly ignore: readonly string[]
  readonly only: readonly string[]
  /** Lower-case header names. */
  readonly headers: readonly string[]
  readonly query: 'include' | 'ignore' | 'sorted'
}

/** A route's own entries: exact statuses ("503") before classes ("5xx"). */
export interface OutcomeTable {
  readonly exact: ReadonlyMap<number, Action>
  /** By first digit. */
  readonly class: ReadonlyMap<number, Action>
}

export interface RouteMatch {
  readonly methods: readonly string[]
  readonly path: string
  readonly exact: boolean
}

/** Everything that decides about requests of one route, resolved: profile and defaults already applied. */
export interface RoutePolicy extends Retention {
  /** Metric label; `default` for what no route matches. */
  readonly name: string
  readonly match: RouteMatch
  readonly mode: 'enforce' | 'off'
  readonly profile: Profile
  readonly key: KeyPolicy
  readonly scope: ScopePolicy
  readonly fingerprint: FingerprintPolicy
  readonly inFlightStatus: 409 | 423 | 425 | 429 | 202 | 503
  readonly misuseStatus: 400 | 409 | 422
  readonly respondWithin: Millis | null
  readonly outcomes: OutcomeTable
  readonly onLeaseExpired: 'unknown' | 'retry'
  readonly onStoreUnavailable: 'reject' | 'bypass'
  readonly keep: 'response' | 'outcome'
  /** Lower-case header names left out of a replay. */
  readonly excludeHeaders: ReadonlySet<string>
  readonly statusHeader: boolean
  /** Bytes. */
  readonly limits: { readonly request: number; readonly response: number }
}
