import { shortId } from '../core/identity.ts'
import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import {
  asksByKey,
  buildStatusQuery,
  readAnswer,
  type StatusQuery,
  whyUnproven,
} from '../core/reconcile/answer.ts'
import {
  deadLettered,
  neededInARow,
  nextStep,
  pauseAfter,
  pauseWithoutQuery,
  reportAt,
  type StatusQueryResult,
  type Step,
  waitsOf,
} from '../core/reconcile/schedule.ts'
import type { Proof } from '../core/reconcile/verify.ts'
import {
  type InProgress,
  type Millis,
  newReconciliation,
  type Reconciliation,
  type RecordId,
  readAt,
  type Unknown,
} from '../core/record.ts'
import { type PathParameters, pathParameters } from '../core/route.ts'
import { outcomeSpans, type Resolution, resolvedDraft, withoutResponse } from '../core/settle.ts'
import { orThrow } from '../store/records.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { Forwarded } from '../upstream/port.ts'
import type { ReconcilePorts } from './ports.ts'

/** An unknown record that is due. */
interface DueRecord {
  readonly id: RecordId
  readonly record: Unknown
  readonly reconciliation: Reconciliation
  readonly route: RoutePolicy | null
  /** The store's time. */
  readonly now: Millis
}

/** A due record for a status query. */
interface Askable extends DueRecord {
  readonly route: RoutePolicy
  readonly policy: ReconcilePolicy
}

/** Only protected routes send status queries. */
export function reconcileOf(route: RoutePolicy | null): ReconcilePolicy | null {
  return route?.mode === 'enforce' ? route.reconcile : null
}

/**
 * Checks a record that the index lists as due, and makes the changes that need no query: ending a lapsed lease, scheduling a later check.
 * Returns the record if the upstream must be asked about it, else null.
 */
export async function inspectDue(ports: ReconcilePorts, id: RecordId): Promise<Askable | null> {
  const { record, now } = orThrow(await ports.records.get(id))
  if (record === null || ports.isOwn(id)) return null
  if (record.state === 'in_progress' && now >= record.leaseUntil) {
    await writeLapsed(ports, id, record, now)
    return null
  }
  if (record.state !== 'unknown' || now < record.nextLookAt) return null
  const route = ports.policyOf(record.route)
  const policy = reconcileOf(route)
  const reconciliation = record.reconciliation ?? newReconciliation(record.updatedAt)
  const due: DueRecord = { id, record, reconciliation, route, now }
  if (route !== null && policy !== null && !reconciliation.deadLettered) return { ...due, route, policy }
  await write(ports, due, reconciliation, pauseWithoutQuery(now - reconciliation.since))
  return null
}

/** Records that the lease has lapsed; everybody already reads the record as unknown (contract §2). */
async function writeLapsed(
  ports: ReconcilePorts,
  id: RecordId,
  record: InProgress,
  now: Millis,
): Promise<void> {
  const route = ports.policyOf(record.route)
  const policy = reconcileOf(route)
  const reconciliation = newReconciliation(record.leaseUntil)
  const unknown: Unknown = {
    ...(readAt(record, now) as Unknown),
    lastError: 'the owner fell silent: its lease expired',
  }
  const pause = policy?.every ?? pauseWithoutQuery(now - record.leaseUntil)
  const written = await write(
    ports,
    { id, record: unknown, reconciliation, route, now },
    reconciliation,
    pause,
  )
  if (written === null) return
  ports.observer.leaseExpired(record.route, id)
  if (policy !== null) ports.observer.reconciled(record.route, 'scheduled', id)
}

/** Random extra share of each pause: spreads the checks of records that became unknown together. */
const JITTER = 0.2

interface Rescheduled {
  readonly version: number
  readonly now: Millis
  readonly reconciliation: Reconciliation
}

/**
 * Keeps the record unknown and due again after `pause`, if its version is unchanged; null: another replica was faster. Reports once if the
 * record is about to be dropped, except while a status query runs (`undisturbed`).
 */
