import { createHash } from 'node:crypto'
import { Command } from 'ioredis'
import { type Address, formatAddress } from '../../config/urls.ts'
import type { Millis } from '../../core/record.ts'
import { within } from '../../runtime/scheduling.ts'
import { Declined, PartlyUnavailable, StoreFull, StoreUnavailable } from '../register.ts'
import { ClusterNodes, everySlotOf, placeOf, type SlotRange, slotsOf } from './cluster.ts'
import { isRefusal, type ReadScript, RedisConnection, Refused } from './connection.ts'
import { type RedisOptions, SHARDS } from './keys.ts'
import { type Read, type RespArgs, type Script, text } from './resp.ts'
import { Sentinels } from './sentinel.ts'
import { Misconfigured, type RedisUrl, redisUrl } from './url.ts'

/** Per command. */
const MAX_REDIRECTS = 3
/** How often the masters are looked for while something is wrong. */
const REREAD: Millis = 250

/** A master and its shards. */
export interface MasterShards {
  readonly server: RedisConnection
  readonly shards: readonly number[]
}

/** The slots as all masters report them. */
export interface View {
  /** Changes when slots move; '' if they cannot. */
  readonly id: string
  /** In a fixed order. */
  readonly servers: readonly RedisConnection[]
}

/** `asks`: with permission for a single command. */
type Redirect = { readonly node: RedisConnection; readonly asks: boolean }

/** A server is ready for commands, perhaps again. Without a server: shards may have new masters. */
type OnServers = (ready?: RedisConnection) => void

/**
 * The masters that `store.url` leads to, a connection to each, and the 256 shards among them. The map may be stale: a node of a cluster that
 * lacks a key's slot redirects to its owner. Keys are never read from replicas (ADR 124).
 */
export class Servers {
  /** All keys of a command must be in one shard. */
  readonly isCluster: boolean
  readonly #url: RedisUrl
  readonly #options: RedisOptions
  readonly #onServers: OnServers
  /** Finds out which master has which slots. Null: one server has all. */
  readonly discovery: Sentinels | ClusterNodes | null
  /** Current and recent masters by name. */
  readonly #nodes = new Map<string, RedisConnection>()
  /** By shard; empty if still unknown. */
  #map: RedisConnection[] = []
  #reading: Promise<void> | null = null
  #timers: NodeJS.Timeout[] = []
  /** The map may be wrong. */
  #isStale = false
  /** Why there is no map. */
  #trouble = 'connecting'
  #isClosed = false

