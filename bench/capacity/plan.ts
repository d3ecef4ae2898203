import type { Millis } from '../../src/core/record.ts'
import { COSTS, RESPONSE, SHARDS, type StoreName } from './measured.ts'

export interface Workload {
  readonly store: StoreName
  /** New keys per second, and repeated requests with a known key. */
  readonly first: number
  readonly replays: number
  /** Bytes of a response, compressed if `store.compression` is on. */
  readonly response: number
  readonly ttl: Millis
  /** `ttl.body`; null: as long as the record. */
  readonly bodyTtl: Millis | null
  readonly keep: 'response' | 'outcome'
}

export interface Machines {
  /** Bytes of memory of one Redis server; of disk for the others. */
  readonly size: number
  /** How busy a core may be. */
  readonly load: number
  /** Whether claims wait for replicas (`store.wait`), over a connection of their own. */
  readonly waits: boolean
}

export interface Plan {
  readonly records: number
  /** One copy of them. */
  readonly bytes: number
  /** Servers that take writes, each with its replicas; for a cluster whichever of memory and CPU asks for more. */
  readonly masters: number
  /** Cores that the servers keep busy. */
  readonly cores: number
  /** Of a core: the busiest master, whose scripts run on one thread. */
  readonly busiest: number
  /** Each uses one core. */
  readonly proxies: number
  readonly connectionsPerMaster: number
  /** What does not work, for people. */
  readonly limits: readonly string[]
}

/** While Redis rewrites its log it may need as much again; a disk that is full refuses new keys. */
const USABLE = 0.5
/** Redis’s default. */
const MAXCLIENTS = 10_000
/** Of each proxy to each master: commands and announcements; PostgreSQL's pool (docs/postgres.md). */
const CONNECTIONS = { redis: 2, postgres: 18, sqlite: 0 }

/** What this workload needs. */
export function planOf(work: Workload, { size, load, waits }: Machines): Plan {
  const { first, replays, store } = work
  const { server, proxy } = COSTS[store]
  const bytes = bytesOf(work)
  const cores = (first * server.first + replays * server.replay) / 1e6
  const bySize = bytes / (size * USABLE)
  const masters = store === 'redis' ? mastersFor(Math.max(bySize, cores / load)) : 1
  const proxies = Math.ceil((first * proxy.first + replays * proxy.replay) / 1e6 / load)
  const connectionsPerMaster = proxies * (CONNECTIONS[store] + (waits ? 1 : 0))
  const limits: string[] = []
  const needed = Math.ceil(store === 'redis' ? Math.max(bySize, cores / load) : bySize)
  if (store === 'redis' && needed > SHARDS)
    limits.push(
      `${needed} masters are needed, and ${SHARDS} shards go to ${SHARDS} at most: split callers into cells, each with a store of its own`,
    )
  if (store !== 'redis' && needed > 1)
    limits.push(
      `${needed} times the disk of one server is needed: a shorter ttl, ttl.body, or a Redis cluster`,
    )
  if (store === 'sqlite' && proxies > 1)
    limits.push(`${proxies} proxies are needed, and a SQLite file serves one: use a shared store`)
  if (connectionsPerMaster > MAXCLIENTS && store === 'redis')
    limits.push(
      `${connectionsPerMaster} connections to each master exceed its maxclients (${MAXCLIENTS}): fewer and busier proxies, such as a gateway instead of sidecars`,
    )
  return {
    records: (first * work.ttl) / 1000,
    bytes,
    masters,
    cores,
    busiest: cores * largestShare(masters),
    proxies,
    connectionsPerMaster,
    limits,
  }
}

/** The part of all records that the busiest of so many masters has: shards are not divided. */
export function largestShare(masters: number): number {
  return Math.ceil(SHARDS / masters) / SHARDS
}

/** One server, or a cluster of at least three whose largest share fits. `servers`: what would do if all shares were equal. */
function mastersFor(servers: number): number {
  if (servers <= 1) return 1
  let masters = Math.max(3, Math.ceil(servers))
  while (masters < SHARDS && largestShare(masters) * servers > 1) masters++
  return masters
}

function bytesOf({ first, response, ttl, bodyTtl, keep, store }: Workload): number {
  const { whole, outcome, ending } = COSTS[store].bytes
  const body = response - RESPONSE
  const over = (milliseconds: Millis) => (first * milliseconds) / 1000
  if (keep === 'outcome') return over(ttl) * outcome
  if (bodyTtl === null || bodyTtl >= ttl) return over(ttl) * (whole + body)
  return over(bodyTtl) * (ending + body) + over(ttl - bodyTtl) * outcome
}
