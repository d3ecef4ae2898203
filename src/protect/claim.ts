import { type Decision, decide, type RequestDigests } from '../core/decide.ts'
import { newKeysBucket, shortId } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Attempt, IdempotencyRecord, Millis, RecordDraft, RecordId, Spans } from '../core/record.ts'
import { claimDraft, claimSpans, outcomeDraft, outcomeSpans, runningRecord } from '../core/settle.ts'
import { after, inSteps, type MaybePromise } from '../runtime/scheduling.ts'
import { type ClaimReply, nullIfUnavailable, type ReadReply, type Records } from '../store/records.ts'
import { InGrace, OutOfPhase, Unreplicated } from '../store/register.ts'
import { nobody, refuse, storeUnavailable } from './answers.ts'
import {
  type Began,
  type ClaimContents,
  type ClaimDecision,
  type Claiming,
  contest,
  type Granted,
  granted,
  isExisting,
  Losses,
  newExecution,
} from './contest.ts'
import { finish, NOTHING_HELD } from './finish.ts'
import type { Identified } from './identify.ts'
import type { WalkPorts } from './ports.ts'
import type { Answer, Execution, Existing, Progress, Unclaimed } from './request.ts'

/** The record answers, or this request executes, or the answer says why neither is possible. */
export type Claim = { readonly kind: 'existing'; readonly existing: Existing } | Execution | Answer

/** Claims the record, unless an existing one answers the request. */
export function claim(ports: WalkPorts, request: Claiming, identified: Identified): Claim | Promise<Claim> {
  const { id } = identified
  const requestedAt = performance.now()
  const known = knownHere(ports, request.route, identified, requestedAt, false)
  if (known !== null) return answeredHere(ports, id, known)
  const began: Began = { requestedAt, earlier: findRunning(ports, id) }
  if (!ports.settler.holds(id)) return ask(ports, request, identified, began, true)
  // The store must learn of outcomes held here before anybody claims.
  return ports.settler.flush(id).then((settled) => ask(ports, request, identified, began, settled))
}

const UNFIT = {
  unfit: {
    detail:
      'the store may evict unexpired records, or does not say that it keeps them, which profile strict does not accept (store.acceptRisk)',
    cause: 'the store is unfit for profile strict',
  },
  'not known yet': {
    detail: 'the store does not answer, or has not been checked yet, which profile strict requires',
    cause: 'the store has not been checked yet',
  },
} as const

function ask(
  ports: WalkPorts,
  request: Claiming,
  identified: Identified,
  began: Began,
  settled: boolean,
): Claim | Promise<Claim> {
  const { route } = request
  const fitness = route.profile === 'strict' ? ports.storeFitness() : 'fit'
  if (fitness !== 'fit') {
    const { detail, cause } = UNFIT[fitness]
    return storeUnavailable(ports, request, identified.id, detail, cause)
  }
  const token = ports.newToken()
  if (!settled) return answered(ports, request, identified, began, notAsked(token))
  const looksFirst = route.limits.newKeys !== null || !identified.mayClaim || identified.asked.isLong
  const claiming = (looksFirst ? lookAndClaim : claimRecord)(ports, request, identified, token, began)
  return after(claiming, (result) => answered(ports, request, identified, began, result))
}

/** Acts on the store's answer to a claim. */
function answered(
  ports: WalkPorts,
  request: Claiming,
  identified: Identified,
  began: Began,
  result: ClaimDecision,
): Claim | Promise<Claim> {
  const { route, progress } = request
  const { id } = identified
  progress.storeMs += performance.now() - began.requestedAt
  switch (result.kind) {
    case 'existing':
      return result
    case 'limited': {
      const { wait, rate } = result
      const detail = `too many new keys: at most ${rate.count} in ${rate.per / 1000} s; nothing was executed`
      const more = { retryAfter: Math.ceil(wait / 1000), instance: id }
      return refuse('rate_limited', 'rate_limited', detail, more)
    }
    case 'expired': {
      const detail = 'the issued key has expired: it can no longer make a claim'
      return refuse('expired', 'idempotency_key_expired', detail, { status: 412, instance: id })
    }
    case 'corrupt':
      ports.observer.trouble('a stored record cannot be read; it is refused and left as it is', {
        route: route.name,
        record: shortId(id),
        error: String(result.error),
      })
      return storeUnavailable(ports, request, id, 'the stored record cannot be read by this version')
    case 'unavailable':
      return notClaimed(ports, request, identified, began, result)
    case 'granted':
      return claimed(ports, request, identified, began, result)
  }
}

