import { randomBytes } from 'node:crypto'
import type { Test } from 'tap'
import { profileDefaults } from '../../src/config/load.ts'
import type { VerifiedToken } from '../../src/core/identity.ts'
import type { Profile, Rate, RoutePolicy } from '../../src/core/policy.ts'
import { type IdempotencyRecord, type RecordId, readAt, type Spans } from '../../src/core/record.ts'
import type { RefusalCode } from '../../src/core/refusal.ts'
import { guard, newProgress } from '../../src/protect/guard.ts'
import { Leases } from '../../src/protect/leases.ts'
import type { WalkPorts } from '../../src/protect/ports.ts'
import { CallerChanges, KeyChurn, Latency, RecentGrants } from '../../src/protect/recent.ts'
import {
  type Answer,
  type BodyReading,
  type Execution,
  type Observer,
  type ProtectedRequest,
  type RequestSummary,
} from '../../src/protect/request.ts'
import { Settler } from '../../src/protect/settler.ts'
import { WaitingRoom } from '../../src/protect/waiting-room.ts'
import { Budget, InFlight } from '../../src/runtime/limits.ts'
import { RecordMap } from '../../src/runtime/record-map.ts'
import { KeyedMutex, type MaybePromise } from '../../src/runtime/scheduling.ts'
import type { StoreOperation } from '../../src/store/around.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { decodeRecord, isClaim, readStamps } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import {
  type Condition,
  type DueKind,
  type GetReply,
  type Listing,
  type Note,
  type PutKind,
  type PutReply,
  type Renewal,
  type StoreFitness,
  StoreFull,
  type Store as StorePort,
  type StoreTraits,
  StoreUnavailable,
  type SwapReply,
  Unreplicated,
} from '../../src/store/register.ts'
import type { Outbox } from '../../src/store/spool/outbox.ts'
import type { Forward, Forwarded, LiveResponse, LiveSink, UpstreamRequest } from '../../src/upstream/port.ts'
import { matching, ROUTE } from '../core/fixtures.ts'

export const SECOND = 1000
export const MINUTE = 60 * SECOND
export const HOUR = 60 * MINUTE
/** Tag of the upstream. */
export const UPSTREAM = 'upstream'
export const LEASE = 30 * SECOND
export const TTL = 24 * HOUR
const START = 1_795_000_000_000
/** The upstream's answers that prove that nothing was done, and that prove nothing. */
export const NOT_SENT = { proof: 'not_sent', reason: 'refused' } as const
export const BROKEN = { proof: 'unknown', reason: 'reset', timedOut: false, status: null } as const

/** The route of the core's tests, whose clients must send a key and whose upstream is told the fence. */
export function route(over: Partial<RoutePolicy> = {}): RoutePolicy {
  const profile: Profile = over.profile ?? 'standard'
  const { misuse, ...defaults } = profileDefaults(profile)
  return {
    ...ROUTE,
    name: 'payments',
    match: matching(['POST'], '/v1/payments'),
    profile,
    key: { ...ROUTE.key, presence: 'required', forwardFence: true },
    misuseStatus: misuse.status,
    onLeaseExpired: defaults.onLeaseExpired,
    onStoreUnavailable: defaults.onStoreUnavailable,
    tombstone: defaults.tombstone,
    ...over,
  }
}

/**
 * What happens to a store call. `lost`: it is applied, but its reply never comes; `dropped`: it never arrives, which looks the same to
 * the caller; `late`: looks the same too, but it arrives when {@link Store.arrive} says so; `unreplicated`: a claim is applied but no
 * replica has it, while other calls succeed; `dead` and `dead_applied`: the caller never hears back.
 */
export type Fault =
  | 'down'
  | 'full'
  | 'lost'
  | 'dropped'
  | 'late'
  | 'unreplicated'
  | 'dead'
  | 'dead_applied'
  | Error

export const never: Promise<never> = new Promise(() => {})

export interface StoreCall {
  readonly op: StoreOperation
  readonly id: RecordId | null
  /** The process that asks. */
  readonly by: unknown
  /** Its number among all calls so far, from 1. */
  readonly n: number
}

