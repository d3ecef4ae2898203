import type { RpcProtocol } from './protocol.ts'

export type FramedProtocol = Exclude<RpcProtocol, 'connect'>

/** One message of a call, or the trailers of gRPC-Web. */
export interface RpcMessage {
  readonly isCompressed: boolean
  readonly isTrailers: boolean
  readonly bytes: Buffer
}

/** Flags and length. */
const PREFIX = 5
const COMPRESSED = 0x01
const TRAILERS = 0x80

/** The messages of a body, each behind a flag and its length; null: it is cut, or no such body. */
export function messagesIn(protocol: RpcProtocol, body: Buffer): RpcMessage[] | null {
  const framed = protocol === 'grpc-web-text' ? fromBase64(body) : body
  if (framed === null) return null
  const messages: RpcMessage[] = []
  for (let at = 0; at < framed.length; ) {
    const flags = framed[at] as number
    const isWhole = at + PREFIX <= framed.length && (flags & ~(COMPRESSED | TRAILERS)) === 0
    const start = at + PREFIX
    const end = isWhole ? start + framed.readUInt32BE(at + 1) : Number.POSITIVE_INFINITY
    if (end > framed.length) return null
    messages.push({
      isCompressed: (flags & COMPRESSED) !== 0,
      isTrailers: (flags & TRAILERS) !== 0,
      bytes: framed.subarray(start, end),
    })
    at = end
  }
  return messages
}

/** Several pieces of base64 in a row, each padded for itself. */
function fromBase64(body: Buffer): Buffer | null {
  const text = body.toString('latin1')
  if (!/^(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)*$/.test(text)) return null
  return Buffer.concat(
    text.match(/[A-Za-z0-9+/]+={0,2}/g)?.map((piece) => Buffer.from(piece, 'base64')) ?? [],
  )
}

/** Whether messages can be counted while they arrive. */
export function isFramed(protocol: RpcProtocol): boolean {
  return protocol === 'grpc' || protocol === 'grpc-web'
}

/**
 * Watches the answer of a call: a second message makes it a stream.
 */
export class MessageCount {
  /** Bytes left of the current message; those of its prefix that came. */
  #left = 0
  readonly #prefix = Buffer.alloc(PREFIX)
  #known = 0
  #messages = 0

  /** Whether a second message has begun. */
  readonly saw = (bytes: Buffer): boolean => {
    let at = 0
    while (at < bytes.length) {
      if (this.#left > 0) {
        const taken = Math.min(this.#left, bytes.length - at)
        this.#left -= taken
        at += taken
        continue
      }
      this.#prefix[this.#known++] = bytes[at++] as number
      if (this.#known === 1 && (this.#prefix[0] as number) < TRAILERS && ++this.#messages > 1) return true
      if (this.#known < PREFIX) continue
      this.#left = this.#prefix.readUInt32BE(1)
      this.#known = 0
    }
    return false
  }
}
