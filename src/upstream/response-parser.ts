import { fieldLines, filterLines, isFieldName, isFieldValue, TOKEN } from '../core/headers.ts'

/** The upstream's answer is one that the proxy does not relay. The message is also for clients. */
export class AnswerRefused extends Error {}

/**
 * What may follow an answer on its connection: another one, because a length or a last chunk ended it (`explicit`) or its status did
 * (`implicit`); or nothing that could be trusted.
 */
export type Following = 'explicit' | 'implicit' | 'nothing'

/** Receives the parts of one answer. */
export interface AnswerParts {
  /** 1xx; none of its parts are reported. */
  onInterim(): void
  /** `lines` frame the body in at most one way: one `Content-Length`, or none with a transfer coding. */
  onHead(status: number, reason: string, lines: string[]): void
  /** Valid during the call. */
  onBody(bytes: Buffer, from: number, to: number): void
  /** Bytes came after the answer; called before {@link onComplete}. */
  onUnasked(): void
  onComplete(trailers: string[], following: Following): void
}

const IDLE = 0
const HEAD = 1
const BY_LENGTH = 2
const BY_CLOSE = 3
const CHUNK_SIZE = 4
const CHUNK = 5
const CHUNK_END = 6
const TRAILERS = 7

/** Most heads end within this, so only this much is first converted to a string. */
const USUAL_HEAD = 2048

/** A head exactly as in RFC 9112 §4 and §5. The reason phrase is checked when it is written. */
const PLAIN_HEAD = new RegExp(
  String.raw`^HTTP/1\.[01] [1-9]\d\d(?: [^\r\n]*)?(?:\r\n${TOKEN}:[\t\x20-\x7e\x80-\xff]*)*$`,
)
/** As nginx and curl read it, with several spaces. */
const STATUS_LINE = /^HTTP\/1\.[01] +[1-9]\d\d(?: [^\r\n]*)?$/
/** The end of a line and an empty one; a recipient may accept a lone LF as the end of a line (RFC 9112 §2.2). */
const BLOCK_END = /\n\r?\n/g
/** RFC 9112 §7.1, with the white space that old senders add. Extensions are ignored. */
const CHUNK_LINE = /^([0-9A-Fa-f]{1,16})(?:[\t ;][^\r\n]*)?\r?\n$/
const PLAIN_CHUNK_LINE = /^[0-9A-Fa-f]+\r\n$/
const CHUNK_LINE_BEGUN = /^(?:[0-9A-Fa-f]{0,16}|[0-9A-Fa-f]{1,16}(?:[\t ;][^\r\n]*)?\r?)$/

const FRAMING = /^(?:content-length|transfer-encoding)$/i
const BARE_LF = /[^\r]\n/
const EMPTY_LINES = /^(?:\r?\n)+/
const VERSION = 'HTTP/1.'
const NOT_HTTP = 'the response is not HTTP/1.1'
const NO_SIZE = 'a chunk of the response has no size'

const LF = 0x0a

/**
 * Parses HTTP/1.0 and 1.1 answers, one at a time, in the order of RFC 9112 §6.3. Accepts what nginx and curl accept, and refuses framing
 * that they would read differently.
 */
export class ResponseParser {
  readonly #parts: AnswerParts
  readonly #mostHead: () => number
  #state = IDLE
  #headRequest = false
  /** An incomplete head, chunk line or trailer section. */
  #held = ''
  /** Bytes left of the body, or of its chunk. */
  #remaining = 0
  #following: Following = 'nothing'
  /** Whether the answer so far follows RFC 9112 exactly. */
  #isPlain = true
  /** `Keep-Alive` of the latest answer; null: none. */
  keepAlive: string | null = null

  /** `mostHead`: bytes of a head, a chunk's line or the trailers. */
  constructor(parts: AnswerParts, mostHead: () => number) {
    this.#parts = parts
    this.#mostHead = mostHead
  }

  /** The answer to a request with this method comes next. */
  expect(method: string): void {
    this.#state = HEAD
    this.#headRequest = method === 'HEAD'
    this.#held = ''
    this.#isPlain = true
  }

  /** Reports nothing more, not even from bytes being parsed. */
  stop(): void {
    this.#state = IDLE
  }

  /**
   * @param end of the data in `bytes`.
   * @throws {AnswerRefused} if the bytes are not an answer that can be carried.
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
          at = this.#chunkEnd(bytes, at)
          break
        case TRAILERS:
          at = this.#trailers(bytes, at, end)
          break
        default:
          // The answer has ended; `onUnasked` has reported the bytes that follow it.
          return
      }
    }
  }

  /** The connection has ended. Returns whether that properly ends the answer (RFC 9112 §6.3, rule 8), or there was none. */
  finish(): boolean {
    if (this.#state === BY_CLOSE) this.#complete([], true)
    return this.#state === IDLE
  }

  #complete(trailers: string[], isLast: boolean): void {
    this.#state = IDLE
    if (!isLast) this.#parts.onUnasked()
    this.#parts.onComplete(trailers, isLast && this.#isPlain ? this.#following : 'nothing')
  }