/** The real memory store behind a wire that can fail in every way a wire can. */
export class Store {
  now = START
  calls = 0
  maxBytes = MEMORY_BYTES
  /** Faults for the next calls of an operation, in order. */
  readonly next: { op: StoreOperation; fault: Fault | null }[] = []
  fault: (call: StoreCall) => Fault | null = () => null
  /** Awaited before each call goes out. */
  gate: ((call: StoreCall) => Promise<void>) | null = null
  readonly ids = new Set<RecordId>()
  /** Owner tokens (hex) of writes that were applied. */
  readonly wrote: string[] = []
  readonly inner = memoryStore({ clock: () => this.now, maxBytes: MEMORY_BYTES })
  readonly #late: (() => Promise<unknown>)[] = []

  /** The same store as one process sees it. */
  wire(by: unknown = null): StorePort {
    const call = <T>(op: StoreOperation, id: RecordId | null, apply: () => Promise<T>, claims = false) =>
      this.#call(by, op, id, apply, claims)
    const noted = async <T extends { done: boolean }>(bytes: Buffer, reply: MaybePromise<T>): Promise<T> => {
      const settled = await reply
      if (settled.done) this.wrote.push(bytes.subarray(16, 32).toString('hex'))
      return settled
    }
    const { inner } = this
    return {
      name: 'memory',
      put: (id: RecordId, bytes: Buffer, spans: Spans, entry?: PutKind): Promise<PutReply> =>
        call(
          'put',
          id,
          () => noted(bytes, inner.put(id, bytes, spans, entry)),
          entry !== 'again' && isClaim(bytes),
        ),
      swap: (
        id: RecordId,
        on: Condition,
        bytes: Buffer,
        spans: Spans,
        nextFence: boolean,
      ): Promise<SwapReply> =>
        call(
          'swap',
          id,
          () => noted(bytes, inner.swap(id, on, bytes, spans, nextFence)),
          nextFence && isClaim(bytes),
        ),
      get: (id: RecordId): Promise<GetReply> => call('get', id, () => inner.get(id)),
      renew: (items: readonly Renewal[]) => call('renew', null, () => inner.renew(items)),
      due: (limit: number, of?: DueKind) => call('due', null, () => inner.due(limit, of)),
      remove: (id: RecordId, version: number) => call('remove', id, () => inner.remove(id, version)),
      list: (which: Listing, cursor: string | null, limit: number) =>
        call('list', null, () => inner.list(which, cursor, limit)),
      history: {
        append: (id: RecordId, notes: readonly Note[]) =>
          call('note', null, () => inner.history.append(id, notes)),
        read: (id: RecordId) => call('notes', null, () => inner.history.read(id)),
      },
      limits: {
        take: (bucket: string, rate: Rate, units: 1 | -1) =>
          call('throttle', null, () => inner.limits.take(bucket, rate, units)),
      },
      // Not a call that can fail: it never throws, and a store that cannot notify does not.
      watch: (id: RecordId, changed: () => void) => inner.watch(id, changed),
      ping: () => call('ping', null, () => inner.ping()),
      traits: (): Promise<StoreTraits> => inner.traits(),
      close: () => inner.close(),
    }
  }

  /** Runs `act` before the `nth` call of that operation from now on goes out; `by`: of one process alone. */
  before(op: StoreOperation, act: () => unknown, { nth = 1, by }: { nth?: number; by?: unknown } = {}): void {
    let n = 0
    this.gate = async (call) => {
      if (call.op !== op || (by !== undefined && call.by !== by) || ++n !== nth) return
      this.gate = null
      await act()
    }
  }

  /** Holds that call back until the gate is opened. */
  hold(op: StoreOperation, of: { nth?: number; by?: unknown } = {}): Gate {
    const gate = new Gate()
    this.before(op, () => gate.pass(), of)
    return gate
  }

  /** Fails the next calls of an operation, in order. */
  fails(op: StoreOperation, ...faults: readonly (Fault | null)[]): void {
    this.next.push(...faults.map((fault) => ({ op, fault })))
  }

  /** Drops the record, as a store that loses data does. */
  async loses(id: RecordId = [...this.ids][0] as RecordId): Promise<void> {
    await this.restore(id, null)
  }

