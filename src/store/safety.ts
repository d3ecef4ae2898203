import type { Millis } from '../core/record.ts'

/**
 * How long an acknowledged write may still be lost while its server is up: longer than the lag of replicas that may be promoted
 * (`min-replicas-max-lag` is 10 s).
 */
export const KEPT_FOR: Millis = 15_000

/**
 * Which acknowledged writes a store can no longer lose: those after which its servers have stayed the same for {@link KEPT_FOR}. Time in
 * which they are not reached does not count: whatever replaces them may lack their last writes, however late it comes.
 */
export class Safety {
  /** By shard: since when its server has been the same, and the instant before which its writes are safe. */
  readonly #since: Millis[] = []
  readonly #before: Millis[]
  readonly #onSafe: (before: Millis) => void

  /** `onSafe` gets the instant before which all writes are safe. */
  constructor(shards: number, onSafe: (before: Millis) => void) {
    this.#before = Array.from({ length: shards }, () => Number.NEGATIVE_INFINITY)
    this.#onSafe = onSafe
  }

  /** The server of these shards has answered a check sent at `asked`. `isSame`: it is still the same, with all its data. */
  checked(shards: readonly number[], asked: Millis, isSame: (shard: number) => boolean): void {
    for (const shard of shards) {
      const since = this.#since[shard]
      if (since === undefined || !isSame(shard)) this.#since[shard] = performance.now()
      else if (asked - since >= KEPT_FOR) this.#before[shard] = asked - KEPT_FOR
    }
    this.#onSafe(Math.min(...this.#before))
  }
}
