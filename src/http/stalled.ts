import type { Millis } from '../core/record.ts'

/** How long a transfer may stall while others need its room. */
const PATIENCE: Millis = 500
/** Fewer bytes are no progress; otherwise one byte per second would hold a body indefinitely. */
const PROGRESS = 4096
/** Bytes per millisecond (64 KiB/s); if no transfer has stalled, slower ones are abandoned. */
const CREEPING = 64
/** The rate is averaged over this window. */
const WINDOW: Millis = 1000

/** The slot of transfers that count against no client's share. */
export const NOBODY = -1

/** An incomplete upload or an unsent answer, which holds room and can be abandoned. */
export interface Unfinished {
  moved(bytes: number): void
  done(): void
}

/**
 * Transfers may hold room in `limits.buffered` until others need it. Then the one stalled longest is abandoned, or else the slowest below a
 * minimum rate (docs/adr/0044).
 */
export class Stalled {
  /** In order of last progress. Most bodies arrive with their heads and never enter. */
  readonly #transfers = new Set<Transfer>()

  /** `letGo` must abandon the transfer and release its room at once. `slot`: the share that it counts against. */
  watch(letGo: () => void, slot: number): Unfinished {
    const transfer = new Transfer(this.#transfers, letGo, slot)
    this.#transfers.add(transfer)
    return transfer
  }

  /** Abandons a transfer; false if there is none to abandon. */
  readonly makeRoom = (): boolean => letGo(this.#transfers, this.#transfers)

  /** Likewise within one share. */
  makeRoomIn(slot: number): boolean {
    return letGo(
      this.#transfers,
      [...this.#transfers].filter((transfer) => transfer.slot === slot),
    )
  }
}

function letGo(all: Set<Transfer>, some: Iterable<Transfer>): boolean {
  const now = performance.now()
  let chosen: Transfer | null = null
  let least = CREEPING
  for (const transfer of some) {
    // In order of progress, so the first stalled transfer has stalled longest.
    if (transfer.movedAt <= now - PATIENCE) {
      chosen = transfer
      break
    }
    const rate = transfer.rateAt(now)
    if (rate >= least) continue
    chosen = transfer
    least = rate
  }
  if (chosen === null) return false
  all.delete(chosen)
  chosen.letGo()
  return true
}

class Transfer implements Unfinished {
  readonly letGo: () => void
  readonly slot: number
  readonly #all: Set<Transfer>
  movedAt = performance.now()
  #bytesSince = 0
  #windowAt = this.movedAt
  #inWindow = 0
  /** Bytes per millisecond in the last whole window. */
  #rate = Number.POSITIVE_INFINITY

  constructor(all: Set<Transfer>, letGo: () => void, slot: number) {
    this.#all = all
    this.letGo = letGo
    this.slot = slot
  }

  moved(bytes: number): void {
    const now = performance.now()
    this.#inWindow += bytes
    if (now - this.#windowAt >= WINDOW) {
      this.#rate = this.#inWindow / (now - this.#windowAt)
      this.#windowAt = now
      this.#inWindow = 0
    }
    this.#bytesSince += bytes
    if (this.#bytesSince < PROGRESS) return
    this.#bytesSince = 0
    this.movedAt = now
    this.#all.delete(this)
    this.#all.add(this)
  }

  done(): void {
    this.#all.delete(this)
  }

  /** Early in a window, the rate of the previous one. */
  rateAt(now: Millis): number {
    const elapsed = now - this.#windowAt
    return elapsed < WINDOW / 2 ? this.#rate : this.#inWindow / elapsed
  }
}
