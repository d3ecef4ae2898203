import type { RoutePolicy } from '../../src/core/policy.ts'
import type { IdempotencyRecord, RecordId, StoredResponse } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import type { Seen } from '../protect/harness.ts'
import { policiesOf, type Scenario, type Wish } from './scenario.ts'
import type { Scheduler } from './scheduler.ts'

export interface Broken {
  readonly what: string
  /** The operation that it is about, as the timeline names it. */
  readonly about: string | null
}

/** What is known of one operation (caller and key), by everything that was seen of it. */
interface Known {
  readonly payloads: Set<string>
  /** Executions, in order: with the payload, and the answer that the upstream made. */
  readonly executed: { readonly payload: string; readonly bytes: string }[]
  /** Answers that were decided by status query or by an operator, as stored. */
  readonly decided: Set<string>
  /** So many more executions are allowed by name. */
  permits: number
  /** Executions whose responses were lost under `onResponseLost: retry`: each may be repeated once. */
  lost: number
  /** Fences of claims that reached no replica of the store. */
  readonly unreplicated: Set<number>
  /** The store has gone back, and said so: fences and versions may begin anew, but nothing is lost. */
  hasGoneBack: boolean
  /** The store has gone back: fences and versions begin anew, and a completed record may be another. */
  hasForgotten: boolean
  /** When it was last claimed. */
  claimedAt: number
  /** The latest that a store's clock has shown since the record was last written there. */
  readonly latest: Map<string, number>
  /** Who claimed, by token. */
  readonly claimants: Map<string, object>
  /** Claims, by token, that took the place of one whose lease had ended. */
  readonly retries: Set<string>
  /** Requests of which a byte has left. */
  sent: number
  /** Those that shadow mode forwarded without a claim. */
  shadowed: number
  /** Processes that have seen to its end what the upstream did for one of these, and that it was something. */
  readonly observedBy: Set<object>
  /** Why nothing may be executed for it any more; null: it may. */
  standing: string | null
  /** Processes that hold an outcome in memory alone because the store did not take it. */
  readonly deferredBy: Set<object>
  /** Of these, those whose disk did not take it in time, and who said so: it dies with them (docs/proof.md, assumption 5). */
  readonly unspooledBy: Set<object>
  /** Answers of which a client was told that they are stored, and who told it. */
  promised: { readonly by: object; readonly bytes: string } | null
}

export function nameOf({ caller, key }: Pick<Wish, 'caller' | 'key'>): string {
  return `${caller}/${key}`
}

/** As {@link Seen} has it. */
export function bytesOf({ status, reason, headers, body, trailers }: StoredResponse): string {
  return JSON.stringify([status, reason, headers, body.toString('latin1'), trailers])
}

const NOBODY = Buffer.alloc(16)

/** Hears everything that happens, and says what the contract forbids of it. */
export class Judge {
  broken: Broken | null = null
  readonly #scheduler: Scheduler
  readonly #scenario: Scenario
  readonly #known = new Map<string, Known>()
  readonly #names = new Map<RecordId, string>()
  readonly #policies: readonly RoutePolicy[]

  /** Processes that have given up an outcome. */
  readonly #losers = new Set<object>()

  constructor(scheduler: Scheduler, scenario: Scenario) {
    this.#scheduler = scheduler
    this.#scenario = scenario
    this.#policies = policiesOf(scenario)
  }

