import t from 'tap'
import { shortId } from '../../src/core/identity.ts'
import { NOT_KEPT, type RecordId, readAt, STATES, UNRESOLVED } from '../../src/core/record.ts'
import { completed, expired, failedRetryable, inProgress, unknown } from './fixtures.ts'

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

t.test('T01 a completed record without a tombstone is gone once its retention ends', async (t) => {
  const record = completed({ dropAt: 5000 })
  t.equal(readAt(record, 4999), record)
  t.equal(readAt(record, 5000), null)
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

t.test('records in the other states read unchanged until they are dropped', async (t) => {
  for (const record of [
    failedRetryable(),
    unknown(),
    unknown({ leaseExpired: true, status: 500 }),
    expired(),
  ]) {
    for (const now of [0, 4999, 5000, 8999]) t.equal(readAt(record, now), record, `${record.state} at ${now}`)
  }
})

t.test('every record is gone from its dropAt on', async (t) => {
  const records = [inProgress(), completed(), failedRetryable(), unknown(), expired()]
  t.same(new Set(records.map(({ state }) => state)), new Set(STATES))
  for (const record of records) {
    for (const now of [9000, 9001]) t.equal(readAt(record, now), null, `${record.state} at ${now}`)
  }
  t.equal(readAt(inProgress({ leaseUntil: 20_000 }), 9000), null, 'even within a lease')
})

t.test('logs show the first 12 characters of an id', async (t) => {
  t.equal(shortId('abcdefghijklmnopqrstuvwxyz'.repeat(2).slice(0, 43) as RecordId), 'abcdefghijkl')
})

t.test('states and reasons keep their order, by which stored records number them', async (t) => {
  t.strictSame(NOT_KEPT, ['too_large', 'streamed', 'outcome_only', 'no_room', 'past_ttl'])
  t.strictSame(UNRESOLVED, ['in_progress', 'unknown'], 'those whose outcome is still to come')
})
