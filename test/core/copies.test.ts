import t from 'tap'
import { type ComparedRecord, isAhead, isAheadOfMirror, judgeCopy } from '../../src/core/copies.ts'
import { STATES, type State } from '../../src/core/record.ts'

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