  /** Delivers the late calls. */
  async arrive(): Promise<void> {
    for (const apply of this.#late.splice(0)) await apply()
  }

  /** Stored bytes of every record, by id. */
  async dump(): Promise<Record<string, string>> {
    const all: Record<string, string> = {}
    for (const id of this.ids) {
      const { bytes } = await this.inner.get(id)
      if (bytes !== null) all[id] = bytes.toString('latin1')
    }
    return all
  }

  /** Puts the record back as restoring a snapshot would; null: there was none. */
  async restore(id: RecordId, bytes: Buffer | null): Promise<void> {
    const there = await this.inner.get(id)
    if (there.bytes !== null) await this.inner.remove(id, readStamps(there.bytes).version)
    if (bytes === null) return
    const { due, dropAt } = readStamps(bytes)
    await this.inner.put(id, bytes, { dueIn: due - this.now, dropIn: dropAt - this.now })
  }

  /** The record as it reads now. */
  async read(id: RecordId): Promise<IdempotencyRecord | null> {
    const { bytes, now } = await this.inner.get(id)
    return bytes === null ? null : readAt(decodeRecord(bytes), now)
  }

  async #call<T>(
    by: unknown,
    op: StoreOperation,
    id: RecordId | null,
    apply: () => Promise<T>,
    claims: boolean,
  ): Promise<T> {
    const call = { op, id, by, n: ++this.calls }
    if (id !== null) this.ids.add(id)
    if (this.gate !== null) await this.gate(call)
    const planned = this.next.findIndex((plan) => plan.op === op)
    const fault = planned < 0 ? this.fault(call) : (this.next.splice(planned, 1)[0]?.fault ?? null)
    switch (fault) {
      case null:
        return apply()
      case 'down':
        throw new StoreUnavailable('the store is down', false)
      case 'full':
        throw new StoreFull('the store is full')
      case 'lost':
        await apply()
        throw new StoreUnavailable('the store did not answer in time', true)
      case 'unreplicated': {
        const reply = await apply()
        if (!claims || !(reply as PutReply).done) return reply
        throw new Unreplicated('no replica has it')
      }
      case 'late':
        this.#late.push(apply)
        throw new StoreUnavailable('the store did not answer in time', true)
      case 'dropped':
        throw new StoreUnavailable('the store did not answer in time', true)
      case 'dead_applied':
        await apply()
        return new Promise(() => {})
      case 'dead':
        return new Promise(() => {})
      default:
        throw fault
    }
  }
}

/** Counts bytes; releasing the same bytes twice is a bug. */
export class Bytes {
  held = 0
  take(bytes: number): () => void {
    this.held += bytes
    let released = false
    return () => {
      if (released) throw new Error('released twice')
      released = true
      this.held -= bytes
    }
  }
}

export type Reply = Forwarded | Error | ((request: UpstreamRequest) => Forwarded | Promise<Forwarded>)

export interface Options {
  readonly store?: Store
  /** Replaces the store as this process sees it. */
  readonly wire?: (by: unknown) => StorePort
  readonly forward?: Forward
  readonly outbox?: Outbox
  readonly maxInFlight?: number
  readonly secret?: Buffer | null
  readonly fitness?: StoreFitness
  readonly maxWaiters?: number
  readonly holdAtMost?: number
  readonly verified?: VerifiedToken
  readonly issued?: 'valid' | 'expired' | 'forged'
}

export type Event = readonly [string, ...unknown[]]

/** One process: a fresh set of ports on a store. */
export class Replica {
  readonly store: Store
  readonly ports: WalkPorts
  /** The store as this process sees it. */
  readonly wire: StorePort
  readonly records: Records
  readonly bytes = new Bytes()
  /** Room for replays. */
  readonly budget = new Budget(1024 * 1024)
  readonly events: Event[] = []
  readonly traces: RequestSummary[] = []
  /** The requests that reached the upstream; their number is N. */
  readonly asked: UpstreamRequest[] = []
  /** The upstream's answers, in order; then {@link responded}. */
  readonly script: Reply[] = []
  readonly renewalErrors: unknown[] = []
  /** How many clients are watched for leaving. */
  watched = 0
  onToken: (token: Buffer) => void = () => {}
  /** Which of a request's header lines are forwarded when there is no attempt. */
  forwarded: (lines: readonly string[]) => string[] = (lines) => [...lines]

