import type { Dispatcher } from 'undici'
import {
  filterLines,
  firstOf,
  HOP_BY_HOP,
  hopByHop,
  isFieldValue,
  isNeverUpstreams,
  linesOf,
  type RawHeaders,
} from '../core/headers.ts'
import type { Millis, StoredResponse } from '../core/record.ts'
import { BodyBuffer, type Budget } from '../runtime/limits.ts'
import { Batch } from '../runtime/scheduling.ts'
import { NotProcessed, type RawDispatchOptions } from './dispatched.ts'
import type { Forward, Forwarded, LiveResponse, LiveSink, UpstreamRequest } from './port.ts'
import { AnswerRefused } from './response-parser.ts'

type Controller = Dispatcher.DispatchController

/** Any undici dispatcher; the optional members are implemented only by ours. */
export interface UpstreamDispatcher extends Dispatcher {
  dispatch(options: RawDispatchOptions, handler: Dispatcher.DispatchHandler): boolean
  /** Forgets a request that still waits for a connection. */
  cancel?(handler: Dispatcher.DispatchHandler): void
}

export interface ForwardLimits {
  /** Limits the whole call, or up to the head of a streamed answer; read at the start. Infinity: the caller limits it. */
  readonly timeout: () => Millis
  /** Between two bytes of the answer. */
  readonly idleTimeout: Millis
  readonly budget: Budget
}

interface Ended {
  readonly resolve: (result: Forwarded) => void
  readonly result: Forwarded
}

/** Implements {@link Forward}: one exchange, never a second one. */
export function forwarder(dispatcher: UpstreamDispatcher, limits: ForwardLimits): Forward {
  const ended = new Batch<Ended>(({ resolve, result }) => resolve(result))
  return (request) =>
    new Promise((resolve) => {
      const end = (result: Forwarded): void => ended.add({ resolve, result })
      const { method, target: path, headers, body } = request
      dispatcher.dispatch(
        {
          method,
          path,
          headers: headers as string[],
          body,
          // The exchange has its own timer.
          headersTimeout: 0,
          bodyTimeout: limits.idleTimeout,
          responseHeaders: 'raw',
        },
        new Exchange(request, dispatcher, limits, end),
      )
    })
}

/**
 * Media types that clients read while they are sent (contract §7): events, lines of JSON under each of their names, RPC, and GraphQL's
 * incremental delivery. A plain `multipart/mixed` is a batch, which can be replayed.
 */
const STREAMED =
  /^(?:text\/(?:event-stream|(?:x-)?ndjson)|application\/(?:(?:x-)?(?:ndjson|ldjson|jsonl(?:ines)?|json-(?:lines|stream))|(?:[^;\s+]+\+)?json-seq|stream\+json|vnd\.amazon\.eventstream|grpc[^;\s]*|connect\+[^;\s]*)|multipart\/(?:x-mixed-replace|mixed(?=.*;\s*(?:deferSpec|subscriptionSpec)=)))\s*(?:;|$)/i

function isStream(headers: RawHeaders): boolean {
  return (
    STREAMED.test(firstOf(headers, 'content-type') ?? '') ||
    firstOf(headers, 'x-accel-buffering')?.trim().toLowerCase() === 'no'
  )
}

/** Bytes of a live answer that are queued before a sink is attached. */
const LIVE_QUEUE = 64 * 1024

/**
 * One exchange. {@link onRequestStart} is the witness: undici calls it right before the first byte is written; after it, only {@link NotProcessed}
 * proves that nothing was done. Error codes prove nothing: the same ones occur before and after sending.
 */
export class Exchange implements Dispatcher.DispatchHandler {
  readonly #request: UpstreamRequest
  readonly #limits: Pick<ForwardLimits, 'timeout' | 'budget'>
  readonly #dispatcher: UpstreamDispatcher | null
  #resolve: ((result: Forwarded) => void) | null
  #timer: NodeJS.Timeout | null = null
  #timedOut = false
  #controller: Controller | null = null
  #status: number | null = null
  #head: ResponseHead | null = null
  #declaredOutcome: string | null = null
  readonly #body = new BodyBuffer()
  #size = 0
  #live: Live | null = null

  /** `dispatcher`: null if the caller sends it. */
  constructor(
    request: UpstreamRequest,
    dispatcher: UpstreamDispatcher | null,
    limits: Pick<ForwardLimits, 'timeout' | 'budget'>,
    resolve: (result: Forwarded) => void,
  ) {
    this.#request = request
    this.#dispatcher = dispatcher
    this.#limits = limits
    this.#resolve = resolve
    const timeout = limits.timeout()
    if (Number.isFinite(timeout))
      // After a pause of the process, first read what arrived during it.
      this.#timer = setTimeout(() => setImmediate(() => this.#timeout(timeout)), timeout)
  }

