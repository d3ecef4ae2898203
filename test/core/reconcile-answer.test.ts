import fc from 'fast-check'
import t from 'tap'
import type { ReconcilePolicy } from '../../src/core/policy.ts'
import {
  type AnswerMeaning,
  asksBy,
  asksByKey,
  buildStatusQuery,
  readAnswer,
  type StatusQuery,
  whyUntold,
} from '../../src/core/reconcile/answer.ts'
import { identifiersSent, identifiersSentByBoth, upstreamTag } from '../../src/core/reconcile/identifiers.ts'
import type { Fingerprint, Operation, RecordId, StoredResponse } from '../../src/core/record.ts'
import { pathParameters } from '../../src/core/route.ts'
import { route } from '../protect/harness.ts'
import { ROUTE, words } from './fixtures.ts'

const ID = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ' as RecordId

/** The route of the contract's example. */
const POLICY: ReconcilePolicy = {
  request: { method: 'GET', path: '/v1/payments?idempotency_key={key}', headers: [] },
  identity: [{ pointer: '/data/0/idempotency_key', value: '{key}' }],
  completed: [{ status: 200, when: [], json: '/data/0', response: { status: null, headers: [] } }],
  notFound: { status: 404, when: [] },
  pending: null,
  after: 60_000,
  every: 5_000,
  attempts: 20,
}
const policy = (more: Partial<ReconcilePolicy> = {}): ReconcilePolicy => ({ ...POLICY, ...more })
const form = (more: Partial<ReconcilePolicy['completed'][0]> = {}): ReconcilePolicy['completed'] => [
  { ...(POLICY.completed[0] as ReconcilePolicy['completed'][0]), ...more },
]

function answer(status: number, body: unknown, headers: readonly string[] = []): StoredResponse {
  const text = typeof body === 'string' || Buffer.isBuffer(body) ? body : JSON.stringify(body)
  return { status, reason: 'Fine', headers, body: Buffer.from(text as string), trailers: [] }
}

function asked(by: ReconcilePolicy, key: string | null): StatusQuery {
  const query = buildStatusQuery(by, ID, key)
  if (typeof query === 'string') throw new Error(query)
  return query
}

const read = (
  given: StoredResponse,
  more: Partial<ReconcilePolicy> = {},
  key: string | null = 'k1',
): AnswerMeaning => readAnswer(policy(more), ROUTE, ID, key, given)

t.test('key and record id are percent-encoded in the path, literal in the headers', async (t) => {
  const request = {
    method: 'POST',
    path: '/p/{record}?k={key}&k2={key}',
    headers: ['X-{key}', '{key}/{record}/{other}', 'Y-{record}', 'Bearer {record}'],
  }
  const key = `a/b?c=d&e#f%2F {key}{record} $& $1 !'()*"\\~-._`
  const query = asked(policy({ request }), key)
  t.equal(query.method, 'POST')
  const [path = '', search] = query.target.split('?')
  t.equal(path, `/p/${ID}`)
  t.match(query.target, /^[A-Za-z0-9\-._~%/?=&]+$/)
  t.same(new URLSearchParams(search).getAll('k'), [key])
  t.same(new URLSearchParams(search).getAll('k2'), [key])
  const own = ['X-{key}', `${key}/${ID}/{other}`, 'Y-{record}', `Bearer ${ID}`]
  const defaults = words`Accept application/json Accept-Encoding identity Cache-Control no-cache`
  t.same(query.headers, defaults.concat(own))
})

void t.test('any printable key stays one value of the query and one segment of the path', async (t) => {
  const keys = fc.string({
    unit: fc.integer({ min: 0x20, max: 0x7e }).map((c) => String.fromCharCode(c)),
    minLength: 1,
  })
  const request = { ...POLICY.request, path: '/payments/{key}/state?k={key}' }
  fc.assert(
    fc.property(keys, (key) => {
      if (key === '.' || key === '..') return true
      const target = asked(policy({ request }), key).target
      const [path = '', query = ''] = target.split('?')
      const [, , segment = '', last] = path.split('/')
      return (
        decodeURIComponent(segment) === key &&
        last === 'state' &&
        target.split('?').length === 2 &&
        new URLSearchParams(query).get('k') === key
      )
    }),
  )
  t.pass()
})

