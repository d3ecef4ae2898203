import { type Millis, type RecordId, shortId } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { ask, inspectDue } from './ask.ts'
import type { ReconcilePorts } from './ports.ts'

/** How often the index is looked at, give or take a quarter. */
const SWEEP_EVERY: Millis = 1_000
/** The same, while there is more than one look takes. */
const SWEEP_SOON: Millis = 50
/** While the store does not answer. */
const SWEEP_MOST: Millis = 5_000
/** Ids of one look at the index. */
const BATCH = 256
/** Records looked at, and questions under way, at once. */
const AT_ONCE = 16
/** Questions that wait: while the upstream is slow, records stay due, and each sweep finds them again. */
const MOST_WAITING = 1_024
/** Records that cannot be read are told of once. */
const MOST_TOLD = 1_000

/**
 * Finds unresolved records by the store's index, without any client: lapsed leases are written down, unknown records asked
 * about where the route says how, and moved on otherwise. Every replica has one; they share the work by compare-and-set.
 */
export class Sweeper {
  readonly #ports: ReconcilePorts
  readonly #told = new Set<RecordId>()
  /** To be asked about, or being asked about. */
  readonly #asking = new Set<RecordId>()
  readonly #queue: RecordId[] = []
  #questions = 0
  /** Ids that the last sweep left as due as they were: they must not keep the next one from finding others. */
  #left = 0
  #timer: NodeJS.Timeout | null = null
  #sweeping: Promise<unknown> = Promise.resolve()
  #stopped = false
  #idle: (() => void)[] = []

  constructor(ports: ReconcilePorts) {
    this.#ports = ports
  }

  /** Questions under way, and those that wait. */
  get asking(): number {
    return this.#asking.size
  }

  start(): void {
    this.#later(SWEEP_EVERY)
  }

  /** Begins nothing new. Resolved: what was under way has ended. */
  async stop(): Promise<void> {
    this.#stopped = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    for (const id of this.#queue.splice(0)) this.#asking.delete(id)
    await this.#sweeping
    await this.idle()
  }

  /** Resolves when no question is under way or waits. */
  idle(): Promise<void> {
    return this.#asking.size === 0 ? Promise.resolve() : new Promise((resolve) => this.#idle.push(resolve))
  }

  /**
   * One look at the index: everything that is due is looked at, and questions are begun. True: there may be more that can be
   * done at once.
   * @throws {StoreUnavailable}
   */
  async sweep(): Promise<boolean> {
    await this.#readClock()
    const limit = BATCH + this.#left
    const ids = await this.#ports.store.due(limit)
    // In another order than the other replicas, so that each finds work that nobody has begun.
    const open = shuffled(
      ids.filter((id) => !this.#asking.has(id)),
      this.#ports.random,
    )
    let moved = 0
    const work = async (): Promise<void> => {
      for (let id = open.pop(); id !== undefined && !this.#stopped; id = open.pop())
        if (await this.#look(id)) moved++
    }
    await all(Array.from({ length: AT_ONCE }, work))
    this.#left = Math.min(ids.length - moved, MOST_WAITING)
    return ids.length === limit && moved > 0
  }

  #later(pause: Millis): void {
    if (this.#stopped) return
    this.#timer = setTimeout(
      () => {
        this.#sweeping = this.sweep().then(
          (more) => this.#later(more ? SWEEP_SOON : SWEEP_EVERY),
          (error) => {
            if (!(error instanceof StoreUnavailable))
              this.#ports.observer.trouble('internal error of the sweeper', { error: String(error) })
            this.#later(Math.min(Math.max(pause, SWEEP_EVERY) * 2, SWEEP_MOST))
          },
        )
      },
      pause * (0.75 + 0.5 * this.#ports.random()),
    ).unref()
  }

  async #readClock(): Promise<void> {
    const { store, clock, monotonic } = this.#ports
    const before = monotonic()
    const now = await store.ping()
    clock.saw(now, before, monotonic())
  }

  /** True: it is not due any more. */
  async #look(id: RecordId): Promise<boolean> {
    const due = await this.#guarded(id, () => inspectDue(this.#ports, id))
    if (due === null) return !this.#told.has(id) && !this.#ports.isOwn(id)
    if (this.#stopped || this.#asking.size >= MOST_WAITING) return false
    this.#asking.add(id)
    this.#queue.push(id)
    if (this.#questions < AT_ONCE) void this.#askOn()
    return false
  }

  /** One questioner: until nothing waits. */
  async #askOn(): Promise<void> {
    this.#questions++
    for (let id = this.#queue.shift(); id !== undefined; id = this.#queue.shift()) {
      const asked = id
      try {
        await this.#guarded(asked, async () => {
          // It waited for its turn: meanwhile others may have asked.
          const due = await inspectDue(this.#ports, asked)
          if (due !== null) await ask(this.#ports, due)
          return null
        })
      } catch {
        // The store is down: the record is due again when it is back.
      }
      this.#asking.delete(asked)
    }
    this.#questions--
    if (this.#asking.size === 0) for (const resolve of this.#idle.splice(0)) resolve()
  }

  /** One record that cannot be read does not keep the others waiting. */
  async #guarded<T>(id: RecordId, work: () => Promise<T | null>): Promise<T | null> {
    try {
      return await work()
    } catch (error) {
      if (error instanceof StoreUnavailable) throw error
      if (this.#told.has(id)) return null
      if (this.#told.size < MOST_TOLD) this.#told.add(id)
      const message =
        error instanceof CorruptRecord
          ? 'an unresolved record cannot be read; it is left as it is'
          : 'internal error over an unresolved record'
      this.#ports.observer.trouble(message, { record: shortId(id), error: String(error) })
      return null
    }
  }
}

/** All of them end before one's failure is thrown on. */
async function all(work: readonly Promise<void>[]): Promise<void> {
  for (const one of await Promise.allSettled(work)) if (one.status === 'rejected') throw one.reason
}

function shuffled<T>(items: readonly T[], random: () => number): T[] {
  return items
    .map((item) => ({ item, at: random() }))
    .sort((a, b) => a.at - b.at)
    .map(({ item }) => item)
}
