import { type Decision, decide, type RequestDigests } from '../core/decide.ts'
import { newKeysBucket } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { identifiersSentByBoth } from '../core/reconcile/identifiers.ts'
import {
  type IdempotencyRecord,
  type Millis,
  type RecordDraft,
  type RecordId,
  type Spans,
  shortId,
} from '../core/record.ts'
import { claimDraft, claimSpans, outcomeDraft, outcomeSpans } from '../core/settle.ts'
import { type ClaimReply, nullIfUnavailable, type Records, type TakeOverReply } from '../store/records.ts'
import { type CorruptRecord, type Stamp, StoreUnavailable } from '../store/register.ts'
import { nobody, refuse, storeUnavailable } from './answers.ts'
import { runningRecord } from './classify.ts'
import { finish } from './execute.ts'
import type { Identified } from './identify.ts'
import type { Ports } from './ports.ts'
import type { Answer, Execution, Existing, ProtectedRequest, Unclaimed } from './request.ts'

/** Rounds of a race that others keep winning; each lost round means that somebody else moved the record on. */
const MAX_ROUNDS = 16

/** Waits for a lost connection before its claim is asked for again. */
const RECONNECT_PAUSES: readonly Millis[] = [50, 100, 200]

/** The record answers; or this request executes; or neither is possible, and the answer says why. */
export type Claim = { readonly kind: 'existing'; readonly existing: Existing } | Execution | Answer

/** The claim came through. */
interface Granted {
  readonly kind: 'granted'
  readonly execution: Execution
  readonly version: number
  /** It ended a lapsed lease that nobody had written down yet. */
  readonly lapsed: boolean
}

/** What a claim asks for. */
type Attempted = Pick<Execution, 'attempt' | 'operation' | 'before'>

/** What the store says of a claim. */
type ClaimResult =
  | Granted
  | { readonly kind: 'existing'; readonly existing: Existing }
  | Unclaimed
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }
  /** The caller has spent its rate of new keys. */
  | { readonly kind: 'limited'; readonly wait: Millis }
  /** The issued key has expired, and it has no record. */
  | { readonly kind: 'expired' }

/** Claims the record, unless it exists and answers. */
export async function claim(ports: Ports, request: ProtectedRequest, identified: Identified): Promise<Claim> {
  const { route, progress } = request
  const { id, operation, asked } = identified
  const known = knownHere(ports, route, identified, false)
  if (known !== null) return { kind: 'existing', existing: known }
  const earlier = ports.running.get(id)
  const askedAt = performance.now()
  // The store must hear what was not executed before anybody claims.
  const settled = !ports.settler.holds(id) || (await ports.settler.flush(id))
  if (route.profile === 'strict' && ports.unfitForStrict()) {
    const detail =
      'the store may evict unexpired records, or does not say that it keeps them, which profile strict does not accept (store.acceptRisk)'
    return storeUnavailable(ports, request, id, detail)
  }
  const token = ports.newToken()
  const isLimited = route.limits.newKeys !== null || !identified.mayClaim
  const ask = isLimited ? claimWithinLimits : claimRecord
  const result = settled ? await ask(ports, route, identified, token) : notAsked(token)
  progress.storeMs += performance.now() - askedAt
  switch (result.kind) {
    case 'existing':
      return result
    case 'limited': {
      const more = { retryAfter: Math.ceil(result.wait / 1000), instance: id }
      return refuse('rate_limited', 'rate_limited', 'too many new keys; nothing was executed', more)
    }
    case 'expired': {
      const detail = 'the issued key has expired: it claims nothing any more'
      return refuse('expired', 'idempotency_key_expired', detail, { status: 412, instance: id })
    }
    case 'corrupt':
      ports.observer.trouble('a stored record cannot be read; it is refused and left as it is', {
        route: route.name,
        record: shortId(id),
        error: String(result.error),
      })
      return storeUnavailable(ports, request, id, 'the stored record cannot be read by this version')
    case 'unavailable': {
      const { attempt } = result
      const unclaimed = { attempt, operation, before: null, createdAt: 0, askedAt, unclaimed: result }
      const execution = newExecution(id, route, unclaimed)
      const bypass =
        route.onStoreUnavailable === 'bypass' &&
        identified.mayClaim &&
        !ports.settler.full &&
        !request.clientGone()
      // Others may have come further while the store was asked.
      const own = knownHere(ports, route, identified, bypass)
      if (bypass && own === null) {
        ports.observer.claimed(route.name, 'error')
        return begin(ports, execution)
      }
      if (result.lost) ports.settler.withdraw(execution, result)
      if (own !== null) return { kind: 'existing', existing: own }
      const detail = 'the store does not answer; nothing was executed for this request'
      return storeUnavailable(ports, request, id, detail, result.error.message)
    }
    case 'granted': {
      const { execution, lapsed } = result
      const { before } = execution
      // Whatever the store says: what this replica knows to be under way, or to have ended while it asked, is not done twice.
      const other = ports.running.get(id) ?? earlier
      const own = other === undefined ? null : existing(runningRecord(other), asked, route)
      if (other !== undefined && own !== null) {
        await yieldTo(ports, other, result)
        return { kind: 'existing', existing: own }
      }
      if (lapsed) ports.observer.leaseExpired(route.name)
      ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
      if (!request.clientGone()) return begin(ports, execution)
      const reason = 'the client left before the request was sent'
      const { state } = await finish(ports, execution, { kind: 'not_executed', reason }, () => {})
      return nobody({ before, after: state })
    }
  }
}

