import type { ProxyParts } from './compose/proxy.ts'
import type { Config } from './config/config.ts'
import { type ConfigChange, changeLine, changesBetween, orphanedBy } from './config/diff.ts'
import { formatConfigError, type Loaded } from './config/load.ts'

/** Number of changes logged per reload: a new file may differ in every line. */
const MAX_LOGGED = 100

/**
 * Applies a configuration that was read while the proxy runs, if it is valid and all its changes can be made without a restart; otherwise
 * nothing changes, and the log says why (contract §10).
 */
export function reloader(parts: ProxyParts): (loaded: Loaded) => Promise<void> {
  const { log, metrics, state, traffic } = parts
  const count = (successful: boolean): void =>
    metrics.set('idempotency_config_last_reload_successful', {}, successful ? 1 : 0)
  const reload = async (loaded: Loaded): Promise<void> => {
    if (!loaded.ok) {
      count(false)
      const errors = loaded.errors.map(formatConfigError)
      log.error({ errors }, 'the configuration is invalid; the previous one stays in force')
      return
    }
    const { config } = loaded
    const changes = changesBetween(state.config, config)
    const refused = changes.filter(({ effect }) => effect !== 'live')
    if (refused.length > 0) {
      count(false)
      log.error(
        { restart: linesOf(refused, 'restart'), identifies: linesOf(refused, 'identifies') },
        refused.some(({ effect }) => effect === 'identifies')
          ? 'the configuration changes which record a request finds: restart, after ttl has passed; all of the previous one stays in force'
          : 'the configuration needs a restart; all of the previous one stays in force',
      )
      return
    }
    const known = state.config.warnings
    const orphaned = orphanedBy(state.config, config)
    const { tokenFile } = state.config.admin
    await traffic.use(config)
    state.config = config
    apply(parts, config)
    if (config.admin.tokenFile !== tokenFile) parts.followTokensOf(config)
    count(true)
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

/** Updates parts that do not read the configuration themselves. */
function apply(
  { reconciler, metrics, budgets, upstreams, inFlight, waiters }: ProxyParts,
  config: Config,
): void {
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
