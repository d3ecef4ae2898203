import { setImmediate as immediately } from 'node:timers/promises'
import type { Millis } from '../../core/record.ts'
import { meets, PREFIX } from '../record/codec.ts'
import { StoreUnavailable, Unreplicated, type WriteReply } from '../register.ts'
import { type ReadResult, writeReply } from './batch.ts'
import { type Link, RedisConnection, Refused } from './connection.ts'
import type { RedisKeys, RedisOptions, Wait } from './keys.ts'
import { any, list, number, text, tuple } from './resp.ts'
import type { MasterShards, Servers } from './servers.ts'

/** How long the known number of replicas is trusted. */
const KNOWN_FOR: Millis = 1000
/** Markers are never read. */
const MARKER_LIFE: Millis = 60_000
/** Whether the server has it on disk, and how many replicas do. */
const COUNTS = tuple(number, number)
/** Its last part: the replicas that are connected. */
const ROLE = tuple(text(/^master$/), any, list(any))

/**
 * Makes claims wait until replicas, or disks, have them (contract §9). Each round writes a marker over a second connection to the same
 * process and `WAIT`s for it. The marker follows the claims in the replication stream, so a replica that has the marker has the claims:
 * one round covers all claims whose replies came before it (ADR 93).
 */
export class Barriers {
  readonly wait: Wait
  readonly keys: RedisKeys
  readonly servers: Servers
  readonly #options: RedisOptions
  readonly #byLink = new Map<Link, Barrier>()

  constructor(wait: Wait, options: RedisOptions, keys: RedisKeys, servers: Servers) {
    this.wait = wait
    this.keys = keys
    this.servers = servers
    this.#options = options
  }

  /** @throws {StoreUnavailable} if a server cannot do it. */
  async open(): Promise<void> {
    const { disk } = this.wait
    if (disk === 'none') return
    for (const { server } of this.servers.known()) {
      const error = await server.ask('waitaof', [1, 0, 1], COUNTS).catch((failure: Error) => failure)
      // A server that is down refuses its claims later, like any server that cannot wait.
      if (!(error instanceof Refused)) continue
      const why = /unknown command/i.test(error.reply)
        ? 'the server has no WAITAOF; allowed: Redis 7.2 or later, or Valkey'
        : /appendonly/.test(error.reply)
          ? 'appendonly is off on the server; allowed: appendonly yes'
          : `the server refuses WAITAOF (${error.reply}); allowed: a user with +waitaof`
      throw new StoreUnavailable(`store.wait.disk: found ${disk}, and ${why}, or disk: none`, false)
    }
  }

  /**
   * Runs the write of a claim and, if the store now holds this claim, waits for its replication.
   * @throws {Unreplicated} if it was not replicated in time.
   */
  async claim<Found extends Buffer | null>(
    shard: number,
    bytes: Buffer,
    write: (read: ReadResult<WriteReply<Found>>) => Promise<WriteReply<Found>>,
  ): Promise<WriteReply<Found>> {
    // The store takes ownership of the bytes.
    const own = { token: Buffer.from(bytes.subarray(PREFIX.token, PREFIX.createdAt)), states: OPEN }
    let barrier: Barrier | undefined
    const reply = await write((result, at, now, link) => {
      barrier = this.#of(link)
      return writeReply(result, at, now)
    })
    if (!reply.done && (reply.bytes === null || !meets(reply.bytes, own))) return reply
    const { onWaited } = this.#options
    await (barrier as unknown as Barrier).wait(shard).catch((error: unknown) => {
      onWaited?.(false)
      throw error
    })
    onWaited?.(true)
    return reply
  }

