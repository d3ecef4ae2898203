import { AsyncLocalStorage } from 'node:async_hooks'
import fc from 'fast-check'
import type { Test } from 'tap'
import { PHASES, type Phase } from '../../src/core/copies.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import type { Store as StorePort } from '../../src/store/register.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  type Fault,
  HOUR,
  idle,
  LEASE,
  never,
  Replica,
  route,
  type Seen,
  Store,
  type StoreCall,
} from './harness.ts'

/** A generated run picks one for each call; about half of the calls succeed. */
const WIRE_FAULTS: readonly (Fault | null)[] = [
  null,
  null,
  null,
  null,
  null,
  'lost',
  'dropped',
  'late',
  'unreplicated',
  'down',
  'full',
]

/** What the upstream does with one request. `did`: whether the work was done or may have been. */
const REPLIES: readonly { readonly did: boolean; readonly reply: (r: Replica, n: number) => Forwarded }[] = [
  { did: true, reply: (r, n) => r.responded(201, `answer ${n}`) },
  { did: true, reply: (r, n) => r.responded(404, `answer ${n}`) },
  { did: true, reply: () => ({ proof: 'unknown', reason: 'reset', timedOut: false, status: null }) },
  { did: false, reply: () => ({ proof: 'not_sent', reason: 'refused' }) },
  { did: false, reply: (r) => r.responded(429, 'slow down') },
  { did: false, reply: (r, n) => r.responded(200, `no ${n}`, { declaredOutcome: 'not-applied' }) },
]

type Step =
  | {
      readonly do: 'send'
      readonly replica: 0 | 1
      readonly body: 'A' | 'B'
      readonly reply: number
      readonly gone: boolean
    }
  /** Lets one of the waiting port calls go, with that fault. */
  | { readonly do: 'go'; readonly which: number; readonly fault: number }
  | { readonly do: 'clock'; readonly by: number }
  | { readonly do: 'arrive' }
  /** The second replica dies: none of its calls returns, and it makes no more. */
  | { readonly do: 'kill' }
  | { readonly do: 'flush'; readonly replica: 0 | 1 }

const either = fc.constantFrom(0 as const, 1 as const)
type Of<Do> = Extract<Step, { readonly do: Do }>
const of = <Do extends Step['do']>(
  weight: number,
  step: Do,
  shape: { [K in Exclude<keyof Of<Do>, 'do'>]: fc.Arbitrary<Of<Do>[K]> },
) => ({
  weight,
  arbitrary: fc.record({ do: fc.constant(step), ...shape }) as fc.Arbitrary<Step>,
})

const steps = (deadly: boolean): fc.Arbitrary<Step> =>
  fc.oneof(
    of(3, 'send', {
      replica: either,
      body: fc.constantFrom('A', 'A', 'A', 'B'),
      reply: fc.nat(REPLIES.length - 1),
      gone: fc.integer({ min: 0, max: 9 }).map((one) => one === 0),
    }),
    of(12, 'go', { which: fc.nat(9), fault: fc.nat(WIRE_FAULTS.length - 1) }),
    of(1, 'clock', { by: fc.constantFrom(1000, LEASE, 3 * LEASE) }),
    of(1, 'arrive', {}),
    ...(deadly ? [of(1, 'kill', {})] : []),
    of(1, 'flush', { replica: either }),
  )

/** Two replicas and the stores they run on. */
interface Fleet {
  readonly stores: readonly Store[]
  readonly wires: readonly ((by: unknown) => StorePort)[]
  /** Replicas that start when these two are gone, one after the other. */
  readonly later: readonly ((by: unknown) => StorePort)[]
  /** True where a store that decides nothing yet may be behind. */
  readonly mayLeaveClaims: boolean
}

function oneStore(): Fleet {
  const store = new Store()
  const wire = (by: unknown): StorePort => store.wire(by)
  return { stores: [store], wires: [wire, wire], later: [], mayLeaveClaims: false }
}

interface Sending {
  readonly body: 'A' | 'B'
  readonly tokens: string[]
  readonly upstream: () => Forwarded
  answer: Seen | null
}

const context = new AsyncLocalStorage<Sending>()

