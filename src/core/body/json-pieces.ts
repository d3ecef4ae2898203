const COMMA = 0x2c

/** Fields of a piece: start (as `~start` if a comma goes before it), end, next piece. */
const PIECE = 3

/** Enough for most bodies, and shared: one text is made at a time. */
const FEW_PIECES = new Int32Array(PIECE * 512)
const FEW_BYTES = Buffer.alloc(2048)

/** Up to here a loop is faster than a call. Bytes. */
const SHORT = 24

/**
 * A text made of pieces of a source: nothing is copied until {@link text}, and reordering costs the same however long the pieces
 * are. Positions beyond the source's end are in what was {@link put}.
 */
export class Pieces {
  readonly #source: Buffer
  #pieces = FEW_PIECES
  #made = FEW_BYTES
  /** How many bytes were put. */
  madeLength = 0
  count = 0
  /** Start of the open piece. */
  from = 0
  /** Number of changes to the source so far. */
  changes = 0

  constructor(source: Buffer) {
    this.#source = source
  }

  /** Ends the open piece before `at`, where the next one begins. Empty pieces are dropped. */
  cut(at: number): void {
    if (this.from < at) this.#push(this.from, at)
    this.from = at
  }

  /** Leaves out the source from `start` to `end`. */
  leaveOut(start: number, end: number): void {
    if (start === end) return
    this.cut(start)
    this.from = end
    this.changes++
  }

  /** Replaces the source from `start` to `end` by what was put since `made`. */
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

  /** Puts `next` after `piece`, with a comma between them or not. */
  link(piece: number, next: number, comma: boolean): void {
    this.#pieces[piece * PIECE + 2] = next
    const start = this.#pieces[next * PIECE] as number
    if (start < 0 !== comma) this.#pieces[next * PIECE] = ~start
  }

  /** Puts the piece that is cut next after `piece`. */
  linkNext(piece: number): void {
    this.#pieces[piece * PIECE + 2] = this.count
  }

