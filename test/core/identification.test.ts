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
const DERIVE = { json: ['/a'], form: [], headers: [], bucket: null }
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

/** Each finds other records than the one before the arrow, and says in what they differ. */
const DIFFERENT: readonly (readonly [string, Identifying, Identifying, string])[] = [
  [
    'the key source',
    config(),
    config([at('/pay', keyed({ from: [{ kind: 'query', name: 'k' }] }))]),
    'routes[pay].key',
  ],
  [
    'a pointer',
    config([at('/pay', keyed({ from: [{ kind: 'json', pointer: '/a' }] }))]),
    config([at('/pay', keyed({ from: [{ kind: 'json', pointer: '/b' }] }))]),
    'routes[pay].key',
  ],
  ['a derived key', config(), config([at('/pay', keyed({ derive: DERIVE }))]), 'routes[pay].key'],
  ['the caller', config(), config([at('/pay', NOBODY)]), 'routes[pay].scope'],
  [
    'the order of a caller',
    config([
      at(
        '/pay',
        scoped({
          caller: [
            { kind: 'header', name: 'a' },
            { kind: 'header', name: 'b' },
          ],
        }),
      ),
    ]),
    config([
      at(
        '/pay',
        scoped({
          caller: [
            { kind: 'header', name: 'b' },
            { kind: 'header', name: 'a' },
          ],
        }),
      ),
    ]),
    'routes[pay].scope',
  ],
  [
    'who may have no caller',
    config(),
    config([at('/pay', scoped({ anonymous: 'reject' }))]),
    'routes[pay].scope',
  ],
  [
    'the issuer of a token',
    config([at('/pay', { scope: CLAIM })]),
    config([at('/pay', { scope: { ...CLAIM, jwt: { ...JWT, issuer: 'b' } } })]),
    'routes[pay].scope',
  ],
  ['the path of the scope', config(), config([at('/pay', scoped({ path: 'none' }))]), 'routes[pay].scope'],
  ['the host', config(), config([at('/pay', scoped({ host: true }))]), 'routes[pay].scope'],
  [
    'whose host counts',
    config([at('/pay', scoped({ host: true }))]),
    config([at('/pay', scoped({ host: true }))], { trustProxy: ['10.0.0.0/8'] }),
    'routes[pay].scope',
  ],
  [
    'the name of a route that is the scope',
    config([at('/pay', scoped({ path: 'route' }))]),
    config([at('/pay', { ...scoped({ path: 'route' }), name: 'bill' })]),
    'routes[pay], routes[bill]',
  ],
  ['letter case', config(), config([at('/pay', {}, { case: 'insensitive' })]), 'routes[pay].match'],
  ['parameters', config(), config([at('/pay', {}, { parameters: 'strip' })]), 'routes[pay].match'],
  ['the normal form', config(), config([at('/pay', {}, { exact: true })]), 'routes[pay].match'],
  [
    'a method that nothing protected',
    config(),
    config([at('/pay', {}, { methods: ['POST', 'PUT'] })]),
    'routes[pay].match',
  ],
  [
    'the path of a route',
    config([at('/pay', NOBODY)]),
    config([at('/pay', NOBODY, { path: '/paid' })]),
    'routes[pay].match',
  ],
  [
    'whether keys are read',
    config(),
    config([at('/pay', keyed({ presence: 'ignored' }))]),
    'routes[pay].match',
  ],
  ['a mode that protects nothing', config(), config([at('/pay', { mode: 'off' })]), 'routes[pay].match'],
  ['what matches no route', config(), config([at('/pay')], { unmatched: 'pass' }), 'unmatched'],
  [
    'what is refused',
    config([at('/pay')], { unmatched: 'reject' }),
    config([at('/pay')], { unmatched: 'pass' }),
    'unmatched',
  ],
  [
    'the order of routes that overlap',
    config([at('/pay/:id', NOBODY), at('/pay/*')]),
    config([at('/pay/*'), at('/pay/:id', NOBODY)]),
    'the order of routes',
  ],
  [
    'the secret of record ids',
    config(),
    config([at('/pay')], { store: { secret: SECRET } }),
    'store.secretFile',
  ],
  [
    'another secret',
    config([at('/pay')], { store: { secret: SECRET } }),
    config([at('/pay')], { store: { secret: Buffer.alloc(32) } }),
    'store.secretFile',
  ],
  [
    'the secret of issued keys',
    config([at('/pay', issued)], { issuer: { secret: SECRET } }),
    config([at('/pay', issued)], { issuer: { secret: Buffer.alloc(32) } }),
    'issuer.secretFile',
  ],
]

