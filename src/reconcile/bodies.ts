import type { Millis, RecordId } from '../core/record.ts'
import { bodiless } from '../core/settle.ts'
import { orThrow } from '../store/records.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { ReconcilePorts } from './ports.ts'
import { each, shuffled } from './sweeper.ts'

/** Between looks, ±25 %. What is over is not replayed meanwhile, so its room can wait. */
const LOOK_EVERY: Millis = 10_000
/** The pause while there is more to do. */
const LOOK_SOON: Millis = 50
/** Ids read from the index at once. */
const BATCH = 256
/** Each is read with a body of perhaps several MiB. */
const AT_ONCE = 8
/** Records that cannot be changed, such as those sealed with a removed key, are passed over up to this number. */
const MOST_LEFT = 10_000

type Ports = Pick<ReconcilePorts, 'records' | 'store' | 'observer' | 'random'>

/**
 * Takes responses out of records that outlive them (`ttl.body`, docs/adr/0111). Every replica runs one; they share the work by
 * compare-and-set. Nothing but the room depends on it: whoever reads such a record finds no response.
 */
export class BodyRemover {
  readonly #ports: Ports
  /** How many ids the last look left due: the next one reads that many more, to find others. */
  #left = 0
  #timer: NodeJS.Timeout | null = null
  #looking: Promise<unknown> = Promise.resolve()
  #stopped = false

  constructor(ports: Ports) {
    this.#ports = ports
  }

  start(): void {
    this.#later(LOOK_EVERY)
  }

  /** Starts nothing new; resolves when running work has ended. */
  async stop(): Promise<void> {
    this.#stopped = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    await this.#looking
  }

  /**
   * Takes out some of what is over. True: there may be more.
   *
   * @throws {StoreUnavailable}
   */
  async look(): Promise<boolean> {
    const { store, random } = this.#ports
    const ids = await store.due(BATCH + this.#left, 'bodies')
    let taken = 0
    await each(
      // So that replicas meet seldom.
      shuffled(ids, random),
      () => this.#stopped,
      async (id) => {
        if (await this.#takeOut(id)) taken++
      },
      AT_ONCE,
    )
    this.#left = Math.min(ids.length - taken, MOST_LEFT)
    return taken > 0
  }

  #later(pause: Millis): void {
    if (this.#stopped) return
    this.#timer = setTimeout(
      () => {
        this.#looking = this.look().then(
          (more) => this.#later(more ? LOOK_SOON : LOOK_EVERY),
          (error) => {
            if (!(error instanceof StoreUnavailable))
              this.#ports.observer.trouble('internal error while responses were taken out of records', {
                error: String(error),
              })
            this.#later(LOOK_EVERY)
          },
        )
      },
      pause * (0.75 + 0.5 * this.#ports.random()),
    ).unref()
  }

  /** False: it stays as it is, or somebody else was faster. */
  async #takeOut(id: RecordId): Promise<boolean> {
    const { records } = this.#ports
    const found = await records.get(id)
    // Whoever asks for it hears of that.
    if (found.kind === 'corrupt') return false
    const { record, now } = orThrow(found)
    const change = record === null ? null : bodiless(record, now)
    if (record === null || change === null) return false
    const { draft, spans } = change
    return orThrow(await records.replace(id, record.version, draft, spans))?.kind === 'written'
  }
}