  /** RFC 9112 §2.1. Returns the position to continue at. */
  #head(bytes: Buffer, at: number, end: number): number {
    if (this.#held === '') {
      const text = bytes.toString('latin1', at, Math.min(end, at + USUAL_HEAD))
      const close = text.indexOf('\r\n\r\n')
      const head = text.slice(0, close)
      // A head that matches has no bare LF, so it cannot have ended earlier.
      if (close >= 0 && close + 4 <= this.#mostHead() && PLAIN_HEAD.test(head)) {
        const next = at + close + 4
        this.#headed(head, next === end)
        return next
      }
    }
    const { block, next } = this.#block(bytes, at, end, 'head')
    if (block !== null) this.#headed(PLAIN_HEAD.test(block) ? block : this.#tidied(block), next === end)
    else if (!VERSION.startsWith(this.#held) && !this.#held.startsWith(VERSION) && this.#held !== '\r')
      throw new AnswerRefused(NOT_HTTP)
    return next
  }

  /** Continues to the empty line that ends a head or the trailers. `block`: null until it has arrived. */
  #block(bytes: Buffer, at: number, end: number, what: string): { block: string | null; next: number } {
    const most = this.#mostHead()
    let held = this.#held.length
    let text = this.#held + bytes.toString('latin1', at, Math.min(end, at + most + 1))
    // Empty lines before an answer (§2.2).
    const empty = this.#state === HEAD ? (EMPTY_LINES.exec(text)?.[0] ?? '') : ''
    if (empty !== '') this.#isPlain = false
    text = text.slice(empty.length)
    held -= empty.length
    BLOCK_END.lastIndex = Math.max(0, held - 2)
    const found = BLOCK_END.exec(text)
    const size = found === null ? text.length : BLOCK_END.lastIndex
    if (size > most) throw headTooLarge(what, most)
    this.#held = found === null ? text : ''
    if (found === null) return { block: null, next: end }
    if (BARE_LF.test(text.slice(0, size))) this.#isPlain = false
    return { block: text.slice(0, found.index).replace(/\r$/, ''), next: at + size - held }
  }

