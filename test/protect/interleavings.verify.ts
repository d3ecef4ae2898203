import { setImmediate as turn, setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import { claimDraft, claimSpans } from '../../src/core/settle.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { isClaim } from '../../src/store/record/codec.ts'
import type { Records } from '../../src/store/records.ts'
import { InGrace, type Store as StorePort } from '../../src/store/register.ts'
import type { Forward, Forwarded } from '../../src/upstream/port.ts'
import { mulberry32 } from '../support/random.ts'
import { HOUR, LEASE, type Replica, replica, route, Store } from './harness.ts'
import { explore, explored, runsOr } from './playing.ts'

t.setTimeout(600_000)

const RUNS = runsOr(150)

explore(t, RUNS, RUNS)

for (const places of [
  ['mirror', 'new'],
  ['plain', 'new'],
] as const)
  void t.test(`W09 ${places.join(' beside ')} can execute twice`, async (t) =>
    t.match(await explored(route(), { deadly: false, runs: 20 * RUNS, places }), /executed 2 times/),
  )

/** Steps of a run, and how often one comes up. */
const STEPS = ['ask', 'ask', 'ask', 'time', 'time', 'end', 'end', 'fail', 'rewrite', 'rewrite'] as const
const MOST_STEPS = 25
const TRIOS: readonly (readonly Phase[])[] = [
  ['mirror', 'both', 'both'],
  ['both', 'both', 'new'],
  ['both', 'new', 'new'],
]

/** What a replica wrote, which it writes again after a failover. */
type Outcome = Parameters<Records['settle']>
type End = 'done' | 'not_sent' | 'refused'

/** Owners that live and renew their leases, duplicates, and failovers of either store to an earlier state of the record. */
class Run {
  readonly #random: () => number
  readonly #from = new Store()
  readonly #to = new Store()
  readonly #inGrace = new Set<Store>()
  readonly #replicas: readonly Replica[]
  readonly #outcomes = new Map<Replica, Outcome[]>()
  readonly #earlier = new Map<Store, (Buffer | null)[]>()
  readonly #log: string[] = []
  /** Executions under way. */
  readonly #running: (() => void)[] = []
  /** Who has to write again before the grace ends. */
  #owing: Replica[] = []
  #executed = 0
  #mayExecute = 1
  #isTwice = false

  constructor(t: Test, seed: number) {
    this.#random = mulberry32(seed)
    this.#to.now += this.#pick([-HOUR, 0, HOUR])
    this.#replicas = this.#pick(TRIOS).map((phase) => this.#replica(t, phase))
  }

  /** Null: no key was executed twice. */
  async play(): Promise<string | null> {
    for (let n = 0; n < MOST_STEPS; n++) {
      await this.#take(this.#pick(STEPS))
      await wait(this.#random() < 0.3 ? 3 : 0)
      for (const store of this.#stores) await this.#remember(store)
    }
    await this.#endGrace()
    for (let n = 0; n < 30; n++) {
      for (const end of this.#running.splice(0)) end()
      await wait(1)
    }
    return this.#isTwice ? this.#log.join(' | ') : null
  }

  get #stores(): readonly Store[] {
    return [this.#from, this.#to]
  }

  #pick<T>(of: readonly T[]): T {
    return of[Math.floor(this.#random() * of.length)] as T
  }

  async #take(step: (typeof STEPS)[number]): Promise<void> {
    switch (step) {
      case 'ask':
        void this.#pick(this.#replicas).get({ route: route({ onLeaseExpired: 'retry' }) })
        for (let n = 0; n < 20; n++) await turn()
        return
      case 'time':
        for (const store of this.#stores) store.now += LEASE / 4
        for (const one of this.#replicas) await one.renews()
        return
      case 'end':
        this.#running.shift()?.()
        for (let n = 0; n < 20; n++) await turn()
        return
      case 'fail': {
        const [id] = this.#stores.flatMap(({ ids }) => [...ids])
        if (id === undefined || this.#inGrace.size > 0) return
        const store = this.#pick(this.#stores)
        await store.restore(id, this.#pick((this.#earlier.get(store) ?? []).slice(-4)) ?? null)
        this.#inGrace.add(store)
        this.#owing = [...this.#replicas]
        this.#log.push(store === this.#from ? 'the old store fails over' : 'the new store fails over')
        return
      }
      case 'rewrite': {
        const owing = this.#owing.pop()
        if (owing === undefined) return await this.#endGrace()
        await this.#rewrite(owing)
      }
    }
  }

  async #remember(store: Store): Promise<void> {
    const [id] = this.#stores.flatMap(({ ids }) => [...ids])
    const bytes = id === undefined ? null : (await store.inner.get(id)).bytes
    this.#earlier.set(store, [...(this.#earlier.get(store) ?? []), bytes])
  }

  #replica(t: Test, phase: Phase): Replica {
    const forward: Forward = async ({ mayBegin = () => true }) =>
      mayBegin() ? this.#execute(phase, one) : { proof: 'not_sent', reason: 'too late' }
    const wire = (by: unknown) => migrating(this.#wire(this.#from, by), this.#wire(this.#to, by), phase)
    const one = replica(t, { store: phase === 'new' ? this.#to : this.#from, wire, forward })
    const wrote: Outcome[] = []
    this.#outcomes.set(one, wrote)
    const settle = one.records.settle.bind(one.records)
    one.records.settle = (...outcome) => {
      wrote.push(outcome)
      return settle(...outcome)
    }
    return one
  }

  /** In its grace the store grants neither claims nor takeovers. */
  #wire(store: Store, by: unknown): StorePort {
    const inner = store.wire(by)
    const held = () => new InGrace(store.now, store.now, 1)
    return {
      ...inner,
      put: async (id, bytes, spans, entry) => {
        if (!this.#inGrace.has(store) || entry === 'again' || !isClaim(bytes))
          return inner.put(id, bytes, spans, entry)
        const { now, bytes: there } = await inner.get(id)
        if (there === null) throw held()
        return { done: false, now, bytes: there }
      },
      swap: async (id, condition, bytes, spans, nextFence) => {
        if (this.#inGrace.has(store) && nextFence) throw held()
        return inner.swap(id, condition, bytes, spans, nextFence)
      },
    }
  }

  async #execute(phase: Phase, by: Replica): Promise<Forwarded> {
    const end = this.#pick<End>(['done', 'not_sent', 'refused'])
    this.#log.push(`${phase} executes: ${end}`)
    this.#executed++
    // One that is still running may have executed.
    this.#isTwice ||= this.#executed > this.#mayExecute
    const { promise, resolve } = Promise.withResolvers<void>()
    this.#running.push(resolve)
    await promise
    if (end !== 'done') this.#mayExecute++
    return end === 'not_sent'
      ? { proof: 'not_sent', reason: 'unreachable' }
      : by.responded(end === 'done' ? 201 : 429)
  }

  /** As the reclaimer does. */
  async #rewrite(one: Replica): Promise<void> {
    for (const [id, run] of one.ports.running) {
      const draft = { ...claimDraft(run.operation, run.attempt), createdAt: run.createdAt }
      await one.records.reclaim(id, draft, claimSpans(run.route), () => run.ended === null)
    }
    for (const outcome of (this.#outcomes.get(one) ?? []).toReversed()) await one.records.reclaim(...outcome)
  }

  async #endGrace(): Promise<void> {
    for (const one of this.#replicas) await this.#rewrite(one)
    this.#inGrace.clear()
  }
}

void t.test('W09 a failover of either store amid a migration executes nothing twice', async (t) => {
  const first = Number(process.env['SEED'] ?? 20_261_300)
  for (let seed = first; seed < first + RUNS; seed++) {
    const twice = await new Run(t, seed).play()
    t.equal(twice, null, `seed ${seed}`)
    if (twice !== null) break
  }
})
