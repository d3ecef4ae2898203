import { createHmac } from 'node:crypto'
import fc from 'fast-check'
import t from 'tap'
import {
  type Claims,
  changesCaller,
  frame,
  Hmac,
  newKeysBucket,
  normaliseHost,
  readCaller as readCallerOf,
  recordId,
} from '../../src/core/identity.ts'
import type { CallerSource, RoutePolicy, ScopePolicy } from '../../src/core/policy.ts'
import { ROUTE, SCOPE, words } from './fixtures.ts'

const KEY = 'key-1'
const PATH = '/v1/payments'

/** … of a request without a token. */
const readCaller = (headers: readonly string[], scope: ScopePolicy, claims: Claims | null = null) =>
  readCallerOf({ headers, certificate: null }, scope, claims)

function scoped(scope: Partial<ScopePolicy>, name = ROUTE.name): RoutePolicy {
  return { ...ROUTE, name, scope: { ...SCOPE, ...scope } }
}
function explicit(...caller: CallerSource[]): ScopePolicy {
  return { ...SCOPE, caller, callerIsDefault: false }
}
interface Asked {
  readonly route?: RoutePolicy
  readonly caller?: readonly (string | null)[]
  readonly method?: string
  readonly path?: string
  readonly key?: string
  readonly service?: string
  readonly secret?: Buffer
  readonly host?: string | null
  readonly qualifier?: readonly (string | null)[]
}
function id({
  route = ROUTE,
  caller = ['t1'],
  method = 'POST',
  path = PATH,
  key = KEY,
  service = 'default',
  secret,
  qualifier = [],
  host = null,
}: Asked = {}): string {
  return recordId({ service, secret: secret ?? null }, route, caller, method, path, key, qualifier, host)
}
/** The id of a request with these headers; fails where the caller is missing. */
function idOf(headers: readonly string[], scope: ScopePolicy): string {
  const reading = readCaller(headers, scope)
  if (reading.kind === 'missing') throw new Error(reading.detail)
  return id({ route: scoped(scope), caller: reading.parts })
}

const areDistinct = (all: readonly string[]): boolean => new Set(all).size === all.length

t.test(
  'a record id is a SHA-256 in base64url, the same for the same request and across versions',
  async (t) => {
    t.match(id(), /^[A-Za-z0-9_-]{43}$/)
    t.equal(id(), id())
    const caller = ['Bearer t1', null]
    const secret = Buffer.from('secret')
    t.equal(id({ caller }), 'b8lKZMz3OAQCZ6lGbV95xw_2s2YREu3YYX8QqMLQ7i4')
    t.equal(id({ caller, secret }), 'SYhOYonNX6UDQuKIm8HY4HvtbyCZC_lo6jGMnq5Ak5w')
    const hosted = { route: scoped({ host: true }), host: 'api.example.com' }
    t.equal(id(hosted), 'AQ311639srwEC-hoTkB85CJF9Tf47zvO3AD0kOsgndA')
  },
)

t.test('S01 two callers with the same key have two records', async (t) => {
  t.not(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf(['Authorization', 'Bearer t2'], SCOPE))
  t.equal(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf(['authorization', 'Bearer t1', 'X', 'y'], SCOPE))
  t.not(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf([], SCOPE), 'an anonymous caller is another one')
  const none = { ...explicit(), anonymous: 'reject' as const }
  t.equal(idOf(['Authorization', 'a'], none), idOf(['Cookie', 'b=c'], none), 'scope.caller none: all are one')
})

t.test('S03 anonymous callers share one bucket, or are refused', async (t) => {
  const empty = ['Authorization', '']
  for (const headers of [[], empty, [...empty, ...empty], ['Authorization', ' ']]) {
    t.match(readCaller(headers, { ...SCOPE, anonymous: 'reject' }), {
      kind: 'missing',
      status: 401,
      cause: /header authorization is missing/,
    })
    t.equal(idOf(headers, SCOPE), idOf([], SCOPE), 'an empty header counts as missing')
  }
  t.match(readCaller(['Authorization', 'x'], { ...SCOPE, anonymous: 'reject' }), { kind: 'caller' })
})

