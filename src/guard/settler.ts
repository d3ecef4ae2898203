import {
  type IdempotencyRecord,
  type Millis,
  type Outcome,
  type RecordId,
  type State,
} from '../core/record.ts'
import { judgeRefusal, outcomeDraft, outcomeSpans } from '../core/settle.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from '../store/register.ts'
import type { CompletionResult, Observer, Run } from './call.ts'
import { withoutBody } from './outcome.ts'

/** Pauses between tries of a write that the store did not take. */
const RETRY_FIRST: Millis = 100
const RETRY_MOST: Millis = 5_000
/** About 1 KiB each without bodies, which are counted in `limits.buffered`. */
const MAX_HELD = 10_000

interface Held {
  readonly run: Run
  outcome: Outcome
  /** False: the claim's reply was lost or never came, so an absent record is no loss. */
  readonly claimed: boolean
  /** What a claim over it expected, if its reply was lost: a late arrival of that claim must not win. */
  readonly over: IdempotencyRecord | null
  readonly release: () => void
  readonly giveUpAt: Millis
}

export interface Settled {
  readonly state: State
  /** The store's time until which the response is kept; null where it is not, or not yet. */
  readonly expiresAt: Millis | null
}

/**
 * Writes outcomes. What the store does not take is held here, retried with the same token until its retention ends, and
 * answers the retries of its record meanwhile (contract §2, §7).
 */
export class Settler {
  readonly #records: Records
  readonly #observer: Observer
  readonly #held = new Map<RecordId, Held>()
  #timer: NodeJS.Timeout | null = null
  #pause: Millis = RETRY_FIRST
  #flushing: Promise<void> | null = null

  constructor(records: Records, observer: Observer) {
    this.#records = records
    this.#observer = observer
  }

  get size(): number {
    return this.#held.size
  }

  get full(): boolean {
    return this.#held.size >= MAX_HELD
  }

  /** The unsettled outcome that this replica holds for the record. */
  held(id: RecordId): { readonly run: Run; readonly outcome: Outcome } | null {
    return this.#held.get(id) ?? null
  }

  /**
   * Writes the outcome now, or holds it. `release` gives back the bytes that the outcome's body holds, once they are
   * no longer needed here. Never rejects: the client's answer does not depend on it.
   */
  async settle(run: Run, outcome: Outcome, release: () => void): Promise<Settled> {
    const held: Held = {
      run,
      outcome,
      claimed: true,
      over: null,
      release,
      giveUpAt: Date.now() + run.route.ttl,
    }
    try {
      const settled = await this.#write(held)
      release()
      return settled
    } catch (error) {
      return this.#hold(held, error)
    }
  }