  /** Whether it was allowed at any time: a request keeps the route that it came under. */
  #some(allowed: (policy: RoutePolicy) => boolean): boolean {
    return this.#policies.some(allowed)
  }

  get #mayBypass(): boolean {
    return this.#some(({ onStoreUnavailable }) => onStoreUnavailable === 'bypass')
  }

  wrong(what: string, about: string | null): void {
    if (this.broken !== null) return
    this.broken = { what, about }
    this.#scheduler.tell('judge', `WRONG: ${what}`, about)
  }

  of(name: string): Known {
    let known = this.#known.get(name)
    if (known === undefined) {
      known = {
        payloads: new Set(),
        executed: [],
        decided: new Set(),
        permits: 0,
        lost: 0,
        unreplicated: new Set(),
        hasGoneBack: false,
        hasForgotten: false,
        claimedAt: 0,
        latest: new Map(),
        retries: new Set(),
        claimants: new Map(),
        sent: 0,
        shadowed: 0,
        observedBy: new Set(),
        standing: null,
        deferredBy: new Set(),
        unspooledBy: new Set(),
        promised: null,
      }
      this.#known.set(name, known)
    }
    return known
  }

  get names(): Iterable<[RecordId, string]> {
    return this.#names
  }

  nameOf(id: RecordId | null): string | null {
    return id === null ? null : (this.#names.get(id) ?? null)
  }

  isSentAs(id: RecordId, wish: Wish): void {
    const name = nameOf(wish)
    this.of(name).payloads.add(wish.payload)
    const other = this.#names.get(id)
    if (other !== undefined && other !== name) this.wrong(`two operations share a record: ${other}`, name)
    this.#names.set(id, name)
  }

  /** Another execution may follow, by what the contract names. */
  permit(name: string, why: string): void {
    this.of(name).permits++
    this.#scheduler.tell('judge', `one more execution is allowed: ${why}`, name)
  }

  /** Executed, and its response was lost under `onResponseLost: retry`, in whatever order. */
  lostResponse(name: string): void {
    this.of(name).lost++
    this.#scheduler.tell('judge', 'one more execution is allowed: onResponseLost: retry', name)
  }

  /** Executed without a claim. */
  bypassed(name: string): void {
    if (!this.#mayBypass) this.wrong('executed without a claim', name)
    this.permit(name, 'onStoreUnavailable: bypass')
  }

  /** Forwarded in shadow mode, without a claim, and executed. */
  shadowed(name: string): void {
    if (!this.#some(({ mode }) => mode === 'shadow')) this.wrong('executed without a claim', name)
    this.of(name).shadowed++
    this.permit(name, 'mode: shadow')
  }

  /** The route protects, and nothing that shadow mode has seen is on its way to the store any more: it is honoured from now on. */
  enforced(isSure: (by: object) => boolean): void {
    const isFreed = this.#scenario.incidents.some(
      (one) => one.kind === 'operator' && one.says === 'retryable',
    )
    if (isFreed || this.#some((one) => one.onLeaseExpired === 'retry' || one.onResponseLost === 'retry'))
      return
    for (const known of this.#known.values()) {
      // Another payload is told to use another key, and what it did is nobody's to keep.
      if (known.payloads.size > 1 || known.hasForgotten || known.hasGoneBack) continue
      // Without a claim an outcome may find another one's record, which refuses it.
      const isWritten = (by: object): boolean => isSure(by) && !known.deferredBy.has(by)
      if ([...known.observedBy].some(isWritten)) known.standing = 'shadow mode saw it done'
    }
  }

  /** Without a claim, shadow mode or `onStoreUnavailable: bypass` forwarded it, perhaps long before it arrived. */
  executed(wish: Wish, response: StoredResponse, isClaimed: boolean): void {
    const name = nameOf(wish)
    const { executed, permits, lost, standing } = this.of(name)
    const allowed = 1 + permits + lost
    if (standing !== null && isClaimed) this.wrong(`executed again although ${standing}`, name)
    executed.push({ payload: wish.payload, bytes: bytesOf(response) })
    if (executed.length > allowed)
      this.wrong(`executed ${executed.length} times, allowed are ${allowed}`, name)
  }

  forgot(name: string): void {
    const known = this.of(name)
    known.hasForgotten = true
    known.unreplicated.clear()
    this.permit(name, 'the store went back')
  }

  /** The store has failed over: until the grace is over it is not known whether everybody has written again what was lost. */
  wentBack(name: string): void {
    const known = this.of(name)
    known.hasGoneBack = true
    // Another claim may get the same fence.
    known.unreplicated.clear()
  }

  unreplicated(id: RecordId, fence: number): void {
    const name = this.nameOf(id)
    if (name === null) return
    const { hasForgotten, hasGoneBack, unreplicated } = this.of(name)
    // Late news of a claim that is gone: another one may have its fence.
    if (!hasForgotten && !hasGoneBack) unreplicated.add(fence)
  }

  /** A request leaves for the upstream under that fence. */
  sends(name: string, fence: number): void {
    const known = this.of(name)
    known.sent++
    if (known.unreplicated.has(fence)) this.wrong('sent although no replica of the store has its claim', name)
  }

  /** A process has ended gracefully, and holds nothing: unless it gave something up, what it told its clients must be in the store. */
  drained(by: object): void {
    if (this.#losers.has(by)) return
    for (const known of this.#known.values()) known.deferredBy.delete(by)
  }

  /** A process gives up an outcome that the store does not take, as one that dies. */
  losesOutcome(by: object): void {
    this.#losers.add(by)
  }

  /** From that on the store's clock shows another time. Whoever read a record before may still write. */
  clockSteps(now: number, store: string): void {
    for (const { latest } of this.#known.values()) latest.set(store, Math.max(latest.get(store) ?? 0, now))
  }

  /** Whether that process must see that a claim still lives in the other of two stores. */
  livesElsewhere: (id: RecordId, token: Buffer, by: object, store: string) => boolean = () => false

  /** The store has taken a write. `before`: null where there was no record. */
  wrote(id: RecordId, before: Buffer | null, after: Buffer, now: number, by: object, store: string): void {
    const name = this.nameOf(id)
    if (name === null) return
    const known = this.of(name)
    const next = decodeRecord(after)
    const token = next.token.toString('hex')
    if (next.state === 'completed' && next.token.equals(NOBODY) && next.result.kept)
      known.decided.add(bytesOf(next.result.response))
    this.#scheduler.tell(store, `holds ${told(next)}`, name)
    if (next.state === 'completed') this.#isTrue(known, next, name)
    if (next.state === 'in_progress') {
      known.claimedAt = this.#scheduler.now
      if (!known.claimants.has(token)) known.claimants.set(token, by)
    }
    const latest = Math.max(now, known.latest.get(store) ?? 0)
    known.latest.set(store, now)
    if (before === null) return
    const last = decodeRecord(before)
    const isLapsed =
      last.state === 'in_progress' ? latest >= last.leaseUntil : last.state === 'unknown' && last.leaseExpired
    const isClaimedOver = next.state === 'in_progress' && !next.token.equals(last.token)
    const mayRetry =
      isClaimedOver && isLapsed && this.#some(({ onLeaseExpired }) => onLeaseExpired === 'retry')
    // Of two stores both hear of it.
    if (mayRetry && !known.retries.has(token)) {
      known.retries.add(token)
      if (this.livesElsewhere(id, last.token, by, store))
        this.wrong('a claim was taken over that lives in the other store', name)
      this.permit(name, 'onLeaseExpired: retry')
    }
    // From then on another attempt's record may stand in for one that was lost. One of two stores may follow the other.
    if (known.hasForgotten || known.hasGoneBack || this.#scenario.move !== null) return
    if (next.version <= last.version) this.wrong(`version ${last.version} → ${next.version}`, name)
    if (next.fence < last.fence) this.wrong(`fence ${last.fence} → ${next.fence}`, name)
    if (last.state === 'completed' && isTakenOut(next)) this.#isOver(last, next, now, name)
    else if (last.state === 'completed') this.wrong(`a completed record became ${told(next)}`, name)
    // A process that meets a run of its own gives it back the record that it has just claimed, or the outcome of that run.
    const claimant = known.claimants.get(last.token.toString('hex'))
    const mayYield = this.#mayBypass || (by === claimant && by === known.claimants.get(token))
    if (mayYield || known.permits > 0) return
    if (last.state === 'in_progress' && !isLapsed) this.#isOwners(last, next, name)
    if (!isClaimedOver) return
    if (next.fence <= last.fence) this.wrong(`claimed over at the same fence ${last.fence}`, name)
    if (last.state !== 'failed_retryable') this.wrong(`a record that is ${told(last)} was claimed over`, name)
  }

  /** While the lease runs, only its owner writes. */
  #isOwners(last: IdempotencyRecord, next: IdempotencyRecord, name: string): void {
    if (!next.token.equals(last.token)) this.wrong(`somebody else made of a live claim ${told(next)}`, name)
    // A sweep may have read the record before the store's clock was set back.
    else if (next.state === 'unknown' && next.leaseExpired && !this.#steps())
      this.wrong('a lease was ended before its time', name)
  }

  /** A response is taken out when its time is over, and nothing else changes. */
  #isOver(last: Completed, next: Completed, now: number, name: string): void {
    const end = bodyEndOf(last)
    if (end === null) return this.wrong('a response was taken out that does not end before its record', name)
    if (!next.token.equals(last.token) || next.fence !== last.fence)
      this.wrong(`a response was taken out, and ${told(last)} became ${told(next)}`, name)
    // The clock may have stepped between the look and the write.
    if (this.#steps()) return
    if (now < end) this.wrong('a response was taken out before its time', name)
    if (next.expiresAt < last.expiresAt) this.wrong('a record ends sooner without its response', name)
  }

  /** What is stored as the answer is one that the upstream gave, or that was decided. */
  #isTrue(known: Known, { token, result }: Completed, name: string): void {
    if (!result.kept || token.equals(NOBODY)) return
    const bytes = bytesOf(result.response)
    if (!known.executed.some((one) => one.bytes === bytes))
      this.wrong('an answer was stored that nobody gave', name)
  }

  /** A client got an answer. `by`: the process that gave it. `isOwn`: that of its own request, whatever there is in the store. */
  answered(wish: Wish, seen: Seen, by: object, isOwn: boolean, isBodyOver: boolean): void {
    const name = nameOf(wish)
    const known = this.of(name)
    const { bytes, replayed, code } = seen
    if (code === 'idempotency_key_reused' && known.payloads.size < 2)
      this.wrong('refused as another request, although there was none', name)
    // Outcomes without a claim are remembered for slow claims without their bodies.
    const allClaim = !this.#mayBypass && !this.#some(({ mode }) => mode === 'shadow')
    const isKept = this.#keepsAll() && !isBodyOver && allClaim
    if (code === 'idempotency_response_unavailable' && isKept) this.wrong('the answer was not kept', name)
    if (bytes === null) return
    const isExecuted = known.executed.some((one) => one.bytes === bytes && one.payload === wish.payload)
    // Of two payloads under one key a status query may find either, where the store has lost the first or an execution had no claim.
    const isAmbiguous = known.hasForgotten || known.shadowed > 0 || this.#mayBypass
    if (known.payloads.size > 1 && isAmbiguous) return
    const isDecided = known.decided.has(bytes) && (payloadOf(bytes) ?? wish.payload) === wish.payload
    if (replayed ? !isExecuted && !isDecided : !isExecuted && !isDecided && !isRefusal(bytes))
      this.wrong(`answered with ${bytes}, which is not the answer to "${wish.payload}"`, name)
    if (isExecuted && isStored(bytes) && !isOwn) known.promised ??= { by, bytes }
  }

  /** To a request that came when the response was over. */
  answeredAfterBody(wish: Wish, { bytes, replayed }: Seen): void {
    if (replayed && bytes !== null && !this.#steps()) this.wrong('replayed after its ttl.body', nameOf(wish))
  }

  /** Nothing can go wrong any more, and everything had time: what must hold now. */
  end(
    read: (id: RecordId) => IdempotencyRecord | null,
    isAlive: (by: object) => boolean,
    inForce: RoutePolicy,
  ): void {
    for (const [id, name] of this.#names) {
      const known = this.of(name)
      const record = read(id)
      if (record === null) {
        this.wrong('there is no record after the last retry', name)
        continue
      }
      const { state } = record
      if (state === 'in_progress') this.wrong('it stays in progress', name)
      // A replica that hears late of a failover writes again that nothing was done.
      if (state === 'failed_retryable' && !known.hasGoneBack)
        this.wrong('it stays free although it was asked for', name)
      if (state === 'unknown' && this.canBeAsked(record, inForce))
        this.wrong('it stays unknown although the upstream can be asked', name)
      // A failover may bring back a claim that its owner had given up.
      const isFirst = known.sent === 0 && !known.hasForgotten && !known.hasGoneBack
      // Of two stores, the one that missed the end of an attempt may hold the key (isAhead in src/core/copies.ts).
      const isOne = this.#scenario.move === null
      if (state === 'unknown' && isFirst && isOne && !this.#hasDeaths())
        this.wrong('it stays unknown although nothing was ever sent and nobody died', name)
      const { promised } = known
      if (promised === null || known.permits > 0 || known.hasForgotten) continue
      const isGone = !isAlive(promised.by) && known.deferredBy.has(promised.by)
      if (isGone && (!this.#scenario.hasSpool || known.unspooledBy.has(promised.by))) continue
      if (state !== 'completed') this.wrong('an outcome that a client was told was lost', name)
      else if (
        record.result.kept &&
        !record.token.equals(NOBODY) &&
        bytesOf(record.result.response) !== promised.bytes
      )
        this.wrong('another answer is stored than a client was given', name)
    }
  }

  /** Whether the upstream can be asked about it: by the route of its name, about what it was told. Shadow mode tells it nothing. */
  canBeAsked(
    { route, received }: Pick<IdempotencyRecord, 'route' | 'received'>,
    inForce: RoutePolicy,
  ): boolean {
    const isTold = received?.includes('record') === true || !this.#some(({ mode }) => mode === 'shadow')
    return inForce.reconcile !== null && route === inForce.name && isTold
  }

  #steps(): boolean {
    return this.#scenario.incidents.some(({ kind }) => kind === 'store clock')
  }

  #hasDeaths(): boolean {
    const { incidents, weather } = this.#scenario
    return this.#losers.size > 0 || weather.deaths > 0 || incidents.some(({ kind }) => kind === 'crash')
  }

  #keepsAll(): boolean {
    const { weather } = this.#scenario
    return this.#policies.every(({ keep }) => keep === 'response') && weather.full === 0 && weather.odd === 0
  }
}

type Completed = Extract<IdempotencyRecord, { state: 'completed' }>

/** When its response ends, by the store's clock; null: with the record, or it has none. */
function bodyEndOf(record: IdempotencyRecord): number | null {
  if (record.state !== 'completed' || !record.result.kept) return null
  const { afterBody } = record.result
  return afterBody === undefined ? null : record.expiresAt - afterBody
}

/** Whether nobody may get the response of what is stored any more. */
export function isBodyOver(bytes: Buffer | null, now: number): boolean {
  if (bytes === null) return false
  const record = decodeRecord(bytes)
  const end = bodyEndOf(record)
  return isTakenOut(record) || (end !== null && now >= end)
}

export function isTakenOut(record: IdempotencyRecord): record is Completed {
  return record.state === 'completed' && !record.result.kept && record.result.why === 'past_ttl'
}

/** Of the upstream: it did nothing, or says that it does not know. */
function isRefusal(bytes: string): boolean {
  const [status, , , body] = JSON.parse(bytes) as [number, string, string[], string]
  return status === 429 || status === 503 || body.includes('"nothing"')
}

/** As an answer whose status is stored (contract §7, `standard`). */
function isStored(bytes: string): boolean {
  const [status] = JSON.parse(bytes) as [number]
  return status !== 429 && status !== 503
}

/** Undefined: an operator entered it. */
function payloadOf(bytes: string): unknown {
  const [, , , body] = JSON.parse(bytes) as [number, string, string[], string]
  return (JSON.parse(body) as { payload?: unknown }).payload
}

export function told(record: IdempotencyRecord): string {
  const { state, fence, token, version } = record
  const whose = token.equals(NOBODY) ? 'of nobody' : `of ${token.toString('hex', 0, 2)}`
  const why =
    record.state === 'unknown' ? (record.reconciliation?.answer ?? record.lastError) : record.lastError
  return `${state} ${whose}, fence …${fence % 1_000_000}, version …${version % 1_000_000}${why === null ? '' : `: ${why}`}`
}
