import type { RoutePolicy } from '../../src/core/policy.ts'
import { drain } from '../../src/drain.ts'
import { guard, newProgress } from '../../src/protect/guard.ts'
import { Leases } from '../../src/protect/leases.ts'
import type { WalkPorts } from '../../src/protect/ports.ts'
import { CallerChanges, KeyChurn, Latency, RecentGrants } from '../../src/protect/recent.ts'
import { Reclaimer } from '../../src/protect/reclaimer.ts'
import {
  type Answer,
  type Execution,
  type Observer,
  type Problem,
  type ProtectedRequest,
} from '../../src/protect/request.ts'
import { Settler } from '../../src/protect/settler.ts'
import { WaitingRoom } from '../../src/protect/waiting-room.ts'
import { Control } from '../../src/reconcile/control.ts'
import { Reconciler } from '../../src/reconcile/reconciler.ts'
import { Budget, InFlight } from '../../src/runtime/limits.ts'
import { RecordMap } from '../../src/runtime/record-map.ts'
import { KeyedMutex } from '../../src/runtime/scheduling.ts'
import { Shadow } from '../../src/shadow/shadow.ts'
import { inPhase } from '../../src/store/around.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { PhaseConflict, PhaseWatch, Presence } from '../../src/store/moving/phases.ts'
import { RecentWrites } from '../../src/store/recent.ts'
import { Records } from '../../src/store/records.ts'
import type { Store } from '../../src/store/register.ts'
import { Safety } from '../../src/store/safety.ts'
import { decodeEntry, encodeEntry, type LeftOutcome, type Outbox } from '../../src/store/spool/outbox.ts'
import type { Forwarded, TappedExchange } from '../../src/upstream/port.ts'
import { Bytes } from '../protect/harness.ts'
import { type Judge, nameOf } from './judge.ts'
import {
  DRAIN,
  GRACE,
  QUERY_TIMEOUT,
  type Settings,
  STORE_TIMEOUT,
  type Stage,
  type Wish,
} from './scenario.ts'
import type { Owner, Scheduler } from './scheduler.ts'
import type { SimulatedStore } from './store.ts'
import type { SimulatedUpstream } from './upstream.ts'

const SERVICE = 'payments'
const PATH = '/v1/payments'
const UPSTREAM = 'upstream'

/** What the settler says when an outcome is in memory alone, or on its way to the spool. */
const HELD = 'the store did not accept an outcome; it is held and retried'
const LOST = 'an outcome could not be stored and is lost'
const UNSPOOLED = 'an outcome could not be spooled; it is held in memory only'
/** What shadow mode says when it gives up. */
const UNMERGED = 'the outcomes of forwarded duplicates could not be recorded'

export interface World {
  readonly scheduler: Scheduler
  readonly judge: Judge
  readonly store: SimulatedStore
  /** That the fleet moves to; null: it stays. */
  readonly young: SimulatedStore | null
  readonly upstream: SimulatedUpstream
  /** The configuration file as it is now. */
  readonly file: () => Settings
  readonly stage: () => Stage
  readonly mayFailOver: boolean
  /** It must not run in its phase: it ends, and is started again. */
  readonly onConflict: (replica: Replica) => void
}

/** What a process wrote to disk, which outlives it. */
export type Disk = Set<{ readonly bytes: Buffer; isWritten: boolean }>

/** One process, from its start to its end, wired as compose.ts does it. Made by an event of its own, so that its timers are its own. */
export class Replica implements Owner {
  readonly name: string
  readonly rate: number
  readonly began: number
  isDead = false
  stalledUntil = 0
  readonly bytes = new Bytes()
  readonly #world: World
  readonly #disk: Disk | null
  readonly #budget = new Budget(2 ** 26)
  #ports: WalkPorts | null = null
  #reconciler: Reconciler | null = null
  #shadow: Shadow | null = null
  /** Shadow mode has given up on an outcome. */
  hasGivenUp = false
  settings: Settings
  /** Requests that have no answer yet. */
  #unanswered = 0
  /** It takes no more than what comes before `drain.delay` is over. */
  isDraining = false
  /** As whom it knows a store, and as whom the store is when it has written again what it knew. */
  readonly #since = new Map<SimulatedStore, number>()
  readonly hasReclaimedSince = new Map<SimulatedStore, number>()
  readonly stage: Stage
  /** It serves nothing before it knows that it may run in its phase. */
  isEntering: boolean

