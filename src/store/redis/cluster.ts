import { createHash } from 'node:crypto'
import { Command } from 'ioredis'
import type { Millis } from '../../core/record.ts'
import { within } from '../../runtime/scheduling.ts'
import { Declined, PartlyUnavailable, StoreFull, StoreUnavailable } from '../register.ts'
import {
  askAll,
  type HostPort,
  hostPortText,
  isRefusal,
  type ReadScript,
  RedisConnection,
  type RedisTarget,
  Refused,
} from './connection.ts'
import { type RedisOptions, SHARDS } from './keys.ts'
import {
  any,
  list,
  Mismatch,
  number,
  type Read,
  type RespArgs,
  type RespReply,
  type Script,
  text,
} from './resp.ts'
import { type ClusterUrl, Misconfigured } from './url.ts'

const SLOTS = 16_384
/** Per command. */
const MAX_REDIRECTS = 3
/** Pause between map reads while something is wrong. */
const REREAD: Millis = 250
const NO_CLUSTER = /cluster support disabled|slots belong to no node/

interface SlotRange {
  readonly first: number
  readonly last: number
  /** The master, then its replicas. */
  readonly nodes: readonly HostPort[]
}

/** A master and its shards. */
export interface MasterShards {
  /** Host and port; '' if it is the only one. */
  readonly name: string
  readonly server: RedisConnection
  readonly shards: readonly number[]
}

/** The slots as all masters report them. */
export interface View {
  /** Changes when slots move. */
  readonly id: string
  /** In a fixed order. */
  readonly servers: readonly RedisConnection[]
}

/** The servers that `store.url` leads to. */
export type Servers = Pick<Cluster, keyof Cluster>

/** A server is ready for commands, perhaps again. Without a server: shards may have new masters. */
export type OnServers = (ready?: RedisConnection) => void

/**
 * The masters of a cluster, a connection to each, and the 256 shards among them. The map may be stale: a node that lacks a key's slot
 * redirects to its owner. Keys are never read from replicas (ADR 124).
 */
export class Cluster {
  /** All keys of a command must be in one shard. */
  readonly isCluster: boolean = true
  readonly #url: ClusterUrl
  readonly #options: RedisOptions
  readonly #onServers: OnServers
  /** Current and recent masters by name. */
  readonly #nodes = new Map<string, RedisConnection>()
  /** By shard; empty if still unknown. */
  #map: RedisConnection[] = []
  /** Addresses to ask for the map if no master answers. */
  #known: readonly HostPort[]
  #turn = 0
  #reading: Promise<void> | null = null
  #rereading: NodeJS.Timeout | undefined
  /** Why there is no map. */
  #trouble = 'connecting'
  #isClosed = false

  constructor(url: ClusterUrl, options: RedisOptions, onServers: OnServers) {
    this.#url = url
    this.#options = options
    this.#onServers = onServers
    this.#known = url.hosts
  }

