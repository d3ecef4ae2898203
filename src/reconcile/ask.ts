import { type Resolution, resolvedDraft, withoutResponse } from '../core/outcome.ts'
import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import { asksByKey, buildQuestion, type Question, readAnswer, whyUntold } from '../core/reconcile/answer.ts'
import {
  deadLettered,
  neededInARow,
  nextStep,
  pauseAfter,
  pauseWithoutQuestion,
  type QuestionResult,
  reportAt,
  type Step,
  waitsOf,
} from '../core/reconcile/schedule.ts'
import type { Proof } from '../core/reconcile/verify.ts'
import {
  type IdempotencyRecord,
  type InProgress,
  type Millis,
  newReconciliation,
  type Reconciliation,
  type RecordId,
  readAt,
  type Spans,
  shortId,
  type Unknown,
} from '../core/record.ts'
import { type PathParameters, pathParameters } from '../core/route.ts'
import { outcomeSpans } from '../core/settle.ts'
import type { SettleReply } from '../store/records.ts'
import { StoreFull } from '../store/register.ts'
import type { Forwarded } from '../upstream/port.ts'
import type { ReconcilePorts } from './ports.ts'

/** Between the last moment of a question and the next one, which may be another replica's. */
const MARGIN: Millis = 5_000

/**
 * Asks the upstream about a record, once, and writes what the answer makes of it. The question is taken first, by a write
 * that counts it and moves the next look on: of several replicas one asks, and one that dies over it costs a pause. What it
 * learns is written where the record is still as it was taken: an owner or an operator who was faster stands.
 */
export async function ask(ports: ReconcilePorts, due: Askable): Promise<void> {
  const { id, record, reconciliation: before, route, policy } = due
  // An upstream that keeps the quotes knows nothing of the key without them, and the other way round.
  const spellings = record.keySent !== undefined && asksByKey(policy) ? 2 : 1
  const key = before.asked % spellings === 1 ? (record.keySent as string) : record.key
  const parameters = pathParameters(route.match, record.path)
  const question = buildQuestion(policy, id, key, parameters)
  if (typeof question === 'string') {
    await keep(ports, due, deadLettered({ ...before, answer: question }))
    return
  }
  if (before.asked >= policy.attempts) {
    await keep(ports, due, deadLettered(before))
    return
  }
  const counted = { ...before, asked: before.asked + 1, notFound: 0 }
  // The question that frees a key is followed by one about a completed request, in both its spellings.
  const mayFree = policy.notFound !== null && before.notFound + 1 >= neededInARow(spellings)
  const atMost = ports.questionTimeout * (mayFree ? 3 : 1) + MARGIN
  const pause = Math.max(pauseAfter(counted.asked, policy), atMost)
  const taken = await write(ports, due, counted, pause, atMost)
  if (taken === null) return
  const asked = ports.monotonic()
  const passed = (since: Millis): Millis => ports.clock.since(since, asked)
  const waits = waitsOf(policy, due.route.lease, record, before, taken.now, passed)
  if (record.reconciliation === null) ports.observer.reconciled(record.route, 'scheduled', id)

  const { heard: said, release } = await askUpstream(ports, { ...due, key, parameters }, question)
  try {
    const why = said.kind === 'not_found' ? whyUntold(policy, record, ports.upstream) : null
    const heard: QuestionResult = why === null ? said : { kind: 'pending', why }
    const known = { ...before, reported: taken.reconciliation.reported }
    const stepBy = (answer: QuestionResult): Step => nextStep(policy, known, waits, answer, spellings)
    const first = stepBy(heard)
    const doubt = frees(first) ? doubtOf(await ports.prove(route, policy)) : null
    const step = doubt === null ? first : stepBy({ kind: 'unusable', why: doubt })
    const now = { ...due, record: { ...record, version: taken.version }, now: taken.now }
    if (heard.kind === 'mismatch' && before.answer !== heard.why)
      ports.observer.trouble('the answer about an unknown record is not that of this record', {
        ...named(due),
        answer: heard.why,
      })
    if (step.kind === 'unknown') await keep(ports, now, step)
    else await resolve(ports, now, step.resolution, counted.asked >= policy.attempts)
  } finally {
    release()
  }
}

