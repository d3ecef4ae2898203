import { digestResponse, type ResponseDigest, sameResponse } from '../core/fingerprint.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Outcome, type RecordId, shortId } from '../core/record.ts'
import { admit } from '../protect/admit.ts'
import type { Execute, Existing } from '../protect/claim.ts'
import { keepsBody, replayable, unknownBecause } from '../protect/classify.ts'
import { finish } from '../protect/execute.ts'
import { type Identified, identify, readHead } from '../protect/identify.ts'
import { SHADOW_VERDICTS, type ShadowVerdict } from '../protect/outcomes.ts'
import type { Ports } from '../protect/ports.ts'
import { type Execution, newTrace, type ProtectedRequest, type Trace } from '../protect/request.ts'
import type { TappedExchange } from '../upstream/port.ts'
import { mergeOutcome, type ObservedOutcome } from './merge-outcome.ts'
import { ignoreExchange, type Observed, observeExchange } from './observe.ts'

/** Unsettled outcomes up to which shadow adds its own: the settler's room is for the routes that protect. */
const HELD_MOST = 1000

/** Hears how the upstream answers the request. */
type Hear = () => Promise<Observed>
/** Once; later words are ignored. */
type Tell = (verdict: ShadowVerdict) => void

/** The requests of one record on this replica: decided one after the other, in the order in which they were whole. */
interface Lane {
  users: number
  turn: Promise<void>
  /** The latest of them that holds the claim. */
  owner: { readonly upstream: TappedExchange; readonly settled: Promise<void> } | null
}

interface Own {
  readonly kind: 'own'
  readonly execute: Execute
  readonly settled: PromiseWithResolvers<void>
}
/** What a request is to its record, and so what is left to do once it is decided. */
type Part =
  /** It holds the claim. */
  | Own
  /** The record has an answer. */
  | { readonly kind: 'compare'; readonly first: ResponseDigest }
  /** `enforce` would not have executed it, and whether the operation is done is open. */
  | { readonly kind: 'beside'; readonly verdict: ShadowVerdict }
  | { readonly kind: 'decided'; readonly verdict: ShadowVerdict }

/**
 * Shadow mode (contract §10): decides beside requests that are forwarded anyway, by the very steps of the walk (introduce,
 * name, admit, finish), and says what `enforce` would have done. No request and no answer waits for anything here, and no
 * error leaves. The records are true ones: a route that moves on to `enforce` honours them.
 */
export class Shadow {
  readonly #ports: Ports
  /** As it is now: it may change while the proxy runs. */
  readonly #bound: Pick<Ports, 'maxInFlight'>
  readonly #onVerdict: (trace: Trace, verdict: ShadowVerdict) => void
  readonly #lanes = new Map<RecordId, Lane>()
  #size = 0
  #merging = 0
  #givingUp = false
  #closed = false

  /** `onVerdict` hears each request's verdict, once; it must not throw. */
  constructor(ports: Ports, onVerdict: (trace: Trace, verdict: ShadowVerdict) => void) {
    // These claims protect nobody: they are counted by their verdicts alone.
    this.#ports = { ...ports, observer: { ...ports.observer, claimed() {}, leaseExpired() {} } }
    this.#bound = ports
    this.#onVerdict = onVerdict
  }

  /** Requests that are looked at now; the drain waits for them. */
  get size(): number {
    return this.#size
  }

  /** Takes one of `limits.inFlight` places, which {@link observe} gives back. False: there is none, which is told. */
  enter(request: Pick<ProtectedRequest, 'route' | 'method' | 'traceId'>): boolean {
    if (this.#size >= this.#bound.maxInFlight) {
      this.#onVerdict(newTrace(request), 'overloaded')
      return false
    }
    this.#size++
    return true
  }

