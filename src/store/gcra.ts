import type { Rate } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'

/**
 * What is taken from a bucket and has not come back: `debt` at the instant `at`, in `count`-ths of a millisecond, of which
 * one unit of the rate costs `per`. Whole numbers only, so that no rounding adds up. A bucket without debt is full, and
 * is not kept.
 */
export interface Bucket {
  readonly at: Millis
  readonly debt: number
  readonly count: number
}

/** When it is full again. */
export function fullAt({ at, debt, count }: Bucket): Millis {
  return at + Math.ceil(debt / count)
}

/** As {@link Register.throttle} says: how long to wait, and what is to be kept (null: nothing). lua/throttle.lua is the same. */
export function drawFromBucket(
  bucket: Bucket | null,
  now: Millis,
  { count, per }: Rate,
  units: 1 | -1,
): { wait: Millis; bucket: Bucket | null } {
  const full = count * per
  const debt = bucket === null ? 0 : owed(bucket, now, count, full)
  if (debt + units * per > full) return { wait: Math.ceil((debt + per - full) / count), bucket }
  const next = debt + units * per
  return { wait: 0, bucket: next <= 0 ? null : { at: now, debt: next, count } }
}

function owed(bucket: Bucket, now: Millis, count: number, full: number): number {
  // Another rate since: the time that is owed stays, as far as it fits.
  const then = Math.min(full, Math.ceil((bucket.debt / bucket.count) * count))
  // A clock that went back must not stop the bucket from filling.
  return Math.max(0, then - Math.abs(now - bucket.at) * count)
}
