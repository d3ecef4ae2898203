import { Socket } from 'node:net'
import type { Duplex } from 'node:stream'
import { filterLines, firstOf, linesOf, prefersHtml, RESPONSE_HEADER } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { problemBody, problemLine, type Refusal } from '../core/refusal.ts'
import type { Reply } from '../protect/request.ts'
import { unfreed } from '../runtime/limits.ts'
import { Batch } from '../runtime/scheduling.ts'
import type { LiveSink } from '../upstream/port.ts'
import { resetConnection } from './connections.ts'
import { PAGE_HEADERS, refusalPage } from './refusal-page.ts'
import { isMultiplexed, type StreamResponse, type TrafficResponse } from './request.ts'
import type { RefusalAnswer } from './rpc-answers.ts'
import { NOBODY, Stalled } from './stalled.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

/** Up to this size copying the body is cheaper than a second write. */
const ONE_WRITE = 16 * 1024

/** `size`: of its body. */
interface EndedAnswer {
  readonly response: TrafficResponse
  readonly size: number
  readonly release: () => void
}

/** Writes every protected answer, live or replayed, so that they are identical. */
export class ResponseWriter {
  readonly #baseUrl: string
  /** How long a client may stop reading. */
  readonly idleTimeout: Millis
  readonly #stalled: Stalled
  /** Loaded with the first gRPC call or route. */
  rpc: typeof import('./rpc-answers.ts').rpcRefusal | null = null

  /** `stalled`: decides which unsent whole answers are dropped for others. */
  constructor(baseUrl: string, idleTimeout: Millis, stalled = new Stalled()) {
    this.#baseUrl = baseUrl
    this.idleTimeout = idleTimeout
    this.#stalled = stalled
  }

  write(response: TrafficResponse, answer: Reply): void {
    switch (answer.kind) {
      case 'response':
        try {
          this.#whole(response, answer)
        } catch (error) {
          answer.release()
          throw error
        }
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

  problem(response: TrafficResponse, refused: Refusal, proxyHeaders: readonly string[] = []): void {
    const { req: request } = response
    const { status, headers, body } =
      this.rpc?.(request, refused) ?? this.#refusal(refused, prefersHtml(request.rawHeaders))
    headers.push(...proxyHeaders)
    const keeps =
      request.isHere ||
      isMultiplexed(request) ||
      (refused.code !== 'request_timeout' && restIsSmall(response))
    if (!keeps) headers.push('Connection', 'close')
    response.writeHead(status, marked(response, headers))
    endMessage(response, body)
    this.watch(response)
    if (!keeps) lingeringClose(response)
    else if (!request.isHere && !isMultiplexed(request)) awaitRest(response as StreamResponse)
  }

  /** The complete message, for a raw connection that is then closed. */
  problemMessage(refused: Refusal): Buffer {
    const { headers, body } = this.#refusal(refused, false)
    const lines = pairs([...headers, 'Connection', 'close']).map(([name, value]) => `${name}: ${value}\r\n`)
    const head = `HTTP/1.1 ${refused.status} ${STATUS_CODES[refused.status]}\r\n${lines.join('')}\r\n`
    return Buffer.concat([Buffer.from(head), body])
  }

  #refusal(refused: Refusal, asPage: boolean): RefusalAnswer {
    const type = asPage ? 'text/html; charset=utf-8' : 'application/problem+json'
    const headers = ['Content-Type', type, 'Cache-Control', 'no-store', RESPONSE_HEADER.retry, refused.retry]
    headers.push(RESPONSE_HEADER.problem, problemLine(refused))
    if (asPage) headers.push(...PAGE_HEADERS)
    if (refused.retryAfter !== null) headers.push('Retry-After', String(refused.retryAfter))
    if (!this.#baseUrl.startsWith('urn:'))
      headers.push('Link', `<${this.#baseUrl}${refused.code}>; rel="describedby"`)
    const body = Buffer.from(asPage ? refusalPage(refused) : problemBody(refused, this.#baseUrl))
    headers.push('Content-Length', String(body.length))
    return { status: refused.status, headers, body }
  }

  #whole(response: TrafficResponse, { response: stored, proxyHeaders, release }: Whole): void {
    if (response.destroyed) return release()
    const { status, reason, headers, trailers } = stored
    const body = unfreed(stored.body)
    const chunked = trailers.length > 0 && chunkable(response, status)
    const kept = withProxyHeaders(withoutTrailer(headers, chunked), proxyHeaders)
    const lines = marked(response, kept)
    const hasBody = hasContent(response, status)
    // Without a length Node chunks, which trailers need.
    if (hasBody && !chunked) lines.push('Content-Length', String(body.length))
    response.writeHead(status, reason, lines)
    if (chunked) response.addTrailers(pairs(trailers))
    endMessage(response, hasBody ? body : null)
    if (hasLeft(response)) return release()
    // Over TLS and HTTP/2 it leaves later in this turn; what a Set once held is collected late (docs/adr/0017).
    this.#ended.add({ response, size: body.length, release })
  }

  readonly #ended = new Batch<EndedAnswer>(({ response, size, release }) => {
    if (hasLeft(response)) return release()
    this.watch(response)
    this.#hurry(response, size, release)
  })

  /**
   * A whole answer stays in memory until it has been sent. It is dropped if its client reads less than a mebibyte per idle timeout, or if
   * others need the room; a retry gets the replay.
   */
  #hurry(response: TrafficResponse, size: number, release: () => void): void {
    const drop = (): void => {
      // First, since released memory may be freed.
      dropAnswer(response)
      release()
    }
    const timer = setTimeout(drop, this.idleTimeout * (1 + size / 1024 ** 2))
    const unfinished = this.#stalled.watch(drop, NOBODY)
    response.once('close', () => {
      clearTimeout(timer)
      unfinished.done()
      release()
    })
  }

