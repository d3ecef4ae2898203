import type { Test } from 'tap'
import type { ReconcilePolicy, RoutePolicy } from '../../src/core/policy.ts'
import type { Proof } from '../../src/core/reconcile/verify.ts'
import { type IdempotencyRecord, type RecordId, readAt, type Unknown } from '../../src/core/record.ts'
import { StoreClock } from '../../src/core/store-clock.ts'
import type { ReconcileObserver } from '../../src/reconcile/ports.ts'
import { Sweeper } from '../../src/reconcile/sweeper.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import type { Forwarded, UpstreamRequest } from '../../src/upstream/port.ts'
import {
  Bytes,
  Gate,
  LEASE,
  MINUTE,
  type Replica,
  replica,
  route,
  SECOND,
  Store,
  UPSTREAM,
} from '../protect/harness.ts'

export const STATUS_QUERY_TIMEOUT = 10 * SECOND
export const AFTER = MINUTE
export const EVERY = 5 * SECOND

export const RECONCILE: ReconcilePolicy = {
  request: { method: 'GET', path: '/payments?key={key}', headers: ['Authorization', 'Bearer own'] },
  identity: [{ pointer: '/key', value: '{key}' }],
  completed: [
    { status: 200, when: [], json: '/payment', response: { status: 201, headers: [] } },
    { status: 402, when: [], json: '', response: { status: null, headers: [] } },
  ],
  notFound: { status: 404, when: [] },
  pending: { status: 202, when: [] },
  after: AFTER,
  every: EVERY,
  attempts: 20,
}

/** The key that the guard's harness sends. */
export const KEY = 'key-0123456789abcdef'

export function asking(more: Partial<ReconcilePolicy> = {}, over: Partial<RoutePolicy> = {}): RoutePolicy {
  return route({ reconcile: { ...RECONCILE, ...more }, ...over })
}

export type Told = readonly [string, ...unknown[]]
export type Say = Forwarded | Error | ((request: UpstreamRequest) => Forwarded | Promise<Forwarded>)

/** The sweeper of one process on a store, and the upstream that it asks. */
export class Worker {
  readonly store: Store
  readonly sweeper: Sweeper
  readonly told: Told[] = []
  readonly asked: UpstreamRequest[] = []
  readonly bytes = new Bytes()
  /** The upstream's answers, in order. */
  readonly script: Say[] = []
  /** Then it says that. */
  otherwise: () => Say = () => this.says(200)
  readonly woken: RecordId[] = []
  isOwn: (id: RecordId) => boolean = () => false
  random = 0
  readonly clock = new StoreClock()
  readonly otherClock = new StoreClock()
  /** Runs as the store's clock does, unless a test makes that one step. */
  monotonic = (): number => this.store.now
  /** The result of trying out the status query. */
  proof: Proof = { kind: 'untested' }

  constructor(store: Store, policies: readonly RoutePolicy[], by: unknown = null) {
    this.store = store
    const say =
      (name: string) =>
      (...args: unknown[]): void =>
        void this.told.push([name, ...args])
    const observer: ReconcileObserver = {
      leaseExpired: say('leaseExpired'),
      reconciled: (_route, result) => say('reconciled')(result),
      expiring: (_route, _id, dropAt) => say('expiring')(dropAt),
      trouble: say('trouble'),
    }
    // It has been running all the time.
    this.clock.saw(0, 0, 0)
    const wire = store.wire(by ?? this)
    this.sweeper = new Sweeper({
      records: new Records(wire),
      store: wire,
      forward: (request) => this.#answer(request),
      upstream: UPSTREAM,
      queryTimeout: () => STATUS_QUERY_TIMEOUT,
      policyOf: (name) => policies.find((policy) => policy.name === name) ?? null,
      isOwn: (id) => this.isOwn(id),
      prove: async () => this.proof,
      wake: (id) => void this.woken.push(id),
      observer,
      random: () => this.random,
      clock: this.clock,
      otherClock: this.otherClock,
      monotonic: () => this.monotonic(),
    })
  }

