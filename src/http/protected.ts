import { EventEmitter } from 'node:events'
import type { FastifyInstance } from 'fastify'
import type { Config } from '../config/config.ts'
import { filterLines, firstOf, type RawHeaders } from '../core/headers.ts'
import type { ClientCertificate } from '../core/identity.ts'
import { carriesKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { comparedPath, policiesOf } from '../core/route.ts'
import { deadlineHeader, type RpcProtocol, rpcOf, timeoutOf, timeoutText } from '../core/rpc/protocol.ts'
import { guard, newProgress } from '../protect/guard.ts'
import type { WalkPorts } from '../protect/ports.ts'
import { responding } from '../protect/receiving.ts'
import { type BodyReading, type ProtectedRequest, type SentAttempt, timeLeft } from '../protect/request.ts'
import { BodyBuffer, type Budget, free, type Shares, shareOf } from '../runtime/limits.ts'
import type { Shadow } from '../shadow/shadow.ts'
import { ExchangeTap } from '../upstream/exchange-tap.ts'
import { forwardedCertificate } from './client-certificate.ts'
import {
  type Forwarding,
  hostOf,
  type Peer,
  protectedLines,
  requestLines,
  type TrustedProxies,
} from './headers.ts'
import { type Hijacking, type Incoming, takeAnyBody } from './incoming.ts'
import type { StreamRequest, TrafficRequest, TrafficResponse } from './request.ts'
import { routePattern } from './routing.ts'
import type { Stalled, Unfinished } from './stalled.ts'
import { breakOff, type ResponseWriter } from './write.ts'

/** Makes spans for protected requests, if an OpenTelemetry SDK is loaded (docs/tracing.md). */
export interface RequestSpans {
  /** Calls `handle`, which serves the request. */
  serve(route: RoutePolicy, request: TrafficRequest, response: TrafficResponse, handle: () => void): void
  /** `traceparent` of the request being served; null: none. */
  current(): string | null
}

export interface ProtectOptions {
  readonly ports: WalkPorts
  readonly writer: ResponseWriter
  /** `limits.upload` in force. */
  readonly upload: Millis
  readonly forwarding: Forwarding
  readonly uploads: Uploads
  readonly proxies: TrustedProxies
  /** Where clients ask for a record's state; null: not offered. */
  readonly statusPath: string | null
  /** Null: replays get the headers of their own origin. */
  readonly onOtherOrigin: ((route: string) => void) | null
  readonly onBug: (error: unknown) => void
  readonly spans: RequestSpans | null
}

export interface ProtectPlugin {
  readonly config: Config
  readonly protecting: ProtectOptions
  /** Unprotected, or in shadow mode. */
  readonly passOn: (incoming: Incoming) => unknown
  readonly handle: Hijacking
}

/** The routes of the configuration. Routes hidden by earlier ones are omitted: find-my-way accepts few with one pattern. */
export function protectedRoutes(
  app: FastifyInstance,
  { config, protecting, passOn, handle }: ProtectPlugin,
  done: () => void,
): void {
  takeAnyBody(app)
  const known = new Set<string>()
  for (const policy of policiesOf(config)) {
    const { match, name } = policy
    const url = routePattern(match)
    const isNew = (method: string): boolean => {
      const place = [method, url.replace(/:\w+/g, ':'), match.exact, match.case, match.parameters].join(' ')
      return app.supportedMethods.includes(method) && !known.has(place) && known.add(place) === known
    }
    const method = match.methods.filter(isNew)
    const handler = handle((incoming) =>
      incoming.way.kind === 'protect' ? serveProtected(protecting, policy, incoming) : passOn(incoming),
    )
    if (method.length > 0)
      app.route({ method, url, constraints: { policy: name }, config: { policy: name }, handler })
  }
  done()
}

/** From the wire through the guard to the writer. */
function serveProtected(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): void {
  const { spans } = options
  // Without tracing, no span objects.
  if (spans === null) void protect(options, route, incoming)
  else
    spans.serve(route, incoming.response.req, incoming.response, () => void protect(options, route, incoming))
}

async function protect(options: ProtectOptions, route: RoutePolicy, incoming: Incoming): Promise<void> {
  const { response } = incoming
  const { writer } = options
  try {
    const request = new ReceivedRequest(options, route, incoming)
    // Loaded with the first call (docs/adr/0074).
    if (writer.rpc === null && request.protocol !== null)
      writer.rpc = (await import('./rpc-answers.ts')).rpcRefusal
    const answer = await guard(options.ports, request)
    if (answer.kind === 'response' && answer.replayed && options.onOtherOrigin !== null)
      if (isForOtherOrigin(answer.response.headers, request.headers)) options.onOtherOrigin(route.name)
    writer.write(response, answer)
  } catch (error) {
    options.onBug(error)
    breakOff(response)
  }
}

/** Whether a browser would keep this stored response from the page that asks: it allows another origin. */
function isForOtherOrigin(stored: RawHeaders, asking: RawHeaders): boolean {
  const allowed = firstOf(stored, 'access-control-allow-origin')
  if (allowed === null || allowed === '*') return false
  const origin = firstOf(asking, 'origin')
  return origin !== null && origin !== allowed
}

/** The request as the guard sees it. */
export class ReceivedRequest implements ProtectedRequest {
  readonly route: RoutePolicy
  readonly method: string
  readonly target: string
  readonly path: string
  readonly query: string
  readonly host: string | null
  readonly headers: RawHeaders
  readonly protocol: RpcProtocol | null
  readonly client: string
  readonly traceId: string | null
  readonly span: string | undefined
  readonly deadline: Millis | undefined
  readonly progress = newProgress()
  readonly #response: TrafficResponse
  readonly #peer: Peer
  readonly #options: ProtectOptions
  /** The settings in force when the request arrived. */
  readonly #forwarding: Forwarding
  readonly #upload: Millis

  /** `method` and target are those of the operation in question. */
  constructor(
    options: ProtectOptions,
    route: RoutePolicy,
    { response, target, peer }: Pick<Incoming, 'response' | 'target' | 'peer'>,
    method = response.req.method as string,
  ) {
    const { rawHeaders } = response.req
    const own = options.spans?.current() ?? null
    this.route = route
    this.method = method
    this.target = target.origin
    this.path = comparedPath(route.match, target)
    this.query = target.query
    this.host = route.scope.host ? hostOf(rawHeaders, peer) : null
    this.headers = rawHeaders
    this.client = options.proxies.clientOf(rawHeaders, peer)
    this.traceId = traceIdOf(own ?? firstOf(rawHeaders, 'traceparent'))
    this.span = own !== null && SAMPLED.test(own) ? own : undefined
    this.protocol = rpcOf(route.match, rawHeaders)
    this.deadline = this.protocol === null ? undefined : this.#deadlineOf(this.protocol)
    this.#response = response
    this.#peer = peer
    this.#options = options
    this.#forwarding = options.forwarding
    this.#upload = options.upload
  }

  /** A trusted proxy's own certificate says nothing about its clients. */
  get certificate(): ClientCertificate | null {
    const { certificate, isTrusted } = this.#peer
    return isTrusted ? forwardedCertificate(this.headers) : certificate
  }

  get statusLink(): readonly string[] {
    const { statusPath } = this.#options
    const { headers, method, path, route } = this
    // Without a key in the head a status request has no key, and a key in the query would appear in the link.
    if (statusPath === null || !carriesKey({ headers, query: '' }, route.key.from)) return []
    return ['Location', `${statusPath}?${new URLSearchParams({ method, path }).toString()}`]
  }

  readBody(): BodyReading | Promise<BodyReading> {
    const { ports, uploads } = this.#options
    const limit = this.route.limits.request
    return readBody(this.#response.req, limit, this.#upload, ports.budget, uploads, this.client)
  }

  upstreamHeaders(attempt: SentAttempt | null): string[] {
    const lines = requestLines(this.#ownLines, this.#peer, this.#forwarding, attempt !== null)
    return attempt === null ? lines : protectedLines(lines, this.route.key, attempt)
  }

  /** A deadline too far away for a timer counts as none. */
  #deadlineOf(protocol: RpcProtocol): Millis | undefined {
    const timeout = timeoutOf(protocol, this.headers)
    return timeout === null || timeout > MAX_DEADLINE ? undefined : this.progress.startedAt + timeout
  }

  /** The lines as received, except that a call's timeout is reduced to the time left. */
  get #ownLines(): RawHeaders {
    const { headers, deadline } = this
    if (this.protocol === null || deadline === undefined) return headers
    const name = deadlineHeader(this.protocol)
    const kept = filterLines(headers, (one) => one !== name)
    return [...kept, name, timeoutText(this.protocol, timeLeft(this))]
  }

  clientGone(): boolean {
    return this.#response.closed && !this.#response.writableFinished
  }

  onGone(left: () => void): () => void {
    this.#response.once('close', left)
    return () => this.#response.off('close', left)
  }
}

/** Shadow mode's view of a forwarded request. */
class ObservedRequest extends ReceivedRequest {
  body: BodyReading | Promise<BodyReading> = { kind: 'aborted' }

  override readBody(): BodyReading | Promise<BodyReading> {
    return this.body
  }

  /** A sent request cannot be cancelled. */
  override clientGone(): boolean {
    return false
  }
}

export interface ShadowOptions {
  readonly shadow: Shadow
  /** A separate budget, so that shadow mode takes no room from protected requests. */
  readonly budget: Budget
}

/** Lets shadow mode observe a forwarded request; null: it has no capacity. It decides once the request is on its way. */
export function tapRequest(
  options: ProtectOptions,
  { shadow, budget }: ShadowOptions,
  route: RoutePolicy,
  incoming: Incoming,
): ExchangeTap | null {
  const { response } = incoming
  const asked = new ObservedRequest(options, route, incoming)
  if (!shadow.enter(asked)) return null
  const { limits } = route
  const { keepsStream: _, ...received } = responding(asked)
  const tap = new ExchangeTap({ method: asked.method, ...received }, budget, options.onBug)
  response.once('close', () => tap.gone())
  asked.body = observeBody(response.req, limits.request, budget)
  setImmediate(() => void shadow.observe(asked, tap))
  return tap
}

/** The longest delay of a Node timer. */
const MAX_DEADLINE: Millis = 2 ** 31 - 1

/** The lowest bit of the flags. */
const SAMPLED = /[13579bdf]$/

/** W3C Trace Context: version-traceid-parentid-flags. */
function traceIdOf(traceparent: string | null): string | null {
  return /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent ?? '')?.[1] ?? null
}

