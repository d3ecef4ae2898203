import { decide } from '../core/decide.ts'
import { digestsAfter } from '../core/fingerprint.ts'
import { shortId } from '../core/identity.ts'
import {
  type CompletedResponse,
  type IdempotencyRecord,
  type Millis,
  type Outcome,
  type RecordId,
  type State,
  withoutBody,
} from '../core/record.ts'
import {
  heldRecord,
  isRecorded,
  type OutcomeDraft,
  type PendingOutcome,
  pendingOutcome,
  remainingSpans,
} from '../core/settle.ts'
import { after, type MaybePromise, within } from '../runtime/scheduling.ts'
import type { Records, SettleReply, StoreTrouble, Unavailable } from '../store/records.ts'
import { Declined, Unreplicated } from '../store/register.ts'
import type { KeptOutcome, LeftOutcome, Outbox } from '../store/spool/outbox.ts'
import type { CompletionResult } from './outcomes.ts'
import type { Execution, Observer, Unclaimed } from './request.ts'

/** Pauses between retries of a write that the store did not accept. */
const RETRY_FIRST: Millis = 100
/** The pause if the store refuses writes, for example because it is full: every write is tried. */
const RETRY_REFUSED: Millis = 5_000
/** The pause if it cannot be reached: one write per round. It may be back before the breaker has opened, and then nothing reports that. */
const RETRY_UNREACHED: Millis = 500
/** About 1 KiB each without bodies, which are counted in `limits.buffered`. */
const MAX_HELD = 10_000
const BYTES_WITHOUT_BODY = 1024
/** Far more than there are claims waiting for a reply. */
const MAX_LATELY = 1000
/**
 * How long an answer waits for its outcome to reach the disk: much longer than a healthy disk needs, but no longer than a hanging store
 * would take.
 */
const SPOOL_TIMEOUT: Millis = 500

/**
 * Size of a spool that can hold everything: as much as memory may hold, and as much again for entries already written but not yet
 * dropped with their segment.
 */
export function spoolRoom(buffered: number): number {
  return 2 * (buffered + MAX_HELD * BYTES_WITHOUT_BODY)
}

const CLAIMED = { claimed: true }

/** The result of settling an outcome. */
export interface Settled {
  readonly kind: 'settled'
  readonly state: State
  /** Until when the response is kept, by the store's clock; null: it is not kept, or not stored yet. */
  readonly expiresAt: Millis | null
  /** The record that this outcome left, for waiting requests; null: look it up. */
  readonly left: OutcomeDraft | null
  /** The answer to this attempt that the store already had; it takes precedence over the upstream's (contract §7). */
  readonly recorded: CompletedResponse | null
}

/** An outcome that the store has not accepted yet. */
interface HeldOutcome {
  readonly pending: PendingOutcome
  readonly release: () => void
  /** Deadline by this process's monotonic clock. */
  readonly giveUpAt: Millis
  /** Its entry on disk; null: held in memory only. */
  readonly kept: KeptOutcome | null
  /** Resolves once it is on disk; null: it already is, or was given up. */
  keeping: Promise<unknown> | null
  /** The write in progress: one at a time. */
  trying: Promise<Unavailable | null> | null
}

/**
 * Writes outcomes where §2 accepts them. Holds the ones that the store does not accept, here and in the spool if there is one: retries them
 * with the same token for as long as the claim may stay in the store (`unresolvedTtl`), and answers from them meanwhile (contract §2, §7).
 */
export class Settler {
  readonly #records: Records
  readonly #observer: Observer
  readonly #outbox: Outbox | null
  /** Oldest first; a record has several if more than one of its claims lost its reply. */
  readonly #held = new Map<RecordId, readonly HeldOutcome[]>()
  /** Outcomes of attempts without a claim that were held here and then stored or refused, and when; without bodies. */
  readonly #lately = new Map<RecordId, readonly [PendingOutcome, Millis]>()
  #size = 0
  #timer: NodeJS.Timeout | null = null
  #pause: Millis = RETRY_FIRST
  #isReached = true
  #flushing: Promise<void> | null = null

  constructor(records: Records, observer: Observer, outbox: Outbox | null) {
    this.#records = records
    this.#observer = observer
    this.#outbox = outbox
  }

  get size(): number {
    return this.#size
  }

  get full(): boolean {
    return this.#size >= MAX_HELD
  }

  /** Whether an outcome or withdrawal of the record is held. */
  holds(id: RecordId): boolean {
    return this.#held.has(id)
  }

  /**
   * The record according to the outcome held here; of several, the most informative one. For a claim that began at `since`, also one held in
   * between: the store may have refused it because of this very claim, whose reply was on its way.
   */
  held(id: RecordId, since: Millis = Number.POSITIVE_INFINITY): IdempotencyRecord | null {
    const most = this.#most(id, since)
    return most === undefined ? null : heldRecord(most.draft)
  }