void t.test('a key that is a dot segment cannot be asked by in a path, which it would change', async (t) => {
  for (const key of ['.', '..'])
    for (const path of ['/payments/{key}', '/payments/{key}/state', '/payments/{key}?a=1', '/{key}'])
      t.match(
        buildStatusQuery(policy({ request: { ...POLICY.request, path } }), ID, key),
        /dot segment/,
        path,
      )
  t.equal(asked(POLICY, '..').target, '/v1/payments?idempotency_key=..')
  t.equal(
    asked(policy({ request: { ...POLICY.request, path: '/p/{key}?b=/../' } }), '...').target,
    '/p/...?b=/../',
  )
  t.equal(asked(policy({ request: { ...POLICY.request, path: '/p/x{key}' } }), '..').target, '/p/x..')
})

void t.test('a header that the route sets replaces its default', async (t) => {
  const headers = words`accept application/vnd.api+json Accept-Encoding gzip cache-control no-store`
  const query = asked(policy({ request: { ...POLICY.request, headers } }), 'k')
  t.same(query.headers, headers)
})

void t.test('"not found" from a cache is only pending', async (t) => {
  const empty = { when: [{ pointer: '/data', value: '[]' }], status: 200 }
  for (const [given, more] of [
    [(headers: string[]) => answer(404, {}, headers), {}],
    [(headers: string[]) => answer(200, { data: [] }, headers), { notFound: empty }],
  ] as const) {
    for (const age of ['0', '', '00', ' 0\t'])
      t.equal(read(given(['Age', age]), more).kind, 'not_found', `Age: ${age}`)
    t.equal(read(given([]), more).kind, 'not_found')
    for (const age of ['1', '86400', 'x'])
      t.match(read(given(['age', age]), more), { kind: 'pending', why: /from a cache/ }, `Age: ${age}`)
  }
  // A completed request stays completed.
  const done = { data: [{ idempotency_key: 'k1' }] }
  t.equal(read(answer(200, done, ['Age', '9'])).kind, 'completed')
})

void t.test('the key is kept only if the status query uses it', async (t) => {
  t.ok(asksByKey(POLICY))
  const byRecord = { method: 'GET', path: '/p/{record}', headers: ['A', 'b'] }
  const identity = [{ pointer: '/record', value: '{record}' }]
  t.notOk(asksByKey(policy({ request: byRecord, identity })))
  t.ok(asksByKey(policy({ request: { ...byRecord, headers: ['A', '{key}'] }, identity })))
  t.ok(asksByKey(policy({ request: byRecord })))
  t.equal(asked(policy({ request: byRecord, identity }), null).target, `/p/${ID}`)
  t.match(
    buildStatusQuery(POLICY, ID, null),
    /key was not kept/,
    'a record without its key cannot be asked about',
  )
})

const DATED = ['Set-Cookie', 'a=1', 'Date', 'Sat, 21 Nov 2026 12:00:00 GMT', 'Content-Type', 'text/json']
const PAYMENT = { id: 'p1', idempotency_key: 'k1', amount: 12 }

t.test('O02 a completed answer keeps what `json` points at, with its status', async (t) => {
  const given = answer(200, { data: [PAYMENT, { secret: 1 }], more: 'secret' }, DATED)
  t.same(read(given), {
    kind: 'completed',
    result: {
      kept: true,
      response: {
        status: 200,
        reason: 'Fine',
        headers: ['Content-Type', 'application/json', 'Date', 'Sat, 21 Nov 2026 12:00:00 GMT'],
        body: Buffer.from(JSON.stringify(PAYMENT)),
        trailers: [],
      },
    },
  })
})

