import type { EventEmitter } from 'node:events'
import type { IncomingHttpHeaders, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'

import type { RoutePolicy } from '../core/policy.ts'
import type { Refusal } from '../core/refusal.ts'
import type { RequestTarget } from '../core/route.ts'

const { IncomingMessage } = process.getBuiltinModule('node:http')

/** How a request is handled (contract §3.1, §10). */
export type Way =
  /** `shadow`: forwarded and observed. */
  | { readonly kind: 'protect' | 'shadow'; readonly route: RoutePolicy }
  /** `ignored`: the answer says that no key was given on a protected route. */
  | { readonly kind: 'pass'; readonly route: RoutePolicy | null; readonly ignored: boolean }
  | { readonly kind: 'refuse' }
  /** One of the proxy's own endpoints. */
  | { readonly kind: 'own' }
  /** A CORS preflight for this method. */
  | { readonly kind: 'preflight'; readonly method: string }

/** A request whose target can be read. */
export interface Arrival {
  readonly target: RequestTarget
  readonly way: Way
  /** The constraint of its Fastify route: the name of its policy, or one of `OTHER`; undefined: none. */
  readonly policy: string | undefined
}

/** Emits `close`. */
export interface Carrier extends EventEmitter {
  readonly bytesRead: number
}

/** A client's request. */
export interface TrafficRequest {
  readonly method?: string | undefined
  /** Rewritten for Fastify's router. */
  url?: string | undefined
  /** As sent. Set by Fastify. */
  originalUrl?: string
  /** Set before Fastify's router sees the request; undefined: its target cannot be read. */
  arrival?: Arrival | undefined
  readonly httpVersion: string
  /** Flat, as received. */
  readonly rawHeaders: string[]
  /** For Fastify, its plugins and hooks; this proxy reads `rawHeaders`. */
  readonly headers: IncomingHttpHeaders
  readonly socket: Socket
  /** The carrier of only this request: its connection, or its HTTP/2 stream. */
  readonly carrier: Carrier
  readonly framing: Framing
  /** It has arrived completely. */
  readonly isHere: boolean
  readonly destroyed: boolean
  /** The body, once; null if it is a stream, in which case the request is a {@link StreamRequest}. */
  takeBody(): Buffer | null
  /** The body, for observers; null as above. */
  peekBody(): Buffer | null
  /** Discards the body. */
  resume(): void
  /** Set if its body turned out malformed before its turn: it is then refused. */
  refusal?: Refusal
}

/** The answer to a {@link TrafficRequest}: Node's `ServerResponse` or its stand-in. */
export interface TrafficResponse extends EventEmitter {
  readonly req: TrafficRequest
  /** CORS lines for the proxy's own answers and replays. */
  marks?: readonly string[]
  readonly socket: Socket | null
  readonly statusCode: number
  readonly headersSent: boolean
  shouldKeepAlive: boolean
  readonly writableEnded: boolean
  readonly writableFinished: boolean
  readonly destroyed: boolean
  readonly closed: boolean
  writeHead(status: number, reason: string, lines: string[]): unknown
  writeHead(status: number, lines: string[]): unknown
  addTrailers(lines: [string, string][]): void
  write(chunk: Buffer): boolean
  end(last?: Buffer): unknown
  end(last: string, encoding: 'latin1'): unknown
  destroy(): unknown
}

/** The answer to a {@link StreamRequest}. */
export type StreamResponse = ServerResponse<StreamRequest>

/** The header lines that decide how a message is read. */
export interface Framing {
  /** Number of `Host` lines. */
  hosts: number
  /** Announced bytes; 0 if no length is announced. */
  length: number
  readonly codings: string[]
  /** An `Upgrade` line. */
  upgrade: boolean
}

/** Amount of unread data at which Node's stream stops reading. */
const MAX_HELD = 64 * 1024

const NOTHING = Buffer.alloc(0)

/**
 * A request parsed by Node. Its body is an ordinary Node stream, unless it is small and arrives in one piece, as most do, with their heads.
 * Such bodies, and empty ones, never enter the stream, whose events would cost more than the rest of the reading (docs/adr/0076).
 */
export class StreamRequest extends IncomingMessage implements TrafficRequest {
  refusal?: Refusal
  arrival: Arrival | undefined
  #framing: Framing | null = null
  #way: 'stream' | 'held' | 'whole' = 'stream'
  #body: Buffer = NOTHING
  #onWhole: (() => void) | null = null

  get carrier(): Socket {
    return this.socket
  }

  get framing(): Framing {
    return (this.#framing ??= framingOf(this.rawHeaders))
  }

  get isHere(): boolean {
    return this.complete || this.#way === 'whole'
  }

  /** Keeps a small body out of the stream. Called with the head, before any of the body. */
  hold(): void {
    const { length, codings } = this.framing
    if (codings.length === 0 && length < MAX_HELD) this.#way = length === 0 ? 'whole' : 'held'
  }

  /** Calls `then` once the body that came with the head is complete, or if none did. */
  afterBody(then: () => void): void {
    if (this.#way !== 'held') return then()
    this.#onWhole = then
    process.nextTick(() => this.#begin())
  }

  takeBody(): Buffer | null {
    const body = this.peekBody()
    this.#body = NOTHING
    return body
  }

  peekBody(): Buffer | null {
    const { length, codings } = this.framing
    // No body is announced (RFC 9112 §6.3).
    const isEmpty = length === 0 && codings.length === 0
    return isEmpty || this.#way === 'whole' ? this.#body : null
  }

  #begin(): void {
    const then = this.#onWhole
    if (then === null) return
    this.#onWhole = null
    if (this.#way === 'held') this.#way = 'stream'
    then()
  }

  /** What the parser has read. */
  override push(chunk: Buffer | null): boolean {
    if (this.#way === 'held' && chunk?.length === this.framing.length) {
      this.#way = 'whole'
      this.#body = chunk
      this.#begin()
      return true
    }
    if (this.#way === 'whole') return true
    this.#way = 'stream'
    return super.push(chunk)
  }

  static {
    // Node releases a request at the end of its body. The types declare a plain property here.
    Object.defineProperty(this.prototype, 'readableEnded', {
      get(this: StreamRequest): unknown {
        return this.#way === 'whole' || Reflect.get(IncomingMessage.prototype, 'readableEnded', this)
      },
    })
  }

  /** Node also calls this to discard an unread body. */
  override resume(): this {
    if (this.#way !== 'whole') return super.resume()
    this.#body = NOTHING
    return this
  }
}

function framingOf(headers: readonly string[]): Framing {
  const framing: Framing = { hosts: 0, length: 0, codings: [], upgrade: false }
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = headers[i] as string
    const value = headers[i + 1] as string
    switch (name.length) {
      case 4:
        if (name.toLowerCase() === 'host') framing.hosts++
        break
      case 7:
        if (name.toLowerCase() === 'upgrade') framing.upgrade = true
        break
      case 14:
        // Node's parser refuses a second one, and anything but digits.
        if (name.toLowerCase() === 'content-length') framing.length = Number(value)
        break
      case 17:
        if (name.toLowerCase() === 'transfer-encoding')
          framing.codings.push(...value.toLowerCase().split(','))
    }
  }
  return framing
}

/** Its answers end with their streams, and never with the connection. */
export function isMultiplexed({ carrier, socket }: Pick<TrafficRequest, 'carrier' | 'socket'>): boolean {
  return carrier !== socket
}

/** Completes an injected request (`app.inject()`) as the traffic server does its own. */
export function adopt(request: TrafficRequest): void {
  if (request instanceof StreamRequest || request.framing !== undefined) return
  const framing = framingOf(request.rawHeaders)
  const body = framing.length === 0 && framing.codings.length === 0 ? NOTHING : null
  Object.assign(request, {
    framing,
    carrier: request.socket,
    isHere: body !== null,
    takeBody: () => body,
    peekBody: () => body,
  })
}