/** Shared by all uploads: chooses the transfer to abandon, and counts each client's share. */
export interface Uploads {
  readonly stalled: Stalled
  readonly shares: Shares
}

/**
 * Reads a protected request's whole body within `limit` bytes, the room left in `budget`, the client's share of it, and `timeout`. A slow
 * or aborted upload claims nothing (contract §3.3).
 */
export function readBody(
  request: TrafficRequest,
  limit: number,
  timeout: Millis,
  budget: Budget,
  { shares, stalled }: Uploads,
  client: string,
): BodyReading | Promise<BodyReading> {
  // Closed before this call: no further event will say so.
  if (request.destroyed) return { kind: 'aborted' }
  const announced = request.framing.length
  if (announced > limit) return { kind: 'too_large' }
  let size = 0
  const slot = shares.slotOf(client)
  // Alone, a body may take all the room there is.
  const hasShare = (more: number): boolean => {
    for (;;) {
      const held = shares.held(slot)
      if (held === size || held + more <= shareOf(budget.most)) return true
      if (!stalled.makeRoomIn(slot)) return false
    }
  }
  const give = (): void => {
    budget.give(size)
    shares.add(slot, -size)
    size = 0
  }
  const whole = request.takeBody()
  if (whole !== null) {
    const { length } = whole
    if (!hasShare(length) || !budget.take(length)) return { kind: 'no_room' }
    size = length
    shares.add(slot, length)
    return { kind: 'body', body: whole, release: give }
  }
  const stream = request as StreamRequest
  return new Promise((resolve) => {
    const body = new BodyBuffer()
    body.announced = announced
    let over = false
    let unfinished: Unfinished | null = null
    const finish = (reading: BodyReading): void => {
      if (over) return
      over = true
      clearTimeout(timer)
      unfinished?.done()
      stream.off('data', onData).off('end', onEnd).off('close', onAbort).off('error', onAbort)
      if (reading.kind !== 'body') {
        stream.pause()
        give()
      }
      resolve(reading)
    }
    const onData = (chunk: Buffer): void => {
      const { length } = chunk
      if (size + length > limit) return finish({ kind: 'too_large' })
      if (!hasShare(length) || !budget.take(length)) return finish({ kind: 'no_room' })
      // This upload was abandoned to make room.
      if (over) return budget.give(length)
      size += length
      shares.add(slot, length)
      body.push(chunk)
      // A copy made by Node's parser; nobody else has it.
      free(chunk)
      if (unfinished !== null) unfinished.moved(length)
      else if (size !== announced) unfinished = stalled.watch(() => finish({ kind: 'no_room' }), slot)
    }
    const onEnd = (): void => finish({ kind: 'body', body: body.take(), release: give })
    const onAbort = (): void => finish({ kind: 'aborted' })
    const timer = setTimeout(finish, timeout, { kind: 'timeout' })
    stream.on('data', onData).on('end', onEnd).on('close', onAbort).on('error', onAbort)
  })
}

