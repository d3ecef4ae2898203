import fc from 'fast-check'
import type { Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  BROKEN,
  type Fault,
  idle,
  LEASE,
  NOT_SENT,
  never,
  Replica,
  type Seen,
  Store,
  type StoreCall,
  WIRE_FAULTS,
} from '../protect/harness.ts'
import { AFTER, asking, EVERY, KEY, Worker } from './harness.ts'

/** What the upstream does with one request, and what arrives of its answer. */
const REPLIES: readonly {
  readonly did: 'paid' | 'declined' | null
  readonly reply: (r: Replica, n: number) => Forwarded
}[] = [
  { did: 'paid', reply: (r, n) => r.responded(201, `"answer ${n}"`) },
  { did: 'paid', reply: () => BROKEN },
  { did: 'declined', reply: () => ({ proof: 'unknown', reason: 'reset', timedOut: true, status: 402 }) },
  // The request itself was lost on the way.
  { did: null, reply: () => BROKEN },
  { did: null, reply: () => NOT_SENT },
]

/** How the upstream treats a status query. */
type Mood = 'tells' | 'breaks' | 'unsure' | 'another'
const MOODS: readonly Mood[] = ['tells', 'tells', 'tells', 'breaks', 'unsure', 'another']

type Step =
  | { readonly do: 'send'; readonly replica: 0 | 1; readonly reply: number }
  | { readonly do: 'sweep'; readonly replica: 0 | 1; readonly mood: Mood }
  | { readonly do: 'go'; readonly which: number; readonly fault: number }
  | { readonly do: 'clock'; readonly by: number }
  | { readonly do: 'arrive' }
  | { readonly do: 'kill' }
  | { readonly do: 'flush'; readonly replica: 0 | 1 }

const either = fc.constantFrom(0 as const, 1 as const)
const steps = (deadly: boolean): fc.Arbitrary<Step> =>
  fc.oneof(
    {
      weight: 2,
      arbitrary: fc.record({
        do: fc.constant('send' as const),
        replica: either,
        reply: fc.nat(REPLIES.length - 1),
      }),
    },
    {
      weight: 4,
      arbitrary: fc.record({
        do: fc.constant('sweep' as const),
        replica: either,
        mood: fc.constantFrom(...MOODS),
      }),
    },
    {
      weight: 14,
      arbitrary: fc.record({
        do: fc.constant('go' as const),
        which: fc.nat(9),
        fault: fc.nat(WIRE_FAULTS.length - 1),
      }),
    },
    {
      weight: 3,
      arbitrary: fc.record({
        do: fc.constant('clock' as const),
        by: fc.constantFrom(1000, EVERY, LEASE, AFTER, 3 * AFTER),
      }),
    },
    { weight: 1, arbitrary: fc.constant({ do: 'arrive' as const }) },
    ...(deadly ? [{ weight: 1, arbitrary: fc.constant({ do: 'kill' as const }) }] : []),
    { weight: 1, arbitrary: fc.record({ do: fc.constant('flush' as const), replica: either }) },
  )