void t.test('the kept value is the text as it was written', async (t) => {
  const text = '{"data":[ {"idempotency_key": "k1", "amount":12345678901234567890.10 , "é":"\\u00e9"} ]}'
  const verdict = read(answer(200, text))
  t.equal(
    verdict.kind === 'completed' && verdict.result.kept && verdict.result.response.body.toString(),
    '{"idempotency_key": "k1", "amount":12345678901234567890.10 , "é":"\\u00e9"}',
  )
})

t.test('`completed.response` sets status and headers; without `json` all is kept', async (t) => {
  const text = ` ${JSON.stringify({ data: [PAYMENT] })}\n`
  const verdict = read(answer(200, text, DATED), {
    completed: form({
      json: '',
      response: {
        status: 201,
        headers: ['content-type', 'application/vnd.x+json', 'Location', '/p1', 'date', 'now'],
      },
    }),
  })
  t.same(verdict, {
    kind: 'completed',
    result: {
      kept: true,
      response: {
        status: 201,
        reason: '',
        headers: ['content-type', 'application/vnd.x+json', 'Location', '/p1', 'date', 'now'],
        body: Buffer.from(text),
        trailers: [],
      },
    },
  })
})

void t.test('a completed answer keeps the first of several `Date` lines', async (t) => {
  const verdict = read(answer(200, { data: [PAYMENT] }, ['Date', 'then', 'Date', 'now']))
  t.same(
    verdict.kind === 'completed' && verdict.result.kept && verdict.result.response.headers,
    words`
    Content-Type application/json Date then`,
  )
})

void t.test('a status that has no body is kept without body and content type', async (t) => {
  for (const status of [204, 205, 304]) {
    const verdict = read(answer(200, { data: [PAYMENT] }), {
      completed: form({ response: { status, headers: [] } }),
    })
    const response = { status, reason: '', headers: [], body: Buffer.alloc(0), trailers: [] }
    t.same(verdict, { kind: 'completed', result: { kept: true, response } })
  }
})

void t.test('`keep: outcome` keeps nothing of the body', async (t) => {
  const completed = form({ response: { status: 201, headers: ['Location', '/p1'] } })
  t.same(
    readAnswer(
      policy({ completed }),
      { ...ROUTE, keep: 'outcome' },
      ID,
      'k1',
      answer(200, { data: [PAYMENT] }),
    ),
    {
      kind: 'completed',
      result: { kept: false, why: 'outcome_only', status: 201, location: '/p1' },
    },
  )
})

void t.test('an answer counts only if every identity pointer is present and equal', async (t) => {
  const of = (payment: unknown) => read(answer(200, { data: [payment] })).kind
  t.equal(of({ idempotency_key: 'k1' }), 'completed')
  for (const other of ['k2', 'K1', 'k1 ', '', 1, true, ['k1'], { k1: 1 }])
    t.equal(of({ idempotency_key: other }), 'mismatch', JSON.stringify(other))
  for (const [key, other] of [
    ['[]', []],
    ['{}', {}],
  ] as const)
    t.equal(read(answer(200, { data: [{ idempotency_key: other }] }), {}, key).kind, 'mismatch')
  for (const missing of [{}, { idempotency_key: null }, null, 'k1', []])
    t.equal(of(missing), 'pending', JSON.stringify(missing))
  t.equal(
    read(answer(200, '{"data":[{"idempotency_key":"k2","idempotency_key":"k1"}]}')).kind,
    'pending',
    'a duplicate member says nothing',
  )
  t.equal(read(answer(200, { data: [{ idempotency_key: 'null' }] }), {}, 'null').kind, 'completed')
  t.equal(read(answer(200, { data: [{ idempotency_key: null }] }), {}, 'null').kind, 'pending')
  t.equal(read(answer(200, { data: [{ idempotency_key: 123 }] }), {}, '123').kind, 'completed')
  const both = { identity: [...POLICY.identity, { pointer: '/record', value: '{record}' }] }
  t.equal(read(answer(200, { data: [PAYMENT], record: ID }), both).kind, 'completed')
  const mismatch = read(answer(200, { data: [PAYMENT], record: 'secret' }), both)
  t.same(mismatch, { kind: 'mismatch', why: 'status 200, and /record is not that of this record' })
  t.same(read(answer(200, { data: [PAYMENT] }), both), {
    kind: 'pending',
    why: 'status 200, and nothing at /record',
  })
})