function frees(step: Step): boolean {
  return step.kind === 'resolved' && step.resolution.kind === 'not_executed'
}

/** Why "not found" of the question is not believed, though the record says that the upstream was told; null: it is. */
function doubtOf(proof: Proof): string | null {
  switch (proof.kind) {
    case 'refuted':
      return 'not found, and no more is a request that was completed: the question proves nothing'
    case 'unanswered':
      return `not found, and whether the question finds a completed request could not be asked: ${proof.why}`
    case 'proven':
    case 'untested':
      return null
  }
}

async function keep(
  ports: ReconcilePorts,
  due: Askable,
  { reconciliation, pause, result }: Extract<Step, { kind: 'unknown' }>,
): Promise<void> {
  if ((await write(ports, due, reconciliation, pause)) === null) return
  ports.observer.reconciled(due.record.route, result, due.id)
  if (result === 'dead_lettered')
    ports.observer.trouble('a record stays unknown: it is dead-lettered, and a person has to decide', {
      ...named(due),
      asked: reconciliation.asked,
      answer: reconciliation.answer,
    })
}

/** `last`: it is not asked again, so there may never be room for what was answered. */
async function resolve(
  ports: ReconcilePorts,
  due: Askable,
  resolution: Resolution,
  last: boolean,
): Promise<void> {
  const { id, record, route } = due
  const draft = resolvedDraft(record, resolution)
  let reply: SettleReply | null
  try {
    reply = await ports.records.replace(id, record.version, draft, outcomeSpans(resolution, route))
  } catch (error) {
    const less = error instanceof StoreFull && last ? withoutResponse(resolution) : null
    if (less === null) throw error
    return await resolve(ports, due, less, last)
  }
  if (reply?.kind !== 'written') return
  const result = resolution.kind === 'completed' ? 'completed' : 'retryable'
  ports.observer.reconciled(record.route, result, id)
  ports.tell(id)
}

const NO_BODY = Buffer.alloc(0)
const nothing = (): void => {}

/** What a question is about. */
export interface Asking {
  readonly id: RecordId
  readonly key: string | null
  readonly parameters: PathParameters
  readonly route: RoutePolicy
  readonly policy: ReconcilePolicy
}

/** Asks once. `release` gives back the room that the answer takes. */
export async function askUpstream(
  ports: Pick<ReconcilePorts, 'forward'>,
  { id, key, parameters, route, policy }: Asking,
  question: Question,
): Promise<{ readonly heard: QuestionResult; readonly release: () => void }> {
  const unusable = (why: string) => ({ heard: { kind: 'unusable', why } as const, release: nothing })
  let result: Forwarded
  try {
    result = await ports.forward({ ...question, body: NO_BODY, responseLimit: route.limits.response })
  } catch (error) {
    return unusable(`internal error: ${String(error)}`)
  }
  switch (result.proof) {
    case 'responded': {
      const heard = readAnswer(policy, route.keep, id, key, result.response, parameters)
      return { heard, release: result.release }
    }
    case 'live':
      result.live.abandon()
      return unusable(`status ${result.live.status}, which ${WHY_LIVE[result.why]}`)
    case 'not_sent':
      return { heard: { kind: 'not_sent', why: 'the upstream could not be reached' }, release: nothing }
    case 'unknown':
      return unusable(result.timedOut ? 'no whole answer came in time' : 'the upstream broke its answer off')
  }
}

const WHY_LIVE = {
  streamed: 'is a stream',
  too_large: 'is longer than `limits.response`',
  no_room: 'there is no room for',
} as const

function named({ id, record }: Askable): Readonly<Record<string, unknown>> {
  return { route: record.route, record: shortId(id) }
}

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
