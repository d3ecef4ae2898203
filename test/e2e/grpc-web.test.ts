import { gzipSync } from 'node:zlib'
import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { newKey } from '../support/e2e.ts'
import { framed } from '../support/grpc.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { type Respond, type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

interface Setting {
  readonly upstream: UpstreamStub
  /** Posts a call. */
  readonly ask: (type: string, body: Buffer | string, more?: Record<string, string>) => Promise<Answer>
}

interface Answer {
  readonly status: number
  readonly headers: Headers
  readonly body: Buffer
}

async function setting(t: Test, respond: Respond): Promise<Setting> {
  const upstream = await upstreamStub(respond)
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(`
listen: 127.0.0.1:0
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
cors: { origins: ["https://shop.example"] }
routes:
  - { name: payments, match: { grpc: shop.Payments/* }, key: required }
`)
  t.teardown(() => proxy.drain())
  return {
    upstream,
    ask: async (type, body, more = {}) => {
      const headers = { 'content-type': type, ...more }
      const response = await fetch(`${proxy.url}/shop.Payments/Create`, { method: 'POST', headers, body })
      return {
        status: response.status,
        headers: response.headers,
        body: Buffer.from(await response.arrayBuffer()),
      }
    },
  }
}

const keyed = () => ({ 'idempotency-key': newKey() })

for (const text of [false, true]) {
  const type = text ? 'application/grpc-web-text' : 'application/grpc-web+proto'
  const coded = (body: Buffer): Buffer => (text ? Buffer.from(body.toString('base64')) : body)

  void t.test(`${type}: the last frame of the body has the status`, async (t) => {
    const { upstream, ask } = await setting(t, ({ body }, response) => {
      const [message = ''] = (text ? Buffer.from(String(body), 'base64') : body)
        .subarray(5)
        .toString()
        .split(' ')
      const status = framed(`grpc-status: ${message}\r\ngrpc-message: so\r\n`, 0x80)
      const said = message === '0' ? [framed('paid'), status] : [status]
      response.writeHead(200, { 'content-type': type }).end(coded(Buffer.concat(said)))
    })
    for (const [status, executions, retried] of [
      [0, 1, null],
      [5, 1, null],
      [16, 2, null],
      [14, 1, '2'],
    ] as const) {
      const key = keyed()
      const before = upstream.seen.length
      const first = await ask(type, coded(framed(`${status} pay`)), key)
      const second = await ask(type, coded(framed(`${status} pay`)), key)
      t.equal(upstream.seen.length - before, executions, `${status}`)
      t.strictSame([second.status, second.headers.get('content-type')], [200, type])
      t.equal(second.headers.get('grpc-status'), retried, `${status}`)
      if (retried === null) t.strictSame(second.body, first.body)
    }
  })

  void t.test(`${type}: refusals are heads that a page may read`, async (t) => {
    const { upstream, ask } = await setting(t, (_seen, response) => void response.end())
    const refused = await ask(type, coded(framed('pay')), { origin: 'https://shop.example' })
    t.strictSame(
      [refused.status, refused.headers.get('grpc-status'), refused.headers.get('content-type')],
      [200, '3', type],
    )
    const exposed = refused.headers.get('access-control-expose-headers')?.toLowerCase() ?? ''
    for (const name of ['grpc-status', 'grpc-message', 'grpc-status-details-bin']) t.match(exposed, name)
    t.equal((await ask(type, coded(framed('pay')).subarray(0, 4), keyed())).headers.get('grpc-status'), '3')
    t.equal(upstream.seen.length, 0)
  })
}

void t.test('Connect: the document of an error has the code', async (t) => {
  const { upstream, ask } = await setting(t, ({ body, headers }, response) => {
    const { code } = JSON.parse(String(body)) as { code?: string }
    if (code === undefined)
      return void response
        .writeHead(200, { 'content-type': 'application/json', 'trailer-cost': '1' })
        .end('{"id":1}')
    const error = JSON.stringify({ code, message: 'so' })
    const gzips = linesOf(headers, 'accept-encoding').join().includes('gzip')
    response
      .writeHead(code === 'not_found' ? 404 : 500, {
        'content-type': 'application/json',
        ...(gzips ? { 'content-encoding': 'gzip' } : {}),
      })
      .end(gzips ? gzipSync(error) : error)
  })
  for (const coding of ['identity', 'gzip'])
    for (const [code, executions, retried] of [
      [undefined, 1, 200],
      ['not_found', 1, 404],
      ['unauthenticated', 2, 500],
      ['internal', 1, 500],
    ] as const) {
      const more = {
        ...keyed(),
        'accept-encoding': coding,
        'connect-protocol-version': '1',
        'connect-timeout-ms': '90000',
      }
      const before = upstream.seen.length
      const body = JSON.stringify({ code })
      const first = await ask('application/json', body, more)
      const second = await ask('application/json', body, more)
      t.equal(upstream.seen.length - before, executions, `${code} ${coding}`)
      t.equal(second.status, retried, `${code} ${coding}`)
      const seen = upstream.seen.at(-1)
      if (seen !== undefined) t.ok(Number(valueOf(seen, 'connect-timeout-ms')) <= 90_000)
      if (code === 'internal') t.match(JSON.parse(String(second.body)), { code: 'unknown' })
      else t.strictSame(second.body, first.body)
    }
})

void t.test('Connect: refusals are documents with details', async (t) => {
  const { upstream, ask } = await setting(t, (_seen, response) => void response.end('{}'))
  const missing = await ask('application/proto', 'pay')
  t.equal(missing.status, 400)
  const error = JSON.parse(String(missing.body)) as { details: { type: string; value: string }[] }
  t.match(error, { code: 'invalid_argument', message: /idempotency-key/ })
  t.strictSame(
    error.details.map(({ type }) => type),
    ['google.rpc.ErrorInfo', 'google.rpc.BadRequest'],
  )
  t.notOk(error.details.some(({ value }) => value.includes('=')))
  t.equal(missing.headers.get('idempotency-retry'), 'new-key')
  t.equal(upstream.seen.length, 0)
})

void t.test('Connect: streams are refused where a key is required', async (t) => {
  const { upstream, ask } = await setting(t, (_seen, response) => void response.end())
  t.equal((await ask('application/connect+proto', framed('pay'), keyed())).status, 501)
  t.equal(upstream.seen.length, 0)
})
