import type { Config } from '../config/config.ts'
import type { Logger, LogOutput } from '../observe/log.ts'
import { openBase } from './base.ts'
import { makeGuard } from './guard.ts'
import { makeServers, makeTraffic, openAdmin } from './listeners.ts'
import { openOutbox, openStore, type StartOptions } from './store.ts'
import { openUpstreams } from './upstream.ts'

/** The parts of one proxy, made but not yet listening. */
export type ProxyParts = Awaited<ReturnType<typeof compose>>

/**
 * Creates the parts, each from those before it: observers → store → upstream → guard → servers.
 *
 * @throws if the spool or the embedded store cannot be opened, or a file cannot be read.
 */
export async function compose(config: Config, log: Logger, output: LogOutput | null, options: StartOptions) {
  const base = await openBase(config, log, output)
  const spool = await openOutbox(base)
  const opened = await openStore(base, options)
  const up = await openUpstreams(base, opened)
  const guard = await makeGuard(base, opened, up, spool)
  const traffic = await makeTraffic(base, up, guard)
  const { access, followTokensOf } = await openAdmin(base, opened, up, guard)
  const { admin, ops } = await makeServers(base, opened, access)
  const { store, presence, agreement } = opened
  const { settler, waiters, running, inFlight, shadow, reconciler } = guard
  return {
    log,
    state: base.state,
    metrics: base.metrics,
    store,
    presence,
    agreement,
    spooled: spool.left.length,
    budgets: [up.budget, up.shadowBudget],
    upstreams: up.upstreams,
    followTokensOf,
    settler,
    waiters,
    running,
    inFlight,
    shadow,
    reconciler,
    traffic,
    data: traffic.server,
    admin,
    ops,
    closing: base.closing,
  }
}
