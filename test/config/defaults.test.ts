import { readFileSync } from 'node:fs'
import t from 'tap'
import { POLICY, PROPERTIES, ROUTE } from '../../src/config/properties.ts'
import type { PropertyRow } from '../../src/config/rows.ts'
import { ROUTE as CONTRACT } from '../core/fixtures.ts'
import { FILES, load, routeFile, UPSTREAM } from './support.ts'

const SECOND = 1000
const HOUR = 3600 * SECOND
const DAY = 24 * HOUR
const MiB = 1024 ** 2

void t.test('a minimal file has every default of the property table (contract §10)', async (t) => {
  const { warnings: _w, ...config } = load(routeFile())
  const { name: _n, match, ...policy } = CONTRACT
  t.strictSame(config, {
    listen: { address: { host: '127.0.0.1', port: 8080 }, http2: false, tls: null },
    http: 'plain',
    service: 'default',
    admin: {
      listen: { address: { host: '127.0.0.1', port: 9464 }, tls: null },
      tokenFile: null,
      hosts: ['localhost', '127.0.0.1', '[::1]'],
    },
    audit: { file: null },
    ops: { listen: { address: null, tls: null } },
    readiness: { store: false },
    upstream: {
      url: 'http://127.0.0.1:3000',
      http2: false,
      connectTimeout: 2 * SECOND,
      timeout: 60 * SECOND,
      idleTimeout: 60 * SECOND,
      keepAlive: SECOND,
      connections: 128,
      tls: { ca: null, cert: null, key: null, servername: null },
    },
    grpc: { descriptors: null },
    store: {
      url: 'sqlite:./idempotency.db',
      timeout: 500,
      grace: 2000,
      secret: null,
      encryption: { keys: [] },
      compression: 'off',
      migrate: null,
      spool: null,
      wait: null,
      redis: {
        connectTimeout: 2 * SECOND,
        keepAlive: 30 * SECOND,
        noDelay: true,
        family: 0,
        connectionName: 'idempotency-proxy',
        disableClientInfo: false,
        natMap: null,
      },
      acceptRisk: false,
    },
    limits: {
      request: 1 * MiB,
      response: 5 * MiB,
      buffered: 64 * MiB,
      inFlight: 2000,
      waiters: 1000,
      upload: 30 * SECOND,
      responseHead: 64 * 1024,
    },
    issuer: null,
    status: { path: null },
    wellKnown: false,
    cors: null,
    problems: { baseUrl: 'urn:idempotency-proxy:' },
    drain: { delay: 0, timeout: 65 * SECOND },
    metrics: { defaults: true },
    workers: 1,
    log: { level: 'info', format: 'auto' },
    trustProxy: [],
    unmatched: 'protect',
    defaults: { name: 'default', match: { ...match, path: '/*' }, ...policy },
    routes: [{ name: 'a', match: { ...match, path: '/a' }, ...policy }],
  })
})

void t.test('some defaults follow another value', async (t) => {
  const limits = 'limits: { request: 2MiB, newKeys: 5/s }'
  const config = load(`upstream: { url: http://a, timeout: 10s }\ndefaults: { ttl: 2d }\n${limits}\n`)
  t.equal(config.drain.timeout, 15 * SECOND, 'drain.timeout is upstream.timeout + 5s')
  t.equal(config.defaults.ttlFailed, 2 * DAY, 'ttlFailed is ttl')
  t.strictSame(
    config.defaults.limits,
    { request: 2 * MiB, response: 5 * MiB, newKeys: { count: 5, per: SECOND } },
    'the limits of a route default to those at the top',
  )
})

void t.test('`key: required` is short for its presence, and `inFlight: wait` for its mode', async (t) => {
  const routes = (line: string) => load(routeFile(line)).routes
  for (const presence of ['required', 'optional', 'ignored'])
    t.strictSame(routes(`key: ${presence}`), routes(`key: { presence: ${presence} }`))
  for (const mode of ['reject', 'wait'])
    t.strictSame(routes(`inFlight: ${mode}`), routes(`inFlight: { mode: ${mode} }`))
  t.strictSame(routes('inFlight: wait')[0]?.inFlight, { mode: 'wait', wait: 10 * SECOND, status: 409 })
})