async function write(
  ports: ReconcilePorts,
  { id, record, route, now }: DueRecord,
  reconciliation: Reconciliation,
  pause: Millis,
  undisturbed: Millis = 0,
): Promise<Rescheduled | null> {
  const reportDue = reportAt(record.dropAt, route?.unresolvedTtl ?? Number.POSITIVE_INFINITY)
  const report = !reconciliation.reported && (now >= reportDue || now + undisturbed >= record.dropAt)
  const next = { ...reconciliation, reported: reconciliation.reported || report }
  const later = Math.round(pause * (1 + JITTER * ports.random()))
  const dueIn = next.reported ? later : Math.min(later, Math.max(reportDue - now, undisturbed))
  const draft = { ...record, reconciliation: next }
  // A check does not extend a record's retention.
  const spans = { dueIn, dropIn: record.dropAt - now }
  const reply = orThrow(await ports.records.replace(id, record.version, draft, spans))
  if (reply?.kind !== 'written') return null
  if (report) ports.observer.expiring(record.route, id, record.dropAt)
  return { version: reply.stamp.version, now: reply.now, reconciliation: next }
}

/** Pause between the end of a status query and the next one, perhaps by another replica. */
const MARGIN: Millis = 5_000

/**
 * Asks the upstream about a record once, and writes the result. First it counts the query and postpones the next check, so that only one
 * replica asks, and a crash delays the next query by one pause. It writes the result only if the record is unchanged: a faster owner or
 * operator wins.
 */
export async function ask(ports: ReconcilePorts, due: Askable): Promise<void> {
  const { id, record, reconciliation: before, route, policy } = due
  // An upstream that stores the key with quotes does not find it without them, and vice versa.
  const spellings = record.keySent !== undefined && asksByKey(policy) ? 2 : 1
  const key = before.asked % spellings === 1 ? (record.keySent as string) : record.key
  const about: About = { id, key, parameters: pathParameters(route.match, record.path), route, policy }
  const query = buildStatusQuery(policy, id, key, about.parameters)
  if (typeof query === 'string')
    return await keepUnknown(ports, due, deadLettered({ ...before, answer: query }))
  if (before.asked >= policy.attempts) return await keepUnknown(ports, due, deadLettered(before))
  const counted = { ...before, asked: before.asked + 1, notFound: 0 }
  // Before a status query may free a key, the upstream is asked about completed requests, in both spellings of the key.
  const mayFree = policy.notFound !== null && before.notFound + 1 >= neededInARow(spellings)
  const atMost = ports.queryTimeout() * (mayFree ? 3 : 1) + MARGIN
  const pause = Math.max(pauseAfter(counted.asked, policy), atMost)
  const taken = await write(ports, due, counted, pause, atMost)
  if (taken === null) return
  const asked = ports.monotonic()
  const passed = (since: Millis): Millis => ports.clock.since(since, asked)
  const passedByBoth = (since: Millis): Millis =>
    Math.min(passed(since), ports.otherClock.since(since, asked))
  const byAny = ports.store.pingOther === undefined ? passed : passedByBoth
  const waits = waitsOf(policy, route.lease, record, before, taken.now, passed, byAny)
  if (record.reconciliation === null) ports.observer.reconciled(record.route, 'scheduled', id)

  const { result, release } = await askUpstream(ports, about, query)
  try {
    const why = result.kind === 'not_found' ? whyUnproven(policy, record, ports.upstream) : null
    const believed: StatusQueryResult = why === null ? result : { kind: 'pending', why }
    const known = { ...before, reported: taken.reconciliation.reported }
    const stepBy = (one: StatusQueryResult): Step => nextStep(policy, known, waits, one, spellings)
    const first = stepBy(believed)
    const doubt = freesKey(first) ? doubtOf(await ports.prove(route, policy)) : null
    const step = doubt === null ? first : stepBy({ kind: 'unusable', why: doubt })
    const now = { ...due, record: { ...record, version: taken.version }, now: taken.now }
    if (believed.kind === 'mismatch' && before.answer !== believed.why)
      ports.observer.trouble('the answer to a status query is about another record', {
        ...named(due),
        answer: believed.why,
      })
    if (step.kind === 'unknown') await keepUnknown(ports, now, step)
    else await resolve(ports, now, step.resolution, counted.asked >= policy.attempts)
  } finally {
    release()
  }
}

function freesKey(step: Step): boolean {
  return step.kind === 'resolved' && step.resolution.kind === 'not_executed'
}

