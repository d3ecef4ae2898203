import { AsyncLocalStorage } from 'node:async_hooks'
import type { EventEmitter } from 'node:events'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type * as OpenTelemetry from '@opentelemetry/api'
import type { Attributes, Context, Link, Span, Tracer } from '@opentelemetry/api'
import type { Config } from '../config/config.ts'
import { filterLines, linesOf, type RawHeaders } from '../core/headers.ts'
import { shortId } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { type Millis } from '../core/record.ts'
import type { Observer, RequestSummary } from '../protect/request.ts'
import { within } from '../runtime/scheduling.ts'
import { around, type StoreOperation } from '../store/around.ts'
import type { Store } from '../store/register.ts'
import type { Forward, Forwarded } from '../upstream/port.ts'

/*
 * Attributes follow the semantic conventions for HTTP and databases (1.29 and later). Any segment of a path may hold a key or a
 * token, so spans have the configured path with REDACTED where it is open; no span has a query, a header or a body (contract §14).
 */

/** Where every copy of the API's first major version registers its globals, including the SDK's own copy. */
const REGISTERED = Symbol.for('opentelemetry.js.api.1')
/** Store operations of a request. Renewals and sweeps belong to no request. */
const TRACED: readonly StoreOperation[] = ['put', 'swap', 'get', 'throttle']
/** How long the last spans may delay the shutdown. */
const MAX_FLUSH: Millis = 2_000
/** Others are `_OTHER`, so that a client cannot invent names. */
const METHODS = new Set('CONNECT DELETE GET HEAD OPTIONS PATCH POST PUT QUERY TRACE'.split(' '))

/** Spans of protected requests, if the user has loaded an SDK; else null (docs/tracing.md). Decided once, at startup. */
export async function openTracing(
  config: Config,
  version: string,
  onUnusable: (found: string) => void,
): Promise<Tracing | null> {
  const registered = (globalThis as { [REGISTERED]?: { version?: unknown; trace?: unknown } })[REGISTERED]
  if (registered?.trace === undefined) return null
  const api = await import('@opentelemetry/api')
  if (api.trace.getTracerProvider() === registered.trace) return new Tracing(api, config, version)
  // Registered by an older copy, which this one ignores.
  onUnusable(String(registered.version))
  return null
}

/** A request that is being served. */
interface Serving {
  readonly span: Span
  readonly context: Context
  readonly route: RoutePolicy
  /** Its answer has been sent: later work is no longer part of this request. */
  ended: boolean
}

export class Tracing {
  readonly #api: typeof OpenTelemetry
  readonly #tracer: Tracer
  readonly #config: Config
  /** Works without the SDK's context manager, too. */
  readonly #serving = new AsyncLocalStorage<Serving>()

  constructor(api: typeof OpenTelemetry, config: Config, version: string) {
    this.#api = api
    this.#config = config
    this.#tracer = api.trace.getTracer('idempotency-proxy', version)
  }