  #most(id: RecordId, since: Millis): PendingOutcome | undefined {
    const lately = this.#lately.get(id)
    if (lately !== undefined && lately[1] >= since) return lately[0]
    const all = this.#held.get(id)
    if (all === undefined) return undefined
    const found = all.map(({ pending }) => pending).filter(({ withdrawn }) => !withdrawn)
    const by = (state: OutcomeDraft['state']) => found.find(({ draft }) => draft.state === state)
    return by('completed') ?? by('unknown') ?? by('failed_retryable')
  }

  /** Resolves once the record's held outcomes are on disk, or given up: no answer may depend on this process alone. */
  onDisk(id: RecordId): MaybePromise<unknown> {
    const keeping = (this.#held.get(id) ?? []).flatMap((held) => held.keeping ?? [])
    return keeping.length === 0 ? null : Promise.all(keeping)
  }

  /** Takes over an earlier process's outcomes from the spool. `hold` reserves a body's bytes and returns a function that releases them. */
  restore(left: readonly LeftOutcome[], hold: (bytes: number) => () => void): void {
    for (const { unsettled, kept } of left) this.#add(unsettled, kept, null, hold(bodyBytes(unsettled.draft)))
  }

  /**
   * Writes the outcome now, or holds it; without a claim, holds it until the store is back. `release` returns the body's bytes once they
   * are no longer needed here. Never fails: the client's answer does not depend on it.
   */
  settle(execution: Execution, outcome: Outcome, release: () => void): MaybePromise<Settled> {
    const { unclaimed } = execution
    if (unclaimed !== null) {
      const pending = pendingOutcome(execution, outcome, { over: unclaimed.over?.version ?? null })
      return this.#hold(pending, unclaimed.error, release)
    }
    return this.#writeOrHold(pendingOutcome(execution, outcome, CLAIMED), release)
  }

  /** Ends a claim with the outcome that {@link held} has just found: another request was executed here without a claim. */
  settleAsHeld({ id, attempt, createdAt }: Execution, since: Millis): MaybePromise<unknown> {
    const most = this.#most(id, since) as PendingOutcome
    return this.#writeOrHold({ ...most, draft: { ...most.draft, ...attempt, createdAt } }, () => {})
  }

  /**
   * Withdraws a claim whose reply was lost, or that has not reached its replicas: writes `failed_retryable` under its token as soon as
   * possible. Resolves once that is written or held.
   */
  withdraw(execution: Execution, { over, error }: Unclaimed): MaybePromise<unknown> {
    const isThere = error instanceof Unreplicated
    const why = isThere ? 'its replicas did not have it' : 'its reply was lost'
    const outcome: Outcome = { kind: 'not_executed', reason: `the claim was withdrawn: ${why}` }
    const pending = pendingOutcome(execution, outcome, { withdrawn: true, over: over?.version ?? null })
    if (isThere) return this.#writeOrHold(pending, () => {})
    // No need to wait for the disk: a claim left in the store lapses by itself.
    return void this.#hold(pending, error, () => {})
  }

  /** Tries to write all held outcomes, or only this record's. True: none (of it) is held any more. */
  async flush(id?: RecordId): Promise<boolean> {
    if (id !== undefined) return (await this.#flushRecord(id)) === null
    this.#flushing ??= this.#flushAll().finally(() => {
      this.#flushing = null
    })
    await this.#flushing
    return this.#size === 0
  }

  /** The store answers again: writes held outcomes now, not at the next retry. */
  storeIsBack(): void {
    this.#pause = RETRY_FIRST
    void this.#retry()
  }

  /** Releases all held outcomes. The spool keeps its entries for the next process. */
  async close(): Promise<void> {
    const left = [...this.#held.values()].flat()
    for (const held of left) this.#forget(held)
    const onDisk = new Set<HeldOutcome>()
    const checked = left.map(async (held) => {
      if ((await held.kept?.done) === 'kept') onDisk.add(held)
    })
    await within(SPOOL_TIMEOUT, Promise.all(checked))
    for (const held of left)
      this.#observer.trouble(
        onDisk.has(held)
          ? 'an outcome could not be stored; it is kept on disk for the next start'
          : 'an outcome could not be stored and is lost',
        described(held.pending),
      )
  }

  #writeOrHold(pending: PendingOutcome, release: () => void): MaybePromise<Settled> {
    const written = (result: Settled | Unavailable): MaybePromise<Settled> => {
      if (result.kind !== 'settled') return this.#hold(pending, result.error, release)
      release()
      return result
    }
    const failed = (bug: unknown): Promise<Settled> => this.#hold(pending, bug, release)
    let writing: MaybePromise<Settled | Unavailable>
    try {
      writing = this.#write(pending)
    } catch (bug) {
      return failed(bug)
    }
    return writing instanceof Promise ? writing.then(written, failed) : written(writing)
  }

  #write(pending: PendingOutcome): MaybePromise<Settled | Unavailable> {
    const { id, draft, spans } = pending
    return after(this.#records.settle(id, draft, spans), (reply) => this.#afterWrite(pending, reply))
  }

  #afterWrite(pending: PendingOutcome, reply: SettleReply): MaybePromise<Settled | Unavailable> {
    const { draft, spans, claimed } = pending
    switch (reply.kind) {
      case 'written':
        return this.#written(pending, resultOf(draft), reply.now + spans.dueIn)
      case 'recovered':
        if (claimed)
          this.#observer.trouble(
            'the store had lost the record of a running request; its outcome was written again',
            described(pending),
          )
        return this.#written(pending, claimed ? 'recovered' : resultOf(draft), reply.now + spans.dueIn)
      case 'refused':
        return claimed
          ? this.#refused(pending, reply.record)
          : this.#writeUnclaimed(pending, reply.record, reply.now)
      case 'unavailable':
      case 'corrupt':
        return this.#notWritten(pending, reply)
    }
  }

  /** Handles an attempt without a claim in the store, where another record exists. */
  async #writeUnclaimed(
    pending: PendingOutcome,
    found: IdempotencyRecord,
    now: Millis,
  ): Promise<Settled | Unavailable> {
    const { id, draft, spans, over } = pending
    if (draft.state === 'failed_retryable') {
      if (found.version !== over) return this.#refused(pending, found)
      // The takeover has not arrived, and must no longer succeed: rewrites the record unchanged, under another version.
      const moved = await this.#records.replace(id, found.version, found, remainingSpans(found, now))
      if (moved?.kind === 'refused') return this.#write(pending)
      if (moved?.kind === 'unavailable' || moved?.kind === 'corrupt') return this.#notWritten(pending, moved)
      return this.#written(pending, 'released', now)
    }
    // The request was executed, but the record would still let a retry execute.
    if (decide(found, digestsAfter(draft, found), pending, now).kind !== 'take_over')
      return this.#refused(pending, found)
    const taken = await this.#records.takeOver(id, found, draft, spans)
    if (taken.kind === 'unavailable' || taken.kind === 'corrupt') return this.#notWritten(pending, taken)
    if (taken.kind === 'lost' || taken.recognised) return this.#write(pending)
    return this.#written(pending, resultOf(draft), taken.now + spans.dueIn)
  }

  #notWritten(pending: PendingOutcome, trouble: StoreTrouble): MaybePromise<Settled | Unavailable> {
    const { draft } = pending
    if (trouble.kind === 'unavailable') {
      if (!trouble.full || draft.state !== 'completed' || !draft.result.kept) return trouble
      // Completed stays completed: if the body does not fit, it is recorded without one (contract §3).
      const result = withoutBody(draft.result.response, 'no_room')
      return this.#write({ ...pending, draft: { ...draft, result } })
    }
    this.#observer.trouble('the stored record cannot be read; it is left as it is', {
      ...described(pending),
      error: String(trouble.error),
    })
    return { kind: 'settled', state: draft.state, expiresAt: null, left: null, recorded: null }
  }

  #written({ id, draft }: PendingOutcome, result: CompletionResult, dueAt: Millis): Settled {
    this.#observer.completed(draft.route, result, id, draft.lastError)
    const { state } = draft
    const expiresAt = state === 'completed' ? dueAt : null
    // Reconciliation may know more of an unknown record.
    return { kind: 'settled', state, expiresAt, left: state === 'unknown' ? null : draft, recorded: null }
  }

  /** The store no longer has the attempt, or its state accepts no outcome (contract §2). */
  #refused(pending: PendingOutcome, found: IdempotencyRecord): Settled {
    const { id, draft, claimed } = pending
    if (isRecorded(found, draft)) {
      const { state, result, expiresAt } = found
      this.#observer.completed(draft.route, resultOf({ ...draft, state, result }), id)
      return { kind: 'settled', state, expiresAt, left: null, recorded: result }
    }
    if (claimed || draft.state !== 'failed_retryable') {
      this.#observer.completed(draft.route, 'stale', id)
      this.#observer.trouble('an outcome came too late and was refused', {
        ...described(pending),
        found: found.state,
        foundFence: found.fence,
      })
    }
    return { kind: 'settled', state: found.state, expiresAt: null, left: null, recorded: null }
  }

  #remember(pending: PendingOutcome): void {
    const { id, draft, claimed } = pending
    // If the attempt made a claim itself, the record answers, with the body.
    if (claimed || draft.state === 'failed_retryable') return
    const kept =
      draft.state === 'completed' && draft.result.kept
        ? { ...pending, draft: { ...draft, result: withoutBody(draft.result.response, 'no_room') } }
        : pending
    this.#lately.set(id, [kept, performance.now()])
    if (this.#lately.size > MAX_LATELY) this.#lately.delete(this.#lately.keys().next().value as RecordId)
  }

  /** Resolves when it is on disk too, or after a while. */
  async #hold(pending: PendingOutcome, cause: unknown, release: () => void): Promise<Settled> {
    const { id, draft } = pending
    const kept = this.#outbox?.keep(pending) ?? null
    const keeping = kept === null ? null : within(SPOOL_TIMEOUT, kept.done)
    const held = this.#add(pending, kept, keeping, release)
    this.#observer.completed(draft.route, 'deferred', id)
    this.#observer.trouble('the store did not accept an outcome; it is held and retried', {
      ...described(pending),
      error: String(cause),
    })
    const end = keeping === null ? 'kept' : await keeping
    held.keeping = null
    if (end !== 'kept')
      this.#observer.trouble('an outcome could not be spooled; it is held in memory only', {
        ...described(pending),
        error: end === null ? `the disk did not accept it within ${SPOOL_TIMEOUT} ms` : String(end),
      })
    return { kind: 'settled', state: draft.state, expiresAt: null, left: draft, recorded: null }
  }

  #add(
    pending: PendingOutcome,
    kept: KeptOutcome | null,
    keeping: HeldOutcome['keeping'],
    release: () => void,
  ): HeldOutcome {
    const { id, usefulFor } = pending
    const giveUpAt = performance.now() + usefulFor
    const held: HeldOutcome = { pending, release, giveUpAt, kept, keeping, trying: null }
    this.#held.set(id, [...(this.#held.get(id) ?? []), held])
    this.#size++
    this.#schedule()
    return held
  }

  #forget(held: HeldOutcome): void {
    const { id } = held.pending
    const all = this.#held.get(id) ?? []
    if (!all.includes(held)) return
    const others = all.filter((other) => other !== held)
    if (others.length > 0) this.#held.set(id, others)
    else this.#held.delete(id)
    this.#size--
    held.release()
  }

  #schedule(): void {
    if (this.#timer !== null || this.#size === 0) return
    this.#timer = setTimeout(() => void this.#retry(), this.#pause).unref()
  }

  async #retry(): Promise<void> {
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = null
    const done = await this.flush()
    const most = this.#isReached ? RETRY_REFUSED : RETRY_UNREACHED
    this.#pause = done ? RETRY_FIRST : Math.min(this.#pause * 2, most)
    this.#schedule()
  }

  async #flushAll(): Promise<void> {
    this.#isReached = true
    for (const id of this.#held.keys()) {
      const trouble = await this.#flushRecord(id)
      if (trouble === null || trouble.full || trouble.error instanceof Declined) continue
      // An unreachable store will not accept the others, either. If only this one fails, the others go first next time.
      const left = this.#held.get(id)
      this.#held.delete(id)
      if (left !== undefined) this.#held.set(id, left)
      this.#isReached = false
      return
    }
  }

  /** Null: nothing of the record is held any more. */
  async #flushRecord(id: RecordId): Promise<Unavailable | null> {
    for (let next = this.#held.get(id)?.[0]; next !== undefined; next = this.#held.get(id)?.[0]) {
      const held = next
      held.trying ??= this.#try(held).finally(() => {
        held.trying = null
      })
      const trouble = await held.trying
      if (trouble !== null) return trouble
    }
    return null
  }

  /** Null: no longer held. */
  async #try(held: HeldOutcome): Promise<Unavailable | null> {
    const lost = (cause: unknown): void =>
      this.#observer.trouble('an outcome could not be stored and is lost', {
        ...described(held.pending),
        error: String(cause),
      })
    try {
      const result = await this.#write(held.pending)
      if (result.kind === 'unavailable') {
        if (performance.now() < held.giveUpAt) return result
        lost(result.error)
      } else this.#remember(held.pending)
    } catch (bug) {
      lost(bug)
    }
    this.#forget(held)
    held.kept?.drop()
    return null
  }
}

/** For the log. */
function described({ id, draft }: PendingOutcome): Record<string, unknown> {
  return { route: draft.route, record: shortId(id), fence: draft.fence, outcome: draft.state }
}

function resultOf(draft: OutcomeDraft): CompletionResult {
  switch (draft.state) {
    case 'completed':
      return draft.result.kept || draft.result.why === 'outcome_only' ? 'stored' : 'too_large'
    case 'failed_retryable':
      return 'released'
    case 'unknown':
      return 'unknown'
  }
}

function bodyBytes(draft: OutcomeDraft): number {
  return draft.state === 'completed' && draft.result.kept ? draft.result.response.body.length : 0
}
