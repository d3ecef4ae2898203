import { type Address, formatAddress } from '../../config/urls.ts'
import { askAll, type ConnectionSettings, RedisConnection } from './connection.ts'
import { any, list, Mismatch, number, type RespReply, text } from './resp.ts'
import type { RedisUrl } from './url.ts'

const SLOTS = 16_384

export interface SlotRange {
  readonly first: number
  readonly last: number
  /** The master, then its replicas. */
  readonly nodes: readonly Address[]
}

export function everySlotOf(nodes: readonly Address[]): readonly SlotRange[] {
  return [{ first: 0, last: SLOTS - 1, nodes }]
}

const MISTAKES = [
  [/cluster support disabled|slots belong to no node/, 'nodes of a cluster that covers all slots'],
] as const

/** The nodes of a cluster, which know who has which slots. */
export class ClusterNodes {
  readonly #url: RedisUrl
  readonly #settings: ConnectionSettings
  /** Addresses to ask if no master answers. */
  #known: readonly Address[]
  #turn = 0

  constructor(url: RedisUrl, settings: ConnectionSettings) {
    this.#url = url
    this.#settings = settings
    this.#known = url.hosts
  }

  async find(ready: readonly RedisConnection[]): Promise<readonly SlotRange[]> {
    // In turn: a node cut off from the others has a stale map.
    const node = ready[this.#turn++ % ready.length]
    const ranges = node === undefined ? await this.#findAnywhere() : await slotsOf(node)
    const places = [...this.#url.hosts, ...ranges.flatMap(({ nodes }) => nodes)]
    this.#known = [...new Map(places.map((place) => [formatAddress(place), place])).values()]
    return ranges
  }

  async #findAnywhere(): Promise<readonly SlotRange[]> {
    const { login } = this.#url
    const known = this.#known.map((place) => new RedisConnection({ place, login }, this.#settings))
    try {
      for (const server of known) void server.open()
      const ask = async (server: RedisConnection) => wholeOf(await slotsOf(server))
      const [ranges] = await askAll(known, 'no node of the cluster answers', 0, ask, MISTAKES)
      return ranges as readonly SlotRange[]
    } finally {
      // Not awaited: one of them may hang.
      for (const server of known) void server.close()
    }
  }

  /** Number of replicas that may be promoted, including those that are down. */
  replicasOf(master: RedisConnection): Promise<number> {
    return master.ask('cluster', ['nodes'], (reply) => replicasIn(text(/ (?:\S+,)?myself[, ]/)(reply)))
  }

  close(): void {}
}

function wholeOf(ranges: readonly SlotRange[]): readonly SlotRange[] {
  const uncovered = ranges.reduce((left, { first, last }) => left - (last - first + 1), SLOTS)
  if (uncovered > 0) throw new Error(`${uncovered} of ${SLOTS} slots belong to no node`)
  return ranges
}

export function slotsOf(server: RedisConnection): Promise<SlotRange[]> {
  const nodeIn = (reply: RespReply): Address => {
    // More about it may follow.
    const [host = null, port = null] = list(any)(reply)
    return placeOf(host === null ? '' : text()(host), number(port), server)
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
export function placeOf(host: string, port: number, queried: RedisConnection): Address {
  return { host: host === '' || host === '?' ? queried.target.place.host : host, port }
}
