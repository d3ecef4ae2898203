import { type Decision, decide } from '../core/decide.ts'
import { isBornSince } from '../core/key.ts'
import type { Rate, RoutePolicy } from '../core/policy.ts'
import { identifiersSentByBoth } from '../core/reconcile/identifiers.ts'
import type { IdempotencyRecord, Millis, RecordId } from '../core/record.ts'
import { claimDraft, claimSpans } from '../core/settle.ts'
import type { ClaimReply, TakeOverReply } from '../store/records.ts'
import {
  type CorruptRecord,
  InGrace,
  type Stamp,
  type StoreUnavailable,
  Unreplicated,
} from '../store/register.ts'
import type { Identified } from './identify.ts'
import type { WalkPorts } from './ports.ts'
import type { Execution, Existing, ProtectedRequest, Unclaimed } from './request.ts'

/** Rounds before a claim gives up; each lost round means that another request changed the record. */
const MAX_ROUNDS = 16

/** Pauses after a lost connection, before the claim is repeated. */
const RECONNECT_PAUSES: readonly Millis[] = [50, 100, 200]

/** The claim came through. */
export interface Granted {
  readonly kind: 'granted'
  readonly execution: Execution
  readonly version: number
  /** It replaced a record whose lease had lapsed but was not yet recorded as lapsed. */
  readonly lapsed: boolean
}

/** The contents of a claim. */
export type ClaimContents = Pick<Execution, 'attempt' | 'operation' | 'before'>

/** The store's reply to a claim. */
export type ClaimDecision =
  | Granted
  | { readonly kind: 'existing'; readonly existing: Existing }
  | Unclaimed
  | { readonly kind: 'corrupt'; readonly error: CorruptRecord }
  /** The caller has used up its rate of new keys. */
  | { readonly kind: 'limited'; readonly wait: Millis; readonly rate: Rate }
  /** The issued key has expired, and it has no record. */
  | { readonly kind: 'expired' }

/** The part of a request that a claim needs. */
export type Claiming = Pick<ProtectedRequest, 'route' | 'progress' | 'clientGone'> & {
  /** Null in shadow mode: the claim never waits, and the request is sent in any case. */
  readonly onGone: ProtectedRequest['onGone'] | null
}

/** The situation when a claim began. `earlier`: this replica's execution at that time. */
export interface Began {
  readonly requestedAt: Millis
  readonly earlier: Execution | undefined
}

export function newExecution(
  id: RecordId,
  route: RoutePolicy,
  { operation, attempt, before }: ClaimContents,
  createdAt: Millis,
  requestedAt: Millis,
  unclaimed: Unclaimed | null,
): Execution {
  return {
    kind: 'execution',
    id,
    route,
    operation,
    attempt,
    before,
    createdAt,
    requestedAt,
    unclaimed,
    ended: null,
    isShared: false,
  }
}

/** The pauses before asking the store again after a lost reply. */
export class Losses {
  /** Whether a reply was lost. */
  any = false
  #reconnects = 0

  /** Null: give up, after a second lost reply. If the store is unreachable, often only a connection broke, and it is back in a moment. */
  pauseAfter(error: StoreUnavailable): Millis | null {
    const { maybeApplied } = error
    if (error instanceof Unreplicated) {
      // The claim is certainly in the store.
      this.any = true
      return null
    }
    if (!this.any) {
      this.any = maybeApplied
      return maybeApplied ? 0 : null
    }
    return maybeApplied ? null : (RECONNECT_PAUSES[this.#reconnects++] ?? null)
  }
}

export function granted(
  id: RecordId,
  route: RoutePolicy,
  { attempt: { token, attempts }, operation, before }: ClaimContents,
  { version, fence, createdAt }: Stamp,
  requestedAt: Millis,
  over: IdempotencyRecord | null,
): Granted {
  const claimed = { attempt: { fence, token, attempts }, operation, before }
  return {
    kind: 'granted',
    version,
    lapsed: before === 'unknown' && over?.state === 'in_progress',
    execution: newExecution(id, route, claimed, createdAt, requestedAt, null),
  }
}

/**
 * Continues a claim that the first reply did not decide: the record may be taken over, others keep changing it, a reply was lost, or the
 * store is in the grace period after a failover. A claim whose reply was lost is repeated once: if the store then returns our own token, the
 * attempt goes on (contract §3.4).
 */
export async function contest(
  { records, pause, waiters, holdAtMost }: WalkPorts,
  request: Claiming,
  { id, asked, key, bornAt }: Identified,
  fresh: ClaimContents,
  began: Began,
  firstRequestedAt: Millis,
  first: ClaimReply,
): Promise<ClaimDecision> {
  const { route, progress } = request
  const spans = claimSpans(route)
  // Counted from the request's first try: it may already have waited behind others with its key.
  const heldUntil = began.requestedAt + holdAtMost - progress.heldMs
  let requestedAt = firstRequestedAt
  let entry: 'claim' | 'fresh' = 'claim'
  let latest = fresh
  let over: IdempotencyRecord | null = null
  let error: Error | null = null
  const losses = new Losses()
  for (let round = 0; round < MAX_ROUNDS; round++) {
    let reply: ClaimReply | TakeOverReply =
      round === 0 ? first : await records.claim(id, claimDraft(fresh.operation, fresh.attempt), spans, entry)
    if (reply.kind === 'claimed')
      // Recognised: the previous round succeeded after all. Otherwise the record has gone meanwhile.
      return granted(id, route, reply.recognised ? latest : fresh, reply.stamp, requestedAt, over)
    if (reply.kind === 'exists') {
      const decision = decide(reply.record, asked, route, reply.now)
      if (isExisting(decision)) return { kind: 'existing', existing: decision }
      if (decision.kind === 'gone') continue
      over = decision.from
      latest = {
        attempt: { ...fresh.attempt, attempts: over.attempts + 1 },
        // The attempt that fell silent may have executed too, so record only identifiers that both attempts sent.
        operation:
          decision.read === 'unknown' ? identifiersSentByBoth(over, fresh.operation) : fresh.operation,
        before: decision.read,
      }
      reply = await records.takeOver(id, over, claimDraft(latest.operation, latest.attempt), spans)
      if (reply.kind === 'claimed') return granted(id, route, latest, reply.stamp, requestedAt, over)
      if (reply.kind === 'lost') continue
    }
    if (reply.kind === 'corrupt') return reply
    error = reply.error
    if (error instanceof InGrace) {
      if (entry === 'claim' && isBornSince(error, key, bornAt)) entry = 'fresh'
      else if (!(await outlast(waiters, request, Math.min(error.left, heldUntil - performance.now())))) break
      // The lease starts with this request to the store, unless it repeats an earlier one.
      if (!losses.any) requestedAt = performance.now()
      continue
    }
    const wait = losses.pauseAfter(reply.error)
    if (wait === null) break
    await pause(wait)
  }
  // Created only here: capturing a stack costs more than the rest of a claim.
  error ??= new Error('other claims kept changing the record')
  return { kind: 'unavailable', error, attempt: latest.attempt, lost: losses.any, over }
}

/** False: it may not wait, has waited long enough, or the client has left. */
async function outlast(waiters: WalkPorts['waiters'], request: Claiming, time: Millis): Promise<boolean> {
  const { onGone, progress } = request
  if (time <= 0 || onGone === null || request.clientGone()) return false
  const since = performance.now()
  const lasted = await waiters.outlast(time, (left) => onGone.call(request, left))
  progress.heldMs += performance.now() - since
  return lasted
}

export function isExisting(decision: Decision): decision is Existing {
  return decision.kind !== 'take_over' && decision.kind !== 'gone'
}
