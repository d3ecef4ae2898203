import { randomInt } from 'node:crypto'
import type { Server } from 'node:http'
import { hostname } from 'node:os'
import { setTimeout as wait } from 'node:timers/promises'
import { openAdmin } from './admin/api.ts'
import { type Config, namespaceOf } from './config/config.ts'
import { upstreamTag } from './core/reconcile/identifiers.ts'
import { policyNamed } from './core/route.ts'
import { jwtPoliciesOf, verifier } from './credentials/callers.ts'
import { Issuer } from './credentials/issuer.ts'
import { adminServer, type Health, healthOf, opsServer } from './http/admin.ts'
import { Stalled } from './http/bodies.ts'
import { closeServer } from './http/connections.ts'
import { loopMarkOf, marking } from './http/headers.ts'
import { trafficServer } from './http/server.ts'
import { History } from './observe/history.ts'
import { auditLog, type Logger, type LogOutput } from './observe/log.ts'
import { Metrics } from './observe/metrics.ts'
import { observer, reconcileObserver, shadowObserver } from './observe/observer.ts'
import { StoreHealth } from './observe/store-health.ts'
import { openTracing } from './observe/tracing.ts'
import { Latency } from './protect/answers.ts'
import { RecentGrants } from './protect/existing.ts'
import { KeyChurn } from './protect/key-churn.ts'
import { Leases } from './protect/leases.ts'
import type { Ports } from './protect/ports.ts'
import type { Execution } from './protect/request.ts'
import { Settler, spoolRoom } from './protect/settler.ts'
import { WaitingRoom } from './protect/waiting-room.ts'
import { Control, Recheck } from './reconcile/control.ts'
import { QUESTION_TIMEOUT } from './reconcile/ports.ts'
import { Reconciler } from './reconcile/reconciler.ts'
import { KeyedMutex } from './runtime/keyed-mutex.ts'
import { Budget, InFlight } from './runtime/limits.ts'
import { RecordMap } from './runtime/record-map.ts'
import { Shadow } from './shadow/shadow.ts'
import { nameOf, openStore } from './store/open.ts'
import { type Left, Outbox } from './store/outbox.ts'
import { Records, tokens } from './store/records.ts'
import { forwarder } from './upstream/forward.ts'
import { openUpstream } from './upstream/pool.ts'
import { VERSION } from './version.ts'

/** The parts of one proxy, made but not yet listening. */
export type Parts = Awaited<ReturnType<typeof compose>>

/**
 * Makes the parts, each from those before it: what is seen → store → upstream → guard → servers.
 * @throws where the spool or the embedded store cannot be opened, or a file cannot be read.
 */