void t.test('Y20 what finds another record has another digest, and is named', async (t) => {
  for (const [what, one, other, named] of DIFFERENT) {
    const [a, b] = [identificationOf(one), identificationOf(other)]
    t.notOk(a.digest.equals(b.digest), what)
    t.equal(a.digest.length, 32)
    t.equal(differencesBetween(a.parts, b.parts).join(', '), named, what)
  }
})

/** Each finds the same records. */
const ALIKE: readonly (readonly [string, Identifying, Identifying])[] = [
  ['a route like those that match nothing else', config(), config([])],
  [
    'one that repeats another',
    config([at('/pay/*', NOBODY)]),
    config([at('/pay/:id', NOBODY), at('/pay/*', NOBODY)]),
  ],
  [
    'one that an earlier one answers',
    config([at('/pay/*', NOBODY)]),
    config([at('/pay/*', NOBODY), at('/pay/:id')]),
  ],
  [
    'one in other letters that an earlier one answers',
    config([at('/pay/*', NOBODY, { case: 'insensitive' })]),
    config([at('/pay/*', NOBODY, { case: 'insensitive' }), at('/Pay/:id')]),
  ],
  [
    'one without records where nothing has any',
    config([], { unmatched: 'pass' }),
    config([at('/a', { mode: 'off' })], { unmatched: 'pass' }),
  ],
  ['a name', config([at('/pay', NOBODY)]), config([at('/pay', { ...NOBODY, name: 'bill' })])],
  ['the name of a parameter', config([at('/pay/:id', NOBODY)]), config([at('/pay/:payment', NOBODY)])],
  [
    'the order of routes that do not overlap',
    config([at('/a', NOBODY), at('/b', NOBODY), at('/c/*', scoped({ host: true }))]),
    config([at('/c/*', scoped({ host: true })), at('/b', NOBODY), at('/a', NOBODY)]),
  ],
  [
    'the order of sources and audiences',
    config([
      at('/pay', {
        ...keyed({
          from: [
            { kind: 'query', name: 'k' },
            { kind: 'header', name: 'h' },
          ],
        }),
        scope: CLAIM,
      }),
    ]),
    config([
      at('/pay', {
        ...keyed({
          from: [
            { kind: 'header', name: 'h' },
            { kind: 'query', name: 'k' },
          ],
        }),
        scope: { ...CLAIM, jwt: { ...JWT, audience: ['y', 'x'] } },
      }),
    ]),
  ],
  [
    'the keys that verify tokens',
    config([at('/pay', { scope: CLAIM })]),
    config([at('/pay', { scope: { ...CLAIM, jwt: { ...JWT, jwks: 'https://b' } } })]),
  ],
  [
    'what is compared, and for how long',
    config(),
    config([
      at('/pay', { ttl: 1, fingerprint: { ...route().fingerprint, query: 'ignore' }, mode: 'shadow' }),
    ]),
  ],
  [
    'what keys may look like',
    config(),
    config([at('/pay', keyed({ minLength: 20, syntax: 'strict', presence: 'optional' }))]),
  ],
  [
    'callers of a route that identifies none',
    config([at('/pay', NOBODY)]),
    config([at('/pay', scoped({ caller: [], anonymous: 'reject' }))]),
  ],
  ['an issuer whose keys are not required', config([at('/pay')], { issuer: { secret: SECRET } }), config()],
  ['proxies whose host does not count', config([at('/pay')], { trustProxy: ['10.0.0.0/8'] }), config()],
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
