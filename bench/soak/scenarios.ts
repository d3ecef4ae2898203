import { setTimeout as wait } from 'node:timers/promises'
import { ABORTS } from './aborts.ts'
import type { Ask, Scenario, Work } from './clients.ts'
import { REQUEST_LIMIT, RESPONSE_LIMIT } from './config.ts'

const PADDING = 'x'.repeat(REQUEST_LIMIT)
const BINARY = Buffer.alloc(REQUEST_LIMIT, 'r')
const CALLERS = 2000

/** Bytes of a body: most are small, some take more than one read, one in a hundred is of the maximum size. */
function size(random: () => number): number {
  const at = random()
  if (at < 0.1) return 0
  if (at < 0.85) return 300
  if (at < 0.97) return 4096
  return at < 0.995 ? 64 * 1024 : REQUEST_LIMIT
}

/** JSON of about that size, at most `limits.request`. */
function json(operation: string, bytes: number): string {
  return `{"order":"${operation}","amount":12.5,"pad":"${PADDING.slice(0, Math.max(0, bytes - 80))}"}`
}

function payment({ next, random }: Work, path: string, more: Partial<Ask> = {}): Ask & { operation: string } {
  const operation = next()
  return { path, key: operation, operation, body: json(operation, size(random)), ...more }
}

/** A first execution, then retries of it. */
const retried =
  (path: string, first: readonly (number | string)[], retry: readonly (number | string)[]): Scenario =>
  async (work) => {
    const { clients, random } = work
    const ask = payment(work, path, { act: `ok:${size(random)}` })
    const { excused } = await clients.ask(ask, ...first)
    for (let n = excused ? 0 : Math.floor(random() * 3); n > 0; n--) await clients.ask(ask, ...retry)
  }

/** A request with a given answer of the upstream, and one retry. */
const answered =
  (
    act: string,
    first: readonly (number | string)[],
    retry: readonly (number | string)[],
    path = '/v1/payments',
  ): Scenario =>
  async (work) => {
    const ask = payment(work, path, { act })
    const { excused } = await work.clients.ask(ask, ...first)
    if (!excused) await work.clients.ask(ask, ...retry)
  }

const together =
  (path: string, duplicates: readonly (number | string)[]): Scenario =>
  async (work) => {
    const { clients, random } = work
    const ask = payment(work, path, { act: 'late:60', body: '{"same":1}' })
    const first = clients.ask(ask, 201)
    await wait(random() * 40)
    await Promise.all([first, clients.ask(ask, ...duplicates), clients.ask(ask, ...duplicates)])
  }

const body =
  (type: string, make: (operation: string, random: () => number) => string | Buffer): Scenario =>
  async (work) => {
    const { clients, random } = work
    const operation = work.next()
    const ask = payment(work, '/v1/payments', { operation, key: operation, type })
    await clients.ask({ ...ask, body: make(operation, random) }, 201)
    await clients.ask({ ...ask, body: make(operation, () => 0.5) }, 201, 'idempotency_key_reused')
  }

const multipart = body('multipart/form-data; boundary=b0undary', (operation, random) =>
  [
    '--b0undary\r\ncontent-disposition: form-data; name="order"\r\n\r\n',
    operation,
    '\r\n--b0undary\r\ncontent-disposition: form-data; name="file"; filename="f.bin"\r\n\r\n',
    PADDING.slice(0, Math.max(0, size(random) - 300)),
    '\r\n--b0undary--\r\n',
  ].join(''),
)

const UNCERTAIN = ['idempotency_outcome_unknown']

async function misuse(work: Work): Promise<void> {
  const ask = payment(work, '/v1/payments', { body: '{"amount":1}' })
  const { excused } = await work.clients.ask(ask, 201)
  if (!excused) await work.clients.ask({ ...ask, body: '{"amount":2}' }, 'idempotency_key_reused')
}

async function badKeys({ clients, next }: Work): Promise<void> {
  const ask = { path: '/v1/payments', body: '{}' }
  await clients.ask(ask, 'idempotency_key_missing')
  for (const key of ['a, b', '"half', 'k'.repeat(300)])
    await clients.ask({ ...ask, key }, 'idempotency_key_invalid')
  await clients.ask({ path: '/v1/events', body: `{"no":"${next()}"}` }, 'idempotency_key_missing')
  await clients.ask({ path: '/v1/events', body: '{"id":{}}' }, 'idempotency_key_invalid')
}

async function passed({ clients, random }: Work): Promise<void> {
  await clients.ask({ path: '/v1/things', method: 'GET', act: `ok:${size(random)}` }, 201)
  await clients.ask({ path: '/v1/things', method: 'GET', act: `chunks:${size(random)}` }, 200)
  await clients.ask({ path: '/v1/passed', body: BINARY.subarray(0, size(random)), type: 'text/plain' }, 201)
}

async function limited(work: Work): Promise<void> {
  const caller = `caller-${Math.floor(work.random() * CALLERS)}`
  const ask = payment(work, '/v1/limited', { caller })
  await work.clients.ask(ask, 201, 'rate_limited')
}

