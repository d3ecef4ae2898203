import type { Millis } from './record.ts'

/** Offsets that differ by less are from a steady clock: the difference is latency and slow correction. */
export const EVEN: Millis = 1_000
/** Number of stretches remembered. Anything earlier counts from the oldest. */
const STRETCHES = 16

/** A period in which the store's clock ran steadily. */
interface Stretch {
  /** Start, by this replica's own clock. */
  readonly from: Millis
  /** When the last reading began. Between it and the next stretch the clock is unknown. */
  last: Millis
  /** The store's clock minus this replica's, at the start. */
  readonly began: Millis
  /** The same difference, by the fastest reading. */
  offset: Millis
  /** The lowest difference of any reading: a correction too small for a new stretch may have set the clock back. */
  atMost: Millis
}

/**
 * The store's clock as observed by this replica next to its own monotonic clock. A clock that may step does not prove how much time has
 * passed; two clocks that agree do (docs/adr/0042).
 */
export class StoreClock {
  readonly #stretches: Stretch[] = []

  /** The store's clock read `now`, between `before` and `after` by this replica's own. */
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
   * How much time has certainly passed since the store's clock read `instant`, up to `own` on this replica's clock: never more than this
   * replica has observed; negative for a future instant.
   */
  since(instant: Millis, own: Millis): Millis {
    let end = own
    for (let n = this.#stretches.length - 1; n >= 0; n--) {
      const { from, offset, atMost } = this.#stretches[n] as Stretch
      const before = this.#stretches[n - 1]
      const at = instant - Math.min(offset, atMost)
      // The latest time at which it may have read `instant`.
      if (at >= from) return own - (end === own ? at : Math.min(at, end))
      end = from
      // After the clock's step, before the first reading that shows it.
      if (before !== undefined && at >= before.last - EVEN) return own - end
    }
    return own - end
  }
}
