import type { RoutePolicy } from '../core/policy.ts'
import type { ReconcilePolicy } from '../core/reconcile/answer.ts'
import { pauseWithoutQuestion, reportAt } from '../core/reconcile/schedule.ts'
import {
  type IdempotencyRecord,
  type InProgress,
  type Millis,
  newReconciliation,
  type Reconciliation,
  type RecordId,
  readAt,
  type Spans,
  type Unknown,
} from '../core/record.ts'
import type { ReconcilePorts } from './ports.ts'

/** An unknown record whose look is due. */
export interface Due {
  readonly id: RecordId
  readonly record: Unknown
  readonly reconciliation: Reconciliation
  readonly route: RoutePolicy | null
  /** The store's time. */
  readonly now: Millis
}

/** A due record that the upstream is to be asked about. */
export interface Askable extends Due {
  readonly route: RoutePolicy
  readonly policy: ReconcilePolicy
}

/** So much longer may a pause be than it is meant to: what became unknown at one instant is not looked at at one. */
const JITTER = 0.2

/**
 * Looks at a record that the index says is due, and writes down what can be without asking: a lapsed lease, a later look.
 * What is left: the upstream is to be asked. Null: nothing is.
 */
export async function inspectDue(ports: ReconcilePorts, id: RecordId): Promise<Askable | null> {
  const { record, now } = await ports.records.get(id)
  if (record === null || ports.isOwn(id)) return null
  if (record.state === 'in_progress' && now >= record.leaseUntil) {
    await writeDown(ports, id, record, now)
    return null
  }
  if (record.state !== 'unknown' || now < record.nextLookAt) return null
  const due: Due = {
    id,
    record,
    reconciliation: record.reconciliation ?? newReconciliation(record.updatedAt),
    route: ports.policyOf(record.route),
    now,
  }
  const policy = reconcileOf(due.route)
  if (due.route !== null && policy !== null && !due.reconciliation.deadLettered)
    return { ...due, route: due.route, policy }
  await write(ports, due, due.reconciliation, pauseWithoutQuestion(now - due.reconciliation.since))
  return null
}

/** Only a route that protects asks. */
export function reconcileOf(route: RoutePolicy | null): ReconcilePolicy | null {
  return route?.mode === 'enforce' ? route.reconcile : null
}

/** The owner fell silent: for everybody who asked it read so already (contract §2). */
async function writeDown(
  ports: ReconcilePorts,
  id: RecordId,
  record: InProgress,
  now: Millis,
): Promise<void> {
  const route = ports.policyOf(record.route)
  const policy = reconcileOf(route)
  const read = readAt(record, now) as Unknown
  const reconciliation = newReconciliation(record.leaseUntil)
  const due: Due = {
    id,
    record: { ...read, lastError: 'the owner fell silent: its lease expired' },
    reconciliation,
    route,
    now,
  }
  const pause = policy?.every ?? pauseWithoutQuestion(now - record.leaseUntil)
  if ((await write(ports, due, reconciliation, pause)) === null) return
  ports.observer.leaseExpired(record.route, id)
  if (policy !== null) ports.observer.reconciled(record.route, 'scheduled', id)
}

/** What a write of the sweeper left behind. */
export interface Written {
  readonly version: number
  readonly now: Millis
  readonly reconciliation: Reconciliation
}

/**
 * Keeps the record unknown, to be looked at again after `pause`, where it is still at its version. Null: somebody was
 * faster, and nothing was written. Says first-hand and once that the record is going to be dropped. `undisturbed`: nobody is to
 * look at it so soon, as a question is under way.
 */
export async function write(
  ports: ReconcilePorts,
  { id, record, route, now }: Due,
  reconciliation: Reconciliation,
  pause: Millis,
  undisturbed: Millis = 0,
): Promise<Written | null> {
  const reportDue = reportAt(record.dropAt, route?.unresolvedTtl ?? Number.POSITIVE_INFINITY)
  const report = !reconciliation.reported && (now >= reportDue || now + undisturbed >= record.dropAt)
  const next = { ...reconciliation, reported: reconciliation.reported || report }
  const later = Math.round(pause * (1 + JITTER * ports.random()))
  const dueIn = next.reported ? later : Math.min(later, Math.max(reportDue - now, undisturbed))
  const reply = await ports.records.replace(
    id,
    record.version,
    { ...record, reconciliation: next },
    kept(record, now, dueIn),
  )
  if (reply?.kind !== 'written') return null
  if (report) ports.observer.expiring(record.route, id, record.dropAt)
  return { version: reply.stamp.version, now: reply.now, reconciliation: next }
}

/** Looks do not prolong the life of a record. */
function kept(record: IdempotencyRecord, now: Millis, dueIn: Millis): Spans {
  return { dueIn, dropIn: record.dropAt - now }
}