  constructor(options: Options = {}) {
    this.store = options.store ?? new Store()
    this.wire = options.wire?.(this) ?? this.store.wire(this)
    this.records = new Records(this.wire)
    const say =
      (name: string) =>
      (...args: unknown[]): void =>
        void this.events.push([name, ...args])
    const observer: Observer = {
      answered: (trace) => void this.traces.push(trace),
      claimed: say('claimed'),
      began: ({ route, attempt }) => say('began')(route.name, attempt.fence),
      completed: (name, result) => say('completed')(name, result),
      prevented: say('prevented'),
      retryAge: say('retryAge'),
      leaseExpired: say('leaseExpired'),
      leaseUse: say('leaseUse'),
      regenerated: say('regenerated'),
      callerChanged: say('callerChanged'),
      trouble: say('trouble'),
    }
    this.ports = {
      records: this.records,
      store: this.wire,
      forward: options.forward ?? ((request) => this.#forward(request)),
      leases: new Leases(
        (items) => this.wire.renew(items),
        (error) => void this.renewalErrors.push(error),
      ),
      settler: new Settler(this.records, observer, options.outbox ?? null),
      waiters: new WaitingRoom(this.records, this.wire, options.maxWaiters ?? 100),
      locks: new KeyedMutex(),
      grants: new RecentGrants(() => this.store.now),
      keyChurn: new KeyChurn(() => this.store.now),
      callerChanges: new CallerChanges(() => this.store.now),
      verifyToken: async () => options.verified ?? { kind: 'absent' },
      checkIssued: async () => options.issued ?? 'valid',
      running: new RecordMap<Execution>(),
      upstream: UPSTREAM,
      namespace: { service: 'default', secret: options.secret ?? null },
      descriptors: null,
      storeFitness: () => options.fitness ?? 'fit',
      pause: async () => {},
      holdAtMost: options.holdAtMost ?? MINUTE,
      newToken: () => {
        const token = randomBytes(16)
        this.onToken(token)
        return token
      },
      inFlight: new InFlight(options.maxInFlight ?? 1000, 1),
      observer,
      latency: new Latency(),
      budget: this.budget,
    }
  }

  get n(): number {
    return this.asked.length
  }

  /** The words of one event, in order, such as the completion results of §13. */
  said(name: string): unknown[] {
    return this.events.filter(([event]) => event === name).map(([, , word]) => word)
  }

  troubles(): unknown[] {
    return this.events.filter(([event]) => event === 'trouble').map(([, message]) => message)
  }

  get trace(): RequestSummary {
    return this.traces.at(-1) as RequestSummary
  }

  send(over: Sent = {}): Promise<Answer> {
    return guard(this.ports, this.call(over))
  }

  /** Sends, takes the answer as a client does and returns what the client saw. */
  async get(over: Sent = {}): Promise<Seen> {
    return seen(await this.send(over))
  }

  /** Sends a request whose upstream works until the test ends it; resolves once it has reached the upstream. */
  async working(over: Sent = {}, reply: () => Forwarded = () => this.responded()): Promise<Working> {
    const gate = new Gate()
    this.script.push(gate.before(reply))
    const answer = this.get(over)
    await gate.reached
    const end = (): Promise<Seen> => {
      gate.open()
      return answer
    }
    return { answer, open: () => gate.open(), end }
  }

  /** The next request finds the store failing from when its upstream answers. */
  downAtEnd(reply: () => Forwarded = () => this.responded(), fault: Fault = 'down'): void {
    this.script.push(() => {
      this.store.fault = () => fault
      return reply()
    })
  }

  /** The store answers again; whether it now has every outcome that this process held. */
  storeIsBack(): Promise<boolean> {
    this.store.fault = () => null
    return this.ports.settler.flush()
  }

  /** Renews the leases of what runs here, as the timer does every third of a lease. */
  renews(): Promise<readonly boolean[]> {
    const running = [...this.ports.running]
    return this.wire.renew(
      running.map(([id, { attempt }]) => ({ id, token: attempt.token, dueIn: LEASE, dropIn: HOUR })),
    )
  }

  call(over: Sent): ProtectedRequest {
    const { key = 'key-0123456789abcdef', headers = [], path = '/v1/payments', query = '' } = over
    const own = [...(key === null ? [] : ['Idempotency-Key', key]), 'Authorization', 'Bearer a', ...headers]
    return {
      certificate: null,
      route: over.route ?? route(),
      method: 'POST',
      target: query === '' ? path : `${path}?${query}`,
      path,
      query,
      headers: over.anonymous ? own.filter((_, i) => i < own.length - headers.length - 2) : own,
      protocol: null,
      client: '127.0.0.1',
      traceId: null,
      span: over.span,
      readBody: async () => {
        await over.upload
        if (over.reading !== undefined) return over.reading
        const body = Buffer.from(over.body ?? '{"amount":1}')
        return { kind: 'body', body, release: this.bytes.take(body.length) }
      },
      host: null,
      progress: newProgress(),
      statusLink: ['Location', '/status'],
      upstreamHeaders: (attempt) =>
        attempt === null
          ? this.forwarded(own)
          : [
              'Idempotency-Key',
              key ?? attempt.key,
              'X-Fence',
              String(attempt.fence),
              'Idempotency-Record',
              attempt.id,
            ],
      clientGone: over.gone ?? (() => false),
      onGone: (left) => {
        this.watched++
        over.leaving?.then(left, () => {})
        return () => void this.watched--
      },
    }
  }

  /** A complete answer whose body this process has to make room for. */
  responded(status = 201, body: string | Buffer = '{"id":"p1"}', more: Partial<Responded> = {}): Forwarded {
    const bytes = Buffer.from(body)
    return {
      proof: 'responded',
      declaredOutcome: null,
      response: {
        status,
        reason: 'Made',
        headers: ['Content-Type', 'application/json', 'Set-Cookie', 'a=1', 'set-cookie', 'b=2'],
        body: bytes,
        trailers: [],
      },
      release: this.bytes.take(bytes.length),
      ...more,
    }
  }

  async #forward(request: UpstreamRequest): Promise<Forwarded> {
    this.asked.push(request)
    const reply = this.script.shift()
    if (reply instanceof Error) throw reply
    if (reply === undefined) return this.responded()
    return typeof reply === 'function' ? reply(request) : reply
  }

