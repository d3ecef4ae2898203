import { AsyncLocalStorage } from 'node:async_hooks'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type * as OpenTelemetry from '@opentelemetry/api'
import type { Attributes, Context, Link, Span, Tracer } from '@opentelemetry/api'
import type { Config } from '../config/config.ts'
import { filterLines, linesOf, type RawHeaders } from '../core/headers.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Observer, Trace } from '../protect/request.ts'
import { around, type Operation } from '../store/around.ts'
import type { Store } from '../store/register.ts'
import type { Forward, Forwarded } from '../upstream/port.ts'
import {
  clientAttributes,
  exchangeAttributes,
  outcomeAttributes,
  serverAttributes,
  spanName,
  statusAttributes,
  storeAttributes,
  upstreamPlace,
} from './span-attributes.ts'

/** Where every copy of the API's first major version, the SDK's own too, keeps what was registered. */
const REGISTERED = Symbol.for('opentelemetry.js.api.1')
/** Store operations of a request. Renewals and sweeps belong to none. */
const TRACED: readonly Operation[] = ['put', 'swap', 'get', 'throttle']
/** How long the last spans may keep a shutdown waiting. */
const FLUSH_MOST: Millis = 2_000

/**
 * Spans of protected requests, where the user has loaded an SDK; null: there is none, and nothing is made of any request
 * (docs/tracing.md). Asked once, at the start.
 */
export async function openTracing(
  config: Config,
  version: string,
  onUnusable: (found: string) => void,
): Promise<Tracing | null> {
  const registered = (globalThis as Record<symbol, unknown>)[REGISTERED] as Registered | undefined
  if (registered?.trace === undefined) return null
  const api = await import('@opentelemetry/api')
  if (api.trace.getTracerProvider() === registered.trace) return new Tracing(api, config, version)
  // Registered by a copy that is older than this one, which does not look at it then.
  onUnusable(String(registered.version))
  return null
}

interface Registered {
  readonly version?: unknown
  readonly trace?: unknown
}

/** A request that is being served. */
interface Serving {
  readonly span: Span
  readonly context: Context
  readonly route: RoutePolicy
  /** What goes on behind an answer that has left is not this request's any more. */
  ended: boolean
}

export class Tracing {
  readonly #api: typeof OpenTelemetry
  readonly #tracer: Tracer
  readonly #config: Config
  /** Of its own: it works without the SDK's context manager, too. */
  readonly #serving = new AsyncLocalStorage<Serving>()

  constructor(api: typeof OpenTelemetry, config: Config, version: string) {
    this.#api = api
    this.#config = config
    this.#tracer = api.trace.getTracer('idempotency-proxy', version)
  }

