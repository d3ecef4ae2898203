import { ByRecord } from '../core/by-record.ts'
import type { Millis, RecordId } from '../core/record.ts'
import type { Renewal } from '../store/register.ts'

/** Three tries before a lease lapses. Configuration refuses leases too short for it. */
const RENEWALS_PER_LEASE = 3
/** Finer than the shortest renewal interval that configuration allows (1 s / 3). */
const TICK: Millis = 100

interface Held {
  readonly token: Buffer
  readonly lease: Millis
  readonly dropIn: Millis
  renewAt: Millis
}

/** Renews the leases of attempts under way, in batches: one call to the store for all that are due. */
export class Leases {
  readonly #held = new ByRecord<Held>()
  readonly #renew: (items: readonly Renewal[]) => Promise<unknown>
  readonly #onError: (error: unknown) => void
  #timer: NodeJS.Timeout | null = null
  #renewing = false
  #failing = false

  constructor(renew: (items: readonly Renewal[]) => Promise<unknown>, onError: (error: unknown) => void) {
    this.#renew = renew
    this.#onError = onError
  }

  /** `dropIn`: how long an unresolved record of the route is kept. */
  hold(id: RecordId, token: Buffer, lease: Millis, dropIn: Millis): void {
    this.#held.set(id, { token, lease, dropIn, renewAt: performance.now() + lease / RENEWALS_PER_LEASE })
    this.#timer ??= setInterval(() => void this.#tick(), TICK).unref()
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
    for (const [id, held] of this.#held) {
      if (held.renewAt > now) continue
      held.renewAt = now + held.lease / RENEWALS_PER_LEASE
      batch.push({ id, token: held.token, dueIn: held.lease, dropIn: held.dropIn })
    }
    if (batch.length === 0) return
    this.#renewing = true
    try {
      await this.#renew(batch)
      this.#failing = false
    } catch (error) {
      // Not renewed: the lease may lapse and read as unknown; this owner's outcome is accepted all the same.
      for (const { id } of batch) {
        const held = this.#held.get(id)
        if (held !== undefined) held.renewAt = 0
      }
      // Said once: while the store is down, every tick fails.
      if (!this.#failing) this.#onError(error)
      this.#failing = true
    } finally {
      this.#renewing = false
    }
  }
}