t.test('S03 without scope.caller, a request that has only another credential is refused', async (t) => {
  for (const name of words`Cookie X-API-Key api-key COOKIE api_key X_Api_Key`) {
    for (const anonymous of ['share', 'reject'] as const) {
      const scope = { ...SCOPE, anonymous }
      for (const headers of [[], [name, ''], ['Authorization', '']])
        t.match(readCaller([...headers, name, 's=1'], scope), { kind: 'missing', status: 400 }, name)
      t.equal(readCaller(['Authorization', 'a', name, 's=1'], scope).kind, 'caller')
    }
    t.equal(readCaller([name, ''], SCOPE).kind, 'caller', 'an empty one identifies nobody')
    const set = { ...SCOPE, callerIsDefault: false }
    t.equal(readCaller([name, 's=1'], set).kind, 'caller', 'the same scope, set explicitly')
  }
})

t.test('S03 the detail of a refusal is for the client, its cause for the operator', async (t) => {
  for (const [name, source] of [
    ['cookie', 'cookie:<name>'],
    ['x-api-key', 'header:x-api-key'],
    ['api-key', 'header:api-key'],
  ] as const) {
    const reading = readCaller([name, 's3cret=s3cret'], SCOPE)
    if (reading.kind !== 'missing') throw new Error(name)
    t.equal(reading.detail, `the proxy does not identify clients by ${name}; nothing was executed`)
    t.notMatch(reading.detail, /scope|caller|route/, 'no advice about the configuration')
    t.match(reading.cause, `scope.caller is not set: set it to what identifies callers, such as ${source},`)
    t.notMatch(JSON.stringify(reading), /s3cret/)
  }
  const scope = {
    ...explicit({ kind: 'header', name: 'x-tenant' }, { kind: 'cookie', name: 'sid' }),
    anonymous: 'reject' as const,
  }
  const reading = readCaller(['X-Tenant', 's3cret'], scope)
  t.match(reading, { kind: 'missing', status: 401, detail: /cookie sid/ }, 'it names the missing attribute')
  t.notMatch(JSON.stringify(reading), /s3cret|x-tenant/)
})

t.test('several attributes, and several lines of one, never run together', async (t) => {
  const both = explicit({ kind: 'header', name: 'x-a' }, { kind: 'header', name: 'x-b' })
  const each = ['X-A 1 X-B 2', 'X-A 12', 'X-B 12', 'X-A 2 X-B 1', '', 'X-A 1', 'X-A 1 X-B -']
  t.ok(areDistinct(each.map((headers) => idOf(headers.split(' '), both))))
  const one = explicit({ kind: 'header', name: 'x-a' })
  const lines = [words`X-A 1 X-A 2`, words`X-A 2 X-A 1`, words`X-A 1`, words`X-A 12`, []]
  const ids = lines.map((headers) => idOf(headers, one))
  t.ok(areDistinct(ids))
  t.equal(ids[0], idOf(words`x-a 1 Other 3 X-a 2`, one))
  const parts = (headers: readonly string[], source: CallerSource): unknown => {
    const reading = readCaller(headers, explicit(source))
    return reading.kind === 'caller' ? reading.parts : reading
  }
  const sid = { kind: 'cookie', name: 'sid' } as const
  t.same(parts(words`X-Tenant a x-tenant b`, { kind: 'header', name: 'x-tenant' }), ['a, b'])
  t.same(parts(['Cookie', 'sid=a; sid=b', 'Cookie', 'sid=c'], sid), ['a; b; c'])
  t.same(parts(['Cookie', '; sid=a; ;sid'], sid), ['a'], 'empty ones are skipped')
})

t.test('a cookie identifies a caller by its value alone', async (t) => {
  const scope = explicit({ kind: 'cookie', name: 'sid' })
  const of = (...lines: string[]) =>
    idOf(
      lines.flatMap((line) => ['Cookie', line]),
      scope,
    )
  const one = of('sid=1')
  for (const line of [
    ['a=b; sid=1', 'sid=1; a=b', 'a=b;sid=1;c=d', ' sid=1 ', 'xsid=9; sid=1', 'sid =1', 'sid= 1'],
    'sid; sid=1',
  ].flat())
    t.equal(of(line), one, line)
  t.equal(of('a=b', 'sid=1'), one, 'on any line')
  for (const line of ['sid=2', 'sid=1; sid=2', 'sid=2; sid=1', 'sid=1=', 'sid="1"'])
    t.not(of(line), one, line)
  for (const line of ['', 'SID=1', 'xsid=1', 'sid', 'sidx', 'sid=', 'sid=; sid=', 'a=sid=1', '=sid'])
    t.equal(of(line), of(), `${line}: missing`)
  t.match(readCaller(['Cookie', 'sid='], { ...scope, anonymous: 'reject' }), { kind: 'missing', status: 401 })
})

