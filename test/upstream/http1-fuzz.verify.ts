/**
 * Compares our client with undici on the same bytes: ordinary answers, damaged ones, and bytes after their end. Ours may refuse what
 * undici accepts, never the other way round. `FUZZ_SEED` and `FUZZ_CASES` explore more than the cases of every run.
 */
import type { Socket } from 'node:net'
import t from 'tap'
import type { Transport } from '../../src/upstream/transport.ts'
import { mulberry32 } from '../support/random.ts'
import { tcpStub, wholeRequest } from '../support/upstream.ts'
import { opened } from './support.ts'

const SEED = Number(process.env['FUZZ_SEED'] ?? 1)
const CASES = Number(process.env['FUZZ_CASES'] ?? 600)

interface Script {
  readonly method: string
  readonly pieces: readonly string[]
  /** What the server does with the connection afterwards. */
  readonly end: 'open' | 'end'
}

/** A server's answer, usually a good one. */
function script(seed: number): Script {
  const next = mulberry32(seed)
  const below = (n: number): number => Math.floor(next() * n)
  const one = <T>(...of: T[]): T => of[below(of.length)] as T
  const often = (chance: number): boolean => next() < chance

  const method = one('GET', 'POST', 'POST', 'PUT', 'DELETE', 'HEAD')
  const content = one(
    '',
    'ok',
    '\r\n\r\n',
    '0\r\n\r\n',
    'x'.repeat(below(3000)),
    `caf\xe9${'y'.repeat(below(40))}`,
  )
  const lines: string[] = []
  const filler = below(4)
  for (let i = 0; i < filler; i++)
    lines.push(
      one(
        'X-A: 1',
        'x-a:2',
        'X-A: \t 3 \t',
        'Set-Cookie: a=b',
        'Set-Cookie: c=d',
        'X-Empty:',
        'X-Latin: caf\xe9',
        'Date: x',
        'ETag: "a"',
      ),
    )
  if (often(0.03))
    lines.push(
      one(
        'X-Fold: a\r\n b',
        'X-Fold: a\r\n\t\tb\r\n c',
        'X Y: 1',
        ' X: 1',
        'no colon',
        ': 1',
        'X: a\0b',
        'X : 1',
        'X: \x7f',
      ),
    )
  if (often(0.2))
    lines.push(
      one(
        'Connection: close',
        'Connection: keep-alive',
        'connection: Close, x',
        'Connection: x-a',
        'Keep-Alive: timeout=5',
        'Keep-Alive: timeout=1',
        'Connection: keep-alive, close',
      ),
    )
  let body = content
  const framing = below(10)
  if (framing < 4) lines.push(`${one('Content-Length', 'content-length')}: ${content.length}`)
  else if (framing < 7) {
    lines.push(
      one('Transfer-Encoding: chunked', 'transfer-encoding: Chunked', 'Transfer-Encoding: gzip, chunked'),
    )
    body = ''
    for (let at = 0; at < content.length; ) {
      const size = 1 + below(content.length - at)
      const extension = often(0.1) ? one(';a', ';a=b', ';a="b;c"', ';a=b;c', '; a', ' ;a=b', ';', ';a=') : ''
      body += `${often(0.5) ? size.toString(16) : size.toString(16).toUpperCase()}${extension}\r\n${content.slice(at, at + size)}\r\n`
      at += size
    }
    body += `${one('0', '0', '00', '0;x=y')}\r\n${often(0.2) ? one('X-T: 1\r\n', 'X-T: 1\r\nx-u:\r\n', 'Content-Length: 3\r\n', 'no colon\r\n') : ''}\r\n`
  } else if (framing === 7)
    lines.push(
      ...one(
        ['Content-Length: 2', 'Content-Length: 2'],
        ['Content-Length: 2', 'Content-Length: 3'],
        ['Content-Length: 2, 2'],
        ['Content-Length: +2'],
        ['Content-Length: 0x2'],
        ['Content-Length:'],
        ['Content-Length: 2 2'],
        ['Content-Length: 99999999999999999999999'],
        ['Content-Length: 2', 'Transfer-Encoding: chunked'],
        ['Transfer-Encoding: chunked', 'Content-Length: 2'],
        ['Transfer-Encoding: chunked, chunked'],
        ['Transfer-Encoding: chunked', 'Transfer-Encoding: gzip'],
        ['Transfer-Encoding: gzip', 'Transfer-Encoding: chunked'],
        ['Transfer-Encoding: chunked, gzip'],
        ['Transfer-Encoding: xchunked'],
        ['Transfer-Encoding:'],
      ),
    )
  if (often(0.02)) lines.push(`X-Long: ${'l'.repeat(one(16_000, 16_370, 16_384, 20_000))}`)
  const status = one(
    '200 OK',
    '201 Created',
    '200',
    '200 ',
    '404 Not  Found',
    '204 No Content',
    '304 Not Modified',
    '500 caf\xe9',
    '999 Odd',
  )
  const odd = often(0.04)
  const statusLine = odd
    ? one(
        'HTTP/1.1 20 OK',
        'HTTP/1.1 2000 OK',
        'HTTP/1.1  200 OK',
        'HTTP/2.0 200 OK',
        'HTTP/1.2 200 OK',
        'http/1.1 200 OK',
        'HTTP/1.1 099 OK',
        'HTTP/1.1 200\tOK',
        'ICY 200 OK',
        'HTTP/1.1 101 Odd',
        'HTTP/1.1 200 \0',
        'HTTP/0.9 200 OK',
      )
    : `HTTP/1.${often(0.9) ? 1 : 0} ${status}`
  let bytes = `${statusLine}\r\n${lines.map((line) => `${line}\r\n`).join('')}\r\n`
  if (often(0.8) || method !== 'HEAD') bytes += body
  if (often(0.03)) bytes = `\r\n${bytes}`
  // undici fails on any 100, which is why its bytes are filtered; here it gets other interim answers.
  if (often(0.05))
    bytes = `HTTP/1.1 ${one('102 Processing', '103 Early Hints', '199 x')}\r\n${one('', 'Link: </a>\r\n')}\r\n${bytes}`
  if (often(0.1)) bytes += one('\r\n', 'x', 'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond', '0\r\n\r\n')
  const damages = often(0.15) ? 1 + below(2) : 0
  for (let i = 0; i < damages; i++) {
    const at = below(Math.min(bytes.length, often(0.5) ? 60 : bytes.length))
    const kind = below(4)
    if (kind === 0) bytes = bytes.slice(0, at) + bytes.slice(at + 1)
    else if (kind === 1)
      bytes = bytes.slice(0, at) + one('\r', '\n', '\0', ' ', ':', '\xff', '\t', '0') + bytes.slice(at)
    else if (kind === 2) bytes = bytes.slice(0, at) + String.fromCharCode(below(256)) + bytes.slice(at + 1)
    else bytes = bytes.slice(0, at)
  }
  const pieces: string[] = []
  const cuts = often(0.3) ? 0 : often(0.1) ? bytes.length : below(6)
  for (let i = 0; i < cuts && bytes.length > 1; i++) {
    const at = cuts > 6 ? 1 : 1 + below(bytes.length - 1)
    pieces.push(bytes.slice(0, at))
    bytes = bytes.slice(at)
    if (pieces.length > 300) break
  }
  pieces.push(bytes)
  return { method, pieces, end: often(0.7) ? 'open' : 'end' }
}

