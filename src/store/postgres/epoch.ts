import type { Millis } from '../../core/record.ts'
import type { NewEpoch, StoreUnavailable } from '../register.ts'
import type { Safety } from '../safety.ts'
import { type SqlRow, sqlNumber } from './link.ts'

/** One server has all records. */
const ALL = [0]
/** Checks per grace period: a proxy must notice a failover and rewrite its claims before others may claim. */
const CHECKS = 4

export interface PostgresEpochOptions {
  readonly grace: Millis
  /** Asks the server how long new claims are still held back, and since when it has its present identity. */
  readonly look: (seen: Millis) => Promise<SqlRow>
  /** A check got no answer: the server may have been replaced without its connections closing. */
  readonly onSilence: () => void
  readonly onNew: (epoch: NewEpoch) => void
  readonly safety: Safety
  /** How long new claims are still held back; almost always 0. */
  readonly onHeld: (left: Millis) => void
}

/**
 * Detects a server that was replaced or lost its data: the first check of it starts the grace period, and this proxy must rewrite its
 * claims (docs/adr/0091).
 */
export class Epoch {
  readonly #options: PostgresEpochOptions
  readonly #timer: NodeJS.Timeout
  #seen: Millis = 0
  /** Checks in progress: one may still be asking the previous server. */
  #looks = 0
  #last: Promise<void> = Promise.resolve()

  constructor(options: PostgresEpochOptions) {
    this.#options = options
    this.#timer = setInterval(() => this.#looks === 0 && void this.look(), options.grace / CHECKS).unref()
  }

  /** Since when the server has its present identity, as far as known; 0: not checked yet. */
  get seen(): Millis {
    return this.#seen
  }

  close(): void {
    clearInterval(this.#timer)
  }

  /** Never rejects. */
  look(): Promise<void> {
    this.#looks++
    this.#last = this.#last.then(() => this.#look())
    return this.#last
  }

  async #look(): Promise<void> {
    const { look, onNew, onHeld, onSilence, safety } = this.#options
    const asked = performance.now()
    let left = 0
    try {
      const [remaining, sinceThen] = await look(this.#seen)
      const since = sqlNumber(sinceThen)
      left = sqlNumber(remaining)
      safety.checked(ALL, asked, () => since === this.#seen)
      if (since !== this.#seen) {
        this.#seen = since
        onNew({ left, concerns: () => true })
      }
    } catch (error) {
      if ((error as StoreUnavailable).maybeApplied) onSilence()
    }
    onHeld(left)
    this.#looks--
  }
}
