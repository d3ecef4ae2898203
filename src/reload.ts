import { changeLine } from './admin/effective.ts'
import type { Config, InForce } from './config/config.ts'
import { type Change, changesBetween } from './config/config-diff.ts'
import { formatConfigError, type Loaded } from './config/load.ts'
import { orphanedBy } from './config/orphans.ts'
import type { Logger } from './observe/log.ts'
import type { Metrics } from './observe/metrics.ts'

/** Of one reload, in the log: a new file may differ in every line. */
const MOST_TOLD = 100

/**
 * Takes what was read of a configuration while the proxy runs, and puts it in force where it is valid and all that it changes
 * can change under way; else nothing changes, and the log says why (contract §10). `apply` hears of a configuration that has
 * come into force.
 */
export function reloader(
  log: Logger,
  metrics: Metrics,
  inForce: { config: Config } & InForce,
  apply: (config: Config) => void,
): (loaded: Loaded) => void {
  const count = (successful: boolean): void =>
    metrics.set('idempotency_config_last_reload_successful', {}, successful ? 1 : 0)
  return (loaded) => {
    if (!loaded.ok) {
      count(false)
      const errors = loaded.errors.map(formatConfigError)
      log.error({ errors }, 'the configuration is invalid; the one before it stays in force')
      return
    }
    const { config } = loaded
    const changes = changesBetween(inForce.config, config)
    const refused = changes.filter(({ effect }) => effect !== 'live')
    if (refused.length > 0) {
      count(false)
      log.error(
        { restart: told(refused, 'restart'), identifies: told(refused, 'identifies') },
        refused.some(({ effect }) => effect === 'identifies')
          ? 'the configuration changes which record a request finds: restart, after waiting out ttl; the one before it stays in force, whole'
          : 'the configuration needs a restart; the one before it stays in force, whole',
      )
      return
    }
    const known = inForce.config.warnings
    const orphaned = orphanedBy(inForce.config, config)
    inForce.config = config
    apply(config)
    count(true)
    if (changes.length === 0) return log.info('the configuration was read again: nothing has changed')
    const { level } = config.log
    // The lines below come out under the more verbose of the two levels, so that a change to `warn` is confirmed.
    if (level !== 'silent' && !log.isLevelEnabled(level)) log.level = level
    for (const warning of orphaned) log.warn(warning)
    for (const warning of config.warnings) if (!known.includes(warning)) log.warn(warning)
    log.info({ changes: told(changes, 'live') }, 'the configuration was reloaded')
    log.level = level
  }
}

function told(changes: readonly Change[], which: Change['effect']): string[] {
  return changes
    .filter(({ effect }) => effect === which)
    .slice(0, MOST_TOLD)
    .map(changeLine)
}
