import fc from 'fast-check'
import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  context,
  type Fault,
  idle,
  LEASE,
  never,
  Replica,
  RUNS,
  route,
  type Seen,
  Store,
  type StoreCall,
  WIRE_FAULTS,
} from './harness.ts'

// Thousands of runs (INTERLEAVINGS=1500 SEED=…) take longer than tap waits by itself.
t.setTimeout(600_000)

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
  /** Lets one of the waiting port calls go, in that way. */
  | { readonly do: 'go'; readonly which: number; readonly fault: number }
  | { readonly do: 'clock'; readonly by: number }
  | { readonly do: 'arrive' }
  /** The second replica dies: none of its calls comes back, nor does another one leave it. */
  | { readonly do: 'kill' }
  | { readonly do: 'flush'; readonly replica: 0 | 1 }

const steps = (deadly: boolean): fc.Arbitrary<Step> =>
  fc.oneof(
    {
      weight: 3,
      arbitrary: fc.record({
        do: fc.constant('send' as const),
        replica: fc.constantFrom(0 as const, 1 as const),
        body: fc.constantFrom('A' as const, 'A' as const, 'A' as const, 'B' as const),
        reply: fc.nat(REPLIES.length - 1),
        gone: fc.integer({ min: 0, max: 9 }).map((one) => one === 0),
      }),
    },
    {
      weight: 12,
      arbitrary: fc.record({
        do: fc.constant('go' as const),
        which: fc.nat(9),
        fault: fc.nat(WIRE_FAULTS.length - 1),
      }),
    },
    {
      weight: 1,
      arbitrary: fc.record({
        do: fc.constant('clock' as const),
        by: fc.constantFrom(1000, LEASE, 3 * LEASE),
      }),
    },
    { weight: 1, arbitrary: fc.constant({ do: 'arrive' as const }) },
    ...(deadly ? [{ weight: 1, arbitrary: fc.constant({ do: 'kill' as const }) }] : []),
    {
      weight: 1,
      arbitrary: fc.record({
        do: fc.constant('flush' as const),
        replica: fc.constantFrom(0 as const, 1 as const),
      }),
    },
  )

interface Sending {
  readonly body: 'A' | 'B'
  readonly tokens: string[]
  readonly upstream: () => Forwarded
  answer: Seen | null
}

/** Plays the steps, then lets everything end and a last retry of each payload come. */
async function play(policy: RoutePolicy, script: readonly Step[]): Promise<void> {
  const store = new Store()
  const waiting: ((fault: Fault | null) => void)[] = []
  const done: { readonly body: string; readonly did: boolean }[] = []
  const chosen = new Map<StoreCall, Fault | null>()
  let open = false
  let dead: unknown = null
  const turn = (): Promise<Fault | null> =>
    open ? Promise.resolve(null) : new Promise((go) => waiting.push(go))
  store.gate = async (call) => {
    if (call.by === dead) return never
    const fault = await turn()
    if (call.by !== dead) chosen.set(call, fault)
    // What was under way when the process died may still arrive.
    else chosen.set(call, fault === null ? 'dead_applied' : 'dead')
  }
  store.fault = (call) => chosen.get(call) ?? null
  const all = [0, 1].map(() => {
    const one: Replica = new Replica({
      store,
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
  }) as [Replica, Replica]
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
        store.now += one.by
        break
      case 'arrive':
        await store.arrive()
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
  await store.arrive()
  const settled = await store.dump()
  store.now += LEASE
  const last = sendings.length
  for (const one of living) for (const body of ['A', 'B'] as const) await send(one, body, 0, false)
  for (const one of living) one.close()

  const answers = sendings.flatMap(({ answer }) => (answer === null ? [] : [answer]))
  // Nothing is wedged: with everybody alive and the store back, every key is decided.
  for (const { answer } of sendings.slice(last))
    if (answer?.code === 'idempotency_key_in_progress' || answer?.code === 'idempotency_store_unavailable')
      throw new Error(`${answer?.code} in the end`)
  for (const bytes of Object.values(settled)) {
    if (dead === null && bytes.charCodeAt(3) === 1) throw new Error('a claim was left in progress')
  }
  for (const one of living) {
    if (one.bytes.held !== 0) throw new Error(`${one.bytes.held} bytes are not given back`)
    if (one.ports.inFlight.count !== 0 || one.ports.running.size !== 0 || one.ports.leases.size !== 0)
      throw new Error('work is left')
  }
  for (const answer of answers)
    if (answer.retryAfter !== null && !(Number.isInteger(answer.retryAfter) && answer.retryAfter >= 1))
      throw new Error(`Retry-After: ${answer.retryAfter}`)
  // The rest of the promise this profile gives up by name.
  if (policy.profile === 'lenient') return

  // At most one execution, but for those that are proven not to have been any.
  const executed = done.filter(({ did }) => did)
  if (executed.length > 1) throw new Error(`executed ${executed.length} times`)
  const first = executed[0]?.body
  // Every answer of what was done is the same, byte for byte.
  const kept = new Set(answers.filter((answer) => answer.replayed).map((answer) => answer.bytes))
  if (kept.size > 1) throw new Error(`different replays: ${[...kept].join(' ')}`)
  for (const { body, answer } of sendings)
    if (answer?.replayed && body !== first) throw new Error('replayed to another payload')
  const own = answers.find((answer) => !answer.replayed && answer.bytes?.includes('answer'))
  if (own !== undefined && kept.size === 1 && !kept.has(own.bytes))
    throw new Error('the replay is not the first answer')
  // A refused request writes nothing. (One whose claim was lost is withdrawn; that is its 503.)
  const REFUSED = ['idempotency_key_reused', 'idempotency_key_in_progress', 'idempotency_outcome_unknown']
  for (const { answer, tokens } of sendings)
    if (REFUSED.includes(String(answer?.code)) && tokens.some((token) => store.wrote.includes(token)))
      throw new Error(`${answer?.code} wrote a record`)
}

for (const profile of ['standard', 'strict', 'stripe', 'lenient'] as const)
  for (const deadly of [false, true]) {
    const what = `any interleaving of two replicas${deadly ? ', one of which dies' : ''}, a faulty store and lapsing leases`
    const holds = profile === 'lenient' ? 'wedges no key and leaks nothing' : 'executes at most once'
    void t.test(`X06 ${profile}: ${what} ${holds}`, async (t) => {
      const policy = route({ profile })
      const scripts = fc.array(steps(deadly), { minLength: 5, maxLength: 60, size: 'max' })
      const seed = Number(process.env['SEED'] ?? 20_261_121)
      await fc.assert(
        fc.asyncProperty(scripts, (script) => play(policy, script)),
        { numRuns: RUNS, seed },
      )
      t.pass(`${RUNS} runs`)
    })
  }