  /** Follows one request to its end. Its `clientGone` must say false: what was sent was sent. Never rejects. */
  async observe(request: ProtectedRequest, upstream: TappedExchange): Promise<void> {
    const trace = newTrace(request)
    const body = request.readBody()
    let decided = false
    const tell: Tell = (verdict) => {
      if (!decided) this.#onVerdict(trace, verdict)
      decided = true
    }
    let observed: Promise<Observed> | null = null
    const hear: Hear = async () => {
      observed ??= observeExchange(request, upstream)
      const { cause } = await observed
      trace.cause ??= cause
      return await observed
    }
    try {
      const identified = await this.#name(request, trace, body, hear)
      if (typeof identified === 'string') tell(identified)
      else await this.#follow(request, trace, identified, upstream, hear, tell)
    } catch (error) {
      this.#ports.observer.trouble('internal error in shadow mode; the traffic is not touched', {
        route: request.route.name,
        record: trace.id === null ? null : shortId(trace.id),
        error: String(error),
      })
      tell('error')
    } finally {
      this.#size--
      void body.then((reading) => reading.kind === 'body' && reading.release())
      if (observed === null) void ignoreExchange(upstream)
    }
  }

  /** The proxy stops: what still waits for the store, or for another replica's attempt, is given up. */
  close(): void {
    this.#closed = true
  }

  async #name(
    request: ProtectedRequest,
    trace: Trace,
    body: ReturnType<ProtectedRequest['readBody']>,
    hear: Hear,
  ): Promise<Identified | ShadowVerdict> {
    const head = await readHead(this.#ports, request, trace)
    if (head.kind !== 'head') return verdictOf(trace)
    const received = await body
    switch (received.kind) {
      case 'too_large':
        return 'request_too_large'
      case 'no_room':
        return 'overloaded'
      case 'aborted':
      case 'timeout': {
        // Nobody reads a body that there is nobody to send to.
        const { failed, release } = await hear()
        release()
        return failed === 'upstream_unreachable' ? failed : 'request_aborted'
      }
      case 'body': {
        const identified = await identify(this.#ports, request, trace, head, received.body)
        if (identified.kind === 'identified') return identified
        return identified.kind === 'no_key' ? 'passed' : verdictOf(trace)
      }
    }
  }

  async #follow(
    request: ProtectedRequest,
    trace: Trace,
    identified: Identified,
    upstream: TappedExchange,
    hear: Hear,
    tell: Tell,
  ): Promise<void> {
    const { id } = identified
    const lane = this.#lanes.get(id) ?? { users: 0, turn: Promise.resolve(), owner: null }
    this.#lanes.set(id, lane)
    lane.users++
    try {
      const part = await inTurn(lane, async () => {
        const decided = await this.#decide(request, trace, identified)
        if (decided.kind === 'own') lane.owner = { upstream, settled: decided.settled.promise }
        return decided
      })
      switch (part.kind) {
        case 'own':
          return await this.#own(trace, part, hear, tell)
        case 'compare':
          return await compare(part.first, hear, tell)
        case 'beside':
          tell(part.verdict)
          return await this.#beside(request, identified, lane, hear)
        case 'decided':
          return tell(part.verdict)
      }
    } finally {
      if (--lane.users === 0) this.#lanes.delete(id)
    }
  }

  async #decide(request: ProtectedRequest, trace: Trace, identified: Identified): Promise<Part> {
    if (this.#ports.settler.size >= HELD_MOST) return { kind: 'decided', verdict: 'store_unavailable' }
    // It is executed, whatever the store says: without a claim its outcome is told as soon as somebody listens.
    const route: RoutePolicy = { ...request.route, onStoreUnavailable: 'bypass' }
    const admitted = await admit(this.#ports, { ...request, route }, trace, identified)
    const { observer, regenerated } = this.#ports
    if (admitted.kind === 'existing') {
      const part = partOf(admitted.existing, trace, request.route)
      if (trace.retryAge !== null) observer.retryAge(route.name, trace.retryAge)
      return part
    }
    if (admitted.kind !== 'execute') return { kind: 'decided', verdict: verdictOf(trace) }
    trace.fence = admitted.execution.attempt.fence || null
    trace.regenerated = trace.before === 'absent' && regenerated.saw(admitted.execution, identified.caller)
    if (trace.regenerated) observer.regenerated(route.name)
    return { kind: 'own', execute: admitted, settled: Promise.withResolvers() }
  }

  /** Its attempt is the record's, settled as the walk settles it, but that nobody waits for it. */
  async #own(trace: Trace, { execute, settled }: Own, hear: Hear, tell: Tell): Promise<void> {
    const { execution, askedAt, unclaimed } = execute
    const { id, route, attempt } = execution
    let outcome: Outcome = unknownBecause('internal error in shadow mode', null)
    let release = (): void => {}
    this.#ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, askedAt)
    if (unclaimed !== null) tell('store_unavailable')
    let verdict: ShadowVerdict = trace.before === 'absent' ? 'first' : 'retry'
    try {
      const observed = await hear()
      outcome = observed.outcome
      release = observed.release
      if (!keepsBody(outcome)) release()
      verdict = observed.failed ?? verdict
    } finally {
      const { state } = await finish(this.#ports, execution, unclaimed, outcome, release).finally(
        settled.resolve,
      )
      trace.after = state
    }
    tell(verdict)
  }

  /** It was executed beside the attempt that the record knows: what the record learns of it keeps a later retry safe. */
  async #beside(request: ProtectedRequest, identified: Identified, lane: Lane, hear: Hear): Promise<void> {
    const { outcome, release } = await hear()
    try {
      if (outcome.kind === 'not_executed') return
      await lane.owner?.settled
      const attempt = { fence: 0, token: this.#ports.newToken(), attempts: 1 }
      const execution: Execution = {
        id: identified.id,
        route: request.route,
        operation: identified.operation,
        attempt,
        createdAt: 0,
        ended: null,
      }
      const written = await this.#tellRecord(execution, outcome)
      if (!written && !this.#givingUp)
        this.#ports.observer.trouble('what forwarded duplicates did could not be recorded', {
          route: execution.route.name,
          record: shortId(execution.id),
        })
      // Said once: while the store is down, all of them are given up.
      this.#givingUp = !written
    } finally {
      release()
    }
  }

  /** False: given up. A store that hangs must not take all places: requests would be told as `overloaded`. */
  async #tellRecord(execution: Execution, outcome: ObservedOutcome): Promise<boolean> {
    if (this.#merging >= this.#bound.maxInFlight / 2) return false
    this.#merging++
    try {
      return await mergeOutcome(this.#ports, execution, outcome, () => this.#closed)
    } finally {
      this.#merging--
    }
  }
}

