import { setTimeout as wait } from 'node:timers/promises'
import type { OtherProcesses } from '../compose/listeners.ts'
import type { Config } from '../config/config.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { Logger } from '../observe/log.ts'
import type { Readiness } from '../reload.ts'
import { Acceptor } from './acceptor.ts'
import { Member, WorkerEnded } from './member.ts'
import type { Begin, ToWorker } from './messages.ts'
import { MergedMetrics } from './metrics.ts'

/** If a worker that served this long ends, its start was not the cause. */
const STEADY: Millis = 10_000
/** Pauses before a worker that keeps ending is started again: doubled each time. */
const PAUSE: Millis = 100
const LONGEST_PAUSE: Millis = 30_000
/** Time beyond `drain.timeout` for a worker to close its store. */
export const CLOSES_WITHIN: Millis = 5000
/** Time for a worker to read a configuration: files of thousands of routes take a second. */
const PREPARES_WITHIN: Millis = 10_000

export interface FleetOptions {
  readonly count: number
  readonly begin: Omit<Begin, 'place'>
  /** The configuration at the start. */
  readonly config: Config
  readonly log: Logger
  /** Called when a worker that served has ended while the fleet goes on. */
  readonly onEnded: () => void
}

/** The workers: keeps them running, sends them questions, and hands them connections. */
export class Fleet implements OtherProcesses {
  readonly acceptor = new Acceptor()
  readonly #options: FleetOptions
  readonly #serving = new Set<Member>()
  /** Including those that are starting or ending. */
  readonly #members = new Set<Member>()
  /** Workers that are ending while the others go on: they may still execute requests and hold outcomes. */
  readonly #finishing = new Set<Member>()
  readonly #metrics = new MergedMetrics()
  readonly #ending = new AbortController()
  #text: string
  #endsWithin: Millis
  #state: Extract<ToWorker, { kind: 'state' }> = { kind: 'state', draining: false, stopping: false }

  constructor(options: FleetOptions) {
    this.#options = options
    this.#text = options.begin.source.text
    this.#endsWithin = options.config.drain.timeout + CLOSES_WITHIN
  }

  /**
   * Resolves once each worker serves, or has failed to start at first, which is retried.
   * @throws if none serves.
   */
  async start(): Promise<void> {
    const { count } = this.#options
    const first = Array.from({ length: count }, (_, n) => {
      const { promise, resolve } = Promise.withResolvers<string | null>()
      void this.#keep({ number: n + 1, of: count }, resolve)
      return promise
    })
    const problems = await Promise.all(first)
    if (problems.includes(null)) return
    await this.end(0)
    throw new Error(problems[0] ?? '')
  }

