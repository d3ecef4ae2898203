/*
 * RESP2, Redis' protocol (https://redis.io/docs/latest/develop/reference/protocol-spec/): commands and replies as bytes. A command is an
 * array of bulk strings. Replies arrive in the order of the commands, in chunks of any size.
 */

/** Strings must be ASCII: names, ids, numbers. Send other text as bytes. */
export type RespArg = string | number | Buffer

/** Integers as numbers, bulk strings as separate buffers, simple strings as text. */
export type RespReply = number | string | Buffer | null | ReplyError | RespReply[]

/** An error reply. Not thrown: the awaiting caller interprets it. */
export class ReplyError {
  readonly message: string

  constructor(message: string) {
    // Redis quotes the arguments of unknown commands, among them the password of AUTH.
    this.message = message.replace(/, with args beginning with.*/s, '')
  }
}

/** The peer does not speak RESP2: nothing that follows can be understood. */
export class ProtocolError extends Error {
  override readonly name = 'ProtocolError'
}

const CR = 13
const LF = 10

const CHUNK = 64 * 1024
/** Larger arguments are not copied but sent as they are. */
const COPIED = 4096

/** Up to this length, strings are written character by character: a call into Buffer costs as much as that many characters. */
const SHORT = 16
/** `$` or `*`, the digits of a length, and the line end. */
const LONGEST_LENGTH = 20
const STAR = 0x2a
const DOLLAR = 0x24

/** The constant first parts of a command, encoded. */
export interface CommandHead {
  readonly parts: number
  readonly bytes: Buffer
}

export function commandHead(...parts: readonly string[]): CommandHead {
  const text = parts.map((part) => `$${part.length}\r\n${part}\r\n`).join('')
  return { parts: parts.length, bytes: Buffer.from(text, 'latin1') }
}

/** Encodes the commands that are sent together. */
export class CommandBuffer {
  #chunk = Buffer.allocUnsafeSlow(CHUNK)
  /** Position in the chunk; what precedes it has been taken. */
  #from = 0
  #at = 0
  #parts: Buffer[] = []

  add({ parts, bytes }: CommandHead, args: readonly RespArg[]): void {
    this.#length(STAR, parts + args.length)
    this.#bytes(bytes)
    for (const arg of args) {
      const value = typeof arg === 'number' ? String(arg) : arg
      this.#length(DOLLAR, value.length)
      if (typeof value === 'string') this.#text(value)
      else this.#bytes(value)
      this.#room(2)
      this.#chunk[this.#at++] = CR
      this.#chunk[this.#at++] = LF
    }
  }

  /** All bytes added since the last call, as few buffers. They must be written before {@link reuse}. */
  take(): Buffer[] {
    this.#cut()
    const parts = this.#parts
    this.#parts = []
    return parts
  }

  /** What was taken has been written: its memory is free. */
  reuse(): void {
    this.#from = 0
    this.#at = 0
  }

  #length(type: number, length: number): void {
    this.#room(LONGEST_LENGTH)
    this.#chunk[this.#at++] = type
    let unit = 1
    while (unit * 10 <= length) unit *= 10
    for (let rest = length; unit >= 1; unit = Math.floor(unit / 10)) {
      this.#chunk[this.#at++] = 0x30 + Math.floor(rest / unit)
      rest %= unit
    }
    this.#chunk[this.#at++] = CR
    this.#chunk[this.#at++] = LF
  }

  /** latin1: one byte per character keeps the lengths right for any input. */
  #text(text: string): void {
    this.#room(text.length)
    const [chunk, at] = [this.#chunk, this.#at]
    if (text.length > SHORT) chunk.write(text, at, 'latin1')
    else for (let n = 0; n < text.length; n++) chunk[at + n] = text.charCodeAt(n)
    this.#at = at + text.length
  }

  #bytes(bytes: Buffer): void {
    if (bytes.length > COPIED) {
      this.#cut()
      this.#parts.push(bytes)
      return
    }
    this.#room(bytes.length)
    this.#chunk.set(bytes, this.#at)
    this.#at += bytes.length
  }

  #room(length: number): void {
    if (this.#at + length <= this.#chunk.length) return
    this.#cut()
    this.#chunk = Buffer.allocUnsafeSlow(Math.max(CHUNK, length))
    this.#from = 0
    this.#at = 0
  }

  #cut(): void {
    if (this.#at > this.#from) this.#parts.push(this.#chunk.subarray(this.#from, this.#at))
    this.#from = this.#at
  }
}

const COLON = 0x3a
/** Numbers of up to this many digits are exact in a double. */
const EXACT_DIGITS = 15
/** Lines hold numbers and messages. */
const LONGEST_LINE = 64 * 1024
/** Redis' own limits. */
const LONGEST_BULK = 512 * 1024 * 1024
const LONGEST_ARRAY = 1024 * 1024
/** Ours nest once. */
const DEEPEST_ARRAY = 8