  /** Frees a claim whose reply was lost: writes `failed_retryable` under its token, now or as soon as possible. */
  withdraw(run: Run, over: IdempotencyRecord | null, cause: unknown): void {
    const outcome: Outcome = { kind: 'not_executed', reason: 'the claim was withdrawn: its reply was lost' }
    this.#hold(
      { run, outcome, claimed: false, over, release: () => {}, giveUpAt: Date.now() + run.route.ttl },
      cause,
    )
  }

  /** Under `bypass`: the outcome of an execution without a claim, written when the store is back. */
  settleUnclaimed(run: Run, outcome: Outcome, release: () => void, cause: unknown): Settled {
    return this.#hold(
      { run, outcome, claimed: false, over: null, release, giveUpAt: Date.now() + run.route.ttl },
      cause,
    )
  }

  /** Tries to write what is held, or only the record's. True: nothing (of it) is held any more. */
  async flush(id?: RecordId): Promise<boolean> {
    if (id !== undefined) {
      const held = this.#held.get(id)
      return held === undefined || (await this.#try(id, held)) === null
    }
    this.#flushing ??= this.#flushAll().finally(() => {
      this.#flushing = null
    })
    await this.#flushing
    return this.#held.size === 0
  }

  close(): void {
    if (this.#timer !== null) clearTimeout(this.#timer)
    for (const { run, outcome } of this.#held.values())
      this.#observer.trouble('an outcome could not be stored and is lost', describe(run, outcome))
    this.#held.clear()
  }

  #hold(held: Held, cause: unknown): Settled {
    this.#held.set(held.run.id, held)
    this.#observer.completed(held.run.route.name, 'deferred', held.run.id)
    this.#observer.trouble('the store did not take an outcome; it is held and retried', {
      ...describe(held.run, held.outcome),
      error: String(cause),
    })
    this.#schedule()
    return { state: stateOf(held.outcome), expiresAt: null }
  }

  #schedule(): void {
    if (this.#timer !== null || this.#held.size === 0) return
    this.#timer = setTimeout(() => {
      this.#timer = null
      void this.flush().then((done) => {
        this.#pause = done ? RETRY_FIRST : Math.min(this.#pause * 2, RETRY_MOST)
        this.#schedule()
      })
    }, this.#pause).unref()
  }

  async #flushAll(): Promise<void> {
    for (const [id, held] of [...this.#held]) {
      const error = await this.#try(id, held)
      // A store that cannot be asked will not take the next one either.
      if (error !== null && !(error instanceof StoreFull) && error instanceof StoreUnavailable) return
    }
  }

  /** null: no longer held. */
  async #try(id: RecordId, held: Held): Promise<unknown> {
    try {
      await this.#write(held)
    } catch (error) {
      if (error instanceof StoreUnavailable && Date.now() < held.giveUpAt) return error
      this.#observer.trouble('an outcome could not be stored and is lost', {
        ...describe(held.run, held.outcome),
        error: String(error),
      })
    }
    if (this.#held.get(id) === held) this.#held.delete(id)
    held.release()
    return null
  }

  async #write(held: Held): Promise<Settled> {
    const { run } = held
    const spans = outcomeSpans(held.outcome, run.route)
    const draft = outcomeDraft(run.operation, run.attempt, held.outcome, run.createdAt)
    try {
      const reply = await this.#records.settle(run.id, draft, spans)
      switch (reply.kind) {
        case 'written':
          this.#observer.completed(run.route.name, resultOf(held.outcome), run.id)
          return { state: draft.state, expiresAt: expiry(held.outcome, reply.now + spans.dueIn) }
        case 'recovered':
          if (held.claimed) {
            this.#observer.completed(run.route.name, 'recovered', run.id)
            this.#observer.trouble(
              'the store had lost a record under way; its outcome was written again',
              describe(run, held.outcome),
            )
          } else {
            this.#observer.completed(run.route.name, resultOf(held.outcome), run.id)
          }
          return { state: draft.state, expiresAt: expiry(held.outcome, reply.now + spans.dueIn) }
        case 'refused': {
          if (held.over !== null && reply.record.version === held.over.version) {
            // The claim over it has not arrived, and must not arrive any more: this write moves the version on.
            await this.#records.takeOver(run.id, held.over, draft, spans)
            return { state: draft.state, expiresAt: null }
          }
          if (judgeRefusal(reply.record, run.attempt, held.outcome) === 'duplicate') {
            this.#observer.completed(run.route.name, resultOf(held.outcome), run.id)
            const { record } = reply
            return { state: record.state, expiresAt: record.state === 'completed' ? record.expiresAt : null }
          }
          if (held.claimed || held.outcome.kind === 'completed') {
            this.#observer.completed(run.route.name, 'stale', run.id)
            this.#observer.trouble('an outcome came too late and was refused', {
              ...describe(run, held.outcome),
              found: reply.record.state,
              foundFence: reply.record.fence,
            })
          }
          return { state: reply.record.state, expiresAt: null }
        }
      }
    } catch (error) {
      if (error instanceof StoreFull && held.outcome.kind === 'completed' && held.outcome.result.kept) {
        // Done stays done: without room for the body it is recorded without one (contract §3).
        held.outcome = { kind: 'completed', result: withoutBody(held.outcome.result.response, 'no_room') }
        return await this.#write(held)
      }
      if (error instanceof CorruptRecord) {
        this.#observer.trouble('the stored record cannot be read; it is left as it is', {
          ...describe(run, held.outcome),
          error: String(error),
        })
        return { state: stateOf(held.outcome), expiresAt: null }
      }
      throw error
    }
  }
}

function stateOf(outcome: Outcome): State {
  switch (outcome.kind) {
    case 'completed':
      return 'completed'
    case 'not_executed':
      return 'failed_retryable'
    case 'unknown':
      return 'unknown'
  }
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

function expiry(outcome: Outcome, at: Millis): Millis | null {
  return outcome.kind === 'completed' ? at : null
}

function describe(run: Run, outcome: Outcome): Record<string, unknown> {
  return {
    route: run.route.name,
    record: run.id.slice(0, 12),
    fence: run.attempt.fence,
    outcome: outcome.kind,
  }
}
