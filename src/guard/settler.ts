import { decide } from '../core/decide.ts'
import {
  type Draft,
  type IdempotencyRecord,
  type Millis,
  type Outcome,
  type RecordId,
  type Spans,
  type State,
  shortId,
} from '../core/record.ts'
import { judgeRefusal, outcomeDraft, outcomeSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from '../store/register.ts'
import type { CompletionResult, Observer, Run } from './call.ts'
import type { Unclaimed } from './claim.ts'
import { heldRecord, stateOf, withoutBody } from './outcome.ts'

/** Pauses between tries of a write that the store did not take. */
const RETRY_FIRST: Millis = 100
const RETRY_MOST: Millis = 5_000
/** About 1 KiB each without bodies, which are counted in `limits.buffered`. */
const MAX_HELD = 10_000

interface Held {
  readonly run: Run
  readonly outcome: Outcome
  /** False: the claim's reply was lost or never came, so an absent record is no loss. */
  readonly claimed: boolean
  /** Nothing was tried: the claim alone is taken back. It says nothing about the record. */
  readonly withdrawn: boolean
  /** What a claim over it expected, if its reply was lost: a late arrival of that claim must not win. */
  readonly over: IdempotencyRecord | null
  readonly release: () => void
  /** By this process's own clock, which no correction of the time moves. */
  readonly giveUpAt: Millis
  /** The write under way: one at a time. */
  trying: Promise<StoreUnavailable | null> | null
}

export interface Settled {
  readonly state: State
  /** The store's time until which the response is kept; null where it is not, or not yet. */
  readonly expiresAt: Millis | null
  /** The record as this outcome left it, for those who wait for it; null: look it up. */
  readonly record: IdempotencyRecord | null
}

/**
 * Writes outcomes. What the store does not take is held here, retried with the same token until its retention ends, and
 * answers the retries of its record meanwhile (contract §2, §7).
 */
export class Settler {
  readonly #records: Records
  readonly #observer: Observer
  /** Several of one record where more than one claim lost its reply; in the order of their coming. */
  readonly #held = new Map<RecordId, readonly Held[]>()
  #size = 0
  #timer: NodeJS.Timeout | null = null
  #pause: Millis = RETRY_FIRST
  #flushing: Promise<void> | null = null

  constructor(records: Records, observer: Observer) {
    this.#records = records
    this.#observer = observer
  }

  get size(): number {
    return this.#size
  }

  get full(): boolean {
    return this.#size >= MAX_HELD
  }

  /** The record by the unsettled outcome that this replica holds: the one that says most, where there are several. */
  held(id: RecordId): IdempotencyRecord | null {
    const found = (this.#held.get(id) ?? []).filter((held) => !held.withdrawn)
    const by = (kind: Outcome['kind']) => found.find((held) => held.outcome.kind === kind)
    const held = by('completed') ?? by('unknown') ?? by('not_executed')
    return held === undefined ? null : heldRecord(held.run, held.outcome)
  }

  /**
   * Writes the outcome now, or holds it. `release` gives back the bytes that the outcome's body holds, once they are
   * no longer needed here. Never rejects: the client's answer does not depend on it.
   */
  async settle(run: Run, outcome: Outcome, release: () => void): Promise<Settled> {
    const held = toHold(run, outcome, { claimed: true, release })
    try {
      const settled = await this.#write(held)
      release()
      return settled
    } catch (error) {
      return this.#hold(held, error)
    }
  }

  /** Frees a claim whose reply was lost: writes `failed_retryable` under its token, as soon as possible. */
  withdraw(run: Run, { over, error }: Unclaimed): void {
    const outcome: Outcome = { kind: 'not_executed', reason: 'the claim was withdrawn: its reply was lost' }
    this.#hold(toHold(run, outcome, { withdrawn: true, over }), error)
  }

  /** Under `bypass`: the outcome of an execution without a claim, written when the store is back. */
  settleUnclaimed(run: Run, outcome: Outcome, release: () => void, { over, error }: Unclaimed): Settled {
    return this.#hold(toHold(run, outcome, { over, release }), error)
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

  close(): void {
    if (this.#timer !== null) clearTimeout(this.#timer)
    for (const held of [...this.#held.values()].flat()) {
      this.#observer.trouble('an outcome could not be stored and is lost', describe(held.run, held.outcome))
      this.#drop(held)
    }
  }

  #hold(held: Held, cause: unknown): Settled {
    const { id, route } = held.run
    this.#held.set(id, [...(this.#held.get(id) ?? []), held])
    this.#size++
    this.#observer.completed(route.name, 'deferred', id)
    this.#observer.trouble('the store did not take an outcome; it is held and retried', {
      ...describe(held.run, held.outcome),
      error: String(cause),
    })
    this.#schedule()
    return { state: stateOf(held.outcome), expiresAt: null, record: heldRecord(held.run, held.outcome) }
  }

  #drop(held: Held): void {
    const { id } = held.run
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
      const error = await this.#flushRecord(id)
      if (error === null || error instanceof StoreFull) continue
      // A store that cannot be asked will not take the others either. If it is only this one: they go first next time.
      const left = this.#held.get(id)
      this.#held.delete(id)
      if (left !== undefined) this.#held.set(id, left)
      return
    }
  }

  /** null: nothing of the record is held any more. */
  async #flushRecord(id: RecordId): Promise<StoreUnavailable | null> {
    for (let next = this.#held.get(id)?.[0]; next !== undefined; next = this.#held.get(id)?.[0]) {
      const held = next
      held.trying ??= this.#try(held).finally(() => {
        held.trying = null
      })
      const error = await held.trying
      if (error !== null) return error
    }
    return null
  }

  /** null: no longer held. */
  async #try(held: Held): Promise<StoreUnavailable | null> {
    try {
      await this.#write(held)
    } catch (error) {
      if (error instanceof StoreUnavailable && performance.now() < held.giveUpAt) return error
      this.#observer.trouble('an outcome could not be stored and is lost', {
        ...describe(held.run, held.outcome),
        error: String(error),
      })
    }
    this.#drop(held)
    return null
  }

  async #write(held: Held): Promise<Settled> {
    const { run, outcome } = held
    const spans = outcomeSpans(outcome, run.route)
    const draft = outcomeDraft(run.operation, run.attempt, outcome, run.createdAt)
    try {
      const reply = await this.#records.settle(run.id, draft, spans)
      if (reply.kind === 'refused') {
        const own = held.claimed
          ? null
          : await this.#writeUnclaimed(held, reply.record, reply.now, draft, spans)
        return own ?? this.#refused(held, reply.record)
      }
      const lost = reply.kind === 'recovered' && held.claimed
      if (lost)
        this.#observer.trouble(
          'the store had lost a record under way; its outcome was written again',
          describe(run, outcome),
        )
      return this.#written(held, lost ? 'recovered' : resultOf(outcome), draft.state, reply.now + spans.dueIn)
    } catch (error) {
      if (error instanceof StoreFull && outcome.kind === 'completed' && outcome.result.kept) {
        // Done stays done: without room for the body it is recorded without one (contract §3).
        const result = withoutBody(outcome.result.response, 'no_room')
        return await this.#write({ ...held, outcome: { kind: 'completed', result } })
      }
      if (error instanceof CorruptRecord) {
        this.#observer.trouble('the stored record cannot be read; it is left as it is', {
          ...describe(run, outcome),
          error: String(error),
        })
        return { state: draft.state, expiresAt: null, record: null }
      }
      throw error
    }
  }

  /** The attempt has no claim in the store, and another record is there. null: that one stands. */
  async #writeUnclaimed(
    held: Held,
    found: IdempotencyRecord,
    now: Millis,
    draft: Draft,
    spans: Spans,
  ): Promise<Settled | null> {
    const { run, outcome, over } = held
    if (outcome.kind === 'not_executed') {
      if (found.version !== over?.version) return null
      // The claim over it has not arrived, and must not arrive any more: the record stays what it is, at another version.
      const moved = await this.#records.replace(run.id, found.version, found, remaining(found, now))
      if (moved?.kind === 'refused') return await this.#write(held)
      return this.#written(held, 'released', found.state, null)
    }
    // Executed, and the record says that a retry may execute: it must not.
    const asked = { ...run.operation, rawDigestUnder: () => run.operation.rawDigest }
    if (decide(found, asked, run.route, now).kind !== 'take_over') return null
    const taken = await this.#records.takeOver(run.id, found, draft, spans)
    if (taken.kind === 'lost' || taken.recognised) return await this.#write(held)
    return this.#written(held, resultOf(outcome), draft.state, taken.now + spans.dueIn)
  }

  #written({ run, outcome }: Held, result: CompletionResult, state: State, at: Millis | null): Settled {
    this.#observer.completed(run.route.name, result, run.id)
    const expiresAt = state === 'completed' ? at : null
    return {
      state,
      expiresAt,
      record: state === stateOf(outcome) ? heldRecord(run, outcome, expiresAt) : null,
    }
  }

  /** The store found the attempt no more, or in a state that takes no outcome (contract §2). */
  #refused(held: Held, found: IdempotencyRecord): Settled {
    const { run, outcome } = held
    if (found.state === 'completed' && judgeRefusal(found, run.attempt, outcome) === 'duplicate')
      return this.#written(held, resultOf(outcome), found.state, found.expiresAt)
    if (held.claimed || outcome.kind !== 'not_executed') {
      this.#observer.completed(run.route.name, 'stale', run.id)
      this.#observer.trouble('an outcome came too late and was refused', {
        ...describe(run, outcome),
        found: found.state,
        foundFence: found.fence,
      })
    }
    return { state: found.state, expiresAt: null, record: null }
  }
}

function toHold(
  run: Run,
  outcome: Outcome,
  over: Partial<Pick<Held, 'claimed' | 'withdrawn' | 'over' | 'release'>>,
): Held {
  const { route } = run
  // What it would leave behind unwritten, a claim, outlives `ttl` (contract §2).
  const useful = outcome.kind === 'completed' ? outcomeSpans(outcome, route).dueIn : route.unresolvedTtl
  return {
    run,
    outcome,
    claimed: false,
    withdrawn: false,
    over: null,
    release: () => {},
    giveUpAt: performance.now() + useful,
    trying: null,
    ...over,
  }
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

function resultOf(outcome: Outcome): CompletionResult {
  switch (outcome.kind) {
    case 'completed':
      return outcome.result.kept || outcome.result.why === 'outcome_only' ? 'stored' : 'too_large'
    case 'not_executed':
      return 'released'
    case 'unknown':
      return 'unknown'
  }
}

function describe(run: Run, outcome: Outcome): Record<string, unknown> {
  return {
    route: run.route.name,
    record: shortId(run.id),
    fence: run.attempt.fence,
    outcome: outcome.kind,
  }
}
