import type { RoutePolicy } from '../../src/core/policy.ts'
import type { CompletedResponse } from '../../src/core/record.ts'
import { REFUSALS, type RefusalCode } from '../../src/core/refusal.ts'
import { route, type Seen, Store } from '../protect/harness.ts'
import { inSimulation } from '../simulation/globals.ts'
import { response } from '../store/fixtures.ts'
import { type ByOthers, Bystanders, LEASE, TTL, UNRESOLVED } from './bystanders.ts'
import { told } from './explore.ts'
import { bytesOf, type Command, LEFT, type Plant, Process, type Reply, Times } from './process.ts'
import {
  type Attempt,
  begin,
  NOBODY,
  type Record,
  type Rules,
  readsUnknown,
  type Step,
  type StepName,
  steps,
  type World,
} from './protocol.ts'

/** Longer than the pause of a settler before any retry (MAX_RETRY). */
const RETRIED = 5_000
/** Of a lease: when its owner renews it, and how long it is good for a first byte (src/protect/settler.ts). */
const RENEWED = LEASE / 3
const SURE = (2 * LEASE) / 3

export interface Followed {
  paths: number
  steps: number
  /** First bytes of a request. */
  sent: number
  /** Answers that clients had. */
  answers: number
  /** Claims that were held back until the end of a grace. */
  held: number
}

export function nothingYet(): Followed {
  return { paths: 0, steps: 0, sent: 0, answers: 0, held: 0 }
}

const ASKS: ReadonlySet<StepName> = new Set(['its claim arrives', 'it asks for its claim again'])
/** What those who resolve a record say that the upstream answered (bystanders.ts). */
const RESOLVED = bytesOf((response() as Extract<CompletedResponse, { kept: true }>).response)

/** What a client is told: an answer of the proxy's own, or the bytes of a response. */
type Told = { readonly code: RefusalCode } | { readonly bytes: string; readonly replayed: boolean }

/**
 * Takes the guard along a path of the model, with its leases, settler and reclaimer, one process for each attempt. Rejects where they
 * differ.
 */
export function replayGuard(
  path: readonly Step[],
  rules: Rules,
  followed: Followed,
  plant: Plant = () => {},
): Promise<void> {
  // Promise reactions can be run by hand only where none is under way.
  return new Promise((resolve, reject) => {
    setImmediate(() => {
      try {
        follow(path, rules, followed, plant)
        resolve()
      } catch (error) {
        reject(error)
      }
    })
  })
}

function follow(path: readonly Step[], rules: Rules, followed: Followed, plant: Plant): void {
  const times = new Times()
  inSimulation(times, () => {
    const real = new Real(times, rules, followed, plant)
    let before = begin(rules)
    const taken: Step[] = []
    const go = (step: Step): void => {
      taken.push(step)
      try {
        real.take(step, before)
        real.compare(step.to)
      } catch (error) {
        throw new Error(`${taken.map(told).join(' | ')}: ${(error as Error).message}`, { cause: error })
      }
      followed.steps++
      before = step.to
    }
    for (const step of path) go(step)
    // One more client is told how it ended.
    const asks = steps({ ...before, left: { ...before.left, attempts: 1 } }, rules)[0] as Step
    go(asks)
    const arrives = steps(before, rules).find(
      ({ name, attempt }) => name === 'its claim arrives' && attempt === before.attempts.length - 1,
    )
    if (arrives !== undefined) go(arrives)
    followed.paths++
  })
}

class Real {
  readonly #times: Times
  readonly #rules: Rules
  readonly #followed: Followed
  readonly #plant: Plant
  readonly #store = new Store()
  readonly #route: RoutePolicy
  readonly #processes: Process[] = []
  /** What each client has to be told, once it is; null: not yet. */
  readonly #told: (Told | null)[] = []
  /** Of the responses that are whole, what the client of that attempt is told. */
  readonly #responses: string[] = []
  /** Who has been granted a claim, and knows. */
  readonly #executing = new Set<number>()
  /** Whose outcome the settler holds, and who is done. */
  readonly #isHeld = new Set<number>()
  readonly #isAnswered = new Set<number>()
  #bystanders: Bystanders | null = null
  #isInGrace = false

