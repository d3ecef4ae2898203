import { hash } from 'node:crypto'
import t from 'tap'
import {
  differencesBetween,
  type Identifying,
  identificationOf,
  keysUnder,
} from '../../src/core/identification.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { route } from '../protect/harness.ts'

const { key, scope, match } = route()
const DEFAULTS = route({ name: 'default', match: { ...match, methods: ['POST', 'PATCH'], path: '/*' } })
const JWT = { jwks: 'https://a', keyFile: null, issuer: 'a', audience: ['x', 'y'] }
const CLAIM = { ...scope, caller: [{ kind: 'jwt', name: 'sub' }] as const, jwt: JWT }
const DERIVE = { json: ['/a'], form: [], headers: [], path: false, bucket: null }
const SECRET = Buffer.from('correct horse battery staple')

/** A route at that path. */
function at(path: string, over: Partial<RoutePolicy> = {}, more: Partial<RoutePolicy['match']> = {}) {
  const name = path.replace(/\W/g, '') || 'all'
  return route({ name, ...over, match: { ...match, path, ...more } })
}

function config(routes: readonly RoutePolicy[] = [at('/pay')], over: Partial<Identifying> = {}): Identifying {
  return {
    routes,
    defaults: DEFAULTS,
    unmatched: 'protect',
    trustProxy: [],
    store: { secret: null },
    issuer: null,
    ...over,
  }
}

const NOBODY = { scope: { ...scope, caller: [] } }
const keyed = (over: Partial<RoutePolicy['key']>) => ({ key: { ...key, ...over } })
const scoped = (over: Partial<RoutePolicy['scope']>) => ({ scope: { ...scope, ...over } })
const issued = keyed({ issuedOnly: true })
/** One route, `pay`. */
const pay = (
  over: Partial<RoutePolicy>,
  more: Partial<RoutePolicy['match']> = {},
  rest: Partial<Identifying> = {},
) => config([at('/pay', over, more)], rest)
const token = (over: Partial<typeof JWT>) => ({ scope: { ...CLAIM, jwt: { ...JWT, ...over } } })
const header = (name: string) => ({ kind: 'header', name }) as const
const query = { kind: 'query', name: 'k' } as const
const json = (pointer: string) => ({ kind: 'json', pointer }) as const
const HOST = scoped({ host: true })
const BY_ROUTE = scoped({ path: 'route' })
const FOLDED = { case: 'insensitive' } as const
const ANY = { trustProxy: ['10.0.0.0/8'] }
const [SEALED, RESEALED] = [SECRET, Buffer.alloc(32)].map((secret) => ({ store: { secret } }))
const [ISSUER, REISSUER] = [SECRET, Buffer.alloc(32)].map((secret) => ({ issuer: { secret } }))

/** The second finds other records than the first; in what they differ. */
// biome-ignore format: a table
const DIFFERENT: readonly (readonly [string, Identifying, Identifying, string])[] = [
  ['the key source', config(), pay(keyed({ from: [query] })), 'routes[pay].key'],
  ['a pointer', pay(keyed({ from: [json('/a')] })), pay(keyed({ from: [json('/b')] })), 'routes[pay].key'],
  ['a derived key', config(), pay(keyed({ derive: DERIVE })), 'routes[pay].key'],
  ['the caller', config(), pay(NOBODY), 'routes[pay].scope'],
  ['the order of a caller', pay(scoped({ caller: [header('a'), header('b')] })),
    pay(scoped({ caller: [header('b'), header('a')] })), 'routes[pay].scope'],
  ['who may have no caller', config(), pay(scoped({ anonymous: 'reject' })), 'routes[pay].scope'],
  ['the issuer of a token', pay({ scope: CLAIM }), pay(token({ issuer: 'b' })), 'routes[pay].scope'],
  ['the path of the scope', config(), pay(scoped({ path: 'none' })), 'routes[pay].scope'],
  ['the host', config(), pay(HOST), 'routes[pay].scope'],
  ['whose host counts', pay(HOST), pay(HOST, {}, ANY), 'routes[pay].scope'],
  ['the name of a route that is the scope', pay(BY_ROUTE), pay({ ...BY_ROUTE, name: 'bill' }),
    'routes[pay], routes[bill]'],
  ['letter case', config(), pay({}, FOLDED), 'routes[pay].match'],
  ['parameters', config(), pay({}, { parameters: 'strip' }), 'routes[pay].match'],
  ['the normal form', config(), pay({}, { exact: true }), 'routes[pay].match'],
  ['a method that nothing protected', config(), pay({}, { methods: ['POST', 'PUT'] }), 'routes[pay].match'],
  ['the path of a route', pay(NOBODY), pay(NOBODY, { path: '/paid' }), 'routes[pay].match'],
  ['whether keys are read', config(), pay(keyed({ presence: 'ignored' })), 'routes[pay].match'],
  ['a mode that protects nothing', config(), pay({ mode: 'off' }), 'routes[pay].match'],
  ['what matches no route', config(), pay({}, {}, { unmatched: 'pass' }), 'unmatched'],
  ['what is refused', pay({}, {}, { unmatched: 'reject' }), pay({}, {}, { unmatched: 'pass' }), 'unmatched'],
  ['the order of routes that overlap', config([at('/pay/:id', NOBODY), at('/pay/*')]),
    config([at('/pay/*'), at('/pay/:id', NOBODY)]), 'the order of routes'],
  ['the secret of record ids', config(), pay({}, {}, SEALED), 'store.secretFile'],
  ['another secret', pay({}, {}, SEALED), pay({}, {}, RESEALED), 'store.secretFile'],
  ['the secret of issued keys', pay(issued, {}, ISSUER), pay(issued, {}, REISSUER), 'issuer.secretFile'],
]

