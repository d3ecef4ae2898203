import type { ServerResponse } from 'node:http'
import { Socket } from 'node:net'
import type { Duplex } from 'node:stream'
import { filterLines, firstOf, prefersHtml, RESPONSE_HEADER } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { problemBody, problemLine, type Refusal } from '../core/refusal.ts'
import type { Reply } from '../protect/request.ts'
import type { LiveSink } from '../upstream/port.ts'
import { NOBODY, Stalled } from './bodies.ts'
import { PAGE_HEADERS, refusalPage } from './refusal-page.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

/** Up to here a copy of the body is cheaper than a second buffer. */
const ONE_WRITE = 16 * 1024

/** The one way out: live and replayed answers leave through the same lines of code, so that they are identical. */
export class ResponseWriter {
  readonly #baseUrl: string
  /** How long a client may take between two bytes. */
  readonly idleTimeout: Millis
  readonly #stalled: Stalled

  /** `stalled`: hears of whole answers that have not left, which give their room up to others. */
  constructor(baseUrl: string, idleTimeout: Millis, stalled = new Stalled()) {
    this.#baseUrl = baseUrl
    this.idleTimeout = idleTimeout
    this.#stalled = stalled
  }

  write(response: ServerResponse, answer: Reply): void {
    switch (answer.kind) {
      case 'response':
        response.once('close', answer.release)
        if (response.destroyed) answer.release()
        else this.#whole(response, answer)
        return
      case 'live':
        if (response.destroyed) answer.live.drain()
        else this.#live(response, answer)
        return
      case 'problem':
        this.problem(response, answer.refusal, answer.proxyHeaders)
        return
      case 'none':
        breakOff(response)
    }
  }

  problem(response: ServerResponse, refused: Refusal, proxyHeaders: readonly string[] = []): void {
    const { req: request } = response
    const { headers, body } = this.#refusal(refused, prefersHtml(request.rawHeaders))
    headers.push(...proxyHeaders)
    const keeps = request.complete || (refused.code !== 'request_timeout' && restIsSmall(response))
    if (!keeps) headers.push('Connection', 'close')
    response.writeHead(refused.status, headers)
    response.end(body)
    this.watch(response)
    if (!keeps) lingeringClose(response)
    else if (!request.complete) awaitRest(response)
  }

  /** The same for a connection that has left HTTP's hands: the whole message, after which it is to be ended. */
  problemMessage(refused: Refusal): Buffer {
    const { headers, body } = this.#refusal(refused, false)
    const lines = pairs([...headers, 'Connection', 'close']).map(([name, value]) => `${name}: ${value}\r\n`)
    const head = `HTTP/1.1 ${refused.status} ${STATUS_CODES[refused.status]}\r\n${lines.join('')}\r\n`
    return Buffer.concat([Buffer.from(head), body])
  }

  #refusal(refused: Refusal, asPage: boolean): { headers: string[]; body: Buffer } {
    const type = asPage ? 'text/html; charset=utf-8' : 'application/problem+json'
    const headers = ['Content-Type', type, 'Cache-Control', 'no-store', RESPONSE_HEADER.retry, refused.retry]
    headers.push(RESPONSE_HEADER.problem, problemLine(refused))
    if (asPage) headers.push(...PAGE_HEADERS)
    if (refused.retryAfter !== null) headers.push('Retry-After', String(refused.retryAfter))
    if (!this.#baseUrl.startsWith('urn:'))
      headers.push('Link', `<${this.#baseUrl}${refused.code}>; rel="describedby"`)
    const body = Buffer.from(asPage ? refusalPage(refused) : problemBody(refused, this.#baseUrl))
    headers.push('Content-Length', String(body.length))
    return { headers, body }
  }

  #whole(response: ServerResponse, { response: kept, proxyHeaders, release }: Whole): void {
    const { status, reason, headers, trailers, body } = kept
    const chunked = trailers.length > 0 && chunkable(response, status)
    const lines = withProxyHeaders(withoutTrailer(headers, chunked), proxyHeaders)
    const hasBody = hasContent(response, status)
    // Without a length Node chunks, which trailers need.
    if (hasBody && !chunked) lines.push('Content-Length', String(body.length))
    response.writeHead(status, reason, lines)
    if (chunked) response.addTrailers(pairs(trailers))
    endMessage(response, hasBody ? body : null)
    this.watch(response)
    this.#hurry(response, body.length, release)
  }

  /**
   * A whole answer is held in memory until it has left, however slowly its client reads: it is dropped where it takes less than a
   * mebibyte in each idle time, or stands in the way of others. A retry gets the replay.
   */
  #hurry(response: ServerResponse, size: number, release: () => void): void {
    if (hasLeft(response)) return
    const drop = (): void => {
      release()
      response.socket?.resetAndDestroy()
    }
    const timer = setTimeout(drop, this.idleTimeout * (1 + size / 1024 ** 2))
    const unfinished = this.#stalled.watch(drop, NOBODY)
    response.once('close', () => {
      clearTimeout(timer)
      unfinished.done()
    })
  }

