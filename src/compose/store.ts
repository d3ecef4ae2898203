import { hostname } from 'node:os'
import { setTimeout as wait } from 'node:timers/promises'
import type { Config } from '../config/config.ts'
import { isSharedStore } from '../config/urls.ts'
import { identificationOf } from '../core/identification.ts'
import { upstreamTag } from '../core/reconcile/identifiers.ts'
import type { Millis } from '../core/record.ts'
import { History } from '../observe/history.ts'
import type { Logger } from '../observe/log.ts'
import { StoreHealth } from '../observe/observer.ts'
import type { Reclaimer } from '../protect/reclaimer.ts'
import { type Settler, spoolRoom } from '../protect/settler.ts'
import { Agreement } from '../store/agreement.ts'
import { type BreakerState, inPhase } from '../store/around.ts'
import { DECIDING, PhaseWatch, Presence } from '../store/moving/phases.ts'
import { asOne, hasGrace, openStores, storeName } from '../store/open.ts'
import { hadOtherUpstream } from '../store/other-upstream.ts'
import { RecentWrites } from '../store/recent.ts'
import { sealerOf } from '../store/record/sealing.ts'
import { Records } from '../store/records.ts'
import {
  CorruptRecord,
  type NewEpoch,
  SEAL_ERRORS,
  type SealError,
  type Store,
  StoreUnavailable,
} from '../store/register.ts'
import { workerFolder, workerFolders } from '../store/spool/folders.ts'
import { SpoolInUse } from '../store/spool/log.ts'
import { type LeftOutcome, Outbox } from '../store/spool/outbox.ts'
import { type Base, clock } from './base.ts'

/** Which of several processes of one proxy this is, from 1. */
export interface WorkerPlace {
  readonly number: number
  readonly of: number
}
/** `alone`: there are no others; `first`: it has workers, and no traffic of its own. */
export type Place = 'alone' | 'first' | WorkerPlace

export interface StartOptions {
  readonly place: Place
  /** Claims beside replicas that identify records differently (`--accept-rescope`). */
  readonly acceptsRescope: boolean
}

/** How long an earlier worker may take beyond its drain. */
const ENDS_WITHIN: Millis = 5000
const LOCK_POLL: Millis = 50

/** Called after a failover, and when the store answers again. Null: nothing to rewrite or retry yet. */
export interface StoreListeners {
  reclaimer: Reclaimer | null
  settler: Settler | null
}

/** The store with its health and agreement. */
export type OpenStore = Awaited<ReturnType<typeof openStore>>

/** @throws if the embedded store cannot be opened. */
export async function openStore(base: Base, { acceptsRescope }: Omit<StartOptions, 'place'>) {
  const { config, log, metrics, tracing, closing, onBug } = base
  const storeHealth = new StoreHealth(storeName(config.store.url), metrics, log)
  if (config.store.wait !== null) storeHealth.startWaits()
  const listeners: StoreListeners = { reclaimer: null, settler: null }
  let agreeing: Agreement | null = null
  const onNewEpoch = (epoch: NewEpoch): void => {
    void agreeing?.rewrite().catch(onBug)
    void listeners.reclaimer?.begin(epoch)
  }
  const onBack = (): void => listeners.settler?.storeIsBack()
  const recent = hasGrace(config.store) ? new RecentWrites(clock) : null
  const opened = await openInPhase(base, { storeHealth, onNewEpoch, onBack, recent, acceptsRescope })
  const { presence, agreement } = opened
  agreeing = agreement
  const store = tracing?.store(opened.store) ?? opened.store
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
  return { store, records, history, storeHealth, recent, presence, agreement, listeners }
}

interface StoreHooks extends Omit<StartOptions, 'place'> {
  readonly storeHealth: StoreHealth
  readonly onNewEpoch: (epoch: NewEpoch) => void
  /** A store answers again. */
  readonly onBack: () => void
  readonly recent: RecentWrites | null
}

/**
 * It claims only while sure of its phase in a migration between stores, or that no migration has gone past it; and that no replica identifies
 * records differently.
 */
