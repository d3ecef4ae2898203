import fc from 'fast-check'
import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import {
  covers,
  isProtected,
  normalisePath,
  overlaps,
  parseTarget,
  pathParameters,
  pathPattern,
  policiesOf,
  policyNamed,
  type RequestTarget,
  Router,
  readsKeys,
  routeCovers,
  WELL_KNOWN,
} from '../../src/core/route.ts'
import { KEY, matching, routeOf, words } from './fixtures.ts'

/** The name of the matching route; names are the configured paths. */
function taken(routes: readonly RoutePolicy[], target: string, method = 'POST'): string | null {
  const router = new Router(routes)
  return router.match(method, parseTarget(target) as RequestTarget)?.name ?? null
}

function table(
  t: Pick<typeof t0, 'equal'>,
  path: string,
  yes: readonly string[],
  no: readonly string[],
  exact = false,
): void {
  const routes = [routeOf(path, { exact })]
  for (const target of yes) t.equal(taken(routes, target), path, `${path} matches ${target}`)
  for (const target of no) t.equal(taken(routes, target), null, `${path} does not match ${target}`)
}
const t0 = t

t.test('a literal path matches that path alone', async (t) => {
  table(
    t,
    '/v1/payments',
    ['/v1/payments'],
    ['/v1', '/v1/payments/1', '/v1/paymentsx', '/V1/payments', '/', '/v1%2Fpayments'],
  )
})

t.test('F21 matching is not fooled by another spelling of the path', async (t) => {
  const spellings = words`
    /v1/payments/ //v1//payments /v1/./payments /v1/x/../payments /v1/%2e/payments /x/%2E%2e/v1/payments
    /%761/pa%79ments /v1/payments?a=b /v1/payments? http://elsewhere.example/v1/payments`
  table(t, '/v1/payments', spellings, [])
  table(t, '/~user', ['/%7Euser', '/%7euser', '/~user/'], ['/%257Euser'])
})

t.test('F21 the configured path may be spelled in any way too', async (t) => {
  table(t, '/%7Euser/', ['/~user', '/%7Euser'], [])
  table(t, '/a%2fb', ['/a%2Fb', '/a%2fb'], ['/a/b'])
})

t.test('%2F stays data', async (t) => {
  table(t, '/files/:name', ['/files/a%2Fb', '/files/a%2fb', '/files/%2F'], ['/files/a/b'])
})

t.test('a :name segment matches exactly one non-empty segment', async (t) => {
  table(
    t,
    '/o/:id/pay',
    ['/o/1/pay', '/o/:id/pay', '/o/a%20b/pay', '/o/.../pay'],
    ['/o//pay', '/o/pay', '/o/1/2/pay', '/o/1', '/o/./pay', '/o/1/pay/x'],
  )
  table(t, '/o/:id', ['/o/1', '/o/1/'], ['/o', '/o/', '/o//', '/o/1/2'])
})

t.test('a trailing /* matches only paths below the slash', async (t) => {
  table(
    t,
    '/hooks/*',
    ['/hooks/a', '/hooks/a/b', '/hooks//a', '/x/../hooks/a'],
    ['/hooks', '/hooks/', '/hooksa', '/hook/s', '/'],
  )
  table(t, '/t/:tenant/*', ['/t/1/a', '/t/1/a/b'], ['/t/1', '/t/1/', '/t'])
  table(t, '/*', ['/', '/a', '/a/b', '//', '/../..'], [])
})

t.test('the root is a path like any other', async (t) => {
  table(t, '/', ['/', '//', '/.', '/a/..', 'http://host', '/?a'], ['/a'])
})

t.test('match.exact compares the path as sent', async (t) => {
  table(
    t,
    '/v1/payments',
    ['/v1/payments', '/v1/payments?x'],
    ['/v1/payments/', '/v1//payments', '/v1/./payments', '/v1/p%61yments'],
    true,
  )
  table(t, '/v1/payments/', ['/v1/payments/'], ['/v1/payments', '/v1/payments//'], true)
  table(t, '/%7Euser', ['/%7Euser'], ['/~user', '/%7euser'], true)
  table(t, '/o/:id', ['/o/1', '/o/..', '/o/%2e'], ['/o/', '/o', '/o/1/'], true)
  table(t, '/hooks/*', ['/hooks/a', '/hooks/a/', '/hooks//', '/hooks/'], ['/hooks', '/hooksa'], true)
  table(t, '/a//b', ['/a//b'], ['/a/b'], true)
  table(t, '/', ['/'], ['//', '/a'], true)
  table(t, '/*', ['/', '//', '/a', '/..'], [], true)
})

