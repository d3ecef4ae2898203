import { execFileSync, spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import t from 'tap'
import { simulateDay } from '../../bench/capacity/day.ts'
import { memoryOf } from '../../bench/capacity/measure.ts'
import { FAILOVER } from '../../bench/capacity/measured.ts'
import { largestShare, planOf } from '../../bench/capacity/plan.ts'

const RUN = 'bench/capacity/run.ts'
const SIZED = { size: 64 * 2 ** 30, load: 0.5, waits: false }
const WORK = {
  first: 1000,
  replays: 100,
  response: 300,
  ttl: 86_400_000,
  bodyTtl: null,
  keep: 'response',
} as const

void t.test('docs/scale.md shows what its commands print', async (t) => {
  const page = readFileSync('docs/scale.md', 'utf8')
  const blocks = [...page.matchAll(/^\$ npm run --silent capacity -- (.*)\n([^]*?)^```/gm)]
  t.ok(blocks.length > 1)
  for (const [, args = '', printed] of blocks)
    t.equal(execFileSync(process.execPath, [RUN, ...args.split(' ')], { encoding: 'utf8' }), printed, args)
})

void t.test('a plan that cannot work says why', async (t) => {
  const limits = (over: Partial<Parameters<typeof planOf>[0]>): string =>
    planOf({ ...WORK, store: 'redis', ...over }, SIZED).limits.join('\n')
  t.equal(limits({}), '')
  t.match(
    limits({ first: 10_000_000 }),
    /masters are needed, and 256 shards go to 256 at most: split callers into cells/,
  )
  t.match(limits({ store: 'postgres', first: 10_000 }), /times the disk of one server/)
  t.match(limits({ store: 'sqlite', first: 10_000, ttl: 1000 }), /a SQLite file serves one/)
  t.equal(largestShare(100), 3 / 256, 'shards are not divided')
})

void t.test(
  'the day: a third of all keys is refused while a third of the masters is gone, and nobody gives up',
  async (t) => {
    const first = 3000
    const { region, givenUp, refused } = simulateDay({ masters: 3, first, replays: 0 })
    const seconds =
      Math.ceil((FAILOVER.nodeTimeout * FAILOVER.pinged + FAILOVER.election) / 1000) + FAILOVER.grace / 1000
    t.equal(region.seconds, seconds)
    t.ok(region.refused > (first / 3) * seconds, 'refused attempts come again, and are refused again')
    t.equal(givenUp, 0)
    t.ok(refused.perFailover > (first / 3) * seconds)
    const small = simulateDay({ masters: 3, first: 1_000_000, replays: 0 })
    t.ok(small.refused.share > 0.9, 'a cluster that is too small refuses what it cannot serve')
  },
)

void t.test('Redis needs the memory that the plan says', async (t) => {
  const { found, planned } = await memoryOf(20_000)
  t.ok(Math.abs(found / planned - 1) < 0.1, `${found} bytes found, ${planned} planned`)
})

void t.test('bad options: one line says what was found and what is allowed', async (t) => {
  for (const [args, line] of [
    [['--first', 'many'], '--first: found "many"; allowed: a rate per second of 0 to 100,000,000\n'],
    [
      ['--ttl', '5'],
      '--ttl: found 5; allowed: a duration of 1ms to 3650d, as a whole number with ms, s, m, h, d\n',
    ],
    [['--store', 'etcd'], '--store: found "etcd"; allowed: redis, postgres, sqlite\n'],
    [['--day', '--masters', '96,2'], '--masters: found "2"; allowed: whole numbers of 3 to 256\n'],
  ] as const) {
    const { status, stderr } = spawnSync(process.execPath, [RUN, ...args], { encoding: 'utf8' })
    t.match({ status, stderr }, { status: 2, stderr: line }, args.join(' '))
  }
})
