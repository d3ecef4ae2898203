import { connect, type Socket } from 'node:net'
import type { Test } from 'tap'

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
  readonly stream: number
  readonly payload: Buffer
}

/** A client that sends what it likes. */
export class Peer {
  readonly socket: Socket
  readonly frames: Frame[] = []
  readonly closed: Promise<void>
  #bytes = Buffer.alloc(0)

  constructor(t: Test, port: number, settings: Buffer = Buffer.alloc(0)) {
    this.socket = connect(port, '127.0.0.1').on('error', () => {})
    t.teardown(() => this.socket.destroy())
    this.closed = new Promise((resolve) => this.socket.once('close', () => resolve()))
    this.socket.on('data', (chunk: Buffer) => this.#read(chunk))
    this.socket.write(Buffer.concat([Buffer.from(PREFACE), frame(SETTINGS, 0, 0, settings)]))
  }

  #read(chunk: Buffer): void {
    this.#bytes = Buffer.concat([this.#bytes, chunk])
    for (;;) {
      if (this.#bytes.length < 9) return
      const end = 9 + this.#bytes.readUIntBE(0, 3)
      if (this.#bytes.length < end) return
      this.frames.push({
        type: this.#bytes.readUInt8(3),
        stream: this.#bytes.readUInt32BE(5),
        payload: this.#bytes.subarray(9, end),
      })
      this.#bytes = this.#bytes.subarray(end)
    }
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