function newExecution(
  id: RecordId,
  route: RoutePolicy,
  of: Omit<Execution, 'kind' | 'id' | 'route' | 'ended'>,
): Execution {
  return { kind: 'execution', id, route, ...of, ended: null }
}

function begin({ running, observer }: Ports, execution: Execution): Execution {
  running.set(execution.id, execution)
  observer.began(execution)
  return execution
}

/**
 * Where not every key may make a record (contract §4 `issuedOnly`, §10 `newKeys`): looks first whether there is one, and only
 * if not, whether it may be made.
 */
function claimWithinLimits(
  ports: Ports,
  route: RoutePolicy,
  identified: Identified,
  token: Buffer,
): Promise<ClaimResult> {
  const { records, store, namespace } = ports
  const { id, asked, caller, mayClaim } = identified
  const find = async (): Promise<ClaimResult | Exclude<Decision, Existing>> => {
    const reply = await records.get(id)
    if (reply.kind === 'corrupt') return reply
    if (reply.kind === 'unavailable') return notAsked(token)
    const decision: Decision =
      reply.record === null ? { kind: 'gone' } : decide(reply.record, asked, route, reply.now)
    return isExisting(decision) ? { kind: 'existing', existing: decision } : decision
  }
  // Duplicates of one new key spend one unit, not one each: each looks when the one before it has claimed.
  return ports.turns.run(id, async () => {
    const found = await find()
    if (found.kind !== 'gone' && found.kind !== 'take_over') return found
    if (!mayClaim) return { kind: 'expired' }
    const { newKeys } = route.limits
    if (newKeys === null || found.kind === 'take_over') return claimRecord(ports, route, identified, token)
    const bucket = newKeysBucket(namespace, route, caller)
    const wait = await store.limits.take(bucket, newKeys, 1).catch(nullIfUnavailable)
    if (wait === null) return notAsked(token)
    if (wait > 0) {
      // Another replica may have claimed it meanwhile: then it is not new.
      const again = await find()
      return again.kind === 'gone' || again.kind === 'take_over' ? { kind: 'limited', wait } : again
    }
    const result = await claimRecord(ports, route, identified, token)
    if (result.kind !== 'granted' || result.execution.before !== 'absent')
      // Where the store loses it, the caller has one key less, no more.
      void store.limits.take(bucket, newKeys, -1).catch(() => {})
    return result
  })
}

/** No claim was sent: the store does not even take what this replica has to tell it first. */
function notAsked(token: Buffer): Unclaimed {
  const error = new StoreUnavailable('the store does not answer', false)
  return { kind: 'unavailable', error, attempt: { fence: 0, token, attempts: 1 }, lost: false, over: null }
}

/**
 * Claims the record, or says what it found. One round trip if the key is new or finished. A claim whose reply was lost is
 * asked for once more: the store then shows our own token, and the attempt goes on (contract §3.4).
 */
