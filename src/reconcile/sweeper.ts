import { shortId } from '../core/identity.ts'
import { type Millis, type RecordId } from '../core/record.ts'
import type { StoreClock } from '../core/store-clock.ts'
import { CorruptRecord, RecordLocked, StoreUnavailable } from '../store/register.ts'
import { ask, inspectDue } from './ask.ts'
import type { ReconcilePorts } from './ports.ts'
import { each, Rounds, shuffled } from './rounds.ts'

/** Between sweeps. */
const SWEEP_EVERY: Millis = 1_000
/** The pause while there is more work than one sweep takes. */
const SWEEP_SOON: Millis = 50
/** The longest pause while the store does not answer. */
const MAX_SWEEP: Millis = 5_000
/** Ids read from the index at once. */
const BATCH = 256
/** Records read, and status queries sent, concurrently. */
const AT_ONCE = 16
/** Maximum number of queued status queries; the rest stay due for later sweeps. */
const MAX_WAITING = 1_024
/** Maximum number of unreadable records reported, once each. */
const MAX_REPORTED = 1_000
/** How many unreadable records a sweep skips: all those sealed with a removed key may be due before the others. */
const MAX_UNREADABLE = 10_000

/**
 * Works through the store's index of unresolved records: records lapsed leases, asks about unknown records if their route has `reconcile`,
 * and reschedules the rest. Every replica runs one; they share the work by compare-and-set.
 */
export class Sweeper {
  readonly #ports: ReconcilePorts
  readonly #reported = new Set<RecordId>()
  /** Queued or being asked about. */
  readonly #queried = new Set<RecordId>()
  readonly #queue: RecordId[] = []
  #queries = 0
  /** Number of ids that the last sweep left due: the next one reads that many more, to find others. */
  #left = 0
  readonly #rounds: Rounds
  #idle: (() => void)[] = []

  constructor(ports: ReconcilePorts) {
    this.#ports = ports
    this.#rounds = new Rounds({
      round: () => this.sweep(),
      every: SWEEP_EVERY,
      soon: SWEEP_SOON,
      most: MAX_SWEEP,
      trouble: 'internal error in the sweeper',
      ports,
    })
  }

  /** Status queries queued or in progress. */
  get pendingQueries(): number {
    return this.#queried.size
  }

  start(): void {
    this.#rounds.start()
  }

  /** Starts no new work; resolves when all running work has ended. */
  async stop(): Promise<void> {
    const stopped = this.#rounds.stop()
    for (const id of this.#queue.splice(0)) this.#queried.delete(id)
    await stopped
    await this.idle()
  }

  /** Resolves when no status query is queued or in progress. */
  idle(): Promise<void> {
    return this.#queried.size === 0 ? Promise.resolve() : new Promise((resolve) => this.#idle.push(resolve))
  }

  /**
   * Checks all due records and starts status queries. True: there may be more to do.
   *
   * @throws {StoreUnavailable}
   */
  async sweep(): Promise<boolean> {
    const { store, clock, otherClock, monotonic } = this.#ports
    const observe = async (of: StoreClock, ping: () => Promise<Millis>): Promise<void> => {
      const before = monotonic()
      of.saw(await ping(), before, monotonic())
    }
    await observe(clock, () => store.ping())
    if (store.pingOther !== undefined) await observe(otherClock, store.pingOther)
    const limit = BATCH + this.#left
    const ids = await store.due(limit)
    const open = shuffled(
      ids.filter((id) => !this.#queried.has(id)),
      this.#ports.random,
    )
    let moved = 0
    let unreadable = 0
    await each(
      open,
      AT_ONCE,
      () => this.#rounds.stopped,
      async (id) => {
        const isMoved = await this.#look(id)
        if (isMoved === undefined) unreadable++
        else if (isMoved) moved++
      },
    )
    const left = ids.length - moved - unreadable
    this.#left = Math.min(left, MAX_WAITING) + Math.min(unreadable, MAX_UNREADABLE)
    return ids.length === limit && moved > 0
  }

  /** True: it is no longer due. Undefined: it cannot be read, and stays due. */
  async #look(id: RecordId): Promise<boolean | undefined> {
    let due: Awaited<ReturnType<typeof inspectDue>> | undefined
    try {
      due = await this.#guarded(id, () => inspectDue(this.#ports, id))
    } catch (error) {
      // It stays due, and does not hold up the others.
      if (error instanceof RecordLocked) return false
      throw error
    }
    if (due === undefined) return undefined
    if (due === null) return !this.#ports.isOwn(id)
    if (this.#rounds.stopped || this.#queried.size >= MAX_WAITING) return false
    this.#queried.add(id)
    this.#queue.push(id)
    if (this.#queries < AT_ONCE) void this.#askOn()
    return false
  }

  /** Sends status queries until the queue is empty. */
  async #askOn(): Promise<void> {
    this.#queries++
    for (let id = this.#queue.shift(); id !== undefined; id = this.#queue.shift()) {
      const asked = id
      try {
        await this.#guarded(asked, async () => {
          // Another replica may have sent one while it was queued.
          const due = await inspectDue(this.#ports, asked)
          if (due !== null) await ask(this.#ports, due)
          return null
        })
      } catch {
        // The store is down; the record stays due.
      }
      this.#queried.delete(asked)
    }
    this.#queries--
    if (this.#queried.size === 0) for (const resolve of this.#idle.splice(0)) resolve()
  }

  /** Reads a record that must not hold up the others if it is unreadable; undefined if it is. */
  async #guarded<T>(id: RecordId, work: () => Promise<T | null>): Promise<T | null | undefined> {
    try {
      return await work()
    } catch (error) {
      if (error instanceof StoreUnavailable) throw error
      if (this.#reported.has(id) || this.#reported.size === MAX_REPORTED) return undefined
      this.#reported.add(id)
      const message =
        error instanceof CorruptRecord
          ? 'an unresolved record cannot be read; it is left as it is'
          : 'internal error over an unresolved record'
      this.#ports.observer.trouble(message, { record: shortId(id), error: String(error) })
      if (this.#reported.size === MAX_REPORTED)
        this.#ports.observer.trouble('further unresolved records that cannot be read are not reported', {
          reported: MAX_REPORTED,
        })
      return undefined
    }
  }
}
