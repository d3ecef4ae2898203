import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { KeptNote, Note } from './register.ts'

/*
 * What stores share for histories, watchers and rate limits (ports of register.ts).
 */

/** Notes kept: the first show who executed, the last what happens now. lua/note.lua has the same numbers. */
export const NOTES_FIRST = 10
export const NOTES_LAST = 40

/** Adds `notes` to `lines`, as lua/note.lua does. */
export function noted(lines: readonly string[], notes: readonly Note[], now: Millis): string[] {
  const kept = [...lines]
  for (const { tag, count, firstAgo, lastAgo, text } of notes) {
    const newest = kept.at(-1)
    const before = newest === undefined ? null : readNote(newest)
    const same = before !== null && before.tag === tag
    if (same) kept.pop()
    const first = same ? before.first : now - Math.round(firstAgo)
    kept.push(`${tag} ${count + (same ? before.count : 0)} ${first} ${now - Math.round(lastAgo)} ${text}`)
    if (kept.length > NOTES_FIRST + NOTES_LAST) kept.splice(NOTES_FIRST, 1)
  }
  return kept
}

export function readNote(line: string): KeptNote {
  const [tag = '', count, first, last] = line.split(' ', 4)
  const text = line.slice([tag, count, first, last].join(' ').length + 1)
  return { tag, count: Number(count), first: Number(first), last: Number(last), text }
}

interface Watcher {
  readonly changed: () => void
}

/** The watchers of this process, by record. */
export class Watchers {
  readonly #byId = new Map<RecordId, Set<Watcher>>()

  /** Returns a function that stops watching. */
  add(id: RecordId, changed: () => void): () => void {
    const watcher = { changed }
    const watching = this.#byId.get(id) ?? new Set()
    this.#byId.set(id, watching.add(watcher))
    return () => {
      if (watching.delete(watcher) && watching.size === 0) this.#byId.delete(id)
    }
  }

  has(id: RecordId): boolean {
    return this.#byId.has(id)
  }

  /** A microtask for each, so that a watcher that throws affects no write or other watcher. */
  tell(id: RecordId): void {
    if (this.#byId.size === 0) return
    const watching = this.#byId.get(id)
    for (const watcher of watching ?? [])
      queueMicrotask(() => {
        if (watching?.has(watcher)) watcher.changed()
      })
  }
}

/**
 * A token bucket (GCRA). `debt` is the amount taken and not yet refilled at the instant `at`, in `count`-ths of a millisecond; one unit
 * costs `per`. Integers, so that rounding errors do not add up. A bucket without debt is full and is not kept.
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

/** Implements `RateLimits.take`: returns how long to wait, and the bucket to keep (null: none). lua/throttle.lua does the same. */
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
  // After a change of the rate, the time owed is kept, up to a full bucket.
  const then = Math.min(full, Math.ceil((bucket.debt / bucket.count) * count))
  // A clock that went back must not stop the bucket from filling.
  return Math.max(0, then - Math.abs(now - bucket.at) * count)
}
