import t from 'tap'
import type { ReconcilePolicy } from '../../src/core/policy.ts'
import type { AnswerMeaning } from '../../src/core/reconcile/answer.ts'
import {
  claimedAt,
  nextStep,
  pauseAfter,
  pauseWithoutQuery,
  reportAt,
  type StatusQueryResult,
  waitsOf,
} from '../../src/core/reconcile/schedule.ts'
import { isKnownUpstream, proofOf, type Verification, verifyStored } from '../../src/core/reconcile/verify.ts'
import {
  type Completed,
  type CompletedResponse,
  type IdempotencyRecord,
  newReconciliation,
  type Reconciliation,
} from '../../src/core/record.ts'
import { resolvedDraft } from '../../src/core/settle.ts'
import { draft, newToken } from '../store/fixtures.ts'
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
  queriedAt = SINCE,
  policy = POLICY,
  spellings: 1 | 2 = 1,
) => nextStep(policy, before, { first: CLAIMED + policy.after - queriedAt, next: 0 }, heard, spellings)

const NOT_FOUND: StatusQueryResult = { kind: 'not_found' }
const PENDING: StatusQueryResult = { kind: 'pending', why: 'status 202' }

t.test('status queries back off from `every`, doubling up to an hour or to `every`', async (t) => {
  t.same(
    [0, 1, 2, 3, 9, 10, 11, 19, 1000].map((asked) => pauseAfter(asked, POLICY)),
    [5_000, 10_000, 20_000, 40_000, 2_560_000, HOUR, HOUR, HOUR, HOUR],
  )
  t.same(
    [0, 1, 5].map((asked) => pauseAfter(asked, { every: 2 * HOUR })),
    [2 * HOUR, 2 * HOUR, 2 * HOUR],
  )
})

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

t.test('a record is reported a day, or a tenth of its life, before it is dropped', async (t) => {
  t.equal(reportAt(100 * DAY, 30 * DAY), 99 * DAY)
  t.equal(reportAt(100 * DAY, 5 * DAY), 99.5 * DAY)
  t.equal(reportAt(100 * DAY, Number.POSITIVE_INFINITY), 99 * DAY)
  t.equal(reportAt(100, 19), 99, 'in whole milliseconds')
})

t.test('`after` counts from the claim; for a later attempt, from its end as unknown', async (t) => {
  const first = unknown({ fence: CLAIMED, createdAt: CLAIMED })
  t.equal(claimedAt(first, known()), CLAIMED)
  t.equal(claimedAt({ ...first, fence: CLAIMED + 1, attempts: 2 }, known()), SINCE)
})

void t.test('O02 a completed answer resolves the record, whenever it comes', async (t) => {
  const heard: StatusQueryResult = { kind: 'completed', result: RESULT }
  for (const before of [known(), known({ asked: 19, notFound: 1 })])
    for (const at of [CLAIMED, SINCE])
      t.same(step(heard, before, at), { kind: 'resolved', resolution: heard })
})

t.test('O03 "not found" resolves only twice in a row, and never before `after`', async (t) => {
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
})

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

