import { decide } from '../core/decide.ts'
import { type PendingOutcome, pendingOutcome } from '../core/outcome.ts'
import {
  type IdempotencyRecord,
  type Millis,
  type Outcome,
  type RecordId,
  type Spans,
  type State,
  shortId,
} from '../core/record.ts'
import { judgeRefusal, type OutcomeDraft } from '../core/settle.ts'
import { within } from '../runtime/deadline.ts'
import type { Kept, Left, Outbox } from '../store/outbox.ts'
import type { Records, SettleReply, StoreTrouble, Unavailable } from '../store/records.ts'
import { heldRecord, withoutBody } from './classify.ts'
import type { CompletionResult } from './outcomes.ts'
import type { Execution, Observer, Unclaimed } from './request.ts'

/** Pauses between tries of a write that the store did not take. */
const RETRY_FIRST: Millis = 100
const RETRY_MOST: Millis = 5_000
/** About 1 KiB each without bodies, which are counted in `limits.buffered`. */
const MAX_HELD = 10_000
const BYTES_WITHOUT_BODY = 1024
/** How long an answer waits for its outcome to be on disk: many times what a healthy disk needs, and no longer than a store that hangs. */
const KEEP_AT_MOST: Millis = 500

/**
 * Bytes of a spool that takes whatever is held: as much as memory may hold, and once more for what was written meanwhile and
 * leaves the disk with its segment.
 */
export function spoolRoom(buffered: number): number {
  return 2 * (buffered + MAX_HELD * BYTES_WITHOUT_BODY)
}

/** What became of an outcome. */
export interface Settled {
  readonly kind: 'settled'
  readonly state: State
  /** The store's time until which the response is kept; null: it is not, or not yet. */
  readonly expiresAt: Millis | null
  /** The record as this outcome left it, for those who wait for it; null: look it up. */
  readonly record: IdempotencyRecord | null
}

/** An outcome that the store has not taken yet. */
interface HeldOutcome {
  readonly pending: PendingOutcome
  readonly release: () => void
  /** By this process's own clock, which no correction of the time moves. */
  readonly giveUpAt: Millis
  /** On disk; null: held in memory alone. */
  readonly kept: Kept | null
  /** The write under way: one at a time. */
  trying: Promise<Unavailable | null> | null
}

/**
 * Writes outcomes where §2 accepts them. What the store does not take is held here, and in the spool if there is one; it is
 * retried with the same token for as long as its claim may stay in the store (`unresolvedTtl`), and answers the retries of
 * its record meanwhile (contract §2, §7).
 */
export class Settler {
  readonly #records: Records
  readonly #observer: Observer
  readonly #outbox: Outbox | null
  /** Oldest first; several of one record if more than one claim lost its reply. */
  readonly #held = new Map<RecordId, readonly HeldOutcome[]>()
  #size = 0
  #timer: NodeJS.Timeout | null = null
  #pause: Millis = RETRY_FIRST
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

  /** Whether anything of the record is held, a withdrawal too. */
  holds(id: RecordId): boolean {
    return this.#held.has(id)
  }

  /** The record by the outcome that this replica holds: the one that says most, if there are several. */
  held(id: RecordId): IdempotencyRecord | null {
    const all = this.#held.get(id)
    if (all === undefined) return null
    const found = all.map(({ pending }) => pending).filter(({ withdrawn }) => !withdrawn)
    const by = (state: OutcomeDraft['state']) => found.find(({ draft }) => draft.state === state)
    const most = by('completed') ?? by('unknown') ?? by('failed_retryable')
    return most === undefined ? null : heldRecord(most.draft)
  }

  /** Holds what an earlier process left in the spool. `hold` takes the bytes of a body, and returns what releases them. */
  restore(left: readonly Left[], hold: (bytes: number) => () => void): void {
    for (const { unsettled, kept } of left) this.#add(unsettled, kept, hold(bodyBytes(unsettled.draft)))
  }

  /**
   * Writes the outcome now, or holds it: without a claim until the store is back. `release` gives back the bytes of the
   * outcome's body, once they are no longer needed here. Never rejects: the client's answer does not depend on it.
   */
  async settle(execution: Execution, outcome: Outcome, release: () => void): Promise<Settled> {
    const { unclaimed } = execution
    if (unclaimed !== null) {
      const pending = pendingOutcome(execution, outcome, { over: unclaimed.over?.version ?? null })
      return await this.#hold(pending, unclaimed.error, release)
    }
    const pending = pendingOutcome(execution, outcome, { claimed: true })
    let cause: unknown
    try {
      const result = await this.#write(pending)
      if (result.kind === 'settled') {
        release()
        return result
      }
      cause = result.error
    } catch (bug) {
      cause = bug
    }
    return await this.#hold(pending, cause, release)
  }

