import t from 'tap'
import { profileDefaults } from '../../src/config/load.ts'
import { classify } from '../../src/core/classify.ts'
import type { Action, Profile } from '../../src/core/policy.ts'
import { errorsOf, load, routeFile, UPSTREAM } from './support.ts'

const PROFILES: readonly Profile[] = ['standard', 'strict', 'lenient', 'stripe']
const DAY = 86_400_000

/** Contract §7, row by row: standard, strict, lenient, stripe. */
// biome-ignore format: a table
const TABLE: readonly (readonly [statuses: readonly number[], retryAfter: boolean, ...actions: Action[]])[] = [
  [[200, 201, 204, 299, 301, 302, 303, 304, 400, 402, 404, 410, 418, 422, 423], false,
    'store', 'store', 'store', 'store'],
  [[307, 308, 401, 403, 407, 408, 412, 417, 421, 425, 426, 428, 429, 431], false,
    'release', 'release', 'release', 'release'],
  [[401, 409, 423, 429], true, 'release', 'release', 'release', 'release'],
  [[503], true, 'release', 'unknown', 'release', 'store'],
  [[503], false, 'unknown', 'unknown', 'release', 'store'],
  [[409], false, 'store', 'store', 'store', 'release'],
  [[502, 504], false, 'unknown', 'unknown', 'release', 'store'],
  [[502, 504], true, 'unknown', 'unknown', 'release', 'store'],
  [[500, 501, 505, 507, 599], false, 'store', 'unknown', 'release', 'store'],
]

void t.test('U08 each profile classifies statuses as its table says', async (t) => {
  for (const [column, profile] of PROFILES.entries()) {
    const [route] = load(routeFile(`profile: ${profile}`, 'scope: { caller: "header:authorization" }')).routes
    if (route === undefined) throw new Error('no route')
    for (const [statuses, retryAfter, ...actions] of TABLE)
      for (const status of statuses) {
        const what = `${profile}: ${status}${retryAfter ? ' with Retry-After' : ''}`
        t.equal(classify(route, status, retryAfter), actions[column], what)
      }
  }
})

void t.test('U08 each profile has its other values', async (t) => {
  const rows = [
    ['standard', 'unknown', 'reject', 'share', 1, 0, 422],
    ['strict', 'unknown', 'reject', 'reject', 16, 7 * DAY, 422],
    ['lenient', 'retry', 'bypass', 'share', 1, 0, 422],
    ['stripe', 'unknown', 'reject', 'share', 1, 0, 400],
  ] as const
  for (const [profile, onLeaseExpired, onStoreUnavailable, anonymous, ...numbers] of rows) {
    const [minLength, tombstone, misuseStatus] = numbers
    const values = { onLeaseExpired, onStoreUnavailable, scope: { anonymous }, key: { minLength }, tombstone }
    const { misuse, ...defaults } = profileDefaults(profile)
    t.match({ ...defaults, misuseStatus: misuse.status }, { ...values, misuseStatus })
    const [route] = load(routeFile(`profile: ${profile}`, 'scope: { caller: "header:authorization" }')).routes
    t.match(route, { ...values, misuseStatus })
  }
})

void t.test('a status below 200 is not final, and one above 599 counts as a server error', async (t) => {
  const [route] = load(routeFile()).routes
  if (route === undefined) throw new Error('no route')
  t.equal(classify(route, 101, false), 'unknown')
  t.equal(classify(route, 600, false), 'store')
})

void t.test("U10 a route's own entries come first, exact before class, then the profile's", async (t) => {
  const { routes } = load(`${UPSTREAM}
defaults: { outcomes: { 500: release, "4xx": unknown, 503: store } }
routes:
  - { name: inherits, match: { path: /a } }
  - { name: own, match: { path: /b }, outcomes: { "5xx": unknown, 502: release, 401: store } }
`)
  const actions = (i: number, statuses: readonly number[], retryAfter = false): string => {
    const route = routes[i]
    return statuses.map((status) => route && classify(route, status, retryAfter)).join(' ')
  }
  t.equal(actions(0, [500, 404, 401, 503, 502, 201]), 'release unknown unknown store unknown store')
  t.equal(actions(0, [503], true), 'store', 'an own entry ignores Retry-After')
  t.equal(actions(1, [502, 500, 503, 504, 401, 403]), 'release unknown unknown unknown store unknown')
})

