import { COMMA } from './json-bytes.ts'

/** Of each piece: where it begins (negative, by `~`, where a comma goes before it) and ends, and the piece after it. */
const FIELDS = 3

/** Enough for most bodies. One text is made at a time: all begin with these. */
const FEW_PIECES = new Int32Array(FIELDS * 512)
const FEW_BYTES = Buffer.alloc(2048)

/** Up to here a loop is cheaper than a call. */
const SHORT = 24

/**
 * A text made of pieces of another: what stays as it is is not copied until {@link text}, and changing the order of parts
 * costs the same however long they are. Positions beyond the source's end are in what was {@link put}.
 */
export class Pieces {
  readonly #source: Buffer
  #pieces = FEW_PIECES
  #made = FEW_BYTES
  /** How many bytes were put. */
  madeLength = 0
  count = 0
  /** Where the piece begins that is not cut yet. */
  from = 0
  /** How often the text was made to differ from the source. */
  changes = 0

  constructor(source: Buffer) {
    this.#source = source
  }

  /** Ends a piece before `at`; the next one begins there. An empty one is none. */
  cut(at: number): void {
    if (this.from < at) this.#push(this.from, at)
    this.from = at
  }

  /** Leaves out what stands from `start` to `end`. */
  leaveOut(start: number, end: number): void {
    if (start === end) return
    this.cut(start)
    this.from = end
    this.changes++
  }

  /** What was put since `made` takes the place of what stands from `start` to `end`. */
  replace(start: number, end: number, made: number): void {
    this.leaveOut(start, end)
    this.#push(this.#source.length + made, this.#source.length + this.madeLength)
  }

  /** Back to when there were `count` pieces and the next one began at `from`. */
  rewind(count: number, from: number): void {
    this.count = count
    this.from = from
  }

  put(byte: number): void {
    if (this.madeLength === this.#made.length) this.#grow()
    this.#made[this.madeLength++] = byte
  }

  putAll(bytes: Uint8Array, length: number): void {
    while (this.madeLength + length > this.#made.length) this.#grow()
    const made = this.#made
    const at = this.madeLength
    for (let n = 0; n < length; n++) made[at + n] = bytes[n] as number
    this.madeLength += length
  }

  #grow(): void {
    const larger = Buffer.allocUnsafe(this.#made.length * 2)
    this.#made.copy(larger)
    this.#made = larger
  }

  byteAt(at: number): number {
    const made = at - this.#source.length
    return (made < 0 ? this.#source[at] : this.#made[made]) as number
  }

  string(start: number, end: number): string {
    const length = this.#source.length
    return start < length
      ? this.#source.toString('utf8', start, end)
      : this.#made.toString('utf8', start - length, end - length)
  }

  /** Says that `piece` goes before `next`, with a comma between them or not. */
  link(piece: number, next: number, comma: boolean): void {
    this.#pieces[piece * FIELDS + 2] = next
    const start = this.#pieces[next * FIELDS] as number
    if (start < 0 !== comma) this.#pieces[next * FIELDS] = ~start
  }

  /** Says that `piece` goes before the one that is cut next. */
  linkNext(piece: number): void {
    this.#pieces[piece * FIELDS + 2] = this.count
  }

  #push(start: number, end: number): void {
    let at = this.count * FIELDS
    if (at === this.#pieces.length) {
      const larger = new Int32Array(at * 2)
      larger.set(this.#pieces)
      this.#pieces = larger
    }
    this.count++
    this.#pieces[at++] = start
    this.#pieces[at++] = end
    this.#pieces[at] = this.count
  }

  /** From the piece `first` to the piece `last`. */
  text(first: number, last: number): Buffer {
    const pieces = this.#pieces
    const source = this.#source
    if (first === last && (pieces[first * FIELDS] as number) < source.length)
      return source.subarray(pieces[first * FIELDS], pieces[first * FIELDS + 1])
    // No byte of either is written twice, and commas are only moved.
    const out = Buffer.allocUnsafe(source.length + this.madeLength)
    let length = 0
    let piece = first
    let isLast = false
    do {
      const fields = piece * FIELDS
      let start = pieces[fields] as number
      let end = pieces[fields + 1] as number
      if (start < 0) {
        start = ~start
        out[length++] = COMMA
      }
      let from = source
      if (start >= source.length) {
        from = this.#made
        start -= source.length
        end -= source.length
      }
      if (end - start > SHORT) length += from.copy(out, length, start, end)
      else while (start < end) out[length++] = from[start++] as number
      isLast = piece === last
      piece = pieces[fields + 2] as number
    } while (!isLast)
    return out.subarray(0, length)
  }
}
