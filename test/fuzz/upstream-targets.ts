import { filterLines } from '../../src/core/headers.ts'
import { type AnswerParts, AnswerRefused, ResponseParser } from '../../src/upstream/response-parser.ts'
import { same, type Target } from './engine.ts'
import { HTTPParser } from './node-parser.ts'

/** What a reader makes of an answer, as far as the bytes go. */
interface Answer {
  head: { readonly status: number; readonly reason: string; readonly lines: readonly string[] } | null
  body: string
  trailers: readonly string[]
  /** How many bytes it had when the answer was whole; null: it is not. */
  wholeAt: number | null
  /** Whether the connection may carry another answer. */
  isReusable: boolean
  isRefused: boolean
}

const FRAMING = /^(?:content-length|transfer-encoding)$/

function unheard(): Answer {
  return { head: null, body: '', trailers: [], wholeAt: null, isReusable: false, isRefused: false }
}

function trimmed(lines: readonly string[]): string[] {
  return lines.map((part) => part.replace(/^[\t ]+|[\t ]+$/g, ''))
}

/** Its client reads into one buffer, where old bytes follow the new ones. */
const READ = Buffer.alloc(8192, 'HTTP/1.1 200 OK\r\n\r\n')

/** While the connection is open, and once it has ended. */
interface Heard {
  readonly open: Answer
  readonly closed: Answer
}

/** `size`: of the pieces that the bytes come in. `begins`: where the final answer does, as far as pieces tell. */
function asProxy(bytes: Buffer, method: string, size: number): Heard & { readonly begins: number } {
  const answer = unheard()
  let at = 0
  let begins = 0
  const parts: AnswerParts = {
    onInterim() {
      begins = at
    },
    onHead(status, reason, lines) {
      answer.head = { status, reason, lines: trimmed(lines) }
    },
    onBody(piece, from, to) {
      answer.body += piece.toString('latin1', from, to)
    },
    onUnasked() {},
    onComplete(trailers, following) {
      Object.assign(answer, { trailers: trimmed(trailers), isReusable: following !== 'nothing', wholeAt: at })
    },
  }
  const parser = new ResponseParser(parts, () => 16_384)
  parser.expect(method)
  try {
    while (at < bytes.length && answer.wholeAt === null) {
      const length = bytes.copy(READ, 0, at, at + size)
      at += length
      parser.execute(READ, length)
    }
  } catch (error) {
    if (!(error instanceof AnswerRefused)) throw error
    answer.isRefused = true
  }
  const open = { ...answer }
  if (answer.wholeAt === null && !answer.isRefused) answer.isRefused = !parser.finish()
  return { open, closed: answer, begins }
}

/** The first final answer that Node's parser hears, byte by byte. */
function asNode(bytes: Buffer, method: string): Heard {
  const answer = unheard()
  let at = 0
  let lines: string[] = []
  let isInterim = false
  const parser = new HTTPParser()
  parser.initialize(HTTPParser.RESPONSE, {})
  parser[HTTPParser.kOnHeaders] = (more: string[]) => void lines.push(...more)
  parser[HTTPParser.kOnHeadersComplete] = (
    _a: number,
    _b: number,
    headers: string[] | undefined,
    _method: number,
    _url: string,
    status: number,
    reason: string,
    _upgrade: boolean,
    shouldKeepAlive: boolean,
  ) => {
    const all = headers ?? lines
    lines = []
    isInterim = status < 200
    // As node:http does.
    const isBodiless = isInterim || method === 'HEAD' || status === 304
    if (answer.wholeAt !== null || isInterim) return isBodiless ? 1 : 0
    answer.head = { status, reason, lines: trimmed(all) }
    answer.isReusable = shouldKeepAlive
    return isBodiless ? 1 : 0
  }
  parser[HTTPParser.kOnBody] = (chunk: Buffer) => {
    if (answer.wholeAt === null) answer.body += chunk.toString('latin1')
  }
  parser[HTTPParser.kOnMessageComplete] = () => {
    if (isInterim || answer.wholeAt !== null) return
    // Ours leaves out those that would frame the body (RFC 9110 §6.5.1).
    answer.trailers = trimmed(filterLines(lines, (name) => !FRAMING.test(name)))
    answer.wholeAt = at
  }
  for (at = 1; at <= bytes.length && answer.wholeAt === null && !answer.isRefused; at++)
    answer.isRefused = typeof parser.execute(bytes.subarray(at - 1, at)) !== 'number'
  at = bytes.length
  const open = { ...answer }
  if (answer.wholeAt === null && !answer.isRefused)
    answer.isRefused = parser.finish() instanceof Error || answer.wholeAt === null
  return { open, closed: answer }
}

/** The proxy reads no more of interim responses than where they end; Node's parser refuses some for their fields. */
function asNodeWithout(begins: number, bytes: Buffer, method: string): Heard {
  const all = asNode(bytes, method)
  if (all.open.head !== null || !all.open.isRefused) return all
  const { open, closed } = asNode(bytes.subarray(begins), method)
  const moved = (answer: Answer): Answer => ({
    ...answer,
    wholeAt: answer.wholeAt === null ? null : answer.wholeAt + begins,
  })
  return { open: moved(open), closed: moved(closed) }
}

const OK = 'HTTP/1.1 200 OK\r\n'

/**
 * What the proxy takes for a whole answer is the same one to Node's parser, of the same bytes, in whatever pieces it comes; or Node's refuses it,
 * and then nothing follows it. The proxy may refuse what Node's takes.
 */
