import type { IncomingMessage, ServerResponse } from 'node:http'
import { Socket } from 'node:net'
import { filterLines, firstOf } from '../core/headers.ts'
import type { Millis, StoredResponse } from '../core/record.ts'
import { problemBody, type Refusal } from '../core/refusal.ts'
import type { Answer } from '../guard/call.ts'
import type { LiveResponse, LiveSink } from '../upstream/port.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

/** Up to here a copy of the body is cheaper than a second buffer. */
export const ONE_WRITE = 16 * 1024

/** The one way out: live and replayed answers leave through the same lines of code, so that they are identical. */
export class Writer {
  readonly #baseUrl: string
  /** How long a client may take between two bytes. */
  readonly #idleTimeout: Millis

  constructor(baseUrl: string, idleTimeout: Millis) {
    this.#baseUrl = baseUrl
    this.#idleTimeout = idleTimeout
  }

  write(request: IncomingMessage, response: ServerResponse, answer: Answer): void {
    switch (answer.kind) {
      case 'response':
        response.once('close', answer.release)
        if (response.destroyed) answer.release()
        else this.#whole(request, response, answer.response, answer.marks)
        return
      case 'live':
        if (response.destroyed) answer.live.drain()
        else this.#live(request, response, answer.live, answer.marks)
        return
      case 'problem':
        this.problem(request, response, answer.refusal, answer.marks)
        return
      case 'none':
        breakOff(request, response)
    }
  }

  problem(
    request: IncomingMessage,
    response: ServerResponse,
    refused: Refusal,
    marks: readonly string[] = [],
  ): void {
    const { headers, body } = this.#problem(refused)
    headers.push(...marks)
    if (!request.complete) headers.push('Connection', 'close')
    response.writeHead(refused.status, headers)
    response.end(body)
    this.watch(response)
    if (!request.complete) lingeringClose(request, response)
  }

  /** The same for a connection that has left HTTP's hands: the whole message, after which it is to be ended. */
  problemMessage(refused: Refusal): Buffer {
    const { headers, body } = this.#problem(refused)
    const lines = pairs([...headers, 'Connection', 'close']).map(([name, value]) => `${name}: ${value}\r\n`)
    const head = `HTTP/1.1 ${refused.status} ${STATUS_CODES[refused.status]}\r\n${lines.join('')}\r\n`
    return Buffer.concat([Buffer.from(head), body])
  }