  constructor(options: RedisOptions, onServers: OnServers) {
    const url = redisUrl(options.url, options.onEvent)
    this.#url = url
    this.#options = options
    this.#onServers = onServers
    this.isCluster = url.kind === 'cluster'
    this.discovery = this.isCluster
      ? new ClusterNodes(url, options)
      : url.kind === 'sentinel'
        ? new Sentinels(url, options)
        : null
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
    const look = (every: Millis, always: boolean) =>
      this.#timers.push(setInterval(() => void this.#look(always), every).unref())
    if (this.discovery !== null) look(REREAD, false)
    // A master that was replaced may still answer.
    if (this.discovery instanceof Sentinels) look(this.discovery.every, true)
    await Promise.all(this.#all.map(({ attempted }) => attempted))
  }

  async close(): Promise<void> {
    this.#isClosed = true
    this.#trouble = 'closed'
    for (const timer of this.#timers) clearInterval(timer)
    await Promise.all([this.discovery?.close(), ...this.#all.map((node) => node.close())])
  }

  /** In a cluster, the script's first key selects the server. */
  async run<T>(script: Script, args: RespArgs, read: ReadScript<T>, until: Millis): Promise<T> {
    const shard = this.isCluster ? shardOf(args[1] as string) : 0
    let node = this.#map[shard]
    if (node === undefined) return this.#refuse()
    let isKnown = true
    for (let redirects = 0; ; )
      try {
        return await node.run(script, args, read, until, isKnown)
      } catch (error) {
        if (isKnown && isRefusal(error, 'NOSCRIPT')) {
          isKnown = false
          continue
        }
        const redirect: Redirect | null =
          redirects++ < MAX_REDIRECTS ? this.#redirect(error, node, shard) : null
        const connected = redirect?.node.attempted.then(() => redirect)
        if (!connected || !(await within(until - performance.now(), connected)))
          throw this.#partly(error, node)
        node = (redirect as Redirect).node
        isKnown = !(redirect as Redirect).asks
        // Permission for a single command, sent in one write with it: the server may not know the script, and would need another one.
        if (!isKnown) node.ask('asking', [], text(/^OK$/), until).catch(() => {})
      }
  }

  /** The store is up even if one of its masters is not. */
  askAnyone<T>(name: string, read: Read<T>): Promise<T> {
    const node = this.#ready[0] ?? this.#all[0]
    return node === undefined ? this.#refuse() : node.ask(name, [], read)
  }

  /** The masters with their shards, freshly read. */
  async parts(): Promise<readonly MasterShards[]> {
    await this.#read().catch((error: Error) => this.#fail(error))
    const parts = this.known()
    return parts.length === 0 ? this.#refuse() : parts
  }

  /** The masters as last read. */
  known(): readonly MasterShards[] {
    const byNode = Map.groupBy(this.#map.keys(), (shard) => this.#map[shard] as RedisConnection)
    return [...byNode].map(([server, shards]) => ({ server, shards }))
  }

  /** The servers that, according to any master, have the shard, or any shard (null): masters do not learn of a move at the same time. */
  async view(shard: number | null): Promise<View> {
    const maps = this.isCluster ? await Promise.all(this.#all.map(slotsOf)) : []
    const slot = shard === null ? null : (SLOT_OF_SHARD[shard] as number)
    const masters = new Set<RedisConnection>(this.isCluster ? [] : this.#map)
    const views = maps.map((ranges) =>
      ranges.map(({ first, last, nodes: [master] }) => {
        const node = this.#nodeAt(master as Address)
        if (slot === null || (first <= slot && slot <= last)) masters.add(node)
        return [first, last, node.leadsTo]
      }),
    )
    if (masters.size === 0) return this.#refuse()
    const servers = [...masters].toSorted((a, b) => (a.leadsTo < b.leadsTo ? -1 : 1))
    await Promise.all(servers.map(({ attempted }) => attempted))
    const digest = createHash('sha1').update(JSON.stringify(views)).digest('hex')
    return { id: this.isCluster ? digest.slice(0, 8) : '', servers }
  }

  /** For people; null: a single server. */
  topology(): string | null {
    if (!this.isCluster) return null
    const parts = this.known()
    const largest = Math.max(...parts.map(({ shards }) => shards.length))
    const each = parts.map(({ server, shards }) => `${server.leadsTo} has ${shards.length}`).join(', ')
    const times = ((largest * parts.length) / this.#map.length).toFixed(2)
    return `${parts.length} masters share ${this.#map.length} shards of records: ${each}; the largest share is ${times} times the mean`
  }

  /** The master of a shard. */
  readonly at = (shard: number): RedisConnection | undefined => this.#map[shard]

  /** Whether a subscription was refused because the map is stale. {@link OnServers} follows. */
  isMoved(error: Refused, shard: number): boolean {
    const from = this.#map[shard] as RedisConnection
    return this.#redirect(error, from, shard) !== null || isRefusal(error, 'CLUSTERDOWN')
  }

  get #all(): readonly RedisConnection[] {
    return [...this.#nodes.values()]
  }

  get #ready(): readonly RedisConnection[] {
    return this.#all.filter(({ isReady }) => isReady)
  }

  /** The breaker must not open while other masters can be reached. */
  #partly(error: unknown, node: RedisConnection): unknown {
    if (!(error instanceof StoreUnavailable) || error instanceof StoreFull || error instanceof Declined)
      return error
    if (!this.#ready.some((one) => one !== node)) return error
    return new PartlyUnavailable(error.message, error.maybeApplied)
  }

  /** Where the node's refusal redirects to. Null: nowhere. */
  #redirect(error: unknown, from: RedisConnection, shard: number): Redirect | null {
    if (!(error instanceof Refused) || !this.isCluster) return null
    // The node may be cut off from the rest of the cluster.
    if (isRefusal(error, 'CLUSTERDOWN')) this.#isStale = true
    const [, kind, host = '', port] = /^(MOVED|ASK) \d+ (.*):(\d+)$/.exec(error.reply) ?? []
    if (kind === undefined) return null
    const node = this.#nodeAt(placeOf(host, Number(port), from))
    if (kind === 'MOVED' && this.#map[shard] !== node) {
      this.#map[shard] = node
      this.#onServers()
      // When one slot moves, others usually do.
      this.#isStale = true
    }
    return { node, asks: kind === 'ASK' }
  }

  #refuse(): Promise<never> {
    return Promise.reject(new StoreUnavailable(`Redis is not connected: ${this.#trouble}`, false))
  }

  #nodeAt(place: Address): RedisConnection {
    const name = formatAddress(place)
    const known = this.#nodes.get(name)
    if (known !== undefined) return known
    const target = { place, login: this.#url.login, isNamed: this.#url.kind === 'sentinel' }
    const node: RedisConnection = new RedisConnection(target, this.#options, {
      onEvent: (kind, detail) =>
        this.#options.onEvent(kind, kind === 'error' && this.isCluster ? `${name}: ${detail}` : detail),
      onReady: () => this.#onServers(node),
    })
    this.#nodes.set(name, node)
    void node.open()
    return node
  }

  #read(): Promise<void> {
    this.#isStale = false
    const finding = async () => this.discovery?.find(this.#ready) ?? everySlotOf(this.#url.hosts)
    this.#reading ??= finding()
      .then((ranges) => this.#take(ranges))
      .finally(() => {
        this.#reading = null
      })
    return this.#reading
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
    for (const [name, node] of this.#nodes)
      if (!map.includes(node)) {
        this.#nodes.delete(name)
        // What it still answers may be lost with it.
        node.reconnect()
        void node.close()
      }
    if (isOther) this.#onServers()
  }

  async #look(always: boolean): Promise<void> {
    const isWell = !this.#isStale && this.#map.every(({ isReady }) => isReady)
    if (isWell && !always) return
    await this.#read().then(
      // Subscriptions that failed may succeed now.
      () => isWell || this.#onServers(),
      (error: Error) => this.#fail(error),
    )
  }

  #fail({ message }: Error): void {
    if (this.#isClosed) return
    this.#isStale = true
    if (message !== this.#trouble) this.#options.onEvent('error', message)
    this.#trouble = message
  }
}

/** The shard of a key: its hash tag, in hex. */
function shardOf(key: string): number {
  const at = key.indexOf('{') + 1
  return Number.parseInt(key.slice(at, at + 2), 16)
}

const SLOT_OF_SHARD = SHARDS.map((n) => new Command('get', [n.toString(16).padStart(2, '0')]).getSlot())