void t.test('identity none believes any answer', async (t) => {
  t.equal(read(answer(200, { data: [{}] }), { identity: [] }).kind, 'completed')
  t.same(
    read(answer(200, { data: [] }), { identity: [] }),
    { kind: 'pending', why: 'status 200, and nothing at /data/0' },
    'a missing pointer is pending',
  )
})

t.test('O03 an answer that matches `notFound` is not found; any other is pending', async (t) => {
  t.same(read(answer(404, 'nothing here')), { kind: 'not_found' })
  t.equal(read(answer(404, {}), { notFound: null }).kind, 'pending')
  for (const status of [201, 202, 301, 401, 403, 409, 410, 429, 499])
    t.same(read(answer(status, {})), { kind: 'pending', why: `status ${status}, which matches no pattern` })
})

void t.test('a 5xx, or a body that is not JSON in UTF-8, is unusable', async (t) => {
  for (const status of [500, 502, 503, 504]) t.equal(read(answer(status, {})).kind, 'unusable')
  t.equal(read(answer(418, 'teapot')).kind, 'unusable')
  for (const body of ['', '<p>', '{"data":[', Buffer.from([0x22, 0xff, 0x22])])
    t.equal(read(answer(200, body)).kind, 'unusable', String(body))
  t.equal(read(answer(200, { data: [PAYMENT] }, ['Content-Encoding', 'gzip'])).kind, 'unusable')
  const pending = { status: 200, when: [{ pointer: '/state', value: 'processing' }] }
  t.equal(read(answer(200, '<p>'), { pending }).kind, 'unusable', 'no `when` can match it')
  t.equal(
    read(answer(503, 'down'), { notFound: { status: 503, when: [] } }).kind,
    'not_found',
    'unless `notFound` names the status',
  )
})

t.test('`when` distinguishes answers of one status; a refusal found is completed', async (t) => {
  const completed = [
    ...form({ when: [{ pointer: '/state', value: 'declined' }], response: { status: 402, headers: [] } }),
    ...form({
      when: [
        { pointer: '/state', value: 'paid' },
        { pointer: '/final', value: 'true' },
      ],
    }),
  ]
  const pending = { status: 200, when: [{ pointer: '/state', value: 'processing' }] }
  const of = (more: object) => read(answer(200, { data: [PAYMENT], ...more }), { completed, pending })
  t.match(of({ state: 'declined' }), { kind: 'completed', result: { response: { status: 402 } } })
  t.match(of({ state: 'paid', final: true }), { kind: 'completed', result: { response: { status: 200 } } })
  t.same(of({ state: 'paid', final: false }), {
    kind: 'pending',
    why: 'status 200, which matches no pattern',
  })
  t.same(of({ state: 'processing', final: true }), { kind: 'pending', why: 'status 200, still pending' })
  t.equal(of({}).kind, 'pending')
})

void t.test('`when` compares a list as text, including the spaces in its strings', async (t) => {
  const of = (value: string) =>
    read(answer(202, { states: ['a b'] }), {
      pending: { status: 202, when: [{ pointer: '/states', value }] },
    })
  t.match(of('["a b"]'), { why: 'status 202, still pending' })
  t.match(of('["ab"]'), { why: 'status 202, which matches no pattern' })
})

