import type { Millis } from '../core/record.ts'

/** How long something may stand still when others need the room that it holds. */
const PATIENCE: Millis = 500
/** Fewer bytes than this are standing still: a byte a second holds a body for as long as it likes. */
const PROGRESS = 4096

/** Bytes per millisecond (64 KiB/s) of an upload that keeps its room when others need it and nothing stands still. */
const CREEPING = 64
/** Over which the rate is taken. */
const WINDOW: Millis = 1000

/** A slot that is nobody's. */
export const NOBODY = -1

/** An upload that is not whole yet, or an answer that has not left: it holds room, and can be given up. */
export interface Unfinished {
  moved(bytes: number): void
  done(): void
}

/**
 * Transfers that hold room in `limits.buffered` for as long as their client likes. They may, until others need the room: then the
 * one that has stood still for longest lets go, or else the one that creeps most.
 */
export class Stalled {
  /** The one that moved last is last. Most bodies come with their heads and are never in it. */
  readonly #transfers = new Set<Transfer>()

  /** `letGo` gives up the transfer and its room, at once. `slot`: whose share it is in. */
  watch(letGo: () => void, slot: number): Unfinished {
    const now = performance.now()
    const transfer: Transfer = {
      movedAt: now,
      bytes: 0,
      windowAt: now,
      inWindow: 0,
      rate: Number.POSITIVE_INFINITY,
      letGo,
      slot,
    }
    this.#transfers.add(transfer)
    return {
      moved: (bytes) => {
        const now = performance.now()
        transfer.inWindow += bytes
        if (now - transfer.windowAt >= WINDOW) {
          transfer.rate = transfer.inWindow / (now - transfer.windowAt)
          transfer.windowAt = now
          transfer.inWindow = 0
        }
        transfer.bytes += bytes
        if (transfer.bytes < PROGRESS) return
        transfer.bytes = 0
        transfer.movedAt = now
        this.#transfers.delete(transfer)
        this.#transfers.add(transfer)
      },
      done: () => void this.#transfers.delete(transfer),
    }
  }

  /** Has the transfer that has stood still for longest let go, or the slowest of those that creep. False: there is none. */
  readonly makeRoom = (): boolean => this.#give(() => true)

  /** The same within one share. */
  makeRoomIn(slot: number): boolean {
    return this.#give((transfer) => transfer.slot === slot)
  }

  #give(mayBe: (transfer: Transfer) => boolean): boolean {
    const now = performance.now()
    const transfer = this.#still(mayBe, now - PATIENCE) ?? this.#slowest(mayBe, now)
    if (transfer === null) return false
    this.#transfers.delete(transfer)
    transfer.letGo()
    return true
  }

  #still(mayBe: (transfer: Transfer) => boolean, since: Millis): Transfer | null {
    for (const transfer of this.#transfers) {
      if (transfer.movedAt > since) return null
      if (mayBe(transfer)) return transfer
    }
    return null
  }

  #slowest(mayBe: (transfer: Transfer) => boolean, now: Millis): Transfer | null {
    let slowest: Transfer | null = null
    let least = CREEPING
    for (const transfer of this.#transfers) {
      const rate = rateOf(transfer, now)
      if (rate >= least || !mayBe(transfer)) continue
      slowest = transfer
      least = rate
    }
    return slowest
  }
}

/** Too little of a window says nothing yet. */
function rateOf({ windowAt, inWindow, rate }: Transfer, now: Millis): number {
  const elapsed = now - windowAt
  return elapsed < WINDOW / 2 ? rate : inWindow / elapsed
}

interface Transfer {
  movedAt: Millis
  /** Since then. */
  bytes: number
  windowAt: Millis
  inWindow: number
  /** Bytes per millisecond in the last whole window. */
  rate: number
  readonly letGo: () => void
  readonly slot: number
}
