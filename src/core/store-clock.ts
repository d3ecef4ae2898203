import type { Millis } from './record.ts'

/** Readings that differ by less are of a clock that runs evenly: what is left is the way to the store and a slow correction. */
export const EVEN: Millis = 1_000
/** Steps that are remembered. What was before counts as long ago as the oldest of them. */
const STRETCHES = 16

/** The store's clock ran evenly from then on. */
interface Stretch {
  /** By this replica's own clock. */
  readonly from: Millis
  /** When the last reading began. Between it and the next stretch the clock may have said anything. */
  last: Millis
  /** The store's clock less this replica's, when it began. */
  readonly began: Millis
  /** The same, by the reading that took least time. */
  offset: Millis
  /** The least that it was at any reading: a correction too small for a new stretch may have set it back. */
  atMost: Millis
}

/**
 * What one replica has seen of the store's clock, beside its own monotonic one, which nothing sets. One reading of a clock
 * that steps says nothing about how much time has passed; two clocks that agree do (docs/adr/0042).
 */
export class StoreClock {
  readonly #stretches: Stretch[] = []

  /** The store's clock said `now`, between `before` and `after` by this replica's own. */
  saw(now: Millis, before: Millis, after: Millis): void {
    if (after - before > EVEN) return
    const offset = now - after
    const last = this.#stretches.at(-1)
    if (last !== undefined && Math.abs(offset - last.began) <= EVEN) {
      last.offset = Math.max(last.offset, offset)
      last.atMost = Math.min(last.atMost, now - before)
      last.last = before
      return
    }
    this.#stretches.push({ from: after, last: before, began: offset, offset, atMost: now - before })
    if (this.#stretches.length > STRETCHES) this.#stretches.shift()
  }

  /**
   * How much time has certainly passed, up to `own` by this replica's own clock, since the store's clock said `instant`:
   * no more than this replica has seen, and less than nothing for an instant that is still to come.
   */
  since(instant: Millis, own: Millis): Millis {
    let end = own
    for (let n = this.#stretches.length - 1; n >= 0; n--) {
      const { from, offset, atMost } = this.#stretches[n] as Stretch
      const before = this.#stretches[n - 1]
      const at = instant - Math.min(offset, atMost)
      // The last time that it may have said so.
      if (at >= from) return own - (end === own ? at : Math.min(at, end))
      end = from
      // Said after the step, before it was read for the first time.
      if (before !== undefined && at >= before.last - EVEN) return own - end
    }
    return own - end
  }
}
