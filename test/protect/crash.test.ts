import t, { type Test } from 'tap'
import type { Profile } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  BROKEN,
  idle,
  LEASE,
  NOT_SENT,
  Replica,
  replica,
  route,
  type Seen,
  Store,
  Stream,
  seen,
  TTL,
} from './harness.ts'

/** When the process dies: before the port call begins, or once it is done but before the process hears of it. */
type Death = 'before' | 'after'

interface Story {
  readonly name: string
  /** Runs before the process that dies starts. */
  readonly before?: (store: Store) => Promise<unknown>
  /** The upstream's answer; calls `executed` where the upstream does the work. */
  readonly reply: (r: Replica, executed: () => void) => Forwarded
  /** Store faults, by number of the call. */
  readonly faults?: Readonly<Record<number, 'lost' | 'dropped' | 'down'>>
}

async function releasedBefore(store: Store): Promise<void> {
  const earlier = new Replica({ store })
  earlier.script.push(NOT_SENT)
  await earlier.get()
  earlier.close()
  store.calls = 0
}

const whole: Story['reply'] = (r, executed) => {
  executed()
  return r.responded(201, 'once')
}
const STORIES: readonly Story[] = [
  { name: 'a complete answer', reply: whole },
  { name: 'a complete answer over failed_retryable', before: releasedBefore, reply: whole },
  { name: 'the reply to the claim is lost', reply: whole, faults: { 1: 'lost' } },
  { name: 'the claim is dropped', reply: whole, faults: { 1: 'dropped' } },
  { name: 'both tries of the claim are lost', reply: whole, faults: { 1: 'dropped', 2: 'lost' } },
  { name: 'the reply to the takeover is lost', before: releasedBefore, reply: whole, faults: { 2: 'lost' } },
  {
    name: 'the reply to the takeover is lost, then the store is down',
    before: releasedBefore,
    reply: whole,
    faults: { 2: 'lost', 3: 'down' },
  },
  { name: 'the reply to the completion is lost', reply: whole, faults: { 2: 'lost' } },
  { name: 'the completion is dropped', reply: whole, faults: { 2: 'dropped', 3: 'down' } },
  { name: 'no bytes were sent', reply: () => NOT_SENT },
  {
    name: 'the upstream declares not-applied',
    reply: (r) => r.responded(200, 'x', { declaredOutcome: 'not-applied' }),
  },
  {
    name: 'bytes were sent, no answer came',
    reply: (_, executed) => {
      executed()
      return BROKEN
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
    void t.test(
      `X06 X03 ${profile}: executes at most once if the process dies at any port call (${story.name})`,
      async (t) => {
        let survived = false
        for (let k = 1; !survived; k++)
          for (const death of ['before', 'after'] satisfies Death[])
            survived = await life(t, profile, story, k, death)
      },
    )

/** Runs a process that dies at its k-th port call, then its successors. Returns true if it made fewer calls. */
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
  t.ok(kept.size <= 1, `${title}: all replays are the same`)
  const last = answers.at(-1) as Seen
  t.ok(
    last.replayed ||
      last.code === 'idempotency_outcome_unknown' ||
      last.code === 'idempotency_response_unavailable',
    `${title}: resolved or unknown in the end, not stuck in progress`,
  )
  return survived
}
