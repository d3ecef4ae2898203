import { randomBytes } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { type Collector, KIND, collector as openCollector, type SpanSeen } from '../support/collector.ts'
import { configFile, newKey, onlyRecord, send, tempDir, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream } from '../support/replicas.ts'
import { type Seen, upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
t.beforeEach(async () => void (await redis.command('FLUSHALL')))

const SDK = new URL('../../examples/tracing/otel.mjs', import.meta.url).href

/** Of every span that any of these tests saw. */
const attributes = new Set<string>()

interface Traced {
  readonly proxy: ChildProxy
  readonly seen: Seen[]
  readonly finish: (n: number) => void
  readonly arrived: (n: number) => Promise<Seen>
}

/** The real proxy as a process with the SDK of the example, which exports to `to`; null: without an SDK. */
async function traced(
  t: Test,
  to: { readonly url: string } | null,
  rest: string,
  { store = redis.url, delay = 50 } = {},
): Promise<Traced> {
  const upstream = await heldUpstream(t)
  const own = /^upstream:/m.test(rest) ? '' : `upstream: { url: "${upstream.url}" }\n`
  const file = configFile(tempDir(t), `${own}store: { url: "${store}" }\n${rest}\n`)
  const sdk = { NODE_OPTIONS: `--import ${SDK}`, OTEL_BSP_SCHEDULE_DELAY: String(delay) }
  const env = to === null ? {} : { ...sdk, OTEL_EXPORTER_OTLP_ENDPOINT: to.url }
  const proxy = await proxyProcess(file, [], env)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return { proxy, seen: upstream.seen, finish: upstream.finish, arrived: upstream.arrived }
}

interface Client {
  readonly traceId: string
  readonly spanId: string
  readonly headers: { readonly traceparent: string }
}

function client(flags = '01'): Client {
  const traceId = randomBytes(16).toString('hex')
  const spanId = randomBytes(8).toString('hex')
  return { traceId, spanId, headers: { traceparent: `00-${traceId}-${spanId}-${flags}` } }
}

function linesOf({ headers }: Seen, name: string): string[] {
  return headers.filter((_, i) => i % 2 === 1 && headers[i - 1]?.toLowerCase() === name)
}

/** A collector; the attributes of its spans are noted. */
async function collector(t: Test): Promise<Collector> {
  const told = await openCollector(t)
  t.teardown(() => {
    for (const span of told.spans) for (const name of Object.keys(span.attributes)) attributes.add(name)
  })
  return told
}

function only(spans: readonly SpanSeen[], kind: number, name: string): SpanSeen {
  const found = spans.filter((span) => span.kind === kind && span.name === name)
  if (found.length !== 1) throw new Error(`${found.length} spans ${name}: ${JSON.stringify(spans)}`)
  return found[0] as SpanSeen
}

const ROUTE = 'routes: [{ name: pay, match: { path: "/fast/:account/*" } }]'

t.test('K22 a first execution has server, store and upstream spans, and one trace', async (t) => {
  const told = await collector(t)
  const { proxy, seen } = await traced(t, told, ROUTE)
  const key = newKey()
  const path = `/fast/token-${key}/x?secret=query-secret`
  const caller = client()
  const more = { tracestate: 'vendor=1', baggage: 'tenant=7', cookie: 'sid=cookie-secret' }
  const headers = { ...caller.headers, ...more }
  t.equal((await send(proxy, key, { path, headers })).status, 201)
  const spans = await told.trace(caller.traceId, 4)
  t.equal(spans.length, 4)

  const server = only(spans, KIND.server, 'POST /fast/:account/*')
  t.equal(server.parentSpanId, caller.spanId)
  t.match(server.attributes, {
    'http.request.method': 'POST',
    'http.route': '/fast/:account/*',
    'url.scheme': 'http',
    'url.path': '/fast/REDACTED/REDACTED',
    'http.response.status_code': 201,
    'idempotency.route': 'pay',
    'idempotency.outcome': 'executed',
    'idempotency.record': /^[\w-]{12}$/,
    'idempotency.state.before': 'absent',
    'idempotency.state.after': 'completed',
  })
  t.equal(server.status, 0)
  const upstream = only(spans, KIND.client, 'POST /fast/:account/*')
  t.equal(upstream.parentSpanId, server.spanId)
  t.match(upstream.attributes, {
    'http.request.method': 'POST',
    'server.address': '127.0.0.1',
    'server.port': Number,
    'url.full': /^http:\/\/127\.0\.0\.1:\d+\/fast\/REDACTED\/REDACTED$/,
    'http.response.status_code': 201,
  })
  for (const operation of ['put', 'swap']) {
    const span = only(spans, KIND.client, operation)
    t.equal(span.parentSpanId, server.spanId)
    t.match(span.attributes, {
      'db.system.name': 'redis',
      'db.operation.name': operation,
      'db.namespace': '0',
      'server.address': '127.0.0.1',
      'server.port': Number,
    })
  }
  const got = seen[0] as Seen
  t.strictSame(linesOf(got, 'traceparent'), [`00-${caller.traceId}-${upstream.spanId}-01`])
  t.strictSame(linesOf(got, 'tracestate'), ['vendor=1'])
  t.strictSame(linesOf(got, 'baggage'), ['tenant=7'])
  t.match(await proxy.logged(({ msg }) => msg === 'request'), { traceId: caller.traceId })

  for (const secret of [key, 'alice', 'query-secret', 'cookie-secret', '"amount"'])
    t.notOk(
      told.said.some((body) => body.includes(secret)),
      `no span contains ${secret}`,
    )
})

t.test('a replay links to the trace of its execution, and so does a duplicate that waited', async (t) => {
  for (const store of [redis.url, `sqlite:${join(tempDir(t), 'store.db')}`]) {
    const told = await collector(t)
    const { proxy, finish, arrived, seen } = await traced(t, told, 'defaults: { inFlight: wait }', {
      store,
    })
    const key = newKey()
    const [first, waiter, later] = [client(), client(), client()]
    const running = send(proxy, key, { headers: first.headers })
    await arrived(1)
    const waiting = send(proxy, key, { headers: waiter.headers })
    await metricIs(proxy, 'idempotency_waiters', 1)
    finish(1)
    t.equal((await running).status, 201)
    t.ok((await waiting).replayed)
    t.ok((await send(proxy, key, { headers: later.headers })).replayed)
    t.equal(seen.length, 1)
    const execution = only(await told.trace(first.traceId, 4), KIND.server, 'POST')
    t.same(execution.links, [])
    for (const [who, outcome] of [
      [waiter, 'waited'],
      [later, 'replayed'],
    ] as const) {
      await until(() =>
        told.spans.some(({ traceId, kind }) => traceId === who.traceId && kind === KIND.server),
      )
      const spans = await told.trace(who.traceId, 2)
      const replay = only(spans, KIND.server, 'POST')
      t.match(replay.links, [{ traceId: first.traceId, spanId: execution.spanId }], outcome)
      t.equal(replay.links.length, 1)
      t.equal(replay.attributes['idempotency.outcome'], outcome)
      t.equal(replay.attributes['http.route'], undefined, 'no route, no pattern')
      t.notOk(
        spans.some(({ attributes }) => 'url.full' in attributes),
        'no upstream span',
      )
    }
    const system = store === redis.url ? 'redis' : 'sqlite'
    t.ok(told.spans.some(({ attributes }) => attributes['db.system.name'] === system))
  }
})

void t.test('without a traceparent the proxy starts a trace, and the log has its id', async (t) => {
  const told = await collector(t)
  const { proxy, seen } = await traced(t, told, ROUTE, { store: 'memory:' })
  t.equal((await send(proxy, newKey(), { path: '/fast/a/b' })).status, 201)
  const { traceId } = await proxy.logged(({ msg }) => msg === 'request')
  const spans = await told.trace(String(traceId), 2)
  t.equal(only(spans, KIND.server, 'POST /fast/:account/*').parentSpanId, '')
  t.equal(spans.length, 2, 'a store in the process has no spans')
  const upstream = only(spans, KIND.client, 'POST /fast/:account/*')
  t.strictSame(linesOf(seen[0] as Seen, 'traceparent'), [`00-${String(traceId)}-${upstream.spanId}-01`])
})

void t.test('spans show an upstream that drops the connection, refuses or is down', async (t) => {
  const told = await collector(t)
  const upstream = await upstreamStub((seen, response) => {
    if (seen.target === '/break') response.destroy()
    else response.writeHead(422).end()
  })
  const routes = 'routes: [{ name: break, match: { path: /break } }, { name: bad, match: { path: /bad } }]'
  const yaml = `upstream: { url: "${upstream.url}" }\n${routes}`
  const { proxy } = await traced(t, told, yaml, { store: 'memory:' })
  const spansOf = async (path: string): Promise<[server: SpanSeen, upstream: SpanSeen]> => {
    const caller = client()
    await send(proxy, newKey(), { path, headers: caller.headers })
    const spans = await told.trace(caller.traceId, 2)
    return [only(spans, KIND.server, `POST ${path}`), only(spans, KIND.client, `POST ${path}`)]
  }
  const ERROR = 2
  const broken = await spansOf('/break')
  const failed = { 'error.type': '502', 'idempotency.outcome': 'upstream_failed' }
  t.match(broken[0], { status: ERROR, attributes: failed })
  t.match(broken[1], { status: ERROR, attributes: { 'error.type': 'broken_off' } })
  const bad = await spansOf('/bad')
  t.match(bad[0], { status: 0, attributes: { 'http.response.status_code': 422 } })
  t.equal(bad[0].attributes['url.path'], '/bad')
  t.match(bad[1], { status: ERROR, attributes: { 'error.type': '422', 'http.response.status_code': 422 } })
  await upstream[Symbol.asyncDispose]()
  const gone = await spansOf('/bad')
  t.match(gone[1], { status: ERROR, attributes: { 'error.type': 'not_sent' } })
})

void t.test('the authorizeReplay request has its own span, with the configured path', async (t) => {
  const told = await collector(t)
  const routes =
    'routes: [{ name: pay, match: { path: /fast }, authorizeReplay: { path: "/fast/me?full=1" } }]'
  const { proxy, seen } = await traced(t, told, routes, { store: 'memory:' })
  const key = newKey()
  await send(proxy, key, { path: '/fast' })
  const caller = client()
  t.ok((await send(proxy, key, { path: '/fast', headers: caller.headers })).replayed)
  const probe = only(await told.trace(caller.traceId, 2), KIND.client, 'GET')
  t.match(probe.attributes['url.full'], /\/fast\/me$/)
  t.strictSame(linesOf(seen[1] as Seen, 'traceparent'), [`00-${caller.traceId}-${probe.spanId}-01`])
})

void t.test('spans cover a streamed response, a late one, and a client that leaves', async (t) => {
  const told = await collector(t)
  const upstream = await upstreamStub(async (seen, response) => {
    const stream = seen.target === '/stream'
    response.writeHead(200, stream ? { 'Content-Type': 'text/event-stream' } : {})
    if (stream) response.write('data: 1\n\n')
    setTimeout(() => response.end('end'), 300)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = `upstream: { url: "${upstream.url}" }
routes: [{ name: stream, match: { path: /stream } }, { name: late, match: { path: /late }, respondWithin: 50ms }, { name: slow, match: { path: /slow } }]`
  const { proxy } = await traced(t, told, yaml, { store: 'memory:' })
  const ended = async (
    path: string,
    act = (headers: Client['headers']): Promise<unknown> => send(proxy, newKey(), { path, headers }),
  ): Promise<SpanSeen[]> => {
    const caller = client()
    await act(caller.headers)
    const spans = await told.trace(caller.traceId, 2)
    return [only(spans, KIND.server, `POST ${path}`), only(spans, KIND.client, `POST ${path}`)]
  }
  const stream = await ended('/stream')
  for (const span of stream) t.match(span, { status: 0, attributes: { 'http.response.status_code': 200 } })
  const late = await ended('/late')
  t.match(late[0], { attributes: { 'error.type': '504', 'idempotency.outcome': 'upstream_slow' } })
  t.match(late[1], { status: 0, attributes: { 'http.response.status_code': 200 } })
  const slow = await ended('/slow', async (headers) => {
    const leaving = new AbortController()
    const sent = fetch(`${proxy.url}/slow`, {
      method: 'POST',
      headers: { ...headers, authorization: 'Bearer alice', 'idempotency-key': newKey() },
      body: '1',
      signal: leaving.signal,
    })
    await upstream.arrived(3)
    leaving.abort()
    await sent.catch(() => {})
  })
  t.match(slow[0], { attributes: { 'error.type': 'aborted' } })
  const whole = { status: 0, attributes: { 'http.response.status_code': 200 } }
  t.match(slow[1], whole, 'the upstream call runs to its end')
})

t.test('an unsampled trace is neither exported nor kept; pass-through has no span', async (t) => {
  const told = await collector(t)
  const { proxy, seen } = await traced(t, told, ROUTE)
  const key = newKey()
  const unsampled = client('00')
  await send(proxy, key, { path: '/fast/a/b', headers: unsampled.headers })
  const continued = new RegExp(`^00-${unsampled.traceId}-[0-9a-f]{16}-00$`)
  t.match(linesOf(seen[0] as Seen, 'traceparent')[0], continued)
  t.equal(decodeRecord((await onlyRecord(redis)).bytes).span, undefined)
  const passed = client()
  await send(proxy, null, { method: 'GET', path: '/fast/x', body: null, headers: passed.headers })
  t.strictSame(linesOf(seen[1] as Seen, 'traceparent'), [passed.headers.traceparent], 'untouched')
  const replay = client()
  t.ok((await send(proxy, key, { path: '/fast/a/b', headers: replay.headers })).replayed)
  const spans = await told.trace(replay.traceId, 2)
  t.same(only(spans, KIND.server, 'POST /fast/:account/*').links, [])
  t.notOk(told.spans.some(({ traceId }) => traceId === unsampled.traceId || traceId === passed.traceId))
})

void t.test('a shutdown exports the last spans', async (t) => {
  const told = await collector(t)
  const { proxy } = await traced(t, told, ROUTE, { delay: 3_600_000 })
  const caller = client()
  await send(proxy, newKey(), { path: '/fast/a/b', headers: caller.headers })
  t.equal(told.spans.length, 0)
  proxy.kill('SIGTERM')
  t.equal(await proxy.exited, 0)
  t.equal((await told.trace(caller.traceId, 4)).length, 4)
})

void t.test('an unreachable collector fails no request, and barely delays the shutdown', async (t) => {
  const { proxy } = await traced(t, { url: 'http://127.0.0.1:1' }, ROUTE)
  const key = newKey()
  t.equal((await send(proxy, key, { path: '/fast/a/b' })).status, 201)
  t.ok((await send(proxy, key, { path: '/fast/a/b' })).replayed)
  const before = performance.now()
  proxy.kill('SIGTERM')
  t.equal(await proxy.exited, 0)
  t.ok(performance.now() - before < 10_000)
})

void t.test('without an SDK traceparent passes unchanged; both read the same records', async (t) => {
  const told: Collector = await collector(t)
  const plain = await traced(t, null, ROUTE)
  const tracing = await traced(t, told, ROUTE)
  const path = '/fast/a/b'
  const [one, other] = [newKey(), newKey()]
  const caller = client()
  const headers = { ...caller.headers, tracestate: 'a=1', 'x-b3-traceid': 'left-alone' }
  await send(plain.proxy, one, { path, headers })
  const got = plain.seen[0] as Seen
  t.strictSame(linesOf(got, 'traceparent'), [caller.headers.traceparent])
  t.strictSame(linesOf(got, 'tracestate'), ['a=1'])
  t.equal(decodeRecord((await onlyRecord(redis)).bytes).span, undefined)

  const replay = client()
  t.ok((await send(tracing.proxy, one, { path, headers: replay.headers })).replayed)
  t.same(only(await told.trace(replay.traceId, 2), KIND.server, 'POST /fast/:account/*').links, [])
  await redis.command('FLUSHALL')
  const executing = client()
  await send(tracing.proxy, other, { path, headers: executing.headers })
  const server = only(await told.trace(executing.traceId, 4), KIND.server, 'POST /fast/:account/*')
  t.equal(decodeRecord((await onlyRecord(redis)).bytes).span, `00-${executing.traceId}-${server.spanId}-01`)
  t.ok((await send(plain.proxy, other, { path })).replayed)
})

void t.test('docs/tracing.md lists every attribute', async (t) => {
  const text = readFileSync(new URL('../../docs/tracing.md', import.meta.url), 'utf8')
  const told = [...text.matchAll(/^- `([^`]+)` \(/gm)].map(([, name]) => name)
  t.strictSame(new Set(told), attributes)
})
