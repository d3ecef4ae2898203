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
  whyUnproven,
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
    /key was not stored/,
    'a record without its key cannot be asked about',
  )
})

const PAYMENT = { id: 'p1', idempotency_key: 'k1', amount: 12 }
const FOUND = { data: [PAYMENT] }

void t.test('O02 a completed answer is kept as `completed` says', async (t) => {
  const type = words`Content-Type application/json`
  const date = ['Date', 'Sat, 21 Nov 2026 12:00:00 GMT']
  const dated = ['Set-Cookie', 'a=1', ...date, 'Content-Type', 'text/json']
  const odd = '{"idempotency_key": "k1", "amount":12345678901234567890.10 , "é":"\\u00e9"}'
  const whole = ` ${JSON.stringify(FOUND)}\n`
  const own = words`content-type application/vnd.x+json Location /p1 date now`
  const plain = { status: 200, reason: 'Fine', headers: type, body: JSON.stringify(PAYMENT) }
  for (const [what, given, more, response] of [
    [
      'what `json` points at, with its status',
      answer(200, { data: [PAYMENT, { secret: 1 }], more: 'secret' }, dated),
      {},
      { ...plain, headers: [...type, ...date] },
    ],
    ['the text as it was written', answer(200, `{"data":[ ${odd} ]}`), {}, { ...plain, body: odd }],
    [
      '`response` sets status and headers; without `json` all is kept',
      answer(200, whole, dated),
      { json: '', response: { status: 201, headers: own } },
      { status: 201, reason: '', headers: own, body: whole },
    ],
    [
      'the first of several `Date` lines',
      answer(200, FOUND, words`Date then Date now`),
      {},
      { ...plain, headers: [...type, 'Date', 'then'] },
    ],
    ...[204, 205, 304].map((status) => {
      const empty = { status, reason: '', headers: [], body: '' }
      return [
        `nothing with ${status}`,
        answer(200, FOUND),
        { response: { status, headers: [] } },
        empty,
      ] as const
    }),
  ] as const) {
    const kept = { ...response, body: Buffer.from(response.body), trailers: [] }
    const found = read(given, { completed: form(more) })
    t.same(found, { kind: 'completed', result: { kept: true, response: kept } }, what)
  }
  const completed = form({ response: { status: 201, headers: ['Location', '/p1'] } })
  t.same(
    readAnswer(policy({ completed }), { ...ROUTE, keep: 'outcome' }, ID, 'k1', answer(200, FOUND)),
    { kind: 'completed', result: { kept: false, why: 'outcome_only', status: 201, location: '/p1' } },
    '`keep: outcome` keeps nothing of the body',
  )
  const grpc = { ...ROUTE, match: { ...ROUTE.match, grpc: 'shop.Payments/*' } }
  t.match(
    readAnswer(policy({ completed }), grpc, ID, 'k1', answer(200, FOUND)),
    { kind: 'completed', result: { kept: false, why: 'outcome_only' } },
    'JSON is no answer to a call of gRPC',
  )
})

const when = (status: number, pointer: string, value: string) => ({ status, when: [{ pointer, value }] })
const any = (status: number) => ({ status, when: [] })
/** A payment with this key. */
const keyed = (key: unknown, more = {}) => answer(200, { data: [{ idempotency_key: key }], ...more })

const BOTH = { identity: [...POLICY.identity, { pointer: '/record', value: '{record}' }] }
const BY_DATA = { notFound: when(200, '/data', '[]') }
const BY_TOTAL = { notFound: when(200, '/total', '0') }
const BY_STATE = {
  completed: [
    ...form({ when: [{ pointer: '/state', value: 'declined' }], response: { status: 402, headers: [] } }),
    ...form({
      when: [
        { pointer: '/state', value: 'paid' },
        { pointer: '/final', value: 'true' },
      ],
    }),
  ],
  pending: when(200, '/state', 'processing'),
}
const found = (more = {}) => answer(200, { ...FOUND, ...more })
const LIST = { states: ['a b'] }

type Meant = readonly [said: string, given: StoredResponse, more?: Partial<ReconcilePolicy>, key?: string]
const NO_PATTERN = 'pending: status 200, which matches no pattern'