  onRequestStart(controller: Controller): void {
    // Abandoned while waiting for a connection: it must not be sent.
    if (this.#resolve === null) controller.abort(new Error('nobody is waiting for it any more'))
    else if (this.#request.mayBegin?.() === false)
      controller.abort(
        new Error('it could not be sent while its lease was sure to last, or before its deadline'),
      )
    else this.#controller = controller
  }

  onResponseStart(controller: Controller, status: number, _headers: unknown, reason = ''): void {
    if (status < 200) return
    const raw = rawLines(controller.rawHeaders)
    this.#status = status
    const coding = linesOf(raw, 'transfer-encoding').join(',')
    if (!/^(?:chunked|identity|[\t ,])*$/i.test(coding)) {
      // The proxy removes framing, so no client would learn of the remaining coding.
      const why = `the response has the transfer coding ${coding}; only chunked is understood`
      controller.abort(new AnswerRefused(why))
      return
    }
    this.#declaredOutcome = declaredIn(raw)
    const hop = hopByHop(raw)
    // The original framing is removed; without a body, a length only describes the representation (RFC 9110 §8.6).
    const describes = this.#request.method === 'HEAD' || status === 304
    const headers = filterLines(
      raw,
      (name) => !hop.has(name) && !isTakenOff(name) && (name !== 'content-length' || describes),
    )
    // RFC 9110 §6.6.1: a recipient with a clock adds the missing Date; once, so that replays carry the same.
    if (firstOf(headers, 'date') === null) headers.push('Date', new Date().toUTCString())
    this.#head = { status, reason: reasonPhrase(reason), headers }
    const announced = describes ? 0 : Number(firstOf(raw, 'content-length') ?? 0)
    this.#body.announced = announced
    const { stream = 'auto' } = this.#request
    // Without a body there is nothing to wait for.
    const hasBody = !describes && status !== 204 && firstOf(raw, 'content-length')?.trim() !== '0'
    if (hasBody && stream !== 'never' && (stream === 'always' || isStream(headers))) this.#goLive('streamed')
    else if (announced > this.#request.responseLimit) this.#goLive('too_large')
  }

  onResponseData(_controller: Controller, bytes: Buffer): void {
    if (this.#live !== null) {
      this.#live.push(Buffer.from(bytes))
      return
    }
    this.#body.push(bytes)
    const fits = this.#limits.budget.take(bytes.length)
    if (fits) this.#size += bytes.length
    if (this.#request.streams?.(bytes) === true) this.#goLive('streamed')
    else if (!fits) this.#goLive('no_room')
    else if (this.#size > this.#request.responseLimit) this.#goLive('too_large')
  }

  onResponseEnd(controller: Controller & { readonly isTaken?: boolean }): void {
    if (controller.isTaken) this.#request.onTaken?.()
    const raw = rawLines(controller.rawTrailers)
    const trailers = filterLines(raw, (name) => isTrailer(name) && !isTakenOff(name))
    // A gRPC handler knows the outcome only at the end: the last word counts.
    this.#declaredOutcome = declaredIn(raw) ?? this.#declaredOutcome
    if (this.#live !== null) {
      this.#live.end(trailers, this.#declaredOutcome)
      return
    }
    let held = this.#size
    this.#settle({
      proof: 'responded',
      declaredOutcome: this.#declaredOutcome,
      response: { ...(this.#head as ResponseHead), body: this.#body.take(), trailers },
      // Only once: a dropped answer calls this again when it closes.
      release: () => {
        this.#limits.budget.give(held)
        held = 0
      },
    })
  }

  onResponseError(_controller: unknown, error: Error): void {
    if (this.#live !== null) {
      this.#live.fail(errorText(error))
      return
    }
    this.#limits.budget.give(this.#size)
    this.#size = 0
    const isRefused = error instanceof NotProcessed
    if (this.#controller === null || isRefused)
      this.#settle({ proof: 'not_sent', reason: errorText(error), isRefused })
    else
      this.#settle({
        proof: 'unknown',
        reason: errorText(error),
        timedOut: this.#timedOut || isTimeout(error),
        isRefused: error instanceof AnswerRefused,
        status: this.#status,
      })
  }

  #timeout(timeout: Millis): void {
    if (this.#resolve === null) return
    this.#timedOut = true
    if (this.#controller === null) {
      this.#dispatcher?.cancel?.(this)
      this.onResponseError(null, new Error(`no connection to the upstream was free within ${timeout} ms`))
    } else this.#controller.abort(new Error(`the upstream did not finish its answer within ${timeout} ms`))
  }

  #goLive(why: 'streamed' | 'too_large' | 'no_room'): void {
    this.#limits.budget.give(this.#size)
    this.#size = 0
    const { keepsStream = false, responseLimit } = this.#request
    const copy = why === 'streamed' && keepsStream ? new StreamCopy(responseLimit, this.#limits.budget) : null
    const live = new Live(this.#controller as Controller, this.#head as ResponseHead, copy)
    this.#live = live
    const begun = this.#body.take()
    if (begun.length > 0) live.push(begun)
    this.#settle({ proof: 'live', why, live })
  }

  #settle(result: Forwarded): void {
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timer = null
    this.#resolve?.(result)
    this.#resolve = null
  }
}

/** The outcome that these lines declare; null: none. Contradictory lines give a list, which is no valid outcome. */
function declaredIn(lines: RawHeaders): string | null {
  const found = linesOf(lines, 'idempotency-outcome')
  // Most answers declare none.
  if (found.length === 0) return null
  return [...new Set(found.map((line) => line.trim().toLowerCase()))].join(', ')
}

/** Lines that this proxy sets or removes. */
function isTakenOff(name: string): boolean {
  return isNeverUpstreams(name) || name === 'idempotency-outcome'
}

/** Whether the upstream's trailer reaches the client. */
export function isTrailer(name: string): boolean {
  return !HOP_BY_HOP.has(name) && !isNeverUpstreams(name) && name !== 'trailer' && name !== 'content-length'
}

/** A copy of what a stream has delivered, up to the limit. */
class StreamCopy {
  readonly #limit: number
  readonly #budget: Budget
  #chunks: Buffer[] | null = []
  #size = 0

  constructor(limit: number, budget: Budget) {
    this.#limit = limit
    this.#budget = budget
  }

  add(chunk: Buffer): void {
    if (this.#chunks === null) return
    if (this.#size + chunk.length > this.#limit || !this.#budget.take(chunk.length)) return this.drop()
    this.#size += chunk.length
    this.#chunks.push(chunk)
  }

  /** Null: it became too large. */
  body(): Buffer | null {
    return this.#chunks && Buffer.concat(this.#chunks)
  }

  drop(): void {
    this.#budget.give(this.#size)
    this.#size = 0
    this.#chunks = null
  }
}

type ResponseHead = Pick<StoredResponse, 'status' | 'reason' | 'headers'>

class Live implements LiveResponse {
  readonly status: number
  readonly reason: string
  readonly headers: readonly string[]
  readonly done: Promise<'complete' | 'broken'>
  readonly #controller: Controller
  readonly #finish: (end: 'complete' | 'broken') => void
  readonly #copy: StreamCopy | null
  #queue: Buffer[] = []
  #queued = 0
  #sink: LiveSink | null = null
  #ended: readonly string[] | null = null
  #hasBody = false
  declaredOutcome: string | null = null
  brokenBy = ''

  constructor(controller: Controller, { status, reason, headers }: ResponseHead, copy: StreamCopy | null) {
    this.#copy = copy
    this.#controller = controller
    this.status = status
    this.reason = reason
    this.headers = headers
    const { promise, resolve } = Promise.withResolvers<'complete' | 'broken'>()
    this.done = promise
    this.#finish = resolve
  }

  attach(sink: LiveSink): void {
    this.#sink = sink
    sink.start(() => this.#controller.resume())
    let room = true
    for (const chunk of this.#queue) room = sink.write(chunk)
    this.#queue = []
    if (this.brokenBy !== '') sink.abort()
    else if (this.#ended !== null) sink.end(this.#ended)
    else if (room) this.#controller.resume()
  }

  drain(): void {
    this.attach({ start() {}, write: () => true, end() {}, abort() {} })
  }

  abandon(): void {
    this.#controller.abort(new Error('nobody reads the answer'))
  }

  get trailers(): readonly string[] {
    return this.#ended ?? []
  }

  get body(): Buffer | undefined {
    return this.#hasBody ? undefined : Buffer.alloc(0)
  }

  get kept(): StoredResponse | null {
    const body = this.#ended === null ? null : (this.#copy?.body() ?? null)
    if (body === null) return null
    const { status, reason, headers, trailers } = this
    return { status, reason, headers: [...headers], body, trailers: [...trailers] }
  }

  release(): void {
    this.#copy?.drop()
  }

  push(chunk: Buffer): void {
    this.#hasBody = true
    this.#copy?.add(chunk)
    if (this.#sink !== null) {
      if (!this.#sink.write(chunk)) this.#controller.pause()
      return
    }
    this.#queue.push(chunk)
    this.#queued += chunk.length
    if (this.#queued > LIVE_QUEUE) this.#controller.pause()
  }

  end(trailers: readonly string[], declaredOutcome: string | null): void {
    this.#ended = trailers
    this.declaredOutcome = declaredOutcome
    this.#sink?.end(trailers)
    this.#finish('complete')
  }

  fail(why: string): void {
    this.brokenBy = why
    this.#copy?.drop()
    this.#sink?.abort()
    this.#finish('broken')
  }
}

/** A controller's lines, flat. undici's own are bytes; header values are latin1 on the wire and here. */
export function rawLines(raw: Controller['rawHeaders']): string[] {
  if (!Array.isArray(raw)) return []
  if (typeof raw[0] === 'string') return raw as string[]
  return (raw as Buffer[]).map((part) => part.toString('latin1'))
}

const LATE: ReadonlySet<string | undefined> = new Set(['UND_ERR_HEADERS_TIMEOUT', 'UND_ERR_BODY_TIMEOUT'])

/** Whether the exchange ended because the answer did not arrive, or continue, in time. */
export function isTimeout({ code }: NodeJS.ErrnoException): boolean {
  return LATE.has(code)
}

/** Empty if it cannot be written again. */
export function reasonPhrase(text: string): string {
  return isFieldValue(text) ? text : ''
}

export function errorText(error: Error): string {
  const { code } = error as NodeJS.ErrnoException
  return code === undefined ? error.message : `${error.message} (${code})`
}
