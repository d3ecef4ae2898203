import type { FastifyRequest } from 'fastify'
import { type Static, Type } from 'typebox'
import {
  filterLines,
  firstOf,
  hopByHop,
  isFieldName,
  isFieldValue,
  isOwnOnResponses,
} from '../core/headers.ts'
import {
  type IdempotencyRecord,
  type Millis,
  type Outcome,
  type RecordId,
  type StoredResponse,
} from '../core/record.ts'
import { keptResult, outcomeSpans, type Resolution, resolvedDraft } from '../core/settle.ts'
import type { Audit, AuditEvent } from '../observe/audit.ts'
import type { History } from '../observe/history.ts'
import type { Reclaimer } from '../protect/reclaimer.ts'
import type { WaitingRoom } from '../protect/waiting-room.ts'
import { orThrow, type Records } from '../store/records.ts'
import { type Store, StoreUnavailable } from '../store/register.ts'
import type { AdminRoutes } from './app.ts'
import { type RecordLookup, subjectMembers } from './lookup.ts'
import { AdminProblem, invalid, schemaMismatch } from './problems.ts'
import { etag, notFound, ONE, readRecord, recordView, responseView, STORED, time } from './records.ts'
import {
  deciderMembers,
  described,
  headerLines,
  named,
  oneRecord,
  type RecordView,
  record,
} from './schemas.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

const resolutionMembers = {
  outcome: Type.Unsafe<'completed' | 'retryable'>({
    type: 'string',
    enum: ['completed', 'retryable'],
    description:
      'completed: it was executed, and retries get `response`. retryable: it was not executed; a retry may execute it.',
  }),
  response: Type.Optional(
    described('What retries will get.', {
      status: Type.Integer({ minimum: 200, maximum: 599 }),
      headers: Type.Optional(headerLines),
      body: Type.Optional(Type.String()),
      bodyBase64: Type.Optional(Type.String({ pattern: '^[A-Za-z0-9+/]*={0,2}$' })),
    }),
  ),
  ...deciderMembers,
}

const resolution = named('Resolution', resolutionMembers)
export type Resolving = Static<typeof resolution>

const outcomeReport = named('OutcomeReport', { ...subjectMembers, ...resolutionMembers })
const decision = named('Decision', deciderMembers)
/** Problems of every decision about a record; the second list is for those that name a version. */
const DECIDING = ['invalid_request', 'still_running', 'outcome_held', 'audit_unavailable', ...STORED] as const
const VERSIONED = ['version_mismatch', 'version_required', ...DECIDING] as const

const ifMatch = Type.Object({ 'If-Match': Type.String() })

/** Why the API would refuse this resolution; null: it would accept it. */
export function resolutionFault(resolving: unknown): string | null {
  const detail = schemaMismatch(resolution, resolving)
  if (detail !== null) return detail
  try {
    responseOf(resolving as Resolving)
    return null
  } catch (error) {
    if (error instanceof AdminProblem) return error.message
    throw error
  }
}

/** Framing and the proxy's own headers are not stored (contract §8). */
function isStored(name: string): boolean {
  return name !== 'content-length' && name !== 'trailer' && !isOwnOnResponses(name)
}

/** The response that retries will get; null: the record becomes retryable. */
function responseOf({ outcome, response }: Resolving): StoredResponse | null {
  if (outcome === 'retryable') {
    if (response === undefined) return null
    throw invalid('/response: not allowed, since nothing was done')
  }
  if (response === undefined)
    throw invalid('/response: required, since retries will receive it: {"status", "headers", "body"}')
  const { status, headers = [], body = '', bodyBase64 } = response
  if (bodyBase64 !== undefined && response.body !== undefined)
    throw invalid('/response: found body and bodyBase64; allowed: one of them')
  const bytes = bodyBase64 === undefined ? Buffer.from(body) : Buffer.from(bodyBase64, 'base64')
  // Node decodes truncated base64 without complaint, to fewer bytes.
  if (bodyBase64 !== undefined && bytes.toString('base64') !== bodyBase64)
    throw invalid('/response/bodyBase64: not padded base64 (RFC 4648)')
  if (bytes.length > 0 && [204, 205, 304].includes(status))
    throw invalid(`/response/body: a response with status ${status} has none`)
  const wrong = headers.findIndex(
    ([name = '', value = '']) => !isFieldName(name) || !isFieldValue(value) || value !== value.trim(),
  )
  if (wrong >= 0) throw invalid(`/response/headers/${wrong}: not a header line`)
  const lines = headers.flat()
  const hop = hopByHop(lines)
  const kept = filterLines(lines, (name) => !hop.has(name) && isStored(name))
  if (firstOf(kept, 'date') === null) kept.push('Date', new Date().toUTCString())
  return { status, reason: STATUS_CODES[status] ?? '', headers: kept, body: bytes, trailers: [] }
}

