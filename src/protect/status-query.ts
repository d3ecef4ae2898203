import { ageOf, nextLook, retryAfterSeconds } from '../core/decide.ts'
import { recordId } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type IdempotencyRecord, type Millis, type RecordId, readAt } from '../core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../store/register.ts'
import { overloaded, refuse, storeUnavailable } from './answers.ts'
import { authorizeReplay } from './authorize.ts'
import { refuseCaller } from './caller.ts'
import { runningRecord } from './classify.ts'
import { readHead } from './identify.ts'
import type { Ports } from './ports.ts'
import { type Answer, newTrace, type ProtectedRequest, type Trace } from './request.ts'

/** What a client learns that asks instead of retrying: never the stored body (contract §6, `status.path`). */
export type StatusReply =
  | {
      readonly kind: 'found'
      readonly id: RecordId
      readonly state: IdempotencyRecord['state']
      /** The store's time; null where only this replica knows of it yet. */
      readonly since: Millis | null
      /** Whole seconds; null where the state is final. */
      readonly retryAfter: number | null
    }
  | { readonly kind: 'absent'; readonly id: RecordId }
  | Answer

/** Looks the record of `request` up as a request with its key and its credentials would find it. Changes nothing. */
export async function queryStatus(ports: Ports, request: ProtectedRequest): Promise<StatusReply> {
  const trace = newTrace(request)
  // It may ask the upstream: it takes a place like any request that does.
  const leave = ports.inFlight.enter(ports.maxInFlight, request.client, null)
  if (leave === null) return overloaded(ports, trace)
  ports.inFlight.count++
  try {
    return await look(ports, request, trace)
  } finally {
    ports.inFlight.count--
    leave()
  }
}

async function look(ports: Ports, request: ProtectedRequest, trace: Trace): Promise<StatusReply> {
  const { route } = request
  const head = await readHead(ports, request, trace)
  if (head.kind !== 'head') return head
  const { reading, caller } = head
  if (caller.kind === 'unidentified') return refuseCaller(trace, caller)
  if (reading.kind === 'missing')
    return refuse(
      trace,
      'key_missing',
      'idempotency_key_missing',
      'send the key in the header that the route reads; a key in a body cannot be asked about here',
    )
  const id = recordId(
    ports.namespace,
    route,
    caller.parts,
    request.method,
    request.path,
    reading.key,
    reading.qualifier,
    request.host,
  )
  if (request.clientGone()) return { kind: 'none' }
  const refused = await authorizeReplay(ports, request, trace)
  if (refused !== null) return refused
  const running = ports.running.get(id)
  const own =
    ports.settler.held(id) ??
    (running !== undefined && running.attempt.fence === 0 ? runningRecord(running) : null)
  if (own !== null) return found(ports, route, id, own, 0)
  try {
    const { record, now } = await ports.records.get(id)
    const read = record === null ? null : readAt(record, now)
    return read === null || read.state === 'expired'
      ? { kind: 'absent', id }
      : found(ports, route, id, read, now)
  } catch (error) {
    if (error instanceof CorruptRecord)
      return storeUnavailable(ports, trace, id, 'the stored record cannot be read by this version')
    if (error instanceof StoreUnavailable)
      return storeUnavailable(ports, trace, id, 'the store does not answer')
    throw error
  }
}

/** `now` 0: this replica's own record, which knows no time of the store. */
function found(
  ports: Pick<Ports, 'latency'>,
  route: RoutePolicy,
  id: RecordId,
  read: IdempotencyRecord,
  now: Millis,
): StatusReply {
  const { state } = read
  const since =
    now === 0 ? null : ((state === 'unknown' ? read.reconciliation?.since : null) ?? read.updatedAt)
  return { kind: 'found', id, state, since, retryAfter: retryAfterOf(ports, route, read, now) }
}

function retryAfterOf(
  { latency }: Pick<Ports, 'latency'>,
  route: RoutePolicy,
  read: IdempotencyRecord,
  now: Millis,
): number | null {
  switch (read.state) {
    case 'in_progress':
      return retryAfterSeconds(latency.retryIn(route, read.leaseUntil - now, ageOf(read, now)))
    case 'unknown':
      return retryAfterSeconds(nextLook(read, now))
    case 'failed_retryable':
      return 1
    case 'completed':
    case 'expired':
      return null
  }
}
