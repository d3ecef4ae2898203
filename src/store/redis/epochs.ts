import type { Millis, RecordId } from '../../core/record.ts'
import type { StoreUnavailable } from '../register.ts'
import type { Safety } from '../safety.ts'
import type { MasterShards, Servers } from './cluster.ts'
import { isRefusal, type RedisConnection } from './connection.ts'
import type { RedisKeys, RedisOptions } from './keys.ts'
import { script, source } from './resp.ts'

export const ADMIT = script(source('epoch') + source('admit'))
/** Checks per grace period: a proxy must notice a failover and rewrite its claims before others may claim. */
const CHECKS = 4
/** How many checks may be sent while the server is silent. */
const SILENT = 2

type EpochOptions = Pick<RedisOptions, 'grace' | 'skew' | 'onNewEpoch' | 'onHeld'>

/**
 * Detects servers that were replaced or lost their data: the first check of such a server starts the grace period, and this proxy must
 * rewrite its claims. Checks each server several times per grace period, since a failover need not break a connection.
 */
export class Epochs {
  readonly #options: EpochOptions
  readonly #grace: Millis
  readonly #keys: Pick<RedisKeys, 'epochs' | 'shardOf'>
  readonly #servers: Pick<Servers, 'commands' | 'isCluster' | 'known'>
  readonly #safety: Safety
  /** By shard: since when its server has been the same process, as far as known; absent: not checked yet. */
  readonly seen: Millis[] = []
  /** The connection that reported it. */
  readonly #seenOn: (RedisConnection | undefined)[] = []
  #graceEnds: Millis = 0
  readonly #timer: NodeJS.Timeout

  constructor(
    options: EpochOptions,
    keys: Pick<RedisKeys, 'epochs' | 'shardOf'>,
    servers: Pick<Servers, 'commands' | 'isCluster' | 'known'>,
    safety: Safety,
  ) {
    this.#options = options
    this.#grace = options.grace as Millis
    this.#keys = keys
    this.#servers = servers
    this.#safety = safety
    this.#timer = setInterval(() => void this.look(), this.#grace / CHECKS).unref()
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
    const parts = this.#servers.known().filter(({ server }) => server.isReady)
    const left = Math.max(0, ...(await Promise.all(parts.map((part) => this.#lookAt(part)))))
    this.#graceEnds = performance.now() + left
    this.#options.onHeld?.(left)
  }

  /** Returns how much longer the server's claims are held back. */
  async #lookAt({ server, shards }: MasterShards): Promise<Millis> {
    const [first] = shards
    const unseen = shards.filter((shard) => this.#seenOn[shard] !== server)
    const asked = performance.now()
    try {
      // One shard suffices unless slots have moved.
      const found = await this.#ask(unseen.length === 0 && first !== undefined ? [first] : unseen)
      const isOther = found.some(({ shard, since }) => this.seen[shard] !== since)
      const all = isOther && found.length < shards.length ? await this.#ask(shards) : found
      const changed = new Set<number>()
      for (const { shard, since } of all) {
        this.#seenOn[shard] = server
        if (this.seen[shard] === since) continue
        this.seen[shard] = since
        changed.add(shard)
      }
      const left = Math.max(0, ...all.map((one) => one.left))
      this.#safety.checked(shards, asked, (shard) => !changed.has(shard))
      const concerns = (id: RecordId): boolean => changed.has(this.#keys.shardOf(id))
      if (changed.size > 0) this.#options.onNewEpoch?.({ left, concerns })
      return left
    } catch (error) {
      // A server that is silent may have been replaced without an end of the connection.
      if (server.isReady && (error as StoreUnavailable).maybeApplied) server.reconnect()
      return 0
    }
  }

  #ask(shards: readonly number[]): Promise<Admitted[]> {
    const each = async () => (await Promise.all(shards.map((shard) => this.#run([shard])))).flat()
    if (this.#servers.isCluster) return each()
    return this.#run(shards).catch((error: unknown) => {
      // The only node of a cluster.
      if (isRefusal(error, 'CROSSSLOT')) return each()
      throw error
    })
  }

  #run(shards: readonly number[]): Promise<Admitted[]> {
    const named = shards.map((shard) => this.#keys.epochs[shard] as string)
    const seen = shards.map((shard) => this.seen[shard] ?? 0)
    const args = [shards.length, ...named, this.#grace, this.#options.skew?.() ?? 0, ...seen]
    const read = (pairs: number[]) =>
      shards.map((shard, n) => ({ shard, left: pairs[2 * n] as Millis, since: pairs[2 * n + 1] as Millis }))
    const until = performance.now() + (SILENT * this.#grace) / CHECKS
    return this.#servers.commands.run(ADMIT, args, read, until)
  }
}

interface Admitted {
  readonly shard: number
  readonly left: Millis
  readonly since: Millis
}