export const upstreamResponse: Target = {
  name: 'upstream-response',
  files: ['upstream/response-parser', 'core/headers'],
  seeds: [
    `${OK}Content-Length: 2\r\nX-A: \t 1 \t\r\n\r\nok`,
    `${OK}Transfer-Encoding: chunked\r\n\r\n3;a="b;c"\r\nabc\r\n0\r\nX-T: 1\r\n\r\n`,
    `${OK}\r\nuntil it ends`,
    'HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n',
    `HTTP/1.0 100 Continue\r\n\r\n${OK}Content-Length: 2\r\n\r\nok`,
    'HTTP/1.0 404 Not  Found\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n',
    `${OK}Content-Length: 6\r\nConnection: close\r\n\r\nsecondHTTP/1.1 200 OK\r\n\r\n`,
    'HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
    'HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok',
    'HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\nok',
    'HTTP/1.1 200 OK\nContent-Length: 2\n\nok',
    `${OK}Content-Length: 2\r\nContent-Length: 2\r\n\r\nok`,
    `${OK}Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n2 \r\nok\n0\n\n`,
    `${OK}Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
    `${OK}X(1): a\r\nTransfer-Encoding: identity\r\nContent-Length: 2, 2\r\n\r\nok`,
    `${OK}Transfer-Encoding: chunked, identity\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
    `${OK}Transfer-Encoding: chunked,\r\n\r\n2\r\nok\r\n0\r\n\r\n`,
    `\r\nHTTP/1.1 304\r\nETag: "caf\xe9"\r\n\r\n`,
  ],
  // biome-ignore format: a list
  words: [
    '\r\n', '\r', '\n', '\0', ' ', '\t', ':', ';', ',', '"', '\xe9', 'Content-Length: 2\r\n',
    'content-length:0\r\n', '+1', '0x2', '00002', '99999999999999999999', 'Transfer-Encoding: chunked\r\n',
    'transfer-encoding: gzip, chunked\r\n', 'chunked', 'gzip', 'Connection: close\r\n',
    'Connection: keep-alive\r\n', 'Upgrade: h2c\r\n', 'HTTP/1.0', 'HTTP/1.1', 'HTTP/1.2', 'HTTP/2.0',
    '100 Continue\r\n\r\n', ' 101 ', ' 204 ', ' 304 ', '099', OK, '0\r\n\r\n', '2\r\nab\r\n', '000A',
    '\r\n\r\n', 'X-T: 1\r\n', ' folded\r\n', '\n\n', ' 205 ', 'identity', 'Content-Length: 2, 2\r\n', '2 \r\n', 'X(1): a\r\n',
  ],
  check(input) {
    // White space (RFC 9110 §5.6.3), which llhttp takes for a part of these values.
    const isTabbed = /(?:content-length|transfer-encoding):[^\n]*\t/i.test(input.toString('latin1'))
    for (const method of ['POST', 'HEAD']) {
      const ours = asProxy(input, method, 1)
      const theirs = asNodeWithout(ours.begins, input, method)
      const [inThrees, atOnce] = [asProxy(input, method, 3), asProxy(input, method, input.length || 1)]
      for (const when of ['open', 'closed'] as const) {
        const name = `${method}, ${when}`
        for (const other of [inThrees[when], atOnce[when]]) samePieces(name, other, ours[when])
        if (isTabbed) continue
        if (!theirs.open.isRefused) notOtherwise(name, method, ours[when], theirs[when])
        // What only nginx and curl take is the last of its connection.
        else same(`${name}, refused by Node`, ours[when].isReusable, false)
      }
    }
  },
}

/** However it is cut. */
function samePieces(name: string, answer: Answer, byBytes: Answer): void {
  const { wholeAt, isReusable, ...rest } = answer
  const { wholeAt: end, isReusable: mayBeReused, ...expected } = byBytes
  same(`${name}, in pieces`, [rest, wholeAt !== null], [expected, end !== null])
  // Where more than the answer has come, nothing else goes over the connection.
  same(`${name}, used again`, isReusable, mayBeReused && end === wholeAt)
}

/** Behind `chunked`, nothing and `identity` are no coding, to nginx and curl either; llhttp reads such a body until the connection ends. */
function isChunkedAndNothing(lines: readonly string[]): boolean {
  const codings = lines
    .flatMap((part, i) =>
      /^transfer-encoding$/i.test(lines[i - 1] ?? '') && i % 2 === 1 ? part.split(',') : [],
    )
    .map((coding) => coding.trim().toLowerCase())
  return codings.includes('chunked') && codings.at(-1) !== 'chunked'
}

function notOtherwise(name: string, method: string, ours: Answer, theirs: Answer): void {
  if (ours.head === null || ours.isRefused) return
  same(`${name}, the head`, ours.head, theirs.head)
  // llhttp waits for what is announced, although RFC 9112 §6.3 rule 1 has no body here. Whatever comes must not be another answer.
  if ((ours.head.status === 204 || ours.head.status === 205) && theirs.wholeAt !== ours.wholeAt)
    return same(`${name}, with no body`, [ours.body, ours.isReusable], ['', false])
  if (isChunkedAndNothing(ours.head.lines)) return same(`${name}, used again`, ours.isReusable, false)
  same(`${name}, the body`, ours.body, theirs.body)
  if (ours.wholeAt === null) return
  same(`${name}, trailers`, ours.trailers, theirs.trailers)
  same(`${name}, where it ends`, ours.wholeAt, theirs.wholeAt)
  // A request with HEAD says that it is the last of its connection.
  if (method !== 'HEAD' && ours.isReusable && !theirs.isReusable)
    throw new Error(`${name}: Node would not use it again`)
}
