import { EventEmitter } from 'node:events'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { BodyReading, ProtectedRequest } from '../protect/request.ts'
import { BodyBuffer } from '../runtime/body-buffer.ts'
import type { Budget } from '../runtime/limits.ts'
import type { Shadow } from '../shadow/shadow.ts'
import { ExchangeTap } from '../upstream/exchange-tap.ts'
import { hasBody } from './body.ts'

export interface ShadowOptions {
  readonly shadow: Shadow
  /** Room for what is overheard: shadow's own, so that it takes none from protected requests. */
  readonly budget: Budget
}

/**
 * Looks at a request that passes: overhears its body and, by the witness, its exchange. Null where shadow has no place for
 * it. The decider begins once the request is on its way.
 */
export function tapRequest(
  { shadow, budget }: ShadowOptions,
  onBug: (error: unknown) => void,
  call: ProtectedRequest,
  request: IncomingMessage,
  response: ServerResponse,
): ExchangeTap | null {
  if (!shadow.enter(call)) return null
  const { limits } = call.route
  const witness = new ExchangeTap({ method: call.method, responseLimit: limits.response }, budget, onBug)
  response.once('close', () => witness.gone())
  const body = overhearBody(request, limits.request, budget)
  const heard: ProtectedRequest = { ...call, readBody: () => body, clientGone: () => false }
  setImmediate(() => void shadow.observe(heard, witness))
  return witness
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
