const TAB = 0x09
const LINE_FEED = 0x0a
const CARRIAGE_RETURN = 0x0d
const SPACE = 0x20
const COMMA = 0x2c

/** Bytes. Bodies up to this size are read in one go, in shared memory. */
export const SHORT_BODY = 64 * 1024

/** Bytes for which a loop is cheaper than a call. */
const FEW = 64
/** Copies may write this many bytes too many, and no number or character takes more. */
const SLACK = 64

/** Members placed in one step, so that other work gets its turn. */
const PLACED_AT_ONCE = 8 * 1024

/** A short body, its canonical text, and an object being rearranged. Not resident until used. */
const SHARED = new Uint8Array(3 * SHORT_BODY + 1024)
const SHARED_WORDS = new DataView(SHARED.buffer)

/** Room for a text longer than its body (with exponents: 4.4 times). Growing is slow, and unused memory costs nothing. */
const SPARE = 8 * 1024 * 1024

/** Not zeroed, since it is written before it is read: zeroing takes as long as reading some of the body. */
function memoryOf(length: number): Uint8Array {
  return new Uint8Array(Buffer.allocUnsafeSlow(length).buffer)
}

/**
 * A body and the canonical text made from it, one after the other in the same memory. Unchanged parts are copied only when something
 * changes: a canonical body is not copied at all.
 */
export class Text {
  /** The body, then a 0 that ends every loop over it, then the text. Replaced when it grows. */
  memory: Uint8Array
  /** Where the 0 is. */
  readonly end: number
  /** Current end of the text. */
  out: number
  /** The body from here on is not yet in the text. */
  from = 0
  words: DataView
  /** For an object being rearranged: number of placed members, start of the first one, and its distance from the source. */
  #placed = 0
  #begin = 0
  #shift = 0

  constructor(body: Buffer) {
    const { length } = body
    const isShort = length <= SHORT_BODY
    this.memory = isShort ? SHARED : memoryOf(2 * length + Math.min(4 * length, SPARE) + 1024)
    this.words = isShort ? SHARED_WORDS : new DataView(this.memory.buffer)
    this.memory.set(body)
    this.memory[length] = 0
    this.end = length
    this.out = length + 1
  }

  /** The whole text. The next reading overwrites it. */
  whole(): Buffer {
    if (this.from === 0) return this.bytes(0, this.end)
    this.keep(this.end)
    return this.bytes(this.end + 1, this.out)
  }

  /** Frees a long body's memory: left to V8, several times its length triggers a full collection (docs/adr/0017). */
  free(): void {
    if (this.memory !== SHARED) (this.memory.buffer as ArrayBuffer).transfer(0)
  }

  bytes(start: number, end: number): Buffer {
    return Buffer.from(this.memory.buffer, start, end - start)
  }

  /** The position in the text of the body's byte at `at`. */
  placeOf(at: number): number {
    return this.out - this.from + at
  }

  /** Adds the body up to `at` to the text. */
  keep(at: number): void {
    this.#copy(this.from, at)
    this.from = at
  }

  /** Omits the body from `start` to `end`. */
  leaveOut(start: number, end: number): void {
    this.#copy(this.from, start)
    this.from = end
  }

  /** Removes the text from `place` on, and omits the rest of the body up to `at`. */
  takeBack(place: number, at: number): void {
    if (place > this.out) this.keep(this.from + place - this.out)
    this.out = place
    this.from = at
  }

  put(byte: number): void {
    this.#room(1)
    this.memory[this.out++] = byte
  }

  putAll(bytes: Uint8Array, length: number): void {
    this.#room(length)
    const { memory, out } = this
    for (let n = 0; n < length; n++) memory[out + n] = bytes[n] as number
    this.out += length
  }

  /** Omits whitespace at `at`, if any, and returns its end. */
  skipSpace(at: number): number {
    const { memory } = this
    let end = at
    for (;;) {
      const byte = memory[end]
      if (byte !== SPACE && byte !== LINE_FEED && byte !== CARRIAGE_RETURN && byte !== TAB) break
      end++
    }
    if (end > at) this.leaveOut(at, end)
    return end
  }

  /**
   * Puts the members of an object that ends at `at` in the order of `sorted`, separated by commas. The first one has the index `first`;
   * `from` is the value at its beginning. Returns the number of bytes; -1: call again.
   */
  rearrange(
    members: Int32Array,
    sorted: Int32Array,
    count: number,
    first: number,
    from: number,
    at: number,
  ): number {
    if (this.#placed === 0) this.#setAside(members, first, from, at)
    const begin = this.#begin
    const shift = this.#shift
    const end = Math.min(this.#placed + PLACED_AT_ONCE, count)
    // The members take no more room than before. The ones set aside have theirs already.
    this.#room(at - this.from)
    const { memory, words } = this
    let { out } = this
    for (let n = this.#placed; n < end; n++) {
      const member = sorted[n] as number
      const start = members[member + 1] as number
      if (start < 0) continue
      if (out > begin) memory[out++] = COMMA
      const length = (members[member + 2] as number) - start
      if (length > FEW) memory.copyWithin(out, start + shift, start + shift + length)
      // Up to fifteen bytes too many: an exact loop would cost a branch misprediction.
      else
        for (let n = 0; n < length; n += 16) {
          const source = start + shift + n
          const to = out + n
          words.setInt32(to, words.getInt32(source, true), true)
          words.setInt32(to + 4, words.getInt32(source + 4, true), true)
          words.setInt32(to + 8, words.getInt32(source + 8, true), true)
          words.setInt32(to + 12, words.getInt32(source + 12, true), true)
        }
      out += length
    }
    this.out = out
    this.#placed = end === count ? 0 : end
    if (end < count) return -1
    this.from = at
    return this.out - begin
  }

  /** Makes room where the members are. */
  #setAside(members: Int32Array, first: number, from: number, at: number): void {
    const firstStart = members[first + 1] as number
    const begin = firstStart < 0 ? ~firstStart : firstStart
    this.#begin = begin
    this.#shift = this.from - this.out
    // Unchanged: copied straight from the body.
    if (from === this.from) return this.keep(begin + this.#shift)
    this.keep(at)
    const length = this.out - begin
    this.#room(SLACK + length)
    const aside = this.out + SLACK
    this.memory.copyWithin(aside, begin, this.out)
    this.out = begin
    this.#shift = aside - begin
  }

  /** Copies four bytes at a time, at most three too many. */
  #copy(start: number, end: number): void {
    const length = end - start
    this.#room(length)
    const { out } = this
    this.out += length
    if (length > FEW) this.memory.copyWithin(out, start, end)
    else {
      const { words } = this
      for (let n = 0; n < length; n += 4) words.setInt32(out + n, words.getInt32(start + n, true), true)
    }
  }

  #room(bytes: number): void {
    if (this.out + bytes + SLACK > this.memory.length) this.#grow(bytes)
  }

  #grow(bytes: number): void {
    const larger = memoryOf(2 * (this.out + bytes + SLACK))
    larger.set(this.memory.subarray(0, this.out))
    this.memory = larger
    this.words = new DataView(larger.buffer)
  }
}

/** Value of a hex digit; -1: not one. */
const HEX = Int8Array.from({ length: 256 }, (_, byte) =>
  '0123456789abcdef'.indexOf(String.fromCharCode(byte).toLowerCase()),
)

/** The byte that two hex digits encode; below 0: they are not hex digits. */
export function hexPair(bytes: Uint8Array, at: number): number {
  return at + 1 < bytes.length
    ? ((HEX[bytes[at] as number] as number) << 4) | (HEX[bytes[at + 1] as number] as number)
    : -1
}
