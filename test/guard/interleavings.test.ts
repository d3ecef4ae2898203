import fc from 'fast-check'
import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  context,
  type Fault,
  idle,
  LEASE,
  Replica,
  route,
  type Seen,
  Store,
  type StoreCall,
  seen,
} from './harness.ts'

const RUNS = Number(process.env['INTERLEAVINGS'] ?? 400)

/** What the upstream does with one request. `did`: whether the work was done or may have been. */
const REPLIES: readonly { readonly did: boolean; readonly reply: (r: Replica, n: number) => Forwarded }[] = [
  { did: true, reply: (r, n) => r.responded(201, `answer ${n}`) },
  { did: true, reply: (r, n) => r.responded(404, `answer ${n}`) },
  { did: true, reply: () => ({ proof: 'unknown', reason: 'reset', timedOut: false, status: null }) },
  { did: false, reply: () => ({ proof: 'not_sent', reason: 'refused' }) },
  { did: false, reply: (r) => r.responded(429, 'slow down') },
  { did: false, reply: (r, n) => r.responded(200, `no ${n}`, { said: 'not-applied' }) },
]

const FAULTS: readonly (Fault | null)[] = [
  null,
  null,
  null,
  null,
  null,
  'lost',
  'dropped',
  'late',
  'down',
  'full',
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
  | { readonly do: 'flush'; readonly replica: 0 | 1 }

const step: fc.Arbitrary<Step> = fc.oneof(
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
      fault: fc.nat(FAULTS.length - 1),
    }),
  },
  {
    weight: 1,
    arbitrary: fc.record({ do: fc.constant('clock' as const), by: fc.constantFrom(1000, LEASE, 3 * LEASE) }),
  },
  { weight: 1, arbitrary: fc.constant({ do: 'arrive' as const }) },
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
  answer: Seen | null
}

/** Plays the steps, then lets everything end and a last retry of each payload come. */
async function play(policy: RoutePolicy, steps: readonly Step[]): Promise<void> {
  const store = new Store()
  const waiting: ((fault: Fault | null) => void)[] = []
  const done: { readonly body: string; readonly did: boolean }[] = []
  const chosen = new Map<StoreCall, Fault | null>()
  let open = false
  store.gate = async (call) => {
    if (!open) chosen.set(call, await new Promise((go) => waiting.push(go)))
  }
  store.fault = (call) => chosen.get(call) ?? null
  const all = [0, 1].map(() => {
    const one = new Replica({ store })
    one.onToken = (token) => void context.getStore()?.tokens.push(token.toString('hex'))
    return one
  }) as [Replica, Replica]
  const sendings: Sending[] = []
  const send = (r: Replica, body: 'A' | 'B', reply: number, gone: boolean): Promise<void> => {
    const sending: Sending = { body, tokens: [], answer: null }
    sendings.push(sending)
    const { did, reply: make } = REPLIES[reply] as (typeof REPLIES)[0]
    const at = sendings.length
    const headers = ['X-Test', String(at)]
    plans.set(String(at), () => {
      done.push({ body, did })
      return make(r, at)
    })
    return context.run(sending, async () => {
      sending.answer = await r.get({ route: policy, body, headers, gone: () => gone })
    })
  }
  const plans = new Map<string, () => Forwarded>()
  for (const one of all) {
    // Which request the upstream sees is known by its body’s owner: the walk is awaited in its context.
    Object.assign(one.ports, {
      forward: async () => {
        const at = sendings.findIndex((sending) => sending === (context.getStore() as unknown)) + 1
        const plan = plans.get(String(at)) as () => Forwarded
        if (!open) await new Promise<Fault | null>((go) => waiting.push(go))
        return plan()
      },
    })
  }

  const sent: Promise<void>[] = []
  for (const one of steps) {
    switch (one.do) {
      case 'send':
        sent.push(send(all[one.replica], one.body, one.reply, one.gone))
        break
      case 'go':
        if (waiting.length > 0) {
          const [go] = waiting.splice(one.which % waiting.length, 1)
          go?.(FAULTS[one.fault] as Fault | null)
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
    }
    for (let i = 0; i < 6; i++) await new Promise((next) => setImmediate(next))
  }
  open = true
  while (waiting.length > 0) {
    waiting.shift()?.(null)
    await idle()
  }
  await Promise.all(sent)
  for (const one of all) while (!(await one.ports.settler.flush()));
  await store.arrive()
  const settled = await store.dump()
  store.now += LEASE
  for (const one of all) for (const body of ['A', 'B'] as const) await send(one, body, 0, false)
  for (const one of all) one.close()

  // At most one execution, but for those that are proven not to have been any.
  const executed = done.filter(({ did }) => did)
  if (executed.length > 1) throw new Error(`executed ${executed.length} times`)
  const first = executed[0]?.body
  const answers = sendings.map(({ answer }) => answer as Seen)
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
  // Nothing is wedged: with everybody alive and the store back, every key is decided.
  for (const answer of answers.slice(-4))
    if (answer.code === 'idempotency_key_in_progress' || answer.code === 'idempotency_store_unavailable')
      throw new Error(`${answer.code} in the end`)
  for (const bytes of Object.values(settled)) {
    if (bytes.charCodeAt(3) === 1) throw new Error('a claim was left in progress')
  }
  for (const one of all) {
    if (one.bytes.held !== 0) throw new Error(`${one.bytes.held} bytes are not given back`)
    if (one.ports.inFlight.count !== 0 || one.ports.running.size !== 0 || one.ports.leases.size !== 0)
      throw new Error('work is left')
  }
  for (const answer of answers)
    if (answer.retryAfter !== null && !(Number.isInteger(answer.retryAfter) && answer.retryAfter >= 1))
      throw new Error(`Retry-After: ${answer.retryAfter}`)
  void seen
}

for (const profile of ['standard', 'strict', 'stripe'] as const)
  void t.test(
    `${profile}: any interleaving of two replicas, a faulty store and lapsing leases executes at most once`,
    async (t) => {
      const policy = route({ profile })
      await fc.assert(
        fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 60, size: 'max' }), (steps) =>
          play(policy, steps),
        ),
        {
          numRuns: RUNS,
          ...(process.env['SEED'] ? { seed: Number(process.env['SEED']) } : { seed: 20_261_121 }),
        },
      )
      t.pass(`${RUNS} runs`)
    },
  )