  /** Frees a claim whose reply was lost: writes `failed_retryable` under its token, as soon as possible. */
  withdraw(execution: Execution, { over, error }: Unclaimed): void {
    const outcome: Outcome = { kind: 'not_executed', reason: 'the claim was withdrawn: its reply was lost' }
    const pending = pendingOutcome(execution, outcome, { withdrawn: true, over: over?.version ?? null })
    // Nobody waits until it is on disk: a claim that stays in the store lapses.
    void this.#hold(pending, error, () => {})
  }

  /** Tries to write what is held, or only the record's. True: nothing (of it) is held any more. */
  async flush(id?: RecordId): Promise<boolean> {
    if (id !== undefined) return (await this.#flushRecord(id)) === null
    this.#flushing ??= this.#flushAll().finally(() => {
      this.#flushing = null
    })
    await this.#flushing
    return this.#size === 0
  }

  /** Lets go of what is held. What is in the spool stays there, for the next process. */
  async close(): Promise<void> {
    if (this.#timer !== null) clearTimeout(this.#timer)
    const left = [...this.#held.values()].flat()
    for (const held of left) this.#forget(held)
    const onDisk = new Set<HeldOutcome>()
    const checked = left.map(async (held) => {
      if ((await held.kept?.done) === 'kept') onDisk.add(held)
    })
    await within(KEEP_AT_MOST, Promise.all(checked))
    for (const held of left)
      this.#observer.trouble(
        onDisk.has(held)
          ? 'an outcome could not be stored; it is kept on disk for the next start'
          : 'an outcome could not be stored and is lost',
        described(held.pending),
      )
  }

  #write(pending: PendingOutcome): Promise<Settled | Unavailable> {
    const { id, draft, spans } = pending
    return this.#records.settle(id, draft, spans).then((reply) => this.#afterWrite(pending, reply))
  }

  #afterWrite(
    pending: PendingOutcome,
    reply: SettleReply,
  ): Settled | Unavailable | Promise<Settled | Unavailable> {
    const { draft, spans, claimed } = pending
    switch (reply.kind) {
      case 'written':
        return this.#written(pending, resultOf(draft), draft.state, reply.now + spans.dueIn)
      case 'recovered':
        if (claimed)
          this.#observer.trouble(
            'the store had lost a record under way; its outcome was written again',
            described(pending),
          )
        return this.#written(
          pending,
          claimed ? 'recovered' : resultOf(draft),
          draft.state,
          reply.now + spans.dueIn,
        )
      case 'refused':
        return claimed
          ? this.#refused(pending, reply.record)
          : this.#writeUnclaimed(pending, reply.record, reply.now)
      case 'unavailable':
      case 'corrupt':
        return this.#notWritten(pending, reply)
    }
  }

  /** The attempt has no claim in the store, and another record is there. */
  async #writeUnclaimed(
    pending: PendingOutcome,
    found: IdempotencyRecord,
    now: Millis,
  ): Promise<Settled | Unavailable> {
    const { id, draft, spans, over } = pending
    if (draft.state === 'failed_retryable') {
      if (found.version !== over) return this.#refused(pending, found)
      // The claim over it has not arrived, and must not arrive any more: the record stays what it is, at another version.
      const moved = await this.#records.replace(id, found.version, found, remaining(found, now))
      if (moved?.kind === 'refused') return await this.#write(pending)
      if (moved?.kind === 'unavailable' || moved?.kind === 'corrupt') return this.#notWritten(pending, moved)
      return this.#written(pending, 'released', found.state, null)
    }
    // Executed, and the record says that a retry may execute: it must not.
    const asked = { ...draft, rawDigestUnder: () => draft.rawDigest }
    if (decide(found, asked, pending, now).kind !== 'take_over') return this.#refused(pending, found)
    const taken = await this.#records.takeOver(id, found, draft, spans)
    if (taken.kind === 'unavailable' || taken.kind === 'corrupt') return this.#notWritten(pending, taken)
    if (taken.kind === 'lost' || taken.recognised) return await this.#write(pending)
    return this.#written(pending, resultOf(draft), draft.state, taken.now + spans.dueIn)
  }

  #notWritten(
    pending: PendingOutcome,
    trouble: StoreTrouble,
  ): Settled | Unavailable | Promise<Settled | Unavailable> {
    const { draft } = pending
    if (trouble.kind === 'unavailable') {
      if (!trouble.full || draft.state !== 'completed' || !draft.result.kept) return trouble
      // Done stays done: without room for the body it is recorded without one (contract §3).
      const result = withoutBody(draft.result.response, 'no_room')
      return this.#write({ ...pending, draft: { ...draft, result } })
    }
    this.#observer.trouble('the stored record cannot be read; it is left as it is', {
      ...described(pending),
      error: String(trouble.error),
    })
    return { kind: 'settled', state: draft.state, expiresAt: null, record: null }
  }

  #written(
    { id, draft }: PendingOutcome,
    result: CompletionResult,
    state: State,
    at: Millis | null,
  ): Settled {
    this.#observer.completed(draft.route, result, id)
    const expiresAt = state === 'completed' ? at : null
    const known = state === draft.state && state !== 'unknown'
    return { kind: 'settled', state, expiresAt, record: known ? heldRecord(draft, expiresAt) : null }
  }

  /** The store no longer has the attempt, or in a state that takes no outcome (contract §2). */
  #refused(pending: PendingOutcome, found: IdempotencyRecord): Settled {
    const { id, draft, claimed } = pending
    if (found.state === 'completed' && judgeRefusal(found, draft) === 'duplicate')
      return this.#written(pending, resultOf(draft), found.state, found.expiresAt)
    if (claimed || draft.state !== 'failed_retryable') {
      this.#observer.completed(draft.route, 'stale', id)
      this.#observer.trouble('an outcome came too late and was refused', {
        ...described(pending),
        found: found.state,
        foundFence: found.fence,
      })
    }
    return { kind: 'settled', state: found.state, expiresAt: null, record: null }
  }

  /** Resolves when it is on disk, too, or after a while. */
  async #hold(pending: PendingOutcome, cause: unknown, release: () => void): Promise<Settled> {
    const { id, draft } = pending
    const kept = this.#outbox?.keep(pending) ?? null
    this.#add(pending, kept, release)
    this.#observer.completed(draft.route, 'deferred', id)
    this.#observer.trouble('the store did not take an outcome; it is held and retried', {
      ...described(pending),
      error: String(cause),
    })
    const end = kept === null ? 'kept' : await within(KEEP_AT_MOST, kept.done)
    if (end !== 'kept')
      this.#observer.trouble('an outcome is not in the spool; it is held in memory alone', {
        ...described(pending),
        error: end === null ? `the disk did not take it within ${KEEP_AT_MOST} ms` : String(end),
      })
    return { kind: 'settled', state: draft.state, expiresAt: null, record: heldRecord(draft) }
  }

  #add(pending: PendingOutcome, kept: Kept | null, release: () => void): void {
    const { id, usefulFor } = pending
    const giveUpAt = performance.now() + usefulFor
    const held: HeldOutcome = { pending, release, giveUpAt, kept, trying: null }
    this.#held.set(id, [...(this.#held.get(id) ?? []), held])
    this.#size++
    this.#schedule()
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
    this.#timer = setTimeout(() => {
      this.#timer = null
      void this.flush().then((done) => {
        this.#pause = done ? RETRY_FIRST : Math.min(this.#pause * 2, RETRY_MOST)
        this.#schedule()
      })
    }, this.#pause).unref()
  }

  async #flushAll(): Promise<void> {
    for (const id of this.#held.keys()) {
      const trouble = await this.#flushRecord(id)
      if (trouble === null || trouble.full) continue
      // A store that cannot be asked will not take the others either. If it is only this one: they go first next time.
      const left = this.#held.get(id)
      this.#held.delete(id)
      if (left !== undefined) this.#held.set(id, left)
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
      }
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

/** The spans that leave a record's instants as they are. */
function remaining(record: IdempotencyRecord, now: Millis): Spans {
  const due =
    record.state === 'in_progress'
      ? record.leaseUntil
      : record.state === 'unknown'
        ? record.nextLookAt
        : record.dropAt
  return { dueIn: due - now, dropIn: record.dropAt - now }
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