  #live(response: TrafficResponse, { live, proxyHeaders }: Extract<Reply, { kind: 'live' }>): void {
    const headers = withoutTrailer(live.headers, chunkable(response, live.status))
    response.writeHead(live.status, live.reason, marked(response, withProxyHeaders(headers, proxyHeaders)))
    sendHead(response)
    live.attach(clientSink(response, this))
  }

  /** Drops a client that stops reading: its answer is held in memory meanwhile. */
  watch(response: TrafficResponse): void {
    if (hasLeft(response)) return
    const socket = response.socket as Socket
    const drop = (): void => dropAnswer(response)
    const idle = socket.timeout ?? 0
    socket.setTimeout(this.idleTimeout, drop)
    // Before Node's own listener, which sets the keep-alive timeout of the connection.
    response.prependOnceListener('finish', () => socket.setTimeout(idle).off('timeout', drop))
  }
}

/**
 * The lines of one of the proxy's answers, for the origin of its request: those of a replay were made for the first request's. The
 * upstream's own `Access-Control-*` go, except that what it exposes stays exposed (docs/adr/0127).
 */
export function marked({ marks }: TrafficResponse, lines: string[]): string[] {
  if (marks === undefined) return lines
  const kept = filterLines(lines, (name) => !name.startsWith('access-control-'))
  for (const [name, value] of pairs(marks)) {
    if (name !== 'Vary' || !variesByOrigin(lines)) kept.push(name, value)
    if (name === 'Access-Control-Expose-Headers')
      kept[kept.length - 1] = [...linesOf(lines, name.toLowerCase()), value].join(', ')
  }
  return kept
}

function variesByOrigin(lines: readonly string[]): boolean {
  const names = linesOf(lines, 'vary').join(',').split(',')
  return names.some((name) => /^\s*(?:\*|origin)\s*$/i.test(name))
}

type Whole = Extract<Reply, { kind: 'response' }>

/** Whether the kernel has all of it, or the client has left. */
function hasLeft(response: TrafficResponse): boolean {
  return (
    response.writableFinished ||
    response.destroyed ||
    (response.writableEnded && response.socket?.writableLength === 0)
  )
}

