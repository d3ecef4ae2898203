import type { Millis } from '../core/record.ts'

/** Weight of the newest answer. */
const ALPHA = 0.2

/** How long the upstream takes, per route: a moving average, for `Retry-After` (contract §6). */
export class Latency {
  readonly #average = new Map<string, Millis>()

  saw(route: string, took: Millis): void {
    const before = this.#average.get(route)
    this.#average.set(route, before === undefined ? took : before + ALPHA * (took - before))
  }

  /** What an attempt of that age will still take. Infinity: nothing suggests a shorter wait. */
  remaining(route: string, age: Millis): Millis {
    const average = this.#average.get(route)
    return average === undefined || age > average ? Number.POSITIVE_INFINITY : average - age
  }
}
