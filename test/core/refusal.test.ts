import { gzipSync } from 'node:zlib'
import t from 'tap'
import { problemFacts, deferralOf as read, scopeOf } from '../../src/core/chain.ts'
import type { KeyPolicy, RoutePolicy } from '../../src/core/policy.ts'
import type { RecordId } from '../../src/core/record.ts'
import { problemBody, problemLine, REFUSALS, type RefusalCode, refusal } from '../../src/core/refusal.ts'
import { KEY, ROUTE, SCOPE } from './fixtures.ts'

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

t.test('what a refusal adds to its body, and what it leaves out', async (t) => {
  const REUSED = 'idempotency_key_reused'
  const GONE = 'idempotency_response_unavailable'
  const original = (location: string | null) => ({ original: { status: 201, location } })
  const stripe = { stripeError: true }
  const unknown = {
    type: 'idempotency_error',
    code: 'idempotency_outcome_unknown',
    message: 'why',
  }
  for (const [code, more, added, ...absent] of [
    [REUSED, {}, {}, 'instance', 'scope', 'error', 'originalStatus', 'location', 'retryAfter'],
    [REUSED, { instance: ID }, { instance: ID }],
    [REUSED, { scope: 'service, caller' }, { scope: 'service, caller' }],
    [GONE, original('/o/1'), { originalStatus: 201, location: '/o/1', status: 409 }],
    [GONE, original(null), { originalStatus: 201 }, 'location'],
    ['idempotency_key_in_progress', { retryAfter: 3 }, {}, 'retryAfter'],
    ['idempotency_outcome_unknown', stripe, { error: unknown }],
    ['upstream_failed', stripe, { error: { type: 'api_error', code: 'upstream_failed' } }],
    ['idempotency_caller_missing', { status: 400 }, { status: 400 }],
    ...[400, 409, 422].map((status) => [REUSED, { status }, { status }] as const),
    ...[409, 423, 425, 429, 202, 503].map(
      (status) => ['idempotency_key_in_progress', { status }, { status }] as const,
    ),
  ] as readonly [RefusalCode, Parameters<typeof refusal>[2], object, ...string[]][]) {
    const told = body(code, 'why', more)
    t.match(told, added, `${code} ${JSON.stringify(more)}`)
    for (const name of absent) t.notOk(Object.hasOwn(told, name), `${code} ${JSON.stringify(more)}: ${name}`)
  }
})

t.test('a refusal has a Retry-After only if one is given', async (t) => {
  t.equal(refusal('idempotency_key_in_progress', '', { retryAfter: 3 }).retryAfter, 3)
  t.equal(refusal('idempotency_key_in_progress', '').retryAfter, null)
})

t.test('the body is JSON whatever the detail holds', async (t) => {
  const detail = 'a "quoted"\n\\ line \u2028 \ud800'
  t.equal(body('upstream_failed', detail)['detail'], detail)
})

t.test('a refusal’s record is looked after and remembered, unless it says otherwise', async (t) => {
  t.match(refusal('idempotency_outcome_unknown', 'why'), { checking: true, remembered: true })
  t.match(refusal('idempotency_outcome_unknown', 'why', { checking: false, remembered: false }), {
    checking: false,
    remembered: false,
  })
})

const KEYED = ['Idempotency-Key', 'k']

type Route = Pick<RoutePolicy, 'name' | 'match' | 'key' | 'scope'>
const routeOf = (key: Partial<KeyPolicy> = {}, scope: Partial<RoutePolicy['scope']> = {}): Route => {
  return { ...ROUTE, key: { ...KEY, ...key }, scope: { ...SCOPE, ...scope } }
}
/** Whether the key reaches the inner proxy. */
const [REACHED, NOT_REACHED] = [routeOf(), routeOf({ forward: 'none' })]
const deferralOf = (answer: Parameters<typeof read>[0], route: Route) => read(answer, route, KEYED)
const said = (
  status: number,
  problem: object | string | null = null,
  lines = ['Idempotency-Retry', 'same-key'],
) => ({
  status,
  headers: ['Content-Type', 'application/problem+json', ...lines],
  body:
    problem === null ? null : Buffer.from(typeof problem === 'string' ? problem : JSON.stringify(problem)),
})

