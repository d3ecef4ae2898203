import type { RawHeaders } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, Millis, Operation, RecordId, State, StoredResponse } from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import type { LiveResponse } from '../upstream/port.ts'

/** A protected request as the walk sees it: no socket, no framework. */
export interface Call {
  readonly route: RoutePolicy
  readonly method: string
  /** Origin form, as sent. */
  readonly target: string
  /** What the route compares: normalised, or as sent under `match.exact`. */
  readonly path: string
  readonly query: string
  readonly headers: RawHeaders
  readonly traceId: string | null
  readBody(): Promise<BodyReading>
  /** The lines sent upstream for this attempt. */
  upstreamHeaders(id: RecordId, key: string, fence: number): string[]
  clientGone(): boolean
}

export type BodyReading =
  | { readonly kind: 'body'; readonly body: Buffer; readonly release: () => void }
  | { readonly kind: 'too_large' | 'timeout' | 'aborted' | 'no_room' }

/** How a protected request was answered. */
export type Answer =
  | {
      readonly kind: 'response'
      readonly response: StoredResponse
      readonly replayed: boolean
      /** Header lines of the proxy's own. */
      readonly marks: readonly string[]
      readonly release: () => void
    }
  | { readonly kind: 'live'; readonly live: LiveResponse; readonly marks: readonly string[] }
  | { readonly kind: 'problem'; readonly refusal: Refusal }
  /** The client is gone: nobody to answer. */
  | { readonly kind: 'none' }

/** `outcome` of `idempotency_requests_total` (contract §13) as far as this version gives them. */
export const REQUEST_OUTCOMES = [
  'executed',
  'replayed',
  'in_progress',
  'misuse',
  'key_missing',
  'key_invalid',
  'unknown',
  'response_unavailable',
  'expired',
  'store_unavailable',
  'bypassed',
  'upstream_unreachable',
  'upstream_failed',
  'upstream_timeout',
  'upstream_slow',
  'caller_missing',
  'request_too_large',
  'request_timeout',
  'overloaded',
  'passed',
] as const
export type RequestOutcome = (typeof REQUEST_OUTCOMES)[number]

export const CLAIM_RESULTS = [
  'created',
  'replay',
  'in_progress',
  'key_misuse',
  'failed_retry',
  'unknown',
  'error',
] as const
export type ClaimResult = (typeof CLAIM_RESULTS)[number]

export const COMPLETION_RESULTS = [
  'stored',
  'released',
  'unknown',
  'too_large',
  'stale',
  'recovered',
  'deferred',
] as const
export type CompletionResult = (typeof COMPLETION_RESULTS)[number]

/** What the log line and the metrics of one protected request are made of. Filled in along the walk. */
export interface Trace {
  readonly route: string
  readonly traceId: string | null
  readonly startedAt: Millis
  id: RecordId | null
  outcome: RequestOutcome | null
  before: State | 'absent' | null
  after: State | null
  fence: number | null
  status: number | null
  upstreamMs: number
  storeMs: number
  /** For operators: what the client is not told of, such as addresses. */
  cause: string | null
}

export function newTrace(route: string, traceId: string | null): Trace {
  return {
    route,
    traceId,
    startedAt: performance.now(),
    id: null,
    outcome: null,
    before: null,
    after: null,
    fence: null,
    status: null,
    upstreamMs: 0,
    storeMs: 0,
    cause: null,
  }
}

/** Hears what the walk does; must not throw. */
export interface Observer {
  answered(trace: Trace): void
  claimed(route: string, result: ClaimResult): void
  completed(route: string, result: CompletionResult, id: RecordId): void
  prevented(route: string): void
  retryAge(route: string, age: Millis): void
  leaseExpired(route: string): void
  leaseUse(route: string, ratio: number): void
  trouble(message: string, detail: Readonly<Record<string, unknown>>): void
}

/** One attempt under way, or one whose outcome is still to be written. */
export interface Run {
  readonly id: RecordId
  readonly route: RoutePolicy
  readonly operation: Operation
  readonly attempt: Attempt
  /** The store's time of the record's creation; 0 where the claim never got through. */
  readonly createdAt: Millis
}
