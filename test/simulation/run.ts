import { type Millis, type RecordId, readAt } from '../../src/core/record.ts'
import { outcomeSpans, resolvedDraft } from '../../src/core/settle.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { type Seen, seen } from '../protect/harness.ts'
import { inSimulation } from './globals.ts'
import { type Broken, isBodyOver, isTakenOut, Judge, nameOf } from './judge.ts'
import { type Disk, Replica, type World } from './replica.ts'
import {
  AFTER,
  CALM,
  healedAt,
  type Incident,
  LEASE,
  MAX_TTL_BODY,
  PATIENCE,
  policiesOf,
  type Reload,
  type Rollout,
  type Scenario,
  type Settings,
  type Side,
  type Stage,
  scenarioOf,
  type Wish,
} from './scenario.ts'
import { type Line, Random, Scheduler, WORLD } from './scheduler.ts'
import { SimulatedStore } from './store.ts'
import { SimulatedUpstream } from './upstream.ts'

/** By then a response that is over has been taken out. */
const SWEPT = 15_000

export interface Result {
  readonly seed: number
  /** Of everything that happened. */
  readonly hash: number
  readonly events: number
  readonly executions: number
  readonly answers: number
  readonly broken: Broken | null
  readonly scenario: Scenario
  /** Empty unless asked for. */
  readonly lines: readonly Line[]
}

/** One run of everything, from the first request until nothing moves any more. The same seed is the same run. */
export function simulate(seed: number, isTold = false): Result {
  const scheduler = new Scheduler(seed, isTold)
  return inSimulation(scheduler, () => new Simulation(seed, scheduler).run())
}

class Simulation {
  readonly #seed: number
  readonly #scheduler: Scheduler
  readonly #scenario: Scenario
  readonly #world: World
  readonly #replicas: Replica[] = []
  readonly #disks: (Disk | null)[]
  /** What the configuration file says now. */
  #file: Settings
  #stage: Stage
  /** Requests under way, of clients that are still there. */
  readonly #open = new Set<Exchange>()
  #clients = 0
  #answers = 0
  #isHealed = false
  #isOver = false

