import { alike, type Likeness, likenessOf } from '../core/likeness.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Outcome, type RecordId, shortId } from '../core/record.ts'
import type { Overheard } from '../upstream/port.ts'
import { admit } from './admit.ts'
import { adopt, type Shown } from './adopt.ts'
import { type Call, newTrace, type Run, SHADOW_VERDICTS, type Trace, type Verdict } from './call.ts'
import type { Execute, Met } from './claim.ts'
import { finish } from './execute.ts'
import { introduce, type Named, name } from './name.ts'
import { keepsBody, replayable, unknownBecause } from './outcome.ts'
import { type Heard, hearNothing, hearOut } from './overhear.ts'
import type { Ports } from './ports.ts'

/** Unsettled outcomes up to which shadow adds its own: the settler's room is for the routes that protect. */
const HELD_MOST = 1000

/** Hears how the upstream answers the request. */
type Hear = () => Promise<Heard>
/** Once; later words are ignored. */
type Tell = (verdict: Verdict) => void

/** The requests of one record on this replica: decided one after the other, in the order in which they were whole. */
interface Lane {
  users: number
  turn: Promise<void>
  /** The latest of them that holds the claim. */
  owner: { readonly upstream: Overheard; readonly settled: Promise<void> } | null
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
  | { readonly kind: 'compare'; readonly first: Likeness }
  /** `enforce` would not have executed it, and whether the operation is done is open. */
  | { readonly kind: 'beside'; readonly verdict: Verdict }
  | { readonly kind: 'told'; readonly verdict: Verdict }

/**
 * Shadow mode (contract §10): decides beside requests that are forwarded anyway, by the very steps of the walk (introduce,
 * name, admit, finish), and says what `enforce` would have done. No request and no answer waits for anything here, and no
 * error leaves. The records are true ones: a route that moves on to `enforce` honours them.
 */
export class Shadow {
  readonly #ports: Ports
  /** As it is now: it may change while the proxy runs. */
  readonly #bound: Pick<Ports, 'maxInFlight'>
  readonly #told: (trace: Trace, verdict: Verdict) => void
  readonly #lanes = new Map<RecordId, Lane>()
  #size = 0
  #adopting = 0
  #givingUp = false
  #closed = false

  /** `told` hears each request's verdict, once; it must not throw. */
  constructor(ports: Ports, told: (trace: Trace, verdict: Verdict) => void) {
    // These claims protect nobody: they are counted by their verdicts alone.
    this.#ports = { ...ports, observer: { ...ports.observer, claimed() {}, leaseExpired() {} } }
    this.#bound = ports
    this.#told = told
  }

  /** Requests that are looked at now; the drain waits for them. */
  get size(): number {
    return this.#size
  }

  /** Takes one of `limits.inFlight` places, which {@link observe} gives back. False: there is none, which is told. */
  enter({ route, traceId }: Pick<Call, 'route' | 'traceId'>): boolean {
    if (this.#size >= this.#bound.maxInFlight) {
      this.#told(newTrace(route.name, traceId), 'overloaded')
      return false
    }
    this.#size++
    return true
  }

