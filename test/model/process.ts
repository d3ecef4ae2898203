import type { RoutePolicy } from '../../src/core/policy.ts'
import type { StoredResponse } from '../../src/core/record.ts'
import { guard } from '../../src/protect/guard.ts'
import type { WalkPorts } from '../../src/protect/ports.ts'
import { Reclaimer } from '../../src/protect/reclaimer.ts'
import { Settler } from '../../src/protect/settler.ts'
import type { MaybePromise } from '../../src/runtime/scheduling.ts'
import { RecentWrites } from '../../src/store/recent.ts'
import { Records } from '../../src/store/records.ts'
import { InGrace, type Store as StorePort, StoreUnavailable } from '../../src/store/register.ts'
import type { Forwarded, UpstreamRequest } from '../../src/upstream/port.ts'
import { Replica, type Seen, type Store, seen } from '../protect/harness.ts'
import { type Event, type Owner, Scheduler, WORLD } from '../simulation/scheduler.ts'

/** How much longer a store in its grace says that it hands nothing out. */
export const LEFT = 1_000

/** The time of each process by itself: nothing happens unless a path says so, and timers wait until they are let go. */
export class Times extends Scheduler {
  constructor() {
    super(1, false)
  }

  override after(delay: number, owner: Owner, what: string, act: () => void, isTimer = false): Event {
    if (!isTimer || !(owner instanceof Process)) return super.after(delay, owner, what, act, isTimer)
    const event = { at: owner.began + delay, owner, what, isTimer, act, isCancelled: false }
    owner.timers.push(event)
    return event
  }

  /** What `owner` does now, and whatever follows from it at once; nothing where it is dead. */
  let(owner: Owner, act: () => void): void {
    super.after(0, owner, '', act)
    this.run(0, () => false)
  }

  /** What the world does, which needs no time. */
  done<T>(work: () => Promise<T>): T {
    const ended: (() => T)[] = []
    this.let(WORLD, () => {
      void work().then(
        (value) => ended.push(() => value),
        (error: unknown) =>
          ended.push(() => {
            throw error
          }),
      )
    })
    const [result] = ended
    if (result === undefined) throw new Error('it takes time')
    return result()
  }
}

/** The store's answer to a command. */
export interface Reply {
  /** It was written. */
  readonly isDone: boolean
  readonly isHeld: boolean
  deliver(): void
  lose(): void
}

/** What a process has sent to the store. */
export interface Command {
  carryOut(): Promise<Reply>
  /** Nobody knows whether it was applied. */
  lose(): void
}

/** What all processes have in common. */
export interface Shared {
  readonly store: Store
  readonly times: Times
  /** A claim is held back now. */
  readonly isInGrace: () => boolean
  readonly plant: Plant
}

/** Plants a mistake in what a process uses. */
export type Plant = (ports: WalkPorts) => void

/** One replica, with one request of a client: the real guard, whose messages wait until a path lets them go. */
export class Process implements Owner {
  readonly name: string
  readonly rate = 1
  /** Its own clock. */
  began = 0
  isDead = false
  readonly stalledUntil = 0
  readonly timers: Event[] = []
  /** On their way to the store. */
  readonly commands: Command[] = []
  /** Claims that may still arrive, and whose replies nobody waits for. */
  readonly late: Command[] = []
  /** The store's, on its way back. */
  reply: Reply | null = null
  /** How often it has been asked for an exchange with the upstream. */
  exchanges = 0
  /** What its client was told, and when its process died of a bug. */
  answer: Seen | null = null
  bug: Error | null = null
  token: Buffer = Buffer.alloc(0)
  readonly #shared: Shared
  readonly #replica: Replica
  readonly #ports: WalkPorts
  readonly #recent = new RecentWrites(() => performance.now())
  #asked: UpstreamRequest | null = null
  #end: (result: Forwarded) => void = () => {}

