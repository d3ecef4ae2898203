import { randomInt } from 'node:crypto'
import type { Server } from 'node:http'
import { hostname } from 'node:os'
import { setTimeout as wait } from 'node:timers/promises'
import { openAdminAccess } from './admin/access.ts'
import { type Config, namespaceOf } from './config/config.ts'
import type { Findings } from './config/errors.ts'
import { readTokens, readUpstreamTls } from './config/files.ts'
import { type OnRotation, Rotating } from './config/rotating.ts'
import { isSharedStore } from './config/urls.ts'
import { identificationOf } from './core/identification.ts'
import { upstreamTag } from './core/reconcile/identifiers.ts'
import type { Millis } from './core/record.ts'
import { policyNamed } from './core/route.ts'
import type { Verifier } from './credentials/callers.ts'
import type { Issuer } from './credentials/issuer.ts'
import { adminServer, opsServer } from './http/admin.ts'
import { closeServer } from './http/connections.ts'
import { loopMarkOf, marking } from './http/headers.ts'
import { type Health, healthOf } from './http/health.ts'
import { Stalled } from './http/stalled.ts'
import { Traffic } from './http/traffic.ts'
import { History } from './observe/history.ts'
import { auditLog, type Logger, type LogOutput } from './observe/log.ts'
import { Metrics } from './observe/metrics.ts'
import { observer, passObserver, reconcileObserver, StoreHealth, shadowObserver } from './observe/observer.ts'
import { openTracing } from './observe/tracing.ts'
import type { WalkPorts } from './protect/ports.ts'
import { CallerChanges, KeyChurn, Latency, RecentGrants } from './protect/recent.ts'
import { Reclaimer } from './protect/reclaimer.ts'
import type { Execution } from './protect/request.ts'
import { Leases, Settler, spoolRoom } from './protect/settler.ts'
import { WaitingRoom } from './protect/waiting-room.ts'
import { Control, Recheck } from './reconcile/control.ts'
import { STATUS_QUERY_TIMEOUT } from './reconcile/ports.ts'
import { Reconciler } from './reconcile/reconciler.ts'
import { Budget, InFlight } from './runtime/limits.ts'
import type { TlsMaterial } from './runtime/pem.ts'
import { RecordMap } from './runtime/record-map.ts'
import { KeyedMutex } from './runtime/scheduling.ts'
import { Shadow } from './shadow/shadow.ts'
import { Agreement } from './store/agreement.ts'
import { all, type BreakerState, inPhase } from './store/around.ts'
import { asOne, graceOf, hasGrace, openStores, storeName } from './store/open.ts'
import { type LeftOutcome, Outbox } from './store/outbox.ts'
import { DECIDING, Lookout, Presence } from './store/phases.ts'
import { RecentWrites, Records, tokens } from './store/records.ts'
import { type NewEpoch, SEAL_ERRORS, type SealError, type Store } from './store/register.ts'
import { sealerOf } from './store/sealing.ts'
import { forwarder } from './upstream/forward.ts'
import { Habits } from './upstream/habits.ts'
import { openUpstream, type Upstream } from './upstream/pool.ts'
import { VERSION } from './version.ts'

const clock = performance.now.bind(performance)

export interface StartOptions {
  /** Claims beside replicas that identify records differently (`--accept-rescope`). */
  readonly acceptsRescope: boolean
}

/** The parts of one proxy, made but not yet listening. */
export type ProxyParts = Awaited<ReturnType<typeof compose>>

/**
 * Creates the parts, each from those before it: observers → store → upstream → guard → servers.
 *
 * @throws if the spool or the embedded store cannot be opened, or a file cannot be read.
 */
