import t from 'tap'
import { decide, type RequestDigests, retryAfterSeconds } from '../../src/core/decide.ts'
import { shortId } from '../../src/core/identity.ts'
import {
  type IdempotencyRecord,
  type Millis,
  NOT_KEPT,
  type RecordId,
  readAt,
  UNRESOLVED,
} from '../../src/core/record.ts'
import {
  bytes,
  COMMON,
  completed,
  expired,
  FIRST,
  failedRetryable,
  inProgress,
  OTHER,
  RESULT,
  unknown,
} from './fixtures.ts'

const NOW: Millis = 3000
/** Fixtures: lease, next look and retention end at 5000, dropped at 9000. */
const BEFORE: Millis = 4999
const AT: Millis = 5000
const LATER: Millis = 8999
const DROPPED: Millis = 9000

const same: RequestDigests = {
  recipe: 'recipe',
  rawDigest: COMMON.rawDigest,
  fingerprint: FIRST,
  rawDigestUnder: () => COMMON.rawDigest,
}
/** Other bytes. */
const changed: RequestDigests = { ...same, rawDigest: bytes(8), rawDigestUnder: () => bytes(8) }

/** Requests that share more or less with the record. `same`: whether contract §5 calls it the same operation. */
// biome-ignore format: a table
const ASKED: readonly (readonly [what: string, asked: RequestDigests, same: boolean])[] = [
  ['the same request', same, true],
  ['another spelling: same fingerprint', changed, true],
  ['another request', { ...changed, fingerprint: OTHER }, false],
  ['another recipe, unchanged request', { ...same, fingerprint: OTHER, recipe: 'other' }, true],
  ['another recipe, another request', { ...changed, fingerprint: OTHER, recipe: 'other' }, false],
  ['an earlier recipe of the same settings, another spelling',
    { ...changed, fingerprint: OTHER, recipe: 'other', fingerprintUnder: () => FIRST }, true],
  ['an earlier recipe of the same settings, another request',
    { ...changed, recipe: 'other', fingerprintUnder: () => OTHER }, false],
  ['an earlier recipe of other settings', { ...changed, recipe: 'other', fingerprintUnder: () => null }, false],
  ['another recipe, fingerprints equal by chance', { ...changed, recipe: 'other' }, false],
]

/** For the same operation, by time; `retry` where `onLeaseExpired: retry` differs. */
type Cases = readonly (readonly [now: Millis, expected: object, retry?: object])[]

const gone = { kind: 'gone' }
const lapsed = (checkIn: Millis): object => ({ kind: 'unknown', checkIn })
const replay = (now: Millis): object => ({
  kind: 'replay',
  result: RESULT,
  createdAt: 1000,
  expiresAt: 5000,
  now,
})
const running = inProgress()
const failed = failedRetryable()
const silent = unknown({ leaseExpired: true })

const taken = (from: IdempotencyRecord, read: string) => ({ kind: 'take_over', from, read })

// biome-ignore format: a table
const TABLE: readonly (readonly [what: string, record: IdempotencyRecord, cases: Cases])[] = [
  ['in_progress', running, [
    [NOW, { kind: 'in_progress', fence: 7, leaseLeft: 2000, age: 1000 }],
    [BEFORE, { kind: 'in_progress', fence: 7, leaseLeft: 1, age: 2999 }],
    [AT, lapsed(0), taken(running, 'unknown')],
    [LATER, lapsed(3999), taken(running, 'unknown')],
    [DROPPED, gone],
  ]],
  ['completed, with a tombstone', completed(), [
    [NOW, replay(NOW)],
    [BEFORE, replay(BEFORE)],
    [AT, { kind: 'expired' }],
    [LATER, { kind: 'expired' }],
    [DROPPED, gone],
  ]],
  ['completed, without a tombstone', completed({ dropAt: AT }), [[BEFORE, replay(BEFORE)], [AT, gone]]],
  ['failed_retryable', failed, [
    [NOW, taken(failed, 'failed_retryable')],
    [LATER, taken(failed, 'failed_retryable')],
    [DROPPED, gone],
  ]],
  ['unknown by its outcome', unknown({ status: 502 }), [
    [NOW, lapsed(2000)],
    [AT, lapsed(0)],
    [LATER, lapsed(3999)],
    [DROPPED, gone],
  ]],
  ['unknown by a lapsed lease, as stored', silent, [
    [NOW, lapsed(2000), taken(silent, 'unknown')],
    [LATER, lapsed(3999), taken(silent, 'unknown')],
    [DROPPED, gone],
  ]],
  ['expired', expired(), [[NOW, { kind: 'expired' }], [LATER, { kind: 'expired' }], [DROPPED, gone]]],
  ['in_progress, with a lease beyond its end', inProgress({ leaseUntil: 20_000 }), [[DROPPED, gone]]],
]

for (const [what, record, cases] of TABLE) {
  t.test(`F02 F20 T01 T03 time and fingerprint decide what a record that is ${what} gives`, async (t) => {
    for (const [now, expected, retry = expected] of cases) {
      for (const [who, asked, same] of ASKED) {
        // Misuse beats in-progress, unknown and the tombstone (§6); a record that is gone is compared with nothing.
        const read = readAt(record, now)?.state
        const reused = {
          kind: 'reused',
          read,
          differing: record.recipe === asked.recipe ? ['body'] : null,
          byBytes: false,
        }
        const misuse = same || expected === gone ? null : reused
        t.same(
          decide(record, asked, { onLeaseExpired: 'unknown' }, now),
          misuse ?? expected,
          `${who} at ${now}`,
        )
        t.same(
          decide(record, asked, { onLeaseExpired: 'retry' }, now),
          misuse ?? retry,
          `${who} at ${now}, retry`,
        )
      }
    }
  })
}

