import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Outcome, StoredResponse } from '../../src/core/record.ts'
import { classify, keepsBody, keptResult, outcomeOf, replayable } from '../../src/core/settle.ts'
import { RESULT, ROUTE, routeOf } from './fixtures.ts'

const KEYED = ['Idempotency-Key', 'k']
const REFUSED = ['Idempotency-Retry', 'same-key']

interface Answered {
  readonly headers?: readonly string[]
  readonly body?: Buffer
  readonly declared?: string
  readonly route?: RoutePolicy
}
const outcome = (status: number, { headers = [], body, declared, route = ROUTE }: Answered = {}): Outcome =>
  outcomeOf(route, KEYED, { status, headers, ...(body && { body }) }, declared ?? null, RESULT)

const COMPLETED: Outcome = { kind: 'completed', result: RESULT }
const released = (reason: string): Outcome => ({ kind: 'not_executed', reason })
const unsure = (status: number, reason = `the upstream answered ${status}`): Outcome => ({
  kind: 'unknown',
  reason,
  status,
})

void t.test('U08 without a declaration, the status and Retry-After decide', async (t) => {
  t.strictSame(outcome(201), COMPLETED)
  t.strictSame(outcome(429), released('the upstream answered 429'))
  t.strictSame(outcome(502), unsure(502))
  t.strictSame(outcome(503), unsure(503))
  t.strictSame(outcome(503, { headers: ['Retry-After', '1'] }), released('the upstream answered 503'))
})

void t.test('U08 the first digit of a status is its class, and above 599 it is a 5xx', async (t) => {
  const strict = { profile: 'strict', outcomes: ROUTE.outcomes } as const
  for (const [status, action] of [
    [100, 'unknown'],
    [199, 'unknown'],
    [200, 'store'],
    [499, 'store'],
    [500, 'unknown'],
    [599, 'unknown'],
    [999, 'unknown'],
  ] as const)
    t.equal(classify(strict, status, false), action, `${status}`)
  const own = { exact: new Map(), class: new Map([[4, 'release'] as const]) }
  t.equal(classify({ profile: 'standard', outcomes: own }, 499, false), 'release', 'the route’s own class')
  t.equal(classify({ profile: 'standard', outcomes: own }, 500, false), 'store')
})

void t.test('the upstream’s own declaration comes before its status', async (t) => {
  t.strictSame(outcome(502, { declared: 'applied' }), COMPLETED)
  t.strictSame(outcome(201, { declared: 'not-applied' }), released('the upstream answered 201'))
  t.strictSame(outcome(201, { declared: 'perhaps' }), COMPLETED, 'another word says nothing')
  t.strictSame(outcome(502, { declared: '' }), unsure(502))
  t.strictSame(outcome(409, { declared: 'applied', headers: REFUSED }), COMPLETED, 'before a refusal, too')
})

void t.test('V04 the refusal of a proxy behind this one is not the answer to the request', async (t) => {
  const reason = (status: number): string => `the proxy behind this one refused the request with ${status}`
  t.strictSame(outcome(409, { headers: REFUSED }), released(reason(409)))
  t.strictSame(outcome(409), COMPLETED, 'an answer of the upstream itself')
  t.strictSame(outcome(502, { headers: REFUSED }), unsure(502), 'as its status says')
  const stripe = routeOf('/a', { profile: 'stripe' })
  t.strictSame(outcome(502, { route: stripe }), COMPLETED)
  t.strictSame(outcome(502, { headers: REFUSED, route: stripe }), unsure(502, reason(502)), 'never stored')
  const lenient = routeOf('/a', { profile: 'lenient' })
  t.strictSame(
    outcome(502, { headers: REFUSED, route: lenient }),
    released('the upstream answered 502'),
    'released where the route says so',
  )
  const body = Buffer.from('{"code":"upstream_unreachable"}')
  const headers = [...REFUSED, 'Content-Type', 'application/problem+json']
  t.strictSame(outcome(502, { headers, body }), released(reason(502)), 'its problem is read')
  t.strictSame(outcome(502, { headers }), unsure(502), 'unless it was not kept')
})

const RESPONSE: StoredResponse = {
  status: 201,
  reason: 'Created',
  headers: ['Location', '/p/1', 'Set-Cookie', 'a=1', 'ETag', '"1"', 'set-cookie', 'b=2'],
  body: Buffer.from('ok'),
  trailers: [],
}

void t.test('keep: outcome keeps status and Location only', async (t) => {
  const route = routeOf('/a', { keep: 'outcome' })
  t.strictSame(keptResult(route, RESPONSE), {
    kept: false,
    why: 'outcome_only',
    status: 201,
    location: '/p/1',
  })
  t.strictSame(keptResult(ROUTE, RESPONSE), { kept: true, response: RESPONSE })
})

void t.test('excluded headers are left out of what is stored and of what is replayed', async (t) => {
  const route = routeOf('/a', { excludeHeaders: new Set(['set-cookie']) })
  const without = { ...RESPONSE, headers: ['Location', '/p/1', 'ETag', '"1"'] }
  t.strictSame(replayable(route, RESPONSE), without)
  t.strictSame(keptResult(route, RESPONSE), { kept: true, response: without })
  t.equal(replayable(ROUTE, RESPONSE), RESPONSE, 'without such headers, nothing is copied')
})

void t.test('keepsBody tells whether an outcome has a whole response', async (t) => {
  t.ok(keepsBody(COMPLETED))
  t.notOk(keepsBody({ kind: 'completed', result: keptResult(routeOf('/a', { keep: 'outcome' }), RESPONSE) }))
  t.notOk(keepsBody(released('why')))
  t.notOk(keepsBody(unsure(502)))
})
