import type { RoutePolicy } from '../core/policy.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { Execution } from './request.ts'

/* This replica's memory of recent requests: bounded, lost at a restart. No guarantee depends on it. */

/** Number of a route's latest answers that count: few, so that a change shows soon. */
const ANSWERS_COUNTED = 16
/** The quantile taken as the usual duration: one very slow answer among a few does not make a route slow. */
const USUAL = 0.75

interface RecentAnswers {
  readonly took: Float64Array
  answers: number
}

/** How long the upstream usually takes, per route, known from the first answer on: for `Retry-After` (contract §6). */
export class Latency {
  readonly #recent = new Map<string, RecentAnswers>()

  saw(route: string, took: Millis): void {
    let recent = this.#recent.get(route)
    if (recent === undefined) {
      recent = { took: new Float64Array(ANSWERS_COUNTED), answers: 0 }
      this.#recent.set(route, recent)
    }
    recent.took[recent.answers++ % ANSWERS_COUNTED] = took
  }

  /**
   * When to retry after finding an attempt of that age: no later than its lease ends, nor than a whole lease from now, whatever the store's
   * clock did.
   */
  retryIn({ name, lease }: Pick<RoutePolicy, 'name' | 'lease'>, leaseLeft: Millis, age: Millis): Millis {
    return Math.min(leaseLeft, lease, this.remaining(name, age))
  }

  /** How much longer an attempt of that age will take; Infinity: unknown. */
  remaining(route: string, age: Millis): Millis {
    const recent = this.#recent.get(route)
    if (recent === undefined) return Number.POSITIVE_INFINITY
    const known = Math.min(recent.answers, ANSWERS_COUNTED)
    const usual = recent.took.slice(0, known).sort()[Math.ceil(known * USUAL) - 1] as Millis
    // Slower than usual: it may well take as long again.
    return age < usual ? usual - age : age
  }
}

/** A client that creates a new key per attempt sends the next one within seconds. */
const WINDOW: Millis = 60_000
/** Entries per generation, about 250 bytes each. */
const MAX_OPERATIONS = 5_000

interface SeenOperation {
  readonly id: RecordId
  readonly at: Millis
}

/**
 * Detects callers that repeat an operation under a new key (contract §13): a client that generates a new key per attempt is not protected
 * and does not notice. Only a hint, from this replica's latest operations, by 53 bits each.
 */
export class KeyChurn {
  /** Two generations; the older one is dropped as a whole, since deleting single entries costs more than all the rest. */
  #seen = new Map<number, SeenOperation>()
  #before = new Map<number, SeenOperation>()
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  /**
   * Notes an execution; returns true if the same operation was last executed under another record less than a minute ago. `caller`: by
   * {@link hashOf}.
   */
  saw({ id, operation: { route, fingerprint } }: Execution, caller: number): boolean {
    const high = (fingerprint.readUInt32LE(0) ^ hashOf(route)) & 0x1fffff
    const low = fingerprint.readUInt32LE(4) ^ caller
    const operation = high * 2 ** 32 + low
    const now = this.#clock()
    const before = this.#seen.get(operation) ?? this.#before.get(operation)
    if (this.#seen.size >= MAX_OPERATIONS) {
      this.#before = this.#seen
      this.#seen = new Map()
    }
    this.#seen.set(operation, { id, at: now })
    return before !== undefined && before.id !== id && now - before.at < WINDOW
  }
}

/** FNV-1a, as an unsigned number: callers are credentials and must not be kept. `seed`: of another, independent hash. */
export function hashOf(text: string, seed = 0x811c9dc5): number {
  let hash = seed
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193)
  return hash >>> 0
}

/** Sessions and tokens are renewed, and retries arrive, well within this time of the first attempt. */
const SAME_KEY: Millis = 600_000
/** A table of 768 KiB, indexed by 16 bits: room for ten minutes of a hundred executions a second. */
const SLOTS = 65_536

/**
 * Detects a key that comes with the same operation from another caller: what identifies the caller may change between retries, which then
 * execute again (docs/keys.md). Only a hint, from this replica's latest executions, by 48 bits of key and operation.
 */
export class CallerChanges {
  /** Per slot: the rest of the operation, the caller, and the second of the execution. */
  readonly #seen = new Uint32Array(3 * SLOTS)
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  /**
   * Notes an execution; returns true if its key and operation were last executed for another caller less than ten minutes ago. `caller`: by
   * {@link hashOf}.
   */
  saw({ operation: { route, fingerprint } }: Execution, key: string, caller: number): boolean {
    const at = 3 * ((fingerprint.readUInt32LE(0) ^ hashOf(key, hashOf(route))) >>> 16)
    const rest = (fingerprint.readUInt32LE(4) ^ hashOf(key)) >>> 0
    const second = Math.floor(this.#clock() / 1000)
    const seen = this.#seen
    const isSame = seen[at] === rest && second - (seen[at + 2] as number) < SAME_KEY / 1000
    const before = seen[at + 1]
    seen[at] = rest
    seen[at + 1] = caller
    seen[at + 2] = second
    return isSame && before !== caller
  }
}

/** About 100 bytes each. */
const MAX_GRANTS = 10_000

/** Callers whom the upstream has lately allowed to see a replay (`authorizeReplay.cache`). */
export class RecentGrants {
  readonly #until = new Map<string, Millis>()
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  has(caller: string): boolean {
    const until = this.#until.get(caller)
    return until !== undefined && this.#clock() < until
  }

  add(caller: string, time: Millis): void {
    if (time === 0) return
    this.#until.delete(caller)
    this.#until.set(caller, this.#clock() + time)
    if (this.#until.size <= MAX_GRANTS) return
    const [oldest] = this.#until.keys()
    this.#until.delete(oldest as string)
  }
}