void t.test('Y20 what finds another record has another digest, and is named', async (t) => {
  for (const [what, one, other, named] of DIFFERENT) {
    const [a, b] = [identificationOf(one), identificationOf(other)]
    t.notOk(a.digest.equals(b.digest), what)
    t.equal(a.digest.length, 32)
    t.equal(differencesBetween(a.parts, b.parts).join(', '), named, what)
  }
})

/** Both find the same records. */
// biome-ignore format: a table
const ALIKE: readonly (readonly [string, Identifying, Identifying])[] = [
  ['a route like those that match nothing else', config(), config([])],
  ['one that repeats another', config([at('/pay/*', NOBODY)]),
    config([at('/pay/:id', NOBODY), at('/pay/*', NOBODY)])],
  ['one that an earlier one answers', config([at('/pay/*', NOBODY)]),
    config([at('/pay/*', NOBODY), at('/pay/:id')])],
  ['one in other letters that an earlier one answers', config([at('/pay/*', NOBODY, FOLDED)]),
    config([at('/pay/*', NOBODY, FOLDED), at('/Pay/:id')])],
  ['one without records where nothing has any', config([], { unmatched: 'pass' }),
    config([at('/a', { mode: 'off' })], { unmatched: 'pass' })],
  ['a name', pay(NOBODY), pay({ ...NOBODY, name: 'bill' })],
  ['the name of a parameter', config([at('/pay/:id', NOBODY)]), config([at('/pay/:payment', NOBODY)])],
  ['the order of routes that do not overlap', config([at('/a', NOBODY), at('/b', NOBODY), at('/c/*', HOST)]),
    config([at('/c/*', HOST), at('/b', NOBODY), at('/a', NOBODY)])],
  ['the order of sources and audiences', pay({ ...keyed({ from: [query, header('h')] }), scope: CLAIM }),
    pay({ ...keyed({ from: [header('h'), query] }), ...token({ audience: ['y', 'x'] }) })],
  ['the keys that verify tokens', pay({ scope: CLAIM }), pay(token({ jwks: 'https://b' }))],
  ['what is compared, and for how long', config(),
    pay({ ttl: 1, fingerprint: { ...route().fingerprint, query: 'ignore' }, mode: 'shadow' })],
  ['what keys may look like', config(), pay(keyed({ minLength: 20, syntax: 'strict', presence: 'optional' }))],
  ['callers of a route that identifies none', pay(NOBODY), pay(scoped({ caller: [], anonymous: 'reject' }))],
  ['an issuer whose keys are not required', pay({}, {}, ISSUER), config()],
  ['proxies whose host does not count', pay({}, {}, ANY), config()],
]

void t.test('Y20 what finds the same record has the same digest, however it is written', async (t) => {
  for (const [what, one, other] of ALIKE)
    t.ok(identificationOf(one).digest.equals(identificationOf(other).digest), what)
})

void t.test('Y20 a digest is the same in every release, or the format changes', async (t) => {
  t.equal(
    identificationOf(config([at('/pay', NOBODY)])).digest.toString('hex'),
    'a359f304f47aca3cc5db9bbeca0d14c887210d96f658d2d48010dcdf0d32fb46',
  )
})

void t.test(
  'Y20 neither digests nor parts reveal a secret, or can be compared with guesses cheaply',
  async (t) => {
    const { digest, parts } = identificationOf(
      config([at('/pay', issued)], { store: { secret: SECRET }, issuer: { secret: SECRET } }),
    )
    const text = JSON.stringify([digest.toString('base64url'), parts])
    for (const encoding of ['utf8', 'base64url', 'hex'] as const)
      t.notOk(text.includes(SECRET.toString(encoding)))
    t.notOk(text.includes(hash('sha256', SECRET, 'base64url').slice(0, 6)), 'stretched')
  },
)

void t.test('Y20 the keys that a difference concerns', async (t) => {
  t.equal(keysUnder(['routes[pay].key', 'routes[pay].scope', 'routes[a.b]']), 'keys of pay, a.b')
  t.equal(keysUnder(['routes[pay].key', 'defaults.scope']), 'keys of pay, default')
  t.equal(keysUnder(['routes[pay].key', 'store.secretFile']), 'all keys')
  t.equal(keysUnder(['the order of routes']), 'all keys')
  t.same(differencesBetween({ a: ['x'] }, { a: [] }), ['a'], 'by another release')
})
