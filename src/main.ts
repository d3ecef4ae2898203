import type { Server } from 'node:net'
import { resolve } from 'node:path'
import { setFlagsFromString } from 'node:v8'
import { compose, type FirstParts, type ProxyParts } from './compose/proxy.ts'
import type { StartOptions } from './compose/store.ts'
import type { Config } from './config/config.ts'
import type { Loaded } from './config/load.ts'
import type { Millis } from './core/record.ts'
import { drain } from './drain.ts'
import { listen } from './http/connections.ts'
import type { Logger, LogOutput } from './observe/log.ts'
import { reloader } from './reload.ts'
import { within } from './runtime/scheduling.ts'
import { VERSION } from './version.ts'

/** How long writing an earlier process's outcomes may delay the start. */
const WRITE_FIRST: Millis = 2000

/**
 * Without it, a burst at startup makes V8 allocate every later request in the old generation: one start in three stayed slow
 * (docs/adr/0017). With it, V8 rejects the code cache of Node's own modules, and a thread starts in 50 ms instead of 25. So it is set once
 * everything has started.
 */
const NO_PRETENURING = '--no-allocation-site-pretenuring'

/**
 * Lets the heap double before a full collection. Bodies lie outside the heap and are freed at once, but V8 counts them as garbage to
 * collect: otherwise 64 concurrent requests of 64 KiB would trigger one (docs/adr/0017). Not with SQLite, whose thread holds the bodies as
 * well.
 */
const FEWER_COLLECTIONS = '--heap-growing-percent=100'

interface Urls {
  readonly url: string
  readonly adminUrl: string | null
  readonly opsUrl: string | null
}

export interface Proxy extends Urls {
  /** Resolves when the store has answered for the first time, or failed to: startup is complete. */
  readonly settled: Promise<void>
  /** Applies a configuration if it is valid and needs no restart (contract §10); otherwise the log says why not. */
  reload(loaded: Loaded): Promise<void>
  /** Announces the shutdown, keeps serving for `drain.delay`, then stops: running requests finish and are stored (contract §11). */
  drain(): Promise<void>
}

/**
 * Starts a proxy: open the store → enter the migration phase, agree with other replicas → write what an earlier process left → listen → log it.
 *
 * @throws if the spool or the embedded store cannot be opened, a replica two phases away is alive, a TLS file cannot be read, or an address
 * cannot be used.
 */
export async function start(
  config: Config,
  log: Logger,
  output: LogOutput | null = null,
  options: Omit<StartOptions, 'place'> = { acceptsRescope: false },
): Promise<Proxy> {
  for (const warning of config.warnings) log.warn(warning)
  const parts = await compose(config, log, output, { ...options, place: 'alone' })
  await enter(parts)
  const urls = await listenAll(parts, parts.data)
  parts.state.started = true
  parts.reconciler.start(config)
  announce(parts, urls)
  const settled = settledOf(parts)
  let ending: Promise<void> | null = null
  return { ...urls, settled, reload: reloader(parts, parts.traffic), drain: () => (ending ??= drain(parts)) }
}

type Entering = Pick<ProxyParts, 'log' | 'presence' | 'agreement' | 'closing' | 'spooled' | 'settler'>

/** Enters the migration phase, agrees with other replicas, and only then writes what an earlier process left. */
export async function enter(parts: Entering): Promise<void> {
  const { presence, agreement, closing } = parts
  try {
    await presence?.enter()
    await agreement?.enter()
  } catch (error) {
    await closing.disposeAsync()
    throw error
  }
  await writeSpooled(parts)
}

/** Resolves when the store has answered, or failed to. */
export async function settledOf({ store }: Pick<ProxyParts, 'store'>): Promise<void> {
  await store.ping().catch(() => {})
}

/** Outcomes that the store accepts now need not be answered from memory. */
async function writeSpooled({ log, spooled, settler }: Entering): Promise<void> {
  if (spooled === 0) return
  log.warn({ outcomes: spooled }, 'outcomes of an earlier process are in the spool and will be written')
  await within(WRITE_FIRST, settler.flush())
}

/** The traffic listener comes last, so that nothing is served unless everything is. */
export async function listenAll(parts: FirstParts, data: Server): Promise<Urls> {
  const { state, admin, ops } = parts
  const { config } = state
  try {
    return {
      adminUrl: admin && (await listen(admin, 'admin.listen', config.admin.listen)),
      opsUrl: ops && (await listen(ops, 'ops.listen', config.ops.listen)),
      url: await listen(data, 'listen', config.listen),
    }
  } catch (error) {
    data.close()
    await parts.closing.disposeAsync()
    throw error
  }
}

/** `workers`: their number; null: none. */
export function announce(
  { log, state: { config }, store }: FirstParts,
  { url, adminUrl, opsUrl }: Urls,
  workers: number | null = null,
): void {
  const isFile = store.name === 'sqlite'
  log.info(
    {
      url,
      admin: adminUrl,
      ops: opsUrl,
      store: store.name,
      ...(isFile ? { file: resolve(config.store.url.slice('sqlite:'.length)) } : {}),
      service: config.service,
      upstream: config.upstream.url,
      ...(workers === null ? {} : { workers }),
      version: VERSION,
    },
    'listening',
  )
}

/** Sets V8's flags for traffic, once the process has started. */
export function tuneForTraffic(storeUrl: string): void {
  setFlagsFromString(NO_PRETENURING)
  if (!storeUrl.startsWith('sqlite:')) setFlagsFromString(FEWER_COLLECTIONS)
}