/** Parses replies from a byte stream. Each byte of a bulk string is copied once. */
export class Replies {
  readonly #take: (reply: RespReply) => void
  /** The beginning of an incomplete line. */
  #line: Buffer | null = null
  /** An incomplete bulk string; `#filled` counts the line end as well. */
  #bulk: Buffer | null = null
  #filled = 0
  /** Incomplete arrays, the outermost first, and how many elements each of them lacks. */
  readonly #arrays: RespReply[][] = []
  readonly #lacks: number[] = []

  /** `take` is called with each reply, in order. */
  constructor(take: (reply: RespReply) => void) {
    this.#take = take
  }

  /**
   * The bytes are not kept.
   * @throws {ProtocolError} the rest of this connection is then worthless.
   */
  push(bytes: Buffer): void {
    const chunk = this.#line === null ? bytes : Buffer.concat([this.#line, bytes])
    this.#line = null
    let at = 0
    while (at < chunk.length) {
      if (this.#bulk !== null) {
        at = this.#fill(this.#bulk, chunk, at)
        continue
      }
      const read = this.#number(chunk, at)
      if (read > at) {
        at = read
        continue
      }
      const end = chunk.indexOf(LF, at)
      if (end < 0 || end - at > LONGEST_LINE) {
        if (chunk.length - at > LONGEST_LINE) throw new ProtocolError('a line without an end')
        // A copy: the chunk belongs to the connection.
        this.#line = Buffer.from(chunk.subarray(at))
        return
      }
      if (chunk[end - 1] !== CR) throw new ProtocolError('a line does not end with CR LF')
      this.#read(chunk, at, end - 1)
      at = end + 1
    }
  }

  /**
   * Reads a line of a type and a few digits, as nearly all are. Returns where the chunk continues; `from` if the line is of another form.
   */
  #number(chunk: Buffer, from: number): number {
    const type = chunk[from] as number
    if (type !== COLON && type !== DOLLAR && type !== STAR) return from
    let at = from + 1
    let value = 0
    for (; at < chunk.length; at++) {
      const digit = (chunk[at] as number) - 0x30
      if (digit < 0 || digit > 9) break
      value = value * 10 + digit
    }
    const digits = at - from - 1
    if (digits === 0 || digits > EXACT_DIGITS || chunk[at] !== CR || chunk[at + 1] !== LF) return from
    this.#counted(type, value)
    return at + 2
  }

  /** Reads a line, from its type on, without its end. */
  #read(chunk: Buffer, at: number, end: number): void {
    const type = chunk.readUInt8(at)
    switch (type) {
      case COLON:
      case DOLLAR:
      case STAR:
        return this.#counted(type, integer(chunk, at + 1, end))
      case 0x2b: // +
        return this.#value(chunk.toString('latin1', at + 1, end))
      case 0x2d: // -
        return this.#value(new ReplyError(chunk.toString('utf8', at + 1, end)))
      default:
        throw new ProtocolError(`a reply of type ${type}`)
    }
  }

  /** Reads an integer, or the length of what follows. */
  #counted(type: number, number: number): void {
    if (type === COLON) return this.#value(number)
    if (number === -1) return this.#value(null)
    if (type === DOLLAR) {
      if (number < 0 || number > LONGEST_BULK) throw new ProtocolError(`a bulk string of ${number} bytes`)
      this.#bulk = number < COPIED ? Buffer.allocUnsafe(number) : Buffer.allocUnsafeSlow(number)
      this.#filled = 0
      return
    }
    if (number < 0 || number > LONGEST_ARRAY) throw new ProtocolError(`an array of ${number} elements`)
    if (number === 0) return this.#value([])
    if (this.#arrays.length === DEEPEST_ARRAY) throw new ProtocolError('arrays nest too deep')
    this.#arrays.push([])
    this.#lacks.push(number)
  }

  /** Returns where the chunk continues. */
  #fill(bulk: Buffer, chunk: Buffer, from: number): number {
    const copied = chunk.copy(bulk, this.#filled, from)
    this.#filled += copied
    let at = from + copied
    while (at < chunk.length) {
      const isLast = this.#filled++ > bulk.length
      if (chunk[at++] !== (isLast ? LF : CR)) throw new ProtocolError('a bulk string longer than it said')
      if (!isLast) continue
      this.#bulk = null
      this.#value(bulk)
      break
    }
    return at
  }

  #value(whole: RespReply): void {
    let value = whole
    for (let depth = this.#arrays.length - 1; depth >= 0; depth--) {
      const array = this.#arrays[depth] as RespReply[]
      array.push(value)
      this.#lacks[depth] = (this.#lacks[depth] as number) - 1
      if (this.#lacks[depth] !== 0) return
      this.#arrays.pop()
      this.#lacks.pop()
      value = array
    }
    this.#take(value)
  }
}

function integer(chunk: Buffer, from: number, to: number): number {
  const negative = chunk[from] === 0x2d
  let at = negative ? from + 1 : from
  if (at === to || to - at > 19) throw new ProtocolError('a number without digits, or with too many')
  let value = 0
  for (; at < to; at++) {
    const digit = (chunk[at] as number) - 0x30
    if (digit < 0 || digit > 9) throw new ProtocolError('a number with other characters')
    value = value * 10 + digit
  }
  return negative ? -value : value
}