/**
 * A retry must find what its client has been answered with already, although no answer waits for the store: its turn comes
 * when the claims before it are decided, and what has ended is settled.
 */
async function inTurn<T>(lane: Lane, step: () => Promise<T>): Promise<T> {
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

/** What is left to do for a request whose record was found. */
function partOf(existing: Existing, trace: Trace, route: RoutePolicy): Part {
  switch (existing.kind) {
    case 'replay':
      trace.before = 'completed'
      if (existing.now > 0) trace.retryAge = existing.now - existing.createdAt
      if (!existing.result.kept) return { kind: 'decided', verdict: 'response_unavailable' }
      return { kind: 'compare', first: digestResponse(replayable(route, existing.result.response)) }
    case 'reused':
      trace.before = existing.read
      return { kind: 'decided', verdict: 'misuse' }
    case 'in_progress':
      trace.before = 'in_progress'
      return { kind: 'beside', verdict: route.inFlight.mode === 'wait' ? 'waited' : 'in_progress' }
    case 'unknown':
      trace.before = 'unknown'
      return { kind: 'beside', verdict: 'unknown' }
    case 'expired':
      trace.before = 'expired'
      return { kind: 'decided', verdict: 'expired' }
  }
}

/** Says whether the second answer is the one that a replay would have given. */
async function compare(first: ResponseDigest, hear: Hear, tell: Tell): Promise<void> {
  const { response, release } = await hear()
  if (response === null) tell('not_compared')
  else tell(sameResponse(first, digestResponse(response)) ? 'replay_same' : 'replay_differs')
  release()
}

/** The walk's refusal, as it told it. */
function verdictOf({ outcome }: Trace): ShadowVerdict {
  return outcome !== null && outcome in SHADOW_VERDICTS ? (outcome as ShadowVerdict) : 'error'
}