void t.test('`when` recognises a search that finds nothing with 200', async (t) => {
  for (const [value, empty] of [
    ['[]', { data: [] }],
    ['0', { data: [], total: 0 }],
  ] as const) {
    const notFound = { status: 200, when: [{ pointer: value === '0' ? '/total' : '/data', value }] }
    t.equal(read(answer(200, empty), { notFound }).kind, 'not_found')
    t.equal(read(answer(200, { data: [PAYMENT], total: 1 }), { notFound }).kind, 'completed')
  }
  const spaced = { notFound: { status: 200, when: [{ pointer: '/data', value: '[]' }] } }
  t.equal(read(answer(200, '{ "data": [ \n ] }'), spaced).kind, 'not_found')
  const notFound = { status: 200, when: [{ pointer: '/total', value: '0' }] }
  t.equal(
    read(answer(200, { data: [PAYMENT], total: 0 }), { notFound }).kind,
    'completed',
    'a request that is shown is completed',
  )
  t.equal(
    read(answer(200, { data: [{ idempotency_key: 'k2' }], total: 0 }), { notFound }).kind,
    'mismatch',
    'an answer that contradicts itself frees no key',
  )
  t.equal(read(answer(200, { total: 0 }), { notFound, identity: [] }).kind, 'not_found')
  for (const total of [1, null])
    t.equal(
      read(answer(200, { data: [], total }), { notFound }).kind,
      'pending',
      'empty, but not by the total',
    )
  t.equal(
    read(answer(200, { data: [] }), { notFound: { status: 200, when: [] } }).kind,
    'pending',
    'a status shared with completed answers is not enough',
  )
})

void t.test('a refusal by a proxy in between is not an answer of the upstream', async (t) => {
  const body = JSON.stringify({ data: [{ idempotency_key: 'k1' }] })
  for (const status of [200, 404])
    t.match(
      readAnswer(
        POLICY,
        ROUTE,
        ID,
        'k1',
        {
          status,
          reason: '',
          headers: ['Content-Type', 'application/problem+json', 'Idempotency-Retry', 'no'],
          body: Buffer.from(body),
          trailers: [],
        },
        new Map(),
      ),
      { kind: 'unusable', why: /Idempotency-Retry/ },
    )
})