// biome-ignore format: a table
const APART: readonly (readonly [Asked, Asked])[] = [
  [{ caller: ['a'], key: 'bc' }, { caller: ['ab'], key: 'c' }],
  [{ caller: ['a', 'b'], key: 'c' }, { caller: ['ab'], key: 'c' }],
  [{ caller: [], key: 'c' }, { caller: [null], key: 'c' }],
  [{ caller: [''], key: 'c' }, { caller: [null], key: 'c' }],
  [{ caller: ['1:a'], key: 'c' }, { caller: ['a'], key: '1:c' }],
  [{ caller: ['a'], method: 'POST', key: 'c' }, { caller: ['a4:POST'], method: '', key: 'c' }],
]

t.test('caller a with key bc is not caller ab with key c, nor any other part another', async (t) => {
  for (const [one, other] of APART) t.not(id(one), id(other), JSON.stringify([one, other]))
  const route = scoped({ host: true })
  const hosts = [
    id({ route, host: 'a' }),
    id({ route, host: null }),
    id({ host: 'a' }),
    id({ method: 'host' }),
  ]
  t.ok(areDistinct(hosts), 'a host in the scope cannot pass for a method')
  // Events from two sources with the same id are two records.
  const events: Asked[] = [
    {},
    [null, '', '/a', '/b'].map((source) => ({ qualifier: ['ce-source', source] })),
    { key: 'key-19:ce-source', qualifier: ['/a'] },
    { key: 'key-1-', qualifier: ['ce-source'] },
  ].flat()
  t.ok(areDistinct(events.map(id)))
})

t.test('K21 keys that differ in letter case are different records', async (t) => {
  t.not(id({ key: 'abc' }), id({ key: 'ABC' }))
})

t.test('framing is reversible: different parts never read the same', async () => {
  const part = fc.oneof(fc.constant(null), fc.string({ unit: fc.constantFrom('-', ':', '0', '1', '2', 'a') }))
  const unframe = (framed: string): (string | null)[] => {
    const parts: (string | null)[] = []
    for (let at = 0; at < framed.length; ) {
      const colon = framed[at] === '-' ? at : framed.indexOf(':', at)
      const end = colon + 1 + (colon === at ? 0 : Number(framed.slice(at, colon)))
      parts.push(colon === at ? null : framed.slice(colon + 1, end))
      at = end
    }
    return parts
  }
  fc.assert(
    fc.property(fc.array(part), (parts) => JSON.stringify(unframe(frame(parts))) === JSON.stringify(parts)),
    { numRuns: 300 },
  )
})

t.test('two requests share an id exactly when caller and key are equal', async () => {
  const text = fc.string({ unit: fc.constantFrom('a', 'b', ':', '1', '-', ' '), maxLength: 4 })
  const who = fc.record({ caller: fc.array(fc.option(text), { maxLength: 3 }), key: text })
  fc.assert(
    fc.property(who, who, (a, b) => (id(a) === id(b)) === (JSON.stringify(a) === JSON.stringify(b))),
    { numRuns: 300 },
  )
})

t.test('K22 an id reveals neither its key nor its caller', async (t) => {
  const text = id({ caller: ['Bearer s3cret'], key: 'order-4711' })
  for (const form of [text, Buffer.from(text, 'base64url').toString('latin1')])
    t.notMatch(form, /order|4711|Bearer|s3cret/)
})

