import assert from 'node:assert/strict'
import t from 'tap'
import type { State } from '../../src/core/record.ts'
import { PREFIX, readStamps, stamp } from '../../src/store/codec.ts'
import { keptOf } from '../../src/store/copying.ts'
import {
  follows,
  followsInMirror,
  freed,
  given,
  isDone,
  renewedBy,
} from '../../src/store/migrating-records.ts'
import { bytesOf, newToken } from './fixtures.ts'

const NOW = 1_795_000_000_000
const [A, B] = [newToken(), newToken()]

interface Over {
  readonly fence?: number
  readonly createdAt?: number
  readonly due?: number
  readonly dropAt?: number
  readonly leaseExpired?: boolean
}

function recordOf(state: State, token: Buffer, over: Over = {}): Buffer {
  const { leaseExpired = false, ...stamps } = over
  const bytes = bytesOf(state, token, state === 'unknown' ? { leaseExpired } : {})
  stamp(bytes, {
    version: 5,
    fence: 1,
    createdAt: 1,
    updatedAt: NOW,
    due: NOW,
    dropAt: NOW + 9000,
    ...stamps,
  })
  return bytes
}

function kept(state: State, token: Buffer, over: Over = {}) {
  return keptOf(recordOf(state, token, over)) ?? assert.fail()
}

void t.test('the lead’s record follows the other store’s', async (t) => {
  for (const [what, ours, theirs, does] of [
    ['an earlier state of the same attempt', kept('completed', A), kept('in_progress', A), true],
    ['even a later state of the same attempt', kept('in_progress', A), kept('unknown', A), true],
    ['but not its answer', kept('in_progress', A), kept('completed', A), false],
    ['nor what is left of that', kept('unknown', A), kept('expired', A), false],
    ['one that holds no key', kept('in_progress', A), kept('failed_retryable', B), true],
    [
      'not one that holds the key for another attempt',
      kept('failed_retryable', A),
      kept('unknown', B),
      false,
    ],
    ['not the answer to another attempt', kept('completed', A), kept('completed', B), false],
  ] as const)
    t.equal(follows(ours, theirs), does, what)
})

void t.test('in a mirror, a later attempt follows an earlier one that holds the key', async (t) => {
  const [first, second] = [kept('in_progress', A), kept('in_progress', B, { fence: 2 })]
  t.equal(follows(second, first), false)
  t.equal(followsInMirror(second, first), true)
  t.equal(followsInMirror(first, second), false)
  t.equal(followsInMirror(kept('in_progress', A), kept('unknown', A)), true, 'and the same one any state')
})

void t.test('only an answer is final, and what is left of it', async (t) => {
  for (const [state, is] of [
    ['in_progress', false],
    ['failed_retryable', false],
    ['unknown', false],
    ['completed', true],
    ['expired', true],
  ] as const)
    t.equal(isDone(kept(state, A)), is, state)
})

void t.test('the other store gets the time that is left', async (t) => {
  const bytes = recordOf('unknown', A, { due: NOW + 100, dropAt: NOW + 9000 })
  t.same(given(bytes, NOW + 30).spans, { dueIn: 70, dropIn: 8970 })
})

void t.test('a claim that is withdrawn belongs to nobody', async (t) => {
  const claim = recordOf('in_progress', A)
  const tokens = [1, 2].map(() => {
    const { state, token } = keptOf(freed(claim)) ?? assert.fail()
    t.equal(state, 'failed_retryable')
    return token.toString('hex')
  })
  t.equal(new Set([A.toString('hex'), ...tokens]).size, 3)
  t.equal(keptOf(claim)?.state, 'in_progress', 'the claim itself is left as it is')
})

void t.test('an owner that renews its lease in the other store alone is not silent', async (t) => {
  /** An hour behind. */
  const there = NOW - 3_600_000
  const lapsed = recordOf('in_progress', A, { due: NOW })
  const fellSilent = recordOf('unknown', A, { leaseExpired: true })
  const lease = (left: number) => recordOf('in_progress', A, { due: there + left })
  const renewed = (theirs: Buffer | null, own: Buffer | null) =>
    renewedBy({ bytes: theirs, now: there }, { bytes: own, now: NOW })
  for (const own of [lapsed, fellSilent]) {
    const before = Buffer.from(own)
    const read = renewed(lease(500), own) ?? assert.fail()
    t.equal(read[PREFIX.state], lapsed[PREFIX.state])
    t.match(readStamps(read), { due: NOW + 500, version: 5, dropAt: NOW + 9000 }, 'nothing is written')
    t.ok(own.equals(before))
  }
  t.match(readStamps(renewed(lease(1), lapsed) ?? assert.fail()), { due: NOW + 1 })
  for (const [what, theirs, own] of [
    ['its lease has ended there, too', lease(0), lapsed],
    ['its lease has not ended here', lease(500), recordOf('in_progress', A, { due: NOW + 1 })],
    ['another attempt has the lease', recordOf('in_progress', B, { due: NOW }), lapsed],
    ['it said itself that the outcome is unknown', lease(500), recordOf('unknown', A)],
    ['it is known to have done nothing', lease(500), recordOf('failed_retryable', A)],
    ['there is no lease', recordOf('unknown', A, { due: NOW }), lapsed],
    ['there is no record', null, lapsed],
    ['there is no record here', lease(500), null],
  ] as const)
    t.equal(renewed(theirs, own), null, what)
})
