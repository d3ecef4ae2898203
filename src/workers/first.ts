import { setTimeout as wait } from 'node:timers/promises'
import { composeFirst, type FirstParts } from '../compose/proxy.ts'
import type { Config } from '../config/config.ts'
import { announce, enter, listenAll, type Proxy, settledOf } from '../main.ts'
import type { Logger, LogOutput } from '../observe/log.ts'
import { reloader } from '../reload.ts'
import { within } from '../runtime/scheduling.ts'
import { CLOSES_WITHIN, Fleet, type FleetOptions } from './fleet.ts'

/**
 * Starts a proxy of several processes: this one for operators, and workers for the traffic, whose connections it accepts (docs/adr/0130).
 *
 * @throws as `start` in main.ts, or if no worker can start.
 */
export async function startWithWorkers(
  config: Config,
  log: Logger,
  output: LogOutput | null,
  { begin, count }: Pick<FleetOptions, 'begin' | 'count'>,
): Promise<Proxy> {
  for (const warning of config.warnings) log.warn(warning)
  let countEnded = (): void => {}
  const fleet = new Fleet({ count, begin, config, log, onEnded: () => countEnded() })
  const { acceptsRescope } = begin
  const parts = await composeFirst(config, log, output, { place: 'first', acceptsRescope }, fleet)
  countEnded = () => parts.metrics.count('idempotency_workers_ended_total', {})
  await enter(parts)
  try {
    await fleet.start()
  } catch (error) {
    await parts.closing.disposeAsync()
    throw error
  }
  const urls = await listenAll(parts, fleet.acceptor.server).catch(async (error: unknown) => {
    await fleet.end(CLOSES_WITHIN)
    throw error
  })
  parts.state.started = true
  announce(parts, urls, count)
  let ending: Promise<void> | null = null
  return {
    ...urls,
    settled: settledOf(parts),
    reload: reloader(parts, fleet),
    drain: () => (ending ??= drainAll(parts, fleet)),
  }
}

/** Like the drain of a single process; the workers finish once this process accepts no more connections. */
async function drainAll({ log, state, closing }: FirstParts, fleet: Fleet): Promise<void> {
  const { delay, timeout } = state.config.drain
  state.stopping = true
  state.draining = true
  log.info('draining')
  fleet.announceStop()
  await wait(delay)
  await within(timeout, fleet.acceptor.close())
  await fleet.end(timeout + CLOSES_WITHIN)
  await closing.disposeAsync()
  log.info('stopped')
}