  #problem(refused: Refusal): { headers: string[]; body: Buffer } {
    const headers = ['Content-Type', 'application/problem+json', 'Cache-Control', 'no-store']
    if (refused.retryAfter !== null) headers.push('Retry-After', String(refused.retryAfter))
    if (!this.#baseUrl.startsWith('urn:'))
      headers.push('Link', `<${this.#baseUrl}${refused.code}>; rel="describedby"`)
    const body = Buffer.from(problemBody(refused, this.#baseUrl))
    headers.push('Content-Length', String(body.length))
    return { headers, body }
  }

  #whole(
    request: IncomingMessage,
    response: ServerResponse,
    kept: StoredResponse,
    marks: readonly string[],
  ): void {
    const { status, trailers, body } = kept
    const chunked = trailers.length > 0 && chunkable(request, status)
    const headers = [...withoutTrailer(kept.headers, chunked), ...marks]
    const bodiless = status === 204 || status === 304 || request.method === 'HEAD'
    // Without a length Node chunks, which trailers need.
    if (!chunked && !bodiless) headers.push('Content-Length', String(body.length))
    response.writeHead(status, kept.reason, headers)
    if (bodiless) response.end()
    else {
      if (chunked) response.addTrailers(pairs(trailers))
      // Node joins head and body where the body is a string: one buffer for the kernel instead of two.
      if (body.length > 0 && body.length <= ONE_WRITE) response.end(body.toString('latin1'), 'latin1')
      else response.end(body)
    }
    this.watch(response)
  }

  #live(
    request: IncomingMessage,
    response: ServerResponse,
    live: LiveResponse,
    marks: readonly string[],
  ): void {
    const headers = withoutTrailer(live.headers, chunkable(request, live.status))
    response.writeHead(live.status, live.reason, [...headers, ...marks])
    sendHead(response)
    live.attach(new ClientSink(request, response, this, this.#idleTimeout))
  }

  /** A client that stops reading an answer is dropped: its bytes are held in memory meanwhile. */
  watch(response: ServerResponse): void {
    if (response.writableFinished || response.destroyed) return
    const { socket } = response
    // The kernel has all of it.
    if (response.writableEnded && socket?.writableLength === 0) return
    if (socket === null) {
      // Pipelined behind another answer: the connection is that one's until then.
      response.once('socket', () => this.watch(response))
      return
    }
    // Reset: to a client of HTTP/1.0 anything else would be the end of the body.
    const drop = (): void => void socket.resetAndDestroy()
    const idle = socket.timeout ?? 0
    socket.setTimeout(this.#idleTimeout, drop)
    // Before Node's own listener, which sets the keep-alive timeout of the connection.
    response.prependOnceListener('finish', () => socket.setTimeout(idle).off('timeout', drop))
  }
}

/** Live bytes to a client; one that reads too slowly is dropped, and the upstream goes on to its end (contract §7). */
class ClientSink implements LiveSink {
  readonly #request: IncomingMessage
  readonly #response: ServerResponse
  readonly #writer: Writer
  readonly #idleTimeout: Millis
  #resume: () => void = () => {}
  #stalled: NodeJS.Timeout | null = null

  constructor(request: IncomingMessage, response: ServerResponse, writer: Writer, idleTimeout: Millis) {
    this.#request = request
    this.#response = response
    this.#writer = writer
    this.#idleTimeout = idleTimeout
    response.on('drain', () => this.#flow())
    response.once('close', () => this.#flow())
  }

  start(resume: () => void): void {
    this.#resume = resume
  }

  write(chunk: Buffer): boolean {
    if (this.#response.destroyed) return true
    if (this.#response.write(chunk)) return true
    this.#stalled ??= setTimeout(() => this.abort(), this.#idleTimeout)
    return false
  }

  end(trailers: readonly string[]): void {
    if (trailers.length > 0 && !this.#response.destroyed) this.#response.addTrailers(pairs(trailers))
    this.#response.end()
    this.#writer.watch(this.#response)
  }

  abort(): void {
    breakOff(this.#request, this.#response)
  }

  #flow(): void {
    if (this.#stalled !== null) clearTimeout(this.#stalled)
    this.#stalled = null
    this.#resume()
  }
}

/**
 * Ends an answer that is not whole. To a client of HTTP/1.0 only the end of the connection ends a body, so nothing but a
 * reset tells it.
 */
export function breakOff(request: IncomingMessage, response: ServerResponse): void {
  const { socket } = response
  // Pipelined behind another answer: Node would give the connection to what is destroyed, and nothing would ever end it.
  if (socket === null) response.once('socket', (its: Socket) => its.destroy())
  if (request.httpVersionMinor === 0 && response.headersSent && socket instanceof Socket)
    socket.resetAndDestroy()
  else response.destroy()
}

/** Sends the head before there is a body. Node's `flushHeaders` would write latin1 values as UTF-8. */
export function sendHead(response: ServerResponse): void {
  response.write(Buffer.alloc(0))
}

/**
 * Answers `Expect: 100-continue`. Behind another answer Node would keep the `100 Continue` until its turn, and then write it
 * after the head of the final answer, where it counts as body.
 */
export function continueInTurn(response: ServerResponse): void {
  if (response.socket !== null) response.writeContinue()
  else
    response.once('socket', () => {
      if (!response.headersSent) response.writeContinue()
    })
}

/** Whether Node chunks an answer without a length. Only a chunked one may carry `Trailer`. */
export function chunkable(request: IncomingMessage, status: number): boolean {
  return request.httpVersionMinor > 0 && request.method !== 'HEAD' && status !== 204 && status !== 304
}

function withoutTrailer(headers: readonly string[], chunked: boolean): readonly string[] {
  return chunked || firstOf(headers, 'trailer') === null
    ? headers
    : filterLines(headers, (name) => name !== 'trailer')
}

/** Time for the client to read the refusal before the connection is reset under the rest of its upload. */
const LINGER: Millis = 1000

function lingeringClose(request: IncomingMessage, response: ServerResponse): void {
  request.resume()
  // Not `request.socket`: undici takes that away from a request whose body it gave up.
  const { socket } = response
  response.once('finish', () => setTimeout(() => socket?.destroy(), LINGER).unref())
}

export function pairs(lines: readonly string[]): [string, string][] {
  const out: [string, string][] = []
  for (let i = 0; i + 1 < lines.length; i += 2) out.push([lines[i] as string, lines[i + 1] as string])
  return out
}