  /** Serves a request in a span that continues the client's trace and ends with the answer. */
  serve(
    route: RoutePolicy,
    request: Pick<IncomingMessage, 'method' | 'rawHeaders' | 'httpVersion'>,
    response: EventEmitter & Pick<ServerResponse, 'headersSent' | 'statusCode'>,
    handle: () => void,
  ): void {
    const { trace, propagation, context, ROOT_CONTEXT, SpanKind } = this.#api
    const method = request.method as string
    const parent = propagation.extract(ROOT_CONTEXT, request.rawHeaders, LINES)
    const span = this.#tracer.startSpan(
      spanName(method, route),
      { kind: SpanKind.SERVER, attributes: this.#serverAttributes(method, route, request.httpVersion) },
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

  #serverAttributes(method: string, route: RoutePolicy, version: string): Attributes {
    return {
      'http.request.method': methodOf(method),
      'url.scheme': this.#config.listen.tls === null ? 'http' : 'https',
      'url.path': knownPath(route),
      // The convention has no minor version of HTTP/2.
      'network.protocol.version': version === '2.0' ? '2' : version,
      ...(isDefault(route) ? {} : { 'http.route': route.match.path }),
      'idempotency.route': route.name,
    }
  }

  /** `traceparent` of the current request; null: there is none. */
  current(): string | null {
    const serving = this.#serving.getStore()
    if (serving === undefined) return null
    const context = serving.span.spanContext()
    if (!this.#api.isSpanContextValid(context)) return null
    const { traceId, spanId, traceFlags } = context
    return `00-${traceId}-${spanId}-${traceFlags.toString(16).padStart(2, '0')}`
  }

  /** Adds the outcome to the request's span, and a link to the execution whose response was replayed. */
  observer(inner: Observer): Observer {
    return {
      ...inner,
      answered: (summary) => {
        const span = this.#serving.getStore()?.span
        const link = linkTo(summary.replayOf)
        span?.setAttributes(outcomeAttributes(summary))
        if (link !== null) span?.addLink(link)
        inner.answered(summary)
      },
    }
  }

  /** Each exchange with the upstream gets a span, whose context goes upstream instead of the client's. */
  forward(inner: Forward): Forward {
    const { trace, SpanKind } = this.#api
    const place = upstreamPlace(this.#config.upstream)
    return async (request) => {
      const serving = this.#serving.getStore()
      if (serving === undefined) return inner(request)
      const { method, target } = request
      const { route } = serving
      // The path of `authorizeReplay` comes from the configuration.
      const asksToReplay = target === route.authorizeReplay?.path
      const path = asksToReplay ? (target.split('?', 1)[0] as string) : knownPath(route)
      const name = asksToReplay ? method : spanName(method, route)
      const attributes = {
        ...place.attributes,
        'http.request.method': methodOf(method),
        'url.full': `${place.origin}${path}`,
      }
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
    const traced = around(store, (operation, run) => {
      const serving = this.#serving.getStore()
      if (serving === undefined || serving.ended || !TRACED.includes(operation)) return run()
      const attributes = { ...place, 'db.operation.name': operation }
      const span = this.#tracer.startSpan(operation, { kind: SpanKind.CLIENT, attributes }, serving.context)
      const reply = run()
      if (!(reply instanceof Promise)) span.end()
      else
        void reply.then(
          () => span.end(),
          (error: unknown) => this.#finish(span, { 'error.type': nameOf(error) }),
        )
      return reply
    })
    return { ...traced, close: () => store.close() }
  }

  /** Gives the exporter a little time for the last spans. */
  async flush(): Promise<void> {
    type Provider = { forceFlush?(): Promise<void>; getDelegate?(): Provider }
    const provider = this.#api.trace.getTracerProvider() as Provider
    const flushed = Promise.resolve((provider.getDelegate?.() ?? provider).forceFlush?.())
    // The exporter reports its own failures.
    await within(
      MAX_FLUSH,
      flushed.catch(() => {}),
    )
  }

  #finish(span: Span, attributes: Attributes): void {
    span.setAttributes(attributes)
    if (attributes['error.type'] !== undefined) span.setStatus({ code: this.#api.SpanStatusCode.ERROR })
    span.end()
  }
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

/** For example `POST /v1/payments`, for both sides of a request. */
function spanName(method: string, route: RoutePolicy): string {
  const verb = METHODS.has(method) ? method : 'HTTP'
  return isDefault(route) ? verb : `${verb} ${route.match.path}`
}

function methodOf(method: string): string {
  return METHODS.has(method) ? method : '_OTHER'
}

function isDefault({ name }: RoutePolicy): boolean {
  return name === 'default'
}

/** The configured part of the path. */
function knownPath({ match }: RoutePolicy): string {
  return match.path.replaceAll(/(?<=\/)(?::[^/]+|\*$)/g, 'REDACTED')
}

function outcomeAttributes({ id, outcome, before, after, fence }: RequestSummary): Attributes {
  return {
    'idempotency.outcome': outcome ?? 'aborted',
    ...(id === null ? {} : { 'idempotency.record': shortId(id) }),
    ...(before === null ? {} : { 'idempotency.state.before': before }),
    ...(after === null ? {} : { 'idempotency.state.after': after }),
    ...(fence === null ? {} : { 'idempotency.fence': fence }),
  }
}

/** Where the upstream is. */
function upstreamPlace({ url }: Config['upstream']): { origin: string; attributes: Attributes } {
  if (url.startsWith('unix:'))
    return {
      origin: 'http://localhost',
      attributes: { 'server.address': url.slice('unix:'.length), 'network.transport': 'unix' },
    }
  const { origin, hostname, port, protocol } = new URL(url)
  const ownPort = Number(port) || (protocol === 'https:' ? 443 : 80)
  return { origin, attributes: { 'server.address': hostname, 'server.port': ownPort } }
}

/** The status of an exchange with the upstream, or `error.type`. */
function exchangeAttributes(result: Forwarded): Attributes {
  switch (result.proof) {
    case 'responded':
      return statusAttributes(result.response.status, 400)
    case 'live':
      return statusAttributes(result.live.status, 400)
    case 'not_sent':
      return { 'error.type': 'not_sent' }
    case 'unknown':
      return { 'error.type': result.timedOut ? 'timeout' : 'broken_off' }
  }
}

/** A client span counts 4xx as an error, a server span only 5xx. */
function statusAttributes(status: number, errorFrom: 400 | 500): Attributes {
  return {
    'http.response.status_code': status,
    ...(status >= errorFrom ? { 'error.type': String(status) } : {}),
  }
}

const STORE_SYSTEMS = [
  { scheme: /^rediss?\+sentinel:/, name: 'redis', port: 26_379 },
  { scheme: /^rediss?(?:\+cluster)?:/, name: 'redis', port: 6379 },
  { scheme: /^postgres(?:ql)?:/, name: 'postgresql', port: 5432 },
]

/** Address of the store; null: in this process, where a span would add nothing. */
function storeAttributes({ url }: Config['store']): Attributes | null {
  if (url.startsWith('sqlite:')) return { 'db.system.name': 'sqlite' }
  const [, table] = /^dynamodb:\/\/([^?]*)/.exec(url) ?? []
  if (table !== undefined) return { 'db.system.name': 'aws.dynamodb', 'db.namespace': table }
  const system = STORE_SYSTEMS.find(({ scheme }) => scheme.test(url))
  if (system === undefined) return null
  // The first of several hosts, after the credentials.
  const one = url.replace(/^([^/]*\/\/(?:[^@/]*@)?[^,@/]*),[^@/?]*/, '$1')
  const { hostname, port, pathname } = new URL(one)
  const database = pathname.split('/')[url.includes('+sentinel:') ? 2 : 1] ?? ''
  return {
    'db.system.name': system.name,
    'db.namespace': decodeURIComponent(database) || '0',
    'server.address': hostname,
    'server.port': Number(port) || system.port,
  }
}