/** What an answer means: its kind, with the reason or the status kept where they matter. */
const MEANT: Readonly<Record<string, readonly Meant[]>> = {
  'an answer counts only if every identity pointer is present and equal': [
    ['completed', keyed('k1')],
    ...['k2', 'K1', 'k1 ', '', 1, true, ['k1'], { k1: 1 }].map((key): Meant => ['mismatch', keyed(key)]),
    ['mismatch', keyed([]), {}, '[]'],
    ['mismatch', keyed({}), {}, '{}'],
    ...[{}, { idempotency_key: null }, null, 'k1', []].map(
      (payment): Meant => ['pending', answer(200, { data: [payment] })],
    ),
    // A duplicate member says nothing.
    ['pending', answer(200, '{"data":[{"idempotency_key":"k2","idempotency_key":"k1"}]}')],
    ['completed', keyed('null'), {}, 'null'],
    ['pending', keyed(null), {}, 'null'],
    ['completed', keyed(123), {}, '123'],
    ['completed', found({ record: ID }), BOTH],
    ["mismatch: status 200, and /record is not this record's", found({ record: 'secret' }), BOTH],
    ['pending: status 200, and nothing at /record', found(), BOTH],
  ],
  'identity none believes any answer': [
    ['completed', answer(200, { data: [{}] }), { identity: [] }],
    ['pending: status 200, and nothing at /data/0', answer(200, { data: [] }), { identity: [] }],
  ],
  'O03 an answer that matches `notFound` is not found; any other is pending': [
    ['not_found', answer(404, 'nothing here')],
    ['pending', answer(404, {}), { notFound: null }],
    ...[201, 202, 301, 401, 403, 409, 410, 429, 499].map(
      (status): Meant => [`pending: status ${status}, which matches no pattern`, answer(status, {})],
    ),
  ],
  'a 5xx, or a body that is not JSON in UTF-8, is unusable': [
    ...[500, 502, 503, 504].map((status): Meant => ['unusable', answer(status, {})]),
    ['unusable', answer(418, 'teapot')],
    ...['', '<p>', '{"data":[', Buffer.from([0x22, 0xff, 0x22])].map(
      (body): Meant => ['unusable', answer(200, body)],
    ),
    ['unusable', answer(200, FOUND, ['Content-Encoding', 'gzip'])],
    // No `when` can match it.
    ['unusable', answer(200, '<p>'), { pending: when(200, '/state', 'processing') }],
    ['not_found', answer(503, 'down'), { notFound: any(503) }],
  ],
  '`when` distinguishes answers of one status; a refusal found is completed': [
    ['completed: 402', found({ state: 'declined' }), BY_STATE],
    ['completed: 200', found({ state: 'paid', final: true }), BY_STATE],
    [NO_PATTERN, found({ state: 'paid', final: false }), BY_STATE],
    ['pending: status 200, still pending', found({ state: 'processing', final: true }), BY_STATE],
    ['pending', found(), BY_STATE],
  ],
  '`when` compares a list as text, including the spaces in its strings': [
    ['pending: status 202, still pending', answer(202, LIST), { pending: when(202, '/states', '["a b"]') }],
    [
      'pending: status 202, which matches no pattern',
      answer(202, LIST),
      { pending: when(202, '/states', '["ab"]') },
    ],
  ],
  '`when` recognises a search that finds nothing with 200': [
    ['not_found', answer(200, { data: [] }), BY_DATA],
    ['not_found', answer(200, '{ "data": [ \n ] }'), BY_DATA],
    ['not_found', answer(200, { data: [], total: 0 }), BY_TOTAL],
    ['not_found', answer(200, { total: 0 }), { ...BY_TOTAL, identity: [] }],
    ['completed', found({ total: 1 }), BY_DATA],
    ['completed', found({ total: 1 }), BY_TOTAL],
    // A request that is shown is completed; an answer that contradicts itself frees no key.
    ['completed', found({ total: 0 }), BY_TOTAL],
    ['mismatch', keyed('k2', { total: 0 }), BY_TOTAL],
    // Empty, but not by the total.
    ...[1, null].map((total): Meant => ['pending', answer(200, { data: [], total }), BY_TOTAL]),
    // A status shared with completed answers is not enough.
    ['pending', answer(200, { data: [] }), { notFound: any(200) }],
  ],
  'a refusal by a proxy in between is not an answer of the upstream': [200, 404].map((status): Meant => {
    const headers = words`Content-Type application/problem+json Idempotency-Retry no`
    const why = 'with Idempotency-Retry, which comes from a proxy and not from the upstream'
    return [`unusable: status ${status} ${why}`, answer(status, FOUND, headers)]
  }),
}