  /** `disk` null: no spool. */
  constructor(name: string, world: World, disk: Disk | null) {
    const { random } = world.scheduler
    this.name = name
    this.rate = random.between(0.97, 1.03)
    this.began = random.between(0, 1_000_000)
    this.#world = world
    this.#disk = disk
    this.settings = world.file()
    this.stage = world.stage()
    this.isEntering = world.young !== null
  }

  /** As reload.ts does it. */
  reload(settings: Settings): void {
    this.settings = settings
    if (this.#ports === null) return
    const { inFlight, waiters } = this.#ports
    this.#reconciler?.check(routesOf(settings))
    inFlight.resize(settings.inFlight)
    waiters.resize(settings.waiters)
  }

  start(): void {
    const { scheduler, judge, upstream: reached } = this.#world
    const { settings } = this
    const { store, presence, parts } = this.#openStore()
    const recent = this.#world.mayFailOver ? new RecentWrites(() => performance.now()) : null
    const records = new Records(store, () => {}, recent)
    const forward = reached.forward(this, this.bytes)
    const nothing = (): void => {}
    const policyOf = (name: string): RoutePolicy | null => {
      const { policy } = this.settings
      return name === policy.name ? policy : null
    }
    const control = new Control({
      forward,
      policyOf,
      upstream: UPSTREAM,
      records,
      store,
      say: nothing,
      clock: () => performance.now(),
      pause,
    })
    const observer: Observer = {
      answered: nothing,
      claimed: nothing,
      began: nothing,
      completed: (route, _, id) => {
        if (control.routes.has(route)) control.completed(route, id)
      },
      prevented: nothing,
      retryAge: nothing,
      leaseExpired: nothing,
      leaseUse: nothing,
      regenerated: nothing,
      callerChanged: nothing,
      trouble: (message, detail) => {
        const about = this.#about(detail['record'])
        scheduler.tell(this.name, message, about)
        if (about !== null && message === HELD) judge.of(about).deferredBy.add(this)
        if (about !== null && message === UNSPOOLED) judge.of(about).unspooledBy.add(this)
        if (message === UNMERGED) this.hasGivenUp = true
        if (message === LOST) judge.losesOutcome(this)
        if (message.startsWith('internal error')) judge.wrong(`${message}: ${String(detail['error'])}`, null)
      },
    }
    const settler = new Settler(
      records,
      observer,
      this.#disk === null ? null : outbox(this.#disk, this, this.#world),
    )
    if (this.#disk !== null)
      settler.restore(leftOn(this.#disk), (bytes) => this.#budget.hold(bytes) ?? nothing)
    const waiters = new WaitingRoom(records, store, settings.waiters)
    const running = new RecordMap<Execution>()
    this.#ports = {
      records,
      store,
      leases: new Leases((items) => store.renew(items), nothing),
      settler,
      waiters,
      locks: new KeyedMutex(),
      grants: new RecentGrants(() => performance.now()),
      keyChurn: new KeyChurn(() => performance.now()),
      callerChanges: new CallerChanges(() => performance.now()),
      verifyToken: async () => ({ kind: 'absent' }),
      checkIssued: async () => 'valid',
      running,
      inFlight: new InFlight(settings.inFlight, 1),
      observer,
      latency: new Latency(),
      budget: this.#budget,
      forward,
      upstream: UPSTREAM,
      namespace: { service: SERVICE, secret: null },
      descriptors: null,
      storeFitness: () => 'fit',
      pause,
      holdAtMost: 2 * GRACE,
      newToken: () => scheduler.random.bytes(16),
    }
    this.#shadow = new Shadow(this.#ports, nothing)
    const reconciler = new Reconciler({
      forward,
      policyOf,
      upstream: UPSTREAM,
      records,
      store,
      queryTimeout: () => QUERY_TIMEOUT,
      control,
      isOwn: (id) => running.has(id) || settler.held(id) !== null,
      wake: (id) => waiters.tell(id, null),
      observer: {
        leaseExpired: nothing,
        reconciled: nothing,
        expiring: nothing,
        trouble: observer.trouble,
        counted: nothing,
        tried: nothing,
      },
      random: scheduler.random.next,
    })
    this.#reconciler = reconciler
    const reclaimer = new Reclaimer({
      records,
      store,
      settler,
      running,
      repliesWithin: STORE_TIMEOUT,
      isSafe: recent?.isSafe ?? (() => true),
      onBug: (bug) => judge.wrong(`internal error: ${String(bug)}`, null),
      onSplit: (_route, { record }) => scheduler.tell(this.name, 'SPLIT', this.#about(record)),
      onWritten: (count) => scheduler.tell(this.name, `writes ${count} record(s) again`),
    })
    if (this.#world.mayFailOver)
      for (const part of parts) {
        const safety = new Safety(1, recent?.safeBefore() ?? nothing)
        const look = async (): Promise<void> => {
          const asked = performance.now()
          const { left, since } = await part.look(this)
          const isSame = since === this.#since.get(part)
          safety.checked([0], asked, () => isSame)
          if (isSame) return
          this.#since.set(part, since)
          await reclaimer.begin({ left, concerns: () => true })
          this.hasReclaimedSince.set(part, since)
        }
        // As `Epochs` does it: what fails is looked at again soon.
        const looking = (): void => void look().catch(nothing)
        looking()
        setInterval(looking, GRACE / 4)
      }
    if (presence === null) return reconciler.start(routesOf(settings))
    presence.enter().then(
      () => {
        this.isEntering = false
        reconciler.start(routesOf(this.settings))
      },
      (error: Error) => {
        if (!(error instanceof PhaseConflict)) return judge.wrong(`internal error: ${error.stack}`, null)
        scheduler.tell(this.name, `MUST NOT START: ${error.message}`)
        this.#world.onConflict(this)
      },
    )
  }

  /** As compose.ts does it, by the stage of the file. */
  #openStore(): {
    readonly store: Store
    readonly presence: Presence | PhaseWatch | null
    readonly parts: readonly SimulatedStore[]
  } {
    const { store: old, young, scheduler } = this.#world
    const from = old.wire(this)
    if (young === null) return { store: from, presence: null, parts: [old] }
    const say = (why: string | null): void => scheduler.tell(this.name, why ?? 'may claim')
    const { stage } = this
    if (stage === 'before') {
      const lookout = new PhaseWatch(from, { say })
      return { store: inPhase(from, lookout), presence: lookout, parts: [old] }
    }
    const to = young.wire(this)
    const presence = new Presence({ from, to }, { phase: stage, replica: this.name, say })
    return { store: inPhase(migrating(from, to, stage), presence), presence, parts: [old, young] }
  }

  /** Holds an outcome that the store has not taken, or still waits for one. */
  get isBusy(): boolean {
    const ports = this.#ports
    return ports !== null && ports.settler.size + ports.inFlight.count + (this.#shadow?.size ?? 0) > 0
  }

  /** What it has not let go of although nothing is left to do; null: nothing. */
  leak(): string | null {
    const { leases, waiters, budget } = this.#ports as WalkPorts
    const held = {
      leases: leases.size,
      waiters: waiters.size,
      budget: budget.held,
      bytes: this.bytes.held,
      observed: this.#shadow?.size,
    }
    const left = Object.entries(held).filter(([, count]) => count !== 0)
    return left.length === 0 ? null : left.map(([what, count]) => `${count} ${what}`).join(', ')
  }

  send(
    wish: Wish,
    client: { readonly isGone: () => boolean; onGone(left: () => void): () => void },
  ): Promise<Answer> {
    const { judge } = this.#world
    const { policy } = this.settings
    const headers = ['Idempotency-Key', wish.key, 'Authorization', wish.caller]
    const progress = newProgress()
    const request: ProtectedRequest = {
      certificate: null,
      route: policy,
      method: 'POST',
      target: PATH,
      path: PATH,
      query: '',
      headers,
      protocol: null,
      client: '127.0.0.1',
      traceId: null,
      span: undefined,
      readBody: () => {
        const body = bodyOf(wish)
        return { kind: 'body', body, release: this.bytes.take(body.length) }
      },
      host: null,
      progress,
      statusLink: [],
      upstreamHeaders: (attempt) =>
        attempt === null
          ? [...headers]
          : [
              ...headers,
              'X-Fence',
              String(attempt.fence),
              'X-On-Response-Lost',
              policy.onResponseLost,
              'Idempotency-Record',
              attempt.id,
            ],
      clientGone: client.isGone,
      onGone: client.onGone,
    }
    this.#unanswered++
    if (policy.mode === 'shadow') return this.#pass(wish, request).finally(() => this.#unanswered--)
    const answer = guard(this.#ports as WalkPorts, request).finally(() => this.#unanswered--)
    // Its walk has gone as far as the store.
    if (progress.id !== null) judge.isSentAs(progress.id, wish)
    return answer
  }

  /** Forwarded and observed, as http/protected.ts does it: the client has what the upstream answers to this request. */
  async #pass(wish: Wish, request: ProtectedRequest): Promise<Answer> {
    const { judge, scheduler, upstream } = this.#world
    const shadow = this.#shadow as Shadow
    const known = judge.of(nameOf(wish))
    known.payloads.add(wish.payload)
    const { promise: ended, resolve } = Promise.withResolvers<Forwarded>()
    let over = !shadow.enter(request)
    const tap: TappedExchange = {
      ended,
      get over() {
        return over
      },
      ignore: () => void hear({ proof: 'unknown', reason: 'ignored', timedOut: false, status: null }),
    }
    /** Whether it is observed. */
    const hear = (result: Forwarded): boolean => {
      if (over) return false
      over = result.proof !== 'live'
      resolve(result)
      return true
    }
    if (!over) {
      scheduler.after(0, this, 'shadow mode observes', () => {
        void shadow.observe({ ...request, clientGone: () => false, onGone: () => () => {} }, tap)
      })
      // It has gone as far as the store by then.
      scheduler.after(0.01, this, 'shadow mode asks', () => {
        const { id } = request.progress
        if (id !== null) judge.isSentAs(id, wish)
      })
    }
    const { method, target, route } = request
    const result = await upstream.forward(
      this,
      this.bytes,
    )({
      method,
      target,
      headers: request.upstreamHeaders(null),
      body: bodyOf(wish),
      responseLimit: route.limits.response,
    })
    const answer = passed(result)
    const isObserved = hear(result)
    if (!isObserved && result.proof === 'responded') result.release()
    if (result.proof === 'live')
      void result.live.done.then(() => {
        over = true
      })
    if (isObserved && mayBeDone(result)) known.observedBy.add(this)
    return answer
  }

  /** Ends as main.ts does it. Resolves with what it has given up although there was time. */
  async drain(): Promise<string | null> {
    const { settler, waiters, running, inFlight, leases } = this.#ports as WalkPorts
    const unanswered = (): number => this.#unanswered
    this.isDraining = true
    const began = performance.now()
    let cutOff = 0
    const parts = {
      log: { info() {} },
      state: { config: { drain: DRAIN }, draining: false },
      settler,
      waiters,
      running,
      inFlight,
      shadow: this.#shadow,
      reconciler: this.#reconciler,
      data: {
        get unanswered() {
          return unanswered()
        },
        endConnections() {},
        awaiting: 0,
        async closeListener() {},
        close: (done: () => void) => done(),
        closeIdleConnections() {},
        async closeIdle() {},
        closeAllConnections() {
          cutOff = unanswered()
        },
      },
      closing: {
        async disposeAsync() {
          leases.close()
          await settler.close()
        },
      },
    }
    await drain(parts as unknown as Parameters<typeof drain>[0])
    if (performance.now() - began >= DRAIN.timeout) return null
    if (cutOff > 0) return `${cutOff} request(s) without an answer`
    return settler.size > 0 ? `${settler.size} outcome(s) that the store has not taken` : null
  }

  /** Whether it holds an outcome that the store has not taken. */
  get holdsOutcomes(): boolean {
    return (this.#ports?.settler.size ?? 0) > 0
  }

  #about(short: unknown): string | null {
    for (const [id, name] of this.#world.judge.names) if (id.startsWith(String(short))) return name
    return null
  }
}

function routesOf({ policy }: Settings): Parameters<Reconciler['start']>[0] {
  return { routes: [policy], defaults: { ...policy, name: 'default', reconcile: null } } as never
}

function bodyOf({ caller, payload }: Wish): Buffer {
  return Buffer.from(JSON.stringify({ caller, payload }))
}

/** Whether the upstream may have done it, by what it answered, or did not. */
function mayBeDone(result: Forwarded): boolean {
  if (result.proof !== 'responded') return result.proof !== 'not_sent'
  return result.response.status !== 429 && result.declaredOutcome === null
}

/** What the client of a request hears that is not protected. */
function passed(result: Forwarded): Answer {
  const facts = { outcome: null }
  switch (result.proof) {
    case 'responded':
      return {
        kind: 'response',
        response: result.response,
        replayed: false,
        proxyHeaders: [],
        release() {},
        facts,
      }
    case 'live':
      return { kind: 'live', live: result.live, proxyHeaders: [], facts }
    case 'not_sent':
    case 'unknown': {
      const code = result.proof === 'not_sent' ? 'upstream_unreachable' : 'upstream_failed'
      return {
        kind: 'problem',
        refusal: { status: 502, code } as Problem['refusal'],
        proxyHeaders: [],
        facts,
      }
    }
  }
}

function pause(time: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, time))
}

/** A disk that takes its time, and keeps what it has said it keeps. */
function outbox(disk: Disk, by: Owner, { scheduler, store }: World): Outbox {
  const port: Pick<Outbox, 'keep'> = {
    keep: (pending) => {
      const entry = { bytes: encodeEntry(pending, SERVICE, null), isWritten: false }
      disk.add(entry)
      store.onCall(by, 10)
      const done = new Promise<'kept'>((resolve) => {
        scheduler.after(
          scheduler.random.between(0.1, scheduler.random.pick([5, 30, 400])),
          by,
          'disk',
          () => {
            entry.isWritten = true
            resolve('kept')
          },
        )
      })
      return { done, drop: () => void disk.delete(entry) }
    },
  }
  return port as Outbox
}

function leftOn(disk: Disk): LeftOutcome[] {
  for (const entry of disk) if (!entry.isWritten) disk.delete(entry)
  return [...disk].map((entry) => {
    const decoded = decodeEntry(entry.bytes, SERVICE, null)
    if (decoded.kind !== 'own') throw new Error(`the spool has an entry that is ${decoded.kind}`)
    return {
      unsettled: decoded.unsettled,
      kept: { done: Promise.resolve('kept'), drop: () => void disk.delete(entry) },
    }
  })
}
