import t from 'tap'
import { reclaimed, splitDraft } from '../../src/core/copies.ts'
import { type IdempotencyRecord, type RecordDraft, STATES, type State } from '../../src/core/record.ts'
import { NOBODY, remainingSpans } from '../../src/core/settle.ts'
import { draft } from '../store/fixtures.ts'

const OWN = Buffer.alloc(16, 1)
const OTHER = Buffer.alloc(16, 2)
const BORN = 1000
const FENCE = 1005

/** What this process wrote: its second attempt at a record. */
const own = (state: State): RecordDraft => draft(state, OWN, { fence: FENCE, createdAt: BORN })

function found(state: State, token: Buffer, fence: number, createdAt = BORN): IdempotencyRecord {
  const times = {
    version: 1,
    updatedAt: 1,
    dropAt: 9000,
    leaseUntil: 3000,
    expiresAt: 8000,
    nextLookAt: 4000,
  }
  return { ...draft(state, token, { fence, createdAt }), ...times }
}

void t.test(
  'W01 a process keeps its own record, and restores it where the store went back to an earlier state',
  async (t) => {
    const before: Partial<Record<State, readonly State[]>> = {
      completed: ['in_progress', 'failed_retryable', 'unknown'],
      failed_retryable: ['in_progress'],
      unknown: ['in_progress'],
    }
    for (const mine of STATES)
      for (const state of STATES)
        t.equal(
          reclaimed(found(state, OWN, FENCE), own(mine)),
          (before[mine] ?? (mine === 'expired' ? ['in_progress'] : [])).includes(state) ? 'replace' : 'keep',
          `${mine} over ${state}`,
        )
  },
)

void t.test(
  'W02 an earlier attempt, to which a failover went back, is replaced unless it is final',
  async (t) => {
    for (const mine of ['in_progress', 'completed', 'unknown'] as const) {
      for (const state of ['in_progress', 'failed_retryable', 'unknown'] as const)
        t.equal(reclaimed(found(state, OTHER, FENCE - 1), own(mine)), 'replace')
      for (const state of ['completed', 'expired'] as const)
        t.equal(
          reclaimed(found(state, OTHER, FENCE - 1), own(mine)),
          'split',
          'no attempt follows a final state',
        )
    }
  },
)

void t.test('W04 another claim is a split, whatever its fence', async (t) => {
  for (const mine of ['in_progress', 'completed', 'unknown'] as const)
    for (const state of ['in_progress', 'completed', 'unknown', 'expired'] as const)
      for (const fence of [FENCE - 1, FENCE, FENCE + 1])
        t.equal(reclaimed(found(state, OTHER, fence, BORN + 1), own(mine)), 'split')
  t.equal(reclaimed(found('in_progress', OTHER, FENCE), own('in_progress')), 'split')
  t.equal(reclaimed(found('in_progress', OTHER, FENCE + 1), own('completed')), 'split')
  t.equal(
    reclaimed(found('in_progress', OTHER, FENCE), own('unknown')),
    'split',
    'claimed from the same state',
  )
})

void t.test('W04 another claim that came to nothing is replaced', async (t) => {
  t.equal(reclaimed(found('failed_retryable', OTHER, FENCE + 9, BORN + 9), own('in_progress')), 'replace')
  t.equal(reclaimed(found('failed_retryable', OTHER, FENCE + 9, BORN + 9), own('completed')), 'replace')
})

void t.test('a record that others were free to claim is kept', async (t) => {
  for (const state of STATES)
    for (const mine of ['failed_retryable', 'expired'] as const)
      t.equal(reclaimed(found(state, OTHER, FENCE + 1), own(mine)), 'keep', `${state} after ${mine}`)
  t.equal(reclaimed(found('completed', NOBODY, FENCE), own('unknown')), 'keep', 'a decision by an operator')
  t.equal(reclaimed(found('in_progress', OTHER, FENCE + 1), own('unknown')), 'keep', 'and a retry after it')
})

void t.test('W04 a split becomes an unknown record that nobody owns, under the higher fence', async (t) => {
  for (const [fence, higher] of [
    [FENCE - 5, FENCE],
    [FENCE + 5, FENCE + 5],
  ] as const)
    t.match(splitDraft(found('in_progress', OTHER, fence, BORN + 1), own('in_progress')), {
      state: 'unknown',
      fence: higher,
      token: NOBODY,
      createdAt: BORN + 1,
      leaseExpired: false,
      lastError: new RegExp(`fences ${FENCE} and ${fence}`),
    })
  for (const state of ['completed', 'expired'] as const)
    t.equal(splitDraft(found(state, OTHER, FENCE), own('completed')), null)
})

void t.test('a record written back unchanged keeps its due times', async (t) => {
  const due = { in_progress: 3000, unknown: 4000, completed: 8000, failed_retryable: 9000, expired: 9000 }
  for (const state of STATES)
    t.same(remainingSpans(found(state, OWN, FENCE), 1000), { dueIn: due[state] - 1000, dropIn: 8000 })
})

void t.test('W04 a split is found once, whichever owner finds it', async (t) => {
  const other = found('in_progress', OTHER, FENCE + 1, BORN + 1)
  const split = splitDraft(other, own('in_progress'))
  const met = found('unknown', split?.token as Buffer, split?.fence as number, split?.createdAt)
  t.equal(reclaimed(other, own('in_progress')), 'split')
  for (const mine of STATES) t.equal(reclaimed(met, own(mine)), 'keep')
})
