import { ageOf, decide, retryAfterSeconds, untilNextCheck } from '../core/decide.ts'
import { essence, filterLines, firstOf, type RawHeaders } from '../core/headers.ts'
import { digest, frame, recordId } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type IdempotencyRecord, type Millis, type RecordId, readAt } from '../core/record.ts'
import { runningRecord } from '../core/settle.ts'
import type { Forward } from '../upstream/port.ts'
import { answerFromRecord, nobody, overloaded, refuse, storeUnavailable } from './answers.ts'
import { type Claim, claim } from './claim.ts'
import { type Identified, readHead, refuseCaller } from './identify.ts'
import type { WalkPorts } from './ports.ts'
import { type Answer, type Execution, type Existing, type ProtectedRequest, timeLeft } from './request.ts'
import type { Seat } from './waiting-room.ts'

type Running = Extract<Existing, { kind: 'in_progress' }>

/** Answers a request whose record exists, first holding it if the route says so (contract §6). */
export function duplicate(
  ports: WalkPorts,
  request: ProtectedRequest,
  identified: Identified,
  found: Existing,
): Answer | Execution | Promise<Answer | Execution> {
  const { inFlight, authorizeReplay: policy } = request.route
  const answer = (): Answer | Promise<Answer | Execution> =>
    found.kind === 'in_progress' && inFlight.mode === 'wait'
      ? hold(ports, request, identified, found)
      : answerFromRecord(ports, request, identified.id, found)
  return policy === null ? answer() : authorizeReplay(ports, request).then((refused) => refused ?? answer())
}

async function hold(
  ports: WalkPorts,
  request: ProtectedRequest,
  identified: Identified,
  found: Running,
): Promise<Answer | Execution> {
  const { id } = identified
  if (request.clientGone()) return nobody()
  const seat = ports.waiters.enter(id, ports.running.has(id))
  if (seat === null) return answerFromRecord(ports, request, id, found)
  const stop = request.onGone(() => seat.dismiss())
  const claimed = await wait(ports, request, identified, found, seat).finally(() => {
    stop()
    seat.leave()
  })
  if (claimed.kind !== 'existing') return claimed
  // The request was held: its credential may have been revoked since.
  const refusedNow = claimed.existing === found ? null : await authorizeReplay(ports, request)
  if (refusedNow !== null) return refusedNow
  const answer = answerFromRecord(ports, request, id, claimed.existing)
  if (answer.facts.outcome !== 'replayed') return answer
  return { ...answer, facts: { ...answer.facts, outcome: 'waited' } }
}

/**
 * Waits until the record answers, the time is up or the client leaves. If the running attempt did nothing, one of the waiting requests
 * claims once more; the others wait for it (contract §6).
 */
async function wait(
  ports: WalkPorts,
  request: ProtectedRequest,
  identified: Identified,
  found: Running,
  seat: Seat,
): Promise<Claim> {
  const { route } = request
  const until = performance.now() + Math.min(route.inFlight.wait, timeLeft(request))
  const original = found.fence
  let running = found
  for (;;) {
    const news = await seat.next(until - performance.now())
    if (request.clientGone()) return nobody()
    if (news === null) return { kind: 'existing', existing: running }
    // The store may have lost the record of a running execution: only a new request from the client may claim over that.
    if (news.kind === 'absent') continue
    const decision = news.kind === 'corrupt' ? null : decide(news.record, identified.asked, route, news.now)
    if (decision?.kind === 'gone') continue
    if (decision?.kind === 'take_over') {
      // The takeover did nothing, either.
      if (decision.from.fence !== original) return { kind: 'existing', existing: running }
      if (!seat.room.takesOver(original)) continue
    } else if (decision !== null) {
      if (decision.kind !== 'in_progress') return { kind: 'existing', existing: decision }
      running = decision
      continue
    }
    const claimed = await claim(ports, request, identified)
    if (claimed.kind === 'existing' && claimed.existing.kind === 'in_progress') {
      running = claimed.existing
      if (!ports.running.has(identified.id)) seat.room.listen()
      continue
    }
    if (claimed.kind !== 'execution') seat.room.passOn()
    return claimed
  }
}

/**
 * Asks the upstream, with the caller's own credentials, whether this caller may see the record (contract §6). Null: yes. Runs before any
 * answer from a record: a revoked credential reads nothing, not even a state.
 */
async function authorizeReplay(
  { forward, grants }: Pick<WalkPorts, 'forward' | 'grants'>,
  request: ProtectedRequest,
): Promise<Answer | null> {
  const { authorizeReplay: policy } = request.route
  if (policy === null) return null
  const credentials = new Set([
    'authorization',
    'cookie',
    ...request.route.scope.caller.filter(({ kind }) => kind === 'header').map(({ name }) => name),
  ])
  // Keyed by every credential presented: another token of the same caller may be the revoked one.
  const shown = filterLines(request.headers, (name) => credentials.has(name))
  // A grant counts only under the same policy path and cache time (a reload may change them), and for the same host: another host is
  // another tenant of the upstream.
  const caller = digest(frame([policy.path, String(policy.cache), request.host, ...shown]), null)
  if (grants.has(caller)) return null
  const startedAt = performance.now()
  // Not the forwarded lines: `Connection` could remove a credential, and the probe would be anonymous.
  const lines = [...shown, ...filterLines(request.upstreamHeaders(null), (name) => ADDRESSING.has(name))]
  const status = await probe(forward, policy.path, lines)
  request.progress.upstreamMs += performance.now() - startedAt
  if (status === null || status >= 500) {
    const detail =
      'the upstream did not say whether this caller may see the stored answer; nothing was executed'
    return refuse('replay_forbidden', 'replay_unauthorized_yet', detail, { retryAfter: 1 })
  }
  if (status >= 300) {
    const detail = `the upstream answered ${status} when it was asked whether this caller may see the stored answer`
    const more = { status: status === 401 ? 401 : 403 }
    return refuse('replay_forbidden', 'replay_forbidden', detail, more)
  }
  grants.add(caller, policy.cache)
  return null
}