async function claimRecord(
  { records, pause }: Ports,
  route: RoutePolicy,
  { id, operation, asked }: Identified,
  token: Buffer,
): Promise<ClaimResult> {
  const askedAt = performance.now()
  const spans = claimSpans(route)
  const fresh: Attempted = { attempt: { fence: 0, token, attempts: 1 }, operation, before: 'absent' }
  let latest = fresh
  let over: IdempotencyRecord | null = null
  let lost = false
  let error: Error | null = null
  let reconnects = 0
  const granted = ({ version, fence, createdAt }: Stamp, attempted: Attempted): Granted => {
    const attempt = { ...attempted.attempt, fence }
    const lapsed = attempted.before === 'unknown' && over?.state === 'in_progress'
    const claimed = { ...attempted, attempt, createdAt, askedAt, unclaimed: null }
    return { kind: 'granted', version, lapsed, execution: newExecution(id, route, claimed) }
  }
  for (let round = 0; round < MAX_ROUNDS; round++) {
    const draft = claimDraft(operation, fresh.attempt)
    let reply: ClaimReply | TakeOverReply = await records.claim(id, draft, spans)
    if (reply.kind === 'claimed')
      // Recognised: what the round before asked for had come through. Otherwise the record has gone meanwhile.
      return granted(reply.stamp, reply.recognised ? latest : fresh)
    if (reply.kind === 'exists') {
      const decision = decide(reply.record, asked, route, reply.now)
      if (isExisting(decision)) return { kind: 'existing', existing: decision }
      if (decision.kind === 'gone') continue
      over = decision.from
      latest = {
        attempt: { fence: over.fence + 1, token, attempts: over.attempts + 1 },
        // The attempt that fell silent may have been executed, too: the upstream must have been sent these identifiers by both.
        operation: decision.read === 'unknown' ? identifiersSentByBoth(over, operation) : operation,
        before: decision.read,
      }
      reply = await records.takeOver(id, over, claimDraft(latest.operation, latest.attempt), spans)
      if (reply.kind === 'claimed') return granted(reply.stamp, latest)
      if (reply.kind === 'lost') continue
    }
    if (reply.kind === 'corrupt') return reply
    const { maybeApplied } = reply.error
    error = reply.error
    // A second loss ends it. A store that cannot be asked any more is often back in a moment: a connection broke.
    const wait = maybeApplied ? (lost ? undefined : 0) : lost ? RECONNECT_PAUSES[reconnects++] : undefined
    lost ||= maybeApplied
    if (wait === undefined) break
    await pause(wait)
  }
  // Made only here: an error takes its stack, which costs more than the rest of a claim.
  error ??= new Error('other claims kept moving the record on')
  return { kind: 'unavailable', error, attempt: { ...latest.attempt, fence: 0 }, lost, over }
}

/** A claim came through over an execution that this replica knows of: that one gets the record back. */
async function yieldTo(ports: Ports, other: Execution, { execution, version }: Granted): Promise<void> {
  const given = await giveBack(ports.records, version, other)
  ports.observer.trouble(
    'the store forgot a run of this replica; the retry that claimed its record executes nothing',
    {
      route: execution.route.name,
      record: shortId(execution.id),
      fence: other.attempt.fence,
      found: execution.before,
    },
  )
  if (given) return
  const reason = 'claimed over a run whose record the store had lost'
  await ports.settler.settle(execution, { kind: 'unknown', reason, status: null }, () => {})
}

/**
 * The store had lost the record, or gone back to an older state of it: writes it as the execution's again, so that retries
 * find its outcome. False: the store did not take it.
 */
async function giveBack(records: Records, version: number, execution: Execution): Promise<boolean> {
  const { id, route, operation, attempt, createdAt, ended } = execution
  const [draft, spans]: [RecordDraft, Spans] =
    ended === null
      ? [claimDraft(operation, attempt), claimSpans(route)]
      : [outcomeDraft(operation, attempt, ended, createdAt), outcomeSpans(ended, route)]
  const reply = await records.replace(id, version, draft, spans)
  if (reply?.kind !== 'written') return reply?.kind !== 'unavailable'
  // If it ended meanwhile, its own write may have met the claim and been refused.
  return execution.ended === ended || giveBack(records, reply.stamp.version, execution)
}

/**
 * What answers the request on this replica, whatever the store says: an outcome that is not settled yet, or an execution
 * without a claim; where the store cannot be asked (`alone`) any execution.
 */
function knownHere(
  { settler, running }: Ports,
  route: RoutePolicy,
  { id, asked }: Identified,
  alone: boolean,
): Existing | null {
  const held = existing(settler.held(id), asked, route)
  const execution = running.get(id)
  if (held !== null || execution === undefined) return held
  return alone || execution.attempt.fence === 0 ? existing(runningRecord(execution), asked, route) : null
}

/** What `record` answers; null if there is none, or it may be claimed over. For records without the store's clock. */
function existing(
  record: IdempotencyRecord | null,
  asked: RequestDigests,
  route: RoutePolicy,
): Existing | null {
  const decision = record === null ? null : decide(record, asked, route, 0)
  return decision !== null && isExisting(decision) ? decision : null
}

export function isExisting(decision: Decision): decision is Existing {
  return decision.kind !== 'take_over' && decision.kind !== 'gone'
}