t.test('the first route that matches wins', async (t) => {
  const routes = [routeOf('/o/special'), routeOf('/o/:id'), routeOf('/o/*'), routeOf('/*')]
  t.equal(taken(routes, '/o/special'), '/o/special')
  t.equal(taken(routes, '/o/1'), '/o/:id')
  t.equal(taken(routes, '/o/1/2'), '/o/*')
  t.equal(taken(routes, '/x'), '/*')
  t.equal(taken([...routes].reverse(), '/o/special'), '/*')
})

t.test('M03 only the configured methods match: POST and PATCH by default', async (t) => {
  const usual = [routeOf('/o')]
  for (const method of ['POST', 'PATCH']) t.equal(taken(usual, '/o', method), '/o')
  for (const method of ['GET', 'HEAD', 'OPTIONS', 'PUT', 'DELETE', 'post'])
    t.equal(taken(usual, '/o', method), null)
  const puts = [routeOf('/o'), { ...routeOf('/o'), name: 'puts', match: matching(['PUT'], '/o') }]
  t.equal(taken(puts, '/o', 'PUT'), 'puts')
  t.equal(taken(puts, '/o', 'POST'), '/o')
})

t.test('nothing matches without routes', async (t) => {
  t.equal(taken([], '/'), null)
})

t.test('policyNamed finds a policy by the route name in its records', async (t) => {
  const named = {
    routes: [routeOf('/a'), { ...routeOf('/b'), name: 'b' }],
    defaults: { ...routeOf('/*'), name: 'default' },
  }
  t.equal(policyNamed(named, 'b'), named.routes[1])
  t.equal(policyNamed(named, 'default'), named.defaults)
  t.equal(policyNamed(named, 'gone'), null)
})

t.test('pathParameters reads a path as its route does: exactly, or in one spelling', async (t) => {
  const of = (path: string, actual: string, exact: boolean) => [...pathParameters({ path, exact }, actual)]
  t.same(of('//a/:id', '/a/1', false), [['id', '1']])
  t.same(of('//a/:id', '//a/1', true), [['id', '1']])
  t.same(of('/a:b/c', '/a:b/c', true), [], 'a colon within a segment is data')
})

t.test('what clients are told about keys is at its registered place (RFC 8615)', async (t) => {
  t.equal(WELL_KNOWN, '/.well-known/idempotency')
})

/** Pairs of routes: whether the first covers the second, the second the first, and whether a path matches both. */
const PAIRS: readonly (readonly [
  a: string,
  b: string,
  aCoversB: boolean,
  bCoversA: boolean,
  overlap: boolean,
])[] = [
  ['/a', '/a', true, true, true],
  ['/a', '/b', false, false, false],
  ['/a', '/a/b', false, false, false],
  ['/a/b', '/a/c', false, false, false],
  ['/a/b', '/c/b', false, false, false],
  ['/:x', '/a', true, false, true],
  ['/:x', '/:y', true, true, true],
  ['/a/:x', '/:x/b', false, false, true],
  ['/a/:x', '/b/:x', false, false, false],
  ['/a/:x', '/:y/:z', false, true, true],
  ['/a/*', '/a', false, false, false],
  ['/a/*', '/a/b', true, false, true],
  ['/a/*', '/a/:x', true, false, true],
  ['/a/*', '/a/b/c', true, false, true],
  ['/a/*', '/a/*', true, true, true],
  ['/a/*', '/a/b/*', true, false, true],
  ['/a/*', '/b/*', false, false, false],
  ['/a/*', '/b/c', false, false, false],
  ['/:x/*', '/a/b', true, false, true],
  ['/:x/*', '/a/*', true, false, true],
  ['/a/:x/*', '/a/*', false, true, true],
  ['/a/b/*', '/:x/b', false, false, false],
  ['/a/b/*', '/:x/b/*', false, true, true],
  ['/*', '/', true, false, true],
  ['/*', '/a', true, false, true],
  ['/*', '/a/*', true, false, true],
  ['/*', '/*', true, true, true],
  ['/', '/a', false, false, false],
  ['/', '/:x', false, false, false],
  ['/', '/', true, true, true],
]

t.test('covers and overlaps tell which routes take each other’s requests', async (t) => {
  for (const [a, b, aCoversB, bCoversA, overlap] of PAIRS) {
    const [one, other] = [pathPattern(a, false), pathPattern(b, false)]
    t.equal(covers(one, other), aCoversB, `${a} covers ${b}`)
    t.equal(covers(other, one), bCoversA, `${b} covers ${a}`)
    t.equal(overlaps(one, other), overlap, `${a} overlaps ${b}`)
    t.equal(overlaps(other, one), overlap, `${b} overlaps ${a}`)
  }
  const empty = pathPattern('/a/', true)
  t.notOk(covers(pathPattern('/a/:x', true), empty), 'a name matches no empty segment')
})

