import type { Millis } from '../core/record.ts'

/** A connection that ends sooner was closed by a restart or a limit on requests per connection: no idle timeout is that short. */
const SHORTEST: Millis = 20
/** How long an observation counts: restarts close connections early, too. */
const REMEMBERED: Millis = 600_000

/** How one upstream has been seen to treat connections; shared by all clients of it. */
export class Habits {
  /** It once sent bytes that answered no request. */
  sendsUnasked = false
  readonly #keepAlive: Millis
  #shortest: Millis = Number.POSITIVE_INFINITY
  #seenAt: Millis = Number.NEGATIVE_INFINITY

  /** `keepAlive`: the longest that an idle connection is kept (`upstream.keepAlive`). */
  constructor(keepAlive: Millis) {
    this.#keepAlive = keepAlive
  }

  /**
   * How long to keep an idle connection. `announced`: the latest `Keep-Alive` line. Half of what the upstream announces or was seen to
   * allow: a request must not meet a connection that is being closed.
   */
  keepFor(announced: string | null): Millis {
    const timeout = /timeout\s*=\s*(\d+)/i.exec(announced ?? '')?.[1]
    const allowed = timeout === undefined ? Number.POSITIVE_INFINITY : Number(timeout) * 1000
    return Math.min(this.#keepAlive, allowed / 2, this.#seen() / 2)
  }

  /** The upstream closed a connection that had been idle for this long. */
  closedAfter(idle: Millis): void {
    if (idle < SHORTEST) return
    this.#shortest = Math.min(idle, this.#seen())
    this.#seenAt = performance.now()
  }

  #seen(): Millis {
    return performance.now() - this.#seenAt < REMEMBERED ? this.#shortest : Number.POSITIVE_INFINITY
  }
}
