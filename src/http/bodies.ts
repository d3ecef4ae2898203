import { EventEmitter } from 'node:events'
import type { IncomingMessage } from 'node:http'
import type { Millis } from '../core/record.ts'
import type { BodyReading } from '../protect/request.ts'
import { BodyBuffer } from '../runtime/body-buffer.ts'
import { type Budget, type Shares, shareOf } from '../runtime/limits.ts'

/** What clients that upload at the same time share: whose transfer gives way, and how much each client holds. */
export interface Uploads {
  readonly stalled: Stalled
  readonly shares: Shares
}

/**
 * Reads a protected request's whole body, within `limit` bytes, the room left in `budget`, the client's share of it, and `timeout`
 * from the call: a slow or aborted upload claims nothing (contract §3.3).
 */
export function readBody(
  request: IncomingMessage,
  limit: number,
  timeout: Millis,
  budget: Budget,
  { shares, stalled }: Uploads,
  client: string,
): Promise<BodyReading> {
  // Closed before this call: no further event will say so.
  if (request.destroyed) return Promise.resolve({ kind: 'aborted' })
  const announced = Number(request.headers['content-length'] ?? 0)
  if (announced > limit) return Promise.resolve({ kind: 'too_large' })
  return new Promise((resolve) => {
    const chunks = new BodyBuffer()
    let size = 0
    let over = false
    let unfinished: Unfinished | null = null
    const slot = shares.slotOf(client)
    // Alone, a body may take all the room there is.
    const hasShare = (more: number): boolean => {
      for (;;) {
        const held = shares.held(slot)
        if (held === size || held + more <= shareOf(budget.most)) return true
        if (!stalled.makeRoomIn(slot)) return false
      }
    }
    const give = (): void => {
      budget.give(size)
      shares.add(slot, -size)
      size = 0
    }
    const finish = (reading: BodyReading): void => {
      if (over) return
      over = true
      clearTimeout(timer)
      unfinished?.done()
      request.off('data', onData).off('end', onEnd).off('close', onAbort).off('error', onAbort)
      if (reading.kind !== 'body') {
        request.pause()
        give()
      }
      resolve(reading)
    }
    const onData = (chunk: Buffer): void => {
      const { length } = chunk
      if (size + length > limit) return finish({ kind: 'too_large' })
      if (!hasShare(length) || !budget.take(length)) return finish({ kind: 'no_room' })
      // This upload was the one that had to give way.
      if (over) return budget.give(length)
      size += length
      shares.add(slot, length)
      chunks.push(chunk)
      if (unfinished !== null) unfinished.moved(length)
      else if (size !== announced) unfinished = stalled.watch(() => finish({ kind: 'no_room' }), slot)
    }
    const onEnd = (): void => finish({ kind: 'body', body: chunks.take(), release: give })
    const onAbort = (): void => finish({ kind: 'aborted' })
    const timer = setTimeout(finish, timeout, { kind: 'timeout' })
    request.on('data', onData).on('end', onEnd).on('close', onAbort).on('error', onAbort)
  })
}

/** Whether a body is announced (RFC 9112 §6.3). */
export function hasBody({ headers }: IncomingMessage): boolean {
  return headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0
}

/** Copies a body while it is read elsewhere. A stream's own `on('data')` would start it flowing before its reader is there. */
export function overhearBody(request: IncomingMessage, limit: number, budget: Budget): Promise<BodyReading> {
  if (!hasBody(request)) return Promise.resolve({ kind: 'body', body: Buffer.alloc(0), release: () => {} })
  if (Number(request.headers['content-length'] ?? 0) > limit) return Promise.resolve({ kind: 'too_large' })
  return new Promise((resolve) => {
    const chunks = new BodyBuffer()
    let size = 0
    let over = false
    const finish = (reading: BodyReading): void => {
      if (over) return
      over = true
      if (reading.kind !== 'body') {
        chunks.take()
        budget.give(size)
      }
      resolve(reading)
    }
    const onData = (chunk: Buffer): void => {
      if (over) return
      if (size + chunk.length > limit) finish({ kind: 'too_large' })
      else if (!budget.take(chunk.length)) finish({ kind: 'no_room' })
      else {
        size += chunk.length
        chunks.push(chunk)
      }
    }
    const onEnd = (): void => {
      // Node removes all listeners from a body that nobody reads, and discards it to its end.
      if (!request.listeners('data').includes(onData)) finish({ kind: 'aborted' })
      else finish({ kind: 'body', body: chunks.take(), release: () => budget.give(size) })
    }
    EventEmitter.prototype.on.call(request, 'data', onData)
    request.on('end', onEnd).on('close', () => finish({ kind: 'aborted' }))
  })
}

/** How long a transfer may stand still when others need its room. */
const PATIENCE: Millis = 500
/** Less than this is no progress: otherwise a byte a second would hold a body indefinitely. */
const PROGRESS = 4096
/** Bytes per millisecond (64 KiB/s); slower transfers give way when no transfer stands still. */
const CREEPING = 64
/** The rate is averaged over this. */
const WINDOW: Millis = 1000

/** The slot of transfers that count against no client's share. */
export const NOBODY = -1

/** An incomplete upload or an unsent answer. It holds room, and can be given up. */
export interface Unfinished {
  moved(bytes: number): void
  done(): void
}

/**
 * Transfers that hold room in `limits.buffered`, for as long as their client likes until others need it. Then the one that has
 * stood still longest gives way, or else the slowest below a minimum rate (docs/adr/0044).
 */
export class Stalled {
  /** In order of their last progress. Most bodies arrive with their heads and never get here. */
  readonly #transfers = new Set<Transfer>()

  /** `letGo` must give up the transfer and its room at once. `slot`: the share that it counts against. */
  watch(letGo: () => void, slot: number): Unfinished {
    const transfer = new Transfer(this.#transfers, letGo, slot)
    this.#transfers.add(transfer)
    return transfer
  }

  /** Makes a transfer give way. False: none has to. */
  readonly makeRoom = (): boolean => letGo(this.#transfers, this.#transfers)

  /** The same within one share. */
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
    // In order of progress, so the first that stands still has done so longest.
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

  /** Early in a window, the rate of the one before. */
  rateAt(now: Millis): number {
    const elapsed = now - this.#windowAt
    return elapsed < WINDOW / 2 ? this.#rate : this.#inWindow / elapsed
  }
}