/** Plays the steps, lets everything end and the sweepers resolve what is open, then retries a last time. */
async function play(policy: RoutePolicy, script: readonly Step[]): Promise<void> {
  const store = new Store()
  const waiting: ((fault: Fault | null) => void)[] = []
  const chosen = new Map<StoreCall, Fault | null>()
  /** What was done, in order. A second entry is a double execution. */
  const done: { readonly n: number; readonly what: 'paid' | 'declined' }[] = []
  let open = false
  let dead: number | null = null
  const processOf = new Map<unknown, number>()
  const isDead = (by: unknown): boolean => dead !== null && processOf.get(by) === dead
  const turn = (): Promise<Fault | null> =>
    open ? Promise.resolve(null) : new Promise((go) => waiting.push(go))
  store.gate = async (call) => {
    if (isDead(call.by)) return never
    const fault = await turn()
    chosen.set(call, isDead(call.by) ? (fault === null ? 'dead_applied' : 'dead') : fault)
  }
  store.fault = (call) => chosen.get(call) ?? null
  let sent = 0
  let plan = 0
  const replicas = [0, 1].map((at) => {
    const one: Replica = new Replica({
      store,
      forward: async () => {
        if (isDead(one)) return never
        const n = ++sent
        const { did, reply } = REPLIES[plan] as (typeof REPLIES)[0]
        // Done when the request arrives; the answer takes its time.
        if (did !== null) done.push({ n, what: did })
        await turn()
        return isDead(one) ? never : reply(one, n)
      },
    })
    processOf.set(one, at)
    return one
  }) as [Replica, Replica]
  let mood: Mood = 'tells'
  const workers = replicas.map((one, at) => {
    const made: Worker = new Worker(store, [policy], one)
    made.isOwn = (id) => one.ports.running.has(id) || one.ports.settler.held(id) !== null
    const say = async (): Promise<Forwarded> => {
      if (dead === at) return never
      const [first] = done
      const now = mood
      await turn()
      if (dead === at) return never
      if (now === 'breaks') return BROKEN
      if (now === 'unsure') return made.says(202)
      if (now === 'another') return made.says(200, { key: 'another', payment: 'another' })
      if (first === undefined) return made.says(404, {})
      return made.says(first.what === 'paid' ? 200 : 402, { key: KEY, payment: `answer ${first.n}` })
    }
    made.script.push(...Array.from({ length: 500 }, () => say))
    return made
  }) as [Worker, Worker]
  const answers: Seen[] = []
  const send = async (to: Replica): Promise<void> => {
    answers.push(await to.get({ route: policy }))
  }
  const sending: { readonly at: number; readonly done: Promise<void> }[] = []
  const sweeping: { readonly at: number; readonly done: Promise<unknown> }[] = []
  for (const one of script) {
    switch (one.do) {
      case 'send':
        plan = one.reply
        if (one.replica !== dead) sending.push({ at: one.replica, done: send(replicas[one.replica]) })
        break
      case 'sweep':
        mood = one.mood
        if (one.replica !== dead)
          sweeping.push({ at: one.replica, done: workers[one.replica].sweeper.sweep().catch(() => {}) })
        break
      case 'go':
        if (waiting.length > 0)
          waiting.splice(one.which % waiting.length, 1)[0]?.(WIRE_FAULTS[one.fault] as Fault | null)
        break
      case 'clock':
        store.now += one.by
        break
      case 'arrive':
        await store.arrive()
        break
      case 'flush':
        void replicas[one.replica].ports.settler.flush()
        break
      case 'kill':
        dead = 1
        replicas[1].close()
        break
    }
    for (let i = 0; i < 6; i++) await new Promise((next) => setImmediate(next))
  }
  mood = 'tells'
  open = true
  while (waiting.length > 0) {
    waiting.shift()?.(null)
    await idle()
  }
  const living = <T>(all: readonly T[]): T[] => all.filter((_, at) => at !== dead)
  await Promise.all([...sending, ...sweeping].filter(({ at }) => at !== dead).map((one) => one.done))
  for (const one of living(replicas)) while (!(await one.ports.settler.flush()));
  await store.arrive()
  for (let round = 0; round < 12; round++) {
    store.now += 3 * AFTER
    for (const one of living(workers)) await one.round()
  }
  plan = 0
  for (const one of living(replicas)) await send(one)
  for (const one of replicas) one.close()

  if (done.length > 1) throw new Error(`executed ${done.length} times`)
  const truth = done[0]
  if (truth === undefined) throw new Error('the last retry was not executed')
  for (const { bytes, replayed, code } of answers) {
    if (bytes !== null && !bytes.includes(`answer ${truth.n}`)) throw new Error(`answered ${bytes}`)
    if (replayed && code !== null) throw new Error('a replayed refusal')
  }
  const last = answers.at(-1)
  // A full store keeps the outcome without the answer.
  if (last?.bytes === null && last.code !== 'idempotency_response_unavailable')
    throw new Error(`in the end: ${last?.code}`)
  // From then on all say the same. (Before, a replica may have answered from an outcome that it held and that died with it.)
  const final = living(replicas).map((_, i) => answers.at(-1 - i)?.bytes)
  if (final.length === 2 && answers.at(-2)?.replayed && final[0] !== final[1])
    throw new Error('different replays')
  for (const one of [...living(replicas), ...living(workers)])
    if (one.bytes.held !== 0) throw new Error(`${one.bytes.held} bytes are not given back`)
}

/** Any interleaving of two replicas that own, sweep and retry. */
export function exploreSweepers(t: Test, runs: number): void {
  const policy = asking({ attempts: 1000 })
  for (const deadly of [false, true]) {
    const what = `any interleaving of owners, sweepers and retries${deadly ? ', one of which dies' : ''}`
    void t.test(`O02 O03 ${what}, executes once, and resolves to one answer`, async (t) => {
      const scripts = fc.array(steps(deadly), { minLength: 5, maxLength: 80, size: 'max' })
      const property = fc.asyncProperty(scripts, (script) => play(policy, script))
      await fc.assert(property, { numRuns: runs, seed: Number(process.env['SEED'] ?? 20_261_121) })
      t.pass(`${runs} runs`)
    })
  }
}