/** As the proxy writes it on each of its own answers, including a page for a browser. */
const page = (
  status: number,
  problem: string,
  retry = 'same-key',
  body: Buffer | null = Buffer.from('<!doctype html>'),
) => ({
  status,
  headers: ['Content-Type', 'text/html', 'Idempotency-Retry', retry, 'Idempotency-Problem', problem],
  body,
})

t.test('V04 same-key frees the key on every status that refuses before anything is sent', async (t) => {
  for (const status of [408, 409, 423, 425, 429, 503])
    for (const body of [null, '', '{', 'null', '"a"', {}, { code: 'x', instance: 'r' }])
      t.equal(deferralOf(said(status, body), REACHED), 'free', `${status} ${JSON.stringify(body)}`)
  t.equal(deferralOf(said(409, null, ['IDEMPOTENCY-RETRY', ' same-key\t']), REACHED), 'free')
})

t.test('V04 an answer that is not a refusal for the same key is the upstream’s own', async (t) => {
  for (const status of [409, 502, 503])
    for (const lines of [
      [],
      ['Idempotency-Retry', 'no'],
      ['Idempotency-Retry', 'new-key'],
      ['Idempotency-Retry', ''],
      ['Idempotency-Retry', 'same-key, no'],
      ['Idempotency-Retry', 'same-key', 'Idempotency-Retry', 'same-key'],
    ])
      t.equal(deferralOf(said(status, null, lines), REACHED), null, `${status} ${lines.join()}`)
  for (const status of [200, 201, 204, 302, 400, 401, 404, 422, 500])
    t.equal(deferralOf(said(status, { code: 'upstream_failed' }), REACHED), null, `${status}`)
})

t.test('V04 a 202 is a refusal only if it says that the first request is still running', async (t) => {
  for (const [answer, expected] of [
    [said(202, { code: 'idempotency_key_in_progress' }), 'free'],
    [page(202, 'code=idempotency_key_in_progress, record="r"'), 'free'],
    [page(202, 'code=accepted'), null],
    ...[null, {}, { code: 'accepted' }].map((body) => [said(202, body), null] as const),
  ] as const)
    t.equal(deferralOf(answer, REACHED), expected)
})

t.test('V04 a 502 or 504 whose problem cannot be read leaves the outcome uncertain', async (t) => {
  const known = JSON.stringify({ code: 'upstream_failed', instance: 'r' })
  for (const status of [502, 504]) {
    for (const body of [
      null,
      '',
      '{',
      known.slice(0, -1),
      'null',
      '"a"',
      '1',
      '[]',
      {},
      { instance: 'r' },
      { code: 1, instance: 'r' },
      { code: 'x', instance: 1 },
    ])
      t.equal(deferralOf(said(status, body), REACHED), 'uncertain', `${status} ${JSON.stringify(body)}`)
    const whole = said(status, known)
    t.equal(deferralOf(whole, REACHED), 'free')
    const html = ['Content-Type', 'text/html', 'Idempotency-Retry', 'same-key']
    t.equal(deferralOf({ ...whole, headers: html }, REACHED), 'uncertain')
    for (const body of [whole.body, gzipSync(known)]) {
      const headers = [...whole.headers, 'Content-Encoding', 'gzip']
      t.equal(deferralOf({ ...whole, headers, body }, REACHED), 'uncertain', 'compressed on the way')
    }
  }
})

