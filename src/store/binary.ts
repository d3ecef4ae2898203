import { CorruptRecord } from './register.ts'

/** 48 bits: enough for milliseconds until the year 10889, exact in a double and in Lua. */
export const U48 = 6

/** All numbers are big-endian. */
export class BinaryWriter {
  #buffer: Buffer
  at = 0
  constructor(size: number) {
    this.#buffer = Buffer.allocUnsafe(size)
  }
  #room(n: number): void {
    if (this.at + n <= this.#buffer.length) return
    const larger = Buffer.allocUnsafe(Math.max(this.#buffer.length * 2, this.at + n))
    this.#buffer.copy(larger, 0, 0, this.at)
    this.#buffer = larger
  }
  zeros(n: number): void {
    this.#room(n)
    this.#buffer.fill(0, this.at, this.at + n)
    this.at += n
  }
  u8(v: number): void {
    this.#room(1)
    this.at = this.#buffer.writeUInt8(v, this.at)
  }
  u16(v: number): void {
    this.#room(2)
    this.at = this.#buffer.writeUInt16BE(v, this.at)
  }
  u32(v: number): void {
    this.#room(4)
    this.at = this.#buffer.writeUInt32BE(v, this.at)
  }
  u32At(at: number, v: number): void {
    this.#buffer.writeUInt32BE(v, at)
  }
  u48(v: number): void {
    this.#room(U48)
    this.at = this.#buffer.writeUIntBE(v, this.at, U48)
  }
  ascii(v: string): void {
    this.#room(v.length)
    this.at += this.#buffer.write(v, this.at, 'latin1')
  }
  bytes(v: Buffer): void {
    this.#room(v.length)
    this.at += v.copy(this.#buffer, this.at)
  }
  /** Header lines: bytes as on the wire. */
  latin1(v: string): void {
    this.u32(v.length)
    this.ascii(v)
  }
  text(v: string): void {
    const length = Buffer.byteLength(v)
    this.u32(length)
    this.#room(length)
    this.at += this.#buffer.write(v, this.at, 'utf8')
  }
  lines(v: readonly string[]): void {
    this.u32(v.length)
    for (const line of v) this.latin1(line)
  }
  done(): Buffer {
    return this.#buffer.subarray(0, this.at)
  }
}

/** @throws {CorruptRecord} if there are fewer bytes than asked for. */
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
    return this.#buffer.readUIntBE(this.#pass(U48), U48)
  }
  latin1(): string {
    const length = this.u32()
    const at = this.#pass(length)
    return this.#buffer.toString('latin1', at, at + length)
  }
  text(): string {
    const length = this.u32()
    const at = this.#pass(length)
    return this.#buffer.toString('utf8', at, at + length)
  }
  lines(): string[] {
    const lines: string[] = []
    for (let n = this.u32(); n > 0; n--) lines.push(this.latin1())
    return lines
  }
  end(): void {
    if (this.#at !== this.#buffer.length)
      throw new CorruptRecord('the stored record has bytes that this version does not know')
  } /** Where the next `n` bytes begin, which are read now. */
  #pass(n: number): number {
    const at = this.#at
    if (at + n > this.#buffer.length)
      throw new CorruptRecord(`the stored record is cut off at ${this.#buffer.length} bytes`)
    this.#at = at + n
    return at
  }
}
