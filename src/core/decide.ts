import type { RoutePolicy } from './policy.ts'
import {
  type CompletedResponse,
  type Fingerprint,
  type IdempotencyRecord,
  type Millis,
  readAt,
  type State,
  type Unknown,
} from './record.ts'

/** What of a request is compared with the record. */
export interface RequestDigests {
  readonly fingerprint: Fingerprint
  /** The request as sent, as a record of that recipe would have it digested. */
  readonly rawDigestUnder: (recipe: string) => Buffer
  readonly recipe: string
}

export type Decision =
  /** Claim it over: nothing was done, or the route retries after silence. `from` is what the claim must still find. */
  | { readonly kind: 'take_over'; readonly from: IdempotencyRecord; readonly read: State }
  | {
      readonly kind: 'replay'
      readonly result: CompletedResponse
      readonly createdAt: Millis
      readonly expiresAt: Millis
      readonly now: Millis
      /** Of the execution (`Operation.span`). */
      readonly span: string | undefined
    }
  | { readonly kind: 'reused'; readonly read: State }
  /** `fence`: of the attempt under way. */
  | {
      readonly kind: 'in_progress'
      readonly fence: number
      readonly leaseLeft: Millis
      readonly age: Millis
    }
  | { readonly kind: 'unknown'; readonly lookIn: Millis }
  | { readonly kind: 'expired' }
  /** Past its retention, no tombstone: as if it had never been. */
  | { readonly kind: 'gone' }

/**
 * What a request meets in the record that its claim found. Misuse comes first: it beats in-progress, unknown and the
 * tombstone (contract §6). `now` is the store's clock.
 */
export function decide(
  record: IdempotencyRecord,
  asked: RequestDigests,
  policy: Pick<RoutePolicy, 'onLeaseExpired'>,
  now: Millis,
): Decision {
  const read = readAt(record, now)
  if (read === null) return { kind: 'gone' }
  if (!sameOperation(record, asked)) return { kind: 'reused', read: read.state }
  switch (read.state) {
    case 'completed':
      return {
        kind: 'replay',
        result: read.result,
        createdAt: read.createdAt,
        expiresAt: read.expiresAt,
        now,
        span: read.span,
      }
    case 'in_progress':
      return {
        kind: 'in_progress',
        fence: read.fence,
        leaseLeft: read.leaseUntil - now,
        age: ageOf(read, now),
      }
    case 'failed_retryable':
      return { kind: 'take_over', from: record, read: read.state }
    case 'unknown':
      return read.leaseExpired && policy.onLeaseExpired === 'retry'
        ? { kind: 'take_over', from: record, read: read.state }
        : { kind: 'unknown', lookIn: nextLook(read, now) }
    case 'expired':
      return { kind: 'expired' }
  }
}

/** Since its latest attempt began. A clock that went back makes nothing younger than new. */
export function ageOf({ updatedAt }: IdempotencyRecord, now: Millis): Millis {
  return Math.max(0, now - updatedAt)
}

/**
 * Until it is looked at by itself, which is no longer than when that was written, whatever the clock did since; past that, looks
 * of clients are what is left, ever more apart.
 */
export function nextLook({ nextLookAt: at, updatedAt }: Unknown, now: Millis): Millis {
  return at > now ? Math.min(at - now, at - updatedAt) : Math.min(now - at, MOST_BETWEEN_LOOKS)
}

const MOST_BETWEEN_LOOKS: Millis = 300_000

/** Under one recipe the fingerprint decides; after a change of recipe an unchanged request matches by its raw digest. */
function sameOperation(record: IdempotencyRecord, asked: RequestDigests): boolean {
  return record.recipe === asked.recipe
    ? record.fingerprint.equals(asked.fingerprint)
    : record.rawDigest.equals(asked.rawDigestUnder(record.recipe))
}

/** `Retry-After` in whole seconds: rounded down, at least 1 (contract §6). */
export function retryAfterSeconds(remaining: Millis): number {
  return Math.max(1, Math.floor(remaining / 1000))
}
