import type { ProxyParts, TrafficParts } from './compose/proxy.ts'
import type { Config } from './config/config.ts'
import { type ConfigChange, changeLine, changesBetween, orphanedBy } from './config/diff.ts'
import { formatConfigError, type Loaded } from './config/load.ts'

/** Number of changes logged per reload: a new file may differ in every line. */
const MAX_LOGGED = 100

/** A configuration that all who serve traffic can put in force, or why one of them cannot. */
export type Readiness =
  | { readonly use: () => Promise<void>; readonly drop: () => void }
  | { readonly refused: string }

/** Whoever serves traffic. `text`: of the file. */
interface Serving {
  prepare(config: Config, text: string): Promise<Readiness>
}

type Settable = Pick<
  TrafficParts,
  'log' | 'state' | 'metrics' | 'reconciler' | 'budgets' | 'upstreams' | 'inFlight' | 'waiters'
>

/**
 * Applies a configuration that was read while the proxy runs, if it is valid and all its changes can be made without a restart; otherwise
 * nothing changes, and the log says why (contract §10).
 */
export function reloader(
  parts: Settable & Pick<ProxyParts, 'followTokensOf'>,
  serving: Serving,
): (loaded: Loaded) => Promise<void> {
  const { log, metrics, state } = parts
  const refuse = (why: object, message: string): void => {
    metrics.set('idempotency_config_last_reload_successful', {}, 0)
    log.error(why, message)
  }
  const reload = async (loaded: Loaded): Promise<void> => {
    if (!loaded.ok) {
      const errors = loaded.errors.map(formatConfigError)
      return refuse({ errors }, 'the configuration is invalid; the previous one stays in force')
    }
    const { config, text } = loaded
    const changes = changesBetween(state.config, config)
    const refused = changes.filter(({ effect }) => effect !== 'live')
    if (refused.length > 0)
      return refuse(
        { restart: linesOf(refused, 'restart'), identifies: linesOf(refused, 'identifies') },
        refused.some(({ effect }) => effect === 'identifies')
          ? 'the configuration changes which record a request finds: restart, after ttl has passed; all of the previous one stays in force'
          : 'the configuration needs a restart; all of the previous one stays in force',
      )
    const readiness = await serving.prepare(config, text)
    if ('refused' in readiness)
      return refuse(
        { why: readiness.refused },
        'a worker cannot use the configuration; the previous one stays in force in all',
      )
    const known = state.config.warnings
    const orphaned = orphanedBy(state.config, config)
    const { tokenFile } = state.config.admin
    await readiness.use()
    apply(parts, config)
    if (config.admin.tokenFile !== tokenFile) parts.followTokensOf(config)
    metrics.set('idempotency_config_last_reload_successful', {}, 1)
    if (changes.length === 0) return log.info('the configuration was read again: nothing has changed')
    const { level } = config.log
    // The lines below are logged under the more verbose of the two levels, so that a change to `warn` is confirmed.
    if (level !== 'silent' && !log.isLevelEnabled(level)) log.level = level
    for (const warning of orphaned) log.warn(warning)
    for (const warning of config.warnings) if (!known.includes(warning)) log.warn(warning)
    log.info({ changes: linesOf(changes, 'live') }, 'the configuration was reloaded')
    log.level = level
  }
  let last: Promise<void> = Promise.resolve()
  // One after another: each is compared with the one before.
  return (loaded) => (last = last.catch(() => {}).then(() => reload(loaded)))
}

/** In a worker: the first process, which has read the same text, asks and logs. */
export async function prepareReload(
  parts: Settable & Pick<TrafficParts, 'traffic'>,
  loaded: Loaded,
): Promise<Readiness> {
  if (!loaded.ok) return { refused: loaded.errors.map(formatConfigError).join('; ') }
  const { config } = loaded
  // Files that the text names may have changed since.
  const refused = changesBetween(parts.state.config, config).filter(({ effect }) => effect !== 'live')
  if (refused.length > 0) return { refused: refused.map(changeLine).join('; ') }
  const prepared = await parts.traffic.prepare(config)
  return {
    drop: prepared.drop,
    use: async () => {
      await prepared.use()
      apply(parts, config)
      parts.log.level = config.log.level
    },
  }
}

/** Puts it in force, also in parts that do not read the configuration themselves. */
function apply(
  { state, reconciler, metrics, budgets, upstreams, inFlight, waiters }: Settable,
  config: Config,
): void {
  state.config = config
  reconciler.check(config)
  metrics.startRoutes(config)
  for (const budget of budgets) budget.resize(config.limits.buffered)
  for (const upstream of upstreams) upstream.resize(config.upstream.connections)
  inFlight.resize(config.limits.inFlight)
  waiters.resize(config.limits.waiters)
}

function linesOf(changes: readonly ConfigChange[], which: ConfigChange['effect']): string[] {
  return changes
    .filter(({ effect }) => effect === which)
    .slice(0, MAX_LOGGED)
    .map(changeLine)
}
