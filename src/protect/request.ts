import type { Decision } from '../core/decide.ts'
import type { ClientCertificate } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type {
  Attempt,
  IdempotencyRecord,
  Millis,
  Operation,
  Outcome,
  RecordId,
  State,
  StoredResponse,
} from '../core/record.ts'
import type { Refusal } from '../core/refusal.ts'
import type { SentRequest } from '../core/settle.ts'
import type { LiveResponse } from '../upstream/port.ts'
import type { ClaimResult, CompletionResult, RequestOutcome } from './outcomes.ts'

/** A protected request as the walk sees it: no socket, no framework. */
export interface ProtectedRequest extends SentRequest {
  readonly route: RoutePolicy
  readonly method: string
  /** Origin form, as sent. */
  readonly target: string
  /** The path that the route compares: normalised, or as sent under `match.exact`. */
  readonly path: string
  readonly query: string
  /** Normalised; null if the route's scope has no host, or the request names none. */
  readonly host: string | null
  /** The client's certificate, verified here or by a trusted proxy; null: it has none. */
  readonly certificate: ClientCertificate | null
  /** The client's IPv4 address, or the /64 of its IPv6 address. */
  readonly client: string
  readonly traceId: string | null
  /** `traceparent` of the request's own span if it is sampled; stored with the record. */
  readonly span?: string | undefined
  /** When its client stops waiting, by `performance.now()`; absent: not stated. */
  readonly deadline?: Millis | undefined
  /** `Location` of this request's state, for a 202 (contract §6); empty where `status.path` is off. */
  readonly statusLink: readonly string[]
  readonly progress: Progress
  /** Synchronous if the body arrived with the head. */
  readBody(): BodyReading | Promise<BodyReading>
  /** The header lines to send upstream for this attempt; null: as for an unprotected request. */
  upstreamHeaders(attempt: SentAttempt | null): string[]
  clientGone(): boolean
  /** Calls `left` once if the client leaves before its answer is complete; returns a function that cancels that. */
  onGone(left: () => void): () => void
}

/** Infinity: its client states no deadline. */
export function timeLeft({ deadline }: Pick<ProtectedRequest, 'deadline'>): Millis {
  return deadline === undefined ? Number.POSITIVE_INFINITY : deadline - performance.now()
}

/** Facts about an attempt for the upstream. */
export interface SentAttempt {
  readonly id: RecordId
  readonly key: string
  readonly fence: number
}

export type BodyReading =
  | { readonly kind: 'body'; readonly body: Buffer; readonly release: () => void }
  | { readonly kind: 'too_large' | 'timeout' | 'aborted' | 'no_room' }

/** Written to the client. */
export type Reply =
  | {
      readonly kind: 'response'
      readonly response: StoredResponse
      readonly replayed: boolean
      /** Header lines that the proxy adds. */
      readonly proxyHeaders: readonly string[]
      /** To be called once the body has been sent, or never will be: frees its memory. */
      readonly release: () => void
    }
  | { readonly kind: 'live'; readonly live: LiveResponse; readonly proxyHeaders: readonly string[] }
  | Problem
  /** The client has left: there is nobody to answer. */
  | { readonly kind: 'none' }

export interface Problem {
  readonly kind: 'problem'
  readonly refusal: Refusal
  readonly proxyHeaders: readonly string[]
}

/** How a protected request was answered, with facts for its log line and metrics. */
export type Answer = Reply & { readonly facts: Facts }

/** Findings of a step, for log and metrics. */
export interface Facts {
  /** Null: nobody was answered. */
  readonly outcome: RequestOutcome | null
  readonly before?: State | 'absent' | null
  readonly after?: State | null
  readonly fence?: number | null
  /** For operators only, such as addresses. */
  readonly cause?: string | null
  /** `traceparent` of the execution whose response is replayed, if its record has one. */
  readonly replayOf?: string | null
}

/** A request's progress and time spent. It only grows: under `respondWithin` it outlives the answer. */
export interface Progress {
  /** By `performance.now()`. */
  readonly startedAt: Millis
  /** Null: not identified yet. */
  id: RecordId | null
  /** `record.label` of the request; absent: it has none. */
  label?: string | undefined
  /** Null: no attempt has begun. */
  execution: Execution | null
  /** Whether the upstream's socket may hold the body. */
  isBodyOut: boolean
  /** Releases the room of the decoded body; absent: it was not encoded. */
  letGo?: () => void
  /** The state in which that execution left its record. */
  state: State | null
  storeMs: Millis
  upstreamMs: Millis
  /** Time spent waiting for a grace to end; part of `storeMs`. */
  heldMs: Millis
}

/** The facts for the log line and the metrics of a protected request. */
export interface RequestSummary
  extends Required<Facts>,
    Readonly<Omit<Progress, 'execution' | 'state' | 'isBodyOut' | 'letGo' | 'heldMs'>> {
  readonly route: string
  readonly method: string
  readonly traceId: string | null
  readonly status: number | null
}

/** Shadow mode's report about a request. */
export interface ShadowSummary extends RequestSummary {
  /** Age of the completed record that a retry found. */
  readonly retryAge: Millis | null
  /** The same caller sent the same operation under another key within a minute. */
  readonly regenerated: boolean
}

/** Identifies a request to observers. */
export type RequestLabels = Pick<ProtectedRequest, 'route' | 'method' | 'traceId' | 'progress'>

/** Observes the walk; must not throw. */
export interface Observer {
  answered(summary: RequestSummary): void
  claimed(route: string, result: ClaimResult): void
  /** An attempt is about to be sent upstream. */
  began(execution: Execution): void
  /** `cause`: why the attempt did not complete. */
  completed(route: string, result: CompletionResult, id: RecordId, cause?: string | null): void
  prevented(route: string): void
  retryAge(route: string, age: Millis): void
  leaseExpired(route: string): void
  leaseUse(route: string, ratio: number): void
  /** The same caller sent the same operation under a new key within a minute. */
  regenerated(route: string): void
  /** The same key and operation came from another caller, or the next request of this one will. */
  callerChanged(route: string, id: RecordId): void
  trouble(message: string, detail: Readonly<Record<string, unknown>>): void
}

/** A record that answers the request: nobody may claim over it. */
export type Existing = Exclude<Decision, { kind: 'take_over' | 'gone' }>

/** An attempt in progress, or one whose outcome is still to be written. */
export interface Execution {
  readonly kind: 'execution'
  readonly id: RecordId
  readonly route: RoutePolicy
  readonly operation: Operation
  readonly attempt: Attempt
  /** The state that its claim found; null without a claim. */
  readonly before: State | 'absent' | null
  /** The store's time of the record's creation; 0 without a claim. */
  readonly createdAt: Millis
  /** When the claim was requested, by `performance.now()`: the first of several tries. */
  readonly requestedAt: Millis
  /** Why there is no claim, if the route executes without one. */
  readonly unclaimed: Unclaimed | null
  /** How the attempt ended, once its outcome is known; null: it is still running. */
  ended: Outcome | null
  /** Another request has found it and may be answered by it later. */
  isShared: boolean
}

/** A claim that is not known to have succeeded. */
export interface Unclaimed {
  readonly kind: 'unavailable'
  readonly error: Error
  readonly attempt: Attempt
  /** The claim may be in the store, or still on its way there. */
  readonly lost: boolean
  /** What the claim expected to find. */
  readonly over: IdempotencyRecord | null
}
