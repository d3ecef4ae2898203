import { spawnSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { exportSPKI, generateKeyPair, SignJWT } from 'jose'
import t, { type Test } from 'tap'
import { firstOf } from '../../src/core/headers.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { refusalOf } from '../support/replicas.ts'
import { type Respond, type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

/** The recipes of docs/guides/recipes.md: the CLI checks each file, and serves it in front of a real upstream. */
const STRIPE = 'examples/recipes/stripe-like.yaml'
const PAYPAL = 'examples/recipes/paypal-like.yaml'
const WEBHOOKS = 'config/webhooks.yaml'
/** Served in test/e2e/edges.test.ts. */
const GRAPHQL = 'examples/recipes/graphql.yaml'
const RPC = 'examples/recipes/json-rpc.yaml'

async function upstream(t: Test, respond: Respond): Promise<UpstreamStub> {
  const stub = await upstreamStub(respond)
  t.teardown(() => stub[Symbol.asyncDispose]())
  return stub
}

async function serve(
  t: Test,
  file: string,
  api: UpstreamStub,
  env: Record<string, string> = {},
): Promise<ChildProxy> {
  const proxy = await proxyProcess(file, [], {
    LISTEN: '127.0.0.1:0',
    ADMIN_LISTEN: '127.0.0.1:0',
    UPSTREAM: api.url,
    STORE: `sqlite:${tempDir(t)}/store.db`,
    ...env,
  })
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

void t.test('check accepts each recipe', async (t) => {
  const { publicKey } = await generateKeyPair('ES256')
  const key = join(tempDir(t), 'key.pem')
  writeFileSync(key, await exportSPKI(publicKey))
  for (const file of [
    STRIPE,
    PAYPAL,
    WEBHOOKS,
    GRAPHQL,
    RPC,
    'config/payments.yaml',
    'config/minimal.yaml',
  ]) {
    const { status, stdout, stderr } = spawnSync(process.execPath, ['src/cli.ts', 'check', file], {
      encoding: 'utf8',
      env: { ...process.env, NODE_V8_COVERAGE: '', TOKEN_KEY_FILE: key },
    })
    t.equal(status, 0, `${file}: ${stdout}${stderr}`)
  }
})

void t.test('Stripe-like: a 500 is kept, another payload gets 400, accounts share no keys', async (t) => {
  const api = await upstream(t, ({ target, headers }, response) => {
    const account = firstOf(headers, 'stripe-account')
    const status = target === '/v1/broken' ? 500 : 200
    response
      .writeHead(status, { 'Content-Type': 'application/json' })
      .end(JSON.stringify({ target, account }))
  })
  const proxy = await serve(t, STRIPE, api)
  const form = { 'content-type': 'application/x-www-form-urlencoded', authorization: 'Bearer sk_test_1' }
  const ask = (key: string | null, path: string, body: string, more: Record<string, string> = {}) =>
    send(proxy, key, { path, body, headers: { ...form, ...more } })

  const key = newKey()
  t.match(await ask(key, '/v1/charges', 'amount=1&note=a+b'), { status: 200, replayed: false })
  t.match(await ask(key, '/v1/charges', 'amount=1&note=a%20b'), { status: 200, replayed: true })
  const reused = await ask(key, '/v1/charges', 'amount=2&note=a+b')
  t.strictSame(refusalOf(reused), [400, 'idempotency_key_reused'])
  t.match(JSON.parse(reused.body), { error: { type: String, message: String } })
  t.equal(api.seen.length, 1)

  t.match(await ask(key, '/v1/charges', 'amount=1&note=a+b', { 'stripe-account': 'acct_1' }), {
    replayed: false,
  })
  t.match(await ask(key, '/v1/charges', 'amount=1&note=a+b', { authorization: 'Bearer sk_test_2' }), {
    replayed: false,
  })
  t.equal(api.seen.length, 3)

  const broken = newKey()
  t.match(await ask(broken, '/v1/broken', 'a=1'), { status: 500, replayed: false })
  t.match(await ask(broken, '/v1/broken', 'a=1'), { status: 500, replayed: true })
  t.equal(api.seen.length, 4)

  for (let n = 0; n < 2; n++)
    t.match(await ask(null, '/v1/charges', 'amount=1'), { status: 200, replayed: false })
  t.equal(api.seen.length, 6, 'without a key nothing is protected')
})

void t.test('PayPal-like: a renewed token of its subject replays, a forged one reads nothing', async (t) => {
  const api = await upstream(
    t,
    (_, response) => void response.writeHead(201).end(`capture ${api.seen.length}`),
  )
  const { publicKey, privateKey } = await generateKeyPair('ES256')
  const forger = await generateKeyPair('ES256')
  const file = join(tempDir(t), 'key.pem')
  writeFileSync(file, await exportSPKI(publicKey))
  const proxy = await serve(t, PAYPAL, api, { TOKEN_KEY_FILE: file })
  let tokens = 0
  const bearer = async (sub: string, by = privateKey): Promise<string> => {
    const token = new SignJWT({ jti: String(++tokens) }).setProtectedHeader({ alg: 'ES256' }).setSubject(sub)
    return `Bearer ${await token.setAudience('payments').setExpirationTime('9h').sign(by)}`
  }
  const id = newKey()
  const capture = async (authorization: string, order = 'o1', body = '{}') =>
    send(proxy, null, {
      path: `/v2/checkout/orders/${order}/capture`,
      body,
      headers: { authorization, 'paypal-request-id': id },
    })

  t.match(await capture(await bearer('merchant-1')), { status: 201, body: 'capture 1', replayed: false })
  t.match(await capture(await bearer('merchant-1')), { status: 201, body: 'capture 1', replayed: true })
  t.strictSame(refusalOf(await capture(await bearer('merchant-1', forger.privateKey))), [
    401,
    'idempotency_caller_missing',
  ])
  t.equal(api.seen.length, 1)
  t.match(await capture(await bearer('merchant-2')), { body: 'capture 2', replayed: false })
  t.match(await capture(await bearer('merchant-1'), 'o2'), { body: 'capture 3', replayed: false })
  t.strictSame(refusalOf(await capture(await bearer('merchant-1'), 'o1', '{"note":1}')), [
    422,
    'idempotency_key_reused',
  ])
  const other = await send(proxy, newKey(), {
    path: '/v2/checkout/orders',
    headers: { authorization: await bearer('merchant-1') },
  })
  t.strictSame(refusalOf(other), [400, 'idempotency_key_missing'], 'Idempotency-Key is not its header')
  t.equal(api.seen.length, 3)
})

void t.test('webhooks: a redelivery is a replay, but executed after a failure or forgery', async (t) => {
  const answers: { status: number; until?: Promise<void> }[] = []
  const api = await upstream(t, async ({ body }, response) => {
    const { status, until } = answers.shift() ?? { status: 200 }
    await until
    response.writeHead(status).end(`done ${body.toString()}`)
  })
  // Retries of a failure do not wait for a minute here, nor slow receivers for eight seconds.
  const text = readFileSync(WEBHOOKS, 'utf8').replace('ttlFailed: 1m', 'ttlFailed: 1s')
  const file = configFile(tempDir(t), text.replace('respondWithin: 8s', 'respondWithin: 300ms'))
  const proxy = await serve(t, file, api)
  const deliver = (path: string, body: string, headers: Record<string, string> = {}) =>
    send(proxy, null, { path: `/hooks/${path}`, body, headers })

  const event = (attempt: number) => JSON.stringify({ id: 'evt_1', type: 'charge.succeeded', attempt })
  t.match(await deliver('stripe', event(1), { 'stripe-signature': 't=1,v1=a' }), {
    status: 200,
    replayed: false,
  })
  t.match(await deliver('stripe', event(2), { 'stripe-signature': 't=2,v1=b' }), {
    status: 200,
    replayed: true,
  })
  t.equal(api.seen.length, 1)

  const standard = { 'webhook-id': 'msg_2KWPBgLlAfxdpx2AI54pPJ85f4W' }
  for (const status of [400, 401, 403]) {
    answers.push({ status })
    t.match(await deliver('standard', '{"forged":true}', standard), { status, replayed: false })
  }
  t.match(await deliver('standard', '{}', standard), { status: 200, replayed: false })
  t.match(await deliver('standard', '{}', standard), { status: 200, replayed: true })

  const failed = { 'x-github-delivery': newKey() }
  answers.push({ status: 500 })
  t.match(await deliver('github', '{}', failed), { status: 500, replayed: false })
  let last = await deliver('github', '{}', failed)
  t.match(last, { status: 500, replayed: true })
  await until(async () => {
    last = await deliver('github', '{}', failed)
    return last.status === 200
  })
  t.match(last, { replayed: false })
  t.match(await deliver('github', '{}', failed), { status: 200, replayed: true })

  const { promise, resolve } = Promise.withResolvers<void>()
  answers.push({ status: 202, until: promise })
  const slow = { 'ce-id': '7', 'ce-source': '/orders' }
  const before = api.seen.length
  t.strictSame(refusalOf(await deliver('events', '{}', slow)), [504, 'upstream_slow'])
  t.strictSame(refusalOf(await deliver('events', '{}', slow)), [409, 'idempotency_key_in_progress'])
  resolve()
  await until(async () => (await deliver('events', '{}', slow)).status === 202)
  t.match(await deliver('events', '{}', { ...slow, 'ce-source': '/refunds' }), {
    status: 200,
    replayed: false,
  })
  t.equal(api.seen.length, before + 2)

  const structured = (source: string) =>
    deliver('events', JSON.stringify({ specversion: '1.0', id: '7', source }), {
      'content-type': 'application/cloudevents+json',
    })
  // The same record, with another media type.
  t.strictSame(refusalOf(await structured('/orders')), [422, 'idempotency_key_reused'])
  t.match(await structured('/invoices'), { status: 200, replayed: false }, 'another source')
  t.match(await structured('/invoices'), { status: 200, replayed: true })
  t.equal(api.seen.length, before + 3)

  t.strictSame(refusalOf(await deliver('unknown', '{}')), [404, 'route_not_found'])
  t.strictSame(refusalOf(await deliver('shopify', '{}')), [400, 'idempotency_key_missing'])
})
