import {
  differencesBetween,
  type Identification,
  type IdentificationParts,
  keysUnder,
} from '../core/identification.ts'
import type { Millis } from '../core/record.ts'
import type { PhaseGuard } from './around.ts'
import { decodeRecord } from './codec.ts'
import {
  IDENTIFICATION_MARK,
  MARKED_FOR,
  type Mark,
  RENEW_EVERY,
  RETRY_EVERY,
  renewMark,
  SURE_FOR,
  untilAborted,
} from './phases.ts'
import { CorruptRecord, OutOfPhase, type Store, StoreUnavailable } from './register.ts'

/*
 * Replicas of one service agree on what identifies a record (docs/adr/0117). A service has one mark, which all replicas with the same digest
 * renew, and nobody else can take while it lasts: a compare-and-set decides between replicas that start at once.
 */

const TOKEN_BYTES = 16

interface AgreementOptions {
  readonly own: Identification
  /** Claims although others identify records differently (`--accept-rescope`). */
  readonly accepts: boolean
  /** For the log: what keeps it from claiming, or what it claims in spite of; null: nothing any more. */
  readonly say: (why: string | null) => void
  /** Monotonic. */
  readonly clock?: () => Millis
}

/** Holds the mark together with all replicas that agree. Until it is sure to, it claims nothing; it answers from records as usual. */
export class Agreement implements PhaseGuard {
  readonly clock: () => Millis
  sureUntil = Number.NEGATIVE_INFINITY
  /** Why nothing is claimed, although the store answers; null: nothing stands against it. */
  conflict: string | null = null
  readonly #stores: readonly Pick<Store, 'swap' | 'put'>[]
  readonly #mark: Mark
  readonly #options: AgreementOptions
  readonly #stopping = new AbortController()
  #running: Promise<void> = Promise.resolve()
  #renewing: Promise<void> | null = null
  /** By the last try. */
  #isRenewed = false
  #said: string | null = null

  /** `stores`: those that decide who claims; of a migration's two perhaps both, the old one first. */
  constructor(stores: readonly Pick<Store, 'swap' | 'put'>[], options: AgreementOptions) {
    const { own, clock } = options
    this.#stores = stores
    this.#options = options
    this.clock = clock ?? performance.now.bind(performance)
    this.#mark = {
      id: IDENTIFICATION_MARK,
      token: own.digest.subarray(0, TOKEN_BYTES),
      route: 'identification',
      path: JSON.stringify(own.parts),
      about: 'what identifies records, replicas that agree on it are alive',
    }
  }

  /** Takes the mark, or keeps trying: it never waits for others, since what has a record is answered. */
  async enter(): Promise<void> {
    await this.renew().catch(unlessUnavailable)
    const pause = () => (this.#isRenewed && this.conflict === null ? RENEW_EVERY : RETRY_EVERY)
    this.#running = untilAborted(this.#stopping.signal, pause, () => this.renew().catch(unlessUnavailable))
  }

  /**
   * Once for all concurrent callers.
   * @throws {StoreUnavailable}
   */
  renew(): Promise<void> {
    this.#renewing ??= this.#renew().finally(() => {
      this.#renewing = null
    })
    return this.#renewing
  }

  /** A store may have lost the mark: who is sure of it writes it again before the grace is over. */
  async rewrite(): Promise<void> {
    // That may have been written before.
    await this.#renewing?.catch(unlessUnavailable)
    await this.renew().catch(unlessUnavailable)
  }

  async ensure(): Promise<void> {
    await this.renew()
    if (this.conflict !== null) throw new OutOfPhase(this.conflict, false)
  }

  /** The mark stays: replicas that agree may rely on it. */
  async stop(): Promise<void> {
    this.#stopping.abort()
    await this.#running
  }

  async #renew(): Promise<void> {
    const began = this.clock()
    this.#isRenewed = false
    // After a failover that has lost the mark, only those that were sure of it may write it before the grace is over.
    const entry = began < this.sureUntil ? 'again' : 'claim'
    let differs: string | null = null
    for (const store of this.#stores) {
      differs = await this.#differing(store, entry)
      if (differs !== null) break
    }
    this.#isRenewed = true
    const { accepts, say } = this.#options
    this.conflict = accepts ? null : differs
    this.sureUntil = this.conflict === null ? began + SURE_FOR : Number.NEGATIVE_INFINITY
    if (differs === this.#said) return
    this.#said = differs
    say(differs)
  }

  /** Null: this store has the mark of those that agree. */
  async #differing(store: Pick<Store, 'swap' | 'put'>, entry: 'claim' | 'again'): Promise<string | null> {
    const { own, accepts } = this.#options
    let differences: readonly string[]
    try {
      const found = await renewMark(store, this.#mark, entry)
      if (!Buffer.isBuffer(found)) return null
      differences = differencesBetween(own.parts, partsIn(found))
    } catch (error) {
      if (!(error instanceof CorruptRecord)) throw error
      differences = [`what it is cannot be read: ${error.message}`]
    }
    const found = `a replica that identifies records differently (${differences.join(', ')}) is alive, or was ${MARKED_FOR / 1000} s ago`
    const keys = keysUnder(differences)
    return accepts
      ? `${found}: ${keys} may execute twice, once at such a replica and once here (--accept-rescope)`
      : `${found}: a retry would not find the record of ${keys} that it has executed; nothing is claimed until all such replicas have ended, or with --accept-rescope (docs/reload.md)`
  }
}

/** @throws {CorruptRecord} */
function partsIn(bytes: Buffer): IdentificationParts {
  const { path } = decodeRecord(bytes)
  try {
    return JSON.parse(path) as IdentificationParts
  } catch {
    throw new CorruptRecord('it was written by another version')
  }
}

/** It is tried again, by each claim as well. */
function unlessUnavailable(error: unknown): void {
  if (!(error instanceof StoreUnavailable)) throw error
}
