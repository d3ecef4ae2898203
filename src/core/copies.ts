import type { IdempotencyRecord, Millis, RecordDraft, State } from './record.ts'
import { ACCEPTING, NOBODY } from './settle.ts'

/* Which of two records with the same id wins: after a copy, during a migration, after a failover. */

/**
 * The fields that decide between two records with the same id. `createdAt` identifies the record's life: no write and no copy changes it.
 */
export interface ComparedRecord {
  readonly state: State
  readonly fence: number
  readonly token: Buffer
  readonly createdAt: Millis
}

/** `open`: a retry executes. `held`: nobody may execute. `done`: a retry is answered. */
const STANDING = {
  failed_retryable: 'open',
  in_progress: 'held',
  unknown: 'held',
  completed: 'done',
  expired: 'done',
} as const satisfies Record<State, string>

/**
 * What to do with `there`, a different record with the same id in the store that `ours` is copied to. `replace`: it is an earlier state of
 * the same record, or says that nothing was executed where `ours` knows better. `newer`: it has moved on. `different`: neither follows from
 * the other, so both stores were in use; an operator decides.
 *
 * If `there` does not let a retry execute, a copy never changes that: a completed record is final, and a held one is replaced only by an
 * answer to the same attempt, or to a later one of the same life.
 */
export function judgeCopy(ours: ComparedRecord, there: ComparedRecord): 'replace' | 'newer' | 'different' {
  const sameLife = ours.createdAt === there.createdAt
  const sameAttempt = sameLife && ours.token.equals(there.token)
  const standing = STANDING[ours.state]
  switch (STANDING[there.state]) {
    case 'open':
      if (standing === 'done') return 'replace'
      if (standing === 'open') return there.fence < ours.fence ? 'replace' : 'newer'
      // Either may be later: an operator decided there, or the owner wrote again here.
      if (sameAttempt) return 'different'
      return sameLife && there.fence > ours.fence ? 'newer' : 'replace'
    case 'held':
      if (standing === 'done')
        return sameAttempt || (sameLife && there.fence < ours.fence) ? 'replace' : 'different'
      if (standing === 'open') return !sameLife || there.fence > ours.fence ? 'newer' : 'different'
      return sameAttempt || (sameLife && there.fence > ours.fence) ? 'newer' : 'different'
    case 'done':
      if (standing === 'open' || sameAttempt) return 'newer'
      return standing === 'held' && sameLife && there.fence >= ours.fence ? 'newer' : 'different'
  }
}

/** The phases of a migration between two stores, in order. Replicas in neighbouring phases may run side by side. */
export const PHASES = ['mirror', 'both', 'new'] as const
export type Phase = (typeof PHASES)[number]

/** The order of states within one attempt. Only its own process can end the silence. */
const ORDER: Readonly<Partial<Record<State, number>>> = { in_progress: 0, failed_retryable: 1, unknown: 2 }

/**
 * Whether `ours` is ahead of `there`, the record with the same id in the other store of a running migration (docs/adr/0101). Phases `both`
 * and `new` claim in opposite order, so of two attempts a higher fence is not the later one: one that holds the key is never freed by another.
 *
 * In doubt, the record that lets nobody execute wins; completed records are final.
 */
export function isAhead(ours: ComparedRecord, there: ComparedRecord): boolean {
  const [standing, theirs] = [STANDING[ours.state], STANDING[there.state]]
  if (theirs === 'done') return false
  if (ours.token.equals(there.token))
    return standing === 'done' || (ORDER[ours.state] as number) > (ORDER[there.state] as number)
  if (theirs === 'open' && standing !== 'open') return true
  if (ours.createdAt !== there.createdAt) return false
  return standing === 'done' || (theirs === 'open' && ours.fence > there.fence)
}

/** Whether `ours` is a later attempt than `there` in a mirror, where nobody claims: within one life, the one with the higher fence. */
export function isAheadOfMirror(ours: ComparedRecord, there: ComparedRecord): boolean {
  return STANDING[there.state] !== 'done' && ours.createdAt === there.createdAt && ours.fence > there.fence
}

/**
 * What to do with `found` when this process wrote `own` before the store failed over (contract §9). `keep`: it is `own`, or a successor;
 * `replace`: the store has reverted to an earlier state; `split`: another owner has claimed the key in the meantime.
 */
export function reclaimed(found: IdempotencyRecord, own: RecordDraft): 'keep' | 'replace' | 'split' {
  if (found.token.equals(own.token)) return isBefore(found.state, own.state) ? 'replace' : 'keep'
  // After an attempt that did nothing, anyone may claim.
  if (own.state === 'failed_retryable' || own.state === 'expired') return 'keep'
  if (found.createdAt === own.createdAt) {
    if (found.fence < own.fence && ACCEPTING.includes(found.state)) return 'replace'
    // A decision about this record: by a person, or by an owner who claimed it after it became unknown.
    if (found.token.equals(NOBODY) || (own.state === 'unknown' && found.fence > own.fence)) return 'keep'
  }
  // A split found earlier by the other owner, or just now by this one.
  if (found.state === 'unknown' && found.token.equals(NOBODY)) return 'keep'
  // Another owner's claim, whose attempt did nothing.
  return found.state === 'failed_retryable' ? 'replace' : 'split'
}

/** Whether `found` precedes `own`, both of one attempt. */
function isBefore(found: IdempotencyRecord['state'], own: RecordDraft['state']): boolean {
  if (own === 'in_progress') return false
  return found === 'in_progress' || (own === 'completed' && ACCEPTING.includes(found))
}

/** The record that a split leaves: unknown to everybody, under the higher fence. Null: `found` is final and stays. */
export function splitDraft(found: IdempotencyRecord, own: RecordDraft): RecordDraft | null {
  if (found.state === 'completed' || found.state === 'expired') return null
  const { version: _v, updatedAt: _u, dropAt: _d, ...record } = found
  return {
    ...record,
    fence: Math.max(found.fence, own.fence),
    // Neither owner's outcome may decide by itself.
    token: NOBODY,
    state: 'unknown',
    leaseExpired: false,
    status: null,
    reconciliation: null,
    lastError: `claimed twice, after the store had lost a claim: fences ${own.fence} and ${found.fence}`,
  }
}
