import { execFile } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { createServer, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import axios from 'axios'
import axiosRetry from 'axios-retry'
import { Stripe } from 'stripe'
import t from 'tap'
import { Agent, RetryAgent, request } from 'undici'
import { proxyBefore } from '../support/exchange.ts'
import { tcpStub, upstreamStub } from '../support/upstream.ts'
import { AMOUNT, NO_CURL, REAL_CLIENTS } from './real.ts'

t.setTimeout(120_000)

function file(path: string): string {
  return readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8')
}

const DOCUMENT = file('docs/clients.md')

const CURL = ['--silent', '--retry', '3', '--fail', '--data', 'amount=4200&currency=eur']
const CHARGE = JSON.stringify({ id: 'ch_1', object: 'charge', amount: 4200 })
const FORM = 'amount=4200&currency=eur'

/** Seconds. More than any client's own pause before its first retry. */
const RETRY_AFTER = 4

/** The first response that a key gets; every later one is the charge. */
const FIRST: ReadonlyMap<string, (response: ServerResponse) => void> = new Map([
  ['connection closed, no answer', (response) => response.socket?.destroy()],
  [
    'answer breaks off in its head',
    (response) => response.socket?.end('HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Le'),
  ],
  [
    'answer breaks off in its body',
    (response) =>
      response.socket?.end(
        'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"id":',
      ),
  ],
  ...[400, 409, 422, 429, 500, 502, 503, 504].map(
    (status) => [String(status), (response: ServerResponse) => answer(response, status)] as const,
  ),
  ['obeys `Retry-After`', (response) => answer(response, 503, { 'Retry-After': RETRY_AFTER })],
])

function answer(response: ServerResponse, status: number, more: Record<string, number> = {}): void {
  response.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': CHARGE.length, ...more })
  response.end(CHARGE)
}

/** When the requests of each key came, in milliseconds. */
const came = new Map<string, number[]>()

const server = createServer((req, response) => {
  req.resume().on('end', () => {
    const key = req.headers['idempotency-key'] as string
    const times = came.get(key) ?? []
    came.set(key, [...times, performance.now()])
    const fault = FIRST.get(decodeURIComponent(key).split('/')[0] as string)
    if (times.length === 0) fault?.(response)
    else answer(response, 200)
  })
})

server.listen(0, '127.0.0.1')
await once(server, 'listening')
t.teardown(() => {
  server.close()
  server.closeAllConnections()
})
const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`

function countOf(key: string): number {
  return came.get(encodeURIComponent(key))?.length ?? 0
}

/** One charge with each client's defaults: only the key, and what a POST needs. */
const PLAIN: Readonly<Record<string, (url: string, key: string) => Promise<unknown>>> = {
  stripe(url, key) {
    const { hostname, port } = new URL(url)
    const stripe = new Stripe('sk_test_example', { host: hostname, port, protocol: 'http' })
    return stripe.charges.create({ amount: 4200, currency: 'eur' }, { idempotencyKey: key })
  },
  async 'undici RetryAgent'(url, key) {
    const headers = { 'content-type': 'application/x-www-form-urlencoded', 'idempotency-key': key }
    const dispatcher = new RetryAgent(new Agent())
    const { body } = await request(`${url}/v1/charges`, { dispatcher, method: 'POST', headers, body: FORM })
    return body.json()
  },
  'axios-retry'(url, key) {
    const client = axios.create({ baseURL: url })
    axiosRetry(client)
    return client.post('/v1/charges', FORM, { headers: { 'Idempotency-Key': key } })
  },
  'retry.sh (curl)': (url, key) =>
    new Promise((resolve) => {
      execFile('curl', [...CURL, '--header', `Idempotency-Key: ${key}`, `${url}/v1/charges`], resolve)
    }),
}

/** `yes` where the client retried, `no` where it did not. */
async function habit(row: string, how: string, run: (key: string) => Promise<unknown>): Promise<string> {
  const key = encodeURIComponent(`${row}/${how}`)
  await run(key).catch(() => {})
  const [first, second] = came.get(key) ?? []
  if (first === undefined) throw new Error(`${how} sent nothing`)
  if (second === undefined) return row.startsWith('obeys') ? '–' : 'no'
  return row.startsWith('obeys') && second - first < RETRY_AFTER * 990 ? 'no' : 'yes'
}

void t.test('docs/clients.md says what each client retries by default, and what as shown', async (t) => {
  const lines = DOCUMENT.split('\n')
  const cells = (line: string) => line.slice(2, -2).split(' | ')
  const begin = lines.findIndex((line) => line.startsWith('| the first answer'))
  const told = lines.slice(begin + 2, lines.indexOf('', begin)).map(cells)

  const known = await Promise.all(
    [...FIRST.keys()].map(async (row) => [
      row,
      ...(await Promise.all(
        REAL_CLIENTS.map(async ({ name, skip, charge }, column) => {
          if (skip !== false) return told.find(([first]) => first === row)?.[column + 1]
          const [plain, shown] = await Promise.all([
            habit(row, `${name} plain`, (key) => PLAIN[name]?.(url, key) as Promise<unknown>),
            habit(row, `${name} shown`, (key) => charge(url, key)),
          ])
          return `${plain} → ${shown}`
        }),
      )),
    ]),
  )
  t.strictSame(told, known)
})

void t.test('docs/clients.md leads to the files that the tests run', async (t) => {
  const clients = ['stripe', 'undici', 'axios'].map((name) => `clients/${name}.ts`)
  for (const path of [...clients, 'retry.sh', 'charges-api/proxy.yaml'])
    t.ok(DOCUMENT.includes(`](../examples/${path})`), path)
})

/** A charge with stripe-node, whose own retries are off. */
function stripeAt(url: string, idempotencyKey: string): Promise<Stripe.Response<Stripe.Charge>> {
  const { hostname, port } = new URL(url)
  const settings = { host: hostname, port, protocol: 'http', maxNetworkRetries: 0 } as const
  const stripe = new Stripe('sk_test_example', settings)
  return stripe.charges.create({ amount: AMOUNT, currency: 'eur' }, { idempotencyKey })
}

void t.test('stripe-node takes a refusal without `error` for a charge; only its status tells', async (t) => {
  const problem = JSON.stringify({ type: 'urn:x', status: 409, code: 'idempotency_outcome_unknown' })
  await using refusing = await upstreamStub(
    (_seen, response) =>
      void response.writeHead(409, { 'Content-Type': 'application/problem+json' }).end(problem),
  )
  const charge = await stripeAt(refusing.url, 'k')
  t.match(charge, { code: 'idempotency_outcome_unknown' })
  t.equal(charge.lastResponse.statusCode, 409)
})

void t.test('stripe-node throws on a refusal of profile stripe, which has a member `error`', async (t) => {
  await using breaking = await tcpStub((socket) => void socket.once('data', () => socket.destroy()))
  await using proxy = await proxyBefore(breaking, {
    routes: '{ name: charges, match: { path: /v1/charges }, profile: stripe }',
  })
  await t.rejects(stripeAt(proxy.url, 'k'), { code: 'upstream_failed', statusCode: 502 })
})

void t.test('stripe-node retries a closed connection once even where retries are off', async (t) => {
  const key = 'connection closed, no answer/no retries'
  await stripeAt(url, encodeURIComponent(key))
  t.equal(countOf(key), 2)
})

void t.test('a key made in an axios interceptor is a new one for every try', async (t) => {
  const client = axios.create({ baseURL: url })
  axiosRetry(client)
  let made = 0
  const key = 'connection closed, no answer/interceptor'
  client.interceptors.request.use((config) => {
    config.headers.set('Idempotency-Key', encodeURIComponent(`${key} ${++made}`))
    return config
  })
  await client.post('/v1/charges', FORM).catch(() => {})
  t.equal(countOf(`${key} 1`), 1)
  t.equal(countOf(`${key} 2`), 1)
})

t.test('curl takes a broken head for whole, even with --retry-all-errors', { skip: NO_CURL }, async (t) => {
  const key = 'answer breaks off in its head/all errors'
  const header = `Idempotency-Key: ${encodeURIComponent(key)}`
  const args = [...CURL, '--retry-all-errors', '--header', header, `${url}/v1/charges`]
  const ended = await new Promise((resolve) =>
    execFile('curl', args, (error, stdout) => resolve({ error, stdout })),
  )
  t.same(ended, { error: null, stdout: '' })
  t.equal(countOf(key), 1)
})
