export type StoreName = 'redis' | 'postgres' | 'sqlite'

/** What one store costs. Bytes are those of docs/stores.md#sizing; CPU is in microseconds. */
export interface Cost {
  /** Per completed record with a response of {@link RESPONSE} bytes; without its response; with one that `ttl.body` removes, before. */
  readonly bytes: { readonly whole: number; readonly outcome: number; readonly ending: number }
  /** Of the server, per first execution and per replay. */
  readonly server: { readonly first: number; readonly replay: number }
  /** Of the proxy (docs/internals/performance.md). */
  readonly proxy: { readonly first: number; readonly replay: number }
}

/** Bytes of the measured responses. */
export const RESPONSE = 300
/** Parts of the records in Redis, fixed for good (store/redis/keys.ts). */
export const SHARDS = 256

/**
 * From `npm run capacity -- --measure` and `npm run bench`, on two cores of an AMD EPYC. Redis: each operation by itself, as in a cluster, where
 * few of a turn share a shard; where they share a batch, a first execution costs 57 and a replay 15. PostgreSQL: dead rows add half to the bytes.
 */
export const COSTS: Readonly<Record<StoreName, Cost>> = {
  redis: {
    bytes: { whole: 852, outcome: 404, ending: 973 },
    server: { first: 130, replay: 46 },
    proxy: { first: 82, replay: 34 },
  },
  postgres: {
    bytes: { whole: 1533, outcome: 723, ending: 2207 },
    server: { first: 277, replay: 80 },
    proxy: { first: 323, replay: 144 },
  },
  // Its thread belongs to the proxy.
  sqlite: {
    bytes: { whole: 720, outcome: 309, ending: 881 },
    server: { first: 0, replay: 0 },
    proxy: { first: 98, replay: 34 },
  },
}

/**
 * A failover of a Redis cluster. A node is pinged once in half of `cluster-node-timeout`, and is suspected when an answer is late by the whole
 * of it; then the others agree and elect a replica; then `store.grace` passes. All in milliseconds.
 */
export const FAILOVER = { pinged: 1.25, nodeTimeout: 15_000, election: 1000, grace: 2000 }