/** As far as known, the store holds no claim of this request: executes without one if the route allows it, else refuses. */
function notClaimed(
  ports: WalkPorts,
  request: Claiming,
  identified: Identified,
  { requestedAt }: Began,
  result: Unclaimed,
): Claim | Promise<Claim> {
  const { route, progress } = request
  const { id } = identified
  // Only if needed: computing the fingerprint of a long body takes time.
  const unclaimed = (): Execution => {
    const claimed = { attempt: result.attempt, operation: identified.operation(), before: null }
    return newExecution(id, route, claimed, 0, requestedAt, result)
  }
  // In shadow mode it has already been sent.
  const error = request.onGone === null ? null : result.error
  const held = error instanceof InGrace
  const unreplicated = error instanceof Unreplicated
  const bypass =
    route.onStoreUnavailable === 'bypass' &&
    !held &&
    !unreplicated &&
    !(error instanceof OutOfPhase) &&
    identified.mayClaim &&
    !ports.settler.full &&
    !request.clientGone()
  // Other requests may have made progress while the store was asked.
  const own = knownHere(ports, route, identified, requestedAt, bypass)
  if (bypass && own === null) {
    ports.observer.claimed(route.name, 'error')
    return begin(ports, progress, unclaimed())
  }
  const withdrawn = result.lost ? ports.settler.withdraw(unclaimed(), result) : undefined
  if (own !== null) return answeredHere(ports, id, own)
  if (held && request.clientGone()) return nobody()
  const why = held
    ? 'the store may just have lost claims, and grants no new ones yet'
    : unreplicated
      ? 'the claim did not reach the replicas that store.wait requires'
      : error instanceof OutOfPhase
        ? 'this replica does not execute new keys beside replicas of another configuration'
        : 'the store does not answer'
  const detail = `${why}; nothing was executed for this request`
  // The retry may arrive at once, at another replica.
  return after(withdrawn, () => storeUnavailable(ports, request, id, detail, result.error.message))
}

/** The store holds the claim: executes, unless this replica knows of another execution. */
function claimed(
  ports: WalkPorts,
  request: Claiming,
  { id, asked }: Identified,
  { requestedAt, earlier }: Began,
  result: Granted,
): Claim | Promise<Claim> {
  const { route, progress } = request
  const { execution, lapsed } = result
  const { before } = execution
  // Regardless of the store: a request that this replica knows to be running, or to have ended meanwhile, is not executed twice.
  const other = findRunning(ports, id) ?? earlier
  if (other !== undefined) {
    const own = existing(runningRecord(other), asked, route)
    if (own !== null) return yieldTo(ports, other, result).then(() => answeredHere(ports, id, own))
  }
  // An attempt without a claim may have begun and ended here while the store was asked.
  const held = existing(ports.settler.held(id, requestedAt), asked, route)
  if (held !== null)
    return after(ports.settler.settleAsHeld(execution, requestedAt), () => answeredHere(ports, id, held))
  if (lapsed) ports.observer.leaseExpired(route.name)
  ports.observer.claimed(route.name, before === 'absent' ? 'created' : 'failed_retry')
  if (!request.clientGone()) return begin(ports, progress, execution)
  const ended = { kind: 'not_executed', reason: 'the client left before the request was sent' } as const
  return after(finish(ports, progress, execution, ended, NOTHING_HELD), ({ state }) =>
    nobody({ before, after: state }),
  )
}

/** Facts that only this replica knows are disclosed once they are on disk, just as for its own client. */
function answeredHere({ settler }: WalkPorts, id: RecordId, existing: Existing): MaybePromise<Claim> {
  return after(settler.onDisk(id), () => ({ kind: 'existing', existing }))
}

function begin({ running, observer }: WalkPorts, progress: Progress, execution: Execution): Execution {
  running.set(execution.id, execution)
  progress.execution = execution
  progress.state = 'in_progress'
  observer.began(execution)
  return execution
}

/**
 * For routes where not every key may create a record (contract §4 `issuedOnly`, §10 `newKeys`): looks for a record first, and checks the
 * permission to create one only if there is none. Likewise for a long body: a retry with the same bytes needs no fingerprint.
 */
function lookAndClaim(
  ports: WalkPorts,
  request: Claiming,
  identified: Identified,
  token: Buffer,
  began: Began,
): Promise<ClaimDecision> {
  const { store, namespace } = ports
  const { route } = request
  const { id, asked, caller, mayClaim } = identified
  const find = async (): Promise<ClaimDecision | Exclude<Decision, Existing>> => {
    const reply = await look(ports, id)
    if (reply.kind === 'corrupt') return reply
    if (reply.kind === 'unavailable') return notAsked(token)
    const { record, now } = reply
    if (record === null) return { kind: 'gone' }
    if (asked.isLong && !asked.isSameBytes(record)) await inSteps(asked.finish())
    const decision = decide(record, asked, route, now)
    return isExisting(decision) ? { kind: 'existing', existing: decision } : decision
  }
  const claimIt = async (): Promise<ClaimDecision> => {
    if (asked.isLong) await inSteps(asked.finish())
    return claimRecord(ports, request, identified, token, began)
  }
  // Duplicates of one new key spend one unit, not one each: each reads the record after the previous one has claimed.
  return ports.locks.run(id, async () => {
    const found = await find()
    if (found.kind !== 'gone' && found.kind !== 'take_over') return found
    if (!mayClaim) return { kind: 'expired' }
    const { newKeys } = route.limits
    if (newKeys === null || found.kind === 'take_over') return claimIt()
    const bucket = newKeysBucket(namespace, route, caller)
    const wait = await store.limits.take(bucket, newKeys, 1).catch(nullIfUnavailable)
    if (wait === null) return notAsked(token)
    if (wait > 0) {
      // Another replica may have claimed it meanwhile: then it is not new.
      const again = await find()
      return again.kind === 'gone' || again.kind === 'take_over'
        ? { kind: 'limited', wait, rate: newKeys }
        : again
    }
    const result = await claimIt()
    if (result.kind !== 'granted' || result.execution.before !== 'absent')
      // If the store loses it, the caller merely has one key less.
      void store.limits.take(bucket, newKeys, -1).catch(() => {})
    return result
  })
}

