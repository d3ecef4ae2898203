import type { Millis, RecordId } from '../core/record.ts'
import type { NewEpoch, StoreUnavailable } from './register.ts'
import type { Safety } from './safety.ts'

/** Checks per grace period: a proxy must notice a failover and rewrite its claims before others may claim. */
export const CHECKS = 4

/** What a server reports about a shard. */
export interface Admitted {
  readonly shard: number
  /** How much longer new claims are held back. */
  readonly left: Millis
  /** When its present identity was first seen. */
  readonly since: Millis
}

/** A server that may be replaced by another one, or lose its data. */
export interface Watched {
  /** The same object at each check. */
  readonly of: object
  readonly shards: readonly number[]
  /** `seen`: its last known `since`, by shard. */
  readonly look: (shards: readonly number[], seen: readonly Millis[]) => Promise<readonly Admitted[]>
  /** It did not answer: it may have been replaced without closing its connections. */
  readonly onSilence: () => void
}

export interface EpochsOptions {
  readonly grace: Millis
  /** The servers that can be asked now. */
  readonly servers: () => readonly Watched[]
  readonly shardOf: (id: RecordId) => number
  /** Whether the timer waits for a check in progress. */
  readonly isBusy?: () => boolean
  readonly safety: Safety
  readonly onNewEpoch?: ((epoch: NewEpoch) => void) | undefined
  /** How long new claims are still held back; almost always 0. */
  readonly onHeld?: ((left: Millis) => void) | undefined
}

/**
 * Detects servers that were replaced or lost their data: the first check of such a server starts the grace period, and this proxy must
 * rewrite its claims (docs/adr/0091). Checks each server several times per grace period, since a failover need not break a connection.
 */
export class Epochs {
  readonly #options: EpochsOptions
  /** By shard: when its server was first seen; absent: not checked yet. */
  readonly seen: Millis[] = []
  /** The server that said so. */
  readonly #seenOn: (object | undefined)[] = []
  #graceEnds: Millis = 0
  readonly #timer: NodeJS.Timeout

  constructor(options: EpochsOptions) {
    this.#options = options
    const look = (): void => void (options.isBusy?.() || this.look())
    this.#timer = setInterval(look, options.grace / CHECKS).unref()
  }

  /** Whether some server holds claims back, as far as known. */
  get isInGrace(): boolean {
    return performance.now() < this.#graceEnds
  }

  close(): void {
    clearInterval(this.#timer)
  }

  /** Never rejects: the next check retries failures. */
  async look(): Promise<void> {
    const all = this.#options.servers().map((server) => this.#lookAt(server))
    const left = Math.max(0, ...(await Promise.all(all)))
    this.#graceEnds = performance.now() + left
    this.#options.onHeld?.(left)
  }

  /** Returns how much longer the server's claims are held back. */
  async #lookAt({ of, shards, look, onSilence }: Watched): Promise<Millis> {
    const { safety, shardOf, onNewEpoch } = this.#options
    const unseen = shards.filter((shard) => this.#seenOn[shard] !== of)
    const asked = performance.now()
    try {
      // One shard is enough unless some have moved.
      const found = await look(unseen.length === 0 ? shards.slice(0, 1) : unseen, this.seen)
      const isOther = found.some(({ shard, since }) => this.seen[shard] !== since)
      const all = isOther && found.length < shards.length ? await look(shards, this.seen) : found
      const changed = new Set<number>()
      for (const { shard, since } of all) {
        this.#seenOn[shard] = of
        if (this.seen[shard] === since) continue
        this.seen[shard] = since
        changed.add(shard)
      }
      const left = Math.max(0, ...all.map((one) => one.left))
      safety.checked(shards, asked, (shard) => !changed.has(shard))
      if (changed.size > 0) onNewEpoch?.({ left, concerns: (id) => changed.has(shardOf(id)) })
      return left
    } catch (error) {
      if ((error as StoreUnavailable).maybeApplied) onSilence()
      return 0
    }
  }
}
