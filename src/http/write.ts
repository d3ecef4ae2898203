import type { IncomingMessage, ServerResponse } from 'node:http'
import { firstOf } from '../core/headers.ts'
import type { Millis, StoredResponse } from '../core/record.ts'
import { problemBody, type Refusal } from '../core/refusal.ts'
import type { Answer } from '../guard/call.ts'
import type { LiveResponse, LiveSink } from '../upstream/port.ts'

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
        this.problem(request, response, answer.refusal)
        return
      case 'none':
        response.destroy()
    }
  }

  problem(request: IncomingMessage, response: ServerResponse, refused: Refusal): void {
    const body = problemBody(refused, this.#baseUrl)
    const headers = ['Content-Type', 'application/problem+json', 'Cache-Control', 'no-store']
    if (refused.retryAfter !== null) headers.push('Retry-After', String(refused.retryAfter))
    if (!this.#baseUrl.startsWith('urn:'))
      headers.push('Link', `<${this.#baseUrl}${refused.code}>; rel="describedby"`)
    const bytes = Buffer.from(body)
    headers.push('Content-Length', String(bytes.length))
    if (!request.complete) headers.push('Connection', 'close')
    response.writeHead(refused.status, headers)
    response.end(bytes)
    this.#watch(response)
    if (!request.complete) lingeringClose(request, response)
  }

  #whole(
    request: IncomingMessage,
    response: ServerResponse,
    kept: StoredResponse,
    marks: readonly string[],
  ): void {
    const headers = [...kept.headers, ...marks]
    const { status, trailers, body } = kept
    const bodiless = status === 204 || status === 304 || request.method === 'HEAD'
    if (trailers.length > 0 && !bodiless) {
      // Without a length Node chunks, which trailers need.
      if (firstOf(headers, 'trailer') === null) headers.push('Trailer', namesOf(trailers).join(', '))
    } else if (!bodiless) headers.push('Content-Length', String(body.length))
    response.writeHead(status, kept.reason, headers)
    if (bodiless) response.end()
    else {
      if (trailers.length > 0) response.addTrailers(pairs(trailers))
      response.end(body)
    }
    this.#watch(response)
  }

  #live(
    request: IncomingMessage,
    response: ServerResponse,
    live: LiveResponse,
    marks: readonly string[],
  ): void {
    response.writeHead(live.status, live.reason, [...live.headers, ...marks])
    response.flushHeaders()
    live.attach(new ClientSink(request, response, this.#idleTimeout))
  }

  /** A client that stops reading an answer is dropped: its bytes are held in memory meanwhile. */
  #watch(response: ServerResponse): void {
    if (response.writableFinished) return
    const { socket } = response
    if (socket === null) return
    const drop = (): void => void socket.destroy()
    socket.setTimeout(this.#idleTimeout, drop)
    response.once('finish', () => socket.setTimeout(0).off('timeout', drop))
  }
}

/** Live bytes to a client; one that reads too slowly is dropped, and the upstream goes on to its end (contract §7). */
class ClientSink implements LiveSink {
  readonly #response: ServerResponse
  readonly #idleTimeout: Millis
  #resume: () => void = () => {}
  #stalled: NodeJS.Timeout | null = null

  constructor(request: IncomingMessage, response: ServerResponse, idleTimeout: Millis) {
    this.#response = response
    this.#idleTimeout = idleTimeout
    response.on('drain', () => this.#flow())
    response.once('close', () => this.#flow())
    request.socket.once('error', () => this.#flow())
  }

  start(resume: () => void): void {
    this.#resume = resume
  }

  write(chunk: Buffer): boolean {
    if (this.#response.destroyed) return true
    if (this.#response.write(chunk)) return true
    this.#stalled ??= setTimeout(() => this.#response.destroy(), this.#idleTimeout)
    return false
  }

  end(trailers: readonly string[]): void {
    if (trailers.length > 0 && !this.#response.destroyed) this.#response.addTrailers(pairs(trailers))
    this.#response.end()
  }

  abort(): void {
    this.#response.destroy()
  }

  #flow(): void {
    if (this.#stalled !== null) clearTimeout(this.#stalled)
    this.#stalled = null
    this.#resume()
  }
}

/** Time for the client to read the refusal before the connection is reset under the rest of its upload. */
const LINGER: Millis = 1000

function lingeringClose(request: IncomingMessage, response: ServerResponse): void {
  request.resume()
  response.once('finish', () => setTimeout(() => request.socket.destroy(), LINGER).unref())
}

function pairs(lines: readonly string[]): [string, string][] {
  const out: [string, string][] = []
  for (let i = 0; i + 1 < lines.length; i += 2) out.push([lines[i] as string, lines[i + 1] as string])
  return out
}

function namesOf(lines: readonly string[]): string[] {
  return [...new Set(pairs(lines).map(([name]) => name))]
}
