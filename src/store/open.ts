import type { Config } from '../config/config.ts'
import { BREAKER_DEFAULTS, type BreakerState, withBreaker } from './breaker.ts'
import { MEMORY_BYTES, memoryStore } from './memory.ts'
import { type Store, StoreUnavailable } from './register.ts'
import { openSqliteStore } from './sqlite.ts'

/** For log and metrics. */
export interface StoreHooks {
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  readonly onBreaker: (state: BreakerState) => void
  /** Expired records were removed, at first 0 of them. Only by stores that do it themselves. */
  readonly onPruned?: ((records: number) => void) | undefined
}

type StoreOf = Pick<Config, 'service' | 'store'>
type Opener = (config: StoreOf, hooks: StoreHooks) => Promise<Store>

interface Row {
  readonly name: string
  readonly open: Opener
  /** It removes expired records itself, and reports how many. */
  readonly prunes: boolean
}

/** Loaded on demand: its client is a tenth of the start. */
const openRedis: Opener = async ({ service, store: { url, timeout } }, { onEvent }) => {
  const { openRedisStore } = await import('./redis.ts')
  return openRedisStore({ url, service, timeoutMs: timeout, onEvent })
}

/** By what `store.url` begins with. */
const STORES: Readonly<Record<string, Row>> = {
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
  'redis:': { name: 'redis', open: openRedis, prunes: false },
  'rediss:': { name: 'redis', open: openRedis, prunes: false },
}

export const STORE_SCHEMES: readonly string[] = Object.keys(STORES)

/**
 * The store that `store.url` names, behind a circuit breaker.
 * @throws {StoreUnavailable} if an embedded store cannot be used. One over the network may come up later.
 */
export async function openStore(config: StoreOf, hooks: StoreHooks): Promise<Store> {
  const row = STORES[schemeOf(config.store.url)]
  if (row === undefined)
    throw new StoreUnavailable(
      `store.url "${schemeOf(config.store.url)}…" names no store; known are ${STORE_SCHEMES.join(' ')}`,
      false,
    )
  if (row.prunes) hooks.onPruned?.(0)
  return withBreaker(await row.open(config, hooks), { ...BREAKER_DEFAULTS, onState: hooks.onBreaker })
}

/** Its name, before it is opened. */
export function nameOf(storeUrl: string): string {
  const scheme = schemeOf(storeUrl)
  return STORES[scheme]?.name ?? scheme.slice(0, -1)
}

function schemeOf(storeUrl: string): string {
  return storeUrl.slice(0, storeUrl.indexOf(':') + 1)
}