void t.test('§15.13 outcomes as a list: the first that applies, those of the route first', async (t) => {
  const { routes, warnings } = load(`${UPSTREAM}
unmatched: reject
defaults:
  scope: { caller: none }
  outcomes: [{ status: 4xx, outcome: unknown }, { status: 5xx, outcome: release }]
routes:
  - { name: inherits, match: { path: /a } }
  - name: own
    match: { path: /b }
    outcomes:
      - { status: "500", when: { /code: 7, /again: true }, outcome: release }
      - { status: 500, outcome: store }
      - { status: 429, outcome: store }
  - { name: mapped, match: { path: /c }, outcomes: { "4xx": store, 404: release } }
`)
  t.match(routes[0]?.outcomes, [
    { status: 4, when: [], outcome: 'unknown' },
    { status: 5, when: [], outcome: 'release' },
  ])
  const when = [
    { pointer: '/code', value: '7' },
    { pointer: '/again', value: 'true' },
  ]
  t.strictSame(routes[1]?.outcomes, [
    { status: 500, when, outcome: 'release' },
    { status: 500, when: [], outcome: 'store' },
    { status: 429, when: [], outcome: 'store' },
    { status: 4, when: [], outcome: 'unknown' },
    { status: 5, when: [], outcome: 'release' },
  ])
  t.strictSame(
    routes[2]?.outcomes.map(({ status, outcome }) => [status, outcome]),
    [
      [404, 'release'],
      [4, 'store'],
      [5, 'release'],
    ],
    'exact before class; a class of the route hides that of defaults',
  )
  t.match(
    warnings.join('\n'),
    /^Route `own`: outcomes release 500 where \/code is 7 and \/again is true, 5xx, so/m,
  )
})

/** Of a file with one route. */
function warningsOf(lines: string, head = 'unmatched: pass\n'): readonly string[] {
  return load(`${head}${UPSTREAM}routes:\n  - { name: a, match: { path: /a }, ${lines} }\n`).warnings
}

void t.test('§15.4 a key from a form or a query without a configured caller is warned of', async (t) => {
  const warned = (lines: string): string[] =>
    warningsOf(lines, 'unmatched: reject\n').filter((line) => /browsers/.test(line))
  for (const from of ['"form:k"', '"query:k"', 'header:idempotency-key, "form:k"', '"json:/id", "query:k"'])
    t.match(warned(`key: { from: [${from}] }`), [
      /^Route `a`: keys come from forms or links, .*scope\.caller: "cookie:<name>"/,
    ])
  t.equal(warned('mode: shadow, key: { from: ["form:k"] }').length, 1)
  const form = 'key: { from: ["form:k"] }'
  const scoped = ['cookie:session', 'none'].map((caller) => `${form}, scope: { caller: "${caller}" }`)
  const none = ['key: { from: ["json:/id"] }', 'key: { from: ["form:k"], presence: ignored }']
  for (const fine of [...none, ...scoped, `mode: off, ${form}`]) t.strictSame(warned(fine), [], fine)
})

void t.test('L13 a lease too short to renew, or a ttl below upstream.timeout, is refused', async (t) => {
  t.match(
    errorsOf(routeFile('lease: 999ms'))[0],
    'c.yaml:5:12: routes[0].lease: found a lease of 999ms; allowed: at least 1s',
  )
  t.strictSame(errorsOf(routeFile('lease: 1s')), [])
  t.match(errorsOf(`store: { timeout: 2s }\n${routeFile('lease: 2s')}`)[0], 'allowed: at least 3s')
  t.strictSame(errorsOf(`store: { timeout: 2s }\n${routeFile('lease: 3s')}`), [])
  t.match(
    errorsOf(routeFile('ttl: 59s'))[0],
    'c.yaml:5:10: routes[0].ttl: found a ttl of 59s; allowed: at least `upstream.timeout` (60s)',
  )
  t.strictSame(errorsOf(routeFile('ttl: 60s')), [])
})

