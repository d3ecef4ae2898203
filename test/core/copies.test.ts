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
import { lines } from './fixtures.ts'

const [A, B] = [Buffer.alloc(16, 1), Buffer.alloc(16, 2)]

function kept(state: State, fence = 5, token = A, createdAt = 1): ComparedRecord {
  return { state, fence, token, createdAt }
}

/** `unknown 6B2`: its state, fence, token and life, without which they are 5, A and 1. */
function spelled(text: string): ComparedRecord {
  const [state, [fence, token, life] = '5A1'] = text.split(' ')
  return kept(state as State, Number(fence), token === 'A' ? A : B, Number(life))
}

const FINAL: readonly State[] = ['completed', 'expired']

/** Every combination of state, fence, token and life. */
const ALL = STATES.flatMap((state) =>
  [4, 5, 6].flatMap((fence) =>
    [A, B].flatMap((token) => [1, 2].map((life) => kept(state, fence, token, life))),
  ),
)

void t.test('§9 what a copy never replaces, over every pair of records', async (t) => {
  const open = (one: ComparedRecord) => one.state === 'failed_retryable'
  const isFinal = (one: ComparedRecord) => FINAL.includes(one.state)
  const said = (one: ComparedRecord) => `${one.state} ${one.fence} ${one.createdAt}`
  for (const ours of ALL)
    for (const there of ALL) {
      const verdict = judgeCopy(ours, there)
      const what = `${said(ours)} and ${said(there)}: ${verdict}`
      const isNewerLife = there.createdAt === ours.createdAt && there.fence > ours.fence
      if (open(ours) && !open(there) && verdict === 'replace')
        t.fail(`${what}: a free one replaces one that is not`)
      if (isFinal(there) && verdict === 'replace') t.fail(`${what}: a final record is overwritten`)
      if (isFinal(ours) && open(there) && verdict !== 'replace')
        t.fail(`${what}: an answer yields to a free record`)
      if (!isFinal(ours) && !open(ours) && open(there) && verdict === 'newer' && !isNewerLife)
        t.fail(`${what}: a record that may have been executed yields to one that was not claimed anew since`)
      const isOwnAnswer = ours.fence > there.fence || ours.token.equals(there.token)
      if (there.state === 'in_progress' && verdict === 'replace')
        if (!isFinal(ours) || ours.createdAt !== there.createdAt || !isOwnAnswer)
          t.fail(`${what}: a running attempt yields to what is no answer of its own or of a later attempt`)

      if (isFinal(there) && isAhead(ours, there)) t.fail(`${what}: ahead of a final record`)
      if (isAhead(ours, there) && isAhead(there, ours)) t.fail(`${what}: ahead of each other`)
      if (open(ours) && !ours.token.equals(there.token) && !open(there) && isAhead(ours, there))
        t.fail(`${what}: nobody may execute what another holds`)
    }
})

void t.test('state, fence, token and life decide which of two records is kept', async (t) => {
  for (const line of lines`
    completed            | in_progress          | replace   | copied while in progress, since completed
    completed            | unknown              | replace   | a late outcome of the same attempt
    completed 6B1        | unknown 5A1          | replace   | resolved, retried and completed in the source
    completed            | unknown 6B1          | different | a later attempt in the target may have executed
    completed            | in_progress 5B2      | different | the target claimed it without knowing of ours
    completed 5B1        | completed 5A1        | different | two answers
    completed            | expired              | newer     | its tombstone
    unknown              | completed            | newer     | resolved in the target
    unknown 6B1          | completed 5A1        | different | retried in the source, completed in the target
    unknown              | completed 9B2        | different | executed in the target without knowing of ours
    unknown              | in_progress          | newer     | the same attempt: the target stays as it is
    in_progress          | unknown 6B1          | newer     | a later attempt in the target
    unknown 6B1          | unknown 5A1          | different | a later attempt in the source
    unknown              | failed_retryable     | different | either side may have spoken last
    unknown 6B1          | failed_retryable 5A1 | replace   | retried in the source since it was copied
    unknown              | failed_retryable 6B1 | newer     | resolved and retried in the target
    unknown              | failed_retryable 6B2 | replace   | claimed in the target without knowing of ours
    failed_retryable     | unknown              | different | resolved in the source since it was copied
    failed_retryable     | in_progress 6B1      | newer     | retried in the target
    failed_retryable 6B1 | unknown 5A1          | different | both were in use
    failed_retryable     | in_progress 5B2      | newer     | claimed anew in the target
    failed_retryable     | completed 6B1        | newer     | retried and completed in the target
    failed_retryable 6B1 | failed_retryable 5A1 | replace   | retried in the source since
    failed_retryable     | failed_retryable 6B1 | newer     | retried in the target since
    failed_retryable     | failed_retryable 5B1 | newer     | both free: the target stays as it is
    unknown              | unknown 6B2          | different | claimed in the target without knowing of ours
    unknown              | in_progress 5B1      | different | claimed in both from one state
    unknown              | completed 6B1        | newer     | retried and completed in the target
    unknown              | completed 5B1        | newer     | resolved there, which takes the token away`) {
    const [ours = '', there = '', verdict, why = ''] = line.split(/ *\| /)
    t.equal(judgeCopy(spelled(ours), spelled(there)), verdict, why)
  }
})

