import type { Millis, RecordId } from '../core/record.ts'
import { bodiless } from '../core/settle.ts'
import { orThrow } from '../store/records.ts'
import type { ReconcilePorts } from './ports.ts'
import { each, Rounds, shuffled } from './rounds.ts'

/** Between rounds. Expired responses are never replayed, so removing them can wait. */
const LOOK_EVERY: Millis = 10_000
/** The pause while there is more to do. */
const LOOK_SOON: Millis = 50
/** Ids read from the index at once. */
const BATCH = 256
/** Records read concurrently, each with a body of perhaps several MiB. */
const AT_ONCE = 8
/** Skips up to this many records that cannot be changed, such as those sealed with a removed key. */
const MAX_LEFT = 10_000

type BodyRemoverPorts = Pick<ReconcilePorts, 'records' | 'store' | 'observer' | 'random'>

/**
 * Removes responses from records that outlive them (`ttl.body`, docs/adr/0084). Every replica runs one; they share the work by
 * compare-and-set. It only frees room: readers of such a record already see no response.
 */
export class BodyRemover {
  readonly #ports: BodyRemoverPorts
  /** Number of ids that the last round left due: the next one reads that many more, to find others. */
  #left = 0
  readonly #rounds: Rounds

  constructor(ports: BodyRemoverPorts) {
    this.#ports = ports
    this.#rounds = new Rounds({
      round: () => this.look(),
      every: LOOK_EVERY,
      soon: LOOK_SOON,
      most: LOOK_EVERY,
      trouble: 'internal error while removing responses from records',
      ports,
    })
  }

  start(): void {
    this.#rounds.start()
  }

  /** Starts no new work; resolves when running work has ended. */
  stop(): Promise<void> {
    return this.#rounds.stop()
  }

  /**
   * Removes some expired responses. True: there may be more.
   *
   * @throws {StoreUnavailable}
   */
  async look(): Promise<boolean> {
    const { store, random } = this.#ports
    const ids = await store.due(BATCH + this.#left, 'bodies')
    let taken = 0
    await each(
      shuffled(ids, random),
      AT_ONCE,
      () => this.#rounds.stopped,
      async (id) => {
        if (await this.#takeOut(id)) taken++
      },
    )
    this.#left = Math.min(ids.length - taken, MAX_LEFT)
    return taken > 0
  }

  /** False: it stays as it is, or another replica was faster. */
  async #takeOut(id: RecordId): Promise<boolean> {
    const { records } = this.#ports
    const found = await records.get(id)
    // Readers of the record get the error.
    if (found.kind === 'corrupt') return false
    const { record, now } = orThrow(found)
    const change = record === null ? null : bodiless(record, now)
    if (record === null || change === null) return false
    const { draft, spans } = change
    return orThrow(await records.replace(id, record.version, draft, spans))?.kind === 'written'
  }
}