t.test('a route covers only routes that compare paths alike, or more strictly', async (t) => {
  const route = (path: string, exact: boolean) => matching(['POST'], path, exact)
  t.ok(routeCovers(route('/a', false), route('/a', false)))
  t.ok(routeCovers(route('/a', true), route('/a', true)))
  t.ok(routeCovers(route('/a', false), route('/a/', true)), 'it matches every spelling')
  t.notOk(routeCovers(route('/a', true), route('/a', false)), 'it matches one spelling of many')
  t.notOk(routeCovers(route('/a', true), route('/a/', true)), 'it matches another spelling')
})

t.test('policiesOf adds the default policy only if it protects unmatched requests', async (t) => {
  const routes = [routeOf('/a')]
  const defaults = routeOf('/*')
  t.strictSame(policiesOf({ routes, defaults, unmatched: 'protect' }), [...routes, defaults])
  for (const unmatched of ['pass', 'reject'] as const)
    t.strictSame(policiesOf({ routes, defaults, unmatched }), routes)
})

t.test('a route reads keys unless it is off or ignores them, and protects if it enforces', async (t) => {
  for (const [mode, presence, reads, protects] of [
    ['enforce', 'optional', true, true],
    ['enforce', 'required', true, true],
    ['enforce', 'ignored', false, false],
    ['shadow', 'optional', true, false],
    ['shadow', 'ignored', false, false],
    ['off', 'required', false, false],
  ] as const) {
    const route = routeOf('/a', { mode, key: { ...KEY, presence } })
    t.equal(readsKeys(route), reads, `${mode} ${presence}`)
    t.equal(isProtected(route), protects, `${mode} ${presence}`)
  }
})

const NORMAL: readonly (readonly [sent: string, normal: string, why: string])[] = [
  ['/', '/', 'the root'],
  ['//', '/', 'slashes alone'],
  ['/v1/payments', '/v1/payments', 'already normal'],
  ['/v1//payments', '/v1/payments', 'a duplicate slash'],
  ['///v1///payments///', '/v1/payments', 'many slashes'],
  ['/v1/payments/', '/v1/payments', 'a trailing slash'],
  ['/v1/./payments', '/v1/payments', 'a dot segment'],
  ['/v1/x/../payments', '/v1/payments', 'two dots'],
  ['/v1/payments/.', '/v1/payments', 'a dot at the end'],
  ['/v1/payments/x/..', '/v1/payments', 'two dots at the end'],
  ['/../../v1/payments', '/v1/payments', 'more dots than segments'],
  ['/v1/%2e/payments', '/v1/payments', 'an encoded dot'],
  ['/v1/x/%2e%2E/payments', '/v1/payments', 'two encoded dots'],
  ['/v1/x/.%2e/payments', '/v1/payments', 'one dot of two encoded'],
  ['/v1/.../payments', '/v1/.../payments', 'three dots are a name'],
  ['/v1/.well-known', '/v1/.well-known', 'a dot file is a name'],
  ['/v1/..a/.b.', '/v1/..a/.b.', 'dots within a name'],
  ['/%7Euser', '/~user', '%7E for ~'],
  ['/%7euser', '/~user', '%7e for ~'],
  ['/%76%31/p%61yments', '/v1/payments', 'encoded letters and digits'],
  ['/a%2Db%5Fc%2E', '/a-b_c.', 'the other unreserved characters'],
  ['/v1%3Acapture', '/v1:capture', 'a colon needs no encoding in a path'],
  ['/v1%2Fpayments', '/v1%2Fpayments', '%2F stays data'],
  ['/v1%2fpayments', '/v1%2Fpayments', '%2f is written as %2F'],
  ['/a/%2F/..', '/a', 'a segment of %2F is one segment'],
  ['/a%2F..%2Fb', '/a%2F..%2Fb', 'no dot segments within data'],
  ['/a%252Fb', '/a%252Fb', 'nothing is decoded twice'],
  ['/a/%252e%252e/b', '/a/%252e%252e/b', 'nor are dots'],
  ['/a%3Fb%23c', '/a%3Fb%23c', 'encoded ? and # stay data'],
  ['/a%20b', '/a%20b', 'an encoded blank'],
  ['/a\\b', '/a/b', 'a backslash is a slash, as the URL standard reads it'],
  ['/a%5cb', '/a%5Cb', 'an encoded one stays data'],
  ['/caf\xe9', '/caf%E9', 'a byte beyond ASCII'],
  ['/caf%e9', '/caf%E9', 'the same byte, encoded'],
  ['/caf\xc3\xa9', '/caf%C3%A9', 'UTF-8 arrives as bytes'],
  ['/a%00b', '/a%00b', 'NUL stays encoded'],
  ['/a\tb', '/a%09b', 'a control character is encoded in two digits'],
  ['/a%', '/a%25', 'a percent sign alone'],
  ['/a%4', '/a%254', 'half an encoding'],
  ['/a%zz', '/a%25zz', 'no hexadecimal digits'],
  ['/a%%2e', '/a%25.', 'a percent sign before an encoding'],
  ['/a;v=1/b', '/a;v=1/b', 'path parameters stay'],
  ['/V1/Payments', '/V1/Payments', 'letter case counts'],
  ['/a"<>^`{|}', '/a%22%3C%3E%5E%60%7B%7C%7D', 'characters not allowed in a path are encoded'],
]

