import t from 'tap'
import { scopeOf } from '../../src/core/chain.ts'
import { Digests } from '../../src/core/fingerprint.ts'
import { hmacOf } from '../../src/core/identity.ts'
import { routeCovers, routesOverlap } from '../../src/core/route.ts'
import { differingParts, isOpaque, partsOf, selectingLines } from '../../src/core/selecting.ts'
import { FINGERPRINT, matching, ROUTE, request } from './fixtures.ts'

t.test('selecting lines count by name in any case, whatever their order among the others', async (t) => {
  const one = selectingLines(['X-User', 'a', 'Accept', '*/*', 'X-Tenant', '1', 'x-user', 'b'])
  t.equal(selectingLines(['X-TENANT', '1', 'X-User', 'a', 'x-user', 'b']), one)
  t.not(
    selectingLines(['X-Tenant', '1', 'X-User', 'b', 'x-user', 'a']),
    one,
    'lines of one name keep their order',
  )
  for (const headers of [[], ['Accept', 'x-user'], ['X-Userid', 'a'], ['X-Use', 'a']])
    t.equal(selectingLines(headers), '')
})

t.test('the parts of an operation say what differs, and hold no value', async (t) => {
  const key = hmacOf(Buffer.alloc(32, 7))
  const usual = partsOf('', 'application/json', ['Accept', '*/*'], [], null)
  t.equal(usual, undefined, 'nothing is stored for the usual request')
  const secret = partsOf('q=1', 'text/plain', ['X-Tenant', 'acme', 'X-Shop', 'b'], ['x-shop'], key) ?? ''
  t.notMatch(secret, /acme|q=1|plain/)
  t.not(secret, partsOf('q=1', 'text/plain', ['X-Tenant', 'acme', 'X-Shop', 'b'], ['x-shop'], null), 'keyed')
  t.strictSame(differingParts(secret, usual), ['query', 'media type', 'x-shop', 'x-tenant'])
  t.strictSame(differingParts(secret, secret), ['body'])
  const unselected = partsOf('q=1', 'application/json', ['X-Tenant', 'a'], null, null)
  t.strictSame(differingParts(unselected, partsOf('q=1', 'application/json', [], null, null)), ['body'])
})

t.test(
  'the parts say whether the coding of a body could not be undone, which is no difference',
  async (t) => {
    const of = (opaque: boolean, query = '') => partsOf(query, 'application/json', [], [], null, opaque)
    t.strictSame(
      [isOpaque(of(true)), isOpaque(of(true, 'q')), isOpaque(of(false, 'q')), isOpaque(of(false))],
      [true, true, false, false],
    )
    t.strictSame(differingParts(of(true), of(false)), ['body'])
    t.strictSame(differingParts(of(true, 'q'), of(false)), ['query'])
  },
)

t.test('the boundary of a multipart body is no part of its operation', async (t) => {
  const parts = (boundary: string) => {
    const headers = ['Content-Type', `multipart/form-data; boundary=${boundary}`]
    const asked = request('', { headers })
    return new Digests(asked, asked.body, FINGERPRINT, null).parts
  }
  t.equal(parts('a'), parts('b'))
})

t.test('F20 a record from before selecting headers counted is compared under a key, too', async (t) => {
  const asked = request('{"a":1}')
  const [plain, keyed] = [null, Buffer.alloc(32, 1)].map(
    (key) => new Digests(asked, asked.body, FINGERPRINT, key),
  ) as [Digests, Digests]
  const former = plain.recipe.replace(',@', '')
  t.same(keyed.fingerprintUnder(former), plain.fingerprint)
  t.equal(keyed.fingerprintUnder('another'), null)
})

t.test('bodies that are not compared were not compared as bytes', async (t) => {
  const asked = request('{"a":1', { headers: ['Content-Type', 'application/json', 'Content-Encoding', 'x'] })
  const compares = (body: 'none' | 'auto' | 'raw') =>
    new Digests(asked, asked.body, { ...FINGERPRINT, body }, null).comparesBytes
  t.strictSame([compares('none'), compares('auto'), compares('raw')], [false, true, true])
})

t.test('a route covers another only if it folds at least as much, or compares no literal', async (t) => {
  const sensitive = matching(['POST'], '/a/*')
  const folded = { ...sensitive, case: 'insensitive', parameters: 'strip' } as const
  t.ok(routeCovers(folded, sensitive))
  t.notOk(routeCovers(sensitive, folded))
  t.notOk(routeCovers(sensitive, { ...sensitive, parameters: 'strip' }))
  t.ok(routeCovers(matching(['POST'], '/*'), folded))
  t.ok(routeCovers({ ...folded, path: '/A/:x' }, matching(['POST'], '/a/b;v=1')))
  t.ok(routesOverlap(folded, matching(['POST'], '/A/b')))
  t.ok(routesOverlap(matching(['POST'], '/A/b'), folded))
  t.notOk(routesOverlap(sensitive, matching(['POST'], '/A/b')))
  t.ok(routesOverlap(sensitive, matching(['POST'], '/A/b', true)), 'an exact path may be anything')
})

t.test('proxies in a row that fold paths differently do not recognise each other’s retries', async (t) => {
  const scope = (match: object) => scopeOf({ ...ROUTE, match: { ...ROUTE.match, ...match } })
  const plain = scope({})
  t.equal(scope({ exact: true, case: 'insensitive' }), scope({ exact: true }))
  const all = [plain, scope({ case: 'insensitive' }), scope({ parameters: 'strip' })]
  t.equal(new Set(all).size, all.length)
})