interface Heard {
  end: string
  status: number
  reason: string
  lines: string[]
  body: string
  trailers: string[]
}

function ask(transport: Transport, method: string, target: string): Promise<Heard> {
  return new Promise((resolve) => {
    const heard: Heard = { end: '', status: 0, reason: '', lines: [], body: '', trailers: [] }
    transport.send({
      request: { method, target, headers: ['Host', 'a'], body: method === 'POST' ? Buffer.from('{}') : null },
      patience: { head: 5000, idle: 5000 },
      onBegin: () => true,
      onHead(status, reason, lines) {
        Object.assign(heard, { status, reason, lines })
      },
      onData(chunk) {
        heard.body += chunk.toString('latin1')
      },
      onEnd(trailers) {
        resolve({ ...heard, trailers, end: 'whole' })
      },
      onError(error) {
        resolve({ ...heard, end: `broken: ${error.message}` })
      },
    })
  })
}

/** Resolves when the process, which is both sides of the connections, has read whatever was written. */
async function turns(): Promise<void> {
  for (let n = 0; n < 40; n++) await new Promise((resolve) => setImmediate(resolve))
}

const SECOND = 'HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlast'

/** What a client makes of the script, and whether it sends its next request on the same connection. */
async function hear(kind: 'client' | 'streams', { method, pieces, end }: Script) {
  let connections = 0
  let isHeard = false
  let isEnded = false
  await using stub = await tcpStub((socket: Socket) => {
    socket.setNoDelay(true)
    void wholeRequest(socket).then((request) => {
      connections++
      if (request.includes('/second')) return void socket.write(SECOND)
      void wholeRequest(socket).then(() => socket.write(SECOND))
      const rest = [...pieces]
      const next = (): void => {
        const piece = rest.shift()
        if (piece !== undefined) socket.write(piece, 'latin1', () => setImmediate(next))
        else if (end === 'end') socket.end()
        // What is not complete by then never will be.
        else
          void turns().then(() => {
            if (isHeard) return
            isEnded = true
            socket.end()
          })
      }
      next()
    })
  })
  const upstream = await opened(stub.url)
  const transport = kind === 'client' ? upstream.client : await upstream.streams()
  const heard = await ask(transport, method, '/first')
  isHeard = true
  // The end of a connection must be noticed first, or its reuse is down to chance.
  if (end === 'end') await turns()
  const second = await ask(transport, 'GET', '/second')
  await upstream.close()
  return { heard, second: second.body, isReused: connections === 1, isEnded }
}