t.test('F21 paths that a server may take for the same get one spelling', async (t) => {
  for (const [sent, normal, why] of NORMAL) t.equal(normalisePath(sent), normal, `${why}: ${sent}`)
})

t.test('a target is split into its parts, and the upstream gets it as sent', async (t) => {
  const rows: readonly (readonly [string, string, string, string, string])[] = [
    // target, origin, rawPath, path, query
    ['/a', '/a', '/a', '/a', ''],
    ['/a?', '/a?', '/a', '/a', ''],
    ['/a?b=1', '/a?b=1', '/a', '/a', 'b=1'],
    ['/a?b=1?c=/../d', '/a?b=1?c=/../d', '/a', '/a', 'b=1?c=/../d'],
    ['//a/%7E/?b=%7E', '//a/%7E/?b=%7E', '//a/%7E/', '/a/~', 'b=%7E'],
    ['//evil.example/a', '//evil.example/a', '//evil.example/a', '/evil.example/a', ''],
    ['http://host/a?b', '/a?b', '/a', '/a', 'b'],
    ['HTTPS://user@host:8443/a//b', '/a//b', '/a//b', '/a/b', ''],
    ['http://host', '/', '/', '/', ''],
    ['http://host?b', '/?b', '/', '/', 'b'],
    ['http:///a', '/a', '/a', '/a', ''],
  ]
  for (const [target, origin, rawPath, path, query] of rows)
    t.same(parseTarget(target), { origin, rawPath, path, query }, target)
})

t.test('a target that is neither origin form nor an absolute http URI is refused', async (t) => {
  for (const target of [
    words`* /a#f /a?b#f http://host#f host:443 a/b ?a ftp://host/a http:/a javascript:a`,
    ['', ' http://host/a'],
  ].flat())
    t.equal(parseTarget(target), null, JSON.stringify(target))
})

t.test('all spellings of a path give the same normal path', async () => {
  const unreserved = fc.constantFrom(...'abcXYZ019-_~'.split(''))
  const segment = fc.oneof(
    fc.array(unreserved, { minLength: 1, maxLength: 6 }).map((chars) => chars.join('')),
    fc.constantFrom('%2F', '%25', '%5C', '...', '.a', '%C3%A9'),
  )
  const spelling = fc.record({
    encode: fc.infiniteStream(fc.boolean()),
    between: fc.infiniteStream(fc.constantFrom('/', '//', '/./', '/%2e/', '/zz/../', '/zz/%2E./')),
    end: fc.constantFrom('', '/', '//', '/.', '/zz/..'),
  })
  fc.assert(
    fc.property(
      fc.array(segment, { minLength: 1, maxLength: 5 }),
      spelling,
      (segments, { encode, between, end }) => {
        let sent = ''
        for (const part of segments) {
          sent += between.next().value
          const chars = part.match(/%../g) === null ? part.split('') : [part]
          for (const char of chars) {
            const code = char.charCodeAt(0).toString(16)
            sent += encode.next().value === true && char.length === 1 ? `%${code}` : char
          }
        }
        return normalisePath(sent + end) === `/${segments.join('/')}`
      },
    ),
    { numRuns: 300 },
  )
})

t.test('different paths stay different', async (t) => {
  const paths = words`/o/1 /o/2 /o%2F1 /O/1 /o/1%2F /o/1%20 /o/1%00 /o/1%5C /o /o/1/1 /o/%251`
  t.equal(new Set(paths.map(normalisePath)).size, paths.length)
})

t.test('long hostile paths are normalised without an error', async (t) => {
  for (const part of ['/', '/.', '/..', '%', '%2e', '/%2e%2e', '\\', '\xff', 'a', '/a']) {
    t.match(normalisePath(`/${part.repeat(50_000)}`), /^\//)
    t.match(normalisePath(`/${part.repeat(50_000)}?`), /^\//)
  }
})