t.test('M04 M05 M06 the method counts, and the path as scope.path says', async (t) => {
  for (const [path, isSame, isSameInAnother] of [
    ['exact', false, true],
    ['route', true, false],
    ['none', true, true],
  ] as const) {
    const route = scoped({ path })
    t.equal(id({ route, path: '/o/1' }) === id({ route, path: '/o/2' }), isSame, path)
    t.equal(id({ route }) === id({ route: scoped({ path }, 'another') }), isSameInAnother, path)
    t.not(id({ route, method: 'POST' }), id({ route, method: 'PATCH' }), 'the method always counts')
  }
  t.not(id({ path: '/o/1' }), id({ path: '/o/2' }), 'M06 by default')
  const ids = (['exact', 'route', 'none'] as const).map((path) => id({ route: scoped({ path }, PATH) }))
  t.ok(areDistinct(ids), 'each has ids of its own')
})

t.test('V01 another service or secret has another record for the same caller, path and key', async (t) => {
  const [one, two] = [Buffer.from('one'), Buffer.from('two')]
  const asked: Asked[] = [
    [{}, { service: 'orders' }, { service: 'Orders' }, { secret: one }, { secret: two }],
    { service: 'orders', secret: one },
  ].flat()
  t.ok(areDistinct(asked.map(id)))
  t.strictSame(asked.map(id), asked.map(id))
})

t.test('V03 with scope.host another host is another record; without it the host is ignored', async (t) => {
  const route = scoped({ host: true })
  t.ok(areDistinct([...['a.test', 'b.test', null].map((host) => id({ route, host })), id()]))
  t.equal(id({ host: 'a.test' }), id({ host: 'b.test' }))
  for (const line of ['API.test', 'api.test.', 'api.test:80', 'api.test.:443', ' api.test ', 'api.test:'])
    t.equal(normaliseHost(line), 'api.test', line)
  for (const [line, host] of [
    ['api.test:8080', 'api.test:8080'],
    ['[::1]:80', '[::1]'],
    ['[::80]', '[::80]'],
    ...[null, '', ' ', '.'].map((none) => [none, null] as const),
  ] as const)
    t.equal(normaliseHost(line), host)
})

t.test('a claim of the verified token identifies the caller, by value and type', async (t) => {
  const scope = explicit({ kind: 'jwt', name: 'sub' })
  const parts = (claims: Claims | null): unknown => readCaller([], scope, claims)
  const values = ['a', 'A', '1', 1, 0, -1, 'true', true, false, 'null', '\ud800', '\ud801', '\ufffd', 'a ']
  const ids = values.map((sub) => {
    const reading = readCaller([], scope, { sub, iss: 'x' })
    return reading.kind === 'caller' ? id({ caller: reading.parts }) : 'missing'
  })
  t.ok(areDistinct(ids))
  t.notOk(ids.includes('missing'))
  t.same(parts({ sub: 'a' }), parts({ sub: 'a', exp: 1 }), 'other claims do not count')
  t.same(parts({ sub: -0 }), parts({ sub: 0 }))
  const joined = explicit(
    { kind: 'jwt', name: 'iss' },
    { kind: 'header', name: 'x-a' },
    { kind: 'jwt', name: 'sub' },
  )
  const both = { sub: 's', iss: 'i' }
  t.same(readCaller(['X-A', 'h'], joined, both), { kind: 'caller', parts: ['"i"', 'h', '"s"'] })
  t.same(readCaller([], joined, both), { kind: 'caller', parts: ['"i"', null, '"s"'] })
})

t.test('a claim that is absent, empty or of another type is refused', async (t) => {
  for (const anonymous of ['share', 'reject'] as const) {
    const scope = { ...explicit({ kind: 'header', name: 'x-a' }, { kind: 'jwt', name: 'sub' }), anonymous }
    const claims: Claims[] = [null, undefined, ['a'], { a: 1 }, '', ' ', 1.5, Number.NaN, 2 ** 53].map(
      (sub) => ({ sub }),
    )
    for (const claim of [...claims, {}, { Sub: 'a' }, JSON.parse('{"__proto__":{"sub":"a"}}') as Claims])
      t.match(
        readCaller(['X-A', 's3cret'], scope, claim),
        { kind: 'missing', status: 401, detail: /claim sub/ },
        JSON.stringify(claim),
      )
  }
  const inherited = explicit({ kind: 'jwt', name: 'constructor' })
  t.match(readCaller([], inherited, {}), { kind: 'missing', status: 401 })
  t.notMatch(JSON.stringify(readCaller([], inherited, { constructor: ['s3cret'] })), /s3cret/)
})