  #push(start: number, end: number): void {
    let at = this.count * PIECE
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
    if (first === last && (pieces[first * PIECE] as number) < source.length)
      return source.subarray(pieces[first * PIECE], pieces[first * PIECE + 1])
    // No byte of either is written twice, and commas are only moved.
    const out = Buffer.allocUnsafe(source.length + this.madeLength)
    let length = 0
    let piece = first
    let isLast = false
    do {
      const fields = piece * PIECE
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

/** Fields of a member: start and end of its name without quotes and escapes, the name's first bytes, first piece (-1: left out), last piece. */
const MEMBER = 5
const WORD = 2

/** Enough for most bodies. One text is read at a time: all begin with these. */
const FEW_MEMBERS = new Int32Array(MEMBER * 256)
const FEW = new Int32Array(64)
const [FEW_WORDS, MORE_MEMBERS, MORE_WORDS] = [FEW.slice(), FEW.slice(), FEW.slice()]

/** Up to here insertion sort is faster than radix sort. */
const INSERTED = 32

/** Bytes of a name compared at once. */
const STEP = 4
const BUCKETS = 256
const COUNTS = new Int32Array(BUCKETS)
/** Makes words compare as unsigned. */
const SIGN = 0x80000000

/**
 * Order of bytes; 0 is the end of a name. UTF-8 sorts by code point, RFC 8785 by UTF-16 unit: code points beyond U+FFFF (first
 * byte F0 to F4) go before U+E000 to U+FFFF (EE and EF).
 */
const RANK = Uint8Array.from({ length: 256 }, (_, byte) =>
  byte >= 0xf0 ? byte - 1 : byte >= 0xee ? byte + 6 : byte + 1,
)

/** The members of all open objects, those of the innermost last. */
export class Names {
  readonly #pieces: Pieces
  #members = FEW_MEMBERS
  count = 0
  /** For sorting: members, and the words of their names that are compared. */
  #order = FEW
  #words = FEW_WORDS
  #otherOrder = MORE_MEMBERS
  #otherWords = MORE_WORDS

  constructor(pieces: Pieces) {
    this.#pieces = pieces
  }

  add(start: number, end: number, first: number, last: number): void {
    let at = this.count * MEMBER
    if (at === this.#members.length) {
      const larger = new Int32Array(at * 2)
      larger.set(this.#members)
      this.#members = larger
    }
    this.#members[at++] = start
    this.#members[at++] = end
    this.#members[at++] = this.#word(this.count, 0)
    this.#members[at++] = first
    this.#members[at] = last
    this.count++
  }

  /** Below 0: the last two members are in order; 0: they have the same name. */
  compareLast(): number {
    const last = this.count - 1
    let one = this.#members[(last - 1) * MEMBER + WORD] as number
    let other = this.#members[last * MEMBER + WORD] as number
    for (let at = STEP; one === other && !hasEnd(one); at += STEP) {
      one = this.#word(last - 1, at)
      other = this.#word(last, at)
    }
    return one - other
  }

  /** Orders the pieces of the members from `first` on, after the piece `before`. False: two have the same name. */
  link(first: number, before: number, isOrdered: boolean): boolean {
    const count = this.count - first
    if (count > this.#order.length) {
      this.#order = new Int32Array(count * 2)
      this.#words = new Int32Array(count * 2)
      this.#otherOrder = new Int32Array(count * 2)
      this.#otherWords = new Int32Array(count * 2)
    }
    for (let n = 0; n < count; n++) {
      this.#order[n] = first + n
      this.#words[n] = this.#members[(first + n) * MEMBER + WORD] as number
    }
    if (!isOrdered && !this.#sort(count)) return false
    let last = before
    for (let n = 0; n < count; n++) {
      const fields = (this.#order[n] as number) * MEMBER
      const piece = this.#members[fields + 3] as number
      if (piece < 0) continue
      this.#pieces.link(last, piece, last !== before)
      last = this.#members[fields + 4] as number
    }
    this.#pieces.linkNext(last)
    return true
  }

  /** Four bytes at a time, no byte twice: linear. False: two have the same name. */
  #sort(count: number): boolean {
    const groups = [0, count, 0]
    while (groups.length > 0) {
      const at = groups.pop() as number
      const high = groups.pop() as number
      const low = groups.pop() as number
      if (at > 0) for (let n = low; n < high; n++) this.#words[n] = this.#word(this.#order[n] as number, at)
      if (high - low <= INSERTED) this.#insert(low, high)
      else for (let shift = 0; shift < 32; shift += 8) this.#distribute(low, high, shift)
      const words = this.#words
      for (let start = low, n = low + 1; n <= high; n++) {
        if (n < high && words[n] === words[start]) continue
        if (n - start > 1) {
          if (hasEnd(words[start] as number)) return false
          groups.push(start, n, at + STEP)
        }
        start = n
      }
    }
    return true
  }

  #insert(low: number, high: number): void {
    const order = this.#order
    const words = this.#words
    for (let n = low + 1; n < high; n++) {
      const member = order[n] as number
      const word = words[n] as number
      let to = n
      for (; to > low && (words[to - 1] as number) > word; to--) {
        order[to] = order[to - 1] as number
        words[to] = words[to - 1] as number
      }
      order[to] = member
      words[to] = word
    }
  }

  /** One round of a radix sort, lowest byte first. */
  #distribute(low: number, high: number, shift: number): void {
    const order = this.#order
    const words = this.#words
    COUNTS.fill(0)
    for (let n = low; n < high; n++) {
      const bucket = (((words[n] as number) ^ SIGN) >>> shift) & 0xff
      COUNTS[bucket] = (COUNTS[bucket] as number) + 1
    }
    let at = low
    for (let bucket = 0; bucket < BUCKETS; bucket++) {
      const size = COUNTS[bucket] as number
      if (size === high - low) return
      COUNTS[bucket] = at
      at += size
    }
    for (let n = low; n < high; n++) {
      const word = words[n] as number
      const bucket = ((word ^ SIGN) >>> shift) & 0xff
      const to = COUNTS[bucket] as number
      COUNTS[bucket] = to + 1
      this.#otherOrder[to] = order[n] as number
      this.#otherWords[to] = word
    }
    order.set(this.#otherOrder.subarray(low, high), low)
    words.set(this.#otherWords.subarray(low, high), low)
  }

  /** Four bytes of a name as a number, 0 beyond its end. */
  #word(member: number, from: number): number {
    const start = (this.#members[member * MEMBER] as number) + from
    const end = this.#members[member * MEMBER + 1] as number
    let word = 0
    for (let at = start; at < start + STEP; at++)
      word = (word << 8) | (at < end ? (RANK[this.#pieces.byteAt(at)] as number) : 0)
    return word ^ SIGN
  }
}

function hasEnd(word: number): boolean {
  return (word & 0xff) === 0
}
