import { createHmac } from 'node:crypto'
import fc from 'fast-check'
import t from 'tap'
import {
  type Claims,
  frame,
  Hmac,
  hmacOf,
  newKeysBucket,
  normaliseHost,
  readCaller as readCallerOf,
  recordId,
} from '../../src/core/identity.ts'
import type { CallerSource, RoutePolicy, ScopePolicy } from '../../src/core/policy.ts'
import { ROUTE, SCOPE } from './fixtures.ts'

const KEY = 'key-1'
const PATH = '/v1/payments'

/** … of a request without a token. */
const readCaller = (headers: readonly string[], scope: ScopePolicy, claims: Claims | null = null) =>
  readCallerOf(headers, scope, claims)

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

t.test('a record id is a SHA-256 in base64url, the same for the same request', async (t) => {
  t.match(id(), /^[A-Za-z0-9_-]{43}$/)
  t.equal(id(), id())
})

t.test('S01 two callers with the same key have two records', async (t) => {
  t.not(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf(['Authorization', 'Bearer t2'], SCOPE))
  t.equal(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf(['authorization', 'Bearer t1', 'X', 'y'], SCOPE))
  t.not(idOf(['Authorization', 'Bearer t1'], SCOPE), idOf([], SCOPE), 'an anonymous caller is another one')
})

t.test('S03 anonymous callers share one bucket, or are refused', async (t) => {
  t.equal(idOf([], SCOPE), idOf(['Authorization', ''], SCOPE), 'an empty header counts as missing')
  for (const headers of [
    [],
    ['Authorization', ''],
    ['Authorization', '', 'Authorization', ''],
    ['Authorization', ' '],
  ]) {
    t.match(readCaller(headers, { ...SCOPE, anonymous: 'reject' }), { kind: 'missing', status: 401 })
    t.equal(idOf(headers, SCOPE), idOf([], SCOPE))
  }
  t.match(readCaller(['Authorization', 'x'], { ...SCOPE, anonymous: 'reject' }), { kind: 'caller' })
})

