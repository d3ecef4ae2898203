import { type PendingOutcome, pendingOutcome } from '../core/outcome.ts'
import type { IdempotencyRecord, Millis, Outcome, RecordId } from '../core/record.ts'
import type { OutcomeDraft } from '../core/settle.ts'
import type { Kept, Left, Outbox } from '../store/outbox.ts'
import type { Records } from '../store/records.ts'
import { StoreFull, StoreUnavailable } from '../store/register.ts'
import type { Unclaimed } from './claim.ts'
import { heldRecord } from './classify.ts'
import { described, OutcomeWriter, type Settled } from './outcome-writer.ts'
import type { Execution, Observer } from './request.ts'

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

interface HeldOutcome {
  readonly unsettled: PendingOutcome
  readonly release: () => void
  /** By this process's own clock, which no correction of the time moves. */
  readonly giveUpAt: Millis
  /** On disk; null: held in memory alone. */
  readonly kept: Kept | null
  /** The write under way: one at a time. */
  trying: Promise<StoreUnavailable | null> | null
}

/**
 * Writes outcomes. What the store does not take is held here, and in the spool where there is one; it is retried with the
 * same token for as long as its claim may stay in the store (`unresolvedTtl`), and answers the retries of its record meanwhile
 * (contract §2, §7).
 */
export class Settler {
  readonly #writer: OutcomeWriter
  readonly #observer: Observer
  readonly #outbox: Outbox | null
  /** Several of one record where more than one claim lost its reply; in the order of their coming. */
  readonly #held = new Map<RecordId, readonly HeldOutcome[]>()
  #size = 0
  #timer: NodeJS.Timeout | null = null
  #pause: Millis = RETRY_FIRST
  #flushing: Promise<void> | null = null

  constructor(records: Records, observer: Observer, outbox: Outbox | null) {
    this.#writer = new OutcomeWriter(records, observer)
    this.#observer = observer
    this.#outbox = outbox
  }

  get size(): number {
    return this.#size
  }

  get full(): boolean {
    return this.#size >= MAX_HELD
  }

  /** The record by the unsettled outcome that this replica holds: the one that says most, where there are several. */
  held(id: RecordId): IdempotencyRecord | null {
    const found = (this.#held.get(id) ?? []).map((held) => held.unsettled).filter((one) => !one.withdrawn)
    const by = (state: OutcomeDraft['state']) => found.find(({ draft }) => draft.state === state)
    const most = by('completed') ?? by('unknown') ?? by('failed_retryable')
    return most === undefined ? null : heldRecord(most.draft)
  }

  /** Holds what an earlier process left in the spool. `hold` takes the bytes of a body, and gives what releases them. */
  restore(left: readonly Left[], hold: (bytes: number) => () => void): void {
    for (const { unsettled, kept } of left) this.#add(unsettled, kept, hold(bodyBytes(unsettled.draft)))
  }

  /**
   * Writes the outcome now, or holds it. `release` gives back the bytes that the outcome's body holds, once they are
   * no longer needed here. Never rejects: the client's answer does not depend on it.
   */
  async settle(execution: Execution, outcome: Outcome, release: () => void): Promise<Settled> {
    const written = pendingOutcome(execution, outcome, { claimed: true })
    try {
      const settled = await this.#writer.write(written)
      release()
      return settled
    } catch (error) {
      return await this.#hold(written, error, release)
    }
  }

  /** Frees a claim whose reply was lost: writes `failed_retryable` under its token, as soon as possible. */
  withdraw(execution: Execution, { over, error }: Unclaimed): void {
    const outcome: Outcome = { kind: 'not_executed', reason: 'the claim was withdrawn: its reply was lost' }
    // Nobody waits until it is on disk: a claim that stays in the store lapses.
    void this.#hold(
      pendingOutcome(execution, outcome, { withdrawn: true, over: over?.version ?? null }),
      error,
      () => {},
    )
  }

  /** Under `bypass`: the outcome of an execution without a claim, written when the store is back. */
  settleUnclaimed(
    execution: Execution,
    outcome: Outcome,
    release: () => void,
    { over, error }: Unclaimed,
  ): Promise<Settled> {
    return this.#hold(pendingOutcome(execution, outcome, { over: over?.version ?? null }), error, release)
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
        described(held.unsettled),
      )
  }

  /** Resolves when it is on disk, too, or after a while. */
  async #hold(unsettled: PendingOutcome, cause: unknown, release: () => void): Promise<Settled> {
    const { id, draft } = unsettled
    const kept = this.#outbox?.keep(unsettled) ?? null
    this.#add(unsettled, kept, release)
    this.#observer.completed(draft.route, 'deferred', id)
    this.#observer.trouble('the store did not take an outcome; it is held and retried', {
      ...described(unsettled),
      error: String(cause),
    })
    if (kept !== null) await this.#onDisk(unsettled, kept)
    return { state: draft.state, expiresAt: null, record: heldRecord(draft) }
  }

  async #onDisk(unsettled: PendingOutcome, { done }: Kept): Promise<void> {
    const end = await within(KEEP_AT_MOST, done)
    if (end === 'kept') return
    this.#observer.trouble('an outcome is not in the spool; it is held in memory alone', {
      ...described(unsettled),
      error: end === null ? `the disk did not take it within ${KEEP_AT_MOST} ms` : String(end),
    })
  }

  #add(unsettled: PendingOutcome, kept: Kept | null, release: () => void): void {
    const { id, usefulFor } = unsettled
    const held: HeldOutcome = {
      unsettled,
      release,
      giveUpAt: performance.now() + usefulFor,
      kept,
      trying: null,
    }
    this.#held.set(id, [...(this.#held.get(id) ?? []), held])
    this.#size++
    this.#schedule()
  }

  #forget(held: HeldOutcome): void {
    const { id } = held.unsettled
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
  async #try(held: HeldOutcome): Promise<StoreUnavailable | null> {
    try {
      await this.#writer.write(held.unsettled)
    } catch (error) {
      if (error instanceof StoreUnavailable && performance.now() < held.giveUpAt) return error
      this.#observer.trouble('an outcome could not be stored and is lost', {
        ...described(held.unsettled),
        error: String(error),
      })
    }
    this.#forget(held)
    held.kept?.drop()
    return null
  }
}

function bodyBytes(draft: OutcomeDraft): number {
  return draft.state === 'completed' && draft.result.kept ? draft.result.response.body.length : 0
}

/** What `result` resolves to, or null after `limit`. */
async function within<T>(limit: Millis, result: Promise<T>): Promise<T | null> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, limit, null)
  })
  return await Promise.race([result, late]).finally(() => clearTimeout(timer))
}
