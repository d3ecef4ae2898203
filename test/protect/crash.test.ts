import t, { type Test } from 'tap'
import type { Profile } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { idle, LEASE, Replica, replica, route, type Seen, Store, Stream, seen, TTL } from './harness.ts'

/** How a port call at which the process dies ends: never begun, or done and never heard of. */
type Death = 'before' | 'after'

interface Story {
  readonly name: string
  /** Before the process that dies begins. */
  readonly before?: (store: Store) => Promise<unknown>
  /** What the upstream says; `executed` is called where it does the work. */
  readonly reply: (r: Replica, executed: () => void) => Forwarded
  /** Faults of the store, by the number of the call. */
  readonly faults?: Readonly<Record<number, 'lost' | 'dropped' | 'down'>>
}

const notSent: Forwarded = { proof: 'not_sent', reason: 'refused' }

async function releasedBefore(store: Store): Promise<void> {
  const earlier = new Replica({ store })
  earlier.script.push(notSent)
  await earlier.get()
  earlier.close()
  store.calls = 0
}

const whole: Story['reply'] = (r, executed) => {
  executed()
  return r.responded(201, 'once')
}
const STORIES: readonly Story[] = [
  { name: 'a whole answer', reply: whole },
  { name: 'a whole answer over failed_retryable', before: releasedBefore, reply: whole },
  { name: 'the reply of the claim lost', reply: whole, faults: { 1: 'lost' } },
  { name: 'the claim dropped', reply: whole, faults: { 1: 'dropped' } },
  { name: 'both tries of the claim lost', reply: whole, faults: { 1: 'dropped', 2: 'lost' } },
  { name: 'the reply of the take-over lost', before: releasedBefore, reply: whole, faults: { 2: 'lost' } },
  {
    name: 'the take-over lost, then the store down',
    before: releasedBefore,
    reply: whole,
    faults: { 2: 'lost', 3: 'down' },
  },
  { name: 'the reply of the completion lost', reply: whole, faults: { 2: 'lost' } },
  { name: 'the completion dropped', reply: whole, faults: { 2: 'dropped', 3: 'down' } },
  { name: 'no byte left', reply: () => notSent },
  {
    name: 'the upstream says not-applied',
    reply: (r) => r.responded(200, 'x', { declaredOutcome: 'not-applied' }),
  },
  {
    name: 'bytes left, no answer',
    reply: (_, executed) => {
      executed()
      return { proof: 'unknown', reason: 'reset', timedOut: false, status: null }
    },
  },
  {
    name: 'a stream',
    reply: (_, executed) => {
      executed()
      const stream = new Stream()
      stream.end('complete')
      return stream.reply()
    },
  },
]

for (const profile of ['standard', 'strict'] satisfies Profile[])
  for (const story of STORIES)
    void t.test(`X06 X03 ${profile}: ${story.name}; death at every await`, async (t) => {
      let survived = false
      for (let k = 1; !survived; k++)
        for (const death of ['before', 'after'] satisfies Death[])
          survived = await life(t, profile, story, k, death)
    })

/** One process that dies at its k-th port call, and what its successors do. True: it made fewer calls. */
async function life(t: Test, profile: Profile, story: Story, k: number, death: Death): Promise<boolean> {
  const store = new Store()
  const policy = route({ profile })
  await story.before?.(store)
  let n = 0
  const executed = (): void => void n++
  let calls = 0
  let storeCalls = 0
  let dead = false
  store.fault = () => {
    storeCalls++
    if (dead) return 'dead'
    if (++calls === k) {
      dead = true
      return death === 'before' ? 'dead' : 'dead_applied'
    }
    return story.faults?.[storeCalls] ?? null
  }
  const mortal: Replica = new Replica({
    store,
    forward: async () => {
      if (dead) return new Promise(() => {})
      if (++calls !== k) return story.reply(mortal, executed)
      dead = true
      if (death === 'after') story.reply(mortal, executed)
      return new Promise(() => {})
    },
  })
  let first: Seen | null = null
  void mortal.send({ route: policy }).then((answer) => {
    // A dead process answers nobody, though its promises may still settle here.
    if (!dead) first = seen(answer)
  })
  await idle()
  if (!dead)
    for (let i = 0; i < 3 && mortal.ports.settler.size > 0; i++)
      await Promise.race([mortal.ports.settler.flush(), idle()])
  const survived = !dead
  dead = true
  mortal.close()
  store.fault = () => null

  const title = `${story.name}, ${death} call ${k}`
  const answers: Seen[] = first === null ? [] : [first]
  for (const later of [0, 1, LEASE, LEASE, TTL / 2]) {
    store.now += later
    const next = replica(t, {
      store,
      forward: async () => {
        executed()
        return next.responded(201, `again ${n}`)
      },
    })
    answers.push(await next.get({ route: policy }))
    t.equal(next.ports.settler.size, 0)
  }
  t.ok(n <= 1, `${title}: N = ${n}`)
  const kept = new Set(answers.filter((one) => one.replayed).map((one) => one.bytes))
  t.ok(kept.size <= 1, `${title}: every later answer is the first`)
  const last = answers.at(-1) as Seen
  t.ok(
    last.replayed ||
      last.code === 'idempotency_outcome_unknown' ||
      last.code === 'idempotency_response_unavailable',
    `${title}: resolved or unknown in the end, never for ever in progress`,
  )
  return survived
}
