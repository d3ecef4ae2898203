import t from 'tap'
import type { ReconcilePolicy } from '../../src/core/policy.ts'
import {
  claimedAt,
  nextStep,
  pauseAfter,
  pauseWithoutQuery,
  reportAt,
  type StatusQueryResult,
  waitsOf,
} from '../../src/core/reconcile/schedule.ts'
import { newReconciliation, type Reconciliation } from '../../src/core/record.ts'
import { RESULT, unknown } from './fixtures.ts'

const HOUR = 3_600_000
const DAY = 24 * HOUR
const CLAIMED = 1_000_000
const SINCE = CLAIMED + 60_000

const POLICY: ReconcilePolicy = {
  request: { method: 'GET', path: '/', headers: [] },
  identity: [],
  completed: [],
  notFound: { status: 404, when: [] },
  pending: null,
  after: 60_000,
  every: 5_000,
  attempts: 20,
}
const known = (more: Partial<Reconciliation> = {}): Reconciliation => ({
  ...newReconciliation(SINCE),
  ...more,
})
const step = (
  heard: StatusQueryResult,
  before = known(),
  askedAt = SINCE,
  policy = POLICY,
  spellings: 1 | 2 = 1,
) => nextStep(policy, before, { first: CLAIMED + policy.after - askedAt, next: 0 }, heard, spellings)

const NOT_FOUND: StatusQueryResult = { kind: 'not_found' }
const PENDING: StatusQueryResult = { kind: 'pending', why: 'status 202' }

void t.test(
  'status queries back off from `every`, doubling up to an hour, or stay at `every` if it is longer',
  async (t) => {
    t.same(
      [0, 1, 2, 3, 9, 10, 11, 19, 1000].map((asked) => pauseAfter(asked, POLICY)),
      [5_000, 10_000, 20_000, 40_000, 2_560_000, HOUR, HOUR, HOUR, HOUR],
    )
    t.same(
      [0, 1, 5].map((asked) => pauseAfter(asked, { every: 2 * HOUR })),
      [2 * HOUR, 2 * HOUR, 2 * HOUR],
    )
  },
)

void t.test('without status queries, looks come further and further apart, up to an hour', async (t) => {
  t.same([-5, 0, 5_000, 60_000, HOUR, 30 * DAY].map(pauseWithoutQuery), [
    5_000,
    5_000,
    5_000,
    60_000,
    HOUR,
    HOUR,
  ])
})

void t.test(
  'a record is reported a day before it is dropped, or a tenth of its life if that is less',
  async (t) => {
    t.equal(reportAt(100 * DAY, 30 * DAY), 99 * DAY)
    t.equal(reportAt(100 * DAY, 5 * DAY), 99.5 * DAY)
    t.equal(reportAt(100 * DAY, Number.POSITIVE_INFINITY), 99 * DAY)
    t.equal(reportAt(100, 19), 99, 'in whole milliseconds')
  },
)

void t.test(
  '`after` counts from the claim, and for a later attempt from when it became unknown',
  async (t) => {
    const first = unknown({ fence: CLAIMED, createdAt: CLAIMED })
    t.equal(claimedAt(first, known()), CLAIMED)
    t.equal(claimedAt({ ...first, fence: CLAIMED + 1, attempts: 2 }, known()), SINCE)
  },
)

void t.test('O02 a completed answer resolves the record, whenever it comes', async (t) => {
  const heard: StatusQueryResult = { kind: 'completed', result: RESULT }
  for (const before of [known(), known({ asked: 19, notFound: 1 })])
    for (const at of [CLAIMED, SINCE])
      t.same(step(heard, before, at), { kind: 'resolved', resolution: heard })
})

void t.test(
  'O03 "not found" resolves the record only twice in a row, and never before `after`',
  async (t) => {
    t.match(step(NOT_FOUND), {
      kind: 'unknown',
      result: 'pending',
      reconciliation: { asked: 1, notFound: 1, answer: 'not found' },
      pause: 5_000,
    })
    t.match(step(NOT_FOUND, known({ asked: 1, notFound: 1 })), {
      kind: 'resolved',
      resolution: { kind: 'not_executed', reason: 'the upstream does not know of it' },
    })
    for (const notFound of [0, 1])
      t.match(step(NOT_FOUND, known({ notFound }), CLAIMED + 59_999), {
        kind: 'unknown',
        result: 'pending',
        reconciliation: { notFound: 0, answer: 'not found, too early to count' },
        pause: 1,
      })
    t.match(step(NOT_FOUND, known({ notFound: 1 }), CLAIMED + 60_000), { kind: 'resolved' })
    t.match(
      step(NOT_FOUND, known(), CLAIMED),
      { pause: 10_000 },
      'the usual pause while `after` is still far off',
    )
  },
)

void t.test('any other answer restarts the count of "not found"', async (t) => {
  const others: [StatusQueryResult, string][] = [
    [PENDING, 'pending'],
    [{ kind: 'mismatch', why: 'another' }, 'failed'],
    [{ kind: 'unusable', why: 'status 500' }, 'failed'],
  ]
  for (const [heard, result] of others)
    t.match(step(heard, known({ asked: 3, notFound: 1 })), {
      kind: 'unknown',
      result,
      reconciliation: { asked: 4, notFound: 0, answer: (heard as { why: string }).why, deadLettered: false },
      pause: 80_000,
    })
})

