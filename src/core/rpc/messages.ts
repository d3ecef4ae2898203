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

/**
 * The messages of a body, each preceded by a flag byte and its length; null: the body is truncated, or not of this form. At most `most`
 * are read, since each one takes memory, however short it is.
 */
export function messagesIn(
  protocol: RpcProtocol,
  body: Buffer,
  most = Number.POSITIVE_INFINITY,
): RpcMessage[] | null {
  const framed = protocol === 'grpc-web-text' ? fromBase64(body) : body
  if (framed === null) return null
  const messages: RpcMessage[] = []
  for (let at = 0; at < framed.length && messages.length < most; ) {
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

/** Several pieces of base64 in a row, each with its own padding. A long body would exhaust the stack of a regular expression. */
function fromBase64(body: Buffer): Buffer | null {
  if (body.length % 4 !== 0) return null
  const bytes = Buffer.allocUnsafe((body.length / 4) * 3)
  let length = 0
  for (let at = 0; at < body.length; at += 4) {
    const third = body[at + 2] === PAD ? 0 : sextet(body[at + 2])
    const isPadded = body[at + 3] === PAD
    const fourth = isPadded ? 0 : sextet(body[at + 3])
    const group = (sextet(body[at]) << 18) | (sextet(body[at + 1]) << 12) | (third << 6) | fourth
    // Anything but a digit makes the group negative; digits after the padding are refused, too.
    if (group < 0 || (body[at + 2] === PAD && !isPadded)) return null
    bytes[length++] = group >> 16
    if (body[at + 2] !== PAD) bytes[length++] = (group >> 8) & 0xff
    if (!isPadded) bytes[length++] = group & 0xff
  }
  return bytes.subarray(0, length)
}

const PAD = 0x3d
const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'
const SEXTETS = new Int8Array(256).fill(-1)
for (const [value, digit] of Buffer.from(DIGITS).entries()) SEXTETS[digit] = value

/** -1: not a base64 digit. */
function sextet(byte: number | undefined): number {
  return SEXTETS[byte as number] as number
}

/** Whether messages can be counted while they arrive. */
export function isFramed(protocol: RpcProtocol): boolean {
  return protocol === 'grpc' || protocol === 'grpc-web'
}

/**
 * Watches the answer of a call: a second message makes it a stream.
 */
export class MessageCount {
  /** Bytes of the current message that are still to come. */
  #left = 0
  readonly #prefix = Buffer.alloc(PREFIX)
  /** Bytes of its prefix that have arrived. */
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