void t.test('profile strict requires scope.caller, own or of `defaults`, where it protects', async (t) => {
  t.equal(errorsOf(routeFile('profile: strict')).length, 1)
  t.strictSame(errorsOf(routeFile('profile: strict', 'scope: { caller: none }')), [])
  t.strictSame(errorsOf(`defaults: { scope: { caller: "cookie:a" } }\n${routeFile('profile: strict')}`), [])
  t.strictSame(errorsOf(routeFile('profile: strict', 'key: ignored')), [])
  t.strictSame(errorsOf(routeFile('profile: strict', 'mode: off')), [])
  const own = `defaults: { profile: strict }\n${routeFile('scope: { caller: "cookie:a" }')}`
  t.match(errorsOf(own), [/defaults\.profile/], 'requests that match no route are protected under `defaults`')
  t.strictSame(errorsOf(`unmatched: pass\n${own}`), [])
  t.match(errorsOf(`unmatched: pass\ndefaults: { profile: strict }\n${routeFile()}`), [/defaults\.profile/])
})

void t.test('a route is unreachable only behind routes that match everything it matches', async (t) => {
  const reached = (...matches: readonly string[]): boolean => {
    const routes = matches.map((match, i) => `  - { name: r${i}, match: { ${match} } }\n`)
    return errorsOf(`${UPSTREAM}routes:\n${routes.join('')}`).length === 0
  }
  t.notOk(reached('path: /a', 'path: /a'))
  t.notOk(reached('path: /%7Ea/', 'path: /~a'), 'paths are compared in their normal form')
  t.notOk(reached('path: /*', 'path: /'), '/* is everything')
  t.notOk(reached('path: /v1/*', 'path: "/v1/:id/*"'))
  t.notOk(reached('path: "/v1/:a"', 'path: /v1/b, exact: true'))
  t.notOk(reached('path: /a, methods: [POST]', 'path: /a, methods: [PATCH]', 'path: /a'))
  t.ok(reached('path: /a', 'path: /A'))
  t.ok(reached('path: /a, methods: [POST]', 'path: /a'))
  t.ok(reached('path: /a, exact: true', 'path: /a'), 'the later one matches /a/ as well')
  t.ok(reached('path: /a/, exact: true', 'path: /a, exact: true'))
  t.ok(reached('path: /hooks/*', 'path: /hooks'), 'the slash is needed')
  t.ok(reached('path: "/v1/:id"', 'path: /v1/*', 'path: /*'))
  t.ok(reached('path: /v1/a', 'path: "/v1/:id"'))
  // Where other methods reach it, it is warned of: Y08 in test/e2e/edges.test.ts.
})