  /** The store's only record. */
  get id(): RecordId {
    return [...this.store.ids][0] as RecordId
  }

  close(): void {
    this.ports.leases.close()
    void this.ports.settler.close()
    this.ports.waiters.close()
  }
}

type Responded = Extract<Forwarded, { proof: 'responded' }>

export interface Sent {
  readonly key?: string | null
  readonly body?: string
  readonly headers?: readonly string[]
  readonly path?: string
  readonly query?: string
  readonly route?: RoutePolicy
  readonly anonymous?: boolean
  readonly reading?: BodyReading
  readonly upload?: Promise<void>
  readonly gone?: () => boolean
  /** Resolves when the client leaves; `gone` is true from then on. */
  readonly leaving?: Promise<unknown>
  /** `traceparent` of its own span. */
  readonly span?: string
}

export interface Seen {
  readonly status: number | null
  readonly code: RefusalCode | null
  readonly retryAfter: number | null
  readonly instance: string | null
  readonly scope: string | null
  readonly original: { readonly status: number; readonly location: string | null } | null
  /** Everything a client sees of a complete answer, except the proxyHeaders. */
  readonly bytes: string | null
  readonly replayed: boolean
  readonly proxyHeaders: readonly string[]
  readonly live: LiveResponse | null
}

/** A request whose upstream works. */
export interface Working {
  /** What its client sees. */
  readonly answer: Promise<Seen>
  /** Lets the upstream answer. */
  open(): void
  /** The same, and resolves to what the client sees. */
  end(): Promise<Seen>
}

/** Takes an answer as the writer does. */
export function seen(answer: Answer): Seen {
  const nothing = {
    status: null,
    code: null,
    retryAfter: null,
    instance: null,
    scope: null,
    original: null,
    bytes: null,
    replayed: false,
    proxyHeaders: [],
    live: null,
  }
  switch (answer.kind) {
    case 'none':
      return nothing
    case 'problem':
      return { ...nothing, ...answer.refusal, proxyHeaders: answer.proxyHeaders }
    case 'live':
      return { ...nothing, status: answer.live.status, proxyHeaders: answer.proxyHeaders, live: answer.live }
    case 'response': {
      const { status, reason, headers, body, trailers } = answer.response
      const { replayed, proxyHeaders } = answer
      const bytes = JSON.stringify([status, reason, headers, body.toString('latin1'), trailers])
      answer.release()
      return { ...nothing, status, bytes, replayed, proxyHeaders }
    }
  }
}

/** A streamed answer under the test's control. */
export class Stream implements LiveResponse {
  readonly status: number
  readonly reason = 'OK'
  readonly headers = ['Content-Type', 'text/event-stream', 'Location', '/v1/payments/1']
  readonly done: Promise<'complete' | 'broken'>
  readonly end: (how: 'complete' | 'broken') => void
  readonly kept = null
  drained = 0
  sink: LiveSink | null = null

