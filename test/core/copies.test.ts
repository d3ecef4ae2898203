import t from 'tap'
import {
  type ComparedRecord,
  isAhead,
  isAheadOfMirror,
  judgeCopy,
  reclaimed,
  splitDraft,
} from '../../src/core/copies.ts'
import { type IdempotencyRecord, type RecordDraft, STATES, type State } from '../../src/core/record.ts'
import { NOBODY, remainingSpans } from '../../src/core/settle.ts'
import { draft } from '../store/fixtures.ts'

const [A, B] = [Buffer.alloc(16, 1), Buffer.alloc(16, 2)]

function kept(state: State, fence = 5, token = A, createdAt = 1): ComparedRecord {
  return { state, fence, token, createdAt }
}

const FINAL: readonly State[] = ['completed', 'expired']

/** Every combination of state, fence, token and life. */
const ALL = STATES.flatMap((state) =>
  [4, 5, 6].flatMap((fence) =>
    [A, B].flatMap((token) => [1, 2].map((life) => kept(state, fence, token, life))),
  ),
)

void t.test('§9 a record free to retry never replaces one that is not', async (t) => {
  for (const ours of ALL.filter(({ state }) => state === 'failed_retryable'))
    for (const there of ALL.filter(({ state }) => state !== 'failed_retryable'))
      t.not(judgeCopy(ours, there), 'replace', `${there.state} ${there.fence}`)
})

void t.test('§9 a completed or expired record in the target is never overwritten', async (t) => {
  for (const ours of ALL)
    for (const there of ALL.filter(({ state }) => FINAL.includes(state)))
      t.not(
        judgeCopy(ours, there),
        'replace',
        `${ours.state} ${ours.fence} over ${there.state} ${there.fence}`,
      )
})

void t.test(
  '§9 a record that was or may have been executed yields to a free one only if that was claimed anew since',
  async (t) => {
    const open = ALL.filter(({ state }) => state === 'failed_retryable')
    for (const ours of ALL.filter(({ state }) => FINAL.includes(state)))
      for (const there of open) t.equal(judgeCopy(ours, there), 'replace', `${ours.state} ${ours.fence}`)
    for (const ours of ALL.filter(({ state }) => state === 'unknown' || state === 'in_progress'))
      for (const there of open)
        if (judgeCopy(ours, there) === 'newer')
          t.ok(there.createdAt === ours.createdAt && there.fence > ours.fence, 'it was claimed anew since')
  },
)

void t.test(
  'a running attempt in the target yields only to an answer of its own or a later attempt',
  async (t) => {
    for (const ours of ALL)
      for (const there of ALL.filter(({ state }) => state === 'in_progress'))
        if (judgeCopy(ours, there) === 'replace') {
          t.ok(FINAL.includes(ours.state))
          t.equal(ours.createdAt, there.createdAt)
          t.ok(ours.fence > there.fence || ours.token.equals(there.token))
        }
  },
)

void t.test('state, fence, token and life decide which of two records is kept', async (t) => {
  const cases: [ours: ComparedRecord, there: ComparedRecord, ReturnType<typeof judgeCopy>, string][] = [
    [kept('completed'), kept('in_progress'), 'replace', 'copied while in progress, since completed'],
    [kept('completed'), kept('unknown'), 'replace', 'a late outcome of the same attempt'],
    [
      kept('completed', 6, B),
      kept('unknown', 5, A),
      'replace',
      'resolved, retried and completed in the source',
    ],
    [
      kept('completed'),
      kept('unknown', 6, B),
      'different',
      'a later attempt in the target may have executed',
    ],
    [
      kept('completed'),
      kept('in_progress', 5, B, 2),
      'different',
      'the target claimed it without knowing of ours',
    ],
    [kept('completed', 5, B), kept('completed', 5, A), 'different', 'two answers'],
    [kept('completed'), kept('expired'), 'newer', 'its tombstone'],
    [kept('unknown'), kept('completed'), 'newer', 'resolved in the target'],
    [
      kept('unknown', 6, B),
      kept('completed', 5, A),
      'different',
      'retried in the source, completed in the target',
    ],
    [
      kept('unknown'),
      kept('completed', 9, B, 2),
      'different',
      'executed in the target without knowing of ours',
    ],
    [kept('unknown'), kept('in_progress'), 'newer', 'the same attempt: the target stays as it is'],
    [kept('in_progress'), kept('unknown', 6, B), 'newer', 'a later attempt in the target'],
    [kept('unknown', 6, B), kept('unknown', 5, A), 'different', 'a later attempt in the source'],
    [kept('unknown'), kept('failed_retryable'), 'different', 'either side may have spoken last'],
    [
      kept('unknown', 6, B),
      kept('failed_retryable', 5, A),
      'replace',
      'retried in the source since it was copied',
    ],
    [kept('unknown'), kept('failed_retryable', 6, B), 'newer', 'resolved and retried in the target'],
    [
      kept('unknown'),
      kept('failed_retryable', 6, B, 2),
      'replace',
      'claimed in the target without knowing of ours',
    ],
    [kept('failed_retryable'), kept('unknown'), 'different', 'resolved in the source since it was copied'],
    [kept('failed_retryable'), kept('in_progress', 6, B), 'newer', 'retried in the target'],
    [kept('failed_retryable', 6, B), kept('unknown', 5, A), 'different', 'both were in use'],
    [kept('failed_retryable'), kept('in_progress', 5, B, 2), 'newer', 'claimed anew in the target'],
    [kept('failed_retryable'), kept('completed', 6, B), 'newer', 'retried and completed in the target'],
    [kept('failed_retryable', 6, B), kept('failed_retryable', 5), 'replace', 'retried in the source since'],
    [kept('failed_retryable'), kept('failed_retryable', 6, B), 'newer', 'retried in the target since'],
    [
      kept('failed_retryable'),
      kept('failed_retryable', 5, B),
      'newer',
      'both free: the target stays as it is',
    ],
    [kept('unknown'), kept('unknown', 6, B, 2), 'different', 'claimed in the target without knowing of ours'],
    [kept('unknown'), kept('in_progress', 5, B), 'different', 'claimed in both from one state'],
    [kept('unknown'), kept('completed', 6, B), 'newer', 'retried and completed in the target'],
    [kept('unknown'), kept('completed', 5, B), 'newer', 'resolved there, which takes the token away'],
  ]
  for (const [ours, there, verdict, why] of cases) t.equal(judgeCopy(ours, there), verdict, why)
})

