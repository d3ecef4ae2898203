import { type Resolution, resolvedDraft } from '../core/outcome.ts'
import { type Outcome, type RecordId, readAt } from '../core/record.ts'
import { outcomeSpans } from '../core/settle.ts'
import type { Change } from '../observe/audit.ts'
import { keptResult } from '../protect/classify.ts'
import { StoreUnavailable } from '../store/register.ts'
import { type AdminAnswer, NO_CONTENT, ok, problem } from './answers.ts'
import { read, responseOf } from './input.ts'
import type { AdminPorts, AdminRequest } from './ports.ts'
import { notFound } from './records.ts'
import type { Lookup, OperatorDecision, OutcomeReport, RecordView, Resolving } from './schemas.ts'
import { etag, recordView, responseView, time } from './view.ts'

/** A report from outside is tried again where others write to the record at the same time. */
const MAX_ROUNDS = 5

/** POST /v1/records/{id}/resolve */
export async function resolve(ports: AdminPorts, request: AdminRequest): Promise<AdminAnswer> {
  const resolving = read<Resolving>('Resolution', request.body)
  if (!resolving.ok) return problem('invalid_request', resolving.detail)
  if (request.ifMatch === null) return needsVersion()
  const id = request.id as RecordId
  return (await settle(ports, request, 'resolve', id, resolving.value)) ?? notFound(id)
}

/** POST /v1/outcomes */
export async function reportOutcome(ports: AdminPorts, request: AdminRequest): Promise<AdminAnswer> {
  const report = read<OutcomeReport>('OutcomeReport', request.body)
  if (!report.ok) return problem('invalid_request', report.detail)
  const lookup: Lookup = report.value
  const ids = ports.subjects.find(lookup)
  if (!ids.ok) return problem('invalid_request', ids.detail)
  const several = ids.value.length > 1 ? await thereOf(ports, ids.value) : []
  if (several.length > 1) {
    const detail = `/key: ${several.length} records have it, which the route took from different places: ${several.join(', ')}; resolve the one that is meant`
    return problem('invalid_request', detail)
  }
  for (const id of ids.value) {
    const answer = await settle(ports, { ...request, ifMatch: null }, 'outcome', id, report.value)
    if (answer !== null) return answer
  }
  return notFound(ids.value[0] as RecordId)
}

async function thereOf(ports: AdminPorts, ids: readonly RecordId[]): Promise<RecordId[]> {
  const found = await Promise.all(ids.map((id) => ports.records.get(id)))
  return ids.filter((_, n) => found[n]?.record != null)
}

/** Null: there is no such record. */
async function settle(
  ports: AdminPorts,
  request: AdminRequest,
  what: 'resolve' | 'outcome',
  id: RecordId,
  resolving: Resolving,
): Promise<AdminAnswer | null> {
  const { by = null, reason = null } = resolving
  const response = responseOf(resolving)
  if (!response.ok) return problem('invalid_request', response.detail)
  for (let round = 0; ; round++) {
    const isTold = await ports.own.tell(id)
    const { record, now } = await ports.records.get(id)
    const view = record === null ? null : recordView(id, record, now)
    if (record === null || view === null) return null
    if (request.ifMatch !== null && request.ifMatch !== etag(view)) return otherVersion(id, view)
    if (readAt(record, now)?.state !== 'unknown')
      return problem('not_unknown', `the record is ${view.state}`, { instance: id, record: view })
    const known = knownHere(ports, id, isTold, view)
    if (known !== null) return known

    const policy = ports.subjects.policy(record.route)
    const resolution: Resolution & Outcome =
      response.value === null
        ? { kind: 'not_executed', reason: `resolved as not executed${reason === null ? '' : `: ${reason}`}` }
        : { kind: 'completed', result: keptResult(policy, response.value) }
    const draft = resolvedDraft(record, resolution)
    const spans = outcomeSpans(resolution, policy)
    const after =
      response.value === null
        ? { state: draft.state }
        : { state: draft.state, status: response.value.status, size: response.value.body.length }
    const change: Change = {
      who: { address: request.address, by },
      what,
      record: id,
      before: summary(view),
      after,
      reason,
    }
    const done = await audited(ports, change, () => ports.records.replace(id, record.version, draft, spans))
    if ('refused' in done) return done.refused
    const reply = done.value
    if (reply !== null && reply.kind !== 'refused') {
      ports.history.add(id, 'resolved', reply.stamp.version, { outcome: resolving.outcome, what, by, reason })
      ports.waiters.tell(id, null)
      const fresh: RecordView = {
        ...view,
        state: draft.state,
        version: reply.stamp.version,
        updatedAt: time(reply.now),
        leaseUntil: null,
        expiresAt: time(reply.now + (resolution.kind === 'completed' ? spans.dueIn : spans.dropIn)),
        response: resolution.kind === 'completed' ? responseView(resolution.result) : null,
        lastError: draft.lastError,
      }
      return ok(fresh, { etag: etag(fresh) })
    }
    await withdrawn(ports, change, 'somebody else had written the record by then')
    if (reply === null) return null
    if (request.ifMatch !== null) {
      const met = recordView(id, reply.record, reply.now)
      return met === null ? null : otherVersion(id, met)
    }
    if (round === MAX_ROUNDS)
      return problem('store_unavailable', 'others keep writing to the record: try again', { instance: id })
  }
}

