import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { parseTarget, policyNamed, Router, type Target } from '../../src/core/route.ts'
import { routeOf } from './fixtures.ts'

/** The name of the matching route; names are the configured paths. */
function taken(routes: readonly RoutePolicy[], target: string, method = 'POST'): string | null {
  const router = new Router(routes)
  return router.match(method, parseTarget(target) as Target)?.name ?? null
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
  const spellings = [
    '/v1/payments/',
    '//v1//payments',
    '/v1/./payments',
    '/v1/x/../payments',
    '/v1/%2e/payments',
    '/x/%2E%2e/v1/payments',
    '/%761/pa%79ments',
    '/v1/payments?a=b',
    '/v1/payments?',
    'http://elsewhere.example/v1/payments',
  ]
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
