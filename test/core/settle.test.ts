import t from 'tap'
import { withoutResponse } from '../../src/core/outcome.ts'
import type { CompletedResponse, Outcome } from '../../src/core/record.ts'
import {
  ACCEPTING,
  claimDraft,
  claimSpans,
  isFromBefore,
  judgeRefusal,
  outcomeDraft,
  outcomeSpans,
  type Retention,
  statusOf,
} from '../../src/core/settle.ts'
import {
  bytes,
  COMMON,
  completed,
  expired,
  FIRST,
  failedRetryable,
  inProgress,
  RESULT,
  unknown,
} from './fixtures.ts'

const RETENTION: Retention = {
  lease: 30,
  ttl: 1000,
  ttlFailed: 200,
  tombstone: 0,
  unresolvedTtl: 9000,
  reconcile: null,
}
const OPERATION = {
  route: 'r',
  method: 'POST',
  path: '/p',
  fingerprint: FIRST,
  rawDigest: bytes(3),
  recipe: 'recipe',
  key: null,
}
const ATTEMPT = { fence: 7, token: bytes(4, 16), attempts: 2 }

const answered = (status: number): CompletedResponse => ({
  kept: true,
  response: { status, reason: '', headers: [], body: Buffer.alloc(0), trailers: [] },
})
const unkept = (status: number): CompletedResponse => ({
  kept: false,
  why: 'streamed',
  status,
  location: null,
})

const DONE: Outcome = { kind: 'completed', result: RESULT }
const NOT_EXECUTED: Outcome = { kind: 'not_executed', reason: 'refused' }
const UNKNOWN: Outcome = { kind: 'unknown', reason: 'reset', status: 200 }

t.test('a claim is in progress, with the operation and the attempt on it', async (t) => {
  t.same(claimDraft(OPERATION, ATTEMPT), {
    ...OPERATION,
    ...ATTEMPT,
    state: 'in_progress',
    lastError: null,
    createdAt: 0,
  })
})

t.test('a claim is due when its lease ends, and kept for unresolvedTtl', async (t) => {
  t.same(claimSpans(RETENTION), { dueIn: 30, dropIn: 9000 })
})

t.test('an outcome becomes a record that keeps operation, attempt and age', async (t) => {
  const base = { ...OPERATION, ...ATTEMPT, createdAt: 1234 }
  t.same(outcomeDraft(OPERATION, ATTEMPT, DONE, 1234), {
    ...base,
    state: 'completed',
    result: RESULT,
    lastError: null,
  })
  t.same(outcomeDraft(OPERATION, ATTEMPT, NOT_EXECUTED, 1234), {
    ...base,
    state: 'failed_retryable',
    lastError: 'refused',
  })
  t.same(outcomeDraft(OPERATION, ATTEMPT, UNKNOWN, 1234), {
    ...base,
    state: 'unknown',
    leaseExpired: false,
    status: 200,
    reconciliation: null,
    lastError: 'reset',
  })
})

t.test('T02 a stored answer is kept for ttl from completion, ttlFailed if not 2xx', async (t) => {
  for (const result of [answered, unkept]) {
    for (const status of [200, 201, 204, 299])
      t.same(
        outcomeSpans({ kind: 'completed', result: result(status) }, RETENTION),
        { dueIn: 1000, dropIn: 1000 },
        `${status}`,
      )
    for (const status of [199, 300, 304, 400, 402, 422, 500, 599])
      t.same(
        outcomeSpans({ kind: 'completed', result: result(status) }, RETENTION),
        { dueIn: 200, dropIn: 200 },
        `${status}`,
      )
  }
})

t.test('T01 a tombstone follows the retention', async (t) => {
  const retention = { ...RETENTION, tombstone: 50 }
  t.same(outcomeSpans(DONE, retention), { dueIn: 1000, dropIn: 1050 })
  t.same(outcomeSpans({ kind: 'completed', result: answered(400) }, retention), { dueIn: 200, dropIn: 250 })
  t.equal(outcomeSpans(NOT_EXECUTED, retention).dropIn, 1000, 'nothing was done: nothing is remembered of it')
})

t.test(
  'what was not executed is remembered for ttl, so that its key is not used for something else',
  async (t) => {
    t.equal(outcomeSpans(NOT_EXECUTED, RETENTION).dropIn, 1000)
  },
)

t.test('an unresolved record outlives ttl: it is kept for unresolvedTtl', async (t) => {
  t.equal(outcomeSpans(UNKNOWN, RETENTION).dropIn, 9000)
  t.ok(outcomeSpans(UNKNOWN, RETENTION).dueIn > 0)
})

t.test('the status of an answer, kept or not', async (t) => {
  t.equal(statusOf(answered(201)), 201)
  t.equal(statusOf(unkept(303)), 303)
})

t.test('an outcome is accepted in progress, unknown and unclaimed failed_retryable', async (t) => {
  t.same(new Set(ACCEPTING), new Set(['in_progress', 'unknown', 'failed_retryable']))
})

t.test(
  'an outcome goes over the record of an earlier attempt only where it says something of it',
  async (t) => {
    const over = {
      completed: ['in_progress', 'unknown', 'failed_retryable'],
      failed_retryable: ['failed_retryable'],
      unknown: ['failed_retryable'],
    }
    for (const [state, states] of Object.entries(over) as [
      'completed' | 'failed_retryable' | 'unknown',
      string[],
    ][])
      for (const found of [inProgress(), unknown(), failedRetryable(), completed(), expired()]) {
        const { fence, createdAt } = found
        const later = { state, fence: fence + 1, createdAt }
        t.equal(isFromBefore(found, later), states.includes(found.state), `${state} over ${found.state}`)
        t.notOk(isFromBefore(found, { ...later, fence }), 'not an earlier attempt')
        t.notOk(isFromBefore(found, { ...later, createdAt: createdAt - 1 }), 'a record made later')
      }
  },
)

t.test('a refused outcome is a duplicate where this attempt completed the record, else stale', async (t) => {
  const token = Buffer.from(COMMON.token)
  const other = bytes(5, 16)
  const states = ['completed', 'failed_retryable', 'unknown'] as const
  for (const state of states) {
    const judged = judgeRefusal(completed(), { token, state })
    t.equal(judged, state === 'completed' ? 'duplicate' : 'stale', state)
    t.equal(
      judgeRefusal(completed(), { token: other, state }),
      'stale',
      `${state}: a newer attempt, or an operator, completed it`,
    )
    for (const record of [inProgress(), unknown(), failedRetryable(), expired()])
      t.equal(judgeRefusal(record, { token: other, state }), 'stale', `${record.state} ${state}`)
  }
  t.equal(judgeRefusal(expired(), { token, state: 'completed' }), 'stale')
})

void t.test('a resolution without its response: where there is one', async (t) => {
  const response = { status: 201, reason: '', headers: ['location', '/p/1'], body: bytes(5), trailers: [] }
  const less = { kept: false, why: 'no_room', status: 201, location: '/p/1' } as const
  t.same(withoutResponse({ kind: 'completed', result: { kept: true, response } }), {
    kind: 'completed',
    result: less,
  })
  t.equal(withoutResponse({ kind: 'completed', result: less }), null)
  t.equal(withoutResponse({ kind: 'not_executed', reason: 'said so' }), null)
})