for (const [title, rows] of Object.entries(MEANT))
  void t.test(title, async (t) => {
    for (const [said, given, more, key] of rows) {
      const meaning = read(given, more, key)
      const kept = meaning.kind === 'completed' && meaning.result.kept ? meaning.result.response.status : ''
      const full = `${meaning.kind}: ${'why' in meaning ? meaning.why : kept}`
      t.equal(said.includes(':') ? full : meaning.kind, said, String(given.body))
    }
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

const BY_KEY = { key: 'k1', received: ['key'], receivedBy: TO }
const BY_RECORD = { key: 'k1', received: ['record'], receivedBy: TO }
const NOTHING = { key: 'k1' }
const RENAMED = { forward: { header: 'X-Request-Id' } }
const TWO_NAMES = {
  from: ['idempotency-key', 'x-key'].map((name) => ({ kind: 'header', name }) as const),
}

/** What the upstream was told by the lines sent. */
const TOLD: Readonly<Record<string, readonly (readonly [expected: object, ...Parameters<typeof told>])[]>> = {
  'V07 the lines sent show which identifiers the upstream was told': [
    [BY_KEY, ['Idempotency-Key', 'k1']],
    // White space around a value does not count.
    [BY_KEY, ['IDEMPOTENCY-KEY', ' k1\t']],
    [{ ...BY_KEY, keySent: '"k1";a=1' }, ['Idempotency-Key', '"k1";a=1']],
    [BY_RECORD, ['Idempotency-Record', ID]],
    [{ ...BY_RECORD, key: null }, ['Idempotency-Record', ID], {}, false, false],
    [{ ...BY_KEY, received: ['key', 'record'] }, ['Idempotency-Key', 'k1', 'Idempotency-Record', ID]],
    // A key that no status query asks by is not kept.
    [{ key: null }, ['Idempotency-Key', '"k1"'], {}, false, false],
  ],
  'V07 a missing line, or one with another value, tells the upstream nothing': [
    [NOTHING, []],
    [NOTHING, ['X-Key', 'k1']],
    [NOTHING, ['Idempotency-Key', 'k2']],
    [NOTHING, ['Idempotency-Key', '"k1']],
    [NOTHING, ['Idempotency-Record', 'b'.repeat(43)]],
  ],
  'V07 a key sent under another name or in the body counts as told': [
    [BY_KEY, ['X-Request-ID', 'k1'], RENAMED],
    // Sent without quotes, even where clients must quote it.
    [BY_KEY, ['X-Request-ID', 'k1'], { ...RENAMED, syntax: 'strict' }],
    [NOTHING, ['Host', 'api.test'], { forward: { header: 'Host' } }],
    [BY_KEY, [], { forward: 'none' }, true],
    [NOTHING, [], { from: [{ kind: 'json', pointer: '/id' }] }],
    // A header named like a field of the body is not the key.
    [NOTHING, ['Order', 'k1'], { from: [{ kind: 'form', name: 'order' }] }],
  ],
  'V07 a key sent in two spellings besides its bare one cannot be asked by': [
    [NOTHING, ['Idempotency-Key', '"k1"', 'X-Key', '"k1";a=1'], TWO_NAMES],
    [{ ...BY_KEY, keySent: '"k1"' }, ['Idempotency-Key', '"k1"', 'X-Key', '"k1"'], TWO_NAMES],
  ],
}

for (const [title, rows] of Object.entries(TOLD))
  void t.test(title, async (t) => {
    for (const [expected, ...sent] of rows) t.same(told(...sent), expected, JSON.stringify(sent))
  })

t.test('V07 of two attempts that may have executed, what both told counts', async (t) => {
  const both = (earlier: Partial<Operation>, later: Partial<Operation>) => {
    const { key, keySent, received } = identifiersSentByBoth(
      { ...OPERATION, ...earlier },
      { ...OPERATION, ...later },
    )
    return { key, keySent, received }
  }
  const all = { received: ['key', 'record'] } as const
  t.same(both(all, all), { key: 'k1', keySent: undefined, ...all })
  t.same(both({ received: ['record'] }, all).received, ['record'])
  t.same(both(all, { received: ['key'] }).received, ['key'])
  t.same(both({}, all).received, undefined, 'the earlier attempt told nothing')
  t.same(both(all, {}).received, undefined, 'the later attempt told nothing')
  t.same(both({ ...all, keySent: '"k1"' }, all), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
  t.same(both(all, { ...all, keySent: '"k1"' }), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
  t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1"' }).received, all.received)
  t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1";a=1' }).received, ['record'])
  t.same(
    both({ ...all, receivedBy: 'a' }, { ...all, receivedBy: 'b' }).received,
    undefined,
    'sent to two upstreams',
  )
  t.equal(
    identifiersSentByBoth(
      { ...OPERATION, ...all, receivedBy: 'a' },
      { ...OPERATION, ...all, receivedBy: 'a' },
    ).receivedBy,
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
    whyUnproven(asking(path, headers), { received: names, receivedBy: TO }, TO)
  t.equal(why('/a?k={key}', [], 'key'), null)
  t.equal(why('/a/{record}', [], 'key', 'record'), null)
  t.match(why('/a/{record}', [], 'key'), /did not carry \{record\}$/)
  t.match(why('/a?k={key}', ['X-Record', '{record}'], 'key'), /did not carry \{record\}$/)
  t.match(why('/a?k={key}', ['X-Record', '{record}']), /did not carry \{key\} or \{record\}$/)
  t.match(why('/a', [], 'key', 'record'), /names no record/)
  t.match(whyUnproven(asking('/a?k={key}'), {}, TO), /did not carry \{key\}/, 'an older record')
  for (const receivedBy of [{}, { receivedBy: upstreamTag('http://127.0.0.1:3001') }])
    t.match(
      whyUnproven(asking('/a?k={key}'), { received: ['key'], ...receivedBy }, TO),
      /sent to another `upstream.url`/,
    )
  t.match(TO, /^[A-Za-z0-9_-]{8}$/)
})