void t.test(
  '§9 during a migration no final record is overwritten, and no two records are ahead of each other',
  async (t) => {
    for (const ours of ALL)
      for (const there of ALL) {
        const what = `${ours.state} ${ours.fence} ${ours.createdAt} and ${there.state} ${there.fence} ${there.createdAt}`
        if (FINAL.includes(there.state)) t.notOk(isAhead(ours, there), what)
        t.notOk(isAhead(ours, there) && isAhead(there, ours), what)
        if (
          ours.state === 'failed_retryable' &&
          !ours.token.equals(there.token) &&
          there.state !== 'failed_retryable'
        )
          t.notOk(isAhead(ours, there), `${what}: nobody may execute what another holds`)
      }
  },
)

void t.test('a mirror takes every later attempt of the same life until it holds an answer', async (t) => {
  t.ok(isAheadOfMirror(kept('failed_retryable', 6, B), kept('in_progress')))
  t.ok(isAheadOfMirror(kept('in_progress', 6, B), kept('unknown')))
  t.notOk(isAheadOfMirror(kept('in_progress', 5, B), kept('unknown')))
  t.notOk(isAheadOfMirror(kept('in_progress', 6, B, 2), kept('unknown')))
  for (const state of FINAL) t.notOk(isAheadOfMirror(kept('in_progress', 6, B), kept(state)))
})

void t.test('state, fence, token and life decide which record is ahead during a migration', async (t) => {
  const cases: [ours: ComparedRecord, there: ComparedRecord, ahead: boolean, why: string][] = [
    [kept('completed'), kept('unknown', 6, B), true, 'an answer is final'],
    [kept('expired'), kept('in_progress'), true, 'and so is its tombstone'],
    [kept('completed'), kept('completed', 4, B), false, 'two answers: neither'],
    [kept('failed_retryable'), kept('in_progress'), true, 'the outcome of the attempt'],
    [kept('unknown'), kept('in_progress'), true, 'the same attempt, fallen silent since'],
    [kept('unknown'), kept('failed_retryable'), true, 'in doubt, nobody executes'],
    [kept('in_progress'), kept('failed_retryable'), false, 'the same attempt, earlier'],
    [kept('failed_retryable'), kept('unknown'), false, 'a release does not settle an unknown outcome'],
    [kept('unknown'), kept('unknown'), false, 'the same'],
    [
      kept('unknown', 5, A, 1),
      kept('in_progress', 5, A, 2),
      true,
      'the same attempt, even under another life',
    ],
    [kept('in_progress', 6, B), kept('unknown'), false, 'both hold, and each store counts its own fences'],
    [kept('in_progress', 4, B), kept('failed_retryable'), true, 'the holder, whatever the fences'],
    [kept('failed_retryable', 6, B), kept('unknown'), false, 'nobody frees what another attempt holds'],
    [kept('failed_retryable', 6, B), kept('failed_retryable'), true, 'both free: the higher fence'],
    [kept('in_progress', 5, B), kept('unknown'), false, 'both hold'],
    [kept('failed_retryable', 5, B), kept('failed_retryable'), false, 'neither holds'],
    [kept('in_progress', 4, B, 2), kept('failed_retryable'), true, 'another life that may execute'],
    [kept('completed', 4, B, 2), kept('failed_retryable'), true, 'another life that executed'],
    [
      kept('completed', 6, B, 2),
      kept('in_progress'),
      false,
      'both lives may have executed: a person decides',
    ],
    [kept('in_progress', 6, B, 2), kept('unknown'), false, 'the same'],
    [kept('failed_retryable', 6, B, 2), kept('failed_retryable'), false, 'neither life did anything'],
    [kept('failed_retryable', 6, B, 2), kept('in_progress'), false, 'a life that did nothing frees no other'],
  ]
  for (const [ours, there, ahead, why] of cases) t.equal(isAhead(ours, there), ahead, why)
})

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
