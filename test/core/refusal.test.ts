import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { problemBody, REFUSALS, type RefusalCode, refusal } from '../../src/core/refusal.ts'

/** Contract §6, row by row: the answers of the proxy itself. */
const TABLE: Readonly<Record<RefusalCode, readonly [status: number, retry: string]>> = {
  idempotency_key_missing: [400, 'new-key'],
  idempotency_key_invalid: [400, 'new-key'],
  idempotency_caller_missing: [401, 'no'],
  idempotency_key_reused: [422, 'new-key'],
  idempotency_key_in_progress: [409, 'same-key'],
  idempotency_outcome_unknown: [409, 'same-key'],
  idempotency_response_unavailable: [409, 'no'],
  idempotency_key_expired: [409, 'no'],
  idempotency_store_unavailable: [503, 'same-key'],
  request_too_large: [413, 'no'],
  upstream_unreachable: [502, 'same-key'],
  upstream_failed: [502, 'same-key'],
  upstream_timeout: [504, 'same-key'],
  upstream_slow: [504, 'same-key'],
  request_timeout: [408, 'same-key'],
  rate_limited: [429, 'same-key'],
  overloaded: [503, 'same-key'],
  route_not_found: [404, 'no'],
  replay_forbidden: [403, 'no'],
  replay_unauthorized_yet: [503, 'same-key'],
  loop_detected: [508, 'no'],
  // Not in the contract's table: bytes that are not an HTTP/1.1 request.
  request_malformed: [400, 'no'],
}
const URN = 'urn:idempotency-proxy:'
const ID = 'A'.repeat(43) as RecordId

const rows = Object.entries(TABLE) as [RefusalCode, readonly [number, string]][]
const body = (...args: Parameters<typeof refusal>): Record<string, unknown> =>
  JSON.parse(problemBody(refusal(...args), URN)) as Record<string, unknown>

for (const [code, [status, retry]] of rows) {
  t.test(`${code} has status ${status} and retry ${retry}`, async (t) => {
    t.equal(refusal(code, 'why').status, status)
    const { title, ...rest } = body(code, 'why')
    t.same(rest, { type: `urn:idempotency-proxy:${code}`, status, detail: 'why', code, retry })
    t.match(title, /^[A-Z].*[a-z]$/)
  })
}

t.test('the table lists every refusal, and each has a title of its own', async (t) => {
  t.same(new Set(Object.keys(REFUSALS)), new Set(Object.keys(TABLE)))
  const titles = Object.values(REFUSALS).map(({ title }) => title)
  t.equal(new Set(titles).size, titles.length, 'every title is its own')
})

t.test('type is the base URL followed by the code', async (t) => {
  for (const baseUrl of ['https://docs.example.com/problems/', 'https://docs.example.com/#']) {
    const { type } = JSON.parse(problemBody(refusal('overloaded', ''), baseUrl)) as { type: string }
    t.equal(type, `${baseUrl}overloaded`)
  }
})

t.test('instance is the record id where there is one', async (t) => {
  t.equal(body('idempotency_key_reused', '', { instance: ID })['instance'], ID)
  t.notOk('instance' in body('idempotency_key_missing', ''))
})

t.test('a refusal may carry another status than its default', async (t) => {
  for (const status of [400, 409, 422])
    t.equal(body('idempotency_key_reused', '', { status })['status'], status)
  for (const status of [409, 423, 425, 429, 202, 503])
    t.equal(body('idempotency_key_in_progress', '', { status })['status'], status)
  t.equal(body('idempotency_caller_missing', '', { status: 400 })['status'], 400)
})

t.test('a refusal has a Retry-After only if one is given, and never in its body', async (t) => {
  t.equal(refusal('idempotency_key_in_progress', '', { retryAfter: 3 }).retryAfter, 3)
  t.equal(refusal('idempotency_key_in_progress', '').retryAfter, null)
  t.notOk('retryAfter' in body('idempotency_key_in_progress', '', { retryAfter: 3 }))
})

t.test('a response that was not kept is described by its status and location', async (t) => {
  const told = (location: string | null): Record<string, unknown> =>
    body('idempotency_response_unavailable', '', { original: { status: 201, location } })
  t.match(told('/o/1'), { originalStatus: 201, location: '/o/1', status: 409 })
  t.equal(told(null)['originalStatus'], 201)
  t.notOk('location' in told(null))
  t.notOk('originalStatus' in body('idempotency_response_unavailable', ''))
})

t.test('a refusal for Stripe clients has the `error` member that they expect', async (t) => {
  const told = (code: RefusalCode) => body(code, 'why', { stripeError: true })['error']
  t.same(told('idempotency_outcome_unknown'), {
    type: 'idempotency_error',
    code: 'idempotency_outcome_unknown',
    message: 'why',
  })
  t.match(told('upstream_failed'), { type: 'api_error', code: 'upstream_failed' })
  t.notOk('error' in body('upstream_failed', ''))
})

t.test('the body is JSON whatever the detail holds', async (t) => {
  const detail = 'a "quoted"\n\\ line \u2028 \ud800'
  t.equal(body('upstream_failed', detail)['detail'], detail)
})

t.test('a problem names the scope in force only if it is known', async (t) => {
  t.equal(body('idempotency_key_reused', 'why', { scope: 'service, caller' }).scope, 'service, caller')
  t.notOk(Object.hasOwn(body('idempotency_key_reused', 'why'), 'scope'))
})

t.test(
  'a refusal is about a record that is looked after and remembered, unless it says otherwise',
  async (t) => {
    t.match(refusal('idempotency_outcome_unknown', 'why'), { checking: true, remembered: true })
    t.match(refusal('idempotency_outcome_unknown', 'why', { checking: false, remembered: false }), {
      checking: false,
      remembered: false,
    })
  },
)
