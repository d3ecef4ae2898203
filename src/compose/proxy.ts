import type { Config } from '../config/config.ts'
import type { Logger, LogOutput } from '../observe/log.ts'
import { openBase } from './base.ts'
import { makeGuard } from './guard.ts'
import { makeServers, makeTraffic, type OtherProcesses, openAdmin } from './listeners.ts'
import { openOutbox, openStore, type StartOptions } from './store.ts'
import { openUpstreams } from './upstream.ts'

/** The parts of one proxy, made but not yet listening. */
export type ProxyParts = Awaited<ReturnType<typeof compose>>
/** The parts that handle traffic. */
export type TrafficParts = Awaited<ReturnType<typeof composeWorker>>
/** The parts for operators, in a process whose workers handle the traffic. */
export type FirstParts = Awaited<ReturnType<typeof composeFirst>>

/**
 * Creates the parts, each from those before it: observers → store → upstream → guard → servers.
 *
 * @throws if the spool or the embedded store cannot be opened, or a file cannot be read.
 */
export async function compose(config: Config, log: Logger, output: LogOutput | null, options: StartOptions) {
  const core = await composeCore(config, log, output, options)
  const served = await trafficOf(core)
  return { ...core.parts, ...served, ...(await operatorsOf(core, null)) }
}

/** The parts of one of several workers: the first process has the listeners for operators. */
export async function composeWorker(
  config: Config,
  log: Logger,
  output: LogOutput | null,
  options: StartOptions,
) {
  const core = await composeCore(config, log, output, options)
  return { ...core.parts, ...(await trafficOf(core)) }
}

/** The parts of the first process, whose `workers` handle the traffic. */
export async function composeFirst(
  config: Config,
  log: Logger,
  output: LogOutput | null,
  options: StartOptions,
  workers: OtherProcesses,
) {
  const core = await composeCore(config, log, output, options)
  return { ...core.parts, ...(await operatorsOf(core, workers)) }
}

type Core = Awaited<ReturnType<typeof composeCore>>

async function composeCore(config: Config, log: Logger, output: LogOutput | null, options: StartOptions) {
  const base = await openBase(config, log, output)
  const spool = await openOutbox(base, options.place)
  const opened = await openStore(base, options)
  const up = await openUpstreams(base, opened)
  const guard = await makeGuard(base, opened, up, spool)
  const { store, presence, agreement } = opened
  const { settler, waiters, running, inFlight, shadow, reconciler } = guard
  const parts = {
    log,
    state: base.state,
    metrics: base.metrics,
    store,
    presence,
    agreement,
    spooled: spool.left.length,
    budgets: [up.budget, up.shadowBudget],
    upstreams: up.upstreams,
    settler,
    waiters,
    running,
    inFlight,
    shadow,
    reconciler,
    closing: base.closing,
  }
  return { base, opened, up, guard, parts }
}

async function trafficOf({ base, up, guard }: Core) {
  const traffic = await makeTraffic(base, up, guard)
  base.metrics.set('idempotency_workers', {}, 1)
  return { traffic, data: traffic.server }
}

async function operatorsOf({ base, opened, up, guard }: Core, workers: OtherProcesses | null) {
  const { access, followTokensOf } = await openAdmin(base, opened, up, guard, workers)
  const { admin, ops } = await makeServers(base, opened, access, workers)
  return { admin, ops, followTokensOf }
}