async function authorized(work: Work): Promise<void> {
  const ask = payment(work, '/v1/authorized', { caller: `caller-${Math.floor(work.random() * CALLERS)}` })
  await work.clients.ask(ask, 201)
  const headers = { cookie: 'session=1' }
  await work.clients.ask({ ...ask, ...(work.random() < 0.1 ? { headers } : {}) }, 201)
}

async function derived(work: Work): Promise<void> {
  const ask = payment(work, '/v1/derived', { key: null, headers: { 'x-shop': 'berlin' } })
  await work.clients.ask(ask, 201)
  await work.clients.ask(ask, 201)
}

async function events(work: Work): Promise<void> {
  const operation = work.next()
  const ask = { path: '/v1/events', operation, body: `{"id":"${operation}"}` }
  await work.clients.ask(ask, 201)
  await work.clients.ask(ask, 201)
}

async function issued({ clients, next }: Work): Promise<void> {
  const { text, status } = await clients.ask({ path: '/keys' }, 201)
  if (status !== 201) return
  const { idempotencyKey: key } = JSON.parse(text) as { idempotencyKey: string }
  const ask = { path: '/v1/issued', key, operation: next(), body: '{}' }
  await clients.ask(ask, 201)
  await clients.ask(ask, 201)
  await clients.ask({ ...ask, key: 'nobody-made-this' }, 'idempotency_key_invalid')
}

async function status(work: Work): Promise<void> {
  const ask = payment(work, '/v1/payments')
  const asking: Ask = { path: '/status?path=/v1/payments', method: 'GET', key: ask.operation }
  await work.clients.ask(asking, 404)
  const { excused } = await work.clients.ask(ask, 201)
  if (!excused) await work.clients.ask(asking, 200)
}

async function shadow(work: Work): Promise<void> {
  const ask = payment(work, '/v1/shadow', { act: `late:${Math.floor(work.random() * 10)}` })
  await Promise.all([work.clients.ask(ask, 201), work.clients.ask(ask, 201)])
  await work.clients.ask({ ...ask, act: 'ok:70000' }, 201)
}

async function tooLarge(work: Work): Promise<void> {
  const body = Buffer.alloc(REQUEST_LIMIT + 1)
  await work.clients.ask({ path: '/v1/payments', key: work.next(), body }, 'request_too_large', 0)
}

const UNAVAILABLE = ['idempotency_response_unavailable']

/** Kind of traffic → its share and scenario. Shares need not add up to anything. */
export const MIX: readonly (readonly [share: number, Scenario])[] = [
  [240, retried('/v1/payments', [201], [201])],
  [120, passed],
  [60, together('/v1/payments', [201, 'idempotency_key_in_progress'])],
  [60, together('/v1/waiting', [201])],
  [50, misuse],
  [25, badKeys],
  [
    40,
    body('application/x-www-form-urlencoded', (operation, random) =>
      `order=${operation}&pad=${PADDING.slice(0, size(random))}`.slice(0, REQUEST_LIMIT),
    ),
  ],
  [30, multipart],
  [40, body('application/octet-stream', (_operation, random) => BINARY.subarray(0, size(random)))],
  [5, tooLarge],
  [6, answered(`ok:${RESPONSE_LIMIT}`, [201], [201])],
  [6, answered(`chunks:${RESPONSE_LIMIT}`, [200], [200])],
  [6, answered(`ok:${3 * RESPONSE_LIMIT}`, [201], UNAVAILABLE)],
  [6, answered(`chunks:${2 * RESPONSE_LIMIT}`, [200], UNAVAILABLE)],
  [12, answered('events:10', [200], UNAVAILABLE)],
  [12, answered('empty', [204], [204])],
  [12, answered('trailers', [200], [200])],
  [12, answered('failed', [500], [500])],
  [12, answered('unauthorized', [401], [401])],
  [12, answered('once-busy', [503], [201])],
  [6, answered('unavailable', [503], UNCERTAIN)],
  [6, answered('reset', ['upstream_failed'], UNCERTAIN)],
  [6, answered('close', ['upstream_failed'], UNCERTAIN)],
  [6, answered('cut', ['upstream_failed'], UNCERTAIN)],
  [6, answered('truncate', ['upstream_failed'], UNCERTAIN)],
  [4, answered('hang', ['upstream_timeout'], UNCERTAIN)],
  [4, answered('stall', [0], UNCERTAIN)],
  [6, answered('reset', ['upstream_failed'], UNCERTAIN, '/v1/fading')],
  [6, answered('close', ['upstream_failed'], UNCERTAIN, '/v1/waiting')],
  [20, answered('late:160', ['upstream_slow'], [201, 'idempotency_key_in_progress'], '/v1/slow')],
  [30, retried('/v1/slow', [201], [201])],
  [30, retried('/v1/secrets', [201], UNAVAILABLE)],
  [40, authorized],
  [40, limited],
  [40, derived],
  [40, events],
  [15, issued],
  [20, status],
  [20, retried('/v1/strict', [201], [201])],
  [20, retried('/v1/lenient', [201], [201])],
  [20, retried('/v1/waiting', [201], [201])],
  [30, shadow],
  [10, retried('/v1/unguarded', [201], [201])],
  [10, retried('/v1/ignored', [201], [201])],
  ...ABORTS.map((abort) => [5, abort] as const),
]