/** Reads the record, retrying as a claim does. */
async function look(ports: WalkPorts, id: RecordId, losses = new Losses()): Promise<ReadReply> {
  const reply = await ports.records.get(id)
  const wait = reply.kind === 'unavailable' ? losses.pauseAfter(reply.error) : null
  if (wait === null) return reply
  await ports.pause(wait)
  return look(ports, id, losses)
}

/** No claim was sent: the store does not even accept the outcomes that this replica must write first. */
function notAsked(token: Buffer): Unclaimed {
  const error = new Error('the store does not answer')
  return { kind: 'unavailable', error, attempt: { fence: 0, token, attempts: 1 }, lost: false, over: null }
}

/** Claims the record, or reports the existing one. One round trip if the key is new or finished. */
function claimRecord(
  ports: WalkPorts,
  request: Claiming,
  identified: Identified,
  token: Buffer,
  began: Began,
): MaybePromise<ClaimDecision> {
  const { id, asked } = identified
  const { route } = request
  const requestedAt = performance.now()
  const attempt: Attempt = { fence: 0, token, attempts: 1 }
  const fresh: ClaimContents = { attempt, operation: identified.operation(), before: 'absent' }
  const claiming = ports.records.claim(id, claimDraft(fresh.operation, attempt), claimSpans(route))
  return after<ClaimReply, ClaimDecision>(claiming, (reply) => {
    if (reply.kind === 'claimed' && !reply.recognised)
      return granted(id, route, fresh, reply.stamp, requestedAt, null)
    const decision = reply.kind === 'exists' ? decide(reply.record, asked, route, reply.now) : null
    return decision !== null && isExisting(decision)
      ? { kind: 'existing', existing: decision }
      : contest(ports, request, identified, fresh, began, requestedAt, reply)
  })
}

/** A claim succeeded while this replica was executing the record: gives the record back to that execution. */
async function yieldTo(ports: WalkPorts, other: Execution, { execution, version }: Granted): Promise<void> {
  const given = await giveBack(ports.records, version, other)
  ports.observer.trouble(
    'the store lost a claim of this replica; the retry that claimed the record executes nothing',
    {
      route: execution.route.name,
      record: shortId(execution.id),
      fence: other.attempt.fence,
      found: execution.before,
    },
  )
  if (given) return
  const reason = 'claimed again after the store had lost the record of a running request'
  await ports.settler.settle(execution, { kind: 'unknown', reason, status: null }, NOTHING_HELD)
}

/**
 * The store had lost the record, or reverted to an older state: rewrites it for the execution, so that retries find its outcome.
 * False: the store did not accept it.
 */
async function giveBack(records: Records, version: number, execution: Execution): Promise<boolean> {
  const { id, route, operation, attempt, createdAt, ended } = execution
  const [draft, spans]: [RecordDraft, Spans] =
    ended === null
      ? [claimDraft(operation, attempt), claimSpans(route)]
      : [outcomeDraft(operation, attempt, ended, createdAt), outcomeSpans(ended, route)]
  const reply = await records.replace(id, version, draft, spans)
  if (reply?.kind !== 'written') return reply?.kind !== 'unavailable'
  // If it has ended meanwhile, its own write may have met the claim and been refused.
  return execution.ended === ended || giveBack(records, reply.stamp.version, execution)
}

/**
 * The record with which this replica answers regardless of the store: an unsettled outcome, or an execution without a claim; if the store
 * is unreachable (`alone`), any execution.
 */
function knownHere(
  ports: WalkPorts,
  route: RoutePolicy,
  { id, asked }: Identified,
  since: Millis,
  alone: boolean,
): Existing | null {
  const held = existing(ports.settler.held(id, since), asked, route)
  const execution = findRunning(ports, id)
  if (held !== null || execution === undefined) return held
  return alone || execution.attempt.fence === 0 ? existing(runningRecord(execution), asked, route) : null
}

/** The execution of this record on this replica. It is marked as shared: others may read its outcome from now on. */
function findRunning({ running }: WalkPorts, id: RecordId): Execution | undefined {
  const execution = running.get(id)
  if (execution !== undefined) execution.isShared = true
  return execution
}

/** How `record` answers; null if there is none, or it may be taken over. For records without the store's time. */
function existing(
  record: IdempotencyRecord | null,
  asked: RequestDigests,
  route: RoutePolicy,
): Existing | null {
  const decision = record === null ? null : decide(record, asked, route, 0)
  return decision !== null && isExisting(decision) ? decision : null
}