/** Why "not found" does not count although the upstream received the identifier; null: it counts. */
function doubtOf(proof: Proof): string | null {
  switch (proof.kind) {
    case 'refuted':
      return 'not found, but neither is a completed request: the status query proves nothing'
    case 'unanswered':
      return `not found, but the status query could not be tested on a completed request: ${proof.why}`
    case 'proven':
    case 'untested':
      return null
  }
}

async function keepUnknown(
  ports: ReconcilePorts,
  due: Askable,
  { reconciliation, pause, result }: Extract<Step, { kind: 'unknown' }>,
): Promise<void> {
  try {
    if ((await write(ports, due, reconciliation, pause)) === null) return
  } catch (error) {
    // If the write did succeed, nobody would report it later; if not, it is reported twice.
    if (result !== 'dead_lettered' || !(error instanceof StoreUnavailable && error.maybeApplied)) throw error
  }
  ports.observer.reconciled(due.record.route, result, due.id)
  if (result === 'dead_lettered')
    ports.observer.trouble('a record stays unknown: it is dead-lettered, and an operator has to decide', {
      ...named(due),
      asked: reconciliation.asked,
      answer: reconciliation.answer,
    })
}

/** `last`: no further status query follows, so if the store has no room for the response, the record is resolved without it. */
async function resolve(
  ports: ReconcilePorts,
  due: Askable,
  resolution: Resolution,
  last: boolean,
): Promise<void> {
  const { id, record, route } = due
  const spans = outcomeSpans(resolution, route)
  const reply = await ports.records.replace(id, record.version, resolvedDraft(record, resolution), spans)
  if (reply?.kind === 'unavailable' && reply.full && last) {
    const less = withoutResponse(resolution)
    if (less !== null) return await resolve(ports, due, less, last)
  }
  if (orThrow(reply)?.kind !== 'written') return
  const result = resolution.kind === 'completed' ? 'completed' : 'retryable'
  ports.observer.reconciled(record.route, result, id)
  ports.wake(id)
}

function named({ id, record }: DueRecord): Readonly<Record<string, unknown>> {
  return { route: record.route, record: shortId(id) }
}

/** The subject of a status query. */
export interface About {
  readonly id: RecordId
  readonly key: string | null
  readonly parameters: PathParameters
  readonly route: RoutePolicy
  readonly policy: ReconcilePolicy
}

/** `unaskable`: the record lacks an identifier for a status query. */
export type AskResult = StatusQueryResult | { readonly kind: 'unaskable'; readonly why: string }

/** Asks once. The caller must not keep references to the answer's body. */
export async function askOnce(ports: Pick<ReconcilePorts, 'forward'>, about: About): Promise<AskResult> {
  const query = buildStatusQuery(about.policy, about.id, about.key, about.parameters)
  if (typeof query === 'string') return { kind: 'unaskable', why: query }
  const { result, release } = await askUpstream(ports, about, query)
  release()
  return result
}

/** `release` frees the memory of the answer. */
async function askUpstream(
  ports: Pick<ReconcilePorts, 'forward'>,
  { id, key, parameters, route, policy }: About,
  query: StatusQuery,
): Promise<{ readonly result: StatusQueryResult; readonly release: () => void }> {
  const settled = (result: StatusQueryResult, release = (): void => {}) => ({ result, release })
  const unusable = (why: string) => settled({ kind: 'unusable', why })
  let answer: Forwarded
  try {
    const body = Buffer.alloc(0)
    answer = await ports.forward({ ...query, body, responseLimit: route.limits.response })
  } catch (error) {
    return unusable(`internal error: ${String(error)}`)
  }
  switch (answer.proof) {
    case 'responded':
      return settled(readAnswer(policy, route, id, key, answer.response, parameters), answer.release)
    case 'live':
      answer.live.abandon()
      return unusable(`status ${answer.live.status}, which ${WHY_LIVE[answer.why]}`)
    case 'not_sent':
      return settled({ kind: 'not_sent', why: 'the upstream could not be reached' })
    case 'unknown':
      if (answer.isRefused === true) return unusable(answer.reason)
      return unusable(answer.timedOut ? 'no complete answer came in time' : 'the answer broke off')
  }
}

const WHY_LIVE = {
  streamed: 'is a stream',
  too_large: 'is longer than `limits.response`',
  no_room: 'there is no room for',
} as const