t.test('V08 "not found" waits for the store’s clock and for time that has passed', async (t) => {
  const lease = 30_000
  const record = unknown({ fence: CLAIMED, createdAt: CLAIMED, updatedAt: SINCE })
  /** `passed`: milliseconds that have certainly passed since an instant. */
  const waits = (
    queriedAt: number,
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
      queriedAt,
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
})

void t.test('V08 a "not found" too soon after the one before does not count again', async (t) => {
  const soon = { first: 0, next: 1 }
  t.match(nextStep(POLICY, known({ asked: 3, notFound: 1 }), soon, NOT_FOUND, 1), {
    kind: 'unknown',
    result: 'pending',
    pause: POLICY.every,
    reconciliation: { asked: 4, notFound: 1, answer: 'not found, too soon after the previous answer' },
  })
  t.match(nextStep(POLICY, known({ asked: 3 }), soon, NOT_FOUND, 1), { reconciliation: { notFound: 1 } })
  t.match(nextStep(POLICY, known({ notFound: 1 }), { first: 0, next: 0 }, NOT_FOUND, 1), { kind: 'resolved' })
})

function answer(status: number, text: string, ...headers: string[]): CompletedResponse {
  const lines = ['Content-Type', 'application/json', ...headers]
  return {
    kept: true,
    response: { status, reason: '', headers: lines, body: Buffer.from(text), trailers: [] },
  }
}

const NOT_KEPT: CompletedResponse = { kept: false, why: 'outcome_only', status: 201, location: null }
const completedBy = (result: CompletedResponse): AnswerMeaning => ({ kind: 'completed', result })

const found = (status: number, text: string) => completedBy(answer(status, text))
const DIGITS = '9007199254740993'

// biome-ignore format: a table
const TABLE: readonly (readonly [string, CompletedResponse, AnswerMeaning, Verification['kind'], RegExp?])[] = [
  ['unknown to the upstream', answer(201, '1'), { kind: 'not_found' }, 'disagrees', /does not know/],
  ['another request’s', answer(201, '1'), { kind: 'mismatch', why: '/key is not' }, 'disagrees', /^\/key is not$/],
  ['still pending', answer(201, '1'), { kind: 'pending', why: 'still' }, 'undecided', /^still$/],
  ['no usable answer', answer(201, '1'), { kind: 'unusable', why: 'no answer' }, 'undecided', /^no answer$/],
  ['refused where a success is stored', answer(201, '1'), found(402, '1'), 'disagrees',
    /^status 402 where 201 is stored$/],
  ['done where a refusal is stored', answer(402, '1'), found(200, '1'), 'disagrees',
    /^status 200 where 402 is stored$/],
  ['done where a failure is stored', answer(500, '1'), found(200, '1'), 'disagrees'],
  ['another success with the same value', answer(201, '{"a":1}'), found(200, '{"a":1}'), 'agrees'],
  ['another refusal with the same value', answer(402, '{"a":1}'), found(409, '{"a":1}'), 'agrees'],
  ['the same value in another spelling', answer(201, '{"a":1,"b":[2.0]}'), found(200, '{ "b": [2],\n"a": 1 }'),
    'agrees'],
  ['another value', answer(201, '{"a":1}'), found(200, '{"a":2}'), 'differs', /a different value/],
  ['another last digit', answer(200, DIGITS), found(200, '9007199254740992'), 'differs'],
  ['equal bytes without a canonical form', answer(200, DIGITS), found(200, DIGITS), 'agrees'],
  ['another value without a canonical form', answer(200, DIGITS), found(200, '9007199254740995'), 'differs'],
  ['the stored body is not JSON', answer(201, 'paid'), found(200, '{"a":2}'), 'agrees'],
  ['the stored body is encoded', answer(201, '{"a":1}', 'Content-Encoding', 'gzip'), found(200, '{"a":2}'),
    'agrees'],
  ['stored without a body', NOT_KEPT, found(200, '{"a":2}'), 'agrees'],
  ['found without a body', answer(201, '{"a":2}'), completedBy(NOT_KEPT), 'agrees'],
  ['refused where a success is stored without a body', NOT_KEPT, found(402, '{"a":2}'), 'disagrees'],
]

for (const [name, stored, verdict, kind, why] of TABLE)
  t.test(`O05 the verdict on a stored answer is ${kind}: ${name}`, async (t) => {
    const found = verifyStored(stored, verdict)
    t.equal(found.kind, kind)
    if (why !== undefined) t.match('why' in found ? found.why : '', why)
  })

const ASKED = {
  request: { method: 'GET', path: '/p?k={key}', headers: [] },
  identity: [],
  completed: [],
  notFound: { status: 404, when: [] },
  pending: null,
  after: 1,
  every: 1,
  attempts: 2,
}
const DONE: CompletedResponse = { kept: false, why: 'outcome_only', status: 201, location: null }

t.test('a request found completed proves a status query; one not found refutes it', async (t) => {
  const completed = { kind: 'completed', result: DONE } as const
  const missing = { kind: 'not_found' } as const
  const away = { kind: 'not_sent', why: 'away' } as const
  const broken = { kind: 'unusable', why: 'status 500' } as const
  const pending = { kind: 'pending', why: 'status 202' } as const
  const other = { kind: 'mismatch', why: 'another' } as const
  t.same(proofOf([]), { kind: 'untested' })
  t.same(proofOf([missing, away, completed]), { kind: 'proven' })
  t.same(proofOf([pending, missing, broken]), { kind: 'refuted' })
  t.same(proofOf([pending, away]), { kind: 'unanswered', why: 'away' })
  t.same(proofOf([broken]), { kind: 'unanswered', why: 'status 500' })
  t.same(proofOf([pending, other]), { kind: 'untested' })
})

t.test('the upstream must know a request that it completed under told identifiers', async (t) => {
  const record = (over: Partial<Completed> = {}): IdempotencyRecord => ({
    ...(draft('completed', newToken(), { key: 'k1', received: ['key'], receivedBy: 'here' }) as Omit<
      Completed,
      'version'
    >),
    version: 1,
    createdAt: 1,
    updatedAt: 1,
    expiresAt: 10,
    dropAt: 20,
    result: DONE,
    ...over,
  })
  const known = (one: IdempotencyRecord | null, now = 5): boolean =>
    isKnownUpstream(one, 'create-payment', ASKED, now, 'here')
  t.ok(known(record()))
  t.notOk(known(null))
  t.notOk(known(record(), 10), 'its retention is over')
  t.notOk(known(record({ route: 'other' })))
  t.notOk(known(record({ key: null })))
  t.notOk(known(record({ received: ['record'] })))
  t.notOk(known(record({ receivedBy: 'elsewhere' })), 'another upstream answered it')
  for (const status of [199, 302, 402])
    t.notOk(known(record({ result: { ...DONE, status } })), String(status))
  const { expiresAt: _e, result: _r, ...unknown } = record() as Completed
  const open: IdempotencyRecord = {
    ...unknown,
    state: 'unknown',
    reconciliation: null,
    nextLookAt: 1,
    leaseExpired: false,
    status: null,
  }
  t.notOk(known(open))
  const resolved = resolvedDraft(open, { kind: 'completed', result: DONE })
  t.notOk(known({ ...record(), token: resolved.token }), 'an operator may have resolved it')
  const byRecord = { ...ASKED, request: { ...ASKED.request, path: '/p/{record}' } }
  t.ok(isKnownUpstream(record({ key: null, received: ['record'] }), 'create-payment', byRecord, 5, 'here'))
})