type Outcome = Awaited<ReturnType<typeof hear>>

/** What ours must not do; null if all is well. */
function wrong(ours: Outcome, theirs: Outcome, hasEmptyLine: boolean): string | null {
  // A connection that ends while the next request is written ends that request too; neither client may answer it with earlier bytes.
  if (ours.second !== 'last' && ours.second !== '') return 'the second request got something else'
  if (ours.heard.end !== 'whole') return null
  if (theirs.heard.end !== 'whole') {
    // undici waits for the bytes that a length announces even where the status rules them out (RFC 9112 §6.3, rule 1).
    const isBodiless = ours.heard.status === 204 && /length/.test(theirs.heard.end)
    return isBodiless && !ours.isReused ? null : 'undici refuses it'
  }
  const trimmed = (text: string): string => text.replaceAll(/^[\t ]+|[\t ]+$/g, '')
  const plain = ({ heard }: Outcome): string =>
    JSON.stringify([heard.status, heard.lines.map(trimmed), heard.body, heard.trailers.map(trimmed)])
  // After an empty line undici reads it as UTF-8, and keeps only its last piece.
  if (!hasEmptyLine && ours.heard.reason !== theirs.heard.reason)
    return 'the reason is understood differently'
  if (plain(ours) !== plain(theirs)) return 'it is understood differently'
  return ours.isReused && !theirs.isReused && !theirs.isEnded ? 'the connection is used again' : null
}

void t.test('undici accepts whatever our client accepts, and reads it the same way', async (t) => {
  let whole = 0
  let stricter = 0
  const run = async (seed: number): Promise<void> => {
    const made = script(seed)
    const [ours, theirs] = await Promise.all([hear('client', made), hear('streams', made)])
    const fault = wrong(ours, theirs, /^\r\n|\r\n\r\n\r\nHTTP/.test(made.pieces.join('')))
    if (fault !== null) t.fail(`seed ${seed}: ${fault}`, { made, ours, theirs })
    if (ours.heard.end === 'whole') whole++
    else if (theirs.heard.end === 'whole') {
      stricter++
    }
  }
  for (let seed = SEED * 1_000_000; seed < SEED * 1_000_000 + CASES; seed += 20)
    await Promise.all(Array.from({ length: 20 }, (_, i) => run(seed + i)))
  t.comment(`${whole} accepted, ${stricter} refused that undici accepts`)
  t.ok(whole > CASES / 2, 'most answers are good')
  t.ok(stricter < CASES / 20, 'few are refused')
})
