import type { Records } from '../store/records.ts'
import { Census, type Counted } from './census.ts'
import type { ReconcileObserver, ReconcilePorts } from './ports.ts'
import { Sweeper } from './sweeper.ts'

export interface ReconcilerPorts extends ReconcilePorts {
  readonly records: Pick<Records, 'get' | 'replace' | 'due' | 'list'>
  readonly observer: ReconcileObserver & { counted(counted: Counted): void }
}

/** Everything that one process does about unresolved records by itself. */
export class Reconciler {
  readonly #sweeper: Sweeper
  readonly #census: Census

  constructor(ports: ReconcilerPorts) {
    this.#sweeper = new Sweeper(ports)
    this.#census = new Census(
      ports.records,
      (counted) => ports.observer.counted(counted),
      (error) => ports.observer.trouble('unknown records could not be counted', { error: String(error) }),
    )
  }

  start(): void {
    this.#sweeper.start()
    void this.#census.start()
  }

  /** Begins nothing new. Resolved: the questions under way have ended. */
  stop(): Promise<void> {
    this.#census.stop()
    return this.#sweeper.stop()
  }
}
