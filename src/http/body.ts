import type { IncomingMessage } from 'node:http'
import type { Millis } from '../core/record.ts'
import type { BodyReading } from '../protect/request.ts'
import { BodyBuffer } from '../runtime/body-buffer.ts'
import { type Budget, type Shares, shareOf } from '../runtime/limits.ts'
import type { Stalled, Unfinished } from './stalled.ts'

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