void t.test('a status query that was not sent is not counted', async (t) => {
  const before = known({ asked: 19, notFound: 1, answer: 'not found' })
  t.same(step({ kind: 'not_sent', why: 'refused' }, before), {
    kind: 'unknown',
    result: 'failed',
    reconciliation: { ...before, answer: 'refused' },
    pause: HOUR,
  })
})

void t.test('a record is dead-lettered after `attempts` status queries without a final answer', async (t) => {
  for (const heard of [PENDING, NOT_FOUND, { kind: 'unusable', why: 'x' } as const]) {
    t.match(step(heard, known({ asked: 18 })), { result: heard.kind === 'unusable' ? 'failed' : 'pending' })
    t.match(step(heard, known({ asked: 19, reported: true })), {
      kind: 'unknown',
      result: 'dead_lettered',
      reconciliation: { since: SINCE, asked: 20, deadLettered: true, reported: true },
      pause: HOUR,
    })
  }
})

void t.test('the last two status queries are saved until "not found" counts', async (t) => {
  const policy = { ...POLICY, after: HOUR, attempts: 4 }
  const pauses = [0, 1, 2].map((asked) => {
    const next = step(PENDING, known({ asked }), CLAIMED + 1000, policy)
    return next.kind === 'unknown' ? next.pause : null
  })
  t.same(pauses, [10_000, HOUR - 1000, HOUR - 1000])
  const without = step(PENDING, known({ asked: 2 }), CLAIMED + 1000, { ...policy, notFound: null })
  t.match(without, { pause: 40_000 })
})

void t.test('a key asked about in two spellings needs "not found" twice for each', async (t) => {
  const late = CLAIMED + POLICY.after
  for (const [before, kind] of [
    [1, 'unknown'],
    [2, 'unknown'],
    [3, 'resolved'],
  ] as const)
    t.equal(
      step(NOT_FOUND, known({ asked: 9, notFound: before }), late, POLICY, 2).kind,
      kind,
      String(before),
    )
})

void t.test(
  'V08 "not found" waits for the store’s clock and for time that has certainly passed',
  async (t) => {
    const lease = 30_000
    const record = unknown({ fence: CLAIMED, createdAt: CLAIMED, updatedAt: SINCE })
    /** `passed`: milliseconds that have certainly passed since an instant. */
    const waits = (
      askedAt: number,
      passed: Readonly<Record<number, number>>,
      leaseExpired = false,
      after = 60_000,
      own: { lease?: number } = {},
    ) =>
      waitsOf(
        { after, every: 5000 },
        lease,
        { ...record, ...own, leaseExpired },
        known(),
        askedAt,
        (at) => passed[at] ?? 0,
      )
    t.equal(waits(CLAIMED + 10_000, { [CLAIMED]: 60_000 }).first, 50_000, 'by the store’s clock')
    t.equal(waits(CLAIMED + DAY, { [CLAIMED]: 10_000 }).first, 49_000, 'by the other clock, good to a second')
    const arrived = { [SINCE]: 7500 }
    t.equal(waits(CLAIMED + 60_000, { [CLAIMED]: 59_900, ...arrived }).first, 0)
    t.equal(
      waits(CLAIMED + 60_000, { [CLAIMED]: 60_000, [SINCE]: 500 }).first,
      7000,
      'a request that was sent last may be on its way for a quarter of a lease',
    )
    t.equal(
      waits(CLAIMED + DAY, { [CLAIMED]: DAY }, false, 3000).first,
      750,
      'or of `after`, if that is shorter',
    )
    const renewed = SINCE - lease
    const short = { [CLAIMED]: 5000, [renewed]: 5000 }
    t.equal(
      waits(CLAIMED + DAY, short, true, 3000).first,
      25_000,
      'a whole lease of silence must have passed too',
    )
    t.ok(
      waits(CLAIMED + DAY, { ...short, ...arrived }, false, 3000).first <= 0,
      'only if silence is the reason',
    )
    const longer = { [CLAIMED]: 5000, [SINCE - 40_000]: 5000 }
    t.equal(
      waits(CLAIMED + DAY, longer, true, 3000, { lease: 40_000 }).first,
      35_000,
      'the lease of the record',
    )
    t.equal(waits(CLAIMED + DAY, short, true, 3000, { lease: 20_000 }).first, 25_000, 'only if it is longer')
    t.equal(waits(CLAIMED, {}).next, 2500)
    t.equal(waits(CLAIMED, { [SINCE]: 5000 }).next, -2500)
  },
)

void t.test('V08 a "not found" too soon after the one before does not count again', async (t) => {
  const soon = { first: 0, next: 1 }
  t.match(nextStep(POLICY, known({ asked: 3, notFound: 1 }), soon, NOT_FOUND, 1), {
    kind: 'unknown',
    result: 'pending',
    pause: POLICY.every,
    reconciliation: { asked: 4, notFound: 1, answer: 'not found, too soon after the one before' },
  })
  t.match(nextStep(POLICY, known({ asked: 3 }), soon, NOT_FOUND, 1), { reconciliation: { notFound: 1 } })
  t.match(nextStep(POLICY, known({ notFound: 1 }), { first: 0, next: 0 }, NOT_FOUND, 1), { kind: 'resolved' })
})