/** Copies a body while it is being read elsewhere. A stream's own `on('data')` would start it flowing before its reader is attached. */
export function observeBody(
  request: TrafficRequest,
  limit: number,
  budget: Budget,
): BodyReading | Promise<BodyReading> {
  if (request.framing.length > limit) return { kind: 'too_large' }
  const whole = request.peekBody()
  if (whole !== null) {
    const release = budget.hold(whole.length)
    return release === null ? { kind: 'no_room' } : { kind: 'body', body: whole, release }
  }
  const stream = request as StreamRequest
  return new Promise((resolve) => {
    const chunks = new BodyBuffer()
    let size = 0
    let over = false
    const finish = (reading: BodyReading): void => {
      if (over) return
      over = true
      stream.carrier.off('close', onClose)
      if (reading.kind !== 'body') {
        chunks.take()
        budget.give(size)
      }
      resolve(reading)
    }
    const onClose = (): void => finish({ kind: 'aborted' })
    const onData = (chunk: Buffer): void => {
      if (over) return
      if (size + chunk.length > limit) finish({ kind: 'too_large' })
      else if (!budget.take(chunk.length)) finish({ kind: 'no_room' })
      else {
        size += chunk.length
        chunks.push(chunk)
      }
    }
    const onEnd = (): void => {
      // Node removes all listeners from an unread body, and discards it to its end.
      if (!stream.listeners('data').includes(onData)) finish({ kind: 'aborted' })
      else finish({ kind: 'body', body: chunks.take(), release: () => budget.give(size) })
    }
    EventEmitter.prototype.on.call(stream, 'data', onData)
    stream.on('end', onEnd).on('close', onClose)
    // Once it is answered, Node emits nothing on a request whose client leaves.
    stream.carrier.once('close', onClose)
  })
}
