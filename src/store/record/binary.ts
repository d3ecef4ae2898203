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

/** Up to this length a string is written character by character: a call into Buffer costs as much as that many characters. */
const SHORT = 16
/** From this length on, a call into Buffer is cheaper. */
const LONG = 200
/** Large enough for the strings of a typical record. */
const WINDOW = 1024

function isAscii(v: string): boolean {
  for (let n = 0; n < v.length; n++) if (v.charCodeAt(n) > 0x7f) return false
  return true
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
    const [bytes, at, length] = [this.#bytes, this.at, v.length]
    if (length > SHORT) bytes.write(v, at, 'latin1')
    else for (let n = 0; n < length; n++) bytes[at + n] = v.charCodeAt(n)
    this.at = at + length
  }
  text(v: string): void {
    if (v.length <= SHORT && isAscii(v)) return this.latin1(v)
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
  /** The bytes from `at` on, as characters. */
  #window = ''
  #windowFrom = 0
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
    const length = this.u32()
    const at = this.#pass(length)
    return this.#characters(at, at + length)
  }
  text(): string {
    const length = this.u32()
    const at = this.#pass(length)
    if (length <= LONG) {
      const text = this.#characters(at, at + length)
      if (isAscii(text)) return text
    }
    return this.#buffer.toString('utf8', at, at + length)
  }
  /** Decodes latin1 with one Buffer call for all strings that are close together. */
  #characters(from: number, to: number): string {
    if (to - this.#windowFrom > this.#window.length) {
      if (to - from > WINDOW) return this.#buffer.toString('latin1', from, to)
      this.#windowFrom = from
      this.#window = this.#buffer.toString('latin1', from, from + WINDOW)
    }
    return this.#window.slice(from - this.#windowFrom, to - this.#windowFrom)
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
      throw new CorruptRecord('the stored record has bytes that this version cannot read')
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