  constructor(status = 200) {
    this.status = status
    const { promise, resolve } = Promise.withResolvers<'complete' | 'broken'>()
    this.done = promise
    this.end = resolve
  }
  attach(sink: LiveSink): void {
    this.sink = sink
  }
  drain(): void {
    this.drained++
  }
  abandon(): void {
    this.end('broken')
  }
  release(): void {}
  readonly brokenBy = 'a reset'
  readonly trailers = []
  declaredOutcome: string | null = null
  reply(
    why: 'streamed' | 'too_large' | 'no_room' = 'streamed',
    declaredOutcome: string | null = null,
  ): Forwarded {
    this.declaredOutcome = declaredOutcome
    return { proof: 'live', why, live: this }
  }
}

/** Holds the upstream's answer back until opened. */
export class Gate {
  readonly #reached = Promise.withResolvers<void>()
  readonly #opened = Promise.withResolvers<void>()
  readonly reached: Promise<void> = this.#reached.promise
  open(): void {
    this.#opened.resolve()
  }
  async pass(): Promise<void> {
    this.#reached.resolve()
    await this.#opened.promise
  }
  /** A scripted upstream answer that waits at the gate. */
  before(reply: () => Forwarded): () => Promise<Forwarded> {
    return async () => {
      await this.pass()
      return reply()
    }
  }
}

/** A replica that closes when the test ends. */
export function replica(t: Test, options: Options = {}): Replica {
  const made = new Replica(options)
  t.teardown(() => made.close())
  return made
}

/** Two replicas on one store. */
export function pair(t: Test): { readonly a: Replica; readonly b: Replica; readonly store: Store } {
  const store = new Store()
  return { a: replica(t, { store }), b: replica(t, { store }), store }
}

/** Asserts that the request is refused with that code and what else is expected, executes nothing and changes no record. */
export async function refused(
  t: Test,
  to: Replica,
  over: Sent,
  code: RefusalCode,
  expected: object = {},
  name = '',
): Promise<Seen> {
  const before = await to.store.dump()
  const { n } = to
  const answer = await to.get(over)
  t.match(answer, { ...expected, code }, name)
  t.same(await to.store.dump(), before, `${code}: the stored bytes are unchanged`)
  t.equal(to.n, n, `${code}: nothing was executed`)
  if (answer.retryAfter !== null)
    t.ok(Number.isInteger(answer.retryAfter) && answer.retryAfter >= 1, 'Retry-After is a whole number ≥ 1')
  return answer
}

/** Polls until `check` holds; for what emits no event. */
export async function until(check: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await check())) await new Promise((next) => setTimeout(next, 2))
}

/** Lets everything run that needs no outside event. */
export async function idle(): Promise<void> {
  for (let i = 0; i < 20; i++) await new Promise((next) => setImmediate(next))
}

/** Ends every pause at once, and notes how long it would have been. */
export function hurried(t: Test): number[] {
  const pauses: number[] = []
  const { setTimeout: real } = globalThis
  const value = (call: () => void, time: number, ...args: []): NodeJS.Timeout => {
    pauses.push(time)
    return real(call, 0, ...args)
  }
  t.intercept(globalThis, 'setTimeout', { value })
  return pauses
}

/** Timers of at least that length end only when the test calls the result; then that time has passed. */
export function overdue(t: Test, least = 10 * SECOND, most = Number.POSITIVE_INFINITY): () => void {
  const { setTimeout: real } = globalThis
  const { now } = performance
  const ends: (() => void)[] = []
  let passed = 0
  const value = (call: (...args: unknown[]) => void, time: number, ...args: unknown[]) => {
    if (time < least || time > most) return real(call, time, ...args)
    ends.push(() => {
      passed += time
      call(...args)
    })
    return { unref: () => ({}), hasRef: () => false }
  }
  t.intercept(globalThis, 'setTimeout', { value })
  t.intercept(performance, 'now', { value: () => now.call(performance) + passed })
  return () => {
    for (const end of ends.splice(0)) end()
  }
}

/** What repeats then does so only when the test calls the result. */
export function repeating(t: Test): () => Promise<void> {
  const calls: (() => void)[] = []
  const value = (call: () => void) => {
    calls.push(call)
    return { unref: () => ({}) }
  }
  t.intercept(globalThis, 'setInterval', { value })
  return async () => {
    for (const call of calls) call()
    await idle()
  }
}
