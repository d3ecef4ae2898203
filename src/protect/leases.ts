import type { Millis, RecordId } from '../core/record.ts'
import { RecordMap } from '../runtime/record-map.ts'
import type { Renewal } from '../store/register.ts'

/** Three renewals per lease. Configuration rejects shorter leases. */
const RENEWALS_PER_LEASE = 3
/** Finer than the shortest renewal interval that configuration allows (1 s / 3). */
const TICK: Millis = 100
/** Part of the lease that may pass before an attempt's first byte is sent; the last third absorbs clock drift. */
const SURE = 2 / 3

interface HeldLease {
  readonly token: Buffer
  readonly lease: Millis
  readonly dropIn: Millis
  renewAt: Millis
  /** Until then, no other replica can have treated the owner as silent. Once passed, it is never extended. */
  sureUntil: Millis
}

/** Renews the leases of running attempts in batches: one store call for all that are due. */
export class Leases {
  readonly #held = new RecordMap<HeldLease>()
  readonly #renew: (items: readonly Renewal[]) => Promise<readonly boolean[]>
  readonly #onError: (error: unknown) => void
  readonly #mayBegin: () => boolean
  #timer: NodeJS.Timeout | null = null
  #renewing = false
  #failing = false

  /** `mayBegin`: whether this replica is sure that it may execute what it has claimed. */
  constructor(
    renew: (items: readonly Renewal[]) => Promise<readonly boolean[]>,
    onError: (error: unknown) => void,
    mayBegin = (): boolean => true,
  ) {
    this.#renew = renew
    this.#onError = onError
    this.#mayBegin = mayBegin
  }

  /**
   * `dropIn`: how long an unresolved record of the route is kept. `since`: when the claim was sent, by `performance.now()`.
   * Returns whether the attempt may still begin: the process may have been paused and the record resolved meanwhile
   * (docs/adr/0032).
   */
  hold(id: RecordId, token: Buffer, lease: Millis, dropIn: Millis, since: Millis): () => boolean {
    const renewAt = since + lease / RENEWALS_PER_LEASE
    const held: HeldLease = { token, lease, dropIn, renewAt, sureUntil: since + lease * SURE }
    this.#held.set(id, held)
    this.#timer ??= setInterval(() => void this.#tick(), TICK).unref()
    return () => performance.now() < held.sureUntil && this.#mayBegin()
  }

  release(id: RecordId, token: Buffer): void {
    if (this.#held.get(id)?.token.equals(token)) this.#held.delete(id)
  }

  get size(): number {
    return this.#held.size
  }

  close(): void {
    if (this.#timer !== null) clearInterval(this.#timer)
    this.#held.clear()
  }

  async #tick(): Promise<void> {
    if (this.#renewing || this.#held.size === 0) return
    const now = performance.now()
    const batch: Renewal[] = []
    const renewed: HeldLease[] = []
    for (const [id, held] of this.#held) {
      if (held.renewAt > now) continue
      held.renewAt = now + held.lease / RENEWALS_PER_LEASE
      batch.push({ id, token: held.token, dueIn: held.lease, dropIn: held.dropIn })
      renewed.push(held)
    }
    if (batch.length === 0) return
    this.#renewing = true
    try {
      const still = await this.#renew(batch)
      // Refused: others may decide on the record, or it is gone. Too late: they may have, and the store has reverted since.
      for (const [n, held] of renewed.entries())
        held.sureUntil =
          still[n] === true && now < held.sureUntil ? now + held.lease * SURE : Number.NEGATIVE_INFINITY
      this.#failing = false
    } catch (error) {
      // Not renewed: the lease may lapse and read as unknown, but this owner's outcome is still accepted.
      for (const { id } of batch) {
        const held = this.#held.get(id)
        if (held !== undefined) held.renewAt = 0
      }
      // Reported once: while the store is down, every tick fails.
      if (!this.#failing) this.#onError(error)
      this.#failing = true
    } finally {
      this.#renewing = false
    }
  }
}
