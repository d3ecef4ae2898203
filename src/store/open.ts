import type { Config, StoreConfig } from '../config/config.ts'
import type { Millis } from '../core/record.ts'
import { BREAKER_DEFAULTS, type StoreHooks, withBreaker } from './around.ts'
import { withoutMarks } from './marks.ts'
import { MEMORY_BYTES, memoryStore } from './memory.ts'
import { migrating } from './moving/migrating.ts'
import { packed } from './record/packed.ts'
import { sealerOf } from './record/sealing.ts'
import { type Store, StoreUnavailable } from './register.ts'
import { openSqliteStore } from './sqlite/store.ts'
import { tiered } from './tiered.ts'

/** How long a replay waits for the cache. */
const CACHE_TIMEOUT: Millis = 100
/** Other replicas cannot remove entries from this one's memory. */
const OWN_LIFE: Millis = 5000
/** Replicas remove entries from a shared cache, unless they cannot reach it. */
const SHARED_LIFE: Millis = 60_000
const NO_SECRET = Buffer.alloc(0)

interface StoreOf extends Pick<Config, 'service'> {
  readonly store: Omit<StoreConfig, 'migrate' | 'redis'> & Partial<Pick<StoreConfig, 'migrate' | 'redis'>>
}
type Opener = (config: StoreOf, hooks: StoreHooks) => Promise<Store>

interface StoreRow {
  readonly name: string
  readonly open: Opener
  /** It removes expired records itself, and reports how many. */
  readonly prunes: boolean
  /** It can lose acknowledged writes, and then holds claims back (`store.grace`). */
  readonly hasGrace?: true
}

/** Loaded on demand: its client takes a tenth of the startup time. */
const openRedis: Opener = async (config, hooks) => {
  const { openRedisStore } = await import('./redis/store.ts')
  const { redis: client = {}, wait } = config.store
  return openRedisStore({ ...serverOf(config), ...hooks, client, wait })
}

/** Loaded on demand. */
const openPostgres: Opener = async (config, hooks) => {
  const { openPostgresStore } = await import('./postgres/store.ts')
  return openPostgresStore({ ...serverOf(config), ...hooks })
}

/** Loaded on demand, like the SDK. */
const openDynamoDb: Opener = async (config, hooks) => {
  const { openDynamoDbStore } = await import('./dynamodb/store.ts')
  return openDynamoDbStore({ ...serverOf(config), ...hooks })
}

function serverOf({ service, store }: StoreOf) {
  return { url: store.url, service, timeoutMs: store.timeout, grace: graceOf(store) }
}

/** How long a grace lasts; 0: there is none. A proxy that must rewrite its claims may first be refused: twice. */
export function graceOf({ grace, timeout }: Pick<StoreConfig, 'grace' | 'timeout'>): Millis {
  return grace === 0 ? 0 : Math.max(grace, 2 * timeout)
}

const REDIS: StoreRow = { name: 'redis', open: openRedis, prunes: false, hasGrace: true }
const POSTGRES: StoreRow = { name: 'postgres', open: openPostgres, prunes: true, hasGrace: true }

/** Stores by the scheme of `store.url`. */
const STORES: Readonly<Record<string, StoreRow>> = {
  'memory:': {
    name: 'memory',
    open: async (_config, { onPruned }) => memoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES, onPruned }),
    prunes: true,
  },
  'sqlite:': {
    name: 'sqlite',
    open: async ({ service, store: { url, timeout } }, { onEvent, onPruned }) =>
      openSqliteStore({ path: url.slice('sqlite:'.length), service, timeoutMs: timeout, onEvent, onPruned }),
    prunes: true,
  },
  'redis:': REDIS,
  'rediss:': REDIS,
  'redis+sentinel:': REDIS,
  'rediss+sentinel:': REDIS,
  'redis+cluster:': REDIS,
  'rediss+cluster:': REDIS,
  'postgres:': POSTGRES,
  'postgresql:': POSTGRES,
  'dynamodb:': { name: 'dynamodb', open: openDynamoDb, prunes: false },
}

export const STORE_SCHEMES: readonly string[] = Object.keys(STORES)

/** `from`: the store that a migration moves away from; null: none. */
export interface Stores {
  readonly to: Store
  readonly from: Store | null
}