  constructor(times: Times, rules: Rules, followed: Followed, plant: Plant) {
    this.#times = times
    this.#rules = rules
    this.#followed = followed
    this.#plant = plant
    this.#route = route({
      lease: LEASE,
      ttl: TTL,
      ttlFailed: TTL,
      unresolvedTtl: UNRESOLVED,
      onLeaseExpired: rules.retryLapsed ? 'retry' : 'unknown',
    })
  }

  take({ name, attempt, to }: Step, before: World): void {
    // No two writes of one record share a millisecond.
    this.#pass(5)
    const n = attempt ?? NOBODY
    const own = this.#processes[n] as Process
    const was = before.attempts[n] as Attempt
    const is = to.attempts[n] as Attempt
    switch (name) {
      case 'a client asks':
        return this.#ask()
      case 'its claim arrives':
        if (was.at !== 'asking') return own.arriveLate()
        own.reply = this.#claim(own, isGranted(n, to))
        if (is.at === 'over') this.#told[n] = this.#refusal(before.record)
        if (is.at !== 'hearing') this.#hear(own)
        return
      case 'its claim arrives, the reply is lost':
        own.lose(this.#claim(own, isGranted(n, to)))
        return
      case 'it hears that it has claimed':
        return this.#hear(own)
      case 'it waits no longer for the reply':
        if (was.at === 'hearing') {
          own.lose(own.reply as Reply)
          own.reply = null
          return
        }
        return this.#delay(own)
      case 'it asks for its claim again':
        if (is.at === 'over') this.#told[n] = this.#refusal(before.record)
        return own.exchangeAll()
      case 'it withdraws':
        this.#told[n] = { code: 'idempotency_store_unavailable' }
        // Neither of the two was answered.
        return own.lose(own.commands.shift() as Command)
      case 'its lease grows old':
        return own.elapse(SURE)
      case 'it renews': {
        own.elapse(RENEWED)
        own.tick()
        const renewed = own.carryOut()
        if (!renewed.isDone) throw new Error('the renewal was refused')
        return own.deliver(renewed)
      }
      case 'it sends':
        if (own.mayBegin !== true) throw new Error('it does not send')
        this.#followed.sent++
        return
      case 'it cannot send': {
        this.#told[n] = { code: 'upstream_unreachable' }
        // Otherwise it is the owner who does not want to.
        const reason = own.mayBegin === true ? 'refused' : 'the lease is too old'
        return void own.end({ proof: 'not_sent', reason })
      }
      case 'the upstream executes it':
      case 'it never arrives':
        return
      case 'it is answered':
        return this.#answer(n, 201, null)
      case 'the answer says that nothing was done':
        return this.#answer(n, 200, 'not-applied')
      case 'the answer says nothing':
        return this.#answer(n, 502, null)
      case 'the exchange breaks off':
        this.#told[n] = { code: 'upstream_failed' }
        return void own.end({ proof: 'unknown', reason: 'reset', timedOut: false, status: null })
      case 'its outcome arrives':
        this.#retry(own)
        own.deliver(own.carryOut())
        return own.exchangeAll()
      case 'its outcome arrives, the reply is lost': {
        this.#retry(own)
        this.#isHeld.add(n)
        let reply = own.carryOut()
        while (!reply.isDone) {
          own.deliver(reply)
          reply = own.carryOut()
        }
        return own.lose(reply)
      }
      case 'it writes its claim again':
      case 'it writes its outcome again':
        return own.reclaim()
      case 'its process dies':
        if (was.at === 'asking') this.#delay(own)
        own.isDead = true
        own.commands.length = 0
        return
      case 'the store fails over':
        this.#isInGrace = to.isInGrace
        return this.#befall(name, to)
      case 'the lease lapses':
      case 'the sweeper writes down that it fell silent':
      case 'the upstream is asked, and has done it':
      case 'the upstream is asked, and knows nothing':
      case 'an operator says: completed':
      case 'an operator says: retryable':
      case 'its retention ends':
      case 'the store loses the record':
      case 'a replica of the store hears of the record':
        return this.#befall(name, to)
      case 'the grace ends':
        return this.#endGrace(before)
    }
  }

  #ask(): void {
    const own = new Process(`attempt ${this.#processes.length + 1}`, {
      store: this.#store,
      times: this.#times,
      isInGrace: () => this.#isInGrace && !this.#rules.isPartOfFleetGraceless,
      plant: this.#plant,
    })
    this.#processes.push(own)
    this.#told.push(null)
    own.ask(this.#route)
  }

  #befall(name: ByOthers, to: World): void {
    // Before anybody asks there is no record to change.
    this.#times.done(async () => this.#others()?.take(name, to))
  }

  /** Those whose claims are held back hear so, wait, and ask once more. */
  #endGrace(before: World): void {
    const next = steps(before, this.#rules)
    for (const [n, { at, sure }] of before.attempts.entries()) {
      // Whoever asks again relies on a new lease, which the model leaves out.
      if (at !== 'unsure' && !(at === 'asking' && sure)) continue
      if (next.some(({ name, attempt }) => attempt === n && ASKS.has(name))) continue
      const own = this.#processes[n] as Process
      let reply = own.carryOut()
      while (!reply.isHeld) {
        own.deliver(reply)
        reply = own.carryOut()
      }
      own.deliver(reply)
      if (own.commands.length > 0) throw new Error('what was held back does not wait')
      own.elapse(LEFT)
      own.tick()
      this.#followed.held++
    }
    this.#isInGrace = false
  }

  /** Carried out; the reply is still on its way. */
  #claim(own: Process, isGranted: boolean): Reply {
    let reply = own.carryOut()
    // Whoever may take the record over does so once told what is there.
    if (isGranted && !reply.isDone) {
      own.deliver(reply)
      reply = own.carryOut()
    }
    if (reply.isDone !== isGranted) throw new Error(`the claim was ${reply.isDone ? 'granted' : 'refused'}`)
    return reply
  }

  #hear(own: Process): void {
    own.deliver(own.reply as Reply)
    own.reply = null
  }

  /** Its sender hears nothing of it, and it may still arrive. */
  #delay(own: Process): void {
    const command = own.commands.shift() as Command
    own.late.push(command)
    own.lose(command)
  }

  /** Its first try is under way by itself. */
  #retry(own: Process): void {
    if (own.commands.length > 0) return
    own.elapse(RETRIED)
    own.tick()
  }

  #answer(n: number, status: number, said: string | null): void {
    const own = this.#processes[n] as Process
    const bytes = own.end({ status, body: `{"attempt":${n}}`, said })
    this.#responses[n] = bytes
    this.#told[n] = { bytes, replayed: false }
  }

  /** What a client is told whose claim found `record`. */
  #refusal(record: Record | null): Told {
    if (record === null) throw new Error('nothing refuses it')
    if (readsUnknown(record)) return { code: 'idempotency_outcome_unknown' }
    if (record.state !== 'completed') return { code: 'idempotency_key_in_progress' }
    const bytes = record.by === NOBODY ? RESOLVED : (this.#responses[record.by] as string)
    return { bytes, replayed: true }
  }

  /** Throws where the world is not as in the model. */
  compare(world: World): void {
    const others = this.#others()
    if (others !== null) {
      const tokenOf = (n: number): Buffer => (this.#processes[n] as Process).token
      const differs = this.#times.done(() => others.differs(world, tokenOf))
      if (differs !== null) throw new Error(differs)
    }
    for (const [n, attempt] of world.attempts.entries()) {
      const differs = this.#differs(n, attempt)
      if (differs !== null) throw new Error(`attempt ${n + 1}: ${differs}`)
    }
    const differs = this.#disorder(world)
    if (differs !== null) throw new Error(differs)
  }

  #differs(n: number, { at, sure }: Attempt): string | null {
    const own = this.#processes[n] as Process
    const { answer, bug, exchanges, commands } = own
    if (bug !== null) return String(bug)
    if (at === 'claimed') {
      this.#executing.add(n)
      if (own.mayBegin !== sure) return `it would ${sure ? 'not send' : 'send'}`
    }
    const expected = Number(this.#executing.has(n))
    if (exchanges !== expected) return `it asked the upstream ${exchanges} times, not ${expected}`
    if (answer !== null) {
      const differs = differsFrom(answer, this.#told[n] ?? null)
      if (differs !== null) return differs
    }
    switch (at) {
      case 'over': {
        if (answer === null) return 'its client has no answer'
        if (commands.length > 0) return 'it has not ended'
        const leak = own.leak()
        if (leak !== null) return `it holds ${leak}`
        if (!this.#isAnswered.has(n)) this.#followed.answers++
        this.#isAnswered.add(n)
        return null
      }
      case 'withdrawing':
        return answer === null ? 'its client has no answer' : null
      case 'settling':
        // It is the settler's as soon as a write of it has failed.
        return (answer !== null) === this.#isHeld.has(n)
          ? null
          : `its client has ${answer === null ? 'no' : 'an'} answer`
      case 'dead':
        return null
      case 'asking':
      case 'hearing':
      case 'unsure':
      case 'claimed':
      case 'sent':
        return answer === null ? null : 'its client has an answer already'
    }
  }

  /** Where the fences that the upstream is told are in another order than in the model. */
  #disorder({ attempts }: World): string | null {
    for (const n of this.#executing)
      for (const m of this.#executing) {
        const inModel = Math.sign((attempts[n] as Attempt).fence - (attempts[m] as Attempt).fence)
        const [one, other] = [this.#processes[n] as Process, this.#processes[m] as Process]
        if (Math.sign(one.fence - other.fence) !== inModel)
          return `the fences of ${n + 1} and ${m + 1} are ${one.fence} and ${other.fence}`
      }
    return null
  }

  #others(): Bystanders | null {
    const [id] = this.#store.ids
    if (id === undefined) return null
    const { inner: register } = this.#store
    this.#bystanders ??= new Bystanders({ register, advance: (time) => this.#pass(time) }, id)
    return this.#bystanders
  }

  /** By the store's clock. */
  #pass(time: number): void {
    this.#store.now += time
  }
}

function isGranted(attempt: number, { record }: World): boolean {
  return record?.by === attempt
}

function differsFrom(answer: Seen, told: Told | null): string | null {
  if (told === null) return `its client has an answer already: ${answer.status} ${answer.code}`
  const expected =
    'code' in told
      ? { status: REFUSALS[told.code].status, code: told.code, bytes: null, replayed: false }
      : { status: (JSON.parse(told.bytes) as [number])[0], code: null, ...told }
  const { status, code, bytes, replayed } = answer
  const [is, should] = [{ status, code, bytes, replayed }, expected].map((one) => JSON.stringify(one))
  return is === should ? null : `its client was told ${is}, not ${should}`
}
