import t from 'tap'
import { NO_POSTGRES } from '../support/postgres.ts'
import { TORMENTED } from './stores.ts'
import { planted, type TortureOptions, torture } from './torture.ts'

t.setTimeout(600_000)
// A failover is mostly waiting.
t.jobs = 3

const SHORT: Omit<TortureOptions, 'store' | 'seed' | 'goal'> = { replicas: 2, lanes: 12 }
/** Enough for each kind of fault to come at least once. */
const FAULTS = 24
const EVERYWHERE = ['replica killed', 'replica drained', 'replica paused', 'replica reloaded', 'clock set']
const OF_STORE: Readonly<Record<string, readonly string[]>> = {
  redis: ['store killed', 'store full', 'link to the store loses replies'],
  postgres: ['store killed', 'link to the store loses replies'],
  sentinel: ['promotion', 'kill -9'],
  cluster: ['slot moved by hand', 'promotion', 'kill -9'],
}

for (const store of Object.keys(TORMENTED))
  t.test(
    `${store}: under faults nothing is executed twice, answered wrongly, lost or stuck`,
    { skip: store === 'postgres' && NO_POSTGRES, buffered: true },
    async (t) => {
      const seed = Math.floor(Math.random() * 2 ** 31)
      t.comment(`seed ${seed}`)
      const goal = { requests: 1, faults: FAULTS }
      const { findings, leftOvers, requests, faults, replays } = await torture({
        ...SHORT,
        store,
        seed,
        goal,
      })
      t.comment(`${requests} requests, ${[...faults.values()].reduce((sum, n) => sum + n, 0)} faults`)
      for (const { what, timeline } of findings) t.comment(`${what}\n${timeline}`)
      t.strictSame(
        findings.map(({ what }) => what),
        [],
      )
      t.strictSame(leftOvers, [])
      t.ok(replays > 0)
      for (const name of [...EVERYWHERE, ...(OF_STORE[store] ?? [])]) t.ok(faults.has(name), name)
    },
  )

void t.test('redis, with workers: the same', { buffered: true }, async (t) => {
  const seed = Math.floor(Math.random() * 2 ** 31)
  t.comment(`seed ${seed}`)
  const goal = { requests: 1, faults: FAULTS }
  const { findings, leftOvers, faults } = await torture({ ...SHORT, workers: 2, store: 'redis', seed, goal })
  for (const { what, timeline } of findings) t.comment(`${what}\n${timeline}`)
  t.strictSame([findings.map(({ what }) => what), leftOvers], [[], []])
  for (const name of ['worker killed', 'worker paused', 'first process paused']) t.ok(faults.has(name), name)
})

void t.test('torture can fail: it finds a bug planted in the proxies', { buffered: true }, async (t) => {
  const { findings } = await torture({
    ...SHORT,
    store: 'sqlite',
    seed: 1,
    goal: { requests: 400, faults: 1 },
    env: planted('the caller is not part of the record'),
  })
  t.ok(findings.length > 0)
})