void t.test('a route inherits each property that it does not set', async (t) => {
  const { routes, defaults } = load(`${UPSTREAM}
defaults:
  key: { presence: required, maxLength: 40, from: ["header:a", "header:b"] }
  scope: { caller: "cookie:sid" }
  ttl: 2d
  replay: { excludeHeaders: [set-cookie] }
routes:
  - { name: a, match: { path: /a }, key: { minLength: 5, from: ["header:C"] }, scope: { path: none } }
  - { name: b, match: { path: /b }, key: optional, replay: { excludeHeaders: [] } }
`)
  t.match(routes[0], {
    key: { presence: 'required', minLength: 5, maxLength: 40, from: [{ kind: 'header', name: 'c' }] },
    scope: { caller: [{ kind: 'cookie', name: 'sid' }], callerIsDefault: false, path: 'none' },
    ttl: 2 * DAY,
  })
  t.strictSame(routes[0]?.excludeHeaders, new Set(['set-cookie']))
  t.match(routes[1], { key: { presence: 'optional', maxLength: 40 } })
  t.strictSame(routes[1]?.excludeHeaders, new Set())
  t.match(defaults, { name: 'default', key: { presence: 'required', from: [{ name: 'a' }, { name: 'b' }] } })
})

void t.test('a value is of the route, else defaults, else the profile in force, else built in', async (t) => {
  const { routes, defaults } = load(`${UPSTREAM}
defaults: { profile: strict, tombstone: 1d, scope: { caller: "header:authorization" } }
routes:
  - { name: inherits, match: { path: /a } }
  - { name: own-profile, match: { path: /b }, profile: lenient }
  - { name: own-values, match: { path: /c }, profile: lenient, tombstone: off, onLeaseExpired: unknown, key: { minLength: 3 } }
`)
  const strict = { profile: 'strict', tombstone: DAY, key: { minLength: 16 } }
  t.match(defaults, { ...strict, scope: { anonymous: 'reject' } })
  t.match(routes[0], { ...strict, onLeaseExpired: 'unknown' })
  t.match(routes[1], { profile: 'lenient', tombstone: DAY, key: { minLength: 1 }, onLeaseExpired: 'retry' })
  const own = { tombstone: 0, key: { minLength: 3 }, onLeaseExpired: 'unknown' }
  t.match(routes[2], { ...own, onStoreUnavailable: 'bypass' })
})

void t.test('`ignore` and `only` replace each other; a body not read as JSON has neither', async (t) => {
  const { routes } = load(`${UPSTREAM}
defaults: { fingerprint: { ignore: [/sentAt], headers: [x-version] } }
routes:
  - { name: a, match: { path: /a } }
  - { name: b, match: { path: /b }, fingerprint: { only: [/amount] } }
${['raw', 'none', 'form', 'multipart']
  .map((body) => `  - { name: ${body}, match: { path: /${body} }, fingerprint: { body: ${body} } }\n`)
  .join('')}`)
  t.match(routes[0]?.fingerprint, { ignore: ['/sentAt'], only: [] })
  const only = { ...CONTRACT.fingerprint, only: ['/amount'], headers: ['x-version'] }
  t.strictSame(routes[1]?.fingerprint, only)
  for (const { name, fingerprint } of routes.slice(2)) t.strictSame(fingerprint.ignore, [], name)
})

void t.test('`off` or `none` ends what `defaults` turned on; a route may set a part of it', async (t) => {
  const { routes } = load(`${UPSTREAM}
limits: { newKeys: 100/m }
defaults:
  key: { derive: { json: [/id], bucket: 1h } }
  authorizeReplay: { path: /me, cache: 5s }
routes:
  - { name: a, match: { path: /a } }
  - { name: b, match: { path: /b }, key: { derive: { headers: [X-Delivery], bucket: none } }, authorizeReplay: { cache: 0s } }
  - { name: c, match: { path: /c }, key: { derive: off }, authorizeReplay: none, limits: { newKeys: off } }
  - { name: d, match: { path: /d }, limits: { newKeys: 5/s } }
`)
  const derive = { json: ['/id'], form: [], headers: [], path: false, bucket: HOUR }
  const ask = { path: '/me', cache: 5 * SECOND }
  const rate = { count: 100, per: 60 * SECOND }
  t.strictSame(
    routes.map(({ key, authorizeReplay, limits }) => [key.derive, authorizeReplay, limits.newKeys]),
    [
      [derive, ask, rate],
      [{ ...derive, headers: ['x-delivery'], bucket: null }, { ...ask, cache: 0 }, rate],
      [null, null, null],
      [derive, ask, { count: 5, per: SECOND }],
    ],
  )
})