export async function compose(config: Config, log: Logger, output: LogOutput | null) {
  const startedAt = Date.now()
  /** What changes while the proxy runs. */
  const state = { config, started: false, draining: false }
  const onBug = (error: unknown): void => log.error({ err: error }, 'internal error')
  /** What the end has to close, the latest first. */
  const closing = new AsyncDisposableStack()

  const metrics = new Metrics(config.metrics.defaults)
  metrics.set('idempotency_config_last_reload_successful', {}, 1)
  metrics.set('idempotency_build_info', { version: VERSION, node: process.version }, 1)
  metrics.startRoutes(config)
  const { outbox, left: spooled } = await openOutbox(config, log)
  const tracing = await openTracing(config, VERSION, (found) =>
    log.warn({ found }, 'the OpenTelemetry SDK brings an @opentelemetry/api that is too old: tracing is off'),
  )

  const storeHealth = new StoreHealth(nameOf(config.store.url), metrics, log)
  const measured = storeHealth.measured(await openStore(config, storeHealth))
  const store = tracing?.store(measured) ?? measured
  closing.defer(() => store.close())
  closing.defer(() => tracing?.flush())
  const records = new Records(store)
  await storeHealth.watch(store)
  closing.defer(() => storeHealth.stop())
  const history = new History({
    note: (id, notes) => store.history.append(id, notes),
    replica: `${hostname()}:${process.pid}`,
    onDropped: (count) => log.warn({ count }, 'entries of records’ histories were lost'),
  })
  closing.defer(() => history.close())

  const upstream = openUpstream(config.upstream)
  // Connections of its own: slow uploads and streams that nobody protects must not keep protected requests waiting.
  const passing = openUpstream(config.upstream)
  closing.defer(
    async () => void (await Promise.allSettled([upstream.pool.destroy(), passing.pool.destroy()])),
  )
  const stalled = new Stalled()
  const budget = new Budget(config.limits.buffered, stalled.makeRoom)
  // Shadow mode takes no room from the routes that protect.
  const shadowBudget = new Budget(config.limits.buffered)
  const forwarding = { ...config.upstream, budget, servername: upstream.tls.servername ?? null }
  const forward = forwarder(upstream.pool, forwarding)

  const loop = loopMarkOf(config)
  const questionTimeout = Math.min(QUESTION_TIMEOUT, config.upstream.timeout)
  const unresolved = reconcileObserver(metrics, log, history)
  const questions = {
    forward: marking(forwarder(upstream.pool, { ...forwarding, timeout: questionTimeout }), loop),
    policyOf: (route: string) => policyNamed(state.config, route),
    upstream: upstreamTag(config.upstream.url),
    records,
    store,
  }
  const control = new Control({
    ...questions,
    say: unresolved.tried,
    clock: () => performance.now(),
    pause: (time) => wait(time, undefined, { ref: false }),
  })

  const counting = observer(metrics, log, history, (route, id) => control.completed(route, id))
  const observing = tracing?.observer(counting) ?? counting
  const settler = new Settler(records, observing, outbox)
  closing.defer(() => outbox?.close())
  closing.defer(() => settler.close())
  settler.restore(spooled, (bytes) => budget.hold(bytes) ?? (() => {}))
  const leases = new Leases(
    (items) => store.renew(items),
    (error) => log.warn({ error: String(error) }, 'leases could not be renewed; trying again'),
  )
  closing.defer(() => leases.close())
  const waiters = new WaitingRoom(records, store, config.limits.waiters)
  const running = new RecordMap<Execution>()
  const inFlight = new InFlight(randomInt(2 ** 32))
  const issuer = config.issuer === null ? null : new Issuer(config.issuer.secret, config.issuer.ttl)
  const callers = verifier(jwtPoliciesOf([...config.routes, config.defaults]))
  closing.defer(() => callers.close())
  const ports: Ports = {
    records,
    store,
    leases,
    settler,
    waiters,
    turns: new KeyedMutex(),
    grants: new RecentGrants(() => performance.now()),
    keyChurn: new KeyChurn(() => performance.now()),
    verifyToken: (policy, headers) => callers.verify(policy, headers),
    // Configuration demands an issuer where keys must be issued.
    checkIssued: async (key, now) => issuer?.check(key, now) ?? 'forged',
    running,
    inFlight,
    observer: observing,
    latency: new Latency(),
    budget,
    forward: tracing?.forward(forward) ?? forward,
    upstream: questions.upstream,
    namespace: namespaceOf(config),
    unfitForStrict: () => storeHealth.mayEvict() && !config.store.acceptRisk,
    pause: wait,
    newToken: tokens(),
    get maxInFlight() {
      return state.config.limits.inFlight
    },
  }
  const shadow = new Shadow(ports, shadowObserver(metrics, log, history))
  const reconciler = new Reconciler({
    ...questions,
    questionTimeout,
    control,
    isOwn: (id) => running.has(id) || settler.held(id) !== null,
    wake: (id) => waiters.tell(id, null),
    observer: unresolved,
    random: Math.random,
  })
  metrics.read({
    idempotency_in_flight: () => inFlight.count,
    idempotency_waiters: () => waiters.size,
    idempotency_buffered_bytes: () => budget.held + shadowBudget.held,
    idempotency_spooled: () => settler.size,
    idempotency_log_lines_dropped_total: () => output?.dropped ?? 0,
  })

  const data = await trafficServer({
    inForce: state,
    ports,
    upstream: passing,
    loop,
    issuer,
    stalled,
    shadow: { shadow, budget: shadowBudget },
    spans: tracing,
    passed: (route, milliseconds) => {
      const labels = { route, outcome: 'passed' }
      metrics.count('idempotency_requests_total', labels)
      metrics.observe('idempotency_request_duration_seconds', labels, milliseconds / 1000)
    },
    passFailed: (method, cause) => log.warn({ method, cause }, 'an unprotected request got no answer'),
    onLoop: (method) => log.warn({ method }, 'loop detected: the upstream leads back to this proxy'),
    onBug,
    draining: () => state.draining,
  })
  const access = await openAdmin(state, {
    records,
    store,
    waiters,
    own: { isRunning: (id) => running.has(id), tell: (id) => settler.flush(id) },
    history,
    announceDrain: () => void (state.draining = true),
    recheck: new Recheck(questions),
    counters: async () => ({ since: startedAt, samples: await metrics.samples() }),
    version: VERSION,
    onAudit: auditLog(log, config.audit.file === null ? output : null),
  })
  closing.use(access)
  const health: Health = {
    draining: () => state.draining,
    started: () => state.started,
    readinessNeedsStore: config.readiness.store,
    metrics,
    store: () => healthOf(store),
  }
  const admin = config.admin.listen === null ? null : await adminServer(health, access, onBug)
  const ops = config.ops.listen === null ? null : await opsServer(health, onBug)
  for (const server of [admin, ops]) if (server !== null) closing.defer(() => closeAbruptly(server))

  return {
    log,
    state,
    metrics,
    store,
    spooled: spooled.length,
    budgets: [budget, shadowBudget],
    settler,
    waiters,
    running,
    inFlight,
    shadow,
    reconciler,
    data,
    admin,
    ops,
    closing,
  }
}

/** Where outcomes that the store does not take outlive this process, and those that an earlier one left. */
async function openOutbox(
  { service, store, limits }: Config,
  log: Logger,
): Promise<{ outbox: Outbox | null; left: readonly Left[] }> {
  if (store.spool === null) return { outbox: null, left: [] }
  try {
    return await Outbox.open({
      service,
      directory: store.spool,
      maxBytes: spoolRoom(limits.buffered),
      say: (message, detail) => log.warn(detail, message),
    })
  } catch (error) {
    throw new Error(`store.spool: ${(error as Error).message}`, { cause: error })
  }
}

async function closeAbruptly(server: Server): Promise<void> {
  const closed = closeServer(server)
  server.closeAllConnections()
  await closed
}
