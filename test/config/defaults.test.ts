import t from 'tap'
import { fileSchema } from '../../src/config/schema.ts'
import { policySchema, routeSchema } from '../../src/config/schema-policy.ts'
import { load, routeFile, UPSTREAM } from './support.ts'

const SECOND = 1000
const HOUR = 3600 * SECOND
const DAY = 24 * HOUR
const MiB = 1024 ** 2

void t.test('every default of the property table (contract §10)', async (t) => {
  const { warnings: _, ...config } = load(routeFile())
  const policy = {
    mode: 'enforce',
    profile: 'standard',
    key: {
      presence: 'optional',
      from: ['idempotency-key'],
      syntax: 'lenient',
      minLength: 1,
      maxLength: 255,
      pattern: null,
      forward: 'same',
      forwardFence: false,
    },
    scope: {
      caller: [{ kind: 'header', name: 'authorization' }],
      callerIsDefault: true,
      path: 'exact',
      anonymous: 'share',
    },
    fingerprint: { body: 'auto', ignore: [], only: [], headers: [], query: 'include' },
    inFlightStatus: 409,
    misuseStatus: 422,
    lease: 30 * SECOND,
    ttl: 24 * HOUR,
    ttlFailed: 24 * HOUR,
    tombstone: 0,
    unresolvedTtl: 30 * DAY,
    respondWithin: null,
    outcomes: { exact: new Map(), class: new Map() },
    onLeaseExpired: 'unknown',
    onStoreUnavailable: 'reject',
    keep: 'response',
    excludeHeaders: new Set(),
    statusHeader: false,
    limits: { request: 1 * MiB, response: 5 * MiB },
  }
  t.strictSame(config, {
    listen: { host: '127.0.0.1', port: 8080 },
    admin: { listen: { host: '127.0.0.1', port: 9464 }, token: null },
    ops: { listen: null },
    readiness: { store: false },
    upstream: {
      url: 'http://127.0.0.1:3000',
      connectTimeout: 2 * SECOND,
      timeout: 60 * SECOND,
      idleTimeout: 60 * SECOND,
      connections: 128,
      tls: { ca: null, cert: null, key: null, servername: null },
    },
    store: { url: 'sqlite:./idempotency.db', timeout: 500, secret: null, acceptRisk: false },
    limits: { request: 1 * MiB, response: 5 * MiB, buffered: 64 * MiB, inFlight: 2000, upload: 30 * SECOND },
    problems: { baseUrl: 'urn:idempotency-proxy:' },
    drain: { delay: 0, timeout: 65 * SECOND },
    log: { level: 'info', format: 'auto' },
    trustProxy: [],
    unmatched: 'protect',
    defaults: { name: 'default', match: { methods: ['POST', 'PATCH'], path: '/*', exact: false }, ...policy },
    routes: [{ name: 'a', match: { methods: ['POST', 'PATCH'], path: '/a', exact: false }, ...policy }],
  })
})

void t.test('defaults that follow another value', async (t) => {
  const config = load(
    'upstream: { url: http://a, timeout: 10s }\ndefaults: { ttl: 2d }\nlimits: { request: 2MiB }\n',
  )
  t.equal(config.drain.timeout, 15 * SECOND, 'drain.timeout is upstream.timeout + 5s')
  t.equal(config.defaults.ttlFailed, 2 * DAY, 'ttlFailed is ttl')
  t.strictSame(
    config.defaults.limits,
    { request: 2 * MiB, response: 5 * MiB },
    'limits of a route are those at the top',
  )
})

void t.test(
  '`key: required` is short for `key: { presence: required }`, likewise `inFlight: reject`',
  async (t) => {
    for (const presence of ['required', 'optional', 'ignored']) {
      t.strictSame(
        load(routeFile(`key: ${presence}`)).routes,
        load(routeFile(`key: { presence: ${presence} }`)).routes,
      )
    }
    t.strictSame(
      load(routeFile('inFlight: reject')).routes,
      load(routeFile('inFlight: { mode: reject }')).routes,
    )
  },
)