export async function compose(
  config: Config,
  log: Logger,
  output: LogOutput | null,
  { acceptsRescope }: StartOptions,
) {
  const startedAt = Date.now()
  /** State that changes while the proxy runs. */
  const state = { config, started: false, draining: false, stopping: false }
  const onBug = (error: unknown): void => log.error({ err: error }, 'internal error')
  /** Resources to close at the end, latest first. */
  const closing = new AsyncDisposableStack()

  const metrics = new Metrics(config.metrics.defaults)
  metrics.set('idempotency_config_last_reload_successful', {}, 1)
  metrics.set('idempotency_build_info', { version: VERSION, node: process.version }, 1)
  metrics.startRoutes(config)
  const { outbox, left: spooled } = await openOutbox(config, log)
  const tracing = await openTracing(config, VERSION, (found) =>
    log.warn({ found }, 'the OpenTelemetry SDK brings an @opentelemetry/api that is too old: tracing is off'),
  )

  const storeHealth = new StoreHealth(storeName(config.store.url), metrics, log)
  if (config.store.wait !== null) storeHealth.startWaits()
  let reclaimer: Reclaimer | null = null
  let settling: Settler | null = null
  let agreeing: Agreement | null = null
  // Before they exist there is nothing to rewrite, and nothing held.
  const onNewEpoch = (epoch: NewEpoch): void => {
    void agreeing?.rewrite().catch(onBug)
    void reclaimer?.begin(epoch)
  }
  const onBack = (): void => settling?.storeIsBack()
  const recent = hasGrace(config.store) ? new RecentWrites(clock) : null
  const onStore = { onNewEpoch, onBack, recent }
  const {
    presence,
    agreement,
    store: opened,
  } = await openInPhase(config, { storeHealth, ...onStore, acceptsRescope }, metrics, log)
  agreeing = agreement
  const store = tracing?.store(opened) ?? opened
  closing.defer(() => store.close())
  closing.defer(async () => void (await Promise.all([presence?.stop(), agreement?.stop()])))
  closing.defer(() => tracing?.flush())
  for (const reason of SEAL_ERRORS) metrics.count('idempotency_seal_errors_total', { reason }, 0)
  const onSealError = (reason: SealError): void => metrics.count('idempotency_seal_errors_total', { reason })
  const records = new Records(store, onSealError, recent)
  await storeHealth.watch(store, config.store.grace)
  closing.defer(() => storeHealth.stop())
  const history = new History({
    note: (id, notes) => store.history.append(id, notes),
    replica: `${hostname()}:${process.pid}`,
    onDropped: (count) => log.warn({ count }, 'history entries were dropped'),
  })
  closing.defer(() => history.close())

  const upstreams: Upstream[] = []
  const certificates = followCertificates(config, log, (next) => {
    for (const one of upstreams) one.renew(next)
  })
  if (certificates !== null) closing.use(certificates)
  const shared = {
    material: certificates?.current ?? {},
    habits: new Habits(config.upstream.keepAlive),
    mostHead: () => state.config.limits.responseHead,
  }
  const upstream = await openUpstream(config.upstream, shared)
  // A separate pool: slow uploads and unprotected streams must not make protected requests wait.
  const passing = await openUpstream(config.upstream, shared)
  upstreams.push(upstream, passing)
  closing.defer(async () => void (await Promise.allSettled(upstreams.map((one) => one.close()))))
  const stalled = new Stalled()
  const budget = new Budget(config.limits.buffered, stalled.makeRoom)
  // Separate, so that shadow mode takes no room from protected routes.
  const shadowBudget = new Budget(config.limits.buffered)
  const { idleTimeout } = config.upstream
  const forwarding = { timeout: () => state.config.upstream.timeout, idleTimeout, budget }
  const forward = forwarder(upstream.dispatcher, forwarding)

  const loop = loopMarkOf(config)
  const queryTimeout = (): Millis => Math.min(STATUS_QUERY_TIMEOUT, forwarding.timeout())
  const unresolved = reconcileObserver(metrics, log, history)
  const queries = {
    forward: marking(forwarder(upstream.dispatcher, { ...forwarding, timeout: queryTimeout }), loop),
    policyOf: (route: string) => policyNamed(state.config, route),
    upstream: upstreamTag(config.upstream.url),
    records,
    store,
  }
  const control = new Control({
    ...queries,
    say: unresolved.tried,
    clock,
    pause: (time) => wait(time, undefined, { ref: false }),
  })

  const counting = observer(metrics, log, history, control)
  const observing = tracing?.observer(counting) ?? counting
  const settler = new Settler(records, observing, outbox)
  settling = settler
  closing.defer(() => outbox?.close())
  closing.defer(() => settler.close())
  settler.restore(spooled, (bytes) => budget.hold(bytes) ?? (() => {}))
  const leases = new Leases(
    (items) => store.renew(items),
    (error) => log.warn({ error: String(error) }, 'leases could not be renewed; trying again'),
    // Paused between its claim and this, it may have lost the right to execute it.
    () => agreement === null || clock() < agreement.sureUntil,
  )
  closing.defer(() => leases.close())
  const waiters = new WaitingRoom(records, store, config.limits.waiters)
  const running = new RecordMap<Execution>()
  const reclaiming = new Reclaimer({
    records,
    store,
    settler,
    running,
    repliesWithin: config.store.timeout,
    isSafe: recent?.isSafe ?? (() => true),
    onSplit: (route, detail) => {
      metrics.count('idempotency_split_total', { route })
      log.error(detail, 'split brain: the store has lost a claim, and another owner has claimed its key')
    },
    onWritten: (written) =>
      log.warn({ records: written }, 'the store had lost records of this replica; they were written again'),
    onBug,
  })
  reclaimer = reclaiming
  closing.defer(() => reclaiming.close())
  const inFlight = new InFlight(config.limits.inFlight, randomInt(2 ** 32))
  const issuer = await openIssuer(config)
  const callers = await openVerifier(config)
  closing.defer(() => callers?.close())
  const ports: WalkPorts = {
    records,
    store,
    leases,
    settler,
    waiters,
    locks: new KeyedMutex(),
    grants: new RecentGrants(clock),
    keyChurn: new KeyChurn(clock),
    callerChanges: new CallerChanges(clock),
    verifyToken: (policy, headers) => (callers as Verifier).verify(policy, headers),
    // Configuration requires an issuer if keys must be issued.
    checkIssued: async (key, now) => issuer?.check(key, now) ?? 'forged',
    running,
    inFlight,
    observer: observing,
    latency: new Latency(),
    budget,
    forward: tracing?.forward(forward) ?? forward,
    upstream: queries.upstream,
    namespace: namespaceOf(config),
    storeFitness: () => (config.store.acceptRisk ? 'fit' : storeHealth.fitness()),
    pause: wait,
    holdAtMost: 2 * graceOf(config.store),
    newToken: tokens(),
  }
  const shadow = new Shadow({ ...ports, budget: shadowBudget }, shadowObserver(metrics, log, history))
  const reconciler = new Reconciler({
    ...queries,
    queryTimeout,
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

  const nearMissed = new Set<string>()
  const traffic = await Traffic.open({
    config,
    log,
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
        'a request matches no route, and would match this one if letter case, ;parameters or a file extension did not count: if the upstream takes them for equal, set match.case or match.parameters',
      )
    },
    onBug,
  })
  closing.defer(() => traffic.close())
  let following = followTokens(config, log)
  const adminTokens = following && {
    get current() {
      return (following as Rotating<readonly string[]>).current
    },
  }
  closing.defer(() => following?.[Symbol.dispose]())
  const access = await openAdminAccess(state, {
    tokens: adminTokens,
    records,
    store,
    waiters,
    own: {
      isRunning: (id) => running.has(id),
      tell: (id) => settler.flush(id),
      decided: reclaiming.decided,
    },
    history,
    announceDrain: (draining) => (state.draining = draining || state.stopping),
    recheck: new Recheck(queries),
    counters: async () => ({ since: startedAt, samples: await metrics.samples() }),
    version: VERSION,
    onAudit: auditLog(log, config.audit.file === null ? output : null),
  })
  closing.use(access)
  const health: Health = {
    draining: () => state.draining,
    started: () => state.started,
    readinessNeedsStore: config.readiness.store,
    conflict: () => agreement?.conflict ?? null,
    metrics,
    store: () => healthOf(store),
  }
  const admin = config.admin.listen === null ? null : adminServer(health, access, onBug)
  const ops = config.ops.listen === null ? null : opsServer(health, onBug)
  for (const server of [admin, ops]) if (server !== null) closing.defer(() => closeAbruptly(server))

  return {
    log,
    state,
    metrics,
    store,
    presence,
    agreement,
    spooled: spooled.length,
    budgets: [budget, shadowBudget],
    upstreams,
    /** Reads the tokens from another file; until it has some, those of the one before stay in force. */
    followTokensOf(next: Config): void {
      const before = following
      following = followTokens(next, log, before?.current)
      before?.[Symbol.dispose]()
    },
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
    closing,
  }
}

