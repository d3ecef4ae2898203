import { digestResponse, type ResponseDigest, sameResponse } from '../core/fingerprint.ts'
import { shortId } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Outcome, type RecordId } from '../core/record.ts'
import { keepsBody, replayable, unknownBecause } from '../core/settle.ts'
import { stateFound } from '../protect/answers.ts'
import { claim } from '../protect/claim.ts'
import { finish } from '../protect/finish.ts'
import { noteCaller, noteOperation, summarize } from '../protect/guard.ts'
import { callerName, type Identified, identify, readHead } from '../protect/identify.ts'
import { SHADOW_VERDICTS, type ShadowVerdict } from '../protect/outcomes.ts'
import type { WalkPorts } from '../protect/ports.ts'
import {
  type Answer,
  type BodyReading,
  type Execution,
  type Existing,
  type Facts,
  type ProtectedRequest,
  type RequestLabels,
  type ShadowSummary,
} from '../protect/request.ts'
import { inSteps } from '../runtime/scheduling.ts'
import type { TappedExchange } from '../upstream/port.ts'
import { type Beside, mergeOutcome, type ObservedOutcome } from './merge-outcome.ts'
import { ignoreExchange, type Observed, observeExchange } from './observe.ts'

/** Shadow mode adds outcomes only below this many unsettled ones: the settler's room is for protected routes. */
const MAX_HELD = 1000

/** Fields of a log line besides the verdict. */
type ShadowFacts = Omit<Facts, 'outcome'> & Partial<Pick<ShadowSummary, 'retryAge' | 'regenerated'>>

/** A request under observation, and its exchange. */
interface WatchedRequest {
  readonly request: ProtectedRequest
  readonly upstream: TappedExchange
  /** The upstream's response. */
  readonly hear: () => Promise<Observed>
  /** The first verdict counts. */
  readonly tell: (verdict: ShadowVerdict, facts: ShadowFacts) => void
}

/** The requests of one record on this replica, decided in the order in which their bodies completed. */
interface RecordQueue {
  users: number
  turn: Promise<void>
  /** The latest request that holds the claim. */
  owner: { readonly upstream: TappedExchange; readonly settled: Promise<void> } | null
}

interface Owned {
  readonly kind: 'owned'
  readonly execution: Execution
  readonly facts: ShadowFacts
  readonly settled: PromiseWithResolvers<void>
}
/** The follow-up for a request that is decided. */
type Next =
  /** It holds the claim. */
  | Owned
  /** The record has a response: compare the new one with it. */
  | { readonly kind: 'compare'; readonly first: ResponseDigest; readonly facts: ShadowFacts }
  /** `enforce` would not have executed it, and the record's outcome is not known yet. */
  | { readonly kind: 'beside'; readonly verdict: ShadowVerdict; readonly facts: ShadowFacts }
  | { readonly kind: 'decided'; readonly verdict: ShadowVerdict; readonly facts: ShadowFacts }

/**
 * Shadow mode (contract §10). All requests are forwarded; in parallel, the steps of the walk (readHead, identify, claim, finish) determine
 * what `enforce` would have done. No request or response waits for that, and its errors reach no client. The records are real: a route
 * that switches to `enforce` honours them.
 */
export class Shadow {
  readonly #ports: WalkPorts
  readonly #onVerdict: (summary: ShadowSummary, verdict: ShadowVerdict) => void
  readonly #lanes = new Map<RecordId, RecordQueue>()
  #size = 0
  #merging = 0
  #givingUp = false
  #closed = false

  /** `onVerdict` is called once per request; it must not throw. */
  constructor(ports: WalkPorts, onVerdict: (summary: ShadowSummary, verdict: ShadowVerdict) => void) {
    // Not counted as claims: the verdicts count them.
    this.#ports = { ...ports, observer: { ...ports.observer, claimed() {}, leaseExpired() {} } }
    this.#onVerdict = onVerdict
  }

  /** Requests under observation; the drain waits for them. */
  get size(): number {
    return this.#size
  }

  /** Takes one of `limits.inFlight` places, which {@link observe} releases. False: none is free, and the verdict says so. */
  enter(request: RequestLabels): boolean {
    if (this.#size >= this.#ports.inFlight.most) {
      this.#report(request, 'overloaded', {})
      return false
    }
    this.#size++
    return true
  }