void t.test('`jwks` and `keyFile` replace each other, and a route without a claim has neither', async (t) => {
  const { routes } = load(`${UPSTREAM}
unmatched: pass
defaults: { scope: { jwt: { jwks: "https://id.example.com/jwks", audience: payments } } }
routes:
  - { name: a, match: { path: /a }, scope: { caller: "jwt:sub" } }
  - { name: b, match: { path: /b }, scope: { caller: ["header:X", "jwt:https://b/t:1"], jwt: { keyFile: ${FILES}/public.pem, audience: none } } }
  - { name: c, match: { path: /c } }
`)
  const keyFile = readFileSync(`${FILES}/public.pem`, 'utf8')
  t.strictSame(
    routes.map(({ scope }) => scope.jwt),
    [
      { jwks: 'https://id.example.com/jwks', keyFile: null, issuer: null, audience: ['payments'] },
      { jwks: null, keyFile, issuer: null, audience: [] },
      null,
    ],
  )
  t.strictSame(routes[1]?.scope.caller, [
    { kind: 'header', name: 'x' },
    { kind: 'jwt', name: 'https://b/t:1' },
  ])
})

void t.test('a value in `defaults` that only some routes use is accepted', async (t) => {
  const { routes } = load(`${UPSTREAM}
defaults: { inFlight: { wait: 3s } }
routes:
  - { name: a, match: { path: /a }, inFlight: wait }
  - { name: b, match: { path: /b } }
`)
  t.strictSame(routes[0]?.inFlight, { mode: 'wait', wait: 3 * SECOND, status: 409 })
})

void t.test('the issuer and the status path are read', async (t) => {
  const config = load(`${UPSTREAM}
issuer: { path: /v1/keys, secretFile: ${FILES}/signing-secret }
status: { path: /v1/status }
defaults: { key: { issuedOnly: true, from: ["json:/key", "header:X-Key"] } }
routes:
  - { name: wider, match: { path: /v1/* } }
  - { name: others, match: { methods: [PUT], path: /v1/keys } }
  - { name: post, match: { path: "/v2/:id" } }
`)
  const secret = Buffer.from('0123456789abcdef0123456789abcdef')
  t.strictSame(config.issuer, { path: '/v1/keys', secret, ttl: 24 * HOUR })
  t.strictSame(config.status, { path: '/v1/status' })
  t.match(config.defaults.key, { issuedOnly: true, from: [{ pointer: '/key' }, { name: 'x-key' }] })
  t.equal(load(`${UPSTREAM}status: { path: off }\n`).status.path, null)
})

void t.test('header names become lower case, cookie names stay; a pattern matches a whole key', async (t) => {
  const [route] = load(
    routeFile(
      'key: { from: ["header:X-Key"], pattern: "[0-9]+|x", forward: PayPal-Request-Id }',
      'scope: { caller: ["header:X-User", "cookie:Sid"] }',
      'replay: { excludeHeaders: [Set-Cookie] }',
    ),
  ).routes
  t.match(route, {
    key: { from: [{ kind: 'header', name: 'x-key' }], forward: { header: 'PayPal-Request-Id' } },
    scope: { caller: [{ name: 'x-user' }, { name: 'Sid' }] },
  })
  t.ok(route?.excludeHeaders.has('set-cookie'))
  for (const key of ['12', 'x', '12a', 'a12', 'xx'])
    t.equal(route?.key.pattern?.test(key), ['12', 'x'].includes(key), key)
})

t.test('every property has a help text, and `defaults` has all of a route but name, match', async (t) => {
  const { name: _n, match: _m, ...shared } = ROUTE
  t.strictSame(Object.keys(shared), Object.keys(POLICY))
  const visit = (path: string, row: PropertyRow): void => {
    if (row.group === undefined) t.type(row.help, 'string', path)
    for (const [name, property] of Object.entries(row.group ?? {})) visit(`${path}.${name}`, property)
  }
  visit('', { group: PROPERTIES })
})