/**
 * It claims only while sure of its phase in a migration between stores, or that no migration has gone past it; and that no replica identifies
 * records differently.
 */
async function openInPhase(
  config: Config,
  {
    storeHealth: health,
    onNewEpoch,
    onBack,
    recent,
    acceptsRescope,
  }: StartOptions & {
    readonly storeHealth: StoreHealth
    readonly onNewEpoch: (epoch: NewEpoch) => void
    /** A store answers again. */
    readonly onBack: () => void
    readonly recent: RecentWrites | null
  },
  metrics: Metrics,
  log: Logger,
): Promise<{
  readonly store: Store
  readonly presence: Presence | Lookout | null
  readonly agreement: Agreement | null
}> {
  const { migrate, url } = config.store
  const hooks = ({ onEvent, onBreaker, onOperation, onPruned, onHeld, onWaited }: StoreHealth) => ({
    onEvent,
    onBreaker: (state: BreakerState) => {
      onBreaker(state)
      if (state === 'closed') onBack()
    },
    onOperation,
    onPruned,
    onHeld,
    onWaited,
    onNewEpoch,
    onSafe: recent?.safeBefore(),
  })
  const ofOld = migrate && hooks(new StoreHealth(`from_${storeName(migrate.from)}`, metrics, log))
  const { to, from } = await openStores(config, hooks(health), ofOld ?? undefined)
  const store = asOne({ to, from }, config)
  // Nobody else sees its records.
  if (url === 'memory:') return { store, presence: null, agreement: null }
  const presence = phaseOf(config, store, from && { from, to }, log)
  if (![url, migrate?.from ?? url].some(isSharedStore))
    return { store: inPhase(store, presence), presence, agreement: null }
  const sides =
    from === null || migrate === null ? [to] : DECIDING[migrate.phase].map((side) => ({ from, to })[side])
  const agreement = new Agreement(sides, {
    own: identificationOf(config),
    accepts: acceptsRescope,
    say: (why) =>
      why === null
        ? log.info('replicas: all that are alive identify records alike; this one claims')
        : log.warn(
            { why },
            acceptsRescope ? 'replicas: this one claims beside others' : 'replicas: nothing is claimed',
          ),
  })
  return { store: inPhase(store, all([presence, agreement])), presence, agreement }
}