  #live(response: ServerResponse, { live, proxyHeaders }: Extract<Reply, { kind: 'live' }>): void {
    const headers = withoutTrailer(live.headers, chunkable(response, live.status))
    response.writeHead(live.status, live.reason, withProxyHeaders(headers, proxyHeaders))
    sendHead(response)
    live.attach(clientSink(response, this))
  }

  /** A client that stops reading an answer is dropped: its bytes are held in memory meanwhile. */
  watch(response: ServerResponse): void {
    if (hasLeft(response)) return
    const socket = response.socket as Socket
    // Reset: to a client of HTTP/1.0 anything else would be the end of the body.
    const drop = (): void => void socket.resetAndDestroy()
    const idle = socket.timeout ?? 0
    socket.setTimeout(this.idleTimeout, drop)
    // Before Node's own listener, which sets the keep-alive timeout of the connection.
    response.prependOnceListener('finish', () => socket.setTimeout(idle).off('timeout', drop))
  }
}

type Whole = Extract<Reply, { kind: 'response' }>

/** Whether the kernel has all of it, or nobody is there to get it. */
function hasLeft(response: ServerResponse): boolean {
  return (
    response.writableFinished ||
    response.destroyed ||
    (response.writableEnded && response.socket?.writableLength === 0)
  )
}

/** Live bytes to a client; one that reads too slowly is dropped, and the upstream goes on to its end (contract §7). */
function clientSink(response: ServerResponse, writer: ResponseWriter): LiveSink {
  let resume = (): void => {}
  let stalled: NodeJS.Timeout | undefined
  const abort = (): void => breakOff(response)
  const flow = (): void => {
    clearTimeout(stalled)
    stalled = undefined
    resume()
  }
  response.on('drain', flow).once('close', flow)
  return {
    start(resumeUpstream) {
      resume = resumeUpstream
    },
    write(chunk) {
      if (response.destroyed || response.write(chunk)) return true
      stalled ??= setTimeout(abort, writer.idleTimeout)
      return false
    },
    end(trailers) {
      if (trailers.length > 0 && !response.destroyed) response.addTrailers(pairs(trailers))
      response.end()
      writer.watch(response)
    },
    abort,
  }
}

/**
 * Ends an answer that is not whole. To a client of HTTP/1.0 only the end of the connection ends a body, so nothing but a
 * reset tells it.
 */
export function breakOff(response: ServerResponse): void {
  const { req, socket } = response
  if (req.httpVersionMinor === 0 && response.headersSent && socket instanceof Socket) socket.resetAndDestroy()
  else response.destroy()
}

/** Ends a message with the last of its body. */
export function endMessage(response: ServerResponse, last: Buffer | null): void {
  if (last === null || last.length === 0) response.end()
  // Node joins head and body where the body is a string: one buffer for the kernel instead of two.
  else if (last.length <= ONE_WRITE) response.end(last.toString('latin1'), 'latin1')
  else response.end(last)
}