  /**
   * Resolves after the first attempt, whatever its outcome: the process also starts without Redis.
   * @throws {Misconfigured} if only an operator can fix the cause.
   */
  async open(): Promise<void> {
    await this.#read().catch((error: Error) => {
      if (error instanceof Misconfigured) throw error
      this.#fail(error)
    })
    await Promise.all(this.#all.map(({ attempted }) => attempted))
  }

  async close(): Promise<void> {
    this.#isClosed = true
    this.#trouble = 'closed'
    clearTimeout(this.#rereading)
    await Promise.all(this.#all.map((node) => node.close()))
  }

  /** The script's first key selects the server. */
  async run<T>(script: Script, args: RespArgs, read: ReadScript<T>, until: Millis): Promise<T> {
    const shard = shardOf(args[1] as string)
    const first = this.#map[shard]
    if (first === undefined) return this.#refuse()
    let [node, asks] = [first, false]
    for (let redirects = 0; ; redirects++)
      try {
        // A server with permission for a single command (`ASKING`) may not know the script, and would need a second permission.
        return await node.run(script, args, read, until, !asks)
      } catch (error) {
        const redirect = redirects < MAX_REDIRECTS ? this.#redirect(error, node, shard) : null
        if (redirect === null) throw this.#partly(error, node)
        ;({ node, asks } = redirect)
        const connected = node.attempted.then(() => true)
        if (!(await within(until - performance.now(), connected))) throw this.#partly(error, node)
        // Sent in one write with the next command.
        if (asks) node.ask('asking', [], text(/^OK$/), until).catch(() => {})
      }
  }

  /** The store is up even if one of its masters is not. */
  askAnyone<T>(name: string, read: Read<T>): Promise<T> {
    const node = this.#all.find(({ isReady }) => isReady) ?? this.#all[0]
    return node === undefined ? this.#refuse() : node.ask(name, [], read)
  }

  /** The masters with their shards, freshly read. */
  async parts(): Promise<readonly MasterShards[]> {
    await this.#read().catch(() => {})
    const parts = this.known()
    return parts.length === 0 ? this.#refuse() : parts
  }

  /** The masters as last read. */
  known(): readonly MasterShards[] {
    const byNode = Map.groupBy(this.#map.keys(), (shard) => this.#map[shard] as RedisConnection)
    return [...byNode].map(([server, shards]) => ({ name: server.leadsTo, server, shards }))
  }

  /** The servers that, according to any master, have the shard, or any shard (null): masters do not learn of a move at the same time. */
  async view(shard: number | null): Promise<View> {
    const maps = await Promise.all(this.#all.map(slotsOf))
    const slot = shard === null ? null : (SLOT_OF_SHARD[shard] as number)
    const masters = new Set<RedisConnection>()
    const views = maps.map((ranges) =>
      ranges.map(({ first, last, nodes: [master] }) => {
        const node = this.#nodeAt(master as HostPort)
        if (slot === null || (first <= slot && slot <= last)) masters.add(node)
        return [first, last, node.leadsTo]
      }),
    )
    if (masters.size === 0) return this.#refuse()
    const servers = [...masters].toSorted((a, b) => (a.leadsTo < b.leadsTo ? -1 : 1))
    await Promise.all(servers.map(({ attempted }) => attempted))
    return { id: createHash('sha1').update(JSON.stringify(views)).digest('hex').slice(0, 8), servers }
  }

  /** For people; null: a single server. */
  topology(): string | null {
    const parts = this.known()
    const largest = Math.max(...parts.map(({ shards }) => shards.length))
    const each = parts.map(({ name, shards }) => `${name} has ${shards.length}`).join(', ')
    const times = ((largest * parts.length) / this.#map.length).toFixed(2)
    return `${parts.length} masters share ${this.#map.length} shards of records: ${each}; the largest share is ${times} times the mean`
  }

  /** Number of a master's replicas that may be promoted, including those that are down; 0 if nothing promotes them. */
  replicasOf(master: RedisConnection): Promise<number> {
    return master.ask('cluster', ['nodes'], (reply) => replicasIn(text(/ (?:\S+,)?myself[, ]/)(reply)))
  }

  /** The server that publishes writes to the shard. Null: unknown. */
  targetOf(shard: number): RedisTarget | null {
    return this.#map[shard]?.target ?? null
  }

  /** Whether a subscription was refused because the map is stale. {@link OnServers} follows. */
  isMoved(error: Refused, shard: number): boolean {
    const redirect = this.#redirect(error, this.#map[shard] as RedisConnection, shard)
    return redirect !== null || isRefusal(error, 'CLUSTERDOWN')
  }

  get #all(): readonly RedisConnection[] {
    return [...this.#nodes.values()]
  }

  /** The breaker must not open while other masters can be reached. */
  #partly(error: unknown, node: RedisConnection): unknown {
    if (!(error instanceof StoreUnavailable) || error instanceof StoreFull || error instanceof Declined)
      return error
    if (!this.#all.some((one) => one !== node && one.isReady)) return error
    return new PartlyUnavailable(error.message, error.maybeApplied)
  }

  /** Where the node's refusal redirects to. Null: nowhere. */
  #redirect(
    error: unknown,
    from: RedisConnection,
    shard: number,
  ): { node: RedisConnection; asks: boolean } | null {
    if (!(error instanceof Refused)) return null
    // The node may be cut off from the rest of the cluster.
    if (isRefusal(error, 'CLUSTERDOWN')) this.#readLater()
    const [, kind, host = '', port] = /^(MOVED|ASK) \d+ (.*):(\d+)$/.exec(error.reply) ?? []
    if (kind === undefined) return null
    const node = this.#nodeAt(placeOf(host, Number(port), from))
    if (kind === 'MOVED' && this.#map[shard] !== node) {
      this.#map[shard] = node
      this.#onServers()
      // When one slot moves, others usually do.
      this.#readLater()
    }
    return { node, asks: kind === 'ASK' }
  }

  #refuse(): Promise<never> {
    return Promise.reject(new StoreUnavailable(`Redis is not connected: ${this.#trouble}`, false))
  }

  #nodeAt(place: HostPort): RedisConnection {
    const name = hostPortText(place)
    const known = this.#nodes.get(name)
    if (known !== undefined) return known
    const node: RedisConnection = new RedisConnection({ place, login: this.#url.server }, this.#options, {
      onEvent: (kind, detail) =>
        this.#options.onEvent(kind, kind === 'error' ? `${name}: ${detail}` : detail),
      onReady: () => this.#onServers(node),
      onLost: () => this.#readLater(),
    })
    this.#nodes.set(name, node)
    void node.open()
    return node
  }

  #read(): Promise<void> {
    this.#reading ??= this.#readMap().finally(() => {
      this.#reading = null
    })
    return this.#reading
  }

  async #readMap(): Promise<void> {
    // In turn: a node cut off from the others has a stale map.
    const ready = this.#all.filter(({ isReady }) => isReady)
    const node = ready[this.#turn++ % ready.length]
    if (node !== undefined) return this.#take(await slotsOf(node))
    const login = this.#url.server
    const known = this.#known.map((place) => new RedisConnection({ place, login }, this.#options))
    try {
      for (const server of known) void server.open()
      const [ranges] = await askAll(known, 0, async (server) => wholeOf(await slotsOf(server)))
      this.#take(ranges as readonly SlotRange[])
    } catch (error) {
      const { errors, message } = error as AggregateError
      if ((errors as Error[]).every((one) => NO_CLUSTER.test(one.message)))
        throw new Misconfigured(`store.url: ${message}; allowed: nodes of a cluster that covers all slots`)
      throw new StoreUnavailable(`no node of the cluster answers: ${message}`, false)
    } finally {
      // Not awaited: one of them may hang.
      for (const server of known) void server.close()
    }
  }

  #take(ranges: readonly SlotRange[]): void {
    if (this.#isClosed) return
    const map = SLOT_OF_SHARD.map((slot, shard) => {
      const master = ranges.find(({ first, last }) => first <= slot && slot <= last)?.nodes[0]
      // A node removed from the cluster lists no slots. The previous owner redirects if it lost the slot.
      return master === undefined ? (this.#map[shard] as RedisConnection) : this.#nodeAt(master)
    })
    const isOther = map.some((node, shard) => node !== this.#map[shard])
    this.#map = map
    const places = [...this.#url.hosts, ...ranges.flatMap(({ nodes }) => nodes)]
    this.#known = [...new Map(places.map((place) => [hostPortText(place), place])).values()]
    for (const [name, node] of this.#nodes)
      if (!map.includes(node)) {
        this.#nodes.delete(name)
        void node.close()
      }
    if (isOther) this.#onServers()
  }

  #readLater(): void {
    if (!this.#isClosed) this.#rereading ??= setTimeout(() => void this.#reread(), REREAD)
  }

  /** Resolves once every shard has a connected master. */
  async #reread(): Promise<void> {
    this.#rereading = undefined
    // Subscriptions that failed may succeed now.
    await this.#read().then(
      () => this.#onServers(),
      (error: Error) => this.#fail(error),
    )
    if (!this.#map.every(({ isReady }) => isReady)) this.#readLater()
  }

  #fail({ message }: Error): void {
    if (message !== this.#trouble) this.#options.onEvent('error', message)
    this.#trouble = message
    this.#readLater()
  }
}

/** The shard of a key: its hash tag, in hex. */
function shardOf(key: string): number {
  const at = key.indexOf('{') + 1
  return Number.parseInt(key.slice(at, at + 2), 16)
}

const SLOT_OF_SHARD = SHARDS.map((n) => new Command('get', [n.toString(16).padStart(2, '0')]).getSlot())

function wholeOf(ranges: readonly SlotRange[]): readonly SlotRange[] {
  const uncovered = ranges.reduce((left, { first, last }) => left - (last - first + 1), SLOTS)
  if (uncovered > 0) throw new Error(`${uncovered} of ${SLOTS} slots belong to no node`)
  return ranges
}

function slotsOf(server: RedisConnection): Promise<SlotRange[]> {
  const nodeIn = (reply: RespReply): HostPort => {
    // More about it may follow.
    const [host = null, port = null] = list(any)(reply)
    return placeOf(host === null ? host : text()(host), number(port), server)
  }
  const rangeIn = (reply: RespReply): SlotRange => {
    const [first = null, last = null, ...nodes] = list(any)(reply)
    if (nodes.length === 0) throw new Mismatch()
    return { first: number(first), last: number(last), nodes: nodes.map(nodeIn) }
  }
  return server.ask('cluster', ['slots'], list(rangeIn))
}

/** Number of replicas of the node that said so (`CLUSTER NODES`), including those that are down. */
export function replicasIn(nodes: string): number {
  const all = nodes.split('\n').map((line) => line.split(' '))
  const own = all.find(([, , flags = '']) => flags.split(',').includes('myself'))
  return all.filter(([, , , master]) => master === own?.[0]).length
}

/** A node that does not know its own name omits it. */
function placeOf(host: string | null, port: number, queried: RedisConnection): HostPort {
  return { host: !host || host === '?' ? queried.place.host : host, port }
}
