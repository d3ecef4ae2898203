import { connect, type Socket } from 'node:net'
import type { Test } from 'tap'
import { type TcpStub, tcpStub } from './upstream.ts'

const PREFACE = 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
export const [DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION] = [
  0, 1, 3, 4, 6, 7, 8, 9,
] as const
export const [END_STREAM, END_HEADERS] = [1, 4] as const
export const [NO_ERROR, INTERNAL_ERROR, REFUSED_STREAM, CANCEL] = [0, 2, 7, 8] as const

/** RFC 9113 §4.1. */
export function frame(
  type: number,
  flags: number,
  stream: number,
  payload: Buffer = Buffer.alloc(0),
): Buffer {
  const head = Buffer.alloc(9)
  head.writeUIntBE(payload.length, 0, 3)
  head.writeUInt8(type, 3)
  head.writeUInt8(flags, 4)
  head.writeUInt32BE(stream, 5)
  return Buffer.concat([head, payload])
}

/** Literal fields without indexing or Huffman coding (RFC 7541 §6.2.2). */
export function fields(lines: readonly (readonly [string, string])[]): Buffer {
  const text = (value: string): Buffer => {
    if (value.length < 127) return Buffer.from([value.length, ...Buffer.from(value)])
    const length: number[] = [127]
    let rest = value.length - 127
    for (; rest >= 128; rest = Math.floor(rest / 128)) length.push((rest % 128) + 128)
    return Buffer.concat([Buffer.from([...length, rest]), Buffer.from(value)])
  }
  return Buffer.concat(lines.flatMap(([name, value]) => [Buffer.from([0]), text(name), text(value)]))
}

export interface Frame {
  readonly type: number
  readonly flags: number
  readonly stream: number
  readonly payload: Buffer
}

class FrameReader {
  readonly #heard: (frame: Frame) => void
  #bytes = Buffer.alloc(0)

  constructor(heard: (frame: Frame) => void) {
    this.#heard = heard
  }

  read(chunk: Buffer): void {
    this.#bytes = Buffer.concat([this.#bytes, chunk])
    for (;;) {
      if (this.#bytes.length < 9) return
      const end = 9 + this.#bytes.readUIntBE(0, 3)
      if (this.#bytes.length < end) return
      const bytes = this.#bytes
      this.#bytes = bytes.subarray(end)
      this.#heard({
        type: bytes.readUInt8(3),
        flags: bytes.readUInt8(4),
        stream: bytes.readUInt32BE(5),
        payload: bytes.subarray(9, end),
      })
    }
  }
}

/** A client that sends what it likes. */
export class Peer {
  readonly socket: Socket
  readonly frames: Frame[] = []
  readonly closed: Promise<void>
  readonly #reader = new FrameReader((one) => void this.frames.push(one))

  constructor(t: Test, port: number, settings: Buffer = Buffer.alloc(0)) {
    this.socket = connect(port, '127.0.0.1').on('error', () => {})
    t.teardown(() => this.socket.destroy())
    this.closed = new Promise((resolve) => this.socket.once('close', () => resolve()))
    this.socket.on('data', (chunk: Buffer) => this.#reader.read(chunk))
    this.socket.write(Buffer.concat([Buffer.from(PREFACE), frame(SETTINGS, 0, 0, settings)]))
  }

  of(type: number): Frame[] {
    return this.frames.filter((one) => one.type === type)
  }

  /** The error code with which the server ends the connection; null: it closes it without one. */
  async ended(): Promise<number | null> {
    await this.closed
    return this.of(GOAWAY).at(-1)?.payload.readUInt32BE(4) ?? null
  }
}

/** Acknowledges settings or a ping (RFC 9113 §6.5, §6.7). */
export const ACK = 1

export interface FrameUpstream extends TcpStub {
  /** Whole requests so far. */
  requests: number
}

export interface FrameScript {
  /** A whole request has come on the stream; `n`: counted over all connections. */
  request(socket: Socket, stream: number, n: number): void
  /** The head of a request has come that has a body. */
  head?(socket: Socket, stream: number): void
  /** Any other frame than those of requests; by default, settings and pings are answered. */
  other?(socket: Socket, frame: Frame): void
}

/** An upstream that speaks HTTP/2 in frames of its own. */
export async function frameUpstream(
  t: Test,
  { request, head, other = answerConnection }: FrameScript,
): Promise<FrameUpstream> {
  const stub = await tcpStub((socket) => {
    let preface = PREFACE.length
    const reader = new FrameReader((one) => {
      const isOfRequest = one.type === HEADERS || one.type === DATA
      if (!isOfRequest) return other(socket, one)
      const isEnd = (one.flags & END_STREAM) !== 0
      if (one.type === HEADERS && !isEnd) head?.(socket, one.stream)
      if (isEnd) request(socket, one.stream, ++upstream.requests)
    })
    socket.on('data', (chunk: Buffer) => {
      const skipped = Math.min(preface, chunk.length)
      preface -= skipped
      reader.read(chunk.subarray(skipped))
    })
  })
  const upstream = Object.assign(stub, { requests: 0 })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return upstream
}

export function answerConnection(socket: Socket, { type, flags, payload }: Frame): void {
  if (type === SETTINGS && flags !== ACK)
    socket.write(Buffer.concat([frame(SETTINGS, 0, 0), frame(SETTINGS, ACK, 0)]))
  if (type === PING && flags !== ACK) socket.write(frame(PING, ACK, 0, payload))
}

/** A `GOAWAY` (RFC 9113 §6.8). */
export function goAway(last: number, code: number): Buffer {
  const payload = Buffer.alloc(8)
  payload.writeUInt32BE(last, 0)
  payload.writeUInt32BE(code, 4)
  return frame(GOAWAY, 0, 0, payload)
}

export function reset(stream: number, code: number): Buffer {
  const payload = Buffer.alloc(4)
  payload.writeUInt32BE(code, 0)
  return frame(RST_STREAM, 0, stream, payload)
}
