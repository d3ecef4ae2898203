import { resolve } from 'node:path'
import { compose, type ProxyParts } from './compose/proxy.ts'
import type { StartOptions } from './compose/store.ts'
import type { Config } from './config/config.ts'
import type { Loaded } from './config/load.ts'
import type { Millis } from './core/record.ts'
import { drain } from './drain.ts'
import { closeServer, listen } from './http/connections.ts'
import type { Logger, LogOutput } from './observe/log.ts'
import { reloader } from './reload.ts'
import { within } from './runtime/scheduling.ts'
import { VERSION } from './version.ts'

/** How long writing an earlier process's outcomes may delay the start. */
const WRITE_FIRST: Millis = 2000

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
  options: StartOptions = { acceptsRescope: false },
): Promise<Proxy> {
  for (const warning of config.warnings) log.warn(warning)
  const parts = await compose(config, log, output, options)
  await enterPhase(parts)
  await writeSpooled(parts)
  const urls = await listenAll(parts)
  parts.state.started = true
  parts.reconciler.start(config)
  announce(parts, urls)
  const nothing = (): void => {}
  const settled = parts.store.ping().then(nothing, nothing)
  let ending: Promise<void> | null = null
  return { ...urls, settled, reload: reloader(parts), drain: () => (ending ??= drain(parts)) }
}

/** Runs before anything is claimed or written for an earlier process. */
async function enterPhase({ presence, agreement, closing }: ProxyParts): Promise<void> {
  try {
    await presence?.enter()
    await agreement?.enter()
  } catch (error) {
    await closing.disposeAsync()
    throw error
  }
}

/** Outcomes that the store accepts now need not be answered from memory. */
async function writeSpooled({ log, spooled, settler }: ProxyParts): Promise<void> {
  if (spooled === 0) return
  log.warn({ outcomes: spooled }, 'outcomes of an earlier process are in the spool and will be written')
  await within(WRITE_FIRST, settler.flush())
}

/** The traffic listener comes last, so that nothing is served unless everything is. */
async function listenAll(parts: ProxyParts): Promise<Urls> {
  const { state, data, admin, ops } = parts
  const { config } = state
  try {
    return {
      adminUrl: admin && (await listen(admin, 'admin.listen', config.admin.listen)),
      opsUrl: ops && (await listen(ops, 'ops.listen', config.ops.listen)),
      url: await listen(data, 'listen', config.listen),
    }
  } catch (error) {
    await closeServer(data)
    await parts.closing.disposeAsync()
    throw error
  }
}

function announce({ log, state: { config }, store }: ProxyParts, { url, adminUrl, opsUrl }: Urls): void {
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
      version: VERSION,
    },
    'listening',
  )
}
