import type { ReconcilePolicy } from '../policy.ts'
import type { Millis, Reconciliation, Unknown } from '../record.ts'
import type { Resolution } from '../settle.ts'
import { EVEN } from '../store-clock.ts'
import type { AnswerMeaning } from './answer.ts'

/** Longest pause between two checks of a record, unless the route sets a longer one. */
const MAX_CHECK_INTERVAL: Millis = 3_600_000
/** Shortest pause if there is no upstream to ask. */
const MIN_CHECK_INTERVAL: Millis = 5_000
const DAY: Millis = 86_400_000
/** A request arrives within this part of a lease, or of `after`, after its first byte, or never (docs/proof.md). */
const ON_ITS_WAY = 4
/** How many "not found" in a row count: a single one may come from a lagging database replica. */
const NOT_FOUND_IN_A_ROW = 2

/** The number needed with `spellings` of the key, which the status queries use in turn. */
export function neededInARow(spellings: 1 | 2): number {
  return NOT_FOUND_IN_A_ROW * spellings
}

/** Pause after `asked` status queries. */
export function pauseAfter(asked: number, { every }: Pick<ReconcilePolicy, 'every'>): Millis {
  return Math.min(every * 2 ** asked, Math.max(every, MAX_CHECK_INTERVAL))
}

/** Pause before the next check of a record that only an operator can resolve, unknown for `age`. */
export function pauseWithoutQuery(age: Millis): Millis {
  return Math.min(Math.max(age, MIN_CHECK_INTERVAL), MAX_CHECK_INTERVAL)
}

/** When to report that the record will be dropped unresolved: early enough for a person to decide. */
export function reportAt(dropAt: Millis, unresolvedTtl: Millis): Millis {
  return dropAt - Math.min(DAY, Math.floor(unresolvedTtl / 10))
}

/** When the latest attempt claimed the record: a first attempt's fence is the instant; a later one's claim was before `since`. */
export function claimedAt(record: Unknown, { since }: Reconciliation): Millis {
  return record.fence === record.createdAt ? record.createdAt : since
}

/** How long until "not found" counts; 0 or less: it does. */
export interface Waits {
  /** Time until a first "not found" counts. */
  readonly first: Millis
  /** Time until a second one counts. */
  readonly next: Millis
}

/**
 * `queriedAt` is one reading of the store's clock, which may have stepped; `passed` returns the time that has certainly passed since an
 * instant of that clock. Silence counts once it has certainly lasted a lease: a living owner ends it before. The longer one of the record's
 * own lease and `leaseInForce` counts: records of earlier releases lack their own. An owner that ended the attempt itself may have sent the
 * first byte just before, after waiting long for a connection: the request may still be on its way.
 *
 * `passedByAny`: the same for instants that another store may have stamped (`pingOther`).
 */
export function waitsOf(
  policy: Pick<ReconcilePolicy, 'after' | 'every'>,
  leaseInForce: Millis,
  record: Unknown,
  before: Reconciliation,
  queriedAt: Millis,
  passed: (since: Millis) => Millis,
  passedByAny = passed,
): Waits {
  const claimed = claimedAt(record, before)
  const lease = Math.max(leaseInForce, record.lease ?? leaseInForce)
  const silent = record.leaseExpired
    ? lease - passedByAny(before.since - lease)
    : Math.min(lease, policy.after) / ON_ITS_WAY - passedByAny(before.since)
  const first = Math.max(
    claimed + policy.after - queriedAt,
    policy.after - EVEN - passedByAny(claimed),
    silent,
  )
  return { first, next: policy.every / 2 - passed(record.updatedAt) }
}

/** `not_sent`: the status query did not reach the upstream and does not count. */
export type StatusQueryResult = AnswerMeaning | { readonly kind: 'not_sent'; readonly why: string }

/** The effect of an answer on an unknown record. */
export type Step =
  | { readonly kind: 'resolved'; readonly resolution: Resolution }
  | {
      readonly kind: 'unknown'
      readonly result: 'pending' | 'failed' | 'dead_lettered'
      readonly reconciliation: Reconciliation
      readonly pause: Millis
    }

/** `before`: the state when the status query was sent, without counting it. Every one of the `spellings` must be not found. */
export function nextStep(
  policy: ReconcilePolicy,
  before: Reconciliation,
  waits: Waits,
  heard: StatusQueryResult,
  spellings: 1 | 2,
): Step {
  const asked = before.asked + 1
  const inARow = neededInARow(spellings)
  const still = (
    result: 'pending' | 'failed',
    notFound: number,
    answer: string,
    pause = pauseAfter(asked, policy),
  ): Step =>
    asked >= policy.attempts
      ? deadLettered({ ...before, asked, notFound, answer })
      : {
          kind: 'unknown',
          result,
          reconciliation: { ...before, asked, notFound, answer },
          pause: sparing(policy, asked, inARow, pause, waits.first),
        }
  switch (heard.kind) {
    case 'completed':
      return { kind: 'resolved', resolution: { kind: 'completed', result: heard.result } }
    case 'not_found': {
      // The next status query is sent as soon as it counts, and the second soon after.
      if (waits.first > 0)
        return still(
          'pending',
          0,
          'not found, too early to count',
          Math.min(pauseAfter(asked, policy), waits.first),
        )
      if (before.notFound > 0 && waits.next > 0)
        return still(
          'pending',
          before.notFound,
          'not found, too soon after the previous answer',
          policy.every,
        )
      const notFound = before.notFound + 1
      return notFound >= inARow
        ? {
            kind: 'resolved',
            resolution: { kind: 'not_executed', reason: 'the upstream does not know of it' },
          }
        : still('pending', notFound, 'not found', policy.every)
    }
    case 'pending':
      return still('pending', 0, heard.why)
    case 'mismatch':
    case 'unusable':
      return still('failed', 0, heard.why)
    case 'not_sent':
      return {
        kind: 'unknown',
        result: 'failed',
        reconciliation: { ...before, answer: heard.why },
        pause: pauseAfter(before.asked, policy),
      }
  }
}

/** Ends the status queries: a person has to decide. */
export function deadLettered(reconciliation: Reconciliation): Extract<Step, { kind: 'unknown' }> {
  return {
    kind: 'unknown',
    result: 'dead_lettered',
    reconciliation: { ...reconciliation, deadLettered: true },
    pause: MAX_CHECK_INTERVAL,
  }
}

/** The last status queries wait until "not found" counts. */
function sparing(
  policy: ReconcilePolicy,
  asked: number,
  inARow: number,
  pause: Millis,
  untilCounts: Millis,
): Millis {
  const left = policy.attempts - asked
  return policy.notFound !== null && left <= inARow ? Math.max(pause, untilCounts) : pause
}