void t.test('each promise that the file gives up has a warning of one sentence with routes', async (t) => {
  const caller = 'scope: { caller: none }'
  const warnings = warningsOf
  t.strictSame(warnings(caller), [])
  t.match(warnings(`${caller}, profile: lenient`), [/^Route `a`: profile lenient, .*\.$/])
  t.match(warnings(`${caller}, onLeaseExpired: retry`), [/^Route `a`: onLeaseExpired retry, .*\.$/])
  t.match(warnings(`${caller}, onResponseLost: retry`), [/^Route `a`: onResponseLost retry, .*\.$/])
  t.match(warnings(`${caller}, onStoreUnavailable: bypass`), [/^Route `a`: onStoreUnavailable bypass, .*\.$/])
  t.match(warnings(`${caller}, outcomes: { 503: release, "4xx": release, 500: store }`), [
    /^Route `a`: outcomes release 503, 4xx, .*\.$/,
  ])
  t.match(warnings(`${caller}, fingerprint: { body: raw }`), [/^Route `a`: fingerprint.body raw, .*422.*\.$/])
  t.match(warnings('mode: off'), [/^Route `a`: mode off, .*\.$/])
  t.match(warnings('mode: shadow'), [/^Route `a`: mode shadow, .*\.$/], 'nothing else is promised there')
  t.match(warnings(`${caller}, key: { derive: { json: [/id], bucket: 1h } }`), [
    /^Route `a`: key\.derive with a bucket, .*\.$/,
  ])
  t.strictSame(warnings(`${caller}, key: { derive: { json: [/id] } }`), [])
  t.strictSame(warnings('mode: shadow, key: ignored'), [], 'nor where keys are ignored')
  t.match(warnings('mode: enforce'), [
    "Requests without Authorization share one key space, so one client may receive another's response. Set scope.caller, or scope.anonymous: reject.",
  ])
  const released = `${caller}, outcomes: { 400: release }`
  t.match(
    warnings(`${released} }\n  - { name: b, match: { path: /b }, ${released}`),
    ['Routes `a`, `b`: outcomes release 400, so a retry executes again after such an answer.'],
    'equal warnings of several routes are one',
  )
  t.strictSame(
    warnings('scope: { caller: "cookie:sid", anonymous: reject }', ''),
    [
      "Requests that match no route: those without Authorization share one key space, so one client may receive another's response; set `defaults.scope.caller` or `unmatched: reject`.",
    ],
    'the warning is not about the only route',
  )
  t.strictSame(warnings('scope: { caller: none }', 'defaults: { scope: { caller: "cookie:sid" } }\n'), [
    "Requests that match no route: those without cookie:sid share one key space, so one client may receive another's response; set `defaults.scope.anonymous: reject` or `unmatched: reject`.",
  ])
  const rejecting = 'defaults: { scope: { anonymous: reject } }\n'
  t.strictSame(warnings('scope: { caller: "cookie:sid" }', rejecting), [])
  t.match(warnings('scope: { caller: "cookie:sid", anonymous: share }', rejecting), [
    /^Route `a`: requests without cookie:sid share one key space, .*\. Set scope\.anonymous: reject\.$/,
  ])
  t.match(warnings(`${caller} }\n  - { name: b, match: { path: /b }`, ''), [
    /^Route `b` and requests that match no route: requests without Authorization share one key space/,
  ])
  t.match(warnings(caller, 'unmatched: pass\nstore: { url: "memory:" }\n'), [
    /^The store is memory:, so .*\.$/,
  ])
  t.strictSame(warnings(`${caller}, profile: strict`), [])
  const ignored = 'key: ignored, profile: lenient, onLeaseExpired: retry'
  t.strictSame(warnings(ignored), [], 'nothing is promised there')
  t.strictSame(warnings(`${caller}, profile: lenient, onLeaseExpired: unknown`).length, 1)
  const all = warnings('profile: standard', '')
  t.match(all, [/^Requests without Authorization share/], 'one warning for all routes')
  t.strictSame(warnings('scope: { caller: ["header:X-Tenant", "cookie:sid"] }'), [
    "Requests without header:x-tenant or cookie:sid share one key space, so one client may receive another's response. Set scope.anonymous: reject.",
  ])
  t.strictSame(warnings('scope: { caller: ["header:x-tenant"], anonymous: reject }'), [])
  for (const [lines, names] of [
    ['scope: { caller: ["header:DPoP", "header:x-user"], anonymous: reject }', 'scope.caller dpop'],
    ['scope: { caller: "header:x-request-id", anonymous: reject }', 'scope.caller x-request-id'],
    [`${caller}, fingerprint: { headers: [traceparent, x-shop] }`, 'fingerprint.headers traceparent'],
    [`${caller}, key: { derive: { headers: [x-device, date] } }`, 'key.derive.headers date'],
  ] as const)
    t.match(warnings(lines), [`Route \`a\`: ${names}: such headers are new in each request`], lines)
  t.strictSame(warnings('scope: { caller: none }'), [], 'set explicitly')
})

void t.test('reconcile: `after` defaults to upstream.timeout, and a route adds to `defaults`', async (t) => {
  const { routes, defaults, warnings } = load(`upstream: { url: http://127.0.0.1:3000, timeout: 20s }
defaults:
  key: { forwardFence: true }
  reconcile:
    request: { path: "/a/{record}", headers: { Authorization: "Bearer a" } }
    identity: { /record: "{record}" }
    completed: { status: 200, json: /a }
    notFound: { status: 404 }
routes:
  - { name: own, match: { path: /own }, reconcile: { request: { path: "/b?k={key}" }, identity: { /key: "{key}" }, notFound: none, completed: [{ status: 201, when: { /n: 1 } }], pending: { status: 202 }, after: 1m, every: 1s, attempts: 3 } }
  - { name: none, match: { path: /none }, reconcile: none }
  - { name: believed, match: { path: /believed }, reconcile: { identity: none } }
`)
  t.strictSame(defaults.reconcile, {
    request: { method: 'GET', path: '/a/{record}', headers: ['Authorization', 'Bearer a'] },
    identity: [{ pointer: '/record', value: '{record}' }],
    completed: [{ status: 200, when: [], json: '/a', response: { status: null, headers: [] } }],
    notFound: { status: 404, when: [] },
    pending: null,
    after: 20_000,
    every: 5_000,
    attempts: 20,
  })
  const [record, key] = ['record', 'key'].map((name) => ({ pointer: `/${name}`, value: `{${name}}` }))
  const when = [{ pointer: '/n', value: '1' }]
  t.strictSame(routes[0]?.reconcile, {
    request: { method: 'GET', path: '/b?k={key}', headers: ['Authorization', 'Bearer a'] },
    identity: [record, key],
    completed: [{ status: 201, when, json: '', response: { status: null, headers: [] } }],
    notFound: null,
    pending: { status: 202, when: [] },
    after: 60_000,
    every: 1_000,
    attempts: 3,
  })
  t.equal(routes[1]?.reconcile, null)
  t.strictSame(routes[2]?.reconcile?.identity, [])
  t.match(warnings.join('\n'), 'Route `believed`: reconcile with identity none')
  t.notMatch(warnings.join('\n'), 'by the key alone', 'a {record} belongs to one caller')
})

