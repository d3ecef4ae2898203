import type { Millis } from '../core/record.ts'
import type { Row } from './postgres-link.ts'
import type { NewEpoch, StoreUnavailable } from './register.ts'

/** Looks in one grace: a proxy must have noticed a failover, and written its claims again, before others may claim. */
const LOOKS = 4

export interface EpochOptions {
  readonly grace: Millis
  /** Asks the server how long claims are still held, and since when it is what it is. */
  readonly look: (seen: Millis) => Promise<Row>
  /** A look was not answered: the server may have been replaced while nobody heard its connections end. */
  readonly onSilence: () => void
  readonly onNew: (epoch: NewEpoch) => void
  /** How long claims are still held: 0 almost always. */
  readonly onHeld: (left: Millis) => void
}

/**
 * Notices that the server is another than before, or has lost its data: the grace begins with the first look at it, and this proxy has to
 * write again what it claimed (docs/adr/0108).
 */
export class Epoch {
  readonly #options: EpochOptions
  readonly #timer: NodeJS.Timeout
  #seen: Millis = 0
  /** Looks under way, one after another: one may still be at the server before. */
  #looks = 0
  #last: Promise<void> = Promise.resolve()

  constructor(options: EpochOptions) {
    this.#options = options
    this.#timer = setInterval(() => this.#looks === 0 && void this.look(), options.grace / LOOKS).unref()
  }

  /** Since when, as far as is known here, the server is what it is; 0: not looked at yet. */
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