/** Plays the steps, lets everything end, then retries each payload a last time. */
async function play(
  policy: RoutePolicy,
  script: readonly Step[],
  { stores, wires, later, mayLeaveClaims }: Fleet = oneStore(),
): Promise<void> {
  const waiting: ((fault: Fault | null) => void)[] = []
  const done: { readonly body: string; readonly did: boolean }[] = []
  const chosen = new Map<StoreCall, Fault | null>()
  let open = false
  let dead: unknown = null
  const turn = (): Promise<Fault | null> =>
    open ? Promise.resolve(null) : new Promise((go) => waiting.push(go))
  for (const store of stores) {
    store.gate = async (call) => {
      if (call.by === dead) return never
      const fault = await turn()
      if (call.by !== dead) chosen.set(call, fault)
      // What was under way when the process died may still arrive.
      else chosen.set(call, fault === null ? 'dead_applied' : 'dead')
    }
    store.fault = (call) => chosen.get(call) ?? null
  }
  const replica = (wire: (by: unknown) => StorePort): Replica => {
    const one: Replica = new Replica({
      store: stores[0] as Store,
      wire,
      forward: async () => {
        const sending = context.getStore() as Sending
        if (one === dead) return never
        await turn()
        const result = sending.upstream()
        return one === dead ? never : result
      },
    })
    one.onToken = (token) => void context.getStore()?.tokens.push(token.toString('hex'))
    return one
  }
  const all = wires.map(replica) as [Replica, Replica]
  const sendings: Sending[] = []
  const send = (r: Replica, body: 'A' | 'B', reply: number, gone: boolean): Promise<void> => {
    const { did, reply: make } = REPLIES[reply] as (typeof REPLIES)[0]
    const at = sendings.length
    const upstream = (): Forwarded => {
      done.push({ body, did })
      return make(r, at)
    }
    const sending: Sending = { body, tokens: [], upstream, answer: null }
    sendings.push(sending)
    return context.run(sending, async () => {
      sending.answer = await r.get({ route: policy, body, gone: () => gone })
    })
  }
  const sent: { readonly to: Replica; readonly done: Promise<void> }[] = []
  for (const one of script) {
    switch (one.do) {
      case 'send': {
        const to = all[one.replica]
        if (to !== dead) sent.push({ to, done: send(to, one.body, one.reply, one.gone) })
        break
      }
      case 'go':
        if (waiting.length > 0) {
          const [go] = waiting.splice(one.which % waiting.length, 1)
          go?.(WIRE_FAULTS[one.fault] as Fault | null)
        }
        break
      case 'clock':
        for (const store of stores) store.now += one.by
        break
      case 'arrive':
        for (const store of stores) await store.arrive()
        break
      case 'flush':
        void all[one.replica].ports.settler.flush()
        break
      case 'kill':
        dead = all[1]
        all[1].close()
        break
    }
    for (let i = 0; i < 6; i++) await new Promise((next) => setImmediate(next))
  }
  open = true
  while (waiting.length > 0) {
    waiting.shift()?.(null)
    await idle()
  }
  const living = all.filter((one) => one !== dead)
  await Promise.all(sent.filter(({ to }) => to !== dead).map((one) => one.done))
  for (const one of living) while (!(await one.ports.settler.flush()));
  for (const store of stores) await store.arrive()
  const settled = await Promise.all(stores.map((store) => store.dump()))
  for (const store of stores) store.now += LEASE
  const last = sendings.length
  for (const one of living) for (const body of ['A', 'B'] as const) await send(one, body, 0, false)
  for (const one of living) one.close()
  for (const wire of later) {
    const one = replica(wire)
    for (const body of ['A', 'B'] as const) await send(one, body, 0, false)
    one.close()
  }

  const answers = sendings.flatMap(({ answer }) => (answer === null ? [] : [answer]))
  // Nothing is wedged: with the store back, every key is decided.
  for (const { answer } of sendings.slice(last))
    if (answer?.code === 'idempotency_key_in_progress' || answer?.code === 'idempotency_store_unavailable')
      throw new Error(`${answer?.code} in the end`)
  for (const bytes of settled.flatMap((one) => Object.values(one))) {
    if (dead === null && !mayLeaveClaims && bytes.charCodeAt(3) === 1)
      throw new Error('a claim was left in progress')
  }
  for (const one of living) {
    if (one.bytes.held !== 0) throw new Error(`${one.bytes.held} bytes are not given back`)
    if (one.ports.inFlight.count !== 0 || one.ports.running.size !== 0 || one.ports.leases.size !== 0)
      throw new Error('work is left')
  }
  for (const answer of answers)
    if (answer.retryAfter !== null && !(Number.isInteger(answer.retryAfter) && answer.retryAfter >= 1))
      throw new Error(`Retry-After: ${answer.retryAfter}`)
  // This profile explicitly gives up the rest of the promise.
  if (policy.profile === 'lenient') return

  // At most one execution, not counting those proven not to have happened.
  const executed = done.filter(({ did }) => did)
  if (executed.length > 1) throw new Error(`executed ${executed.length} times`)
  const first = executed[0]?.body
  // All replays are the same, byte for byte.
  const kept = new Set(answers.filter((answer) => answer.replayed).map((answer) => answer.bytes))
  if (kept.size > 1) throw new Error(`different replays: ${[...kept].join(' ')}`)
  for (const { body, answer } of sendings)
    if (answer?.replayed && body !== first) throw new Error('replayed to another payload')
  const own = answers.find((answer) => !answer.replayed && answer.bytes?.includes('answer'))
  if (own !== undefined && kept.size === 1 && !kept.has(own.bytes))
    throw new Error('the replay is not the first answer')
  // A refused request writes nothing. (A lost claim is withdrawn; its request gets 503.)
  const REFUSED = ['idempotency_key_reused', 'idempotency_key_in_progress', 'idempotency_outcome_unknown']
  for (const { answer, tokens } of sendings)
    if (
      REFUSED.includes(String(answer?.code)) &&
      !mayLeaveClaims &&
      tokens.some((token) => stores.some(({ wrote }) => wrote.includes(token)))
    )
      throw new Error(`${answer?.code} wrote a record`)
}