  /** Serves a request under a span, which goes on from the client's context and ends with the answer. */
  serve(route: RoutePolicy, request: IncomingMessage, response: ServerResponse, handle: () => void): void {
    const { trace, propagation, context, ROOT_CONTEXT, SpanKind } = this.#api
    const method = request.method as string
    const parent = propagation.extract(ROOT_CONTEXT, request.rawHeaders, LINES)
    const span = this.#tracer.startSpan(
      spanName(method, route),
      { kind: SpanKind.SERVER, attributes: serverAttributes(method, route, request.httpVersion) },
      parent,
    )
    const serving: Serving = { span, context: trace.setSpan(parent, span), route, ended: false }
    response.once('close', () => {
      serving.ended = true
      if (response.headersSent) this.#finish(span, statusAttributes(response.statusCode, 500))
      else this.#finish(span, { 'error.type': 'aborted' })
    })
    this.#serving.run(serving, () => context.with(serving.context, handle))
  }

  /** `traceparent` of the request that is being served; null: none is. */
  current(): string | null {
    const serving = this.#serving.getStore()
    if (serving === undefined) return null
    const context = serving.span.spanContext()
    if (!this.#api.isSpanContextValid(context)) return null
    const { traceId, spanId, traceFlags } = context
    return `00-${traceId}-${spanId}-${traceFlags.toString(16).padStart(2, '0')}`
  }

  /** Tells the request's span what became of it, and links it to the execution that it was answered from. */
  observer(inner: Observer): Observer {
    return {
      ...inner,
      answered: (trace) => {
        this.#tell(trace)
        inner.answered(trace)
      },
    }
  }

  #tell(trace: Trace): void {
    const span = this.#serving.getStore()?.span
    if (span === undefined) return
    span.setAttributes(outcomeAttributes(trace))
    const link = linkTo(trace.execution)
    if (link !== null) span.addLink(link)
  }

  /** Each exchange for a request is a span of its own, whose context goes upstream in place of the client's. */
  forward(inner: Forward): Forward {
    const { trace, SpanKind } = this.#api
    const place = upstreamPlace(this.#config.upstream)
    return async (request) => {
      const serving = this.#serving.getStore()
      if (serving === undefined) return inner(request)
      const { method, target } = request
      const attributes = clientAttributes(place, method, target, serving.route)
      const name = target === serving.route.authorizeReplay?.path ? method : spanName(method, serving.route)
      const span = this.#tracer.startSpan(name, { kind: SpanKind.CLIENT, attributes }, serving.context)
      const headers = this.#injected(request.headers, trace.setSpan(serving.context, span))
      let result: Forwarded
      try {
        result = await inner({ ...request, headers })
      } catch (error) {
        this.#finish(span, { 'error.type': nameOf(error) })
        throw error
      }
      const found = exchangeAttributes(result)
      if (result.proof === 'live')
        void result.live.done.then((end) =>
          this.#finish(span, end === 'complete' ? found : { ...found, 'error.type': 'broken_off' }),
        )
      else this.#finish(span, found)
      return result
    }
  }

  #injected(headers: RawHeaders, context: Context): readonly string[] {
    const lines = new Map<string, string>()
    this.#api.propagation.inject(context, lines, {
      set: (carrier, name, value) => void carrier.set(name, value),
    })
    const names = new Set([...lines.keys()].map((name) => name.toLowerCase()))
    return [...filterLines(headers, (name) => !names.has(name)), ...[...lines].flat()]
  }

  /** Each store operation of a request becomes a span. */
  store(store: Store): Store {
    const place = storeAttributes(this.#config.store)
    if (place === null) return store
    const { SpanKind } = this.#api
    return around(store, (operation, run) => {
      const serving = this.#serving.getStore()
      if (serving === undefined || serving.ended || !TRACED.includes(operation)) return run()
      const attributes = { ...place, 'db.operation.name': operation }
      const span = this.#tracer.startSpan(operation, { kind: SpanKind.CLIENT, attributes }, serving.context)
      const reply = run()
      void reply.then(
        () => span.end(),
        (error: unknown) => this.#finish(span, { 'error.type': nameOf(error) }),
      )
      return reply
    })
  }

  /** What has ended is handed to the exporter, which has a little time for it. */
  async flush(): Promise<void> {
    const provider = this.#api.trace.getTracerProvider() as MaybeFlushing & { getDelegate?(): MaybeFlushing }
    const flushed = (provider.getDelegate?.() ?? provider).forceFlush?.()
    let timer: NodeJS.Timeout | undefined
    const late = new Promise((resolve) => {
      timer = setTimeout(resolve, FLUSH_MOST)
    })
    // What cannot be exported is the exporter's to tell.
    await Promise.race([Promise.resolve(flushed).catch(() => {}), late])
    clearTimeout(timer)
  }

  #finish(span: Span, attributes: Attributes): void {
    span.setAttributes(attributes)
    if (attributes['error.type'] !== undefined) span.setStatus({ code: this.#api.SpanStatusCode.ERROR })
    span.end()
  }
}

interface MaybeFlushing {
  forceFlush?(): Promise<void>
}

/** Reads header lines as propagators do: names in any case, the lines of one name joined. */
const LINES = {
  keys: (headers: RawHeaders): string[] =>
    headers.filter((_, i) => i % 2 === 0).map((name) => name.toLowerCase()),
  get: (headers: RawHeaders, name: string): string | undefined => {
    const values = linesOf(headers, name.toLowerCase())
    return values.length === 0 ? undefined : values.join(',')
  },
}

/** The span that a `traceparent` names (W3C Trace Context); null: none. */
function linkTo(traceparent: string | null): Link | null {
  const match = /^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$/.exec(traceparent ?? '')
  if (match === null) return null
  const [, traceId = '', spanId = '', flags = ''] = match
  return {
    context: { traceId, spanId, traceFlags: Number.parseInt(flags, 16), isRemote: true },
    attributes: { 'idempotency.link': 'execution' },
  }
}

/** Messages may quote what was sent. */
function nameOf(error: unknown): string {
  return error instanceof Error ? error.name : 'error'
}
