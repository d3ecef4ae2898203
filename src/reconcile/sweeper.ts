import { type Millis, type RecordId, shortId } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { ask, inspectDue } from './ask.ts'
import type { ReconcilePorts } from './ports.ts'

/** Between sweeps, ±25 %. */
const SWEEP_EVERY: Millis = 1_000
/** The same while there is more than one sweep takes. */
const SWEEP_SOON: Millis = 50
/** The longest pause while the store does not answer. */
const SWEEP_MOST: Millis = 5_000
/** Ids read from the index at once. */
const BATCH = 256
/** Records read, and questions asked, concurrently. */
const AT_ONCE = 16
/** Queued questions: the rest stays due, and later sweeps find it again. */
const MOST_WAITING = 1_024
/** Unreadable records are reported once each, up to so many. */
const MOST_REPORTED = 1_000

/**
 * Works through the store's index of unresolved records: lapsed leases are written down, unknown records asked about if their
 * route says how, and moved on otherwise. Every replica has one; they share the work by compare-and-set.
 */
export class Sweeper {
  readonly #ports: ReconcilePorts
  readonly #reported = new Set<RecordId>()
  /** Queued or being asked about. */
  readonly #asking = new Set<RecordId>()
  readonly #queue: RecordId[] = []
  #questions = 0
  /** Ids that the last sweep left due: the next one reads as many more, to find others. */
  #left = 0
  #timer: NodeJS.Timeout | null = null
  #sweeping: Promise<unknown> = Promise.resolve()
  #stopped = false
  #idle: (() => void)[] = []

  constructor(ports: ReconcilePorts) {
    this.#ports = ports
  }

  /** Questions queued or under way. */
  get asking(): number {
    return this.#asking.size
  }

  start(): void {
    this.#later(SWEEP_EVERY)
  }

  /** Begins nothing new; resolves when what is under way has ended. */
  async stop(): Promise<void> {
    this.#stopped = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    for (const id of this.#queue.splice(0)) this.#asking.delete(id)
    await this.#sweeping
    await this.idle()
  }

  /** Resolves when no question is queued or under way. */
  idle(): Promise<void> {
    return this.#asking.size === 0 ? Promise.resolve() : new Promise((resolve) => this.#idle.push(resolve))
  }

  /**
   * Looks at everything that is due and begins questions. True: there may be more to do at once.
   * @throws {StoreUnavailable}
   */
  async sweep(): Promise<boolean> {
    const { store, clock, monotonic } = this.#ports
    const before = monotonic()
    clock.saw(await store.ping(), before, monotonic())
    const limit = BATCH + this.#left
    const ids = await store.due(limit)
    // Shuffled, so that each replica finds work that no other has begun.
    const open = shuffled(
      ids.filter((id) => !this.#asking.has(id)),
      this.#ports.random,
    )
    let moved = 0
    await each(
      open,
      () => this.#stopped,
      async (id) => {
        if (await this.#look(id)) moved++
      },
    )
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

  /** True: it is no longer due. */
  async #look(id: RecordId): Promise<boolean> {
    const due = await this.#guarded(id, () => inspectDue(this.#ports, id))
    if (due === null) return !this.#reported.has(id) && !this.#ports.isOwn(id)
    if (this.#stopped || this.#asking.size >= MOST_WAITING) return false
    this.#asking.add(id)
    this.#queue.push(id)
    if (this.#questions < AT_ONCE) void this.#askOn()
    return false
  }

  /** Asks until the queue is empty. */
  async #askOn(): Promise<void> {
    this.#questions++
    for (let id = this.#queue.shift(); id !== undefined; id = this.#queue.shift()) {
      const asked = id
      try {
        await this.#guarded(asked, async () => {
          // Others may have asked while it was queued.
          const due = await inspectDue(this.#ports, asked)
          if (due !== null) await ask(this.#ports, due)
          return null
        })
      } catch {
        // The store is down; the record stays due.
      }
      this.#asking.delete(asked)
    }
    this.#questions--
    if (this.#asking.size === 0) for (const resolve of this.#idle.splice(0)) resolve()
  }

  /** An unreadable record must not hold up the others. */
  async #guarded<T>(id: RecordId, work: () => Promise<T | null>): Promise<T | null> {
    try {
      return await work()
    } catch (error) {
      if (error instanceof StoreUnavailable) throw error
      if (this.#reported.has(id)) return null
      if (this.#reported.size < MOST_REPORTED) this.#reported.add(id)
      const message =
        error instanceof CorruptRecord
          ? 'an unresolved record cannot be read; it is left as it is'
          : 'internal error over an unresolved record'
      this.#ports.observer.trouble(message, { record: shortId(id), error: String(error) })
      return null
    }
  }
}

/** Takes the ids out of the list, some at once, until it is empty. Waits for what is under way before it throws. */
export async function each(
  ids: RecordId[],
  isStopped: () => boolean,
  work: (id: RecordId) => Promise<void>,
): Promise<void> {
  const worker = async (): Promise<void> => {
    for (let id = ids.pop(); id !== undefined && !isStopped(); id = ids.pop()) await work(id)
  }
  const ended = await Promise.allSettled(Array.from({ length: AT_ONCE }, worker))
  for (const one of ended) if (one.status === 'rejected') throw one.reason
}

function shuffled<T>(items: readonly T[], random: () => number): T[] {
  return items
    .map((item) => ({ item, at: random() }))
    .sort((a, b) => a.at - b.at)
    .map(({ item }) => item)
}