/**
 * The stores of `store.url` and `store.migrate`, each behind a circuit breaker, its records compressed and sealed as configured. `ofOld`:
 * hooks for the store of `store.migrate`.
 * @throws {StoreUnavailable} if an embedded store cannot be used, or only an operator can fix the cause. A remote one may come up later.
 */
export async function openStores(
  config: StoreOf,
  hooks: StoreHooks,
  ofOld: StoreHooks = hooks,
): Promise<Stores> {
  const { migrate } = config.store
  const to = await openOne(config, hooks)
  if (migrate == null) return { to, from: null }
  try {
    return { to, from: await openOne({ ...config, store: { ...config.store, url: migrate.from } }, ofOld) }
  } catch (error) {
    await to.close()
    throw error
  }
}

/** Combines both, if there are two. */
export function asOne({ to, from }: Stores, { store: { migrate } }: StoreOf): Store {
  return from === null || migrate == null ? to : migrating(from, to, migrate.phase)
}

/** For commands, which claim nothing and need not enter the phase of a migration. */
export async function openStore(config: StoreOf, hooks: StoreHooks): Promise<Store> {
  const observing = asObserver(config)
  return asOne(await openStores(observing, hooks), observing)
}

/** For processes that grant no claims: they must not begin a grace, or record the store's identity. */
export function asObserver<C extends StoreOf>(config: C): C {
  return { ...config, store: { ...config.store, grace: 0 } }
}

/** Opens the store, with its cache in front if it has one. */
async function openOne(config: StoreOf, hooks: StoreHooks): Promise<Store> {
  const { cache, compression, secret } = config.store
  const deciding = await openPlain(config, hooks)
  const store =
    cache === undefined
      ? deciding
      : tiered(deciding, await openCache(config, cache.url, hooks), {
          life: cache.url === 'memory:' ? OWN_LIFE : SHARED_LIFE,
          secret: secret ?? NO_SECRET,
        })
  const sealer = sealerOf(config.store)
  const own = sealer === null && compression === 'off' ? store : packed(store, sealer, compression)
  return { ...own, list: async (which, cursor, limit) => withoutMarks(await own.list(which, cursor, limit)) }
}

async function openPlain(config: StoreOf, hooks: StoreHooks): Promise<Store> {
  const row = STORES[schemeOf(config.store.url)]
  if (row === undefined)
    throw new StoreUnavailable(
      `store.url "${schemeOf(config.store.url)}…" names no store; allowed: ${STORE_SCHEMES.join(' ')}`,
      false,
    )
  if (row.prunes) hooks.onPruned?.(0)
  const { onBreaker: onState, onOperation } = hooks
  // Rewriting claims in a grace period, and writing what an outage has deferred, must not wait for the breaker's own probe.
  let breaker: { heard(): void } | undefined
  const opened = await row.open(config, {
    ...hooks,
    onEvent: (kind, detail) => {
      if (kind === 'connected') breaker?.heard()
      hooks.onEvent(kind, detail)
    },
    onHeld: (left) => {
      if (left > 0) breaker?.heard()
      hooks.onHeld?.(left)
    },
  })
  const store = withBreaker(opened, { ...BREAKER_DEFAULTS, onState, onOperation })
  breaker = store
  return store
}

/** The cache's health is not monitored: the primary answers if it fails. */
async function openCache({ service, store }: StoreOf, url: string, { onEvent }: StoreHooks): Promise<Store> {
  const settings = { ...store, url, timeout: Math.min(store.timeout, CACHE_TIMEOUT), grace: 0, wait: null }
  const hooks: StoreHooks = {
    onEvent: (kind, detail) => onEvent(kind, `store.cache: ${detail}`),
    onBreaker: () => {},
  }
  // No service has this name, so entries and records are never confused.
  return openPlain({ service: `${service}~`, store: settings }, hooks)
}

/** Whether recent writes may have to be repeated. */
export function hasGrace({ grace, url, migrate }: Pick<StoreConfig, 'grace' | 'url' | 'migrate'>): boolean {
  return grace > 0 && [url, migrate?.from ?? url].some((one) => STORES[schemeOf(one)]?.hasGrace)
}

/** The store's name, before it is opened. */
export function storeName(storeUrl: string): string {
  const scheme = schemeOf(storeUrl)
  return STORES[scheme]?.name ?? scheme.slice(0, -1)
}

function schemeOf(storeUrl: string): string {
  return storeUrl.slice(0, storeUrl.indexOf(':') + 1)
}