  /** Observes one request to its end. Its `clientGone` must return false: it was forwarded. Never rejects. */
  async observe(request: ProtectedRequest, upstream: TappedExchange): Promise<void> {
    const { route, progress } = request
    const body = Promise.resolve(request.readBody())
    let isReported = false
    let observed: Promise<Observed> | null = null
    const followed: WatchedRequest = {
      request,
      upstream,
      hear: () => (observed ??= observeExchange(request, upstream)),
      tell: (verdict, facts) => {
        if (!isReported) this.#report(request, verdict, facts)
        isReported = true
      },
    }
    try {
      const identified = await this.#identify(followed, body)
      if (identified.kind === 'identified') await this.#follow(followed, identified)
      else followed.tell(identified.verdict, identified.facts)
    } catch (error) {
      this.#ports.observer.trouble('internal error in shadow mode; traffic is unaffected', {
        route: route.name,
        record: progress.id === null ? null : shortId(progress.id),
        error: String(error),
      })
      followed.tell('error', {})
    } finally {
      this.#size--
      progress.letGo?.()
      void body.then((reading) => reading.kind === 'body' && reading.release())
      if (observed === null) void ignoreExchange(upstream)
    }
  }

  /** The proxy stops: abandons whatever still waits for the store or another replica. */
  close(): void {
    this.#closed = true
  }

  #report(request: RequestLabels, verdict: ShadowVerdict, facts: ShadowFacts): void {
    const { retryAge = null, regenerated = false, ...rest } = facts
    this.#onVerdict({ ...summarize(request, rest, null), retryAge, regenerated }, verdict)
  }

  async #identify(
    { request, hear }: WatchedRequest,
    body: Promise<BodyReading>,
  ): Promise<Identified | Extract<Next, { kind: 'decided' }>> {
    const head = await readHead(this.#ports, request)
    if (head.kind !== 'head') return refusedBy(head)
    const received = await body
    switch (received.kind) {
      case 'too_large':
        return { kind: 'decided', verdict: 'request_too_large', facts: {} }
      case 'no_room':
        return { kind: 'decided', verdict: 'overloaded', facts: {} }
      case 'aborted':
      case 'timeout': {
        // Without a destination, nobody reads the body.
        const { failed, cause, release } = await hear()
        release()
        const verdict = failed === 'upstream_unreachable' ? failed : 'request_aborted'
        return { kind: 'decided', verdict, facts: { cause } }
      }
      case 'body': {
        const identified = await identify(this.#ports, request, head, received.body)
        if (identified.kind === 'identified') return identified
        if (identified.kind === 'no_key') return { kind: 'decided', verdict: 'passed', facts: {} }
        return refusedBy(identified)
      }
    }
  }

  async #follow(followed: WatchedRequest, identified: Identified): Promise<void> {
    const { request, upstream, hear, tell } = followed
    const { id } = identified
    const lane = this.#lanes.get(id) ?? { users: 0, turn: Promise.resolve(), owner: null }
    this.#lanes.set(id, lane)
    lane.users++
    try {
      const next = await inTurn(lane, async () => {
        const decided = await this.#decide(request, identified)
        if (decided.kind === 'owned') lane.owner = { upstream, settled: decided.settled.promise }
        return decided
      })
      switch (next.kind) {
        case 'owned':
          return await this.#own(followed, next)
        case 'compare': {
          const { response, cause, release } = await hear()
          const facts = { ...next.facts, cause }
          if (response === null) tell('not_compared', facts)
          else
            tell(sameResponse(next.first, digestResponse(response)) ? 'replay_same' : 'replay_differs', facts)
          return release()
        }
        case 'beside':
          tell(next.verdict, next.facts)
          return await this.#beside(followed, identified, lane)
        case 'decided':
          return tell(next.verdict, next.facts)
      }
    } finally {
      if (--lane.users === 0) this.#lanes.delete(id)
    }
  }

  async #decide(request: ProtectedRequest, identified: Identified): Promise<Next> {
    const { settler, observer } = this.#ports
    if (settler.size >= MAX_HELD) return { kind: 'decided', verdict: 'store_unavailable', facts: {} }
    // It is executed in any case: without a claim, its outcome is merged once the store answers.
    const route: RoutePolicy = { ...request.route, onStoreUnavailable: 'bypass' }
    const { progress } = request
    const bypassing = { route, progress, clientGone: () => request.clientGone(), onGone: null }
    const claimed = await claim(this.#ports, bypassing, identified)
    if (claimed.kind === 'existing') {
      const next = nextOf(claimed.existing, request.route)
      const { retryAge = null } = next.facts
      if (retryAge !== null) observer.retryAge(route.name, retryAge)
      return next
    }
    if (claimed.kind !== 'execution') return refusedBy(claimed)
    const { before, attempt } = claimed
    const caller = callerName({ kind: 'caller', parts: identified.caller })
    const regenerated = noteOperation(this.#ports, claimed, identified.key, caller)
    const facts = { before, fence: attempt.fence || null, regenerated }
    return { kind: 'owned', execution: claimed, facts, settled: Promise.withResolvers() }
  }

  /** It owns the record: settled as in the walk, except that nobody waits. */
  async #own(
    { request: { progress, headers }, hear, tell }: WatchedRequest,
    { execution, facts, settled }: Owned,
  ): Promise<void> {
    const { id, route, attempt, requestedAt, before, unclaimed } = execution
    let outcome: Outcome = unknownBecause('internal error in shadow mode', null)
    let release = (): void => {}
    this.#ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, requestedAt)
    if (unclaimed !== null) tell('store_unavailable', facts)
    let observed: Observed
    let after: ShadowFacts['after']
    try {
      observed = await hear()
      outcome = observed.outcome
      release = observed.release
      noteCaller(this.#ports, execution, headers, observed.headers, outcome)
      if (!keepsBody(outcome)) release()
    } finally {
      const settling = Promise.resolve(finish(this.#ports, progress, execution, outcome, release))
      after = (await settling.finally(settled.resolve)).state
    }
    const { failed, cause } = observed
    tell(failed ?? (before === 'absent' ? 'first' : 'retry'), { ...facts, after, cause })
  }

  /** Executed beside the record's own attempt: merging its outcome keeps later retries safe. */
  async #beside(
    { request, hear }: WatchedRequest,
    { id, operation, asked }: Identified,
    lane: RecordQueue,
  ): Promise<void> {
    const { route } = request
    const { outcome, release } = await hear()
    try {
      if (outcome.kind === 'not_executed') return
      await lane.owner?.settled
      if (asked.isLong) await inSteps(asked.finish())
      const attempt = { fence: 0, token: this.#ports.newToken(), attempts: 1 }
      const written = await this.#merge({ id, route, operation: operation(), attempt }, outcome)
      if (!written && !this.#givingUp)
        this.#ports.observer.trouble('the outcomes of forwarded duplicates could not be recorded', {
          route: route.name,
          record: shortId(id),
        })
      // Logged once: while the store is down, all are abandoned.
      this.#givingUp = !written
    } finally {
      release()
    }
  }

  /** False: given up. A hanging store must not occupy all places: further requests would be reported as `overloaded`. */
  async #merge(beside: Beside, outcome: ObservedOutcome): Promise<boolean> {
    if (this.#merging >= this.#ports.inFlight.most / 2) return false
    this.#merging++
    try {
      return await mergeOutcome(this.#ports, beside, outcome, () => this.#closed)
    } finally {
      this.#merging--
    }
  }
}

/**
 * A retry must find the response that its client already got, although no response waits for the store: it is judged after earlier claims
 * are decided and finished exchanges settled.
 */
async function inTurn<T>(lane: RecordQueue, step: () => Promise<T>): Promise<T> {
  const before = lane.turn
  const { promise, resolve } = Promise.withResolvers<void>()
  lane.turn = promise
  await before
  try {
    if (lane.owner?.upstream.over) await lane.owner.settled
    return await step()
  } finally {
    resolve()
  }
}

/** The follow-up for a request whose record exists. */
function nextOf(existing: Existing, route: RoutePolicy): Exclude<Next, Owned> {
  let facts: ShadowFacts = { before: stateFound(existing) }
  switch (existing.kind) {
    case 'replay': {
      const { result, now, createdAt } = existing
      if (now > 0) facts = { ...facts, retryAge: now - createdAt }
      if (!result.kept) return { kind: 'decided', verdict: 'response_unavailable', facts }
      return { kind: 'compare', first: digestResponse(replayable(route, result.response)), facts }
    }
    case 'reused':
      return { kind: 'decided', verdict: 'misuse', facts }
    case 'in_progress': {
      const verdict = route.inFlight.mode === 'wait' ? 'waited' : 'in_progress'
      return { kind: 'beside', verdict, facts }
    }
    case 'unknown':
      return { kind: 'beside', verdict: 'unknown', facts }
    case 'expired':
      return { kind: 'decided', verdict: 'expired', facts }
  }
}

/** The refusal that the walk would have sent. */
function refusedBy({ facts }: Answer): Extract<Next, { kind: 'decided' }> {
  const verdict =
    facts.outcome !== null && facts.outcome in SHADOW_VERDICTS ? (facts.outcome as ShadowVerdict) : 'error'
  return { kind: 'decided', verdict, facts }
}