async function openInPhase(
  { config, metrics, log }: Base,
  { storeHealth: health, onNewEpoch, onBack, recent, acceptsRescope }: StoreHooks,
): Promise<{
  readonly store: Store
  readonly presence: Presence | PhaseWatch | null
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
  // No other process sees its records.
  if (url === 'memory:') return { store, presence: null, agreement: null }
  const presence = phaseOf(config, store, from && { from, to }, log)
  if (![url, migrate?.from ?? url].some(isSharedStore)) {
    await warnOfOtherUpstream(config, to, log)
    return { store: inPhase(store, presence), presence, agreement: null }
  }
  const sides =
    from === null || migrate === null ? [to] : DECIDING[migrate.phase].map((side) => ({ from, to })[side])
  const agreement = new Agreement(sides, {
    own: identificationOf(config),
    upstream: upstreamTag(config.upstream.url),
    accepts: acceptsRescope,
    say: (why) =>
      why === null
        ? log.info('replicas: all that are alive identify records alike; this one may claim')
        : log.warn(
            { why },
            acceptsRescope ? 'replicas: this one claims beside others' : 'replicas: nothing is claimed',
          ),
    onOtherUpstream: () =>
      log.warn(
        { service: config.service },
        'replicas: another replica of this service has a different upstream.url; if that is a different API, clients may receive its responses: give each API its own `service`',
      ),
  })
  return { store: inPhase(store, presence, agreement), presence, agreement }
}

/** Two APIs started in one directory would share `idempotency.db`. */
async function warnOfOtherUpstream({ upstream, service }: Config, store: Store, log: Logger): Promise<void> {
  try {
    if (await hadOtherUpstream(store, upstreamTag(upstream.url)))
      log.warn(
        { service },
        'the last proxy of this service on this store forwarded to another upstream.url; if that is another API, clients may receive its responses: give each a `service` or a file of its own',
      )
  } catch (error) {
    // The store's health is reported elsewhere.
    if (!(error instanceof StoreUnavailable || error instanceof CorruptRecord)) throw error
  }
}

/** `sides` of a migration; null: there is none. */
function phaseOf(
  { store: { migrate } }: Config,
  store: Store,
  sides: { readonly from: Store; readonly to: Store } | null,
  log: Logger,
): Presence | PhaseWatch {
  if (migrate === null || sides === null)
    return new PhaseWatch(store, {
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

type Spooled = Awaited<ReturnType<typeof Outbox.open>>

/**
 * Opens the spool, where outcomes survive this process, and reads those that an earlier one left.
 * @throws if it cannot be opened.
 */
export async function openOutbox(
  base: Base,
  place: Place,
): Promise<{ outbox: Outbox | null; left: readonly LeftOutcome[] }> {
  const { config, log, closing } = base
  const { service, store, limits } = config
  const { spool } = store
  if (spool === null || place === 'first') return { outbox: null, left: [] }
  const open = (directory: string): Promise<Spooled> =>
    Outbox.open({
      service,
      sealer: sealerOf(store),
      directory,
      maxBytes: spoolRoom(limits.buffered),
      say: (message, detail) => log.warn(detail, message),
    })
  try {
    const own = place === 'alone' ? await open(spool) : await openFree(base, place, open)
    const left = [...own.left]
    for (const folder of await othersOf(spool, place)) {
      const found = await open(folder).catch((error: unknown) => {
        // Its process may still be ending: it writes them itself, or the next start does.
        log.warn({ folder, error: String(error) }, 'outcomes in another spool cannot be taken over now')
        return null
      })
      if (found === null) continue
      closing.defer(() => found.outbox.close())
      left.push(...found.left)
    }
    return { outbox: own.outbox, left }
  } catch (error) {
    throw new Error(`store.spool: ${(error as Error).message}`, { cause: error })
  }
}

/**
 * A worker that was killed leaves its folder to the one that replaces it. One that outlives its first process finishes in it:
 * that is waited for, so that no outcome is left behind, but not forever.
 */
async function openFree(
  { config: { store, drain }, log }: Base,
  { number, of }: WorkerPlace,
  open: (directory: string) => Promise<Spooled>,
): Promise<Spooled> {
  const spool = store.spool as string
  const until = clock() + drain.timeout + ENDS_WITHIN
  for (let folder = number, isSaid = false; ; ) {
    try {
      return await open(workerFolder(spool, folder))
    } catch (error) {
      if (!((error as Error).cause instanceof SpoolInUse)) throw error
    }
    if (clock() > until) folder += of
    else await wait(LOCK_POLL)
    if (!isSaid) log.warn({ folder: workerFolder(spool, folder) }, 'an earlier worker still uses this spool')
    isSaid = true
  }
}

/** Folders that belong to no process of this configuration: there were more workers before, or none. One process takes them. */
async function othersOf(spool: string, place: 'alone' | WorkerPlace): Promise<string[]> {
  if (place !== 'alone' && place.number > 1) return []
  const taken = place === 'alone' ? 0 : place.of
  const numbers = (await workerFolders(spool)).filter((number) => number > taken)
  const folders = numbers.map((number) => workerFolder(spool, number))
  return place === 'alone' ? folders : [spool, ...folders]
}
