import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { connect } from 'node:http2'
import { gzipSync } from 'node:zlib'
import protobuf from 'protobufjs'
import t, { type Test } from 'tap'
import type { RpcCode } from '../../src/core/rpc/codes.ts'
import { newKey, until } from '../support/e2e.ts'
import {
  type Caller,
  callerOf,
  detailsOf,
  echoed,
  framed,
  rpcServer,
  rpcStub,
  type Told,
} from '../support/grpc.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { type Seen, type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

interface Setting {
  readonly proxy: TestProxy
  readonly upstream: UpstreamStub
  readonly call: Caller
}

/** A proxy with one route of gRPC. `route`: its further properties. */
async function setting(
  t: Test,
  answer: (seen: Seen, n: number) => Told | null | Promise<Told | null>,
  route = '',
  more = '',
): Promise<Setting> {
  const upstream = await rpcStub(answer)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
${more.includes('store:') ? '' : 'store: { url: "memory:" }'}
${more.includes('upstream:') ? more : `upstream: { url: "${upstream.url}" }\n${more}`}
routes:
  - name: payments
    match: { grpc: shop.Payments/* }
    key: required
    ${route}
`)
  t.teardown(() => proxy.drain())
  const call = callerOf(proxy.port)
  t.teardown(() => call[Symbol.dispose]())
  return { proxy, upstream, call }
}

void t.test('a retry of a call gets the first answer, trailers and all', async (t) => {
  const { upstream, call } = await setting(t, (_seen, n) => ({
    message: `paid ${n}`,
    metadata: { 'x-first': String(n) },
    trailers: { 'x-cost': String(n), 'grpc-message': 'fine' },
  }))
  for (const name of ['idempotency-key', 'x-idempotency-key']) {
    const metadata = { [name]: newKey() }
    const [first, second] = [await call({ metadata }), await call({ metadata })]
    t.equal(first.code, 'OK')
    t.equal(second.metadata['idempotent-replayed'], 'true')
    const { 'idempotent-replayed': _, ...replayed } = second.metadata
    t.strictSame(replayed, first.metadata)
    t.strictSame([second.code, second.details, second.message], [first.code, first.details, first.message])
    t.strictSame(second.trailers.getMap(), first.trailers.getMap())
  }
  t.equal(upstream.seen.length, 2)
})

const OK = (): Told => ({ message: 'paid' })

void t.test('a refusal is a status with details, in one block of headers', async (t) => {
  const { upstream, call, proxy } = await setting(t, OK)
  const missing = await call({})
  t.equal(missing.code, 'INVALID_ARGUMENT')
  t.match(detailsOf(missing), {
    code: 3,
    message: missing.details,
    ErrorInfo: {
      reason: 'IDEMPOTENCY_KEY_MISSING',
      domain: 'idempotency-proxy',
      metadata: { retry: 'new-key' },
    },
    BadRequest: { fieldViolations: [{ field: 'idempotency-key', description: missing.details }] },
  })
  // The head is the end.
  t.strictSame(missing.metadata, {})
  t.equal(missing.trailers.get('idempotency-retry')[0], 'new-key')

  const key = newKey()
  await call({ key })
  const misused = await call({ key, message: 'pay more' })
  t.equal(misused.code, 'INVALID_ARGUMENT')
  t.match(detailsOf(misused), { ErrorInfo: { reason: 'IDEMPOTENCY_KEY_REUSED' }, BadRequest: {} })
  t.equal((await call({ metadata: { 'idempotency-key': ' ' } })).code, 'INVALID_ARGUMENT')
  t.equal((await call({ key: 'a', metadata: { 'x-idempotency-key': 'b' } })).code, 'INVALID_ARGUMENT')
  t.equal(upstream.seen.length, 1)
  t.equal(await proxy.metric('idempotency_requests_total{route="payments",outcome="misuse"}'), 1)
})

void t.test('while the first call runs, a retry is told when to come again', async (t) => {
  const first = Promise.withResolvers<void>()
  const { upstream, call } = await setting(t, () => first.promise.then(OK))
  const key = newKey()
  const running = call({ key })
  await upstream.arrived(1)
  const early = await call({ key })
  t.equal(early.code, 'ABORTED')
  const wait = Number(early.trailers.get('retry-after-ms')[0])
  t.ok(wait >= 1000)
  t.equal(early.trailers.get('grpc-retry-pushback-ms')[0], String(wait))
  t.match(detailsOf(early), {
    ErrorInfo: { reason: 'IDEMPOTENCY_KEY_IN_PROGRESS', metadata: { retry: 'same-key' } },
    RetryInfo: { retryDelay: { seconds: wait / 1000 } },
  })
  first.resolve()
  t.equal((await running).code, 'OK')
  t.equal((await call({ key })).metadata['idempotent-replayed'], 'true')
  t.equal(upstream.seen.length, 1)
})

void t.test('a retry that waits gets the first answer', async (t) => {
  const first = Promise.withResolvers<void>()
  const { upstream, call, proxy } = await setting(t, () => first.promise.then(OK), 'inFlight: wait')
  const key = newKey()
  const running = call({ key })
  await upstream.arrived(1)
  const waiting = call({ key })
  await until(async () => (await proxy.metric('idempotency_waiters')) === 1)
  first.resolve()
  for (const one of [await running, await waiting]) t.equal(String(one.message), 'paid')
  t.equal(upstream.seen.length, 1)
})

void t.test('the status in the trailers decides', async (t) => {
  const codes = {
    replayed: ['INVALID_ARGUMENT', 'NOT_FOUND', 'ALREADY_EXISTS', 'PERMISSION_DENIED', 'FAILED_PRECONDITION'],
    again: ['UNAUTHENTICATED', 'RESOURCE_EXHAUSTED'],
    unknown: ['CANCELLED', 'UNKNOWN', 'DEADLINE_EXCEEDED', 'INTERNAL', 'UNAVAILABLE', 'DATA_LOSS'],
  } as const
  const { upstream, call } = await setting(t, (seen) => {
    const [code, place] = String(seen.body.subarray(5)).split(' ') as [RpcCode, string]
    return place === 'trailers' ? { code, message: null, trailers: { 'grpc-message': 'no' } } : { code }
  })
  for (const place of ['trailers', 'head'])
    for (const [meaning, all] of Object.entries(codes))
      for (const code of all) {
        const key = newKey()
        const before = upstream.seen.length
        const message = `${code} ${place}`
        t.equal((await call({ key, message })).code, code)
        const retried = await call({ key, message })
        const about = `${code} in the ${place}`
        t.equal(upstream.seen.length - before, meaning === 'again' ? 2 : 1, about)
        const replayed = [retried.metadata, retried.trailers.getMap()].some(
          (lines) => lines['idempotent-replayed'] === 'true',
        )
        t.equal(replayed, meaning === 'replayed', about)
        t.equal(retried.code, meaning === 'unknown' ? 'UNKNOWN' : code, about)
        const { ErrorInfo: info } = detailsOf(retried) as { ErrorInfo?: { reason: string } }
        t.equal(info?.reason, meaning === 'unknown' ? 'IDEMPOTENCY_OUTCOME_UNKNOWN' : undefined, about)
      }
})

void t.test('an upstream that breaks off leaves the outcome unknown', async (t) => {
  const { upstream, call } = await setting(t, () => null)
  const key = newKey()
  const first = await call({ key })
  t.match(
    [first.code, detailsOf(first)],
    [
      'UNKNOWN',
      { ErrorInfo: { reason: 'UPSTREAM_FAILED', metadata: { retry: 'same-key', record: /^.{43}$/ } } },
    ],
  )
  const retried = await call({ key })
  t.match(
    [retried.code, detailsOf(retried)],
    ['UNKNOWN', { ErrorInfo: { reason: 'IDEMPOTENCY_OUTCOME_UNKNOWN' } }],
  )
  t.equal(upstream.seen.length, 1)
})

void t.test('an answer without a status leaves the outcome unknown', async (t) => {
  const upstream = await upstreamStub((_seen, response) => {
    response.writeHead(200, { 'content-type': 'application/grpc' }).end(framed('paid'))
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const { call } = await setting(t, OK, '', `upstream: { url: "${upstream.url}" }`)
  const key = newKey()
  await call({ key })
  const retried = await call({ key })
  t.match(
    [retried.code, detailsOf(retried)],
    ['UNKNOWN', { ErrorInfo: { reason: 'IDEMPOTENCY_OUTCOME_UNKNOWN' } }],
  )
  t.equal(upstream.seen.length, 1)
})

void t.test('nothing was sent: the call is free to be made again', async (t) => {
  const { upstream, call } = await setting(t, OK, '', 'upstream: { url: "http://127.0.0.1:1" }')
  const key = newKey()
  for (let n = 0; n < 2; n++) {
    const refused = await call({ key })
    t.match(
      [refused.code, detailsOf(refused)],
      ['UNAVAILABLE', { ErrorInfo: { reason: 'UPSTREAM_UNREACHABLE' } }],
    )
  }
  t.equal(upstream.seen.length, 0)
})

void t.test('a handler says in a trailer what it did', async (t) => {
  const { upstream, call } = await setting(t, () => ({
    code: 'INTERNAL',
    message: '',
    trailers: { 'idempotency-outcome': 'not-applied' },
  }))
  const key = newKey()
  for (let n = 1; n <= 2; n++) {
    const { code, trailers } = await call({ key })
    t.strictSame([code, trailers.get('idempotency-outcome')], ['INTERNAL', []])
    t.equal(upstream.seen.length, n)
  }
})

void t.test(
  'a trailer that says what was done counts before the code, in answers that go out live, too',
  async (t) => {
    const { upstream, call } = await setting(
      t,
      (_seen, n) => ({
        code: 'RESOURCE_EXHAUSTED',
        message: 'x'.repeat(n === 1 ? 2000 : 10),
        metadata: n === 1 ? {} : { 'idempotency-outcome': 'not-applied' },
        trailers: { 'idempotency-outcome': 'applied' },
      }),
      'limits: { response: 1KiB }',
    )
    for (let n = 1; n <= 2; n++) {
      const key = newKey()
      for (let attempt = 0; attempt < 2; attempt++) await call({ key })
      t.equal(upstream.seen.length, n)
    }
  },
)

void t.test('an answer that is head alone has its code, even if all go out live', async (t) => {
  const { call } = await setting(t, () => ({ code: 'NOT_FOUND' }), 'stream: always')
  const key = newKey()
  await call({ key })
  t.match(detailsOf(await call({ key })), { ErrorInfo: { reason: 'IDEMPOTENCY_RESPONSE_UNAVAILABLE' } })
})

void t.test('a client that cancels changes nothing', async (t) => {
  const first = Promise.withResolvers<void>()
  const { upstream, call, proxy } = await setting(t, () => first.promise.then(OK))
  const key = newKey()
  let cancel = (): void => {}
  const running = call({ key, began: (given) => (cancel = given) })
  await upstream.arrived(1)
  cancel()
  t.equal((await running).code, 'CANCELLED')
  first.resolve()
  await until(
    async () => (await proxy.metric('idempotency_completions_total{route="payments",result="stored"}')) === 1,
  )
  t.equal(String((await call({ key })).message), 'paid')
  t.equal(upstream.seen.length, 1)
})

void t.test('a deadline ends the wait of its client, not the call', async (t) => {
  const first = Promise.withResolvers<void>()
  const { upstream, call, proxy } = await setting(t, () => first.promise.then(OK), 'inFlight: wait')
  const key = newKey()
  const deadline = (): Date => new Date(Date.now() + 300)
  const executing = call({ key, deadline: deadline() })
  const timeout = valueOf(await upstream.arrived(1), 'grpc-timeout')
  t.match(timeout, /^\d+m$/)
  t.ok(Number.parseInt(timeout, 10) <= 300)
  const waiting = call({ key, deadline: deadline() })
  t.equal((await executing).code, 'DEADLINE_EXCEEDED')
  // The client's own, unless the refusal of the proxy, by the same deadline, comes first.
  t.match((await waiting).code, /^(DEADLINE_EXCEEDED|ABORTED)$/)
  await until(async () => (await proxy.metric('idempotency_waiters')) === 0)
  await until(
    async () =>
      (await proxy.metric('idempotency_requests_total{route="payments",outcome="upstream_slow"}')) === 1,
  )
  first.resolve()
  t.equal(String((await call({ key })).message), 'paid')
  t.equal(upstream.seen.length, 1)
})

void t.test('compressed messages are compared by what they hold, and replayed as they came', async (t) => {
  const { upstream, call, proxy } = await setting(t, () => ({
    message: gzipSync('paid'),
    flag: 1,
    metadata: { 'grpc-encoding': 'gzip' },
  }))
  const gzip = callerOf(proxy.port, { 'grpc.default_compression_algorithm': 2 })
  t.teardown(() => gzip[Symbol.dispose]())
  const key = newKey()
  const message = 'pay '.repeat(100)
  for (const one of [call, gzip, call]) {
    const { code, message: answer } = await one({ key, message })
    t.strictSame([code, String(answer)], ['OK', 'paid'])
  }
  t.equal(upstream.seen.length, 1)
  const other = newKey()
  await gzip({ key: other, message })
  t.equal(upstream.seen[1]?.body[0], 1)
  t.equal((await gzip({ key: other, message: 'pay another' })).code, 'INVALID_ARGUMENT')
  t.equal(upstream.seen.length, 2)
})

void t.test('messages of 4 MiB', async (t) => {
  const large = randomBytes(4 * 1024 ** 2 - 100)
  const limits = 'limits: { request: 4MiB, response: 4MiB }'
  const { upstream, call } = await setting(t, ({ body }) => ({ message: body.subarray(5) }), '', limits)
  const key = newKey()
  for (let n = 0; n < 2; n++) t.ok((await call({ key, message: large })).message?.equals(large))
  t.equal(upstream.seen.length, 1)
  const over = await call({ key: newKey(), message: randomBytes(4 * 1024 ** 2) })
  t.match(
    [over.code, detailsOf(over)],
    ['RESOURCE_EXHAUSTED', { ErrorInfo: { reason: 'REQUEST_TOO_LARGE' } }],
  )
  t.equal(upstream.seen.length, 1)
})

void t.test("the library's own retries and hedges execute once", async (t) => {
  const first = Promise.withResolvers<void>()
  const { upstream, call, proxy } = await setting(
    t,
    (_seen, n) => (n === 1 ? { code: 'RESOURCE_EXHAUSTED' } : first.promise.then(OK)),
    'inFlight: wait',
  )
  const policy = (more: object): string =>
    JSON.stringify({ methodConfig: [{ name: [{ service: 'shop.Payments' }], ...more }] })
  const backoff = { initialBackoff: '0.01s', maxBackoff: '0.1s', backoffMultiplier: 1 }
  const retrying = callerOf(proxy.port, {
    'grpc.service_config': policy({
      retryPolicy: { maxAttempts: 3, ...backoff, retryableStatusCodes: ['RESOURCE_EXHAUSTED'] },
    }),
  })
  t.teardown(() => retrying[Symbol.dispose]())
  const running = retrying({ key: newKey() })
  await upstream.arrived(2)
  first.resolve()
  t.equal((await running).code, 'OK')
  t.equal(upstream.seen.length, 2)

  const hedging = callerOf(proxy.port, {
    'grpc.service_config': policy({
      hedgingPolicy: { maxAttempts: 3, hedgingDelay: '0s', nonFatalStatusCodes: ['ABORTED'] },
    }),
  })
  t.teardown(() => hedging[Symbol.dispose]())
  const key = newKey()
  t.equal(String((await hedging({ key })).message), 'paid')
  t.equal(String((await call({ key })).message), 'paid')
  t.equal(upstream.seen.length, 3)
})

void t.test('what has several messages is a stream, and refused where a key is required', async (t) => {
  const several = Buffer.concat([framed('one'), framed('two')])
  const answer = Promise.withResolvers<void>()
  const upstream = await upstreamStub(async (_seen, response) => {
    response.writeHead(200, { 'content-type': 'application/grpc', trailer: 'grpc-status' })
    response.write(several)
    await answer.promise
    response.addTrailers({ 'grpc-status': '0' })
    response.end(framed('three'))
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const { proxy, call } = await setting(t, OK, '', `upstream: { url: "${upstream.url}" }`)
  const session = connect(proxy.url)
  t.teardown(() => session.destroy())
  const key = newKey()
  const ask = (body: Buffer) => {
    const stream = session.request({
      ':method': 'POST',
      ':path': '/shop.Payments/Watch',
      'content-type': 'application/grpc',
      'idempotency-key': key,
      te: 'trailers',
    })
    stream.end(body)
    return stream
  }
  const answered = ask(framed('watch'))
  const head = once(answered, 'response')
  t.strictSame((await once(answered, 'data'))[0], several)
  t.match((await head)[0], { ':status': 200 })
  answer.resolve()
  t.match((await once(answered, 'trailers'))[0], { 'grpc-status': '0' })
  await until(
    async () =>
      (await proxy.metric('idempotency_completions_total{route="payments",result="too_large"}')) === 1,
  )
  const retried = await call({ key, message: 'watch', method: '/shop.Payments/Watch' })
  t.match(
    [retried.code, detailsOf(retried)],
    [
      'ALREADY_EXISTS',
      { ErrorInfo: { reason: 'IDEMPOTENCY_RESPONSE_UNAVAILABLE', metadata: { originalStatus: '200' } } },
    ],
  )
  for (const [body, status] of [
    [several, '12'],
    [framed('cut').subarray(0, 7), '3'],
    [Buffer.alloc(0), '3'],
  ] as const)
    t.match((await once(ask(body), 'response'))[0], { ':status': 200, 'grpc-status': status })
  t.equal(upstream.seen.length, 1)
})

const SHOP = protobuf.loadSync('examples/grpc/payments.proto')

/** A message of that type, and its bytes. */
function encoded(type: string, value: object): Buffer {
  const found = SHOP.lookupType(`shop.v1.${type}`)
  return Buffer.from(found.encode(found.fromObject(value)).finish())
}

void t.test('the key and the label are fields of the message, where descriptors are given', async (t) => {
  const upstream = await rpcStub(OK)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
grpc: { descriptors: examples/grpc/payments.binpb }
routes:
  - name: payments
    match: { grpc: shop.v1.Payments/* }
    key: { presence: required, from: ["json:/requestId"] }
    record: { label: /order/id }
`)
  t.teardown(() => proxy.drain())
  const call = callerOf(proxy.port, { 'grpc.default_compression_algorithm': 2 })
  t.teardown(() => call[Symbol.dispose]())
  const create = (value: object) =>
    call({ method: '/shop.v1.Payments/Create', message: encoded('CreateRequest', value) })
  const requestId = newKey()
  const order = { id: 'order-7' }
  for (const replayed of [undefined, 'true']) {
    const { code, metadata } = await create({ requestId, amount: 5, order })
    t.strictSame([code, metadata['idempotent-replayed']], ['OK', replayed])
  }
  t.equal((await create({ requestId, amount: 6, order })).code, 'INVALID_ARGUMENT')
  t.match(detailsOf(await create({ amount: 5 })), { ErrorInfo: { reason: 'IDEMPOTENCY_KEY_MISSING' } })
  t.match(detailsOf(await call({ method: '/shop.v1.Payments/Create', message: Buffer.from([0xff]) })), {
    ErrorInfo: { reason: 'REQUEST_MALFORMED' },
  })
  await proxy.logged((line) => line.label === 'order-7')
  // A method that streams is known by its name.
  const watched = await call({
    method: '/shop.v1.Payments/Watch',
    message: encoded('GetRequest', { id: 'a' }),
  })
  t.equal(watched.code, 'UNIMPLEMENTED')
  t.equal(upstream.seen.length, 1)
})

void t.test('a server of gRPC that does not know the path of authorizeReplay permits nothing', async (t) => {
  const { upstream, call } = await setting(
    t,
    ({ method }, n) =>
      method === 'GET' ? { code: 'UNIMPLEMENTED', ...(n > 2 ? { message: '' } : {}) } : OK(),
    'authorizeReplay: { path: /may, cache: 0s }',
  )
  const key = newKey()
  t.equal((await call({ key })).code, 'OK')
  for (const place of ['head', 'trailers']) {
    const { code, message } = await call({ key })
    t.strictSame([code, message], ['PERMISSION_DENIED', null], place)
  }
  t.equal(upstream.seen.length, 3)
})

void t.test('a message whose key nobody here can read does not pass for one without', async (t) => {
  const upstream = await rpcStub(OK)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
grpc: { descriptors: examples/grpc/payments.binpb }
limits: { request: 1KiB }
routes:
  - name: payments
    match: { grpc: shop.v1.Payments/* }
    key: { presence: optional, from: ["json:/requestId"] }
`)
  t.teardown(() => proxy.drain())
  const session = connect(proxy.url)
  t.teardown(() => session.destroy())
  const message = encoded('CreateRequest', { requestId: newKey() })
  for (const [coding, bytes] of [
    ['snappy', message],
    ['gzip', gzipSync(Buffer.concat([message, Buffer.alloc(100_000)]))],
    ['identity', message],
  ] as const) {
    const stream = session.request({
      ':method': 'POST',
      ':path': '/shop.v1.Payments/Create',
      'content-type': 'application/grpc',
      'grpc-encoding': coding,
    })
    stream.end(framed(bytes, 1))
    t.match((await once(stream, 'response'))[0], { 'grpc-status': '3' }, coding)
  }
  for (const type of ['application/json', 'application/proto']) {
    const stream = session.request({
      ':method': 'POST',
      ':path': '/shop.v1.Payments/Create',
      'content-type': type,
      'content-encoding': 'snappy',
    })
    stream.end('{"requestId":"a"}')
    t.match((await once(stream, 'response'))[0], { ':status': 400 }, type)
  }
  t.equal(upstream.seen.length, 0)
})

void t.test('over HTTP/2 on both sides', async (t) => {
  const seen: string[] = []
  const server = await rpcServer((message, call) => {
    seen.push(String(message))
    // The upstream hears of the deadline.
    return call.getDeadline() === Number.POSITIVE_INFINITY
      ? { code: 'NOT_FOUND', trailers: { 'x-why': 'no such card' } }
      : { message: 'paid', metadata: { 'x-shop': 'a' }, trailers: { 'x-cost': '1' } }
  })
  t.teardown(() => server[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${server.url}", http2: true }
store: { url: "memory:" }
routes:
  - { name: echo, match: { grpc: shop.Payments/Echo }, key: ignored }
  - { name: payments, match: { grpc: shop.Payments/* }, key: required }
`)
  t.teardown(() => proxy.drain())
  const call = callerOf(proxy.port)
  t.teardown(() => call[Symbol.dispose]())
  const deadline = Date.now() + 3_600_000
  const key = newKey()
  const [first, second] = [await call({ key, deadline }), await call({ key, deadline })]
  t.match(first, { code: 'OK', message: Buffer.from('paid'), metadata: { 'x-shop': 'a' } })
  const { 'idempotent-replayed': replayed, ...metadata } = second.metadata
  t.strictSame([metadata, replayed], [first.metadata, 'true'])
  t.strictSame(second.trailers.getMap(), first.trailers.getMap())
  t.equal(String(second.message), 'paid')
  const other = newKey()
  for (let n = 0; n < 2; n++) {
    const { code, trailers } = await call({ key: other })
    t.strictSame([code, trailers.get('x-why')], ['NOT_FOUND', ['no such card']])
  }
  t.strictSame(seen, ['pay', 'pay'])
  t.strictSame(await echoed(proxy.port, ['one', 'two', 'three']), ['one', 'two', 'three', 'OK'])
})

void t.test('a proxy behind this one decides, in gRPC too', async (t) => {
  const first = Promise.withResolvers<void>()
  const inner = await setting(t, async (seen) => {
    if (String(seen.body).endsWith('break')) return null
    await first.promise
    return OK()
  })
  const outer = await setting(
    t,
    OK,
    '',
    `upstream: { url: "${inner.proxy.url}", http2: true }\nservice: outer`,
  )
  const key = newKey()
  const running = inner.call({ key })
  await inner.upstream.arrived(1)
  t.equal((await outer.call({ key })).code, 'ABORTED')
  first.resolve()
  t.equal((await running).code, 'OK')
  // The refusal was not stored.
  t.equal(String((await outer.call({ key })).message), 'paid')
  const broken = newKey()
  for (const reason of ['UPSTREAM_FAILED', 'IDEMPOTENCY_OUTCOME_UNKNOWN']) {
    const told = await outer.call({ key: broken, message: 'break' })
    t.match([told.code, detailsOf(told)], ['UNKNOWN', { ErrorInfo: { reason } }])
  }
  t.equal(inner.upstream.seen.length, 2)
})

void t.test('shadow mode compares calls by their messages and statuses', async (t) => {
  const { call, proxy } = await setting(
    t,
    ({ body }, n) =>
      String(body).endsWith('same') ? OK() : { code: n % 2 === 0 ? 'OK' : 'NOT_FOUND', message: '' },
    'mode: shadow',
  )
  for (const [message, verdict] of [
    ['same', 'replay_same'],
    ['other', 'replay_differs'],
  ] as const) {
    const key = newKey()
    for (let n = 0; n < 2; n++) await call({ key, message })
    await until(
      async () =>
        (await proxy.metric(`idempotency_shadow_total{route="payments",verdict="${verdict}"}`)) === 1,
    )
  }
})

void t.test('a stream that ends with a code of calls that were not executed was executed', async (t) => {
  const upstream = await upstreamStub((_seen, response) => {
    response.writeHead(200, { 'content-type': 'application/grpc', trailer: 'grpc-status' })
    response.write(Buffer.concat([framed('one'), framed('two')]))
    response.addTrailers({ 'grpc-status': '8' })
    response.end()
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const { call } = await setting(t, OK, '', `upstream: { url: "${upstream.url}" }`)
  const key = newKey()
  for (const reason of [undefined, 'IDEMPOTENCY_OUTCOME_UNKNOWN']) {
    const { ErrorInfo: info } = detailsOf(await call({ key })) as { ErrorInfo?: { reason: string } }
    t.equal(info?.reason, reason)
  }
  t.equal(upstream.seen.length, 1)
})

void t.test('an answer over limits.response goes out live, and its status still decides', async (t) => {
  const { call, upstream } = await setting(
    t,
    ({ body }) => ({ message: 'x'.repeat(2000), code: String(body).endsWith('ok') ? 'OK' : 'UNAVAILABLE' }),
    'limits: { response: 1KiB }',
  )
  for (const [message, code, reason] of [
    ['ok', 'ALREADY_EXISTS', 'IDEMPOTENCY_RESPONSE_UNAVAILABLE'],
    ['no', 'UNKNOWN', 'IDEMPOTENCY_OUTCOME_UNKNOWN'],
  ] as const) {
    const key = newKey()
    await call({ key, message })
    const retried = await call({ key, message })
    t.match([retried.code, detailsOf(retried)], [code, { ErrorInfo: { reason } }])
  }
  t.equal(upstream.seen.length, 2)
})

void t.test('a call whose deadline has passed is not sent', async (t) => {
  const { proxy, upstream } = await setting(t, OK)
  const session = connect(proxy.url)
  t.teardown(() => session.destroy())
  const stream = session.request({
    ':method': 'POST',
    ':path': '/shop.Payments/Create',
    'content-type': 'application/grpc',
    'idempotency-key': newKey(),
    'grpc-timeout': '1n',
  })
  stream.end(framed('pay'))
  t.match((await once(stream, 'response'))[0], { 'grpc-status': /^(4|14)$/ })
  await until(
    async () =>
      (await proxy.metric('idempotency_completions_total{route="payments",result="released"}')) === 1,
  )
  t.equal(upstream.seen.length, 0)
})

void t.test(
  'several messages pass where no key is required; a compression without a name is compared as sent',
  async (t) => {
    const upstream = await rpcStub(OK)
    t.teardown(() => upstream[Symbol.asyncDispose]())
    const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
grpc: { descriptors: examples/grpc/payments.binpb }
routes: [{ name: payments, match: { grpc: shop.v1.Payments/* }, record: { label: /order/id } }]
`)
    t.teardown(() => proxy.drain())
    const session = connect(proxy.url)
    t.teardown(() => session.destroy())
    const ask = async (body: Buffer, key = 'key-1', method = 'Create') => {
      const stream = session.request({
        ':method': 'POST',
        ':path': `/shop.v1.Payments/${method}`,
        'content-type': 'application/grpc',
        'idempotency-key': key,
      })
      stream.end(body).resume()
      return (await once(stream, 'response'))[0]['idempotent-replayed']
    }
    const [nameless, several] = [framed('pay', 1), Buffer.concat([framed('pay'), framed('more')])]
    t.same([await ask(nameless), await ask(nameless)], [undefined, 'true'])
    t.same([await ask(several), await ask(several)], [undefined, undefined])
    // No descriptor says where its label is.
    const unknown = () => ask(framed('pay'), 'key-2', 'Unknown')
    t.same([await unknown(), await unknown()], [undefined, 'true'])
    t.equal(upstream.seen.length, 4)
  },
)

void t.test('a compression that nobody here knows is compared as sent', async (t) => {
  for (const [key, executions, status] of [
    ['required', 1, undefined],
    ['{ presence: optional, from: ["header:idempotency-key", "json:/id"] }', 1, undefined],
  ] as const) {
    const upstream = await rpcStub(OK)
    t.teardown(() => upstream[Symbol.asyncDispose]())
    const proxy = await proxyInProcess(`
listen: { address: "127.0.0.1:0", http2: true }
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
unmatched: reject
grpc: { descriptors: examples/grpc/payments.binpb }
routes:
  - { name: payments, match: { grpc: shop.v1.Payments/* }, key: ${key} }
`)
    t.teardown(() => proxy.drain())
    const session = connect(proxy.url)
    t.teardown(() => session.destroy())
    const ask = async (path: string, message: string) => {
      const stream = session.request({
        ':method': 'POST',
        ':path': path,
        'content-type': 'application/grpc',
        'grpc-encoding': 'snappy',
        'idempotency-key': 'key-1',
      })
      stream.end(framed(message, 1)).resume()
      return (await once(stream, 'response'))[0]['grpc-status']
    }
    for (let n = 0; n < 2; n++) t.equal(await ask('/shop.v1.Payments/Create', 'pay'), status)
    t.equal(await ask('/shop.v1.Payments/Create', 'pay more'), '3')
    t.equal(upstream.seen.length, executions)
    // No route matches.
    t.equal(await ask('/shop.v1.Refunds/Create', 'refund'), '12')
  }
})

void t.test('without the store, a call is refused or goes unprotected, as the route says', async (t) => {
  for (const [policy, code] of [
    ['reject', 'UNAVAILABLE'],
    ['bypass', 'OK'],
  ] as const) {
    const { call, upstream } = await setting(
      t,
      OK,
      `onStoreUnavailable: ${policy}`,
      'service: payments\nstore: { url: "redis://127.0.0.1:1" }\ndrain: { timeout: 0s }',
    )
    const told = await call({ key: newKey() })
    t.equal(told.code, code)
    t.equal(upstream.seen.length, code === 'OK' ? 1 : 0)
    if (code === 'UNAVAILABLE')
      t.match(detailsOf(told), {
        ErrorInfo: { reason: 'IDEMPOTENCY_STORE_UNAVAILABLE', metadata: { retry: 'same-key' } },
        RetryInfo: { retryDelay: { seconds: 1 } },
      })
  }
})
