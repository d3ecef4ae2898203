import { fieldLines, TOKEN } from '../core/headers.ts'

const { maxHeaderSize } = process.getBuiltinModule('node:http')

/** Receives the parts of one answer. */
export interface AnswerParts {
  /** 1xx; none of its parts are reported. */
  onInterim(): void
  onHead(status: number, reason: string, lines: string[]): void
  /** Valid during the call. */
  onBody(bytes: Buffer, from: number, to: number): void
  /** `reusable`: the connection is positioned where another answer may begin. */
  onComplete(trailers: string[], reusable: boolean): void
}

export class ParseError extends Error {
  readonly code = 'ERR_UPSTREAM_ANSWER'
}

const IDLE = 0
const HEAD = 1
const BY_LENGTH = 2
const BY_CLOSE = 3
const CHUNK_SIZE = 4
const CHUNK = 5
const CHUNK_END = 6
const TRAILERS = 7

/** Raw bytes of a head, or of trailers, on top of the limit on names and values: white space and line ends. */
const MAX_BLOCK = 4 * maxHeaderSize
/** A chunk's size with its extensions. */
const MAX_CHUNK_LINE = 4096
/** Most heads end within this, so only this much is first converted to a string. */
const USUAL_HEAD = 2048

const FIELD = String.raw`${TOKEN}:[\t\x20-\x7e\x80-\xff]*`
/**
 * RFC 9112 §4 and §5. Names are followed by their colon at once (§5.1), lines end with CRLF and are never folded (§5.2). The reason is
 * checked by who writes it.
 */
const WHOLE_HEAD = new RegExp(String.raw`^HTTP/1\.[01] [1-9]\d\d(?: [^\r\n]*)?(?:\r\n${FIELD})*$`)
const WHOLE_TRAILERS = new RegExp(`^(?:\\r\\n${FIELD})*$`)
const TABBED_FRAMING = /\r\n(?:content-length|transfer-encoding):[^\r]*\t/i
/** RFC 9112 §7.1.1, without the white space that only old senders write. */
const CHUNK_LINE = new RegExp(
  String.raw`^([0-9A-Fa-f]+)(?:;${TOKEN}(?:=(?:${TOKEN}|"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"))?)*$`,
)
/** An invalid line end, which the parser would otherwise wait for. */
const BARE_END = /(?:^|[^\r])\n|\r[^\n]/

const LF = 0x0a

/**
 * Parses HTTP/1.0 and 1.1 answers, one at a time, in the order of RFC 9112 §6.3. It refuses anything that two readers could understand
 * differently: one of them would take the rest for another answer.
 */
export class ResponseParser {
  readonly #parts: AnswerParts
  #state = IDLE
  #headRequest = false
  /** An incomplete head, chunk line or trailer section. */
  #held = ''
  /** Bytes left of the body, or of its chunk. */
  #remaining = 0
  #reusable = false
  /** `Keep-Alive` timeout of the latest answer; null: none. */
  keepAlive: string | null = null

  constructor(parts: AnswerParts) {
    this.#parts = parts
  }

  /** The answer to a request with this method comes next. */
  expect(method: string): void {
    this.#state = HEAD
    this.#headRequest = method === 'HEAD'
    this.#held = ''
  }

  /** Reports nothing more, not even of bytes being parsed. */
  stop(): void {
    this.#state = IDLE
  }