  constructor(seed: number, scheduler: Scheduler) {
    this.#seed = seed
    this.#scheduler = scheduler
    const scenario = scenarioOf(
      scheduler.random,
      new Random(~seed),
      new Random(seed ^ 0x5bd1e995),
      new Random(seed ^ 0x27d4eb2f),
      new Random(seed ^ 0x165667b1),
      new Random(seed ^ 0x2545f491),
      new Random(seed ^ 0x9e3779b1),
      new Random(seed ^ 0x6ff681f5),
    )
    this.#scenario = scenario
    this.#file = scenario.first
    this.#stage = scenario.move?.first ?? 'before'
    const isAsked = policiesOf(scenario).some(({ reconcile }) => reconcile !== null)
    const judge = new Judge(scheduler, scenario)
    this.#world = {
      scheduler,
      judge,
      store: new SimulatedStore(scheduler, judge, scenario.weather),
      young:
        scenario.move === null ? null : new SimulatedStore(scheduler, judge, scenario.weather, 'new store'),
      upstream: new SimulatedUpstream(scheduler, judge, scenario.weather, isAsked ? scenario.arrival : null),
      file: () => this.#file,
      stage: () => this.#stage,
      mayFailOver: scenario.incidents.some(({ kind }) => kind === 'failover'),
      onConflict: (replica) => {
        replica.isDead = true
        scheduler.after(scheduler.random.between(500, 3_000), WORLD, 'a restart', () =>
          this.#start(this.#replicas.indexOf(replica)),
        )
      },
    }
    const { young } = this.#world
    if (young !== null) young.skew = scenario.move?.skew ?? 0
    judge.livesElsewhere = (...claim) => this.#livesElsewhere(...claim)
    this.#disks = Array.from({ length: scenario.replicas }, () => (scenario.hasSpool ? new Set() : null))
  }

  run(): Result {
    const { wishes, incidents, replicas } = this.#scenario
    for (let n = 0; n < replicas; n++) this.#start(n)
    for (const wish of wishes) {
      this.#clients++
      this.#world.judge.of(nameOf(wish)).payloads.add(wish.payload)
      this.#scheduler.after(wish.at, WORLD, 'a client comes', () => this.#ask(wish, 0))
    }
    const { upstream } = this.#world
    for (const one of [...this.#stores, upstream])
      one.onCall = (by, risk) => {
        if (by instanceof Replica) this.#tempt(by, risk)
      }
    for (const store of this.#stores) store.onGraceOver = () => this.#graceIsOver(store)
    for (const incident of incidents)
      this.#scheduler.after(incident.at, WORLD, incident.kind, () => this.#befall(incident))
    for (const reload of this.#scenario.reloads)
      if (reload.at !== null) this.#scheduler.after(reload.at, WORLD, 'a reload', () => this.#reload(reload))
    for (const rollout of this.#scenario.move?.rollouts ?? [])
      this.#scheduler.after(rollout.at, WORLD, 'a rollout', () => this.#rollOut(rollout))
    this.#keepSnapshots()
    this.#scheduler.after(healedAt(this.#scenario), WORLD, 'all is well', () => this.#heal())
    const { judge } = this.#world
    const isDone = this.#scheduler.run(PATIENCE, () => this.#isOver || judge.broken !== null)
    if (judge.broken === null) {
      if (!isDone)
        judge.wrong(`something does not come to an end: ${this.#clients} clients wait`, this.#waiting())
      else this.#check()
    }
    const { hash, events, lines } = this.#scheduler
    let executions = 0
    for (const [, name] of judge.names) executions += judge.of(name).executed.length
    return {
      seed: this.#seed,
      hash,
      events,
      executions,
      answers: this.#answers,
      broken: judge.broken,
      scenario: this.#scenario,
      lines: lines ?? [],
    }
  }

  #start(n: number): void {
    const replica = new Replica(`replica ${n + 1}`, this.#world, this.#disks[n] ?? null)
    this.#replicas[n] = replica
    this.#scheduler.after(0, replica, 'a replica starts', () => replica.start())
  }

  get #stores(): readonly SimulatedStore[] {
    const { store, young } = this.#world
    return young === null ? [store] : [store, young]
  }

  #storeAt(side: Side): SimulatedStore {
    const { store, young } = this.#world
    return side === 'to' && young !== null ? young : store
  }

  /** The store that decides. */
  get #lead(): SimulatedStore {
    return this.#storeAt(this.#stage === 'new' ? 'to' : 'from')
  }

  #rollOut({ stage, lags }: Rollout): void {
    this.#scheduler.tell('world', `THE FILE CHANGES: ${stage}`)
    this.#stage = stage
    for (const [replica, lag] of lags.entries())
      this.#scheduler.after(lag, WORLD, 'is rolled out', () => {
        const { isEntering, stage } = this.#replicas[replica] as Replica
        if (stage === this.#stage) return
        const backIn = this.#scheduler.random.between(1, 2_000)
        this.#befall({ kind: isEntering ? 'crash' : 'drain', at: 0, replica, backIn })
      })
  }

  #reload({ to, lags }: Reload): void {
    this.#scheduler.tell('world', `THE FILE CHANGES: ${settingsText(to)}`)
    this.#file = to
    for (const [n, lag] of lags.entries()) {
      const replica = this.#replicas[n] as Replica
      this.#scheduler.after(lag, replica, 'reloads', () => {
        this.#scheduler.tell(replica.name, 'reads the file again')
        replica.reload(this.#file)
      })
    }
  }

  /** What a client does until it has an answer that it takes for the end of it. */
  #ask(wish: Wish, tries: number, to: Replica | null = null): void {
    const { random } = this.#scheduler
    const alive = this.#replicas.filter(({ isDead, isEntering }) => !isDead && !isEntering)
    const serving = alive.filter(({ isDraining }) => !isDraining)
    const living = serving.length > 0 ? serving : alive
    const again = (pause: number): void =>
      void this.#scheduler.after(pause, WORLD, 'a client tries again', () => this.#ask(wish, tries + 1, to))
    if (living.length === 0) return again(random.between(50, 500))
    const replica = to ?? random.pick(living)
    this.#scheduler.tell('client', `sends "${wish.payload}" to ${replica.name}`, nameOf(wish))
    // It may be lost on the way, as a replica dies that it was sent to.
    const exchange = new Exchange(replica, wish, () => {
      this.#open.delete(exchange)
      again(random.between(10, 500))
    })
    this.#open.add(exchange)
    const patience = this.#isHealed ? 60_000 : random.pick([300, 1_000, 5_000, 20_000])
    this.#scheduler.after(patience, WORLD, 'a client gives up', () => {
      if (exchange.isOver) return
      this.#scheduler.tell('client', 'gives up and disconnects', nameOf(wish))
      exchange.leave(this.#scheduler)
      exchange.lost()
    })
    this.#scheduler.after(random.between(0.1, 2), replica, 'a request comes', () => {
      if (exchange.isOver) return
      const known = this.#world.judge.of(nameOf(wish))
      // Who has not heard yet that the store has its outcome answers from it.
      const isOver = !this.#bodiesOver(wish).includes(false)
      const overAfter = isOver && !replica.isBusy ? known.executed.length : null
      void replica.send(wish, exchange).then(
        (answer) => {
          const what = seen(answer)
          const isOwn = answer.facts.outcome === null
          what.live?.drain()
          if (answer.kind === 'none' || exchange.isOver) return
          this.#scheduler.after(random.between(0.1, 2), WORLD, 'an answer comes', () => {
            if (exchange.isOver) return
            exchange.isOver = true
            this.#open.delete(exchange)
            if (overAfter === known.executed.length) this.#world.judge.answeredAfterBody(wish, what)
            this.#hear(exchange, what, tries, to, isOwn)
          })
        },
        (bug: unknown) =>
          this.#world.judge.wrong(`internal error: ${String((bug as Error).stack)}`, nameOf(wish)),
      )
    })
  }

  #hear(exchange: Exchange, what: Seen, tries: number, to: Replica | null, isOwn: boolean): void {
    const { wish, replica: by } = exchange
    const { random } = this.#scheduler
    const { judge } = this.#world
    this.#answers++
    const { status, code, replayed, retryAfter, bytes } = what
    const word = code ?? (bytes === null ? `${status}, streamed` : bytes)
    this.#scheduler.tell(
      'client',
      `hears from ${by.name}: ${word}${replayed ? ', replayed' : ''}`,
      nameOf(wish),
    )
    judge.answered(wish, what, by, isOwn, exchange.wasBodyOver || this.#isBodyOver(wish))
    if (to === null ? this.#isEnough(what, tries) : this.#isFinal(wish, what)) {
      this.#clients--
      return
    }
    const pause = Math.min((retryAfter ?? 0) * 1000, 3_000) + random.between(1, 100 * 2 ** Math.min(tries, 5))
    this.#scheduler.after(pause, WORLD, 'a client tries again', () => this.#ask(wish, tries + 1, to))
  }

  /** As clients do: an answer is an answer, some ask again all the same, and most give up one day. */
  #isEnough({ code, status }: Seen, tries: number): boolean {
    const { random } = this.#scheduler
    if (tries >= 6) return true
    if (code === null && status !== 503 && status !== 429) return random.chance(0.8)
    if (code === 'idempotency_key_reused' || code === 'idempotency_response_unavailable') return true
    return false
  }

  /** What the record says when nothing goes wrong any more. */
  #isFinal(wish: Wish, { code, status }: Seen): boolean {
    if (code === 'idempotency_outcome_unknown')
      return ![...this.#world.judge.names].some(([id, name]) => name === nameOf(wish) && this.#canBeAsked(id))
    if (code === null) return status !== 503 && status !== 429
    return code === 'idempotency_key_reused' || code === 'idempotency_response_unavailable'
  }

  /** Every call of a port may be the last thing that a process does for a while, or at all. */
  #tempt(by: Replica, risk: number): void {
    const { random } = this.#scheduler
    const { pauses, deaths } = this.#world.store.weather
    const replica = this.#replicas.indexOf(by)
    // It has just been refused its phase.
    if (replica < 0) return
    if (random.chance(pauses * risk)) {
      const time = random.pick([
        random.between(100, 1_000),
        random.between(LEASE / 2, LEASE),
        random.between(LEASE, 2 * AFTER),
        random.between(AFTER - LEASE / 2, AFTER),
      ])
      this.#scheduler.after(0, WORLD, 'stall', () => this.#befall({ kind: 'stall', at: 0, replica, time }))
    }
    if (random.chance(deaths * risk)) {
      const backIn = random.between(1, 4_000)
      this.#scheduler.after(random.pick([0, random.between(0, 300)]), WORLD, 'crash', () => {
        if (!this.#isHealed) this.#befall({ kind: 'crash', at: 0, replica, backIn })
      })
    }
  }

  #befall(incident: Incident): void {
    const { kind } = incident
    const { store, judge } = this.#world
    // The incident may bring a response back that a replica has just found to be over.
    for (const exchange of this.#open) exchange.wasBodyOver ||= this.#isBodyOver(exchange.wish)
    const replica = 'replica' in incident ? (this.#replicas[incident.replica] as Replica) : null
    switch (kind) {
      case 'crash':
        if (replica === null || replica.isDead) return
        this.#scheduler.tell(replica.name, 'CRASHES')
        replica.isDead = true
        for (const exchange of this.#open) if (exchange.replica === replica) exchange.lost()
        this.#scheduler.after(incident.backIn, WORLD, 'a restart', () => this.#start(incident.replica))
        return
      case 'stall':
        this.#scheduler.tell(replica?.name ?? '', `STALLS for ${Math.round(incident.time)} ms`)
        if (replica !== null)
          replica.stalledUntil = Math.max(replica.stalledUntil, this.#scheduler.now + incident.time)
        return
      case 'store clock':
        this.#step(this.#storeAt(incident.store), Math.round(incident.by))
        return
      case 'store outage':
        this.#goDown(incident.store)
        this.#scheduler.after(incident.time, WORLD, 'the store is back', () => {
          this.#scheduler.tell('store', `is back: ${incident.store}`)
          this.#storeAt(incident.store).isDown = false
        })
        return
      case 'rollback': {
        // What it goes back to was kept a while ago, at an instant of the plan.
        const snapshot = this.#snapshots.get(incident) ?? new Map()
        for (const id of store.restore(snapshot)) {
          const name = judge.nameOf(id)
          this.#scheduler.tell('store', 'GOES BACK to an earlier state', name)
          if (name !== null) judge.forgot(name)
        }
        return
      }
      case 'failover':
        if (incident.down > 0) this.#goDown(incident.store)
        this.#scheduler.after(incident.down, WORLD, 'the store is back', () => this.#failOver(incident))
        return
      case 'drain': {
        if (replica === null || replica.isDead || replica.isDraining || replica.isEntering) return
        this.#scheduler.tell(replica.name, 'DRAINS')
        this.#scheduler.after(0, replica, 'drain', () => void this.#drain(replica, incident))
        return
      }
      case 'operator':
        for (const [id] of judge.names) void this.#decide(id, incident.says)
        return
    }
  }

  #step(store: SimulatedStore, by: Millis): void {
    this.#scheduler.tell(store.name, `its clock steps by ${by} ms`)
    this.#world.judge.clockSteps(store.now, store.name)
    store.skew += by
  }

  #goDown(side: Side): void {
    this.#scheduler.tell('store', `GOES DOWN: ${side}`)
    this.#storeAt(side).isDown = true
  }

  #failOver(incident: Extract<Incident, { kind: 'failover' }>): void {
    const { judge } = this.#world
    const store = this.#storeAt(incident.store)
    this.#scheduler.tell('store', `FAILS OVER: ${incident.store}`)
    store.isDown = false
    store.isReadOnly = incident.refuses > 0
    if (store.isReadOnly) {
      this.#scheduler.tell('store', 'TAKES NO WRITES')
      this.#scheduler.after(incident.refuses, WORLD, 'the store takes writes', () => {
        this.#scheduler.tell('store', 'takes writes')
        store.isReadOnly = false
      })
    }
    this.#goneBack = store.failOver(this.#snapshots.get(incident) ?? new Map())
    for (const id of this.#goneBack) {
      const name = judge.nameOf(id)
      if (name !== null) judge.wentBack(name)
    }
  }

  /** What the last failover has taken back. */
  #goneBack: readonly RecordId[] = []

  /** Now the store hands things out again: what nobody could write again is lost, and may be executed once more. */
  #graceIsOver(store: SimulatedStore): void {
    const { judge } = this.#world
    const since = store.since
    for (const id of this.#goneBack) {
      const name = judge.nameOf(id)
      if (name === null) continue
      const owners = [...judge.of(name).claimants.values()] as Replica[]
      const hasSaidAll = (one: Replica): boolean => !one.isDead && one.hasReclaimedSince.get(store) === since
      if (
        !owners.every(hasSaidAll) ||
        policiesOf(this.#scenario).some((policy) => policy.onStoreUnavailable === 'bypass')
      )
        judge.forgot(name)
    }
  }

  async #drain(
    replica: Replica,
    { replica: n, backIn }: Extract<Incident, { kind: 'drain' }>,
  ): Promise<void> {
    const { judge } = this.#world
    const cutOff = await replica.drain()
    if (cutOff !== null) judge.wrong(`a drain that had time left gave up ${cutOff}`, null)
    this.#scheduler.tell(replica.name, 'HAS STOPPED')
    if (!replica.holdsOutcomes) judge.drained(replica)
    replica.isDead = true
    for (const exchange of this.#open) if (exchange.replica === replica) exchange.lost()
    this.#scheduler.after(backIn, WORLD, 'a restart', () => this.#start(n))
  }

  readonly #snapshots = new Map<Incident, ReadonlyMap<RecordId, Buffer | null>>()

  /** Once the store can be asked: as `resolve` does it, over a record that reads as unknown. */
  async #decide(id: RecordId, says: 'completed' | 'retryable'): Promise<void> {
    const { store, young, judge } = this.#world
    const name = judge.nameOf(id) as string
    // By way of a replica that is there.
    const stage = this.#replicas.find(({ isDead, isEntering }) => !isDead && !isEntering)?.stage ?? 'before'
    const [from, to] = [store.wire(WORLD), young?.wire(WORLD)]
    const records = new Records(stage === 'before' || to === undefined ? from : migrating(from, to, stage))
    const found = await records.get(id)
    if (found.kind !== 'read' || found.record === null) return
    const read = readAt(found.record, found.now)
    if (read?.state !== 'unknown') return
    const outcome =
      says === 'completed'
        ? ({ kind: 'completed', result: { kept: true, response: decision(name) } } as const)
        : ({ kind: 'not_executed', reason: 'an operator says so' } as const)
    // Whatever the reply will be: it may be applied without one.
    if (says === 'retryable') judge.permit(name, 'an operator says: retryable')
    await records.replace(
      id,
      read.version,
      resolvedDraft(read, outcome),
      outcomeSpans(outcome, this.#file.policy),
    )
  }

  #heal(): void {
    const { upstream } = this.#world
    this.#scheduler.tell('world', 'from here on nothing goes wrong any more')
    this.#isHealed = true
    upstream.weather = CALM
    for (const store of this.#stores) {
      store.weather = CALM
      store.isDown = false
    }
    this.#whenQuiet(() => {
      const last = this.#scenario.reloads.at(-1)
      if (last?.at === null) this.#reload(last)
      this.#whenQuiet(() =>
        this.#audit(() => {
          if (!policiesOf(this.#scenario).some(({ ttlBody }) => ttlBody !== null)) return this.#end(20)
          this.#scheduler.after(MAX_TTL_BODY + SWEPT, WORLD, 'responses are over', () =>
            this.#audit(() => this.#end(20)),
          )
        }),
      )
    })
  }

  /** Every replica is asked for everything once more. */
  #audit(then: () => void): void {
    this.#scheduler.tell('world', 'everything is asked for once more, everywhere')
    this.#world.judge.enforced((by) => this.#replicas.includes(by as Replica) && !(by as Replica).hasGivenUp)
    const wishes = new Map(this.#scenario.wishes.map((wish) => [`${nameOf(wish)} ${wish.payload}`, wish]))
    for (const wish of wishes.values())
      for (const replica of this.#replicas) {
        this.#clients++
        this.#ask(wish, 0, replica)
      }
    this.#whenQuiet(then)
  }

  /** What is held for a status query under way is let go of soon: it is looked at a few times. */
  #end(looks: number): void {
    if (looks === 0 || this.#replicas.every((one) => one.leak() === null)) this.#isOver = true
    else this.#scheduler.after(250, WORLD, 'another look', () => this.#end(looks - 1))
  }

  #whenQuiet(act: () => void): void {
    this.#scheduler.after(250, WORLD, 'a look', () => {
      const isQuiet =
        this.#clients === 0 &&
        // Until it is out of its grace it is not known what is lost.
        this.#stores.every((store) => store.writesUnderWay === 0 && !store.isInGrace) &&
        !this.#replicas.some(
          (one) =>
            one.isDead ||
            one.isDraining ||
            one.isEntering ||
            one.stage !== this.#stage ||
            one.isBusy ||
            one.settings !== this.#file ||
            // What it is about to do is not known yet.
            one.stalledUntil > this.#scheduler.now,
        ) &&
        !this.#isMoving()
      if (isQuiet) act()
      else this.#whenQuiet(act)
    })
  }

  /** The sweepers are not done yet. */
  #isMoving(): boolean {
    const { judge } = this.#world
    for (const [id] of judge.names) {
      const record = this.#lead.read(id)
      if (record?.state === 'in_progress') return true
      if (record?.state === 'unknown' && this.#canBeAsked(id)) return true
    }
    return false
  }

  /** Which of the stores say that nobody may get the stored response any more. */
  #bodiesOver(wish: Wish): readonly boolean[] {
    const { judge } = this.#world
    const ids = [...judge.names].filter(([, name]) => name === nameOf(wish))
    return this.#stores.map((store) => ids.some(([id]) => isBodyOver(store.peek(id), store.now)))
  }

  /** Whether nobody may get it from some store. */
  #isBodyOver(wish: Wish): boolean {
    return this.#bodiesOver(wish).includes(true)
  }

  /** Before phase `both` the old store decides alone. */
  #livesElsewhere(id: RecordId, token: Buffer, by: object, store: string): boolean {
    if (!(by instanceof Replica) || by.stage === 'before' || by.stage === 'mirror') return false
    return this.#stores.some((other) => {
      const record = other.name === store ? null : other.read(id)
      return record?.state === 'in_progress' && record.token.equals(token)
    })
  }

  #canBeAsked(id: RecordId): boolean {
    const { judge } = this.#world
    const record = this.#lead.read(id)
    return record !== null && judge.canBeAsked(record, this.#file.policy)
  }

  #waiting(): string | null {
    const { judge } = this.#world
    const [first] = [...judge.names].map(([, name]) => name)
    return first ?? null
  }

  #check(): void {
    const { judge } = this.#world
    const store = this.#lead
    judge.end(
      (id) => store.read(id),
      (by) => this.#replicas.includes(by as Replica),
      this.#file.policy,
    )
    for (const [id, name] of judge.names) {
      const bytes = store.peek(id)
      if (bytes !== null && !isTakenOut(decodeRecord(bytes)) && isBodyOver(bytes, store.now - SWEPT))
        judge.wrong('a response that is over is still in the store', name)
    }
    for (const replica of this.#replicas) {
      const leak = replica.leak()
      if (leak !== null) judge.wrong(`${replica.name} still holds ${leak}`, null)
    }
  }

  /** Snapshots of a store that will go back to them. */
  #keepSnapshots(): void {
    for (const incident of this.#scenario.incidents)
      if (incident.kind === 'rollback' || incident.kind === 'failover')
        this.#scheduler.after(incident.to, WORLD, 'a snapshot', () =>
          this.#snapshots.set(
            incident,
            this.#storeAt('store' in incident ? incident.store : 'from').snapshot(),
          ),
        )
  }
}

