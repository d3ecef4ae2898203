import { EventEmitter } from 'node:events'
import type { Millis } from '../core/record.ts'
import type { BodyReading } from '../protect/request.ts'
import { BodyBuffer, free } from '../runtime/body-memory.ts'
import { type Budget, type Shares, shareOf } from '../runtime/limits.ts'
import type { StreamRequest, TrafficRequest } from './request.ts'

/** Shared by all uploads: selects the transfer that gives way, and counts each client's share. */
export interface Uploads {
  readonly stalled: Stalled
  readonly shares: Shares
}

/**
 * Reads a protected request's whole body within `limit` bytes, the room left in `budget`, the client's share of it, and `timeout`. A slow
 * or aborted upload claims nothing (contract §3.3).
 */
export function readBody(
  request: TrafficRequest,
  limit: number,
  timeout: Millis,
  budget: Budget,
  { shares, stalled }: Uploads,
  client: string,
): BodyReading | Promise<BodyReading> {
  // Closed before this call: no further event will say so.
  if (request.destroyed) return { kind: 'aborted' }
  const announced = request.framing.length
  if (announced > limit) return { kind: 'too_large' }
  let size = 0
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
  const whole = request.takeBody()
  if (whole !== null) {
    const { length } = whole
    if (!hasShare(length) || !budget.take(length)) return { kind: 'no_room' }
    size = length
    shares.add(slot, length)
    return { kind: 'body', body: whole, release: give }
  }
  const stream = request as StreamRequest
  return new Promise((resolve) => {
    const body = new BodyBuffer()
    body.announced = announced
    let over = false
    let unfinished: Unfinished | null = null
    const finish = (reading: BodyReading): void => {
      if (over) return
      over = true
      clearTimeout(timer)
      unfinished?.done()
      stream.off('data', onData).off('end', onEnd).off('close', onAbort).off('error', onAbort)
      if (reading.kind !== 'body') {
        stream.pause()
        give()
      }
      resolve(reading)
    }
    const onData = (chunk: Buffer): void => {
      const { length } = chunk
      if (size + length > limit) return finish({ kind: 'too_large' })
      if (!hasShare(length) || !budget.take(length)) return finish({ kind: 'no_room' })
      // This upload had to give way.
      if (over) return budget.give(length)
      size += length
      shares.add(slot, length)
      body.push(chunk)
      // A copy made by Node's parser; nobody else has it.
      free(chunk)
      if (unfinished !== null) unfinished.moved(length)
      else if (size !== announced) unfinished = stalled.watch(() => finish({ kind: 'no_room' }), slot)
    }
    const onEnd = (): void => finish({ kind: 'body', body: body.take(), release: give })
    const onAbort = (): void => finish({ kind: 'aborted' })
    const timer = setTimeout(finish, timeout, { kind: 'timeout' })
    stream.on('data', onData).on('end', onEnd).on('close', onAbort).on('error', onAbort)
  })
}

/** Copies a body while it is being read elsewhere. A stream's own `on('data')` would start it flowing before its reader is attached. */
export function observeBody(
  request: TrafficRequest,
  limit: number,
  budget: Budget,
): BodyReading | Promise<BodyReading> {
  if (request.framing.length > limit) return { kind: 'too_large' }
  const whole = request.peekBody()
  if (whole !== null) {
    const release = budget.hold(whole.length)
    return release === null ? { kind: 'no_room' } : { kind: 'body', body: whole, release }
  }
  const stream = request as StreamRequest
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
      // Node removes all listeners from an unread body, and discards it to its end.
      if (!stream.listeners('data').includes(onData)) finish({ kind: 'aborted' })
      else finish({ kind: 'body', body: chunks.take(), release: () => budget.give(size) })
    }
    EventEmitter.prototype.on.call(stream, 'data', onData)
    stream.on('end', onEnd).on('close', () => finish({ kind: 'aborted' }))
  })
}

/** How long a transfer may stall when others need its room. */
const PATIENCE: Millis = 500
/** Fewer bytes are no progress; otherwise one byte per second would hold a body indefinitely. */
const PROGRESS = 4096
/** Bytes per millisecond (64 KiB/s); if no transfer has stalled, slower ones give way. */
const CREEPING = 64
/** The rate is averaged over this. */
const WINDOW: Millis = 1000

/** The slot of transfers that count against no client's share. */
export const NOBODY = -1

/** An incomplete upload or an unsent answer, which holds room and can be abandoned. */
export interface Unfinished {
  moved(bytes: number): void
  done(): void
}

/**
 * Transfers may hold room in `limits.buffered` until others need it. Then the one stalled longest gives way, or else the slowest below a
 * minimum rate (docs/adr/0044).
 */
export class Stalled {
  /** In order of last progress. Most bodies arrive with their heads and never get here. */
  readonly #transfers = new Set<Transfer>()

  /** `letGo` must abandon the transfer and release its room at once. `slot`: the share that it counts against. */
  watch(letGo: () => void, slot: number): Unfinished {
    const transfer = new Transfer(this.#transfers, letGo, slot)
    this.#transfers.add(transfer)
    return transfer
  }

  /** Makes a transfer give way; false if there is none. */
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