  /** One sweep, and the status queries that it starts. */
  async round(): Promise<void> {
    await this.sweeper.sweep()
    await this.sweeper.idle()
  }

  /** The same, when that time has passed. */
  async after(time: number): Promise<void> {
    this.store.now += time
    await this.round()
  }

  /** The same, when the store's record is due; the upstream says that. */
  async next(...says: readonly Say[]): Promise<void> {
    this.store.now = Math.max((await unknownIn(this.store)).nextLookAt, this.store.now)
    this.script.push(...says)
    await this.round()
  }

  /** Sends a status query that the upstream answers when the test opens the gate. */
  async asking(says = () => this.says(200)): Promise<{ readonly gate: Gate; readonly round: Promise<void> }> {
    const gate = new Gate()
    this.script.push(gate.before(says))
    const round = this.round()
    await gate.reached
    return { gate, round }
  }

  /** The `result` labels so far. */
  get results(): unknown[] {
    return this.told.filter(([name]) => name === 'reconciled').map(([, result]) => result)
  }

  said(name: string): unknown[] {
    return this.told.filter(([one]) => one === name).map(([, first]) => first)
  }

  says(status: number, body?: unknown): Forwarded {
    return says(this.bytes, status, body)
  }

  async #answer(request: UpstreamRequest): Promise<Forwarded> {
    this.asked.push(request)
    const next = this.script.shift() ?? this.otherwise()
    if (next instanceof Error) throw next
    return typeof next === 'function' ? await next(request) : next
  }
}

/** What a status query is answered, in those bytes of the budget. */
export function says(
  budget: Bytes,
  status: number,
  body: unknown = { key: KEY, payment: { id: 'p1' } },
): Forwarded {
  const bytes = Buffer.from(JSON.stringify(body))
  return {
    proof: 'responded',
    declaredOutcome: null,
    response: { status, reason: 'Said', headers: ['Content-Type', 'text/json'], body: bytes, trailers: [] },
    release: budget.take(bytes.length),
  }
}

export function worker(t: Test, store: Store, ...policies: readonly RoutePolicy[]): Worker {
  const made = new Worker(store, policies)
  t.teardown(async () => {
    await made.sweeper.stop()
    if (made.bytes.held !== 0) throw new Error(`${made.bytes.held} bytes are not given back`)
  })
  return made
}

/** The record as it is stored. */
export async function stored(store: Store, id?: RecordId): Promise<IdempotencyRecord> {
  const { bytes } = await store.inner.get(id ?? ([...store.ids][0] as RecordId))
  if (bytes === null) throw new Error('no record')
  return decodeRecord(bytes)
}

export async function unknownIn(store: Store): Promise<Unknown> {
  const record = await stored(store)
  const read = readAt(record, store.now)
  if (read?.state !== 'unknown') throw new Error(`the record is ${read?.state}`)
  return read
}

/** A request whose connection broke after it was sent. */
export async function broken(replica: Replica, policy: RoutePolicy): Promise<void> {
  replica.script.push({ proof: 'unknown', reason: 'reset', timedOut: false, status: null })
  const { code } = await replica.get({ route: policy })
  if (code !== 'upstream_failed') throw new Error(`answered ${code}`)
}

/** A request whose connection broke, and the sweeper that asks about it. */
export async function unresolved(t: Test, policy: RoutePolicy, ...asks: readonly RoutePolicy[]) {
  const store = new Store()
  const owner = replica(t, { store })
  await broken(owner, policy)
  return { store, owner, one: worker(t, store, ...(asks.length === 0 ? [policy] : asks)) }
}

/** An owner that fell silent: `one` has written down that its lease lapsed; its upstream works. */
export async function silentOwner(t: Test, policy: RoutePolicy) {
  const store = new Store()
  const owner = replica(t, { store })
  const run = await owner.working({ route: policy }, () => owner.responded(201, 'late'))
  const one = worker(t, store, policy)
  await one.after(LEASE)
  return { store, owner, run, one }
}