/** `sides`: of a migration; null: there is none. */
function phaseOf(
  { store: { migrate } }: Config,
  store: Store,
  sides: { readonly from: Store; readonly to: Store } | null,
  log: Logger,
): Presence | Lookout {
  if (migrate === null || sides === null)
    return new Lookout(store, {
      say: (why) =>
        why === null
          ? log.info('migration: this replica may claim again')
          : log.error({ why }, 'migration: nothing is claimed'),
    })
  const { phase } = migrate
  const replica = `${hostname()}:${process.pid}`
  const say = (why: string | null): void =>
    why === null
      ? log.info({ phase }, 'migration: in phase')
      : log.error({ phase, why }, 'migration: nothing is claimed')
  return new Presence(sides, { phase, replica, say })
}

/** Null: the API is off. */
function followTokens(
  { admin: { listen, tokenFile } }: Config,
  log: Logger,
  before?: readonly string[],
): Rotating<readonly string[]> | null {
  const path = 'admin.tokenFile'
  if (listen === null || tokenFile === null) return null
  const read = (findings: Findings) => readTokens(findings, path, tokenFile)
  return new Rotating({ path, files: [tokenFile], read, onRotation: rotationLog(log) }, before)
}

/** Null: no file is named. */
function followCertificates(
  { upstream: { tls } }: Config,
  log: Logger,
  changed: (now: TlsMaterial) => void,
): Rotating<TlsMaterial> | null {
  const files = [tls.ca, tls.cert, tls.key].filter((file) => file !== null)
  if (files.length === 0) return null
  const read = (findings: Findings) => readUpstreamTls(findings, tls)
  return new Rotating({ path: 'upstream.tls', files, read, changed, onRotation: rotationLog(log) })
}

function rotationLog(log: Logger): OnRotation {
  return (path, problem) =>
    problem === null
      ? log.info({ path }, 'secret files were read again, and are in force')
      : log.warn(
          { path, problem },
          'secret files have changed and cannot be used; what they held before stays in force',
        )
}

/** Null: no issuer is configured. Signing code is loaded only if used (docs/adr/0074), as for {@link openVerifier}. */
async function openIssuer({ issuer }: Config): Promise<Issuer | null> {
  if (issuer === null) return null
  const { Issuer } = await import('./credentials/issuer.ts')
  return new Issuer(issuer.secret, issuer.ttl)
}

/** Null: no policy reads tokens, which a reload cannot change. */
async function openVerifier({ routes, defaults }: Config): Promise<Verifier | null> {
  const policies = [...routes, defaults].map(({ scope }) => scope.jwt).filter((policy) => policy !== null)
  if (policies.length === 0) return null
  const { verifier } = await import('./credentials/callers.ts')
  return verifier(policies)
}

/** Opens the spool, where outcomes survive this process, and reads those that an earlier one left. */
async function openOutbox(
  { service, store, limits }: Config,
  log: Logger,
): Promise<{ outbox: Outbox | null; left: readonly LeftOutcome[] }> {
  if (store.spool === null) return { outbox: null, left: [] }
  try {
    return await Outbox.open({
      service,
      sealer: sealerOf(store),
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
