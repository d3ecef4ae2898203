import { setTimeout as wait } from 'node:timers/promises'
import type { RoutePolicy } from '../core/policy.ts'
import type { RecordId } from '../core/record.ts'
import { StoreClock } from '../core/store-clock.ts'
import type { Register } from '../store/register.ts'
import { Control, type Say } from './control.ts'
import type { ReconcileObserver, ReconcilePorts } from './ports.ts'
import { Sweeper } from './sweeper.ts'
import { type Counted, UnresolvedCount } from './unresolved-count.ts'

export interface ReconcilerPorts extends Omit<ReconcilePorts, 'clock' | 'monotonic' | 'prove'> {
  readonly store: Pick<Register, 'due' | 'list' | 'ping'>
  readonly observer: ReconcileObserver & { counted(counted: Counted): void; readonly tried: Say }
}

/** The routes that may have records. */
interface Routed {
  readonly routes: readonly RoutePolicy[]
  readonly defaults: RoutePolicy
  readonly unmatched: 'protect' | 'pass' | 'reject'
}

/** Everything that one process does about unresolved records by itself. */
export class Reconciler {
  readonly #sweeper: Sweeper
  readonly #census: UnresolvedCount
  readonly #control: Control
  readonly #observer: ReconcileObserver

  constructor(ports: ReconcilerPorts) {
    this.#observer = ports.observer
    this.#control = new Control({
      ...ports,
      say: ports.observer.tried,
      clock: () => performance.now(),
      pause: (time) => wait(time, undefined, { ref: false }),
    })
    this.#sweeper = new Sweeper({
      ...ports,
      clock: new StoreClock(),
      monotonic: () => performance.now(),
      prove: (...asked) => this.#control.prove(...asked),
    })
    this.#census = new UnresolvedCount(
      ports.records,
      ports.store,
      (counted) => ports.observer.counted(counted),
      (error) => ports.observer.trouble('unknown records could not be counted', { error: String(error) }),
    )
  }

  start(config: Routed): void {
    this.#sweeper.start()
    void this.#census.start()
    this.check(config)
  }

  /** Tries the questions of the configuration that is in force from now on, where they are new. */
  check({ routes, defaults, unmatched }: Routed): void {
    this.#control
      .check(unmatched === 'protect' ? [...routes, defaults] : routes)
      .catch((error: unknown) =>
        this.#observer.trouble('internal error of the canary', { error: String(error) }),
      )
  }

  /** A request of the route was completed on this replica. */
  completed(route: string, id: RecordId): void {
    this.#control.completed(route, id)
  }

  /** Begins nothing new. Resolved: the questions under way have ended. */
  stop(): Promise<void> {
    this.#control.stop()
    this.#census.stop()
    return this.#sweeper.stop()
  }
}
