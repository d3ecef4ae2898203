import type { Millis, Outcome } from '../core/record.ts'
import { heldRecord, type OutcomeDraft } from '../core/settle.ts'
import type { RecordMap } from '../runtime/record-map.ts'
import type { MaybePromise } from '../runtime/scheduling.ts'
import type { Leases } from './leases.ts'
import type { Execution, Progress } from './request.ts'
import type { Settled, Settler } from './settler.ts'
import type { WaitingRoom } from './waiting-room.ts'

/** Tracks the attempts that this replica owns. */
interface Owning {
  readonly leases: Leases
  readonly settler: Settler
  readonly running: RecordMap<Execution>
  readonly waiters: WaitingRoom
}

/** Writes an attempt's outcome, releases the attempt and notifies the duplicates that wait for it. */
export function finish(
  { leases, settler, running, waiters }: Owning,
  progress: Progress,
  execution: Execution,
  outcome: Outcome,
  release: () => void,
): MaybePromise<Settled> {
  const { id, attempt } = execution
  execution.ended = outcome
  leases.release(id, attempt.token)
  const startedAt = performance.now()
  const over = (left: OutcomeDraft | null, expiresAt: Millis | null): void => {
    progress.storeMs += performance.now() - startedAt
    if (running.get(id) === execution) running.delete(id)
    if (!waiters.awaited.has(id)) return
    execution.isShared = true
    waiters.tell(id, left && heldRecord(left, expiresAt))
  }
  const done = (settled: Settled): Settled => {
    progress.state = settled.state
    over(settled.left, settled.expiresAt)
    return settled
  }
  const settling = settler.settle(execution, outcome, release)
  if (!(settling instanceof Promise)) return done(settling)
  return settling.then(done, (bug: unknown) => {
    over(null, null)
    throw bug
  })
}

export const NOTHING_HELD = (): void => {}
