import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import {
  covers,
  isProtected,
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
import { KEY, routeOf, words } from './fixtures.ts'

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
  const puts = [
    routeOf('/o'),
    { ...routeOf('/o'), name: 'puts', match: { methods: ['PUT'], path: '/o', exact: false } },
  ]
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
  const route = (path: string, exact: boolean) => ({ methods: ['POST'], path, exact })
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