void t.test('reconcile by the key alone has a warning unless all callers share their keys', async (t) => {
  const reconcile =
    'reconcile: { request: { path: "/a?k={key}" }, identity: { /key: "{key}" }, completed: { status: 200 } }'
  const by = (scope: string) => warningsOf(`${scope}${reconcile}`, '').join('\n')
  t.match(by(''), 'Route `a`: reconcile asks by the key alone')
  t.notMatch(by('scope: { caller: none }, '), 'reconcile asks by the key alone')
})

void t.test('a status query that may find another request, or come too early, has a warning', async (t) => {
  const asks = (path: string, more = ''): string =>
    `reconcile: { request: { path: "${path}" }, identity: { /k: "{key}" }, completed: { status: 200 }${more} }`
  const warnings = (...routes: readonly string[]): string =>
    load(
      `unmatched: pass\n${UPSTREAM}routes:\n${routes.map((lines, n) => `  - { name: r${n}, scope: { caller: none }, ${lines} }\n`).join('')}`,
    ).warnings.join('\n')
  const one = (name: string) => `match: { methods: [POST], path: /${name} }`
  t.equal(warnings(`${one('a')}, ${asks('/k/{key}')}`), '')
  t.match(
    warnings(`match: { path: /a }, ${asks('/k/{key}')}`),
    'Route `r0`: reconcile asks by a key that requests of several methods',
  )
  t.equal(warnings(`match: { path: /a }, ${asks('/k/{record}').replace('"{key}"', '"{record}"')}`), '')
  const both = [`${one('a')}, ${asks('/k/{key}')}`, `${one('b')}, ${asks('/k/{key}')}`]
  t.match(warnings(...both), 'Routes `r0`, `r1`: reconcile sends the same status query for equal keys')
  t.equal(warnings(both[0] as string, `${one('b')}, ${asks('/l/{key}')}`), '')
  const early = ', notFound: { status: 404 }, after: 59s'
  t.match(
    warnings(`${one('a')}, ${asks('/k/{key}', early)}`),
    'Route `r0`: reconcile.after is less than upstream.timeout (60s), so "not found" counts',
  )
  for (const fine of [early.replace('59s', '60s'), ', notFound: { status: 404 }', ', after: 1s'])
    t.equal(warnings(`${one('a')}, ${asks('/k/{key}', fine)}`), '', fine)
  for (const scope of ['route', 'none']) {
    const keys = `scope: { caller: none, path: ${scope} }, match: { methods: [POST], path: "/a/:id/*" }`
    const head = `unmatched: pass\n${UPSTREAM}routes:\n`
    const { length } = load(`${head}  - { name: r, ${keys}, ${asks('/k/{key}')} }\n`).warnings
    t.equal(length, 0, 'one set of keys for all paths')
  }
  const below = 'match: { methods: [POST], path: "/a/:id/x" }'
  t.equal(warnings(`${below}, ${asks('/a/{:id}/{key}')}`), '')
  t.equal(warnings(`${below}, ${asks('/k/{key}').replace('"{key}" }', '"{key}", /a: "{:id}" }')}`), '')
  t.match(warnings(`${below}, ${asks('/k/{key}').replace('{ /k: "{key}" }', 'none')}`), 'identity none')
})