t.test('no fingerprint is computed for the same bytes', async (t) => {
  const asked: RequestDigests = {
    ...same,
    get fingerprint(): never {
      throw new Error('was read')
    },
  }
  t.match(decide(completed(), asked, { onLeaseExpired: 'unknown' }, NOW), { kind: 'replay' })
  t.throws(() => decide(completed({ rawDigest: bytes(8) }), asked, { onLeaseExpired: 'unknown' }, NOW))
})

t.test('the whole fingerprint is compared', async (t) => {
  for (const at of [0, 15, 31]) {
    const fingerprint = Buffer.from(FIRST) as typeof FIRST
    fingerprint[at] = 99
    t.same(
      decide(running, { ...changed, fingerprint }, { onLeaseExpired: 'unknown' }, NOW),
      { kind: 'reused', read: 'in_progress', differing: ['body'], byBytes: false },
      `byte ${at}`,
    )
  }
})

t.test('Retry-After is whole seconds, rounded down, at least 1', async (t) => {
  for (const [remaining, seconds] of [
    [30_000, 30],
    [29_999, 29],
    [2000, 2],
    [1999, 1],
    [1000, 1],
    [999, 1],
    [1, 1],
    [0, 1],
    [-5000, 1],
  ] as const)
    t.equal(retryAfterSeconds(remaining), seconds, `${remaining} ms`)
})

void t.test('V08 a clock that jumps back makes no wait longer', (t) => {
  const day = 86_400_000
  const running = inProgress()
  const waiting = unknown()
  t.match(decide(running, same, { onLeaseExpired: 'unknown' }, running.updatedAt - day), {
    kind: 'in_progress',
    age: 0,
  })
  t.match(decide(waiting, same, { onLeaseExpired: 'unknown' }, waiting.updatedAt - day), {
    kind: 'unknown',
    checkIn: waiting.nextLookAt - waiting.updatedAt,
  })
  t.end()
})

t.test('once the next look is overdue, a client waits as long again, up to 5 min', async (t) => {
  const waiting = unknown({ nextLookAt: 10_000, dropAt: 86_400_000 })
  for (const [late, checkIn] of [
    [0, 0],
    [1, 1],
    [299_999, 299_999],
    [300_000, 300_000],
    [300_001, 300_000],
    [3_600_000, 300_000],
  ] as const)
    t.match(decide(waiting, same, { onLeaseExpired: 'unknown' }, 10_000 + late), {
      kind: 'unknown',
      checkIn,
    })
})

// In the fixtures the lease, the next look and the retention end at 5000, and the record is dropped at 9000.

t.test('a lapsed lease reads as unknown, at once', async (t) => {
  const record = inProgress()
  t.equal(readAt(record, 4999), record)
  for (const now of [5000, 5001, 8999]) {
    const { leaseUntil, ...common } = record
    t.same(readAt(record, now), {
      ...common,
      state: 'unknown',
      nextLookAt: leaseUntil,
      leaseExpired: true,
      status: null,
      reconciliation: {
        since: leaseUntil,
        asked: 0,
        notFound: 0,
        deadLettered: false,
        reported: false,
        answer: null,
      },
    })
  }
  t.equal(record.state, 'in_progress', 'reading writes nothing')
})

t.test('T01 a completed record reads as expired once its retention ends', async (t) => {
  const record = completed()
  t.equal(readAt(record, 4999), record)
  for (const now of [5000, 8999])
    t.match(readAt(record, now), { state: 'expired', fingerprint: record.fingerprint, version: 3 })
  t.notOk(Object.hasOwn(readAt(record, 5000) as object, 'result'), 'nothing of the response is left')
})

t.test('T01 a response ends at its ttl.body, before its record', async (t) => {
  const headers = ['Location', '/v1/payments/1', 'location', '/second']
  const response = { status: 201, reason: 'Created', headers, body: Buffer.from('ok'), trailers: [] }
  const record = completed({ result: { kept: true, response, afterBody: 1000 } })
  t.equal(readAt(record, 3999), record)
  for (const now of [4000, 4999])
    t.strictSame(readAt(record, now), {
      ...record,
      result: { kept: false, why: 'past_ttl', status: 201, location: '/v1/payments/1' },
    })
  t.match(readAt(record, 5000), { state: 'expired' })
  t.equal(readAt(record, 9000), null)
  t.equal(readAt(record, 3999), record, 'a clock that goes back finds it again')
})

t.test('logs show the first 12 characters of an id', async (t) => {
  t.equal(shortId('abcdefghijklmnopqrstuvwxyz'.repeat(2).slice(0, 43) as RecordId), 'abcdefghijkl')
})

t.test('states and reasons keep their order, by which stored records number them', async (t) => {
  t.strictSame(NOT_KEPT, ['too_large', 'streamed', 'outcome_only', 'no_room', 'past_ttl'])
  t.strictSame(UNRESOLVED, ['in_progress', 'unknown'], 'those whose outcome is still to come')
})