void t.test('path parameters of the route fill the status query and its identity', async (t) => {
  const of = (path: string, actual: string, exact = false) => [...pathParameters({ path, exact }, actual)]
  t.same(of('/accounts/:id/charges', '/accounts/1%202/charges'), [['id', '1%202']], 'as written in the path')
  t.same(of('/a/:one/:two/*', '/a/1/2/3/4'), [
    ['one', '1'],
    ['two', '2'],
  ])
  t.same(of('/a/:id/', '/a/1'), [['id', '1']], 'a trailing slash does not count')
  t.same(of('/a/:id', '/a//1', true), [['id', '']], 'unless it is exact')
  t.same(of('/a/:id', '/a/%ff'), [['id', '%ff']])
  t.same(of('/a/:id', '/a'), [])
  t.same(of('/a', '/b'), [])
  const named = policy({
    request: { method: 'GET', path: '/a/{:id}?k={key}&of={:id}', headers: ['X-Path', '{:id}'] },
    identity: [{ pointer: '/account', value: '{:id}' }],
  })
  const put = (value: string) => buildStatusQuery(named, ID, 'k1', new Map([['id', value]]))
  t.match(put('1'), { target: '/a/1?k=k1&of=1' })
  t.match(
    put('1&k=k2%2Fx'),
    { target: '/a/1&k=k2%2Fx?k=k1&of=1%26k%3Dk2%2Fx' },
    'a value stays data, wherever it is',
  )
  const twice = { ...named, request: { ...named.request, path: '/a?of={:id}&next=/b?c={:id}' } }
  t.match(
    buildStatusQuery(twice, ID, 'k1', new Map([['id', '1&k=2']])),
    { target: '/a?of=1%26k%3D2&next=/b?c=1%26k%3D2' },
    'the query begins at the first question mark',
  )
  t.match(put('caf%C3%A9'), { target: '/a/caf%C3%A9?k=k1&of=caf%C3%A9' })
  for (const segment of ['%FF', 'caf%E9', '%C3%A9%FF']) {
    t.match(put(segment), /cannot be asked: :id of the record's path is not UTF-8/)
    t.match(
      buildStatusQuery({ ...named, identity: [] }, ID, 'k1', new Map([['id', segment]])),
      { target: `/a/${segment}?k=k1&of=${segment}` },
      'byte for byte',
    )
  }
  t.ok((put('1') as StatusQuery).headers.includes('{:id}'), 'not in headers, which cannot carry every text')
  t.match(put('..'), /dot segment/)
  t.equal(buildStatusQuery(named, ID, 'k1'), "cannot be asked: the record's path has no :id")
  const completed = [{ status: 200, when: [], json: '', response: { status: null, headers: [] } }]
  const read = (account: string) =>
    readAnswer({ ...named, completed }, ROUTE, ID, 'k1', answer(200, { account }), new Map([['id', '1']]))
      .kind
  t.same([read('1'), read('2')], ['completed', 'mismatch'])
})

const KEYS = route().key

const OPERATION: Operation = {
  route: 'pay',
  method: 'POST',
  path: '/pay',
  fingerprint: Buffer.alloc(32) as Fingerprint,
  rawDigest: Buffer.alloc(32),
  recipe: 'v1',
  key: 'k1',
}

const TO = upstreamTag('http://127.0.0.1:3000')

const told = (lines: readonly string[], more: Partial<typeof KEYS> = {}, inBody = false, keepsKey = true) =>
  identifiersSent(lines, { ...KEYS, ...more }, ID, 'k1', inBody, keepsKey, TO)

void t.test('V07 the lines sent show which identifiers the upstream was told', async (t) => {
  t.same(told(['Idempotency-Key', 'k1']), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(
    told(['IDEMPOTENCY-KEY', ' k1\t']),
    { key: 'k1', told: ['key'], toldTo: TO },
    'white space around a value does not count',
  )
  t.same(told(['Idempotency-Key', '"k1";a=1']), { key: 'k1', keySent: '"k1";a=1', told: ['key'], toldTo: TO })
  t.same(told(['Idempotency-Record', ID]), { key: 'k1', told: ['record'], toldTo: TO })
  t.same(told(['Idempotency-Record', ID], {}, false, false), { key: null, told: ['record'], toldTo: TO })
  t.same(told(['Idempotency-Key', 'k1', 'Idempotency-Record', ID]), {
    key: 'k1',
    told: ['key', 'record'],
    toldTo: TO,
  })
  t.same(
    told(['Idempotency-Key', '"k1"'], {}, false, false),
    { key: null },
    'a key that no status query asks by is not kept',
  )
})

void t.test('V07 a missing line, or one with another value, tells the upstream nothing', async (t) => {
  for (const lines of [
    [],
    ['X-Key', 'k1'],
    ['Idempotency-Key', 'k2'],
    ['Idempotency-Key', '"k1'],
    ['Idempotency-Record', 'b'.repeat(43)],
  ])
    t.same(told(lines), { key: 'k1' }, lines.join(': '))
})

void t.test('V07 a key sent under another name or in the body counts as told', async (t) => {
  const forward = { header: 'X-Request-Id' }
  t.same(told(['X-Request-ID', 'k1'], { forward }), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(
    told(['X-Request-ID', 'k1'], { forward, syntax: 'strict' }),
    { key: 'k1', told: ['key'], toldTo: TO },
    'sent without quotes, even where clients must quote it',
  )
  t.same(told(['Host', 'api.test'], { forward: { header: 'Host' } }), { key: 'k1' })
  t.same(told([], { forward: 'none' }, true), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(told([], { from: [{ kind: 'json', pointer: '/id' }] }), { key: 'k1' })
  t.same(
    told(['Order', 'k1'], { from: [{ kind: 'form', name: 'order' }] }),
    { key: 'k1' },
    'a header named like a field of the body is not the key',
  )
})

void t.test('V07 a key sent in two spellings besides its bare one cannot be asked by', async (t) => {
  const from = [
    { kind: 'header', name: 'idempotency-key' },
    { kind: 'header', name: 'x-key' },
  ] as const
  const lines = ['Idempotency-Key', '"k1"', 'X-Key', '"k1";a=1']
  t.same(told(lines, { from }), { key: 'k1' })
  t.same(told(lines.with(3, '"k1"'), { from }), { key: 'k1', keySent: '"k1"', told: ['key'], toldTo: TO })
})

t.test('V07 of two attempts that may have executed, what both told counts', async (t) => {
  const both = (earlier: Partial<Operation>, later: Partial<Operation>) => {
    const { key, keySent, told } = identifiersSentByBoth(
      { ...OPERATION, ...earlier },
      { ...OPERATION, ...later },
    )
    return { key, keySent, told }
  }
  const all = { told: ['key', 'record'] } as const
  t.same(both(all, all), { key: 'k1', keySent: undefined, ...all })
  t.same(both({ told: ['record'] }, all).told, ['record'])
  t.same(both(all, { told: ['key'] }).told, ['key'])
  t.same(both({}, all).told, undefined, 'the earlier attempt told nothing')
  t.same(both(all, {}).told, undefined, 'the later attempt told nothing')
  t.same(both({ ...all, keySent: '"k1"' }, all), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
  t.same(both(all, { ...all, keySent: '"k1"' }), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
  t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1"' }).told, all.told)
  t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1";a=1' }).told, ['record'])
  t.same(both({ ...all, toldTo: 'a' }, { ...all, toldTo: 'b' }).told, undefined, 'sent to two upstreams')
  t.equal(
    identifiersSentByBoth({ ...OPERATION, ...all, toldTo: 'a' }, { ...OPERATION, ...all, toldTo: 'a' })
      .toldTo,
    'a',
  )
  t.match(identifiersSentByBoth(OPERATION, OPERATION), { route: 'pay', recipe: 'v1' })
})

void t.test('V08 of two attempts that may both have executed, the longer lease counts', async (t) => {
  const lease = (earlier: Partial<Operation>, later: Partial<Operation>) =>
    identifiersSentByBoth({ ...OPERATION, ...earlier }, { ...OPERATION, ...later }).lease
  t.equal(lease({ lease: 1000 }, { lease: 3000 }), 3000)
  t.equal(lease({ lease: 3000 }, { lease: 1000 }), 3000)
  t.equal(lease({}, { lease: 1000 }), 1000)
  t.equal(lease({}, {}), undefined)
})

t.test('V07 "not found" is believed only about identifiers the upstream was told', async (t) => {
  const asking = (path: string, headers: readonly string[] = []) => ({
    request: { method: 'GET', path, headers },
  })
  t.same(asksBy(asking('/a?k={key}', ['X-Record', '{record}'])), ['key', 'record'])
  t.same(asksBy(asking('/a')), [])
  const why = (path: string, headers: readonly string[], ...names: readonly ('key' | 'record')[]) =>
    whyUntold(asking(path, headers), { told: names, toldTo: TO }, TO)
  t.equal(why('/a?k={key}', [], 'key'), null)
  t.equal(why('/a/{record}', [], 'key', 'record'), null)
  t.match(why('/a/{record}', [], 'key'), /was not told \{record\} by/)
  t.match(why('/a?k={key}', ['X-Record', '{record}'], 'key'), /was not told \{record\} by/)
  t.match(why('/a?k={key}', ['X-Record', '{record}']), /was not told \{key\} and \{record\} by/)
  t.match(why('/a', [], 'key', 'record'), /names no record/)
  t.match(whyUntold(asking('/a?k={key}'), {}, TO), /was not told \{key\}/, 'an older record')
  for (const toldTo of [{}, { toldTo: upstreamTag('http://127.0.0.1:3001') }])
    t.match(
      whyUntold(asking('/a?k={key}'), { told: ['key'], ...toldTo }, TO),
      /sent to another `upstream.url`/,
    )
  t.match(TO, /^[A-Za-z0-9_-]{8}$/)
})