void t.test('a mirror takes every later attempt of the same life until it holds an answer', async (t) => {
  t.ok(isAheadOfMirror(kept('failed_retryable', 6, B), kept('in_progress')))
  t.ok(isAheadOfMirror(kept('in_progress', 6, B), kept('unknown')))
  t.notOk(isAheadOfMirror(kept('in_progress', 5, B), kept('unknown')))
  t.notOk(isAheadOfMirror(kept('in_progress', 6, B, 2), kept('unknown')))
  for (const state of FINAL) t.notOk(isAheadOfMirror(kept('in_progress', 6, B), kept(state)))
})

void t.test('state, fence, token and life decide which record is ahead during a migration', async (t) => {
  for (const line of lines`
    completed            | unknown 6B1      | true  | an answer is final
    expired              | in_progress      | true  | and so is its tombstone
    completed            | completed 4B1    | false | two answers: neither
    failed_retryable     | in_progress      | true  | the outcome of the attempt
    unknown              | in_progress      | true  | the same attempt, fallen silent since
    unknown              | failed_retryable | true  | in doubt, nobody executes
    in_progress          | failed_retryable | false | the same attempt, earlier
    failed_retryable     | unknown          | false | a release does not settle an unknown outcome
    unknown              | unknown          | false | the same
    unknown 5A1          | in_progress 5A2  | true  | the same attempt, even under another life
    in_progress 6B1      | unknown          | false | both hold, and each store counts its own fences
    in_progress 4B1      | failed_retryable | true  | the holder, whatever the fences
    failed_retryable 6B1 | unknown          | false | nobody frees what another attempt holds
    failed_retryable 6B1 | failed_retryable | true  | both free: the higher fence
    in_progress 5B1      | unknown          | false | both hold
    failed_retryable 5B1 | failed_retryable | false | neither holds
    in_progress 4B2      | failed_retryable | true  | another life that may execute
    completed 4B2        | failed_retryable | true  | another life that executed
    completed 6B2        | in_progress      | false | both lives may have executed: a person decides
    in_progress 6B2      | unknown          | false | the same
    failed_retryable 6B2 | failed_retryable | false | neither life did anything
    failed_retryable 6B2 | in_progress      | false | a life that did nothing frees no other`) {
    const [ours = '', there = '', ahead, why = ''] = line.split(/ *\| /)
    t.equal(String(isAhead(spelled(ours), spelled(there))), ahead, why)
  }
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

t.test('W01 a process keeps its own record, or restores it where the store went back', async (t) => {
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
})

t.test('W02 W04 what a process makes of a record that is not its own after a failover', async (t) => {
  const ENDS = ['in_progress', 'completed', 'unknown'] as const
  const open = ['in_progress', 'failed_retryable', 'unknown'] as const
  const final = ['completed', 'expired'] as const
  type Row = readonly [mine: State, state: State, verdict: string, fence?: number, born?: number, by?: Buffer]
  const rows: readonly Row[] = [
    // An earlier attempt is replaced, but no attempt follows a final state.
    ...ENDS.flatMap((mine) => open.map((state): Row => [mine, state, 'replace', FENCE - 1])),
    ...ENDS.flatMap((mine) => final.map((state): Row => [mine, state, 'split', FENCE - 1])),
    // Another claim is a split, whatever its fence.
    ...ENDS.flatMap((mine) =>
      [...ENDS, 'expired' as const].flatMap((state) =>
        [FENCE - 1, FENCE, FENCE + 1].map((fence): Row => [mine, state, 'split', fence, BORN + 1]),
      ),
    ),
    // Claimed from the same state, or later.
    ['in_progress', 'in_progress', 'split'],
    ['completed', 'in_progress', 'split', FENCE + 1],
    ['unknown', 'in_progress', 'split'],
    // One that came to nothing is replaced.
    ['in_progress', 'failed_retryable', 'replace', FENCE + 9, BORN + 9],
    ['completed', 'failed_retryable', 'replace', FENCE + 9, BORN + 9],
    // Others were free to claim it.
    ...STATES.flatMap((state) =>
      (['failed_retryable', 'expired'] as const).map((mine): Row => [mine, state, 'keep', FENCE + 1]),
    ),
    // A decision by an operator, and a retry after it.
    ['unknown', 'completed', 'keep', FENCE, BORN, NOBODY],
    ['unknown', 'in_progress', 'keep', FENCE + 1],
  ]
  for (const [mine, state, verdict, fence = FENCE, born = BORN, by = OTHER] of rows)
    t.equal(
      reclaimed(found(state, by, fence, born), own(mine)),
      verdict,
      `${mine} over ${state} ${fence - FENCE} ${born - BORN}`,
    )
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