  /** Rewrites a head into the form of {@link PLAIN_HEAD}, without lines whose name is not a token. */
  #tidied(head: string): string {
    this.#isPlain = false
    const [statusLine = '', ...lines] = splitLines(head)
    if (!STATUS_LINE.test(statusLine))
      throw new AnswerRefused(
        statusLine.startsWith(VERSION) ? 'the status line of the response is malformed' : NOT_HTTP,
      )
    const kept = lines.filter((line, n) => {
      const colon = line.indexOf(':')
      // Also refuses folded lines and white space before the colon (RFC 9112 §5).
      if (!/^[^\0-\x20\x7f:]+:/.test(line))
        throw new AnswerRefused(`header line ${n + 1} of the response is malformed`)
      if (!isFieldValue(line.slice(colon + 1)))
        throw new AnswerRefused(`the value in header line ${n + 1} of the response has a control character`)
      return isFieldName(line.slice(0, colon))
    })
    return [statusLine.replace(/ +/, ' '), ...kept].join('\r\n')
  }

  /** `head`: as in {@link PLAIN_HEAD}. */
  #headed(head: string, isLast: boolean): void {
    const status = Number(head.slice(9, 12))
    const lineEnd = head.indexOf('\r\n')
    let lines = lineEnd > 0 ? fieldLines(head, lineEnd) : []
    if (status === 101) throw new AnswerRefused('the upstream switched protocols without a request')
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
          if (isNamed(name, 'content-length')) length = length === null ? value : `${length},${value}`
          break
        case 17:
          if (isNamed(name, 'transfer-encoding')) coding = coding === null ? value : `${coding},${value}`
          break
      }
    }
    // §6.3 rule 1, and RFC 9110 §15.3.6.
    const isBodiless = this.#headRequest || status === 204 || status === 205 || status === 304
    const chunked = coding !== null && !isBodiless && isChunked(coding)
    // §6.3 rule 3: the coding counts.
    const size = length === null || chunked ? null : lengthOf(length)
    const isRepeated = length?.includes(',') === true
    if (isRepeated || (length !== null && chunked)) lines = withLength(lines, size)

    // §9.3
    const options = connection === '' ? '' : `${connection.toLowerCase()},`.replaceAll(/[\t ]*,[\t ]*/g, ',')
    const persists = head[7] === '1' || options.includes(',keep-alive,')
    this.#following = 'nothing'
    if (persists && !options.includes(',close,')) {
      // RFC 9110 §8.6: there must be no body, but the server may send one.
      if (isBodiless)
        this.#following = length === null && coding === null && status !== 205 ? 'implicit' : 'nothing'
      else if (coding === null) this.#following = size !== null && !isRepeated ? 'explicit' : 'nothing'
      // §6.1: framing by an HTTP/1.0 server may be faulty. §6.3 rule 3: with a length as well, it may be response splitting.
      else if (coding.toLowerCase() === 'chunked' && length === null && head[7] === '1')
        this.#following = 'explicit'
    }
    this.#remaining = isBodiless ? 0 : (size ?? 0)
    if (isBodiless || size !== null) this.#state = BY_LENGTH
    else this.#state = chunked ? CHUNK_SIZE : BY_CLOSE
    const reason = head.slice(13, lineEnd < 0 ? head.length : lineEnd)
    this.#parts.onHead(status, reason, lines)
    if (this.#state === BY_LENGTH && this.#remaining === 0) this.#complete([], isLast)
  }

  /** RFC 9112 §7.1. */
  #chunkSize(bytes: Buffer, at: number, end: number): number {
    const most = this.#mostHead()
    const lineEnd = bytes.indexOf(LF, at)
    const isWhole = lineEnd >= 0 && lineEnd < end
    const to = isWhole ? lineEnd + 1 : end
    const line = this.#held + bytes.toString('latin1', at, Math.min(to, at + most))
    if (line.length >= most) throw headTooLarge('chunk line', most)
    if (!(isWhole ? CHUNK_LINE : CHUNK_LINE_BEGUN).test(line)) throw new AnswerRefused(NO_SIZE)
    this.#held = isWhole ? '' : line
    if (!isWhole) return to
    this.#remaining = Number.parseInt(line, 16)
    if (this.#remaining > Number.MAX_SAFE_INTEGER) throw new AnswerRefused(NO_SIZE)
    if (!PLAIN_CHUNK_LINE.test(line)) this.#isPlain = false
    if (this.#remaining > 0) this.#state = CHUNK
    else {
      this.#state = TRAILERS
      // As after a head: without trailers, an empty line follows.
      this.#held = '\n'
    }
    return to
  }

  #chunkEnd(bytes: Buffer, at: number): number {
    const isCr = this.#held === '' && bytes[at] === 0x0d
    if (!isCr && bytes[at] !== LF) throw new AnswerRefused('a chunk of the response is longer than announced')
    if (!isCr) {
      if (this.#held === '') this.#isPlain = false
      this.#state = CHUNK_SIZE
    }
    this.#held = isCr ? '\r' : ''
    return at + 1
  }

  /** RFC 9112 §7.1.2. Lines that are not trailers are skipped: the body is complete. */
  #trailers(bytes: Buffer, at: number, end: number): number {
    const { block, next } = this.#block(bytes, at, end, 'trailers')
    if (block === null) return next
    const trailers: string[] = []
    for (const line of splitLines(block).slice(1)) {
      const colon = line.indexOf(':')
      const name = line.slice(0, Math.max(0, colon))
      // RFC 9110 §6.5.1: no framing after the body.
      if (isFieldName(name) && isFieldValue(line.slice(colon + 1)) && !FRAMING.test(name))
        trailers.push(...fieldLines(`\r\n${line}`, 0))
      else this.#isPlain = false
    }
    this.#complete(trailers, next === end)
    return next
  }
}

function splitLines(block: string): string[] {
  return block.split(/\r?\n/)
}

function isNamed(name: string, lower: string): boolean {
  return name === lower || name.toLowerCase() === lower
}

/** One length, perhaps repeated (RFC 9110 §8.6). */
function lengthOf(value: string): number {
  const [length = NaN, ...others] = value.split(',').map((one) => {
    const digits = withoutBlanks(one)
    return /^\d+$/.test(digits) ? Number(digits) : NaN
  })
  if (!Number.isSafeInteger(length)) throw new AnswerRefused('the length of the response is not a number')
  if (others.some((other) => other !== length)) throw new AnswerRefused('the response has two lengths')
  return length
}

/** The lines with only this length, or none, so that no later recipient frames the body differently. */
function withLength(lines: readonly string[], length: number | null): string[] {
  const others = filterLines(lines, (name) => name !== 'content-length')
  return length === null ? others : [...others, 'Content-Length', String(length)]
}

export function headTooLarge(what: string, most: number): AnswerRefused {
  return new AnswerRefused(`the ${what} of the response is over limits.responseHead (${most} bytes)`)
}

/**
 * RFC 9112 §6.3 rule 4: unless the last coding is `chunked`, the answer ends with its connection. `identity` and empty items do not count;
 * a repeated `chunked` counts once, as in nginx and curl.
 */
function isChunked(value: string): boolean {
  const codings = value.split(',').map((coding) => withoutBlanks(coding).toLowerCase())
  const real = codings.filter((coding) => coding !== '' && coding !== 'identity')
  const at = real.indexOf('chunked')
  if (real.some((coding, n) => !isFieldName(coding) || (at >= 0 && n > at && coding !== 'chunked')))
    throw new AnswerRefused('the transfer codings of the response are malformed')
  return at >= 0
}

/** RFC 9110 §5.6.3: `trim` removes more. */
function withoutBlanks(text: string): string {
  return text.replace(/^[\t ]+|[\t ]+$/g, '')
}