  /** Follows one request to its end. The call's `clientGone` must say false: what was sent was sent. Never rejects. */
  async observe(call: Call, upstream: Overheard): Promise<void> {
    const trace = newTrace(call.route.name, call.traceId)
    const body = call.readBody()
    let told = false
    const tell: Tell = (verdict) => {
      if (!told) this.#told(trace, verdict)
      told = true
    }
    let heard: Promise<Heard> | null = null
    const hear: Hear = () => {
      heard ??= hearOut(call.route, upstream)
      return heard
    }
    try {
      const named = await this.#name(call, trace, body, hear)
      if (typeof named === 'string') tell(named)
      else await this.#follow(call, trace, named, upstream, hear, tell)
    } catch (error) {
      this.#ports.observer.trouble('internal error in shadow mode; the traffic is not touched', {
        route: call.route.name,
        record: trace.id === null ? null : shortId(trace.id),
        error: String(error),
      })
      tell('error')
    } finally {
      this.#size--
      void body.then((reading) => reading.kind === 'body' && reading.release())
      if (heard === null) void hearNothing(upstream)
    }
  }

  /** The proxy stops: what still waits for the store, or for another replica's attempt, is given up. */
  close(): void {
    this.#closed = true
  }

  async #name(
    call: Call,
    trace: Trace,
    body: ReturnType<Call['readBody']>,
    hear: Hear,
  ): Promise<Named | Verdict> {
    const introduced = await introduce(this.#ports, call, trace)
    if (introduced.kind !== 'introduced') return verdictOf(trace)
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
        const named = await name(this.#ports, call, trace, introduced, received.body)
        if (named.kind === 'named') return named
        return named.kind === 'unnamed' ? 'passed' : verdictOf(trace)
      }
    }
  }

  async #follow(
    call: Call,
    trace: Trace,
    named: Named,
    upstream: Overheard,
    hear: Hear,
    tell: Tell,
  ): Promise<void> {
    const { id } = named
    const lane = this.#lanes.get(id) ?? { users: 0, turn: Promise.resolve(), owner: null }
    this.#lanes.set(id, lane)
    lane.users++
    try {
      const part = await inTurn(lane, async () => {
        const decided = await this.#decide(call, trace, named)
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
          return await this.#beside(call, named, lane, hear)
        case 'told':
          return tell(part.verdict)
      }
    } finally {
      if (--lane.users === 0) this.#lanes.delete(id)
    }
  }

  async #decide(call: Call, trace: Trace, named: Named): Promise<Part> {
    if (this.#ports.settler.size >= HELD_MOST) return { kind: 'told', verdict: 'store_unavailable' }
    // It is executed, whatever the store says: without a claim its outcome is told as soon as somebody listens.
    const route: RoutePolicy = { ...call.route, onStoreUnavailable: 'bypass' }
    const admitted = await admit(this.#ports, { ...call, route }, trace, named)
    const { observer, regenerated } = this.#ports
    if (admitted.kind === 'met') {
      const part = partOf(admitted.met, trace, call.route)
      if (trace.retryAge !== null) observer.retryAge(route.name, trace.retryAge)
      return part
    }
    if (admitted.kind !== 'execute') return { kind: 'told', verdict: verdictOf(trace) }
    trace.fence = admitted.run.attempt.fence || null
    trace.regenerated = trace.before === 'absent' && regenerated.saw(admitted.run, named.caller)
    if (trace.regenerated) observer.regenerated(route.name)
    return { kind: 'own', execute: admitted, settled: Promise.withResolvers() }
  }

  /** Its attempt is the record's, settled as the walk settles it, but that nobody waits for it. */
  async #own(trace: Trace, { execute, settled }: Own, hear: Hear, tell: Tell): Promise<void> {
    const { run, askedAt, unclaimed } = execute
    const { id, route, attempt } = run
    let outcome: Outcome = unknownBecause('internal error in shadow mode', null)
    let release = (): void => {}
    this.#ports.leases.hold(id, attempt.token, route.lease, route.unresolvedTtl, askedAt)
    if (unclaimed !== null) tell('store_unavailable')
    let verdict: Verdict = trace.before === 'absent' ? 'first' : 'retry'
    try {
      const heard = await hear()
      outcome = heard.outcome
      release = heard.release
      if (!keepsBody(outcome)) release()
      verdict = heard.failed ?? verdict
    } finally {
      const { state } = await finish(this.#ports, run, unclaimed, outcome, release).finally(settled.resolve)
      trace.after = state
    }
    tell(verdict)
  }

  /** It was executed beside the attempt that the record knows: what the record learns of it keeps a later retry safe. */
  async #beside(call: Call, named: Named, lane: Lane, hear: Hear): Promise<void> {
    const { outcome, release } = await hear()
    try {
      if (outcome.kind === 'not_executed') return
      await lane.owner?.settled
      const attempt = { fence: 0, token: this.#ports.newToken(), attempts: 1 }
      const run: Run = { id: named.id, route: call.route, operation: named.operation, attempt, createdAt: 0 }
      const told = await this.#tellRecord(run, outcome)
      if (!told && !this.#givingUp)
        this.#ports.observer.trouble('what forwarded duplicates did could not be recorded', {
          route: run.route.name,
          record: shortId(run.id),
        })
      // Said once: while the store is down, all of them are given up.
      this.#givingUp = !told
    } finally {
      release()
    }
  }

  /** False: given up. A store that hangs must not take all places: requests would be told as `overloaded`. */
  async #tellRecord(run: Run, outcome: Shown): Promise<boolean> {
    if (this.#adopting >= this.#bound.maxInFlight / 2) return false
    this.#adopting++
    try {
      return await adopt(this.#ports, run, outcome, () => this.#closed)
    } finally {
      this.#adopting--
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
function partOf(met: Met, trace: Trace, route: RoutePolicy): Part {
  switch (met.kind) {
    case 'replay':
      trace.before = 'completed'
      if (met.now > 0) trace.retryAge = met.now - met.createdAt
      if (!met.result.kept) return { kind: 'told', verdict: 'response_unavailable' }
      return { kind: 'compare', first: likenessOf(replayable(route, met.result.response)) }
    case 'reused':
      trace.before = met.read
      return { kind: 'told', verdict: 'misuse' }
    case 'in_progress':
      trace.before = 'in_progress'
      return { kind: 'beside', verdict: route.inFlight.mode === 'wait' ? 'waited' : 'in_progress' }
    case 'unknown':
      trace.before = 'unknown'
      return { kind: 'beside', verdict: 'unknown' }
    case 'expired':
      trace.before = 'expired'
      return { kind: 'told', verdict: 'expired' }
  }
}

/** Says whether the second answer is the one that a replay would have given. */
async function compare(first: Likeness, hear: Hear, tell: Tell): Promise<void> {
  const { response, release } = await hear()
  if (response === null) tell('not_compared')
  else tell(alike(first, likenessOf(response)) ? 'replay_same' : 'replay_differs')
  release()
}

/** The walk's refusal, as it told it. */
function verdictOf({ outcome }: Trace): Verdict {
  return SHADOW_VERDICTS.find((verdict) => verdict === outcome) ?? 'error'
}