/** What a change of the file changes. */
export function settingsText({ policy, inFlight, waiters }: Settings): string {
  return [
    `mode ${policy.mode}`,
    `route ${policy.name}`,
    `lease ${policy.lease} ms`,
    `inFlight ${policy.inFlight.mode}`,
    `onLeaseExpired ${policy.onLeaseExpired}`,
    `onResponseLost ${policy.onResponseLost}`,
    `onStoreUnavailable ${policy.onStoreUnavailable}`,
    `reconcile ${policy.reconcile === null ? 'off' : `after ${policy.reconcile.after} ms`}`,
    `keep ${policy.keep}`,
    `ttl.body ${policy.ttlBody}`,
    `respondWithin ${policy.respondWithin}`,
    `limits ${inFlight} and ${waiters}`,
  ].join(', ')
}

/** The answer that an operator enters. */
function decision(name: string) {
  const [caller, key] = name.split('/')
  const body = Buffer.from(JSON.stringify({ caller, key, decided: true }))
  return { status: 201, reason: 'Decided', headers: ['Content-Type', 'application/json'], body, trailers: [] }
}

/** A client's request to one replica. */
class Exchange {
  readonly replica: Replica
  readonly wish: Wish
  isOver = false
  /** At some time since the request, nobody might get the stored response. */
  wasBodyOver = false
  #isGone = false
  readonly #onLost: () => void
  readonly #listeners = new Set<() => void>()

  constructor(replica: Replica, wish: Wish, onLost: () => void) {
    this.replica = replica
    this.wish = wish
    this.#onLost = onLost
  }

  readonly isGone = (): boolean => this.#isGone

  readonly onGone = (left: () => void): (() => void) => {
    this.#listeners.add(left)
    return () => void this.#listeners.delete(left)
  }

  /** The client hears no more of it. */
  lost(): void {
    if (this.isOver) return
    this.isOver = true
    this.#onLost()
  }

  /** The replica hears that its client has left. */
  leave(scheduler: Scheduler): void {
    scheduler.after(scheduler.random.between(0.1, 5), this.replica, 'a client leaves', () => {
      this.#isGone = true
      for (const left of this.#listeners) left()
    })
  }
}