t.test('a request without a token is shared or refused as scope.anonymous says', async (t) => {
  const scope = explicit({ kind: 'jwt', name: 'sub' })
  t.same(readCaller(['Cookie', 'a=b'], scope, null), { kind: 'caller', parts: [null] })
  const refused = { kind: 'missing', status: 401, detail: /jwt sub is missing/ }
  t.match(readCaller([], { ...scope, anonymous: 'reject' }, null), refused)
  t.same(readCaller(['Authorization', 'a'], SCOPE, { sub: 'b' }), { kind: 'caller', parts: ['a'] })
})

t.test('a bucket of new keys is named by service, route and caller and reveals none of them', async (t) => {
  const bucket = (name: string, who: string | null, secret: Buffer | null = null, service = 'default') =>
    newKeysBucket({ service, secret }, { name }, [who])
  const buckets = [
    [bucket('a', 'b'), bucket('a', 'c'), bucket('b', 'b'), bucket('a', null)],
    [bucket('a', 'b', Buffer.from('secret')), bucket('a', 'b', null, 'other')],
  ].flat()
  t.ok(areDistinct(buckets))
  for (const name of buckets) t.match(name, /^[A-Za-z0-9_-]{43}$/)
  t.equal(bucket('a', 'b'), buckets[0])
})

t.test('Hmac computes HMAC-SHA-256 for keys and messages of any length', async (t) => {
  for (const length of [0, 1, 63, 64, 65, 200]) {
    const key = Buffer.alloc(length, 0xa5)
    t.same(new Hmac(key).of(key), createHmac('sha256', key).update(key).digest(), `${length} bytes`)
  }
  const bytes = (maxLength: number) => fc.uint8Array({ maxLength }).map((array) => Buffer.from(array))
  fc.assert(
    fc.property(bytes(200), bytes(500), bytes(40), (key, message, another) => {
      const hmac = new Hmac(key)
      for (const one of [message, another, message])
        t.same(hmac.of(one), createHmac('sha256', key).update(one).digest())
    }),
  )
})

void t.test(
  '§15.3 an answer that sets the cookie of its caller to another value changes the caller',
  async (t) => {
    const cookie: CallerSource = { kind: 'cookie', name: 'session' }
    const sent = ['Cookie', 'theme=dark; session=a=1', 'cookie', 'other=b']
    const rows: [sets: string[], changes: boolean][] = [
      [[], false],
      [['session=b; Path=/; HttpOnly'], true],
      [['session=a=1; Max-Age=60'], false],
      [['session=; Max-Age=0'], true],
      [[' session = b'], true],
      [['theme=light'], false],
      [['Session=b'], false],
      [['sessions=b', 'x=1; session=b'], false],
      [['theme=light', 'session=b'], true],
      [['session'], false],
    ]
    for (const [sets, changes] of rows) {
      const answer = sets.flatMap((line) => ['Set-Cookie', line])
      t.equal(changesCaller(explicit(cookie), sent, answer), changes, sets.join(' | '))
    }
    const set = ['set-cookie', 'session=b']
    t.equal(changesCaller(explicit(cookie), [], set), true, 'a session begins')
    t.equal(changesCaller(explicit({ kind: 'header', name: 'session' }), sent, set), false)
    t.equal(changesCaller(explicit({ kind: 'header', name: 'x-user' }, cookie), sent, set), true)
  },
)

void t.test('a certificate identifies its caller by the attribute that the scope names', async (t) => {
  const certificate = { 'san-uri': 'spiffe://a/pay', 'san-dns': null, subject: 'CN=pay', fingerprint: 'ab' }
  const reading = (source: CallerSource, given: typeof certificate | null = certificate) =>
    readCallerOf({ headers: [], certificate: given }, { ...explicit(source), anonymous: 'reject' }, null)
  for (const name of ['san-uri', 'subject', 'fingerprint'] as const)
    t.same(reading({ kind: 'tls', name }), { kind: 'caller', parts: [certificate[name]] })
  const missing = { kind: 'missing', status: 401, detail: /tls san-dns is missing/ }
  t.match(reading({ kind: 'tls', name: 'san-dns' }), missing)
  t.match(reading({ kind: 'tls', name: 'san-uri' }, null), { kind: 'missing', status: 401 })
})
