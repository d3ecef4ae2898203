import { type Millis, type RecordId, readAt } from '../core/record.ts'
import { policiesOf, type Routes } from '../core/route.ts'
import { StoreClock } from '../core/store-clock.ts'
import { orThrow, type Records } from '../store/records.ts'
import { type Register, StoreUnavailable } from '../store/register.ts'
import { BodyRemover } from './bodies.ts'
import type { Control, ReconcileLog } from './control.ts'
import type { ReconcileObserver, ReconcilePorts } from './ports.ts'
import { each } from './rounds.ts'
import { Sweeper } from './sweeper.ts'

export interface ReconcilerPorts
  extends Omit<ReconcilePorts, 'clock' | 'otherClock' | 'monotonic' | 'prove'> {
  readonly store: Pick<Register, 'due' | 'list' | 'ping' | 'pingOther'>
  /** Tests the status queries before their answers count. */
  readonly control: Control
  readonly observer: ReconcileObserver & {
    counted(counted: UnresolvedCounts): void
    readonly tried: ReconcileLog
  }
}

/** A process's background work on records. */
export class Reconciler {
  readonly #sweeper: Sweeper
  readonly #bodies: BodyRemover
  readonly #count: UnresolvedCount
  readonly #ports: ReconcilerPorts

  constructor(ports: ReconcilerPorts) {
    this.#ports = ports
    this.#sweeper = new Sweeper({
      ...ports,
      clock: new StoreClock(),
      otherClock: new StoreClock(),
      monotonic: () => performance.now(),
      prove: (...asked) => ports.control.prove(...asked),
    })
    this.#bodies = new BodyRemover(ports)
    this.#count = new UnresolvedCount(ports)
  }

  start(config: Routes): void {
    this.#sweeper.start()
    this.#bodies.start()
    void this.#count.start()
    this.check(config)
  }

  /** Tests the status queries that are new in the current configuration. */
  check(config: Routes): void {
    const { control, observer } = this.#ports
    control
      .check(policiesOf(config))
      .catch((error: unknown) =>
        observer.trouble('internal error in the test of status queries', { error: String(error) }),
      )
  }

  /** Starts no new work; resolves when running status queries and writes have ended. */
  async stop(): Promise<void> {
    this.#ports.control.stop()
    this.#count.stop()
    await Promise.all([this.#bodies.stop(), this.#sweeper.stop()])
  }
}

/** Every replica counts: one read per unresolved record. */
const COUNT_EVERY: Millis = 60_000
const PAGE = 256
/** Records read concurrently. */
const AT_ONCE = 16
/** Beyond this, the count means "at least". */
const MAX_COUNTED = 5_000

export interface UnresolvedCounts {
  readonly unknown: number
  readonly dead_lettered: number
}

interface CountPorts {
  readonly records: Pick<Records, 'get'>
  readonly store: Pick<Register, 'list'>
  readonly observer: Pick<ReconcilerPorts['observer'], 'counted' | 'trouble'>
}

/** Counts unknown records at intervals, using the index of unresolved records. */
export class UnresolvedCount {
  readonly #ports: CountPorts
  #timer: NodeJS.Timeout | null = null
  #stopped = false

  constructor(ports: CountPorts) {
    this.#ports = ports
  }

  /** Never rejects: a failed count must not stop the proxy. */
  async start(): Promise<void> {
    const { observer } = this.#ports
    try {
      observer.counted(await this.count())
    } catch (error) {
      // Store down: keep the last count.
      if (!(error instanceof StoreUnavailable))
        observer.trouble('unknown records could not be counted', { error: String(error) })
    }
    if (!this.#stopped) this.#timer = setTimeout(() => void this.start(), COUNT_EVERY).unref()
  }

  stop(): void {
    this.#stopped = true
    if (this.#timer !== null) clearTimeout(this.#timer)
  }

  /** @throws {StoreUnavailable} */
  async count(): Promise<UnresolvedCounts> {
    const counted = { unknown: 0, dead_lettered: 0 }
    const seen = new Set<RecordId>()
    let cursor: string | null = null
    do {
      const page = await this.#ports.store.list('unresolved', cursor, PAGE)
      const left = page.ids.filter((id) => !seen.has(id))
      for (const id of left) seen.add(id)
      await each(
        left,
        AT_ONCE,
        () => this.#stopped,
        async (id) => {
          const state = await this.#stateOf(id)
          if (state !== null) counted[state]++
        },
      )
      cursor = page.next
    } while (cursor !== null && seen.size < MAX_COUNTED && !this.#stopped)
    return counted
  }

  /** Null: not unknown, or unreadable. */
  async #stateOf(id: RecordId): Promise<keyof UnresolvedCounts | null> {
    const found = await this.#ports.records.get(id)
    if (found.kind === 'corrupt') return null
    const { record, now } = orThrow(found)
    const read = record === null ? null : readAt(record, now)
    if (read?.state !== 'unknown') return null
    return read.reconciliation?.deadLettered ? 'dead_lettered' : 'unknown'
  }
}
