import type { Config } from '../config/config.ts'
import { BREAKER_DEFAULTS, type BreakerState, withBreaker } from './breaker.ts'
import { MEMORY_BYTES, MemoryStore } from './memory.ts'
import { type Store, StoreUnavailable } from './register.ts'
import { SqliteStore } from './sqlite.ts'

/** For log and metrics. */
export interface StoreHooks {
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  readonly onBreaker: (state: BreakerState) => void
  /** Expired records were removed, 0 of them at first. By stores that do it themselves; the others tell of nothing. */
  readonly onPruned?: ((records: number) => void) | undefined
}

/** The store, and the service whose records are to be seen in it. */
type StoreOf = Pick<Config, 'service' | 'store'>
type Opener = (config: StoreOf, hooks: StoreHooks) => Promise<Store>

/** Loaded where it is used: its client is a tenth of the start. */
const openRedis: Opener = async ({ service, store: { url, timeout } }, { onEvent }) => {
  const { RedisStore } = await import('./redis.ts')
  return RedisStore.open({ url, service, timeoutMs: timeout, onEvent })
}

const OPENERS: Readonly<Record<string, Opener>> = {
  'memory:': async (_config, { onPruned }) =>
    new MemoryStore({ clock: Date.now, maxBytes: MEMORY_BYTES, onPruned }),
  'sqlite:': async ({ service, store: { url, timeout } }, { onEvent, onPruned }) =>
    SqliteStore.open({
      path: url.slice('sqlite:'.length),
      service,
      timeoutMs: timeout,
      onEvent,
      onPruned,
    }),
  'redis:': openRedis,
  'rediss:': openRedis,
}

/** Those that remove what has expired by themselves, and tell. */
const PRUNING: readonly string[] = ['memory:', 'sqlite:']

/** What `store.url` may begin with. */
export const STORE_SCHEMES: readonly string[] = Object.keys(OPENERS)

/**
 * The store that `store.url` names, behind a circuit breaker.
 * @throws {StoreUnavailable} where an embedded store cannot be used. One over the network may come up later.
 */
export async function openStore(config: StoreOf, hooks: StoreHooks): Promise<Store> {
  const { url } = config.store
  const scheme = url.slice(0, url.indexOf(':') + 1)
  const open = OPENERS[scheme]
  if (open === undefined)
    throw new StoreUnavailable(
      `store.url "${scheme}…" names no store; known are ${STORE_SCHEMES.join(' ')}`,
      false,
    )
  if (PRUNING.includes(scheme)) hooks.onPruned?.(0)
  return withBreaker(await open(config, hooks), { ...BREAKER_DEFAULTS, onState: hooks.onBreaker })
}

/** As the store will call itself, before it is there: `rediss:` is Redis, too. */
export function nameOf(storeUrl: string): string {
  const scheme = storeUrl.slice(0, storeUrl.indexOf(':'))
  return scheme === 'rediss' ? 'redis' : scheme
}