/** What this process knows about a record beyond the store. */
export interface OwnAttempts {
  /** Whether this replica is executing it. */
  readonly isRunning: (id: RecordId) => boolean | Promise<boolean>
  /** Writes the outcome that this replica holds, if any. False: the store refuses it. */
  readonly tell: (id: RecordId) => Promise<boolean>
  /** Remembers a decision that a failover may lose. Absent: no process is running to notice one. */
  readonly decided?: Reclaimer['decided']
}

export interface ChangePorts {
  readonly records: Pick<Records, 'get' | 'prefix' | 'replace'>
  readonly store: Pick<Store, 'remove'>
  readonly subjects: RecordLookup
  readonly waiters: Pick<WaitingRoom, 'tell'>
  readonly own: OwnAttempts
  readonly audit: Audit
  readonly history: Pick<History, 'add'>
  /** Makes readiness fail, or undoes that; traffic is still served. Returns whether it fails: a shutdown cannot be undone. */
  readonly announceDrain: (draining: boolean) => boolean
}

export const changeRoutes: AdminRoutes<ChangePorts> = async (app, options) => {
  await app.register(resolveRoutes, options)
  await app.register(otherRoutes, options)
}

const resolveRoutes: AdminRoutes<ChangePorts> = async (app, { ports }) => {
  app.post(
    `${ONE}/resolve`,
    {
      schema: {
        summary: 'Resolves an unknown outcome.',
        params: oneRecord,
        headers: ifMatch,
        body: resolution,
        response: { 200: record },
      },
      config: { hasETag: true, refuses: ['not_unknown', ...VERSIONED] },
    },
    async (request, reply) => {
      const { id } = request.params
      const view = await settle(ports, 'resolve', id, request.body, whoOf(request), versionOf(request))
      if (view === null) throw notFound(id)
      return reply.header('etag', etag(view)).send(view)
    },
  )

  app.post(
    '/v1/outcomes',
    {
      schema: {
        summary: 'Reports the outcome of an unknown record, found by key and caller.',
        body: outcomeReport,
        response: { 200: record },
      },
      config: { hasETag: true, refuses: ['not_unknown', ...DECIDING] },
    },
    async (request, reply) => {
      const { body } = request
      const ids = ports.subjects.find(body)
      const several = ids.length > 1 ? await storedOf(ports, ids) : []
      if (several.length > 1)
        throw invalid(
          `/key: ${several.length} records have it, since the route reads keys from several sources: ${several.join(', ')}; resolve the one you mean`,
        )
      for (const id of ids) {
        const view = await settle(ports, 'outcome', id, body, whoOf(request), null)
        if (view !== null) return reply.header('etag', etag(view)).send(view)
      }
      throw notFound(ids[0] as RecordId)
    },
  )
}

const otherRoutes: AdminRoutes<ChangePorts> = async (app, { ports }) => {
  app.delete(
    ONE,
    {
      schema: {
        summary: 'Deletes a record: the next request with its key is executed.',
        params: oneRecord,
        headers: ifMatch,
        body: decision,
        response: { 204: Type.Null() },
      },
      config: { refuses: VERSIONED },
    },
    async (request, reply) => {
      await remove(ports, request.params.id, request.body, whoOf(request), versionOf(request))
      return reply.code(204).send(null)
    },
  )

  for (const [what, summary] of [
    ['drain', 'Makes readiness fail before a shutdown; traffic is still served.'],
    ['undrain', 'Undoes `/v1/drain`. `draining` stays true if the proxy is shutting down.'],
  ] as const)
    app.post(
      `/v1/${what}`,
      {
        schema: {
          summary,
          body: decision,
          response: { 200: named('Draining', { draining: Type.Boolean() }) },
        },
        config: { refuses: ['invalid_request', 'audit_unavailable'] },
      },
      async ({ body, ip }) => {
        const { reason = null } = body
        const who = whoOf({ body, ip })
        const asked = what === 'drain'
        const change: AuditEvent = {
          who,
          what,
          record: null,
          before: null,
          after: { draining: asked },
          reason,
        }
        return { draining: await audited(ports.audit, change, async () => ports.announceDrain(asked)) }
      },
    )
}

