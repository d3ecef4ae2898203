import type { Server } from 'node:http'
import type { AdminAccess } from '../admin/api.ts'
import type { Config } from '../config/config.ts'
import { formatAddress } from '../config/urls.ts'
import type { RecordId } from '../core/record.ts'
import { adminServer, opsServer } from '../http/admin.ts'
import { closeServer } from '../http/connections.ts'
import { type Health, healthOf } from '../http/health.ts'
import { Traffic } from '../http/traffic.ts'
import { Audit } from '../observe/audit.ts'
import { auditLog } from '../observe/log.ts'
import type { CountedSample, Exposition, Metrics } from '../observe/metrics.ts'
import { passObserver } from '../observe/observer.ts'
import { Recheck } from '../reconcile/control.ts'
import { VERSION } from '../version.ts'
import type { Base } from './base.ts'
import type { Guard } from './guard.ts'
import { followListener, followTokens } from './secrets.ts'
import type { OpenStore } from './store.ts'
import type { OpenUpstream } from './upstream.ts'

export async function makeTraffic(
  base: Base,
  { passing, loop, stalled, shadowBudget }: OpenUpstream,
  { ports, issuer, shadow }: Guard,
): Promise<Traffic> {
  const { config, log, state, metrics, tracing, closing, onBug } = base
  const { http2, tls } = config.listen
  const secure = await followListener(base, 'listen', config.listen, tls?.alpn)
  // Loaded only if used (docs/adr/0074).
  const multiplex = (tls === null ? http2 : tls.alpn.includes('h2')) ? await import('../http/http2.ts') : null
  const nearMissed = new Set<string>()
  const otherOrigins = new Set<string>()
  const traffic = await Traffic.open({
    config,
    log,
    secure,
    multiplex,
    draining: () => state.draining,
    ports,
    upstream: passing,
    loop,
    issuer,
    stalled,
    shadow: { shadow, budget: shadowBudget },
    spans: tracing,
    passed: passObserver(metrics),
    passFailed: (method, cause) => log.warn({ method, cause }, 'an unprotected request got no answer'),
    onLoop: (method) => log.warn({ method }, 'loop detected: the upstream leads back to this proxy'),
    onNearMiss: (route, method, path) => {
      metrics.count('idempotency_route_near_miss_total', { route })
      if (nearMissed.has(route)) return
      nearMissed.add(route)
      log.warn(
        { route, method, path },
        'a request matches no route, but would match this one if letter case, ;parameters or a file extension did not count: if the upstream treats them as equal, set match.case or match.parameters',
      )
    },
    onOtherOrigin: (route) => {
      if (otherOrigins.has(route)) return
      otherOrigins.add(route)
      log.warn(
        { route },
        'a replay has the CORS headers of another origin, so the browser keeps it from the page that asked: set cors.origins',
      )
    },
    onBug,
  })
  closing.defer(() => traffic.close())
  return traffic
}

/** The workers, as operators see them through the first process. */
export interface OtherProcesses {
  /** Whether one of them executes the record, or cannot say. */
  readonly isRunning: (id: RecordId) => Promise<boolean>
  /** Writes the outcome of the record that one of them holds. False: one could not, or cannot say. */
  readonly tell: (id: RecordId) => Promise<boolean>
  readonly announceDrain: (draining: boolean) => void
  readonly samples: (own: Metrics) => Promise<readonly CountedSample[]>
  readonly exposition: (own: Metrics) => Promise<Exposition>
  /** Whether one of them serves traffic. */
  readonly isServed: () => boolean
  /** Resolves once each event loop has completed a turn. */
  readonly turned: () => Promise<void>
}

/**
 * The admin API and its tokens, which a reload may read from another file. `access` null: no token or no listener, so no API.
 * @throws {Error} if the audit log cannot be opened.
 */
export async function openAdmin(
  base: Base,
  { records, store, history }: OpenStore,
  { queries }: OpenUpstream,
  { settler, waiters, running, reclaimer }: Guard,
  workers: OtherProcesses | null,
): Promise<{ readonly access: AdminAccess | null; readonly followTokensOf: (next: Config) => void }> {
  const { config, log, state, metrics, closing } = base
  const startedAt = Date.now()
  let following = followTokens(config, log)
  closing.defer(() => following?.[Symbol.dispose]())
  const { hosts, listen } = config.admin
  const own =
    listen.address === null ? [] : [formatAddress(listen.address).replace(/:\d+$/, '').toLowerCase()]
  const audit = following && (await openAudit(base))
  const access: AdminAccess | null = audit && {
    tokens: () => following?.current ?? [],
    hosts: [...hosts, ...own],
    ports: {
      get config() {
        return state.config
      },
      records,
      store,
      waiters,
      own: {
        isRunning: async (id) => running.has(id) || ((await workers?.isRunning(id)) ?? false),
        tell: async (id) => (await settler.flush(id)) && ((await workers?.tell(id)) ?? true),
        decided: reclaimer.decided,
      },
      audit,
      history,
      announceDrain: (draining) => {
        state.draining = draining || state.stopping
        workers?.announceDrain(state.draining)
        return state.draining
      },
      recheck: new Recheck(queries),
      counters: async () => ({
        since: startedAt,
        samples: await (workers?.samples(metrics) ?? metrics.samples()),
      }),
      version: VERSION,
    },
  }
  return {
    access,
    // Until the new file has tokens, the previous ones stay in force.
    followTokensOf(next) {
      const before = following
      following = followTokens(next, log, before?.current)
      before?.[Symbol.dispose]()
    },
  }
}

async function openAudit({ config: { audit, service }, log, output, closing }: Base): Promise<Audit> {
  const opened = await Audit.open(
    audit.file,
    service,
    auditLog(log, audit.file === null ? output : null),
  ).catch((error: unknown) => {
    throw new Error(`audit.file: ${(error as Error).message}`, { cause: error })
  })
  closing.defer(() => opened.close())
  return opened
}

export async function makeServers(
  base: Base,
  { store, agreement }: OpenStore,
  access: AdminAccess | null,
  workers: OtherProcesses | null,
): Promise<{ readonly admin: Server | null; readonly ops: Server | null }> {
  const { config, state, metrics, closing, onBug } = base
  const health: Health = {
    draining: () => state.draining,
    started: () => state.started,
    isServed: () => workers?.isServed() ?? true,
    turned: async () => workers?.turned(),
    readinessNeedsStore: config.readiness.store,
    conflict: () => agreement?.conflict ?? null,
    exposition: () => workers?.exposition(metrics) ?? metrics.exposition(),
    store: () => healthOf(store),
  }
  const [forAdmin, forOps] = [
    await followListener(base, 'admin.listen', config.admin.listen),
    await followListener(base, 'ops.listen', config.ops.listen),
  ]
  const admin = config.admin.listen.address === null ? null : adminServer(health, access, onBug, forAdmin)
  const ops = config.ops.listen.address === null ? null : opsServer(health, onBug, forOps)
  for (const server of [admin, ops]) if (server !== null) closing.defer(() => closeAbruptly(server))
  return { admin, ops }
}

async function closeAbruptly(server: Server): Promise<void> {
  const closed = closeServer(server)
  server.closeAllConnections()
  await closed
}
