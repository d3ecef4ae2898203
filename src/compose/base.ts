import type { Config } from '../config/config.ts'
import type { Logger, LogOutput } from '../observe/log.ts'
import { Metrics } from '../observe/metrics.ts'
import { openTracing, type Tracing } from '../observe/tracing.ts'
import { VERSION } from '../version.ts'

/** State that changes while the proxy runs. */
export interface ProxyState {
  config: Config
  started: boolean
  draining: boolean
  stopping: boolean
}

/** What all parts need. */
export interface Base {
  /** At the start; {@link ProxyState.config} is the one in force. */
  readonly config: Config
  readonly log: Logger
  readonly output: LogOutput | null
  readonly state: ProxyState
  readonly metrics: Metrics
  readonly tracing: Tracing | null
  readonly onBug: (error: unknown) => void
  /** Resources to close at the end, latest first. */
  readonly closing: AsyncDisposableStack
}

export const clock = performance.now.bind(performance)

export async function openBase(config: Config, log: Logger, output: LogOutput | null): Promise<Base> {
  const metrics = new Metrics(config.metrics.defaults)
  metrics.set('idempotency_config_last_reload_successful', {}, 1)
  metrics.set('idempotency_build_info', { version: VERSION, node: process.version }, 1)
  metrics.startRoutes(config)
  const tracing = await openTracing(config, VERSION, (found) =>
    log.warn({ found }, 'the OpenTelemetry SDK brings an @opentelemetry/api that is too old: tracing is off'),
  )
  return {
    config,
    log,
    output,
    state: { config, started: false, draining: false, stopping: false },
    metrics,
    tracing,
    onBug: (error) => log.error({ err: error }, 'internal error'),
    closing: new AsyncDisposableStack(),
  }
}