function whoOf({
  ip,
  body,
}: Pick<FastifyRequest<{ Body: { by?: string } }>, 'body' | 'ip'>): AuditEvent['who'] {
  // Undefined once the client has disconnected.
  const address = (ip as string | undefined) ?? 'unknown'
  return { address, by: body.by ?? null }
}

function versionOf({ headers }: FastifyRequest): string {
  const tag = headers['if-match']
  if (tag !== undefined) return tag
  throw new AdminProblem(
    'version_required',
    'send If-Match: "<version>" with the `version` that you are deciding about',
  )
}

async function storedOf({ records }: ChangePorts, ids: readonly RecordId[]): Promise<RecordId[]> {
  const found = await Promise.all(ids.map(async (id) => orThrow(await records.get(id))))
  return ids.filter((_, n) => found[n]?.record != null)
}

/** Number of attempts at a report while others change the record. */
const MAX_ROUNDS = 5

/** `version`: the one that an operator decided about; null: a report. Returns null if there is no such record. */
async function settle(
  ports: ChangePorts,
  what: 'resolve' | 'outcome',
  id: RecordId,
  resolving: Resolving,
  who: AuditEvent['who'],
  version: string | null,
): Promise<RecordView | null> {
  const { outcome, reason = null } = resolving
  const response = responseOf(resolving)
  for (let round = 0; ; round++) {
    const found = await decidable(ports, id, version, (view) => {
      if (view.state !== 'unknown')
        throw new AdminProblem('not_unknown', `the record is ${view.state}`, { instance: id, record: view })
    })
    if (found === null) return null
    const { stored, view } = found
    const policy = ports.subjects.policy(stored.route)
    const resolution: Resolution & Outcome =
      response === null
        ? { kind: 'not_executed', reason: `resolved as not executed${reason === null ? '' : `: ${reason}`}` }
        : { kind: 'completed', result: keptResult(policy, response) }
    const draft = resolvedDraft(stored, resolution)
    const { state, lastError } = draft
    const spans = outcomeSpans(resolution, policy)
    const after =
      response === null ? { state } : { state, status: response.status, size: response.body.length }
    const change: AuditEvent = { who, what, record: id, before: summary(view), after, reason }
    const reply = await audited(ports.audit, change, async () =>
      orThrow(await ports.records.replace(id, stored.version, draft, spans)),
    )
    if (reply !== null && reply.kind !== 'refused') {
      const { now, stamp } = reply
      ports.own.decided?.({ id, version: stored.version, written: { draft, spans } })
      ports.history.add(id, 'resolved', stamp.version, {
        outcome,
        what,
        by: who.by,
        reason,
      })
      ports.waiters.tell(id, null)
      const expiresAt = now + (resolution.kind === 'completed' ? spans.dueIn : spans.dropIn)
      return {
        ...view,
        state,
        version: stamp.version,
        updatedAt: time(now),
        leaseUntil: null,
        expiresAt: time(expiresAt),
        response: resolution.kind === 'completed' ? responseView(resolution.result, expiresAt) : null,
        lastError,
      }
    }
    await withdraw(ports.audit, change, OVERTAKEN)
    if (reply === null) return null
    if (version !== null) {
      const current = recordView(id, reply.record, reply.now)
      if (current === null) return null
      throw otherVersion(id, current)
    }
    if (round === MAX_ROUNDS)
      throw new AdminProblem('store_unavailable', 'other writers keep changing the record: try again', {
        instance: id,
      })
  }
}

async function remove(
  ports: ChangePorts,
  id: RecordId,
  decided: Static<typeof decision>,
  who: AuditEvent['who'],
  version: string,
): Promise<void> {
  const found = await removable(ports, id, version)
  if (found === null) throw notFound(id)
  const { reason = null } = decided
  const change: AuditEvent = { who, what: 'delete', record: id, before: found.before, after: null, reason }
  if (await audited(ports.audit, change, () => ports.store.remove(id, found.version))) {
    ports.own.decided?.({ id, version: found.version, written: null })
    ports.waiters.tell(id, null)
    return
  }
  await withdraw(ports.audit, change, OVERTAKEN)
  const { record, now } = await readRecord(ports.records, id)
  const current = record && recordView(id, record, now)
  throw current === null ? notFound(id) : otherVersion(id, current)
}