  /** Human-readable reasons why this master refuses claims. */
  async check({ server, shards }: MasterShards): Promise<readonly string[]> {
    const waiting = server.connected().then((link) => this.#of(link).wait(shards[0] as number))
    return waiting.then(
      () => [],
      ({ message }: Error) => [`${message}: claims are answered 503.`],
    )
  }

  async close(): Promise<void> {
    await Promise.all([...this.#byLink.values()].map((barrier) => barrier.close()))
  }

  #of(link: Link): Barrier {
    const known = this.#byLink.get(link)
    if (known !== undefined) return known
    for (const [old, barrier] of this.#byLink) if (!old.isOpen) void barrier.close()
    const { timeoutMs, client = {} } = this.#options
    // Two commands may wait in sequence.
    const settings = { timeoutMs: timeoutMs + 2 * this.wait.timeout, wait: this.wait, client }
    // The next connection may reach another process.
    const onLost = (): void => {
      this.#byLink.delete(link)
      void server.close()
    }
    const server: RedisConnection = new RedisConnection(link.target, settings, { onLost })
    const barrier = new Barrier(link, server, this)
    this.#byLink.set(link, barrier)
    if (!link.isOpen) void barrier.close()
    return barrier
  }
}

/** `shard`: that of its marker. */
type Round = { readonly shard: number; readonly done: Promise<void> }

/** The claims that wait for the replicas of one process. */
class Barrier {
  readonly #link: Link
  /** A second connection to it. */
  readonly #server: RedisConnection
  readonly #all: Barriers
  #opened: Promise<void> | null = null
  #last: Promise<unknown> = Promise.resolve()
  /** The round that begins after the last one. */
  #next: Round | null = null
  /** How many replicas may be promoted. */
  #known: number | null = null
  #knownUntil: Millis = 0

  constructor(link: Link, server: RedisConnection, all: Barriers) {
    this.#link = link
    this.#server = server
    this.#all = all
  }

  /** @throws {Unreplicated} */
  async wait(shard: number): Promise<void> {
    const round = (this.#next ??= this.#begin(shard))
    try {
      await round.done
    } catch (error) {
      // The slot is moving to another server; only its claims fail.
      const isOfShard = error instanceof Refused && /^(TRYAGAIN|MOVED|ASK) /.test(error.reply)
      if (isOfShard && round.shard !== shard) return this.wait(shard)
      throw new Unreplicated(`store.wait is not satisfied: ${(error as Error).message}`)
    }
  }

  close(): Promise<void> {
    return this.#server.close()
  }

  #begin(shard: number): Round {
    const done = this.#last.then(async () => {
      // Lets claims whose replies arrived together share it.
      await immediately()
      this.#next = null
      await this.#round(shard)
    })
    this.#last = done.catch(() => {})
    return { shard, done }
  }

  /** Rejects unless a marker in the shard, and so all earlier writes, is replicated as configured. */
  async #round(shard: number): Promise<void> {
    const { disk, timeout } = this.#all.wait
    const server = this.#server
    await (this.#opened ??= this.#open())
    const count = await this.#count()
    const onDisks = disk === 'replicas' ? count : 0
    const [, inMemory, [local, remote]] = await Promise.all([
      server.ask('set', [this.#all.keys.marker(shard), '1', 'PX', MARKER_LIFE], text(/^OK$/)),
      count === onDisks ? count : server.ask('wait', [count, timeout], number),
      disk === 'none' ? [1, count] : server.ask('waitaof', [1, onDisks, timeout], COUNTS),
    ])
    const reached = onDisks > 0 ? remote : inMemory
    if (reached < count) throw new Error(`${reached} of ${count} replicas had it within ${timeout} ms`)
    if (local === 0) throw new Error(`the server’s disk did not have it within ${timeout} ms`)
    // The server may have been replaced meanwhile: its successor lacks the claim, and this process has not counted it as running.
    if (!this.#link.isOpen) throw new Error('the connection of the claim has ended')
  }

  /** Rejects unless the connection leads to the process that received the claims. */
  async #open(): Promise<void> {
    const { identity } = this.#link
    await this.#server.open()
    const other = await this.#server.connected()
    if (identity !== '' && identity === other.identity) return
    await this.#server.close()
    throw new Error(
      identity === ''
        ? 'INFO does not say which process takes the claims'
        : `a second connection to ${this.#server.leadsTo} reaches a different process from the one that takes the claims`,
    )
  }

  /** How many replicas must have it. One that joins from now on gets all earlier writes first. */
  async #count(): Promise<number> {
    const { replicas } = this.#all.wait
    if (replicas !== 'all') return replicas === 'none' ? 0 : replicas
    const role = this.#server.ask('role', [], ROLE)
    const [[, , connected], known] = await Promise.all([role, this.#knownReplicas()])
    return Math.max(1, connected.length, known)
  }

  /** Number of replicas that may be promoted; if it cannot be read now, the last known one. */
  async #knownReplicas(): Promise<number> {
    const last = this.#known
    if (last !== null && performance.now() <= this.#knownUntil) return last
    const { discovery } = this.#all.servers
    const known = discovery?.replicasOf(this.#server) ?? Promise.resolve(0)
    this.#known = await (last === null ? known : known.catch(() => last))
    this.#knownUntil = performance.now() + KNOWN_FOR
    return this.#known
  }
}

export function replicationText({ replicas, disk, timeout }: Wait): string {
  const count = replicas === 'all' ? 'every known replica' : `${replicas} replica${replicas === 1 ? '' : 's'}`
  const [memory, own] = [replicas === 'none' ? [] : [count], disk === 'none' ? [] : ['the server’s disk']]
  const whom =
    disk === 'replicas' ? `the disks of the server and of ${count}` : [...memory, ...own].join(' and ')
  return `claims wait for ${whom}, up to ${timeout} ms`
}

/** States of an owner's own claim: `unknown` if a sweeper found its lease expired. */
const OPEN = ['in_progress', 'unknown'] as const
