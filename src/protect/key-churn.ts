import { frame } from '../core/identity.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { Execution } from './request.ts'

/** A client that makes a new key for each attempt sends the next one within seconds. */
const WINDOW: Millis = 60_000
/** Of one generation; about 250 bytes each. */
const MOST = 5_000

interface Seen {
  readonly id: RecordId
  readonly at: Millis
}

/**
 * Notices a caller that repeats an operation under a new key (contract §13): a client that regenerates its key for each attempt
 * is not protected, and cannot tell. Only a hint: it knows this replica's latest operations, and takes callers with equal hashes
 * for one.
 */
export class KeyChurn {
  /** Two generations; the older is dropped as a whole, since deleting entry by entry costs more than all the rest. */
  #seen = new Map<string, Seen>()
  #before = new Map<string, Seen>()
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  /** Notes an execution; true where the same operation was last executed under another record, less than a minute ago. */
  saw({ id, operation: { route, fingerprint } }: Execution, caller: readonly (string | null)[]): boolean {
    const operation = `${fingerprint.toString('latin1')}${hashOf(frame(caller))} ${route}`
    const now = this.#clock()
    const before = this.#seen.get(operation) ?? this.#before.get(operation)
    if (this.#seen.size >= MOST) {
      this.#before = this.#seen
      this.#seen = new Map()
    }
    this.#seen.set(operation, { id, at: now })
    return before !== undefined && before.id !== id && now - before.at < WINDOW
  }
}

/** FNV-1a: callers are credentials, which are not kept. The fingerprint beside it is the strong hash. */
function hashOf(text: string): number {
  let hash = 0x811c9dc5
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193)
  return hash
}
