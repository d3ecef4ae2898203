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
import { differingParts, isOpaque } from './selecting.ts'

/** The digests of a request that are compared with the record. */
export interface RequestDigests {
  readonly recipe: string
  readonly rawDigest: Buffer
  /** Read only if the bytes differ: computing it may be deferred until then. */
  readonly fingerprint: Fingerprint
  /** Digests of the request's other parts (`partsOf`). */
  readonly parts?: string | undefined
  /** Absent or false: bodies were compared by meaning. */
  readonly comparesBytes?: boolean
  /** Digest of the request as sent, under the record's recipe. */
  readonly rawDigestUnder: (recipe: string) => Buffer
  /** Its fingerprint under an older recipe with the same settings. Absent or null: there is none. */
  readonly fingerprintUnder?: (recipe: string) => Fingerprint | null
}

export type Decision =
  /** Take the record over: nothing was done, or the route retries after silence. The claim must still find `from`. */
  | { readonly kind: 'take_over'; readonly from: IdempotencyRecord; readonly read: State }
  | {
      readonly kind: 'replay'
      readonly result: CompletedResponse
      readonly createdAt: Millis
      readonly expiresAt: Millis
      readonly now: Millis
      /** Span of the execution (`Operation.span`). */
      readonly span: string | undefined
    }
  | {
      readonly kind: 'reused'
      readonly read: State
      /** The parts that differ; null: unknown, since the record was made under other settings. */
      readonly differing: readonly string[] | null
      /** Their bodies were compared as bytes, and may mean the same. */
      readonly byBytes: boolean
    }
  /** `fence`: that of the running attempt. */
  | {
      readonly kind: 'in_progress'
      readonly fence: number
      readonly leaseLeft: Millis
      readonly age: Millis
    }
  | { readonly kind: 'unknown'; readonly checkIn: Millis }
  | { readonly kind: 'expired' }
  /** Past its retention, without a tombstone; treated as absent. */
  | { readonly kind: 'gone' }

/**
 * What a request may do with the record that its claim found. Misuse comes first: it beats in-progress, unknown and the tombstone (contract
 * §6). `now` is the store's clock.
 */
export function decide(
  record: IdempotencyRecord,
  asked: RequestDigests,
  policy: Pick<RoutePolicy, 'onLeaseExpired'>,
  now: Millis,
): Decision {
  const read = readAt(record, now)
  if (read === null) return { kind: 'gone' }
  if (!sameOperation(record, asked)) return reused(record, asked, read.state)
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
        : { kind: 'unknown', checkIn: untilNextCheck(read, now) }
    case 'expired':
      return { kind: 'expired' }
  }
}

/** Time since its latest attempt began; never negative, even if the clock went back. */
export function ageOf({ updatedAt }: IdempotencyRecord, now: Millis): Millis {
  return Math.max(0, now - updatedAt)
}

/**
 * Time until the next scheduled check, never more than was scheduled, even if the clock changed. Once it has passed, clients ask at growing
 * intervals.
 */
export function untilNextCheck({ nextLookAt: at, updatedAt }: Unknown, now: Millis): Millis {
  return at > now ? Math.min(at - now, at - updatedAt) : Math.min(now - at, MAX_CHECK_INTERVAL)
}

const MAX_CHECK_INTERVAL: Millis = 300_000

/**
 * Under the same recipe the fingerprint decides (equal bytes imply it). After a change of recipe, an unchanged request matches by its raw
 * digest, and by its fingerprint if the settings are the same.
 */
function sameOperation(record: IdempotencyRecord, asked: RequestDigests): boolean {
  if (record.recipe === asked.recipe)
    return record.rawDigest.equals(asked.rawDigest) || record.fingerprint.equals(asked.fingerprint)
  if (record.rawDigest.equals(asked.rawDigestUnder(record.recipe))) return true
  const former = asked.fingerprintUnder?.(record.recipe)
  return former != null && record.fingerprint.equals(former)
}

function reused(record: IdempotencyRecord, asked: RequestDigests, read: State): Decision {
  const differing = record.recipe === asked.recipe ? differingParts(record.parts, asked.parts) : null
  const byBytes =
    (differing === null || differing.includes('body')) &&
    (asked.comparesBytes === true || isOpaque(record.parts))
  return { kind: 'reused', read, differing, byBytes }
}

/** `Retry-After` in whole seconds: rounded down, at least 1 (contract §6). */
export function retryAfterSeconds(remaining: Millis): number {
  return Math.max(1, Math.floor(remaining / 1000))
}