/** Drops a client that reads too slowly, while the upstream continues to its end (contract §7). */
function clientSink(response: TrafficResponse, writer: ResponseWriter): LiveSink {
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

/** Ends an incomplete answer. HTTP/1.0 bodies end with their connection, so only a reset shows that one is incomplete. */
export function breakOff(response: TrafficResponse): void {
  const { req, socket } = response
  if (req.httpVersion === '1.0' && response.headersSent && socket instanceof Socket) resetConnection(socket)
  else response.destroy()
}

/** Gives up on a client that does not read. To an HTTP/1.0 client, anything but a reset would look like the end of the body. */
function dropAnswer(response: TrafficResponse): void {
  if (isMultiplexed(response.req)) response.destroy()
  else if (response.socket !== null) resetConnection(response.socket)
}

/** Ends a message with the last part of its body. */
export function endMessage(response: TrafficResponse, last: Buffer | null): void {
  if (last === null || last.length === 0) response.end()
  // Node joins head and body if the body is a string: one buffer for the kernel instead of two.
  else if (last.length <= ONE_WRITE) response.end(last.toString('latin1'), 'latin1')
  else response.end(last)
}

/** Sends the head before any body. Node's `flushHeaders` would write latin1 values as UTF-8. */
export function sendHead(response: TrafficResponse): void {
  response.write(Buffer.alloc(0))
}

/** Whether the answer has content (RFC 9110 §6.4.1), even if empty. */
export function hasContent({ req }: TrafficResponse, status: number): boolean {
  return req.method !== 'HEAD' && status !== 204 && status !== 304
}

/** Whether Node chunks an answer without a length. Only a chunked one may carry `Trailer`. */
export function chunkable(response: TrafficResponse, status: number): boolean {
  return response.req.httpVersion !== '1.0' && hasContent(response, status)
}

/** Adds this proxy's own lines, replacing those of a proxy behind it. */
export function withProxyHeaders(headers: readonly string[], proxyHeaders: readonly string[]): string[] {
  const lines: string[] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = headers[i] as string
    if (!isReplaced(name, proxyHeaders)) lines.push(name, headers[i + 1] as string)
  }
  for (const text of proxyHeaders) lines.push(text)
  return lines
}

function isReplaced(name: string, proxyHeaders: readonly string[]): boolean {
  for (let i = 0; i < proxyHeaders.length; i += 2) {
    const own = proxyHeaders[i] as string
    if (isSame(name, own)) return true
    // The other proxy's expiry belongs to another record.
    if (own === RESPONSE_HEADER.status && isSame(name, RESPONSE_HEADER.expires)) return true
  }
  return false
}

function isSame(name: string, own: string): boolean {
  return name.length === own.length && name.toLowerCase() === own.toLowerCase()
}

function withoutTrailer(headers: readonly string[], chunked: boolean): readonly string[] {
  return chunked || firstOf(headers, 'trailer') === null
    ? headers
    : filterLines(headers, (name) => name !== 'trailer')
}

/** The rest of a body up to this size is read, to keep the connection. */
const SMALL_BODY = 64 * 1024

function restIsSmall({ req, shouldKeepAlive }: TrafficResponse): boolean {
  const { length, codings } = req.framing
  return shouldKeepAlive && codings.length === 0 && length <= SMALL_BODY
}

/** Time for the client to read the answer, or to send the rest of a small body. */
const LINGER: Millis = 1000
/** Maximum number of such intervals, while the client still sends. */
const MAX_LINGERS = 30
/** Number of connections that may take longer than one interval at a time. */
const MAX_LINGERING = 100

let lingering = 0

/**
 * Closes a connection on which the client may still send: as long as bytes arrive, it has not read the answer. The caller reads and
 * discards them.
 */
export function linger(connection: Duplex): void {
  connection.end()
  if (lingering >= MAX_LINGERING || !(connection instanceof Socket)) {
    setTimeout(() => connection.destroy(), LINGER).unref()
    return
  }
  lingering++
  let heard = connection.bytesRead
  let times = 0
  const timer = setInterval(() => {
    if (connection.bytesRead === heard || ++times >= MAX_LINGERS) connection.destroy()
    heard = connection.bytesRead
  }, LINGER).unref()
  connection.once('close', () => {
    lingering--
    clearInterval(timer)
  })
}

function awaitRest({ req, socket }: StreamResponse): void {
  req.resume()
  const timer = setTimeout(() => {
    if (!req.complete) socket?.destroy()
  }, LINGER).unref()
  req.once('end', () => clearTimeout(timer))
}

/** Makes the connection linger after the answer. If it were closed at once, a client that is still sending would get a reset instead. */
export function lingeringClose({ req, socket }: TrafficResponse): void {
  req.resume()
  // Node calls this after an answer with `Connection: close`. Not `req.socket`: undici removes that from a request whose body it gave up.
  if (socket !== null) socket.destroySoon = () => linger(socket)
}

export function pairs(lines: readonly string[]): [string, string][] {
  const out: [string, string][] = []
  for (let i = 0; i + 1 < lines.length; i += 2) out.push([lines[i] as string, lines[i + 1] as string])
  return out
}