  constructor(name: string, shared: Shared) {
    this.name = name
    this.#shared = shared
    const wire = this.#wire()
    const forward = (request: UpstreamRequest): Promise<Forwarded> => {
      this.exchanges++
      this.#asked = request
      return new Promise((resolve) => {
        this.#end = resolve
      })
    }
    this.#replica = new Replica({ store: shared.store, wire: () => wire, forward })
    this.#replica.onToken = (token) => {
      this.token = token
    }
    // It remembers its outcomes, as where the store may lose them.
    const records = new Records(wire, () => {}, this.#recent)
    const { ports } = this.#replica
    this.#ports = { ...ports, records, settler: new Settler(records, ports.observer, null) }
    shared.plant(this.#ports)
  }

  ask(route: RoutePolicy): void {
    this.#let(() => {
      void guard(this.#ports, this.#replica.call({ route })).then(
        (answer) => {
          this.answer = seen(answer)
        },
        (bug: unknown) => {
          this.bug = bug as Error
        },
      )
    })
  }

  /** Its clock goes on; timers do not notice. */
  elapse(time: number): void {
    this.began += time
  }

  /** All timers that are due. */
  tick(): void {
    const due = this.timers.filter(({ at }) => at <= this.began)
    for (const timer of due) {
      this.timers.splice(this.timers.indexOf(timer), 1)
      if (!timer.isCancelled) this.#let(timer.act)
    }
  }

  /** The store does what was asked first; its answer is not on its way yet. */
  carryOut(): Reply {
    const command = this.commands.shift()
    if (command === undefined) throw new Error('it has sent nothing')
    return this.#shared.times.done(() => command.carryOut())
  }

  /** The same of a claim whose reply nobody waits for. */
  arriveLate(): void {
    const command = this.late.shift()
    if (command === undefined) throw new Error('no claim is under way')
    this.#shared.times.done(() => command.carryOut())
  }

  deliver(reply: Reply): void {
    this.#let(() => reply.deliver())
  }

  lose(reply: Pick<Reply, 'lose'>): void {
    this.#let(() => reply.lose())
  }

  /** Everything it sends is done and answered, until it sends nothing more. */
  exchangeAll(): void {
    while (this.commands.length > 0) this.deliver(this.carryOut())
  }

  /** Whether it would send now; null: it is not about to. */
  get mayBegin(): boolean | null {
    const mayBegin = this.#asked?.mayBegin
    if (mayBegin === undefined) return null
    let may: boolean | null = null
    this.#let(() => {
      may = mayBegin()
    })
    return may
  }

  /** Of what it asked the upstream. */
  get fence(): number {
    const headers = this.#asked?.headers ?? []
    return Number(headers[headers.indexOf('X-Fence') + 1])
  }

  /** The exchange with the upstream has ended. Returns what the client would be told of a whole answer. */
  end(
    result: Forwarded | { readonly status: number; readonly body: string; readonly said: string | null },
  ): string {
    const whole =
      'proof' in result
        ? result
        : this.#replica.responded(result.status, result.body, { declaredOutcome: result.said })
    const bytes = whole.proof === 'responded' ? bytesOf(whole.response) : ''
    this.#let(() => this.#end(whole))
    return bytes
  }

  /** After a failover: what it knows is written again, once. */
  reclaim(): void {
    const { records, settler, running } = this.#ports
    this.#let(() => {
      const reclaimer = new Reclaimer({
        records,
        settler,
        running,
        store: this.#shared.store.inner,
        repliesWithin: LEFT,
        isSafe: () => false,
        onBug: (bug) => {
          this.bug = bug as Error
        },
        onSplit: () => {},
        onWritten: () => {},
      })
      void reclaimer.begin({ left: LEFT, concerns: () => true })
      // Its second pass would come whenever a timer is due, perhaps after the grace.
      reclaimer.close()
    })
    this.exchangeAll()
  }

  /** What it holds although it has nothing left to do; null: nothing. */
  leak(): string | null {
    const { leases, settler, running, inFlight, waiters } = this.#ports
    const held = {
      leases: leases.size,
      outcomes: settler.size,
      running: running.size,
      requests: inFlight.count,
      waiters: waiters.size,
      bytes: this.#replica.bytes.held,
      budget: this.#replica.budget.held,
    }
    const left = Object.entries(held).filter(([, count]) => count !== 0)
    return left.length === 0 ? null : left.map(([what, count]) => `${count} ${what}`).join(', ')
  }

  #let(act: () => void): void {
    this.#shared.times.let(this, act)
  }

  #wire(): StorePort {
    const { store, isInGrace } = this.#shared
    const { inner } = store
    const send = <T>(isDone: (reply: T) => boolean, apply: () => MaybePromise<T>): Promise<T> =>
      new Promise((resolve, reject) => {
        const lose = (): void => reject(new StoreUnavailable('no reply', true))
        const carryOut = async (): Promise<Reply> => {
          try {
            const reply = await apply()
            return { isDone: isDone(reply), isHeld: false, deliver: () => resolve(reply), lose }
          } catch (error) {
            const deliver = (): void => reject(error)
            return { isDone: false, isHeld: error instanceof InGrace, deliver, lose }
          }
        }
        this.commands.push({ carryOut, lose })
      })
    const handOut = (): void => {
      if (isInGrace()) throw new InGrace(store.now, store.now, LEFT)
    }
    const wasDone = (reply: { readonly done: boolean }): boolean => reply.done
    return {
      ...inner,
      // What is sent may arrive after its sender has used the bytes again.
      put: (id, bytes, spans, entry = 'claim') => {
        store.ids.add(id)
        const sent = Buffer.from(bytes)
        return send(wasDone, async () => {
          if (entry !== 'again' && (await inner.get(id)).bytes === null) handOut()
          return inner.put(id, sent, spans, entry)
        })
      },
      swap: (id, on, bytes, spans, nextFence) => {
        const sent = Buffer.from(bytes)
        return send(wasDone, () => {
          if (nextFence) handOut()
          return inner.swap(id, on, sent, spans, nextFence)
        })
      },
      renew: (items) =>
        send(
          (still) => still.every(Boolean),
          () => inner.renew(items),
        ),
    }
  }
}

/** What a client sees of it, as {@link Seen} has it. */
export function bytesOf({ status, reason, headers, body, trailers }: StoredResponse): string {
  return JSON.stringify([status, reason, headers, body.toString('latin1'), trailers])
}