  /**
   * @param end of the data in `bytes`.
   * @throws {ParseError} if the bytes are not a valid answer, or none is expected.
   */
  execute(bytes: Buffer, end: number): void {
    for (let at = 0; at < end; ) {
      switch (this.#state) {
        case HEAD:
          at = this.#head(bytes, at, end)
          break
        case BY_LENGTH: {
          const to = Math.min(end, at + this.#remaining)
          this.#remaining -= to - at
          this.#parts.onBody(bytes, at, to)
          if (this.#remaining === 0 && this.#state === BY_LENGTH) this.#complete([], to === end)
          at = to
          break
        }
        case BY_CLOSE:
          this.#parts.onBody(bytes, at, end)
          return
        case CHUNK_SIZE:
          at = this.#chunkSize(bytes, at, end)
          break
        case CHUNK: {
          const to = Math.min(end, at + this.#remaining)
          this.#remaining -= to - at
          if (this.#remaining === 0) this.#state = CHUNK_END
          this.#parts.onBody(bytes, at, to)
          at = to
          break
        }
        case CHUNK_END:
          at = this.#chunkEnd(bytes, at, end)
          break
        case TRAILERS:
          at = this.#trailers(bytes, at, end)
          break
        default:
          // The end of the answer was reported with the following bytes in mind.
          return
      }
    }
  }

  /** The connection has ended. Returns whether that properly ends the answer (RFC 9112 §6.3, rule 8), or there was none. */
  finish(): boolean {
    if (this.#state === BY_CLOSE) this.#complete([], false)
    return this.#state === IDLE
  }

  #complete(trailers: string[], isLast: boolean): void {
    this.#state = IDLE
    this.#parts.onComplete(trailers, this.#reusable && isLast)
  }

  /** RFC 9112 §2.1. Returns the position to continue at. */
  #head(bytes: Buffer, at: number, end: number): number {
    let text = bytes.toString('latin1', at, Math.min(end, at + USUAL_HEAD))
    let close = text.indexOf('\r\n\r\n')
    let held = 0
    if (close < 0 || this.#held !== '' || text.startsWith('\r')) {
      held = this.#held.length
      text = this.#held + bytes.toString('latin1', at, Math.min(end, at + MAX_BLOCK))
      // Empty lines before an answer (§2.2).
      while (text.startsWith('\r\n')) {
        text = text.slice(2)
        held -= 2
      }
      close = text.indexOf('\r\n\r\n', Math.max(0, held - 3))
      if (close < 0) {
        if (text.length >= MAX_BLOCK) throw new ParseError('the head of the answer is too large')
        if (!couldBegin(text)) throw new ParseError('the answer is not HTTP/1.1')
        this.#held = text
        return end
      }
    }
    this.#held = ''
    const next = at + close + 4 - held
    this.#headed(text.slice(0, close), next === end)
    return next
  }

  #headed(head: string, isLast: boolean): void {
    if (!WHOLE_HEAD.test(head)) throw new ParseError('the head of the answer is malformed')
    const status = Number(head.slice(9, 12))
    const lineEnd = head.indexOf('\r\n')
    const lines = lineEnd > 0 ? linesIn(head, lineEnd) : []
    if (status === 101) throw new ParseError('the upstream switched protocols unasked')
    // RFC 9110 §15.2: any number of them, without bodies, for any method.
    if (status < 200) return this.#parts.onInterim()

    let length: string | null = null
    let coding: string | null = null
    let connection = ''
    this.keepAlive = null
    for (let i = 0; i < lines.length; i += 2) {
      const name = lines[i] as string
      const value = lines[i + 1] as string
      switch (name.length) {
        case 10:
          if (isNamed(name, 'connection')) connection += `,${value}`
          else if (isNamed(name, 'keep-alive')) this.keepAlive = value
          break
        case 14:
          if (!isNamed(name, 'content-length')) break
          // §6.3 rule 5 lets equal ones pass; llhttp does not.
          if (length !== null) throw new ParseError('the answer has two lengths')
          length = value
          break
        case 17:
          if (isNamed(name, 'transfer-encoding')) coding = coding === null ? value : `${coding},${value}`
          break
      }
    }
    // This is white space (§5.1), but llhttp takes it for a part of the value.
    if (head.includes('\t') && TABBED_FRAMING.test(head)) throw new ParseError('the framing is malformed')
    if (length !== null && !/^\d{1,15}$/.test(length)) throw new ParseError('the length is no number')
    // §6.3 rule 3: it may be an attempt at response splitting.
    if (length !== null && coding !== null)
      throw new ParseError('the answer has a length and a transfer coding')

    // §9.3
    const options = connection === '' ? '' : `${connection.toLowerCase()},`.replaceAll(/[\t ]*,[\t ]*/g, ',')
    const persists = head[7] === '1' || options.includes(',keep-alive,')
    this.#reusable = persists && !options.includes(',close,')
    // §6.3 rule 1.
    const isBodiless = this.#headRequest || status === 204 || status === 304
    // Malformed codings are refused there, too.
    const chunked = coding !== null && isChunked(coding)
    if (isBodiless || length !== null) {
      this.#remaining = Number(length)
      this.#state = BY_LENGTH
      // RFC 9110 §8.6: none are to come, but the server may mean to send them.
      if (isBodiless && this.#remaining > 0) this.#reusable = false
      if (isBodiless) this.#remaining = 0
    } else if (coding === null) this.#state = BY_CLOSE
    else {
      this.#state = chunked ? CHUNK_SIZE : BY_CLOSE
      // §6.1: from such a server the framing may be somebody else's.
      if (head[7] === '0') this.#reusable = false
    }
    const reason = head.slice(13, lineEnd < 0 ? head.length : lineEnd)
    this.#parts.onHead(status, reason, lines)
    if (this.#state === BY_LENGTH && this.#remaining === 0) this.#complete([], isLast)
  }

  /** RFC 9112 §7.1. */
  #chunkSize(bytes: Buffer, at: number, end: number): number {
    const lineEnd = bytes.indexOf(LF, at)
    const isWhole = lineEnd >= 0 && lineEnd < end
    const to = isWhole ? lineEnd + 1 : end
    const held = this.#held + bytes.toString('latin1', at, Math.min(to, at + MAX_CHUNK_LINE))
    if (held.length > MAX_CHUNK_LINE) throw new ParseError('the extensions of a chunk are too large')
    if (!isWhole) {
      if (!/^[0-9A-Fa-f]{0,13}(?:;[^\r\n]*|)\r?$/.test(held)) throw new ParseError('a chunk has no size')
      this.#held = held
      return to
    }
    this.#held = ''
    const line = held.endsWith('\r\n') ? CHUNK_LINE.exec(held.slice(0, -2)) : null
    const size = line?.[1] as string
    if (line === null || size.length > 13) throw new ParseError('a chunk has no size')
    this.#remaining = Number.parseInt(size, 16)
    if (this.#remaining > 0) this.#state = CHUNK
    else {
      this.#state = TRAILERS
      // As after a head: no trailers are an empty line at once.
      this.#held = '\r\n'
    }
    return to
  }

  #chunkEnd(bytes: Buffer, at: number, end: number): number {
    const expected = this.#held === '' ? 0x0d : LF
    if (bytes[at] !== expected) throw new ParseError('a chunk is longer than its size')
    this.#held = expected === LF ? '' : '\r'
    if (expected === LF) this.#state = CHUNK_SIZE
    return Math.min(at + 1, end)
  }

  /** RFC 9112 §7.1.2. */
  #trailers(bytes: Buffer, at: number, end: number): number {
    const held = this.#held.length
    const text = this.#held + bytes.toString('latin1', at, Math.min(end, at + MAX_BLOCK))
    const close = text.indexOf('\r\n\r\n', Math.max(0, held - 3))
    if (close < 0) {
      if (text.length >= MAX_BLOCK) throw new ParseError('the trailers are too large')
      if (BARE_END.test(text)) throw new ParseError('a trailer ends with no CRLF')
      this.#held = text
      return end
    }
    this.#held = ''
    const next = at + close + 4 - held
    const block = text.slice(0, close)
    if (!WHOLE_TRAILERS.test(block)) throw new ParseError('a trailer is malformed')
    const trailers = block === '' ? [] : linesIn(block, 0)
    for (let i = 0; i < trailers.length; i += 2)
      // RFC 9110 §6.5.1: framing must not come after the body.
      if (/^(?:content-length|transfer-encoding)$/i.test(trailers[i] as string))
        throw new ParseError('a trailer frames the answer')
    this.#complete(trailers, next === end)
    return next
  }
}

/** The field lines of a block that has been checked. `at`: where the first begins, with a CRLF. */
function linesIn(block: string, at: number): string[] {
  const lines = fieldLines(block, at)
  let size = 0
  for (const text of lines) size += text.length
  if (size >= maxHeaderSize) throw new ParseError('the head of the answer is too large')
  return lines
}

function isNamed(name: string, lower: string): boolean {
  return name === lower || name.toLowerCase() === lower
}

/** RFC 9112 §6.3 rule 4: by any coding but a last `chunked`, the answer ends with its connection. */
function isChunked(value: string): boolean {
  const codings = value.split(',').map((coding) => coding.trim().toLowerCase())
  const at = codings.indexOf('chunked')
  // What `trim` removes, and others may not: a blank of Latin-1 (§5.6.3).
  const isOdd = /[^\x20-\x7e]/.test(value)
  // §6.1: chunked only once. A second reader might stop at the first.
  if (isOdd || codings.includes('') || (at >= 0 && at !== codings.length - 1))
    throw new ParseError('the transfer codings are malformed')
  return at >= 0
}

const VERSION = 'HTTP/1.'

/** Whether the text so far may be the beginning of a head. */
function couldBegin(text: string): boolean {
  if (text === '\r') return true
  return (
    (text.length < VERSION.length ? VERSION.startsWith(text) : text.startsWith(VERSION)) &&
    !BARE_END.test(text)
  )
}
