import { digest, frame } from '../core/identity.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { Run } from './call.ts'

/** A client that makes a new key for each attempt sends the next one within seconds. */
const WINDOW: Millis = 60_000
/** About 200 bytes each. */
const MOST = 10_000

interface Seen {
  readonly id: RecordId
  readonly at: Millis
}

/**
 * Notices the same operation of the same caller under a new key (contract §13): a client that regenerates its key for each
 * attempt is not protected, and cannot tell. A signal, not a rule: it knows the latest operations of this replica alone.
 */
export class RegeneratedKeys {
  readonly #seen = new Map<string, Seen>()
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  /** Notes an execution; true where the same operation was last executed under another record, less than a minute ago. */
  saw({ id, operation: { route, fingerprint } }: Run, caller: readonly (string | null)[]): boolean {
    const operation = digest(frame([route, ...caller, fingerprint.toString('latin1')]), null)
    const now = this.#clock()
    const before = this.#seen.get(operation)
    this.#seen.delete(operation)
    this.#seen.set(operation, { id, at: now })
    if (this.#seen.size > MOST) {
      const [oldest] = this.#seen.keys()
      this.#seen.delete(oldest as string)
    }
    return before !== undefined && before.id !== id && now - before.at < WINDOW
  }
}