void t.test('a route inherits, property by property, what it does not set', async (t) => {
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
    key: { presence: 'required', minLength: 5, maxLength: 40, from: ['c'] },
    scope: { caller: [{ kind: 'cookie', name: 'sid' }], callerIsDefault: false, path: 'none' },
    ttl: 2 * DAY,
  })
  t.strictSame(routes[0]?.excludeHeaders, new Set(['set-cookie']))
  t.match(routes[1], { key: { presence: 'optional', maxLength: 40 } })
  t.strictSame(routes[1]?.excludeHeaders, new Set())
  t.match(defaults, { name: 'default', key: { presence: 'required', from: ['a', 'b'] } })
})

void t.test('route, else defaults, else the profile in force, else the built-in value', async (t) => {
  const { routes, defaults } = load(`${UPSTREAM}
defaults: { profile: strict, tombstone: 1d, scope: { caller: "header:authorization" } }
routes:
  - { name: inherits, match: { path: /a } }
  - { name: own-profile, match: { path: /b }, profile: lenient }
  - { name: own-values, match: { path: /c }, profile: lenient, tombstone: off, onLeaseExpired: unknown, key: { minLength: 3 } }
`)
  t.match(defaults, {
    profile: 'strict',
    tombstone: DAY,
    key: { minLength: 16 },
    scope: { anonymous: 'reject' },
  })
  t.match(routes[0], { profile: 'strict', tombstone: DAY, key: { minLength: 16 }, onLeaseExpired: 'unknown' })
  t.match(routes[1], { profile: 'lenient', tombstone: DAY, key: { minLength: 1 }, onLeaseExpired: 'retry' })
  t.match(routes[2], {
    tombstone: 0,
    key: { minLength: 3 },
    onLeaseExpired: 'unknown',
    onStoreUnavailable: 'bypass',
  })
})

void t.test(
  '`ignore` and `only` replace each other, and a body that is not read as JSON has neither',
  async (t) => {
    const { routes } = load(`${UPSTREAM}
defaults: { fingerprint: { ignore: [/sentAt], headers: [x-version] } }
routes:
  - { name: a, match: { path: /a } }
  - { name: b, match: { path: /b }, fingerprint: { only: [/amount] } }
  - { name: c, match: { path: /c }, fingerprint: { body: raw } }
`)
    t.match(routes[0]?.fingerprint, { ignore: ['/sentAt'], only: [] })
    t.strictSame(routes[1]?.fingerprint, {
      body: 'auto',
      ignore: [],
      only: ['/amount'],
      headers: ['x-version'],
      query: 'include',
    })
    t.strictSame(routes[2]?.fingerprint.ignore, [])
  },
)

void t.test(
  'names of headers are read in lower case, those of cookies as they are; the whole key must match a pattern',
  async (t) => {
    const [route] = load(
      routeFile(
        'key: { from: ["header:X-Key"], pattern: "[0-9]+|x", forward: PayPal-Request-Id }',
        'scope: { caller: ["header:X-User", "cookie:Sid"] }',
        'replay: { excludeHeaders: [Set-Cookie] }',
      ),
    ).routes
    t.match(route, {
      key: { from: ['x-key'], forward: { header: 'PayPal-Request-Id' } },
      scope: { caller: [{ name: 'x-user' }, { name: 'Sid' }] },
    })
    t.ok(route?.excludeHeaders.has('set-cookie'))
    for (const [key, fits] of [
      ['12', true],
      ['x', true],
      ['12a', false],
      ['a12', false],
      ['xx', false],
    ] as const) {
      t.equal(route?.key.pattern?.test(key), fits, key)
    }
  },
)

void t.test(
  'every property of the schema says what it is for, and `defaults` takes what a route takes from `profile` on',
  async (t) => {
    const { name: _n, match: _m, ...shared } = routeSchema.properties
    t.strictSame(Object.keys(shared), Object.keys(policySchema.properties))
    const visit = (path: string, shape: { description?: string; properties?: object }): void => {
      if (shape.properties === undefined) t.type(shape.description, 'string', path)
      for (const [name, property] of Object.entries(shape.properties ?? {}))
        visit(`${path}.${name}`, property)
    }
    visit('', fileSchema)
  },
)
