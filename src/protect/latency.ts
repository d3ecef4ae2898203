import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'

/** The latest answers of a route that count: few, so that a change shows soon. */
const REMEMBERED = 16
/** Most answers take no longer than this part of them. One very slow answer among a few does not make a route slow. */
const USUAL = 0.75

interface Recent {
  readonly took: Float64Array
  answers: number
}

/** How long the upstream takes, per route, from the first answer on: for `Retry-After` (contract §6). */
export class Latency {
  readonly #recent = new Map<string, Recent>()

  saw(route: string, took: Millis): void {
    let recent = this.#recent.get(route)
    if (recent === undefined) {
      recent = { took: new Float64Array(REMEMBERED), answers: 0 }
      this.#recent.set(route, recent)
    }
    recent.took[recent.answers++ % REMEMBERED] = took
  }

  /**
   * When a retry is worth sending that met an attempt of that age: never later than the lease ends, which is no longer than the
   * route's, whatever the store's clock did.
   */
  retryIn({ name, lease }: Pick<RoutePolicy, 'name' | 'lease'>, leaseLeft: Millis, age: Millis): Millis {
    return Math.min(leaseLeft, lease, this.remaining(name, age))
  }

  /** What an attempt of that age will still take. Infinity: nothing suggests a shorter wait. */
  remaining(route: string, age: Millis): Millis {
    const recent = this.#recent.get(route)
    if (recent === undefined) return Number.POSITIVE_INFINITY
    const known = Math.min(recent.answers, REMEMBERED)
    const usual = recent.took.slice(0, known).sort()[Math.ceil(known * USUAL) - 1] as Millis
    // Slower than usual: it may well take as long again.
    return age < usual ? usual - age : age
  }
}