/** The version to remove, and its description in the audit log. */
interface Removable {
  readonly version: number
  readonly before: object
}

async function removable(ports: ChangePorts, id: RecordId, version: string): Promise<Removable | null> {
  const unread = await removableUnread(ports, id, version)
  if (unread !== null) return unread
  const found = await decidable(ports, id, version, (view) => {
    if (view.state === 'in_progress')
      throw leased(id, Date.parse(view.leaseUntil as string), { record: view })
  })
  return found && { version: found.stored.version, before: summary(found.view) }
}

/** Describes an unreadable record by its first bytes. Null: it is readable, or there is none. */
async function removableUnread(
  { own, records }: ChangePorts,
  id: RecordId,
  wanted: string,
): Promise<Removable | null> {
  const reply = await records.get(id)
  if (reply.kind !== 'corrupt') return null
  const { prefix, now } = orThrow(await records.prefix(id))
  if (prefix === null) return null
  const { version, state, leaseUntil } = prefix
  if (wanted !== etag(prefix)) {
    const detail = `it is now at version ${version} and cannot be read: check it again`
    throw new AdminProblem('version_mismatch', detail, { instance: id, version })
  }
  if (leaseUntil !== null && leaseUntil > now) throw leased(id, leaseUntil, { version })
  if (await own.isRunning(id)) throw running(id, { version })
  return { version, before: { state, version, unreadable: reply.error.message } }
}

function leased(id: RecordId, until: Millis, current: Pick<AdminProblem['members'], 'record' | 'version'>) {
  const detail = `its owner's lease lasts until ${time(until)}: without the record, a retry would execute at the same time`
  return new AdminProblem('still_running', detail, { instance: id, ...current })
}

function running(id: RecordId, current: Pick<AdminProblem['members'], 'record' | 'version'>): AdminProblem {
  const detail =
    'its lease has expired, but this replica is still executing it: wait until the outcome is recorded'
  return new AdminProblem('still_running', detail, { instance: id, ...current })
}

/**
 * The record, if an operator may decide about it: it is at `version`, `check` does not throw, and this replica knows nothing newer. Null:
 * there is no such record.
 */
async function decidable(
  { own, records }: ChangePorts,
  id: RecordId,
  version: string | null,
  check: (view: RecordView) => void,
): Promise<{ readonly stored: IdempotencyRecord; readonly view: RecordView } | null> {
  const isTold = await own.tell(id)
  const { record: stored, now } = await readRecord(records, id)
  const view = stored && recordView(id, stored, now)
  if (stored === null || view === null) return null
  if (version !== null && version !== etag(view)) throw otherVersion(id, view)
  check(view)
  if (await own.isRunning(id)) throw running(id, { record: view })
  if (!isTold)
    throw new AdminProblem(
      'outcome_held',
      'this replica knows the outcome and will write it as soon as the store accepts it: try again later',
      { instance: id, record: view },
    )
  return { stored, view }
}

/** Makes the change after its audit line is on disk; without the line, no change. */
async function audited<T>(audit: Audit, change: AuditEvent, make: () => Promise<T>): Promise<T> {
  try {
    await audit.write(change)
  } catch (error) {
    throw new AdminProblem('audit_unavailable', `nothing was changed: ${(error as Error).message}`)
  }
  try {
    return await make()
  } catch (error) {
    const isLost = error instanceof StoreUnavailable && error.maybeApplied
    const why = isLost
      ? 'the store did not answer: the record shows whether it was changed'
      : 'the store refused'
    await withdraw(audit, change, why)
    throw error
  }
}

const OVERTAKEN = 'the record was changed first'

/** Records that an audited change was not made. If this line fails as well, no change is hidden: none was made. */
async function withdraw(audit: Audit, change: AuditEvent, why: string): Promise<void> {
  await audit.write({ ...change, what: 'withdrawn', reason: why }).catch(() => {})
}

function summary({ route, state, version, fence }: RecordView): object {
  return { route, state, version, fence }
}

function otherVersion(id: RecordId, view: RecordView): AdminProblem {
  const detail = `it is now at version ${view.version}, ${view.state}: check it again`
  return new AdminProblem('version_mismatch', detail, { instance: id, record: view })
}
