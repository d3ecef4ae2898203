import t from 'tap'
import { after } from '../../src/runtime/scheduling.ts'
import { explore, sample } from './explore.ts'
import type { Plant } from './process.ts'
import { protocol } from './promises.ts'
import { MISTAKES, type Rules, STEPS, type StepName } from './protocol.ts'
import { nothingYet, replayGuard } from './replay-guard.ts'
import { VARIANTS } from './variants.ts'

t.setTimeout(600_000)

/** Paths of each variant, about (MANY=1500). */
const MANY = Number(process.env['MANY'] ?? 150)
const AT_LEAST = 100

const STAMP = { version: 0, fence: 0, createdAt: 0 }

interface Planted {
  /** The variant whose paths find it. */
  readonly variant: string
  /** What is said at the end of such a path: the step, and what differs from the model. */
  readonly found: RegExp
  readonly plant: Plant
}

/** Mistakes in what a process uses; the model makes some of them too, under the same names. */
const PLANTED: Readonly<Record<string, Planted>> = {
  'the first byte leaves on an old lease': {
    variant: 'plain',
    found: /\| \d: (its lease grows old|it asks for its claim again): attempt \d: it would send$/,
    plant: ({ leases }) => {
      const hold = leases.hold.bind(leases)
      leases.hold = (...lease) => {
        hold(...lease)
        return () => true
      }
    },
  },
  'a lost claim is sent all the same': {
    variant: 'plain',
    found:
      /\| \d: (its claim arrives, the reply is lost|it waits no longer for the reply): attempt \d: it asked the upstream 1 times, not 0$/,
    plant: ({ records }) => {
      const claim = records.claim.bind(records)
      records.claim = (...asked) =>
        after(claim(...asked), (reply) =>
          reply.kind === 'unavailable' ? { kind: 'claimed', now: 0, stamp: STAMP, recognised: false } : reply,
        )
    },
  },
  'a lost claim is not withdrawn': {
    variant: 'plain',
    found: /\| \d: its outcome arrives(, the reply is lost)?: it has sent nothing$/,
    plant: ({ settler }) => {
      settler.withdraw = () => undefined
    },
  },
  'an error frees the key': {
    variant: 'plain',
    found:
      /\| \d: its outcome arrives(, the reply is lost)?: it reads failed_retryable, in the model unknown$/,
    plant: ({ settler }) => {
      const settle = settler.settle.bind(settler)
      settler.settle = (execution, outcome, release) => {
        const { kind } = outcome
        return settle(execution, kind === 'unknown' ? { ...outcome, kind: 'not_executed' } : outcome, release)
      }
    },
  },
  'an answer leaves before its outcome is written': {
    variant: 'plain',
    found:
      /\| \d: (it is answered|the answer says .*|the exchange breaks off|it cannot send): attempt \d: its client has an answer$/,
    plant: ({ settler }) => {
      const settle = settler.settle.bind(settler)
      settler.settle = (...ended) => {
        void settle(...ended)
        return { kind: 'settled', state: 'completed', expiresAt: null, left: null, recorded: null }
      }
    },
  },
  'an outcome whose reply was lost is given up': {
    variant: 'a store that forgets once',
    found: /\| \d: its outcome arrives(, the reply is lost)?: it has sent nothing$/,
    plant: ({ records }) => {
      const settle = records.settle.bind(records)
      records.settle = (...outcome) =>
        after(settle(...outcome), (reply) =>
          reply.kind === 'unavailable' ? { kind: 'written', now: 0, stamp: STAMP } : reply,
        )
    },
  },
  'a claim that the grace holds back does not wait': {
    variant: 'a failover with grace',
    found: /\| the grace ends: what was held back does not wait$/,
    plant: ({ waiters }) => {
      waiters.outlast = async () => true
    },
  },
  'claims are not written again': {
    variant: 'a failover with grace',
    found: /\| \d: it writes its claim again: it reads /,
    plant: ({ records }) => {
      const reclaim = records.reclaim.bind(records)
      records.reclaim = async (id, own, ...more) =>
        own.state === 'in_progress' ? { kind: 'kept' } : reclaim(id, own, ...more)
    },
  },
  'outcomes are not written again': {
    variant: 'a failover with grace',
    found: /\| \d: it writes its outcome again: it reads /,
    plant: ({ records }) => {
      records.recent = () => []
    },
  },
}

const taken = new Set<StepName>()

for (const [variant, rules] of Object.entries(VARIANTS(2)))
  void t.test(`two requests, ${variant}`, async (t) => {
    const found = explore(protocol(rules))
    t.equal(found.broken, null, 'no way leads to what the contract forbids')
    t.comment(`${found.states} states, ${found.steps} steps`)

    void t.test('the guard follows the paths of the model', async (t) => {
      const followed = nothingYet()
      for (const path of sample(found, MANY)) {
        await replayGuard(path, rules, followed)
        for (const { name } of path) taken.add(name)
      }
      t.comment(JSON.stringify(followed))
      t.ok(followed.paths > AT_LEAST, `${followed.paths} paths`)
      t.ok(followed.sent > 0, 'requests were sent')
      t.ok(followed.answers > 0, 'clients were answered')
      const hasGrace = rules.bounds.failovers > 0 && !rules.isPartOfFleetGraceless
      t.equal(followed.held > 0, hasGrace, 'only a grace holds claims back')
    })

    for (const [mistake, planted] of Object.entries(PLANTED))
      if (planted.variant === variant)
        void t.test(`the paths find: ${mistake}`, async (t) => {
          const followed = nothingYet()
          const following = async (): Promise<void> => {
            for (const path of sample(found, MANY)) await replayGuard(path, rules, followed, planted.plant)
          }
          await t.rejects(following(), { message: planted.found })
          t.comment(`after ${followed.paths} paths`)
        })
  })

void t.test('every step of the model is taken', async (t) => {
  t.same([...taken].sort(), [...STEPS].sort())
})

/** Those that must find every mistake. */
const REVEALING = ['plain', 'a failover with grace', 'a failover with grace on some replicas only']

void t.test('the model finds every mistake', async (t) => {
  for (const mistake of MISTAKES) {
    let broken: ReturnType<typeof explore>['broken'] = null
    for (const name of REVEALING)
      broken ??= explore(protocol({ ...(VARIANTS(2)[name] as Rules), mistake })).broken
    t.not(broken, null, mistake)
    t.comment(`${mistake}: ${broken?.what}: ${broken?.trace.join(', ')}`)
  }
})