/** Header fields with the request's original address and how it arrived. */
const ADDRESSING: ReadonlySet<string> = new Set([
  'cdn-loop',
  'host',
  'via',
  'x-forwarded-for',
  'x-forwarded-host',
  'x-forwarded-proto',
])

/** The status of the upstream's answer, 403 for a success of a call; null: there was none. */
async function probe(forward: Forward, path: string, lines: readonly string[]): Promise<number | null> {
  const result = await forward({
    method: 'GET',
    target: path,
    headers: lines,
    body: Buffer.alloc(0),
    responseLimit: RESPONSE_LIMIT,
  })
  switch (result.proof) {
    case 'responded': {
      const { status, headers } = result.response
      result.release()
      return permitted(status, headers)
    }
    case 'live':
      result.live.drain()
      return permitted(result.live.status, result.live.headers)
    case 'not_sent':
    case 'unknown':
      return null
  }
}

/** gRPC servers answer 200 even to a path that they do not know. */
function permitted(status: number, headers: RawHeaders): number {
  const isCall = essence(headers).startsWith('application/grpc') || firstOf(headers, 'grpc-status') !== null
  return isCall && status < 300 ? FORBIDDEN : status
}

const FORBIDDEN = 403

/** The probe ignores response bodies. */
const RESPONSE_LIMIT = 64 * 1024
/** The reply to a client that asks for the state instead of retrying; it never has the stored body (contract §6, `status.path`). */
export type StatusReply =
  | {
      readonly kind: 'found'
      readonly id: RecordId
      readonly state: IdempotencyRecord['state']
      /** The store's time; null if only this replica knows of the record yet. */
      readonly since: Millis | null
      /** Whole seconds; null if the state is final. */
      readonly retryAfter: number | null
    }
  | { readonly kind: 'absent'; readonly id: RecordId }
  | Answer

/** Looks up the record that a request with this key and these credentials would find. Changes nothing. */
export async function queryStatus(ports: WalkPorts, request: ProtectedRequest): Promise<StatusReply> {
  // It may query the upstream, so it counts towards `limits.inFlight` like any other request.
  const leave = ports.inFlight.enter(request.client, null)
  if (leave === null) return overloaded(ports)
  ports.inFlight.count++
  try {
    return await look(ports, request)
  } finally {
    ports.inFlight.count--
    leave()
  }
}

async function look(ports: WalkPorts, request: ProtectedRequest): Promise<StatusReply> {
  const { route, method, path, host } = request
  const head = await readHead(ports, request)
  if (head.kind !== 'head') return head
  const { key, caller } = head
  if (caller.kind === 'unidentified') return refuseCaller(caller)
  if (key.kind === 'missing') {
    const detail = 'send the key in the header that the route reads; a key in a body is not read here'
    return refuse('key_missing', 'idempotency_key_missing', detail)
  }
  const { namespace } = ports
  const id = recordId(namespace, route, caller.parts, method, path, key.key, key.qualifier, host)
  if (request.clientGone()) return nobody()
  const refused = await authorizeReplay(ports, request)
  if (refused !== null) return refused
  const running = ports.running.get(id)
  const own =
    ports.settler.held(id) ??
    (running !== undefined && running.attempt.fence === 0 ? runningRecord(running) : null)
  if (own !== null) return found(ports, route, id, own, 0)
  const reply = await ports.records.get(id)
  switch (reply.kind) {
    case 'corrupt':
      return storeUnavailable(ports, request, id, 'the stored record cannot be read by this version')
    case 'unavailable':
      return storeUnavailable(ports, request, id, 'the store does not answer')
    case 'read': {
      const { record, now } = reply
      const read = record === null ? null : readAt(record, now)
      return read === null || read.state === 'expired'
        ? { kind: 'absent', id }
        : found(ports, route, id, read, now)
    }
  }
}

/** `now` is 0 for this replica's own record, which has no time of the store. */
function found(
  ports: Pick<WalkPorts, 'latency'>,
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
  { latency }: Pick<WalkPorts, 'latency'>,
  route: RoutePolicy,
  read: IdempotencyRecord,
  now: Millis,
): number | null {
  switch (read.state) {
    case 'in_progress':
      return retryAfterSeconds(latency.retryIn(route, read.leaseUntil - now, ageOf(read, now)))
    case 'unknown':
      return retryAfterSeconds(untilNextCheck(read, now))
    case 'failed_retryable':
      return 1
    case 'completed':
    case 'expired':
      return null
  }
}