/** Sends the head before there is a body. Node's `flushHeaders` would write latin1 values as UTF-8. */
export function sendHead(response: ServerResponse): void {
  response.write(Buffer.alloc(0))
}

/** Whether the answer has content (RFC 9110 §6.4.1), however little. */
export function hasContent({ req }: ServerResponse, status: number): boolean {
  return req.method !== 'HEAD' && status !== 204 && status !== 304
}

/** Whether Node chunks an answer without a length. Only a chunked one may carry `Trailer`. */
export function chunkable(response: ServerResponse, status: number): boolean {
  return response.req.httpVersionMinor > 0 && hasContent(response, status)
}

/** With lines of the proxy's own, which stand in place of those that a proxy behind this one says of itself. */
export function withProxyHeaders(headers: readonly string[], proxyHeaders: readonly string[]): string[] {
  // None of an upstream's is kept.
  if (proxyHeaders.every((name, i) => i % 2 === 1 || name === RESPONSE_HEADER.replayed))
    return [...headers, ...proxyHeaders]
  const own = new Set(proxyHeaders.filter((_, i) => i % 2 === 0).map((name) => name.toLowerCase()))
  // Its time is that of another record.
  if (own.has('idempotency-status')) own.add('idempotency-expires')
  return [...filterLines(headers, (name) => !own.has(name)), ...proxyHeaders]
}

function withoutTrailer(headers: readonly string[], chunked: boolean): readonly string[] {
  return chunked || firstOf(headers, 'trailer') === null
    ? headers
    : filterLines(headers, (name) => name !== 'trailer')
}

/** A body up to this size is read to its end for the sake of its connection: it is there already, or soon. */
const SMALL_BODY = 64 * 1024

/** Whether the connection can be kept although the body was not read: what is left of it says where the next request begins. */
function restIsSmall({ req, shouldKeepAlive }: ServerResponse): boolean {
  return shouldKeepAlive && Number(req.headers['content-length'] ?? Number.POSITIVE_INFINITY) <= SMALL_BODY
}

/** Time for the client to read the answer, or to send the rest of a small body. */
const LINGER: Millis = 1000
/** Times as long at most, while it still sends. */
const MOST_LINGERS = 30
/** So many may take longer than one at a time. */
const MOST_LINGERING = 100

let lingering = 0

/**
 * Ends a connection that the client may still send on: for as long as bytes come, it has not read the answer. The bytes must be read
 * by whoever calls.
 */
export function linger(connection: Duplex): void {
  connection.end()
  if (lingering >= MOST_LINGERING || !(connection instanceof Socket)) {
    setTimeout(() => connection.destroy(), LINGER).unref()
    return
  }
  lingering++
  let heard = connection.bytesRead
  let times = 0
  const timer = setInterval(() => {
    if (connection.bytesRead === heard || ++times >= MOST_LINGERS) connection.destroy()
    heard = connection.bytesRead
  }, LINGER).unref()
  connection.once('close', () => {
    lingering--
    clearInterval(timer)
  })
}

function awaitRest({ req, socket }: ServerResponse): void {
  req.resume()
  const timer = setTimeout(() => {
    if (!req.complete) socket?.destroy()
  }, LINGER).unref()
  req.once('end', () => clearTimeout(timer))
}

/**
 * Ends a connection on which the client still sends: what it sends is read and thrown away for a moment. Were the connection
 * closed at once, the client would get a reset instead of the answer.
 */
export function lingeringClose({ req, socket }: ServerResponse): void {
  req.resume()
  // What Node calls after an answer that says `Connection: close`. Not `req.socket`: undici takes that away from a request whose
  // body it gave up.
  if (socket !== null) socket.destroySoon = () => linger(socket)
}

export function pairs(lines: readonly string[]): [string, string][] {
  const out: [string, string][] = []
  for (let i = 0; i + 1 < lines.length; i += 2) out.push([lines[i] as string, lines[i + 1] as string])
  return out
}
