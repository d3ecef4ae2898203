import type { RawHeaders } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, Millis, Operation, Outcome, RecordId, State, StoredResponse } from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import type { LiveResponse } from '../upstream/port.ts'
import type { ClaimResult, CompletionResult, RequestOutcome } from './outcomes.ts'

/** A protected request as the walk sees it: no socket, no framework. */
export interface ProtectedRequest {
  readonly route: RoutePolicy
  readonly method: string
  /** Origin form, as sent. */
  readonly target: string
  /** What the route compares: normalised, or as sent under `match.exact`. */
  readonly path: string
  readonly query: string
  /** Normalised; null where the route's scope has no host, or the request none. */
  readonly host: string | null
  readonly headers: RawHeaders
  /** The client's address, as far as it is known: an IPv4 address, or the /64 of an IPv6 one. */
  readonly client: string
  readonly traceId: string | null
  /** `traceparent` of the request's own sampled span, where one is made: kept with what it executes. */
  readonly span?: string | undefined
  /** `Location` of this request's state, for a 202 (contract §6); empty where `status.path` is off. */
  readonly statusLink: readonly string[]
  readBody(): Promise<BodyReading>
  /** The lines sent upstream: for that attempt, or, null, as a request that is not protected has them. */
  upstreamHeaders(attempt: SentAttempt | null): string[]
  clientGone(): boolean
  /** Calls `left` once when the client leaves before its answer is whole; gives what ends that. */
  onGone(left: () => void): () => void
}

/** What an attempt is called towards the upstream. */
export interface SentAttempt {
  readonly id: RecordId
  readonly key: string
  readonly fence: number
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
      readonly proxyHeaders: readonly string[]
      readonly release: () => void
    }
  | { readonly kind: 'live'; readonly live: LiveResponse; readonly proxyHeaders: readonly string[] }
  | Problem
  /** The client is gone: nobody to answer. */
  | { readonly kind: 'none' }

export interface Problem {
  readonly kind: 'problem'
  readonly refusal: Refusal
  readonly proxyHeaders: readonly string[]
}

/** What the log line and the metrics of one protected request are made of. Filled in along the walk. */
export interface Trace {
  readonly route: string
  readonly method: string
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
  /** How old the record was that a retry found completed. */
  retryAge: Millis | null
  /** The same caller sent the same operation under another key within a minute. */
  regenerated: boolean
  /** `traceparent` of the execution whose answer is replayed, where its record has one. */
  execution: string | null
}

export function newTrace({
  route,
  method,
  traceId,
}: Pick<ProtectedRequest, 'route' | 'method' | 'traceId'>): Trace {
  return {
    route: route.name,
    method,
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
    retryAge: null,
    regenerated: false,
    execution: null,
  }
}

/** Hears what the walk does; must not throw. */
export interface Observer {
  answered(trace: Trace): void
  claimed(route: string, result: ClaimResult): void
  /** An attempt is about to be sent upstream. `before`: what its claim found; null where there is no claim. */
  began(execution: Execution, before: State | 'absent' | null): void
  completed(route: string, result: CompletionResult, id: RecordId): void
  prevented(route: string): void
  retryAge(route: string, age: Millis): void
  leaseExpired(route: string): void
  leaseUse(route: string, ratio: number): void
  /** The same caller sent the same operation under a new key within a minute. */
  regenerated(route: string): void
  trouble(message: string, detail: Readonly<Record<string, unknown>>): void
}

/** One attempt under way, or one whose outcome is still to be written. */
export interface Execution {
  readonly id: RecordId
  readonly route: RoutePolicy
  readonly operation: Operation
  readonly attempt: Attempt
  /** The store's time of the record's creation; 0 where the claim never got through. */
  readonly createdAt: Millis
  /** How the attempt ended, from the moment that its outcome is known; null: it goes on. */
  ended: Outcome | null
}
