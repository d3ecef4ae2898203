import { CorruptRecord } from '../register.ts'

/* Numbers and strings as bytes. All numbers are big-endian. */

/** 48 bits: enough for milliseconds until the year 10889, exact in a double and in Lua. */
export const U48 = 6
/** Largest instant, version or fence that a record can hold. */
export const MAX_U48 = 2 ** 48 - 1
const HIGH = 2 ** 32

export function readU48(bytes: Buffer, at: number): number {
  return bytes.readUInt16BE(at) * HIGH + bytes.readUInt32BE(at + 2)
}

export function writeU48(bytes: Buffer, v: number, at: number): void {
  const high = Math.floor(v / HIGH)
  bytes[at] = high >>> 8
  bytes[at + 1] = high
  writeU32(bytes, v, at + 2)
}

function writeU32(bytes: Buffer, v: number, at: number): void {
  bytes[at] = v >>> 24
  bytes[at + 1] = v >>> 16
  bytes[at + 2] = v >>> 8
  bytes[at + 3] = v
}

export class BinaryWriter {
  #bytes: Buffer
  at = 0
  constructor(size: number) {
    this.#bytes = Buffer.allocUnsafe(size)
  }
  #room(n: number): void {
    if (this.at + n <= this.#bytes.length) return
    const larger = Buffer.allocUnsafe(Math.max(this.#bytes.length * 2, this.at + n))
    larger.set(this.#bytes)
    this.#bytes = larger
  }
  zeros(n: number): void {
    this.#room(n)
    for (let end = this.at + n; this.at < end; this.at++) this.#bytes[this.at] = 0
  }
  u8(v: number): void {
    this.#room(1)
    this.#bytes[this.at++] = v
  }
  u16(v: number): void {
    this.#room(2)
    this.#bytes[this.at++] = v >>> 8
    this.#bytes[this.at++] = v
  }
  u32(v: number): void {
    this.#room(4)
    writeU32(this.#bytes, v, this.at)
    this.at += 4
  }
  u32At(at: number, v: number): void {
    writeU32(this.#bytes, v, at)
  }
  u48(v: number): void {
    this.#room(U48)
    writeU48(this.#bytes, v, this.at)
    this.at += U48
  }
  bytes(v: Buffer): void {
    this.#room(v.length)
    this.#bytes.set(v, this.at)
    this.at += v.length
  }
  /** Header lines: bytes as on the wire. */
  latin1(v: string): void {
    this.u32(v.length)
    this.#room(v.length)
    this.at += this.#bytes.write(v, this.at, 'latin1')
  }
  text(v: string): void {
    this.#room(4 + 3 * v.length)
    const length = this.#bytes.write(v, this.at + 4)
    writeU32(this.#bytes, length, this.at)
    this.at += 4 + length
  }
  lines(v: readonly string[]): void {
    this.u32(v.length)
    for (const line of v) this.latin1(line)
  }
  done(): Buffer {
    return this.#bytes.subarray(0, this.at)
  }
}

/** @throws {CorruptRecord} if there are fewer bytes than requested. */
export class BinaryReader {
  readonly #buffer: Buffer
  #at: number
  constructor(buffer: Buffer, at: number) {
    this.#buffer = buffer
    this.#at = at
  }
  take(n: number): Buffer {
    const at = this.#pass(n)
    return this.#buffer.subarray(at, at + n)
  }
  u8(): number {
    return this.#buffer.readUInt8(this.#pass(1))
  }
  u16(): number {
    return this.#buffer.readUInt16BE(this.#pass(2))
  }
  u32(): number {
    return this.#buffer.readUInt32BE(this.#pass(4))
  }
  u48(): number {
    return readU48(this.#buffer, this.#pass(U48))
  }
  latin1(): string {
    return this.#string('latin1')
  }
  text(): string {
    return this.#string('utf8')
  }
  #string(encoding: 'latin1' | 'utf8'): string {
    const length = this.u32()
    const at = this.#pass(length)
    return this.#buffer.toString(encoding, at, at + length)
  }
  lines(): string[] {
    const lines: string[] = []
    for (let n = this.u32(); n > 0; n--) lines.push(this.latin1())
    return lines
  }
  /** A text, or any bytes, preceded by their length. */
  skip(): void {
    this.#pass(this.u32())
  }
  /** The rest. */
  rest(): Buffer {
    return this.take(this.#buffer.length - this.#at)
  }
  get at(): number {
    return this.#at
  }
  end(): void {
    if (this.#at !== this.#buffer.length)
      throw new CorruptRecord('the stored record has bytes that this version does not know')
  }
  /** Consumes `n` bytes; returns where they begin. */
  #pass(n: number): number {
    const at = this.#at
    if (at + n > this.#buffer.length)
      throw new CorruptRecord(`the stored record is cut off at ${this.#buffer.length} bytes`)
    this.#at = at + n
    return at
  }
}