t.test('S03 without scope.caller, a request that has only another credential is refused', async (t) => {
  for (const name of ['Cookie', 'X-API-Key', 'api-key', 'COOKIE', 'api_key', 'X_Api_Key']) {
    for (const anonymous of ['share', 'reject'] as const) {
      const scope = { ...SCOPE, anonymous }
      t.match(readCaller([name, 's=1'], scope), { kind: 'missing', status: 400 }, name)
      t.match(readCaller([name, '', name, 's=1'], scope), { kind: 'missing', status: 400 })
      t.match(readCaller(['Authorization', '', name, 's=1'], scope), { kind: 'missing', status: 400 })
      t.equal(readCaller(['Authorization', 'a', name, 's=1'], scope).kind, 'caller')
    }
    t.equal(readCaller([name, ''], SCOPE).kind, 'caller', 'an empty one identifies nobody')
    t.equal(
      readCaller([name, 's=1'], { ...SCOPE, callerIsDefault: false }).kind,
      'caller',
      'the same scope, set explicitly',
    )
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
  t.match(readCaller([], { ...SCOPE, anonymous: 'reject' }), { status: 401, cause: null })
})

t.test('a refusal names the missing attribute and shows no credential', async (t) => {
  const scope = {
    ...explicit({ kind: 'header', name: 'x-tenant' }, { kind: 'cookie', name: 'sid' }),
    anonymous: 'reject' as const,
  }
  const reading = readCaller(['X-Tenant', 's3cret'], scope)
  t.match(reading, { kind: 'missing', status: 401, detail: /cookie sid/ })
  t.notMatch(JSON.stringify(reading), /s3cret|x-tenant/)
  t.notMatch(JSON.stringify(readCaller(['Cookie', 's3cret=s3cret'], SCOPE)), /s3cret/)
})

t.test('several attributes never run together', async (t) => {
  const scope = explicit({ kind: 'header', name: 'x-a' }, { kind: 'header', name: 'x-b' })
  const ids = [
    idOf(['X-A', '1', 'X-B', '2'], scope),
    idOf(['X-A', '12'], scope),
    idOf(['X-B', '12'], scope),
    idOf(['X-A', '2', 'X-B', '1'], scope),
    idOf([], scope),
    idOf(['X-A', '1'], scope),
    idOf(['X-A', '1', 'X-B', '-'], scope),
  ]
  t.equal(new Set(ids).size, ids.length)
})

t.test('repeated lines of a caller header are joined in the order received', async (t) => {
  const scope = explicit({ kind: 'header', name: 'x-a' })
  const ids = [
    idOf(['X-A', '1', 'X-A', '2'], scope),
    idOf(['X-A', '2', 'X-A', '1'], scope),
    idOf(['X-A', '1'], scope),
    idOf(['X-A', '12'], scope),
    idOf([], scope),
  ]
  t.equal(new Set(ids).size, ids.length)
  t.equal(ids[0], idOf(['x-a', '1', 'Other', '3', 'X-a', '2'], scope))
})

t.test('a cookie identifies a caller by its value alone', async (t) => {
  const scope = explicit({ kind: 'cookie', name: 'sid' })
  const one = idOf(['Cookie', 'sid=1'], scope)
  for (const line of [
    ...['a=b; sid=1', 'sid=1; a=b', 'a=b;sid=1;c=d', ' sid=1 ', 'xsid=9; sid=1', 'sid =1', 'sid= 1'],
    'sid; sid=1',
  ])
    t.equal(idOf(['Cookie', line], scope), one, line)
  t.equal(idOf(['Cookie', 'a=b', 'Cookie', 'sid=1'], scope), one, 'on any line')
  for (const line of ['sid=2', 'sid=1; sid=2', 'sid=2; sid=1', 'sid=1=', 'sid="1"'])
    t.not(idOf(['Cookie', line], scope), one, line)
  for (const line of ['', 'SID=1', 'xsid=1', 'sid', 'sidx', 'sid=', 'sid=; sid=', 'a=sid=1', '=sid'])
    t.equal(idOf(['Cookie', line], scope), idOf([], scope), `${line}: missing`)
  t.match(readCaller(['Cookie', 'sid='], { ...scope, anonymous: 'reject' }), { kind: 'missing', status: 401 })
})

t.test('scope.caller none makes all callers the same', async (t) => {
  const scope = { ...explicit(), anonymous: 'reject' as const }
  t.equal(idOf(['Authorization', 'a'], scope), idOf(['Cookie', 'b=c'], scope))
})

t.test('caller a with key bc is not caller ab with key c', async (t) => {
  t.not(id({ caller: ['a'], key: 'bc' }), id({ caller: ['ab'], key: 'c' }))
  t.not(id({ caller: ['a', 'b'], key: 'c' }), id({ caller: ['ab'], key: 'c' }))
  t.not(id({ caller: [], key: 'c' }), id({ caller: [null], key: 'c' }))
  t.not(id({ caller: [''], key: 'c' }), id({ caller: [null], key: 'c' }))
  t.not(id({ caller: ['1:a'], key: 'c' }), id({ caller: ['a'], key: '1:c' }))
  t.not(id({ caller: ['a'], method: 'POST', key: 'c' }), id({ caller: ['a4:POST'], method: '', key: 'c' }))
})

t.test('framing is reversible: different parts never read the same', async () => {
  const part = fc.oneof(fc.constant(null), fc.string({ unit: fc.constantFrom('-', ':', '0', '1', '2', 'a') }))
  const unframe = (framed: string): (string | null)[] => {
    const parts: (string | null)[] = []
    for (let at = 0; at < framed.length; ) {
      if (framed[at] === '-') {
        parts.push(null)
        at++
      } else {
        const colon = framed.indexOf(':', at)
        const end = colon + 1 + Number(framed.slice(at, colon))
        parts.push(framed.slice(colon + 1, end))
        at = end
      }
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

t.test('K21 keys that differ in letter case are different records', async (t) => {
  t.not(id({ key: 'abc' }), id({ key: 'ABC' }))
})

t.test('K22 an id reveals neither its key nor its caller', async (t) => {
  const key = 'order-4711'
  const caller = 'Bearer s3cret'
  const text = id({ caller: [caller], key })
  for (const form of [text, Buffer.from(text, 'base64url').toString('latin1')])
    t.notMatch(form, /order|4711|Bearer|s3cret/)
})

t.test('M04 one key on two paths is two records under scope.path exact and one under none', async (t) => {
  const exact = scoped({ path: 'exact' })
  t.not(id({ route: exact, path: '/a' }), id({ route: exact, path: '/b' }))
  const none = scoped({ path: 'none' })
  t.equal(id({ route: none, path: '/a' }), id({ route: none, path: '/b' }))
  t.equal(id({ route: none, path: '/a' }), id({ route: scoped({ path: 'none' }, 'another'), path: '/b' }))
})

t.test('M05 the method is part of the scope, whatever scope.path is', async (t) => {
  for (const path of ['exact', 'route', 'none'] as const) {
    const route = scoped({ path })
    t.not(id({ route, method: 'POST' }), id({ route, method: 'PATCH' }))
  }
})

t.test('M06 two paths of one route are never the same record by default', async (t) => {
  t.not(id({ path: '/o/1' }), id({ path: '/o/2' }))
  const byRoute = scoped({ path: 'route' })
  t.equal(
    id({ route: byRoute, path: '/o/1' }),
    id({ route: byRoute, path: '/o/2' }),
    'unless the route says so',
  )
  t.not(id({ route: byRoute }), id({ route: scoped({ path: 'route' }, 'another') }))
})

t.test('the three values of scope.path give three different ids', async (t) => {
  const name = PATH
  const ids = (['exact', 'route', 'none'] as const).map((path) =>
    id({ route: scoped({ path }, name), path: PATH }),
  )
  t.equal(new Set(ids).size, 3)
})

t.test('V01 another service has another record for the same caller, path and key', async (t) => {
  const secret = Buffer.from('secret')
  const ids = [
    id(),
    id({ service: 'orders' }),
    id({ service: 'Orders' }),
    id({ secret }),
    id({ service: 'orders', secret }),
  ]
  t.equal(new Set(ids).size, ids.length)
  t.equal(ids[1], id({ service: 'orders' }))
})

t.test('V03 with scope.host another host is another record; without it the host is ignored', async (t) => {
  const route = scoped({ host: true })
  const ids = ['a.test', 'b.test', null].map((host) => id({ route, host }))
  t.equal(new Set([...ids, id()]).size, 4)
  t.equal(id({ host: 'a.test' }), id({ host: 'b.test' }))
  for (const line of ['API.test', 'api.test.', 'api.test:80', 'api.test.:443', ' api.test ', 'api.test:'])
    t.equal(normaliseHost(line), 'api.test', line)
  t.equal(normaliseHost('api.test:8080'), 'api.test:8080')
  t.equal(normaliseHost('[::1]:80'), '[::1]')
  t.equal(normaliseHost('[::80]'), '[::80]')
  for (const none of [null, '', ' ', '.']) t.equal(normaliseHost(none), null)
})

t.test('a secret changes every id, and another secret changes it again', async (t) => {
  const ids = [id(), id({ secret: Buffer.from('one') }), id({ secret: Buffer.from('two') })]
  t.equal(new Set(ids).size, 3)
  t.match(ids[1], /^[A-Za-z0-9_-]{43}$/)
  t.equal(ids[1], id({ secret: Buffer.from('one') }))
})

t.test('record ids stay the same across versions', async (t) => {
  const caller = ['Bearer t1', null]
  t.equal(id({ caller }), 'b8lKZMz3OAQCZ6lGbV95xw_2s2YREu3YYX8QqMLQ7i4')
  t.equal(id({ caller, secret: Buffer.from('secret') }), 'SYhOYonNX6UDQuKIm8HY4HvtbyCZC_lo6jGMnq5Ak5w')
})

t.test('events from two sources with the same id are two records', async (t) => {
  const ids = [
    id(),
    id({ qualifier: ['ce-source', null] }),
    id({ qualifier: ['ce-source', ''] }),
    id({ qualifier: ['ce-source', '/a'] }),
    id({ qualifier: ['ce-source', '/b'] }),
    id({ key: 'key-19:ce-source', qualifier: ['/a'] }),
    id({ key: 'key-1-', qualifier: ['ce-source'] }),
  ]
  t.equal(new Set(ids).size, ids.length)
  t.equal(ids[3], id({ qualifier: ['ce-source', '/a'] }))
})

t.test('a claim of the verified token identifies the caller', async (t) => {
  const scope = explicit({ kind: 'jwt', name: 'sub' })
  const parts = (claims: Claims | null): unknown => readCaller([], scope, claims)
  const values = ['a', 'A', '1', 1, 0, -1, 'true', true, false, 'null', '\ud800', '\ud801', '\ufffd', 'a ']
  const ids = values.map((sub) => {
    const reading = readCaller([], scope, { sub, iss: 'x' })
    return reading.kind === 'caller' ? id({ caller: reading.parts }) : 'missing'
  })
  t.equal(new Set(ids).size, values.length, 'by value and type')
  t.notOk(ids.includes('missing'))
  t.same(parts({ sub: 'a' }), parts({ sub: 'a', exp: 1 }), 'other claims do not count')
  t.same(parts({ sub: -0 }), parts({ sub: 0 }))
})

t.test('a claim that is absent, empty or of another type is refused', async (t) => {
  for (const anonymous of ['share', 'reject'] as const) {
    const scope = { ...explicit({ kind: 'header', name: 'x-a' }, { kind: 'jwt', name: 'sub' }), anonymous }
    const claims = [null, undefined, ['a'], { a: 1 }, '', ' ', 1.5, Number.NaN, 2 ** 53].map((sub) => ({
      sub,
    }))
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
  t.match(readCaller([], { ...scope, anonymous: 'reject' }, null), {
    kind: 'missing',
    status: 401,
    detail: /jwt sub is missing/,
  })
  t.same(readCaller(['Authorization', 'a'], SCOPE, { sub: 'b' }), { kind: 'caller', parts: ['a'] })
})

t.test('claims are joined with other attributes', async (t) => {
  const scope = explicit(
    { kind: 'jwt', name: 'iss' },
    { kind: 'header', name: 'x-a' },
    { kind: 'jwt', name: 'sub' },
  )
  t.same(readCaller(['X-A', 'h'], scope, { sub: 's', iss: 'i' }), {
    kind: 'caller',
    parts: ['"i"', 'h', '"s"'],
  })
  t.same(readCaller([], scope, { sub: 's', iss: 'i' }), { kind: 'caller', parts: ['"i"', null, '"s"'] })
})

t.test('a bucket of new keys is named by service, route and caller and reveals none of them', async (t) => {
  const bucket = (
    name: string,
    caller: readonly (string | null)[],
    secret: Buffer | null = null,
    service = 'default',
  ): string => newKeysBucket({ service, secret }, { name }, caller)
  const buckets = [
    bucket('a', ['b']),
    bucket('a', ['c']),
    bucket('b', ['b']),
    bucket('a', [null]),
    bucket('a', ['b'], Buffer.from('secret')),
    bucket('a', ['b'], null, 'other'),
  ]
  t.equal(new Set(buckets).size, buckets.length)
  for (const name of buckets) t.match(name, /^[A-Za-z0-9_-]{43}$/)
  t.equal(bucket('a', ['b']), buckets[0])
})

t.test('repeated header lines are joined by commas, repeated cookies by semicolons', async (t) => {
  const parts = (headers: readonly string[], source: CallerSource): unknown => {
    const reading = readCaller(headers, explicit(source))
    return reading.kind === 'caller' ? reading.parts : reading
  }
  t.same(parts(['X-Tenant', 'a', 'x-tenant', 'b'], { kind: 'header', name: 'x-tenant' }), ['a, b'])
  t.same(parts(['Cookie', 'sid=a; sid=b', 'Cookie', 'sid=c'], { kind: 'cookie', name: 'sid' }), ['a; b; c'])
  t.same(parts(['Cookie', '; sid=a; ;sid'], { kind: 'cookie', name: 'sid' }), ['a'], 'empty ones are skipped')
})

t.test('a host in the scope cannot pass for a method', async (t) => {
  const route = scoped({ host: true })
  const ids = [id({ route, host: 'a' }), id({ route, host: null }), id({ host: 'a' }), id({ method: 'host' })]
  t.equal(new Set(ids).size, 4)
  t.equal(
    id({ route, host: 'api.example.com' }),
    'AQ311639srwEC-hoTkB85CJF9Tf47zvO3AD0kOsgndA',
    'ids with a host stay the same too',
  )
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

t.test('hmacOf keeps one instance for each secret', async (t) => {
  const secret = Buffer.from('a secret of sixteen')
  t.equal(hmacOf(secret), hmacOf(secret))
  t.not(hmacOf(secret), hmacOf(Buffer.from(secret)))
})