  /** Ends all workers once no more connections come: each finishes its requests, or is killed after `timeout`. */
  async end(timeout: Millis): Promise<void> {
    this.#ending.abort()
    await Promise.all([...this.#members].map((member) => this.#end(member, timeout)))
    this.acceptor.destroy()
  }

  async #end(member: Member, timeout: Millis): Promise<void> {
    member.say({ kind: 'end' })
    const settled = new AbortController()
    const cut = wait(timeout, 'cut off', { ref: false, signal: settled.signal }).catch(() => null)
    const how = await Promise.race([member.ended, cut])
    settled.abort()
    if (how !== 'cut off') return
    this.#options.log.error({ worker: member.number }, 'a worker did not end in time: it is killed')
    member.kill()
    await member.ended
  }

  /** The process will stop; traffic is still served until {@link Fleet.end}. */
  announceStop(): void {
    this.#announce({ kind: 'state', draining: true, stopping: true })
  }

  announceDrain(draining: boolean): void {
    this.#announce({ ...this.#state, draining })
  }

  #announce(state: Extract<ToWorker, { kind: 'state' }>): void {
    this.#state = state
    for (const member of this.#members) if (!this.#finishing.has(member)) member.say(state)
  }

  /** All workers get the configuration, or none; those that start meanwhile get it before they serve. */
  async prepare(config: Config, text: string): Promise<Readiness> {
    const members = [...this.#serving]
    const problems = await Promise.all(members.map((member) => prepared(member, text)))
    const drop = (): void => {
      for (const member of members) member.ask('drop', null).catch(() => {})
    }
    const refused = problems.find((problem) => problem !== null)
    if (refused !== undefined) {
      drop()
      return { refused }
    }
    const use = async (): Promise<void> => {
      this.#text = text
      this.#endsWithin = config.drain.timeout + CLOSES_WITHIN
      const others = [...this.#serving].filter((member) => !members.includes(member))
      await Promise.all([
        ...members.map((member) => this.#insist(member, () => used(member, text))),
        ...others.map((member) => this.#insist(member, () => this.#bringUp(member))),
      ])
    }
    return { use, drop }
  }

  isServed = (): boolean => this.#serving.size > 0

  async turned(): Promise<void> {
    await Promise.all(
      [...this.#serving].map((member) => member.ask('turn', null, LONGEST_PAUSE).catch(unlessEnded)),
    )
  }

  async isRunning(id: RecordId): Promise<boolean> {
    const answers = this.#executing.map((member) =>
      member.ask('isRunning', id).catch((error: unknown) => !(error instanceof WorkerEnded)),
    )
    return (await Promise.all(answers)).includes(true)
  }

  async tell(id: RecordId): Promise<boolean> {
    const { count, config } = this.#options
    const members = this.#executing
    const answers = await Promise.all(members.map((member) => member.ask('tell', id).catch(() => false)))
    // A worker that has ended may have left outcomes in its spool, which its replacement reads.
    return !answers.includes(false) && (members.length === count || config.store.spool === null)
  }

  get #executing(): Member[] {
    return [...this.#serving, ...this.#finishing]
  }

  samples: OtherProcesses['samples'] = (own) => this.#metrics.samples(own, this.#serving)
  exposition: OtherProcesses['exposition'] = (own) => this.#metrics.exposition(own, this.#serving)

  /** Runs one worker after the other until the fleet ends. `began`: called with why the first one could not start, or null. */
  async #keep(place: Begin['place'], began: (problem: string | null) => void): Promise<void> {
    const { log, onEnded } = this.#options
    const { signal } = this.#ending
    const worker = place.number
    for (let failures = 0; !signal.aborted; failures++) {
      const member = new Member({ ...this.#options.begin, place, source: this.#source })
      this.#members.add(member)
      member.say(this.#state)
      const problem = (await member.begun) ?? (await this.#bringUp(member).then(() => null, String))
      const since = performance.now()
      if (problem !== null) this.#finish(member)
      began(problem)
      const how = await member.ended
      this.#leave(member)
      this.#members.delete(member)
      this.#finishing.delete(member)
      if (signal.aborted) return
      if (problem === null) onEnded()
      if (performance.now() - since > STEADY) failures = 0
      const pause = failures === 0 ? 0 : Math.min(PAUSE * 2 ** (failures - 1), LONGEST_PAUSE)
      log.error(
        { worker, how, ...(problem === null ? {} : { why: problem }), pause },
        problem === null
          ? 'a worker has ended, and is replaced: what it was executing is unknown once its leases end'
          : 'a worker cannot start; it will be started again',
      )
      await wait(pause, undefined, { signal }).catch(() => {})
    }
  }

  get #source(): Begin['source'] {
    return { ...this.#options.begin.source, text: this.#text }
  }

  /** Brings a worker to the configuration in force, then at once lets it serve, so that it misses no reload. @throws if it cannot. */
  async #bringUp(member: Member): Promise<void> {
    while (member.text !== this.#text) {
      const text = this.#text
      const problem = await prepared(member, text)
      if (problem !== null) throw new Error(problem)
      await used(member, text)
    }
    if (!this.#serving.has(member)) this.acceptor.add(member)
    this.#serving.add(member)
  }

  /** A worker that cannot use the configuration that all the others use finishes its requests and is replaced. */
  async #insist(member: Member, make: () => Promise<void>): Promise<void> {
    try {
      await make()
    } catch (error) {
      if (error instanceof WorkerEnded) return
      this.#options.log.error(
        { worker: member.number, error: String(error) },
        'a worker cannot use the configuration in force, and is replaced',
      )
      this.#finish(member)
    }
  }

  #finish(member: Member): void {
    this.#leave(member)
    this.#finishing.add(member)
    void this.#end(member, this.#endsWithin)
  }

  #leave(member: Member): void {
    this.acceptor.remove(member)
    this.#serving.delete(member)
    this.#metrics.leave(member)
  }
}

/** Why it cannot use the text; null: it can, or it has ended and its replacement will be asked. */
async function prepared(member: Member, text: string): Promise<string | null> {
  try {
    const problem = await member.ask('prepare', text, PREPARES_WITHIN)
    return problem === null ? null : `worker ${member.number}: ${problem}`
  } catch (error) {
    return error instanceof WorkerEnded ? null : String(error)
  }
}

async function used(member: Member, text: string): Promise<void> {
  await member.ask('use', null)
  member.text = text
}

function unlessEnded(error: unknown): void {
  if (!(error instanceof WorkerEnded)) throw error
}
