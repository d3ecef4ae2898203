import type { IncomingMessage } from 'node:http'
import type { Budget } from '../core/budget.ts'
import type { Millis } from '../core/record.ts'
import type { BodyReading } from '../guard/call.ts'
import { Collector } from '../upstream/collect.ts'

/**
 * Reads a protected request's body, whole. Bounded by `limit` bytes, by the room left in `budget` and by `timeout`, which
 * counts from the first call: a slow or aborted upload claims nothing (contract §3.3).
 */
export function readBody(
  request: IncomingMessage,
  limit: number,
  timeout: Millis,
  budget: Budget,
): Promise<BodyReading> {
  // Closed while something else was waited for: `close` has been emitted, and nobody would say so again.
  if (request.destroyed) return Promise.resolve({ kind: 'aborted' })
  const announced = Number(request.headers['content-length'] ?? 0)
  if (announced > limit) return Promise.resolve({ kind: 'too_large' })
  return new Promise((resolve) => {
    const chunks = new Collector()
    let size = 0
    const finish = (reading: BodyReading): void => {
      clearTimeout(timer)
      request.off('data', onData).off('end', onEnd).off('close', onAbort).off('error', onAbort)
      if (reading.kind !== 'body') {
        request.pause()
        budget.give(size)
      }
      resolve(reading)
    }
    const onData = (chunk: Buffer): void => {
      if (size + chunk.length > limit) finish({ kind: 'too_large' })
      else if (!budget.take(chunk.length)) finish({ kind: 'no_room' })
      else {
        size += chunk.length
        chunks.push(chunk)
      }
    }
    const onEnd = (): void => {
      const body = chunks.take()
      const held = size
      finish({ kind: 'body', body, release: () => budget.give(held) })
    }
    const onAbort = (): void => finish({ kind: 'aborted' })
    const timer = setTimeout(finish, timeout, { kind: 'timeout' })
    request.on('data', onData).on('end', onEnd).on('close', onAbort).on('error', onAbort)
  })
}

/** Whether a body is announced (RFC 9112 §6.3). */
export function hasBody({ headers }: IncomingMessage): boolean {
  return headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0
}
