import { randomInt } from 'node:crypto'
import { hostname } from 'node:os'
import { resolve } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import { openAdmin } from './admin/open.ts'
import { type Config, namespaceOf } from './config/config.ts'
import type { Loaded } from './config/load.ts'
import { upstreamTag } from './core/reconcile/identifiers.ts'
import { policyNamed } from './core/route.ts'
import { jwtPoliciesOf, verifier } from './credentials/callers.ts'
import { Issuer } from './credentials/issuer.ts'
import { adminServer, type Health, healthOf, opsServer } from './http/admin.ts'
import { dataServer } from './http/data.ts'
import { closeServer, listen } from './http/listening.ts'
import { loopMarkOf, marking } from './http/loop.ts'
import { Stalled } from './http/stalled.ts'
import { breakerObserver } from './observe/breaker.ts'
import { countersOf } from './observe/counters.ts'
import { History } from './observe/history.ts'
import { initSeries } from './observe/init-series.ts'
import { auditLog, type Logger } from './observe/log.ts'
import type { LogOutput } from './observe/log-output.ts'
import { Metrics } from './observe/metrics.ts'
import { observer, reconcileObserver, shadowObserver } from './observe/observer.ts'
import { type StoreGrade, watchStoreGrade } from './observe/store-grade.ts'
import { withMetrics } from './observe/store-metrics.ts'
import { openTracing } from './observe/tracing.ts'
import { ReplayGrants } from './protect/authorize.ts'
import { unknownBecause } from './protect/classify.ts'
import { KeyChurn } from './protect/key-churn.ts'
import { Latency } from './protect/latency.ts'
import { Leases } from './protect/leases.ts'
import type { Ports } from './protect/ports.ts'
import type { Execution } from './protect/request.ts'
import { Settler, spoolRoom } from './protect/settler.ts'
import { WaitingRoom } from './protect/waiting-room.ts'
import { Recheck } from './reconcile/control.ts'
import { QUESTION_TIMEOUT } from './reconcile/ports.ts'
import { Reconciler } from './reconcile/reconciler.ts'
import { reloader } from './reload.ts'
import { KeyedMutex } from './runtime/keyed-mutex.ts'
import { Budget, InFlight } from './runtime/limits.ts'
import { RecordMap } from './runtime/record-map.ts'
import { Shadow } from './shadow/shadow.ts'
import { nameOf, openStore } from './store/open.ts'
import { type Left, Outbox } from './store/outbox.ts'
import { Records } from './store/records.ts'
import { tokens } from './store/tokens.ts'
import { forwarder } from './upstream/forward.ts'
import { openUpstream } from './upstream/pool.ts'
import { VERSION } from './version.ts'

export interface Proxy {
  readonly url: string
  readonly adminUrl: string | null
  readonly opsUrl: string | null
  /** Puts what was read in force, where it is valid and needs no restart (contract §10); says why not in the log. */
  reload(loaded: Loaded): void
  /** Announces, serves on for `drain.delay`, then ends: running calls finish and are stored (contract §11). */
  drain(): Promise<void>
}

/**
 * Composes and starts a proxy: store → upstream → servers → listen.
 * @throws where the spool or the embedded store cannot be opened, a TLS file cannot be read, or an address cannot be listened on.
 */