t.test('V04 Idempotency-Problem decides, whatever became of the body', async (t) => {
  const same = scopeOf(REACHED)
  for (const status of [502, 504])
    for (const body of [null, Buffer.from('<p>'), Buffer.from('{"code":"upstream_unreachable"}')])
      for (const [line, expected] of [
        [`code=upstream_failed, record="r", scope="${same}"`, 'free'],
        [`code=upstream_failed,record="r",\tscope="${same}", more=1a`, 'uncertain'],
        [`code=upstream_failed,record="r",\tscope="${same}" , more=a`, 'free'],
        ['code=upstream_failed, record="r", scope="other"', 'uncertain'],
        ['code=upstream_failed, record="r", scope="none"', 'uncertain'],
        ['code=upstream_failed, scope="none"', 'uncertain'],
        [`code=upstream_failed, scope="${same}"`, 'uncertain'],
        ['code=upstream_unreachable', 'free'],
        ['code=upstream_failed, code=upstream_unreachable', 'uncertain'],
        ['code=upstream_unreachable; a', 'uncertain'],
        ['code', 'uncertain'],
        ['', 'uncertain'],
        ['"', 'uncertain'],
      ] as const)
        t.equal(deferralOf(page(status, line, 'same-key', body), REACHED), expected, line)
  const twice = page(502, 'code=upstream_unreachable')
  const headers = [...twice.headers, 'Idempotency-Problem', 'code=upstream_unreachable']
  t.equal(deferralOf({ ...twice, headers }, REACHED), 'uncertain')
})

t.test('V04 a proxy in front reads back what an inner proxy writes', async (t) => {
  const instance = 'Ab1-_'.padEnd(43, 'x') as RecordId
  for (const scope of [null, 'none', scopeOf(REACHED)]) {
    const line = problemLine(refusal('upstream_failed', 'why', { instance, scope }))
    t.same(problemFacts(['Idempotency-Problem', line], null), {
      code: 'upstream_failed',
      record: instance,
      scope: scope ?? undefined,
    })
  }
  const line = problemLine(refusal('loop_detected', 'why'))
  t.equal(line, 'code=loop_detected')
  t.same(problemFacts(['Idempotency-Problem', line], null), {
    code: 'loop_detected',
    record: undefined,
    scope: undefined,
  })
})

t.test('V04 502 and 504 free the key only where the inner proxy can recognise the retry', async (t) => {
  const record = { code: 'upstream_failed', instance: 'r' }
  const derived = ['Idempotency-Retry', 'same-key', 'Idempotency-Key-Derived', 'true']
  for (const status of [502, 504])
    for (const [answer, route, expected, why] of [
      [said(status, record), REACHED, 'free', 'it has the record and gets the key'],
      [said(status, record), NOT_REACHED, 'uncertain', 'it did not get the key'],
      [said(status), NOT_REACHED, 'uncertain', 'it says nothing'],
      [said(status, record, derived), REACHED, 'uncertain', 'it derives a key of its own'],
      [said(status, { code: 'upstream_failed' }), REACHED, 'uncertain', 'it has no record'],
      [said(status, { code: 'upstream_unreachable' }), NOT_REACHED, 'free', 'nothing was sent'],
    ] as const)
      t.equal(deferralOf(answer, route), expected, `${status}: ${why}`)
  for (const status of [408, 409, 429, 503])
    t.equal(deferralOf(said(status), NOT_REACHED), 'free', 'nothing was sent')
})

t.test('V05 a request that looped back frees its key, since nothing executed it', async (t) => {
  const no = ['Idempotency-Retry', 'no']
  for (const [answer, route, expected] of [
    [said(508, { code: 'loop_detected' }, no), NOT_REACHED, 'free'],
    [page(508, 'code=loop_detected', 'no'), NOT_REACHED, 'free'],
    [said(508, null, no), NOT_REACHED, null],
    [said(508, { code: 'x' }, no), NOT_REACHED, null],
    [page(508, 'code=x', 'no'), NOT_REACHED, null],
    // The upstream's own 508 (RFC 5842).
    [said(508, null, []), REACHED, null],
  ] as const)
    t.equal(deferralOf(answer, route), expected, JSON.stringify(answer.headers))
})

