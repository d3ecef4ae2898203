import type { Readable, Writable } from 'node:stream'
import errors from 'undici/lib/core/errors.js'
import type { Millis } from '../core/record.ts'

/** How long the rest of a request may take to leave after its answer. */
export const ENDING: Millis = 4000

/** What carries a streamed body. */
export interface UploadCarrier {
  /** Where the body is written. */
  readonly writable: Writable
  write(chunk: Buffer): void
  /** The body is complete; nothing more is called. */
  end(): void
  /** It broke off, or is not as long as announced. */
  broken(error: Error): void
}

/**
 * Writes a body as fast as the upstream takes it. `length`: as announced; infinite: none was. Returns a function that stops it.
 */
export function upload(body: Readable, length: number, carrier: UploadCarrier): () => void {
  const { writable } = carrier
  let left = length
  const onData = (chunk: Buffer): void => {
    left -= chunk.length
    if (left < 0) return onBroken(new errors.RequestContentLengthMismatchError())
    // An empty chunk would be the last.
    if (chunk.length === 0) return
    carrier.write(chunk)
    if (writable.writableNeedDrain) body.pause()
  }
  const onEnd = (): void => {
    if (left > 0 && length !== Number.POSITIVE_INFINITY)
      return onBroken(new errors.RequestContentLengthMismatchError())
    stop()
    carrier.end()
  }
  const onBroken = (error?: Error | null): void =>
    carrier.broken(error ?? new errors.RequestAbortedError('the body of the request broke off'))
  const onDrain = (): void => void body.resume()
  const stop = (): void => {
    body.off('data', onData).off('end', onEnd).off('error', onBroken).off('close', onBroken)
    writable.off('drain', onDrain)
  }
  writable.on('drain', onDrain)
  if (body.readableEnded) onEnd()
  else if (body.destroyed) onBroken(body.errored)
  else body.on('end', onEnd).on('error', onBroken).on('close', onBroken).on('data', onData)
  return stop
}
