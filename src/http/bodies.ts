import { EventEmitter } from 'node:events'
import type { IncomingMessage } from 'node:http'
import type { Millis } from '../core/record.ts'
import type { BodyReading } from '../protect/request.ts'
import { BodyBuffer } from '../runtime/body-buffer.ts'
import { type Budget, type Shares, shareOf } from '../runtime/limits.ts'

/** Where many clients upload at once: what is given up when there is no room, and how much each of them has. */
export interface Uploads {
  readonly stalled: Stalled
  readonly shares: Shares
}

/**
 * Reads a protected request's body, whole. Bounded by `limit` bytes, by the room left in `budget`, by the client's share of it, and
 * by `timeout`, which counts from the first call: a slow or aborted upload claims nothing (contract §3.3).
 */
export function readBody(
  request: IncomingMessage,
  limit: number,
  timeout: Millis,
  budget: Budget,
  uploads: Uploads | null,
  client: string,
): Promise<BodyReading> {
  // Closed while something else was waited for: `close` has been emitted, and nobody would say so again.
  if (request.destroyed) return Promise.resolve({ kind: 'aborted' })
  const announced = Number(request.headers['content-length'] ?? 0)
  if (announced > limit) return Promise.resolve({ kind: 'too_large' })
  return new Promise((resolve) => {
    const chunks = new BodyBuffer()
    let size = 0
    let over = false
    let unfinished: Unfinished | null = null
    const slot = uploads?.shares.slotOf(client) ?? 0
    const give = (): void => {
      budget.give(size)
      uploads?.shares.add(slot, -size)
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
      if (uploads !== null && !fits(uploads, slot, size, length, budget.most))
        return finish({ kind: 'no_room' })
      if (!budget.take(length)) return finish({ kind: 'no_room' })
      // It was this upload that had to make room.
      if (over) return budget.give(length)
      size += length
      uploads?.shares.add(slot, length)
      chunks.push(chunk)
      if (unfinished !== null) unfinished.moved(length)
      else if (uploads !== null && size !== announced)
        unfinished = uploads.stalled.watch(() => finish({ kind: 'no_room' }), slot)
    }
    const onEnd = (): void => finish({ kind: 'body', body: chunks.take(), release: give })
    const onAbort = (): void => finish({ kind: 'aborted' })
    const timer = setTimeout(finish, timeout, { kind: 'timeout' })
    request.on('data', onData).on('end', onEnd).on('close', onAbort).on('error', onAbort)
  })
}

/** Whether the client's share has room for more of one body. Alone, a body may take all the room that there is. */
function fits({ shares, stalled }: Uploads, slot: number, size: number, more: number, most: number): boolean {
  for (;;) {
    const held = shares.held(slot)
    if (held === size || held + more <= shareOf(most)) return true
    if (!stalled.makeRoomIn(slot)) return false
  }
}

/** Whether a body is announced (RFC 9112 §6.3). */
export function hasBody({ headers }: IncomingMessage): boolean {
  return headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0
}

/**
 * Copies a body that somebody else reads. The listener is added as to any emitter: a stream's own `on` would set it
 * flowing before its reader is there.
 */
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
      // Node takes all listeners off a body that nobody wants, and reads on to its end.
      if (!request.listeners('data').includes(onData)) finish({ kind: 'aborted' })
      else finish({ kind: 'body', body: chunks.take(), release: () => budget.give(size) })
    }
    EventEmitter.prototype.on.call(request, 'data', onData)
    request.on('end', onEnd).on('close', () => finish({ kind: 'aborted' }))
  })
}

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
 * one that has stood still for longest lets go, or else the one that creeps most (docs/adr/0044).
 */
export class Stalled {
  /** The one that moved last is last. Most bodies come with their heads and are never in it. */
  readonly #transfers = new Set<Transfer>()

  /** `letGo` gives up the transfer and its room, at once. `slot`: whose share it is in. */
  watch(letGo: () => void, slot: number): Unfinished {
    const transfer = new Transfer(this.#transfers, letGo, slot)
    this.#transfers.add(transfer)
    return transfer
  }

  /** Has a transfer let go. False: there is none that must. */
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
    // In the order in which they moved: the first of those that stand still has done so for longest.
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

  /** Too little of a window says nothing yet. */
  rateAt(now: Millis): number {
    const elapsed = now - this.#windowAt
    return elapsed < WINDOW / 2 ? this.#rate : this.#inWindow / elapsed
  }
}