/** DELETE /v1/records/{id} */
export async function remove(ports: AdminPorts, request: AdminRequest): Promise<AdminAnswer> {
  const decision = read<OperatorDecision>('Decision', request.body ?? {})
  if (!decision.ok) return problem('invalid_request', decision.detail)
  if (request.ifMatch === null) return needsVersion()
  const id = request.id as RecordId
  const isTold = await ports.own.tell(id)
  const { record, now } = await ports.records.get(id)
  const view = record === null ? null : recordView(id, record, now)
  if (record === null || view === null) return notFound(id)
  if (request.ifMatch !== etag(view)) return otherVersion(id, view)
  if (view.state === 'in_progress') {
    const detail = `its owner's lease lasts until ${view.leaseUntil}: without the record, a retry would execute beside it`
    return problem('still_running', detail, { instance: id, record: view })
  }
  const known = knownHere(ports, id, isTold, view)
  if (known !== null) return known
  const { by = null, reason = null } = decision.value
  const who = { address: request.address, by }
  const change: Change = { who, what: 'delete', record: id, before: summary(view), after: null, reason }
  const done = await audited(ports, change, () => ports.store.remove(id, record.version))
  if ('refused' in done) return done.refused
  if (done.value) {
    ports.waiters.tell(id, null)
    return NO_CONTENT
  }
  await withdrawn(ports, change, 'somebody else had written the record by then')
  const met = await ports.records.get(id)
  const current = met.record === null ? null : recordView(id, met.record, met.now)
  return current === null ? notFound(id) : otherVersion(id, current)
}

/** Null: this very replica knows no more than the record says, so that a person may decide. */
function knownHere({ own }: AdminPorts, id: RecordId, isTold: boolean, view: RecordView): AdminAnswer | null {
  const more = { instance: id, record: view }
  if (own.isRunning(id))
    return problem(
      'still_running',
      'its lease has lapsed, but this replica is still at it, and writes what becomes of it: wait for that',
      more,
    )
  return isTold
    ? null
    : problem(
        'outcome_held',
        'this replica holds what became of it, and writes it as soon as the store takes it: look again then',
        more,
      )
}

/** POST /v1/drain */
export async function drain(ports: AdminPorts, request: AdminRequest): Promise<AdminAnswer> {
  const decision = read<OperatorDecision>('Decision', request.body ?? {})
  if (!decision.ok) return problem('invalid_request', decision.detail)
  const { by = null, reason = null } = decision.value
  const who = { address: request.address, by }
  const change: Change = { who, what: 'drain', record: null, before: null, after: { draining: true }, reason }
  const done = await audited(ports, change, async () => ports.announceDrain())
  return 'refused' in done ? done.refused : ok({ draining: true })
}

/** Makes the change once it is written down; where that cannot be done, it is not made. */
async function audited<T>(
  ports: AdminPorts,
  change: Change,
  make: () => Promise<T>,
): Promise<{ readonly value: T } | { readonly refused: AdminAnswer }> {
  try {
    await ports.audit.write(change)
  } catch (error) {
    return { refused: problem('audit_unavailable', `nothing was changed: ${(error as Error).message}`) }
  }
  try {
    return { value: await make() }
  } catch (error) {
    const lost = error instanceof StoreUnavailable && error.maybeApplied
    const why = lost
      ? 'the store did not answer: whether it was done shows in the record'
      : 'the store refused'
    await withdrawn(ports, change, why)
    throw error
  }
}

/** What was written down did not come to be. Said as well as it can be: nothing was changed. */
async function withdrawn(ports: AdminPorts, change: Change, why: string): Promise<void> {
  await ports.audit.write({ ...change, what: 'withdrawn', reason: why }).catch(() => {})
}

function summary({ route, state, version, fence }: RecordView): object {
  return { route, state, version, fence }
}

function needsVersion(): AdminAnswer {
  return problem('version_required', 'send the `version` that is decided about as If-Match: "<version>"')
}

function otherVersion(id: RecordId, view: RecordView): AdminAnswer {
  const detail = `it is at version ${view.version} now, ${view.state}: look at it again`
  return problem('version_mismatch', detail, { instance: id, record: view })
}
