import { randomInt } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { namespaceOf } from '../config/config.ts'
import type { Verifier } from '../credentials/callers.ts'
import { observer, reconcileObserver, shadowObserver } from '../observe/observer.ts'
import { Leases } from '../protect/leases.ts'
import type { WalkPorts } from '../protect/ports.ts'
import { CallerChanges, KeyChurn, Latency, RecentGrants } from '../protect/recent.ts'
import { Reclaimer } from '../protect/reclaimer.ts'
import type { Execution } from '../protect/request.ts'
import { Settler } from '../protect/settler.ts'
import { WaitingRoom } from '../protect/waiting-room.ts'
import { Control } from '../reconcile/control.ts'
import { Reconciler } from '../reconcile/reconciler.ts'
import { InFlight } from '../runtime/limits.ts'
import { RecordMap } from '../runtime/record-map.ts'
import { KeyedMutex } from '../runtime/scheduling.ts'
import { Shadow } from '../shadow/shadow.ts'
import { graceOf } from '../store/open.ts'
import { tokens } from '../store/records.ts'
import type { LeftOutcome, Outbox } from '../store/spool/outbox.ts'
import { type Base, clock } from './base.ts'
import { openIssuer, openVerifier } from './secrets.ts'
import type { OpenStore } from './store.ts'
import type { OpenUpstream } from './upstream.ts'

export type Guard = Awaited<ReturnType<typeof makeGuard>>

/** The guard, and the parts that hold outcomes. `spool`: outcomes of an earlier process. */
export async function makeGuard(
  base: Base,
  opened: OpenStore,
  up: OpenUpstream,
  { outbox, left }: { readonly outbox: Outbox | null; readonly left: readonly LeftOutcome[] },
) {
  const { config, log, metrics, closing } = base
  const { store, records, history, agreement } = opened
  const { budget, shadowBudget, queries, queryTimeout } = up
  const unresolved = reconcileObserver(metrics, log, history)
  const control = new Control({
    ...queries,
    say: unresolved.tried,
    clock,
    pause: (time) => wait(time, undefined, { ref: false }),
  })
  const counting = observer(metrics, log, history, control)
  const observing = base.tracing?.observer(counting) ?? counting
  const settler = new Settler(records, observing, outbox)
  opened.listeners.settler = settler
  closing.defer(() => outbox?.close())
  closing.defer(() => settler.close())
  settler.restore(left, (bytes) => budget.hold(bytes) ?? (() => {}))
  const leases = new Leases(
    (items) => store.renew(items),
    (error) => log.warn({ error: String(error) }, 'leases could not be renewed; retrying'),
    // After a pause between claim and sending, it may have lost the right to execute.
    () => agreement === null || clock() < agreement.sureUntil,
  )
  closing.defer(() => leases.close())
  const waiters = new WaitingRoom(records, store, config.limits.waiters)
  const running = new RecordMap<Execution>()
  const reclaimer = reclaiming(base, opened, settler, running)
  const inFlight = new InFlight(config.limits.inFlight, randomInt(2 ** 32))
  const issuer = await openIssuer(config)
  const verifier = await openVerifier(config)
  closing.defer(() => verifier?.close())
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
    verifyToken: (policy, headers) => (verifier as Verifier).verify(policy, headers),
    // Configuration requires an issuer if keys must be issued.
    checkIssued: async (key, now) => issuer?.check(key, now) ?? 'forged',
    running,
    inFlight,
    observer: observing,
    latency: new Latency(),
    budget,
    forward: base.tracing?.forward(up.forward) ?? up.forward,
    upstream: queries.upstream,
    namespace: namespaceOf(config),
    descriptors: config.grpc.descriptors,
    storeFitness: () => (config.store.acceptRisk ? 'fit' : opened.storeHealth.fitness()),
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
  readGauges(base, up, { settler, waiters, inFlight })
  return { ports, settler, waiters, running, inFlight, issuer, shadow, reconciler, reclaimer }
}

function reclaiming(
  { config, log, metrics, closing, onBug }: Base,
  { records, store, recent, listeners }: OpenStore,
  settler: Settler,
  running: RecordMap<Execution>,
): Reclaimer {
  const reclaimer = new Reclaimer({
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
  listeners.reclaimer = reclaimer
  closing.defer(() => reclaimer.close())
  return reclaimer
}

function readGauges(
  { metrics, output }: Base,
  { budget, shadowBudget }: OpenUpstream,
  { settler, waiters, inFlight }: Pick<WalkPorts, 'settler' | 'waiters' | 'inFlight'>,
): void {
  metrics.read({
    idempotency_in_flight: () => inFlight.count,
    idempotency_waiters: () => waiters.size,
    idempotency_buffered_bytes: () => budget.held + shadowBudget.held,
    idempotency_spooled: () => settler.size,
    idempotency_log_lines_dropped_total: () => output?.dropped ?? 0,
  })
}
