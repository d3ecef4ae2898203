import { firstOf } from './headers.ts'

/** Milliseconds: an instant of the store's clock (Unix epoch), or a duration where the name ends in `In` or `For`. */
export type Millis = number

declare const brand: unique symbol
/** base64url of a SHA-256 over the scope and the key: the only name of a record outside the store (contract §1). */
export type RecordId = string & { readonly [brand]: 'RecordId' }
/** SHA-256 of the operation's content, 32 bytes (contract §5). */
export type Fingerprint = Buffer & { readonly [brand]: 'Fingerprint' }

export const RECORD_ID = /^[A-Za-z0-9_-]{43}$/

/** A record id, or enough of its beginning to be unique in practice. */
export const ID_BEGINNING = /^[A-Za-z0-9_-]{8,43}$/

export const STATES = ['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const
export type State = (typeof STATES)[number]
/** States whose outcome is still to come. */
export const UNRESOLVED: readonly State[] = ['in_progress', 'unknown']

/** A whole upstream answer as it is replayed. Header and trailer lines are flat name–value lists, as received. */
export interface StoredResponse {
  readonly status: number
  readonly reason: string
  readonly headers: readonly string[]
  readonly body: Buffer
  readonly trailers: readonly string[]
}

/** Why a completed record has no response to replay (contract §6, `idempotency_response_unavailable`). */
export const NOT_KEPT = ['too_large', 'streamed', 'outcome_only', 'no_room', 'past_ttl'] as const
export type NotKept = (typeof NOT_KEPT)[number]

export type CompletedResponse =
  | {
      readonly kept: true
      readonly response: StoredResponse
      /** How long the record goes on answering once its response is gone (`ttl.body`); absent: both end together. */
      readonly afterBody?: Millis
    }
  | {
      readonly kept: false
      readonly why: NotKept
      readonly status: number
      readonly location: string | null
    }

/** Identifiers by which an upstream may know a request: the client's key, or the record id. */
export const IDENTIFIERS = ['key', 'record'] as const
export type Identifier = (typeof IDENTIFIERS)[number]

/** The request, the same for every attempt of a record. */
export interface Operation {
  readonly route: string
  readonly method: string
  /** Normalised path (contract §10), without the query. */
  readonly path: string
  readonly fingerprint: Fingerprint
  /** Digest of the request as sent: recognises an unchanged request after a change of recipe (contract §5). */
  readonly rawDigest: Buffer
  /** Names the algorithm version and settings that made `fingerprint`. */
  readonly recipe: string
  /** Digests of the request's other parts (`partsOf`), to say what differs in another one. Absent: the usual ones. */
  readonly parts?: string | undefined
  /** What an operator searches the upstream for (`record.label`); absent: the request has none. */
  readonly label?: string | undefined
  /** The client's key, if the route's `reconcile` asks by it (contract §1); else null. */
  readonly key: string | null
  /** The key as the upstream received it, if spelled differently (in quotes): it may know the request by that alone. */
  readonly keySent?: string
  /**
   * Identifiers that the upstream received with every attempt that may have executed; absent: none, or unknown. A query by any other
   * identifier that is answered "not found" proves nothing (docs/adr/0042).
   */
  readonly received?: readonly Identifier[]
  /** Which upstream that was (`upstreamTag`); absent without `received`, or unknown. */
  readonly receivedBy?: string
  /** The route's lease at the claim, if a status query may free the record: how long its owner may be silent, even after a reload. */
  readonly lease?: Millis
  /** `traceparent` of the span that executes it, if sampled (docs/tracing.md). */
  readonly span?: string | undefined
  /** The route settings that an upstream needs to end the attempt itself (`completionTerms`). */
  readonly completion?: string | undefined
}

/** `fence` orders attempts (0: not yet known); `token`, 16 random bytes, is the owner's secret. */
export interface Attempt {
  readonly fence: number
  readonly token: Buffer
  /** How often the record has been claimed, this attempt included. */
  readonly attempts: number
}

interface Common extends Operation, Attempt {
  readonly version: number
  readonly createdAt: Millis
  readonly updatedAt: Millis
  /** When the store forgets the record. */
  readonly dropAt: Millis
  readonly lastError: string | null
}

export interface InProgress extends Common {
  readonly state: 'in_progress'
  readonly leaseUntil: Millis
}
export interface Completed extends Common {
  readonly state: 'completed'
  readonly expiresAt: Millis
  readonly result: CompletedResponse
}
export interface FailedRetryable extends Common {
  readonly state: 'failed_retryable'
}
/** Progress of reconciling an unknown record (contract §10 `reconcile`). */
export interface Reconciliation {
  /** When it became unknown; `updatedAt` moves with every check. */
  readonly since: Millis
  /** Number of status queries sent. */
  readonly asked: number
  /** Consecutive "not found" answers up to now. */
  readonly notFound: number
  /** Still unknown after all status queries that the route allows: a person has to decide. */
  readonly deadLettered: boolean
  /** A warning was logged that the record will be dropped unresolved. */
  readonly reported: boolean
  /** The last answer, for people: statuses and pointers, no body content. */
  readonly answer: string | null
}

export interface Unknown extends Common {
  readonly state: 'unknown'
  /** Null until the sweeper has checked it. */
  readonly reconciliation: Reconciliation | null
  /** The next scheduled check: `Retry-After` counts down to it. */
  readonly nextLookAt: Millis
  /** The lease lapsed: `onLeaseExpired: retry` may claim the record. */
  readonly leaseExpired: boolean
  /** The upstream's status, if its head had arrived. */
  readonly status: number | null
}
/** A tombstone: completed, but the response is gone. */
export interface Expired extends Common {
  readonly state: 'expired'
}

export type IdempotencyRecord = InProgress | Completed | FailedRetryable | Unknown | Expired

/**
 * The record as read at `now` (the store's clock): a lapsed lease is `unknown`, a completed record past its retention is `expired`, and one
 * past its `ttl.body` has no response (contract §2). `null`: it no longer exists.
 */
export function readAt(record: IdempotencyRecord, now: Millis): IdempotencyRecord | null {
  if (now >= record.dropAt) return null
  if (record.state === 'in_progress' && now >= record.leaseUntil) {
    const { leaseUntil, ...common } = record
    return {
      ...common,
      state: 'unknown',
      nextLookAt: leaseUntil,
      leaseExpired: true,
      status: null,
      reconciliation: newReconciliation(leaseUntil),
    }
  }
  if (record.state === 'completed' && now >= record.expiresAt) {
    const { expiresAt: _e, result: _r, ...common } = record
    return { ...common, state: 'expired' }
  }
  if (record.state === 'completed' && record.result.kept) {
    const { response, afterBody = 0 } = record.result
    if (now >= record.expiresAt - afterBody) return { ...record, result: withoutBody(response, 'past_ttl') }
  }
  return record
}

/** The result of a response that is not kept. */
export function withoutBody(
  { status, headers }: { readonly status: number; readonly headers: readonly string[] },
  why: NotKept,
): CompletedResponse {
  return { kept: false, why, status, location: firstOf(headers, 'location') }
}

/** The schedule of a record that became unknown at `now`. */
export function newReconciliation(since: Millis): Reconciliation {
  return { since, asked: 0, notFound: 0, deadLettered: false, reported: false, answer: null }
}

/** How an attempt ended, according to its owner or a resolution. */
export type Outcome =
  | { readonly kind: 'completed'; readonly result: CompletedResponse }
  | { readonly kind: 'not_executed'; readonly reason: string }
  | { readonly kind: 'unknown'; readonly reason: string; readonly status: number | null }

/** A record before the store stamps version, fence and times on it. */
export type RecordDraft = Operation &
  Attempt & {
    readonly lastError: string | null
    /** Preserved when a lost record is rewritten; 0: the store's time. */
    readonly createdAt: Millis
  } & (
    | { readonly state: 'in_progress' }
    | { readonly state: 'completed'; readonly result: CompletedResponse }
    | { readonly state: 'failed_retryable' }
    | {
        readonly state: 'unknown'
        readonly leaseExpired: boolean
        readonly status: number | null
        readonly reconciliation: Reconciliation | null
      }
    | { readonly state: 'expired' }
  )

/** From the store's now: until the lease, the next check or the retention ends, and until the record is dropped. */
export interface Spans {
  readonly dueIn: Millis
  readonly dropIn: Millis
}
