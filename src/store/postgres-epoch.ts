import type { Millis } from '../core/record.ts'
import type { Row } from './postgres-link.ts'
import type { NewEpoch, StoreUnavailable } from './register.ts'

/** Looks per grace: a proxy must notice a failover and rewrite its claims before others may claim. */
const LOOKS = 4

export interface EpochOptions {
  readonly grace: Millis
  /** Asks the server how long new claims are still held back, and when it took on its present identity. */
  readonly look: (seen: Millis) => Promise<Row>
  /** A look got no answer: the server may have been replaced without its connections being seen to end. */
  readonly onSilence: () => void
  readonly onNew: (epoch: NewEpoch) => void
  /** How long new claims are still held back; almost always 0. */
  readonly onHeld: (left: Millis) => void
}

/**
 * Notices that the server has changed or lost its data: the grace begins with the first look at it, and this proxy has to write its claims
 * again (docs/adr/0108).
 */
export class Epoch {
  readonly #options: EpochOptions
  readonly #timer: NodeJS.Timeout
  #seen: Millis = 0
  /** Looks in progress, one after another: one may still be asking the previous server. */
  #looks = 0
  #last: Promise<void> = Promise.resolve()

  constructor(options: EpochOptions) {
    this.#options = options
    this.#timer = setInterval(() => this.#looks === 0 && void this.look(), options.grace / LOOKS).unref()
  }

  /** When the server took on its present identity, as far as is known here; 0: not looked at yet. */
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
    const { look, onNew, onHeld, onSilence } = this.#options
    let left = 0
    try {
      const [remaining, since] = (await look(this.#seen)).map(Number) as [Millis, Millis]
      left = remaining
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