t.test('V04 502 and 504 free the key only where the key reached the inner proxy', async (t) => {
  const derive = { json: [], form: [], headers: ['x'], path: false, bucket: null }
  const from = [
    { kind: 'header', name: 'idempotency-key' },
    { kind: 'json', pointer: '/id' },
  ] as const
  for (const [key, sent, reaches] of [
    [{}, KEYED, true],
    [{}, [], true],
    [{ forward: 'none' }, KEYED, false],
    [{ forward: 'none' }, [], true],
    [{ forward: { header: 'X-Key' } }, KEYED, true],
    [{ forward: { header: 'X-Key' }, derive }, [], true],
    [{ derive }, [], false],
    [{ derive }, KEYED, true],
  ] as const)
    t.equal(
      read(said(504, { code: 'upstream_timeout', instance: 'r' }), routeOf({ from, ...key }), sent),
      reaches ? 'free' : 'uncertain',
      JSON.stringify([key, sent]),
    )
})

t.test('V04 502 and 504 free the key only where the inner proxy has the same scope', async (t) => {
  const sub = routeOf({}, { caller: [{ kind: 'jwt', name: 'sub' }] })
  const renamed = routeOf({ forward: { header: 'X-Key' } })
  const from = (name: string): Route => routeOf({ from: [{ kind: 'header', name }] })
  const exact = { ...routeOf(), match: { ...routeOf().match, exact: true } }
  const byRoute = routeOf({}, { path: 'route' })
  const other = (route: Route): Route => ({ ...route, name: 'other' })
  for (const [inner, outer, isSame, why] of [
    [routeOf(), routeOf(), true, 'the same'],
    [other(routeOf()), routeOf(), true, 'the names of the routes do not matter'],
    [routeOf({}, { anonymous: 'reject', callerIsDefault: false }), routeOf(), true, 'who is refused'],
    [sub, sub, true, 'a claim'],
    [routeOf(), sub, false, 'the inner proxy takes a renewed token for another caller'],
    [routeOf({ syntax: 'strict' }), routeOf(), false, 'another syntax'],
    [from('x-request-id'), routeOf(), false, 'another header'],
    [from('x-key'), renamed, true, 'the key is forwarded under that name'],
    [routeOf(), renamed, false, 'and under no other'],
    [exact, routeOf(), false, 'exact paths'],
    [byRoute, byRoute, true, 'by the route'],
    [other(byRoute), byRoute, false, 'whose name is part of it'],
    [routeOf(), byRoute, false, 'by the path'],
  ] as const) {
    const problem = { code: 'upstream_failed', instance: 'r', scope: scopeOf(inner) }
    t.equal(deferralOf(said(502, problem), outer), isSame ? 'free' : 'uncertain', why)
  }
})

t.test('V04 the name of a scope never changes, since proxies of several versions compare it', async (t) => {
  t.equal(scopeOf(routeOf()), '3xOTUZU5VsPPGROP')
})

t.test('V04 a header does not carry the key where the route reads a parameter of that name', async (t) => {
  const route = routeOf({ from: [{ kind: 'query', name: 'key' }], forward: 'none' })
  const known = said(504, { code: 'upstream_timeout', instance: 'r' })
  t.equal(read(known, route, ['Key', 'k']), 'free', 'the query is forwarded with the key')
})

t.test('V04 a problem that cannot be read has no facts', async (t) => {
  const type = ['Content-Type', 'application/problem+json']
  for (const body of ['', '{', 'null', '{"code":"a"'])
    t.equal(problemFacts(type, Buffer.from(body)), null, body)
  t.equal(problemFacts(type, null), null)
  for (const line of ['code', 'code=a; b', 'code=a, code=b', 'code=a,, record="r"'])
    t.equal(problemFacts(['Idempotency-Problem', line], null), null, line)
})