export async function start(config: Config, log: Logger, output: LogOutput | null = null): Promise<Proxy> {
  const startedAt = Date.now()
  const inForce = { config }
  const onBug = (error: unknown): void => log.error({ err: error }, 'internal error')
  for (const warning of config.warnings) log.warn(warning)
  const stalled = new Stalled()
  const budget = new Budget(config.limits.buffered, stalled.makeRoom)
  // Shadow mode takes no room from the routes that protect.
  const overheard = new Budget(config.limits.buffered)
  const inFlight = new InFlight(randomInt(2 ** 32))
  const running = new RecordMap<Execution>()
  const metrics = new Metrics(
    {
      idempotency_in_flight: () => inFlight.count,
      idempotency_waiters: () => waiters.size,
      idempotency_buffered_bytes: () => budget.held + overheard.held,
      idempotency_spooled: () => settler.size,
      idempotency_log_lines_dropped_total: () => output?.dropped ?? 0,
    },
    config.metrics.defaults,
  )
  metrics.set('idempotency_config_last_reload_successful', {}, 1)
  metrics.set('idempotency_build_info', { version: VERSION, node: process.version }, 1)
  const { outbox, left: unwritten } = await openOutbox(config, log)
  const storeName = nameOf(config.store.url)
  let fitness: StoreGrade | null = null
  const tracing = await openTracing(config, VERSION, (found) =>
    log.warn(
      { found },
      'the OpenTelemetry SDK brings an @opentelemetry/api that is too old: no spans are made',
    ),
  )
  const untraced = withMetrics(
    await openStore(config, {
      onEvent: (kind, detail) => {
        log[kind === 'connected' ? 'info' : 'warn']({ store: storeName, detail }, `store ${kind}`)
        // Another server may answer to the name now, or the same one with other settings.
        if (kind === 'connected') fitness?.lookAgain()
      },
      onBreaker: breakerObserver(storeName, metrics, log),
      onPruned: (records) => metrics.count('idempotency_pruned_total', { store: storeName }, records),
    }),
    metrics,
  )
  const store = tracing?.store(untraced) ?? untraced
  metrics.set('idempotency_breaker_state', { store: store.name }, 0)
  const records = new Records(store)
  const watched = await watchStoreGrade(store, metrics, log)
  fitness = watched

  const upstream = openUpstream(config.upstream)
  // Connections of its own: slow uploads and streams that nobody protects must not keep protected requests waiting.
  const passing = openUpstream(config.upstream)
  const history = new History({
    note: (id, notes) => store.history.append(id, notes),
    replica: `${hostname()}:${process.pid}`,
    onDropped: (count) => log.warn({ count }, 'entries of records’ histories were lost'),
  })
  const told = observer(metrics, log, history, (route, id) => reconciler.completed(route, id))
  const events = tracing?.observer(told) ?? told
  const settler = new Settler(records, events, outbox)
  settler.restore(unwritten, (bytes) => budget.hold(bytes) ?? (() => {}))
  const leases = new Leases(
    (items) => store.renew(items),
    (error) => log.warn({ error: String(error) }, 'leases could not be renewed; trying again'),
  )
  const waiters = new WaitingRoom(records, store, config.limits.waiters)
  const issuer = config.issuer === null ? null : new Issuer(config.issuer.secret, config.issuer.ttl)
  const callers = verifier(jwtPoliciesOf([...config.routes, config.defaults]))
  const forwarding = { ...config.upstream, budget, servername: upstream.tls.servername ?? null }
  const forward = forwarder(upstream.pool, forwarding)
  const ports: Ports = {
    records,
    store,
    leases,
    settler,
    waiters,
    turns: new KeyedMutex(),
    grants: new ReplayGrants(() => performance.now()),
    regenerated: new KeyChurn(() => performance.now()),
    verifyToken: (policy, headers) => callers.verify(policy, headers),
    // Configuration demands an issuer where keys must be issued.
    checkIssued: async (key, now) => issuer?.check(key, now) ?? 'forged',
    running,
    inFlight,
    observer: events,
    latency: new Latency(),
    budget,
    forward: tracing?.forward(forward) ?? forward,
    upstream: upstreamTag(config.upstream.url),
    namespace: namespaceOf(config),
    unfitForStrict: () => watched.mayEvict() && !config.store.acceptRisk,
    pause: wait,
    newToken: tokens(),
    get maxInFlight() {
      return inForce.config.limits.inFlight
    },
  }

  initSeries(metrics, config)
  const questionTimeout = Math.min(QUESTION_TIMEOUT, config.upstream.timeout)
  const loop = loopMarkOf(config)
  const asking = {
    forward: marking(forwarder(upstream.pool, { ...forwarding, timeout: questionTimeout }), loop),
    policyOf: (route: string) => policyNamed(inForce.config, route),
  }
  const reconciler = new Reconciler({
    ...asking,
    records,
    store,
    upstream: ports.upstream,
    questionTimeout,
    isOwn: (id) => running.has(id) || settler.held(id) !== null,
    tell: (id) => waiters.tell(id, null),
    observer: reconcileObserver(metrics, log, history),
    random: Math.random,
  })
  const shadow = new Shadow(ports, shadowObserver(metrics, log, history))
  let draining = false
  let started = false
  const health: Health = {
    draining: () => draining,
    started: () => started,
    readinessNeedsStore: config.readiness.store,
    metrics,
    store: () => healthOf(store),
  }
  const data = await dataServer({
    inForce,
    ports,
    upstream: passing,
    loop,
    issuer,
    stalled,
    shadow: { shadow, budget: overheard },
    spans: tracing,
    passed: (route, milliseconds) => {
      metrics.count('idempotency_requests_total', { route, outcome: 'passed' })
      metrics.observe(
        'idempotency_request_duration_seconds',
        { route, outcome: 'passed' },
        milliseconds / 1000,
      )
    },
    passFailed: (method, cause) =>
      log.warn({ method, cause }, 'a request that is not protected got no answer'),
    onLoop: (method) => log.warn({ method }, 'a request came round: the upstream leads back to this proxy'),
    onBug,
    draining: () => draining,
  })
  const door = await openAdmin(inForce, {
    records,
    store,
    waiters,
    own: { isRunning: (id) => running.has(id), tell: (id) => settler.flush(id) },
    history,
    announceDrain: () => void (draining = true),
    recheck: new Recheck(asking),
    counters: async () => ({ since: startedAt, samples: await countersOf(metrics) }),
    version: VERSION,
    onAudit: auditLog(log, config.audit.file === null ? output : null),
    onBug,
  })
  const admin = config.admin.listen === null ? null : adminServer(health, door, onBug)
  const ops = config.ops.listen === null ? null : opsServer(health, onBug)
  const closeAll = async (): Promise<void> => {
    leases.close()
    watched.stop()
    await settler.close()
    await outbox?.close()
    for (const server of [admin, ops]) {
      if (server === null) continue
      const closed = closeServer(server)
      server.closeAllConnections()
      await closed
    }
    await Promise.allSettled([upstream.pool.destroy(), passing.pool.destroy(), callers.close()])
    await history.close()
    await door?.[Symbol.asyncDispose]()
    await tracing?.flush()
    await store.close()
  }
  if (unwritten.length > 0) {
    log.warn(
      { outcomes: unwritten.length },
      'outcomes of an earlier process are in the spool; they are held again',
    )
    // What the store takes now is not answered from here; while it is down, retries are.
    await Promise.race([settler.flush(), wait(WRITE_FIRST, undefined, { ref: false })])
  }
  let url: string
  let adminUrl: string | null
  let opsUrl: string | null
  try {
    adminUrl = admin && config.admin.listen && (await listen(admin, 'admin.listen', config.admin.listen))
    opsUrl = ops && config.ops.listen && (await listen(ops, 'ops.listen', config.ops.listen))
    url = await listen(data, 'listen', config.listen)
  } catch (error) {
    await closeServer(data)
    await closeAll()
    throw error
  }
  started = true
  reconciler.start(config)
  log.info(
    {
      url,
      admin: adminUrl,
      ops: opsUrl,
      store: store.name,
      ...(store.name === 'sqlite' ? { file: resolve(config.store.url.slice('sqlite:'.length)) } : {}),
      service: config.service,
      upstream: config.upstream.url,
      version: VERSION,
    },
    'listening',
  )

  let ending: Promise<void> | null = null
  const end = async (): Promise<void> => {
    draining = true
    const reconciled = reconciler.stop()
    log.info({ inFlight: inFlight.count, unsettled: settler.size }, 'draining')
    await wait(config.drain.delay)
    const deadline = performance.now() + config.drain.timeout
    const left = (): number => Math.max(0, deadline - performance.now())
    waiters.drain()
    data.endConnections()
    const closed = closeServer(data)
    const busy = (): boolean =>
      data.unanswered > 0 || inFlight.count + shadow.size > 0 || running.size > 0 || settler.size > 0
    while (busy() && left() > 0) {
      if (settler.size > 0 && running.size === 0) await settler.flush()
      data.closeIdleConnections()
      await wait(Math.min(DRAIN_LOOK, left()))
    }
    // Their outcome will not be seen: said now, so that nobody waits for the lease.
    await Promise.allSettled(
      [...running].map(([, run]) =>
        settler.settle(
          run,
          unknownBecause('the proxy was stopped before the upstream answered', null),
          () => {},
        ),
      ),
    )
    // Who waits for a run elsewhere is answered that it is still running, and that leaves before the connections end.
    if (waiters.size > 0) {
      waiters.close()
      await wait(DRAIN_LOOK)
    }
    shadow.close()
    data.closeAllConnections()
    await closed
    // A question that is cut off is asked again by another replica.
    await Promise.race([reconciled, wait(left(), undefined, { ref: false })])
    await closeAll()
    log.info('stopped')
  }
  const reload = reloader(log, metrics, inForce, (config) => {
    const { limits } = config
    reconciler.check(config)
    initSeries(metrics, config)
    budget.resize(limits.buffered)
    overheard.resize(limits.buffered)
    waiters.resize(limits.waiters)
  })
  return { url, adminUrl, opsUrl, reload, drain: () => (ending ??= end()) }
}

/** How long what an earlier process left may keep the start waiting, where there is much of it. */
const WRITE_FIRST = 2000

type OpenedOutbox = { outbox: Outbox | null; left: readonly Left[] }

/** Where outcomes that the store does not take outlive this process, and those of an earlier one. */
async function openOutbox({ service, store, limits }: Config, log: Logger): Promise<OpenedOutbox> {
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

/** How often the drain looks whether everything has finished. */
const DRAIN_LOOK = 20