/** `plain`: without a migration, on the old store. */
type Place = Phase | 'plain'

/** Two replicas in phases of a migration, and then one in each of those that follow. The stores' clocks are an hour apart. */
function migratingFleet(places: readonly [Place, Place]): Fleet {
  const [from, to] = [new Store(), new Store()]
  to.now -= HOUR
  const on =
    (place: Place) =>
    (by: unknown): StorePort =>
      place === 'plain' ? from.wire(by) : migrating(from.wire(by), to.wire(by), place)
  const furthest = Math.max(...places.map((place) => (place === 'plain' ? -1 : PHASES.indexOf(place))))
  const later = PHASES.slice(furthest + 1).map(on)
  return { stores: [from, to], wires: places.map(on), later, mayLeaveClaims: true }
}

export const NEIGHBOURS: readonly (readonly [Place, Place])[] = [
  ['plain', 'mirror'],
  ['plain', 'both'],
  ['mirror', 'mirror'],
  ['mirror', 'both'],
  ['both', 'both'],
  ['both', 'new'],
  ['new', 'new'],
]

/** Runs of one property: INTERLEAVINGS=1500 SEED=… node FILE. */
export function runsOr(few: number): number {
  return Number(process.env['INTERLEAVINGS'] ?? few)
}

/** Plays generated interleavings of one or two stores; what the first one was that went wrong. */
export async function explored(
  policy: RoutePolicy,
  { deadly, runs, places }: { deadly: boolean; runs: number; places?: readonly [Place, Place] },
): Promise<string> {
  const scripts = fc.array(steps(deadly), { minLength: 5, maxLength: 60, size: 'max' })
  const fleet = (): Fleet => (places === undefined ? oneStore() : migratingFleet(places))
  const property = fc.asyncProperty(scripts, (script) => play(policy, script, fleet()))
  const seed = Number(process.env['SEED'] ?? (places === undefined ? 20_261_121 : 20_261_122))
  const { failed, errorInstance, counterexample } = await fc.check(property, { numRuns: runs, seed })
  return failed ? `${String(errorInstance)} ${JSON.stringify(counterexample)}` : ''
}

/** Any interleaving of two replicas, of every profile, and of neighbours in a migration. */
export function explore(t: Test, runs: number, runsMigrating: number): void {
  for (const deadly of [false, true]) {
    const what = `any interleaving of two replicas${deadly ? ', one of which dies' : ''}`
    for (const profile of ['standard', 'strict', 'stripe', 'lenient'] as const) {
      const holds = profile === 'lenient' ? 'wedges no key and leaks nothing' : 'executes at most once'
      void t.test(`X06 ${profile}: ${what}, a faulty store and lapsing leases ${holds}`, async (t) =>
        t.equal(await explored(route({ profile }), { deadly, runs }), ''),
      )
    }
    for (const places of NEIGHBOURS)
      t.test(
        `W09 ${places.join(' beside ')}: ${what} executes at most once, also in later phases`,
        async (t) => t.equal(await explored(route(), { deadly, runs: runsMigrating, places }), ''),
      )
  }
}
