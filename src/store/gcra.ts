import type { Rate } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'

/**
 * `debt` is what was taken and has not come back by the instant `at`, in `count`-ths of a millisecond; one unit costs `per`.
 * Whole numbers, so that no rounding adds up. A bucket without debt is full, and is not kept.
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

/** `RateLimits.take`: how long to wait, and the bucket to keep (null: none). lua/throttle.lua is the same. */
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
  // The rate may have changed: the time owed stays, as far as it fits.
  const then = Math.min(full, Math.ceil((bucket.debt / bucket.count) * count))
  // A clock that went back must not stop the bucket from filling.
  return Math.max(0, then - Math.abs(now - bucket.at) * count)
}
