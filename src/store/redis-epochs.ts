import type { Millis, RecordId } from '../core/record.ts'
import type { MasterShards } from './redis-cluster.ts'
import { isRefusal, type RedisConnection, Refused } from './redis-connection.ts'
import type { NewEpoch } from './register.ts'
import { script, source } from './resp.ts'
import type { Safety } from './safety.ts'

export const ADMIT = script(source('epoch') + source('admit'))
/** Checks per grace period: a proxy must notice a failover and rewrite its claims before others may claim. */
const CHECKS = 4

export interface RedisEpochOptions {
  readonly grace: Millis
  readonly skew: () => Millis
  /** Keys by shard. */
  readonly keys: readonly string[]
  readonly shardOf: (id: RecordId) => number
  readonly servers: {
    readonly commands: Pick<RedisConnection, 'run'>
    /** The keys of a command have to be in one shard. */
    readonly isCluster: boolean
    known(): readonly MasterShards[]
  }
  readonly onNew: (epoch: NewEpoch) => void
  readonly safety: Safety
  /** How much longer claims are held back; usually 0. */
  readonly onHeld: (left: Millis) => void
}

/**
 * Detects servers that were replaced or lost their data: the first check of such a server starts the grace period, and this proxy must
 * rewrite its claims. Checks each server several times per grace period, since a failover need not break a connection.
 */
export class Epochs {
  readonly #options: RedisEpochOptions
  /** By shard: since when its server has been the same process, as far as known; absent: not checked yet. */
  readonly seen: Millis[] = []
  /** The connection that reported it. */
  readonly #seenOn: (RedisConnection | undefined)[] = []
  /** When the oldest unanswered check was sent. */
  readonly #unanswered = new Map<RedisConnection, Millis>()
  #graceEnds: Millis = 0
  readonly #timer: NodeJS.Timeout

  constructor(options: RedisEpochOptions) {
    this.#options = options
    this.#timer = setInterval(() => void this.look(), options.grace / CHECKS).unref()
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
    const parts = this.#options.servers.known().filter(({ server }) => server.isReady)
    const left = Math.max(0, ...(await Promise.all(parts.map((part) => this.#lookAt(part)))))
    this.#graceEnds = performance.now() + left
    this.#options.onHeld(left)
  }

  /** Returns how much longer the server's claims are held back. */
  async #lookAt({ server, shards }: MasterShards): Promise<Millis> {
    const [first] = shards
    const unseen = shards.filter((shard) => this.#seenOn[shard] !== server)
    const asked = performance.now()
    try {
      // One shard suffices unless slots have moved.
      const found = await this.#ask(server, unseen.length === 0 && first !== undefined ? [first] : unseen)
      const isOther = found.some(({ shard, since }) => this.seen[shard] !== since)
      const all = isOther && found.length < shards.length ? await this.#ask(server, shards) : found
      const changed = new Set<number>()
      for (const { shard, since } of all) {
        this.#seenOn[shard] = server
        if (this.seen[shard] === since) continue
        this.seen[shard] = since
        changed.add(shard)
      }
      const left = Math.max(0, ...all.map((one) => one.left))
      const { shardOf, onNew, safety } = this.#options
      safety.checked(shards, asked, (shard) => !changed.has(shard))
      if (changed.size > 0) onNew({ left, concerns: (id) => changed.has(shardOf(id)) })
      return left
    } catch (error) {
      // Silence proves nothing yet; a closed connection or a refusal counts as an answer.
      if (!server.isReady || error instanceof Refused) this.#unanswered.delete(server)
      return 0
    }
  }

  async #ask(server: RedisConnection, shards: readonly number[]): Promise<Admitted[]> {
    this.#hurry(server)
    const each = async () => (await Promise.all(shards.map((shard) => this.#run([shard])))).flat()
    const all = this.#options.servers.isCluster
      ? await each()
      : await this.#run(shards).catch((error: unknown) => {
          // The only node of a cluster.
          if (isRefusal(error, 'CROSSSLOT')) return each()
          throw error
        })
    this.#unanswered.delete(server)
    return all
  }

  #run(shards: readonly number[]): Promise<Admitted[]> {
    const { grace, skew, keys, servers } = this.#options
    const named = shards.map((shard) => keys[shard] as string)
    const seen = shards.map((shard) => this.seen[shard] ?? 0)
    const args = [shards.length, ...named, grace, skew(), ...seen]
    return servers.commands.run(ADMIT, args, (pairs: number[]) =>
      shards.map((shard, n) => ({ shard, left: pairs[2 * n] as Millis, since: pairs[2 * n + 1] as Millis })),
    )
  }

  /** Reconnects to a silent server: it may have been replaced without closing the connection. */
  #hurry(server: RedisConnection): void {
    const now = performance.now()
    const since = this.#unanswered.get(server)
    if (since === undefined) this.#unanswered.set(server, now)
    else if (now - since >= this.#options.grace / 2)
      // Only after pending input was read: a busy event loop does not mean a silent server.
      setImmediate(() => {
        if (this.#unanswered.delete(server)) server.reconnect()
      })
  }
}

interface Admitted {
  readonly shard: number
  readonly left: Millis
  readonly since: Millis
}
