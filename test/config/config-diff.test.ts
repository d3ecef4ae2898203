import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { withTables } from '../../scripts/docs.ts'
import type { Config } from '../../src/config/config.ts'
import { type ConfigChange, changeLine, changesBetween, orphanedBy } from '../../src/config/diff.ts'
import type { PropertyRow } from '../../src/config/rows.ts'
import { rowAt } from '../../src/config/written.ts'
import { tempDir } from '../support/e2e.ts'
import { load } from './support.ts'

function tempFile(t: Test, text: string): string {
  const file = join(tempDir(t), 'file')
  writeFileSync(file, text)
  return file
}

const configOf = (text: string): Config => load(text, { flags: { upstream: 'http://127.0.0.1:3000' } })

function changes(before: string, after: string): ConfigChange[] {
  return changesBetween(configOf(before), configOf(after))
}

/** What a reload refuses, as shown to people. */
function refused(before: string, after: string): string[] {
  return changes(before, after)
    .filter(({ effect }) => effect !== 'live')
    .map((change) => `${change.effect} ${changeLine(change)}`)
}

function paths(before: string, after: string, effect: ConfigChange['effect']): string[] {
  return changes(before, after)
    .filter((change) => change.effect === effect)
    .map(({ path }) => path)
}

void t.test('every property of the file has a reload rule', async (t) => {
  const [file = '', policy = ''] = withTables(
    '<!-- table: file -->\n<!-- end -->## Of `defaults`<!-- table: policy -->\n<!-- end -->',
  ).split('## Of `defaults`')
  const rows = (text: string): string[] =>
    [...text.matchAll(/^- `([^`]+)`/gm)].map(([, path]) => path as string)
  const hasRule = (row: PropertyRow | undefined): boolean =>
    row?.reload !== undefined || Object.values(row?.group ?? {}).some(hasRule)
  for (const path of rows(file)) t.ok(hasRule(rowAt(path)), path)
  for (const path of rows(policy)) t.ok(hasRule(rowAt(`defaults.${path}`)), path)
  t.ok(rows(file).length > 40 && rows(policy).length > 50)
})

void t.test('a change of any property without a reload rule needs a restart', async (t) => {
  const config = configOf('')
  const before = { ...config, novelty: { a: 1 }, defaults: { ...config.defaults, trick: 1 } }
  const after = { ...config, novelty: { a: 2 }, defaults: { ...config.defaults, trick: 2 } }
  t.same(
    changesBetween(before, after).map(({ path, effect }) => [path, effect]),
    [
      ['novelty.a', 'restart'],
      ['defaults.trick', 'restart'],
    ],
  )
})

void t.test('§10 a change at the top, except of limits, needs a restart or identifies records', async (t) => {
  const token = tempFile(t, 'a-token')
  const [trusted, host] = ['trustProxy: [10.0.0.0/8]', 'defaults: { scope: { host: true } }']
  const idle = (time: string): string => `upstream: { idleTimeout: ${time} }`
  const cases: [before: string, after: string, line: string][] = [
    ['listen: 127.0.0.1:1', 'listen: 127.0.0.1:2', 'restart listen.address: 127.0.0.1:1 → 127.0.0.1:2'],
    ['', 'ops: { listen: "127.0.0.1:9901" }', 'restart ops.listen.address: none → 127.0.0.1:9901'],
    ['', `admin: { tokenFile: ${token} }`, 'restart admin.tokenFile: none → ***'],
    [idle('30s'), idle('40s'), 'restart upstream.idleTimeout: 30s → 40s'],
    [
      'service: pay\nstore: { url: "redis://user:secret@h1/0" }',
      'service: pay\nstore: { url: "redis://user:other@h2/0" }',
      'restart store.url: redis://***@h1/0 → redis://***@h2/0',
    ],
    ['', 'log: { format: json }', 'restart log.format: auto → json'],
    ['', 'metrics: { defaults: false }', 'restart metrics.defaults: true → false'],
    ['', trusted, 'restart trustProxy: [] → ["10.0.0.0/8"]'],
    [host, `${trusted}\n${host}`, 'identifies trustProxy: [] → ["10.0.0.0/8"]'],
    [
      `unmatched: pass\n${host}`,
      `unmatched: pass\n${trusted}\n${host}`,
      'restart trustProxy: [] → ["10.0.0.0/8"]',
    ],
    ['', 'status: { path: /status }', 'restart status.path: off → /status'],
    ['', 'unmatched: pass', 'identifies unmatched: protect → pass'],
    ['', 'service: payments', 'identifies service: default → payments'],
  ]
  for (const [before, after, line] of cases) t.match(refused(before, after), [line], line)
  const secret = tempFile(t, 'x'.repeat(40))
  const later = tempFile(t, 'y'.repeat(40))
  t.strictSame(
    refused(`store: { secretFile: ${secret} }`, `store: { secretFile: ${later} }`),
    ['identifies store.secretFile: *** → *** (another value)'],
    'the content counts but is not shown',
  )
  t.strictSame(
    refused('', `issuer: { path: /keys, secretFile: ${secret} }`).map((line) => line.split(':')[0]),
    ['restart issuer.path', 'restart issuer.secretFile', 'restart issuer.ttl'],
  )
  const issued = (file: string, only: boolean) =>
    `issuer: { path: /keys, secretFile: ${file} }\ndefaults: { key: { issuedOnly: ${only} } }`
  for (const only of [true, false])
    t.strictSame(refused(issued(secret, only), issued(later, only)), [
      `${only ? 'identifies' : 'restart'} issuer.secretFile: *** → *** (another value)`,
    ])
})

void t.test('a change of limits, or of policies that do not identify records, is live', async (t) => {
  const before = 'routes: [{ name: pay, match: { path: /pay } }]'
  const after = `limits: { request: 2MiB, buffered: 128MiB, inFlight: 10, waiters: 5, upload: 3s, responseHead: 8KiB, newKeys: 10/m }
defaults: { ttl: 48h }
routes:
  - name: pay
    match: { path: /pay }
    mode: shadow
    profile: lenient
    key: { presence: required, forward: X-Key, forwardFence: true }
    inFlight: { mode: wait, wait: 3s, status: 425 }
    misuse: { status: 409 }
    lease: 20s
    ttlFailed: 2h
    tombstone: 1h
    unresolvedTtl: 60d
    respondWithin: 20s
    outcomes: { "503": release }
    onLeaseExpired: retry
    onStoreUnavailable: bypass
    keep: outcome
    replay: { excludeHeaders: [date] }
    statusHeader: true
    authorizeReplay: { path: /me }
    scope: { caller: "header:authorization" }
    limits: { response: 1MiB }
    reconcile: { request: { path: "/pay?key={key}", headers: { authorization: Bearer top-secret } }, identity: { /id: "{key}" }, completed: { status: 200 } }
`
  t.strictSame(refused(before, after), [])
  const live = changes(before, after).map(changeLine)
  t.ok(live.includes('routes[pay].ttl: 24h → 2d'))
  t.ok(live.includes('limits.inFlight: 2000 → 10'))
  t.ok(live.includes('routes[pay].outcomes: {} → {"503":"release"}'))
  const pay = (more: string): string => `routes: [{ name: pay, match: { path: /pay }, ${more} }]`
  const inside = pay(
    'outcomes: [{ status: 5xx, when: { /a: 1 }, outcome: store }, { status: 503, outcome: release }]',
  )
  t.strictSame(
    changes(before, inside).map(changeLine),
    [
      'routes[pay].outcomes: {} → [{"status":"5xx","when":{"/a":"1"},"outcome":"store"},{"status":"503","outcome":"release"}]',
    ],
    'a list where some look into the response',
  )
  t.notMatch(live.join('\n'), /top-secret/)
  t.strictSame(refused(after, before), [], 'and back')

  const ends = pay('ttl: { body: 90m }')
  t.strictSame(changes(before, ends).map(changeLine), [
    'routes[pay].ttl: 24h → {"record":"24h","body":"90m"}',
  ])
  const later = pay('ttl: { body: 2h, record: 3d }')
  t.strictSame(changes(ends, later).map(changeLine), [
    'routes[pay].ttl.record: 24h → 3d',
    'routes[pay].ttl.body: 90m → 2h',
    'routes[pay].ttlFailed: 24h → 3d',
  ])
  t.strictSame([...refused(before, ends), ...refused(ends, later), ...refused(later, before)], [])
})

void t.test('§10 a change of what identifies records is refused, on a route and in defaults', async (t) => {
  const jwt = (more: string): string =>
    `scope: { caller: "jwt:sub", jwt: { jwks: "https://a.example/keys", ${more} } }`
  const derived = (bucket: string): string => `key: { derive: { json: [/id], bucket: ${bucket} } }`
  const cases: [before: string, after: string, property: string][] = [
    ['', 'key: { from: ["header:x-key"] }', 'key.from'],
    ['', 'key: { from: ["header:idempotency-key", "json:/id"] }', 'key.from'],
    ['', 'key: ignored', 'key.presence'],
    ['key: ignored', 'key: required', 'key.presence'],
    ['', 'mode: off', 'mode'],
    ['mode: shadow', 'mode: off', 'mode'],
    ['', 'key: { derive: { json: [/id] } }', 'key.derive'],
    [derived('1h'), derived('2h'), 'key.derive'],
    ['', 'key: { syntax: strict }', 'key.syntax'],
    ['', 'key: { minLength: 2 }', 'key.minLength'],
    ['', 'key: { maxLength: 254 }', 'key.maxLength'],
    ['', 'key: { pattern: "[a-z]+" }', 'key.pattern'],
    ['key: { pattern: "[a-z]+" }', 'key: { pattern: "[a-y]+" }', 'key.pattern'],
    ['', 'fingerprint: { body: raw }', 'fingerprint.body'],
    ['', 'fingerprint: { ignore: [/sentAt] }', 'fingerprint.ignore'],
    ['', 'fingerprint: { headers: [x-tenant] }', 'fingerprint.headers'],
    ['', 'fingerprint: { query: sorted }', 'fingerprint.query'],
    ['', 'scope: { caller: "header:x-api-key" }', 'scope.caller'],
    ['', 'scope: { caller: none }', 'scope.caller'],
    ['', 'scope: { path: none }', 'scope.path'],
    ['', 'scope: { anonymous: reject }', 'scope.anonymous'],
    [jwt('audience: a'), jwt('audience: b'), 'scope.jwt'],
    [jwt('issuer: a'), jwt('issuer: b'), 'scope.jwt'],
  ]
  const nobody = (more: string): string => `defaults: { scope: { caller: none${more} } }`
  const places: [expected: (property: string) => string[], file: (text: string) => string][] = [
    [
      (property) => [`routes[pay].${property}`],
      (text) => `routes: [{ name: pay, match: { path: /pay }${text === '' ? '' : `, ${text}`} }]`,
    ],
    [(property) => [`defaults.${property}`], (text) => `defaults: { ${text} }`],
    // They apply to no request.
    [() => [], (text) => `unmatched: pass\ndefaults: { ${text} }`],
  ]
  for (const [before, after, property] of cases)
    for (const [expected, file] of places)
      t.strictSame(paths(file(before), file(after), 'identifies'), expected(property), file(after))
  t.strictSame(
    refused(nobody(''), nobody(', anonymous: reject')),
    [],
    'with caller none, nobody is anonymous',
  )
  t.match(refused('', 'defaults: { profile: strict, scope: { caller: "header:x-api-key" } }'), [
    'identifies defaults.key.minLength: 1 → 16',
    'identifies defaults.scope.caller: ["header:authorization"] → ["header:x-api-key"]',
    'identifies defaults.scope.anonymous: share → reject',
  ])
})

void t.test('key rules may be relaxed, since every key in use stays valid', async (t) => {
  const secret = tempFile(t, 'x'.repeat(40))
  const yaml = (key: string): string =>
    `issuer: { path: /keys, secretFile: ${secret} }\ndefaults: { key: { ${key} } }`
  const narrow = yaml('syntax: strict, minLength: 8, maxLength: 250, pattern: "[a-z]+"')
  t.strictSame(refused(narrow, yaml('syntax: lenient, minLength: 1, maxLength: 255')), [])
  t.strictSame(refused(yaml('issuedOnly: true'), yaml('issuedOnly: false')), [])
  t.strictSame(paths(yaml('issuedOnly: false'), yaml('issuedOnly: true'), 'identifies'), [
    'defaults.key.issuedOnly',
  ])
})

void t.test('a route that ignores keys may change its scope, since it has no records', async (t) => {
  const route = (more: string): string =>
    `routes: [{ name: pay, match: { path: /pay }, key: ignored, ${more} }]`
  t.strictSame(refused(route('ttl: 2h'), route('scope: { caller: none }')), [])
})

function routes(...list: string[]): string {
  return `routes: [${list.map((one) => `{ ${one} }`).join(', ')}]`
}

void t.test('§10 a change of match on a route that stays is refused', async (t) => {
  const before = routes('name: pay, match: { path: /pay }')
  for (const [match, property] of [
    ['{ path: /pay2 }', 'path'],
    ['{ path: /pay, methods: [POST] }', 'methods'],
    ['{ path: /pay, exact: true }', 'exact'],
  ])
    t.ok(
      paths(before, routes(`name: pay, match: ${match}`), 'identifies').includes(
        `routes[pay].match.${property}`,
      ),
    )
  const by = (methods: string) => routes(`name: pay, match: { path: /pay, methods: [${methods}] }`)
  t.strictSame(refused(by('POST, PATCH'), by('PATCH, POST')), [], 'the order of methods does not count')
  const ignoring = (path: string) => routes(`name: a, match: { path: ${path} }, key: ignored`)
  t.match(
    refused(ignoring('/a'), ignoring('/b')),
    ['identifies routes[a].match.path: /a → /b'],
    'even where keys are ignored: its requests become protected',
  )
})

void t.test('routes may be added, removed and moved if their requests keep their records', async (t) => {
  const pay = 'name: pay, match: { path: /pay }'
  const refunds = 'name: refunds, match: { path: /refunds }, ttl: 48h, key: required'
  const wide = 'name: all, match: { path: "/*" }'
  t.strictSame(refused(routes(pay), routes(pay, refunds)), [], 'the same records as under defaults')
  t.strictSame(refused(routes(pay, refunds), routes(refunds)), [])
  t.strictSame(refused(routes(pay, refunds), routes(refunds, pay)), [])
  t.strictSame(refused(routes(pay, wide), routes(refunds, wide)), [], 'the same records as under the wider')
  const renamed = routes('name: charge, match: { path: /pay }')
  t.strictSame(refused(routes(pay), renamed), [], 'a route may be renamed where its name is in no id')
  const scoped = (name: string) => routes(`name: ${name}, match: { path: /a }, scope: { path: route }`)
  t.match(refused(scoped('a'), scoped('b')), [
    'identifies routes[b].name: a → b (POST /a, previously of route a)',
  ])
  t.match(
    refused(
      routes(pay),
      routes(pay, 'name: hooks, match: { path: "/hooks/*" }, key: { from: ["header:ce-id"] }'),
    ),
    [
      'identifies routes[hooks].key.from: ["header:idempotency-key"] → ["header:ce-id"] (POST /hooks/*, previously of route default)',
    ],
  )
  t.match(refused(routes(pay, 'name: free, match: { path: /free }, key: ignored'), routes(pay)), [
    'identifies defaults: not protected → protected (POST /free, previously of route free)',
  ])
  t.match(refused(routes(pay), routes(pay, 'name: put, match: { path: /put, methods: [PUT] }')), [
    'identifies routes[put]: not protected → protected (PUT /put, previously of no route)',
  ])
  t.match(refused(`unmatched: pass\n${routes(pay)}`, `unmatched: pass\n${routes()}`), [
    'identifies routes[pay]: protected → not protected (POST /pay, previously of route pay)',
  ])
  t.strictSame(
    refused(routes(pay), routes(pay, 'name: get, match: { path: /get, methods: [GET] }, key: ignored')),
    [],
    'unprotected before and after',
  )
  t.match(refused(routes(pay), routes('name: exact, match: { path: /pay, exact: true }', pay)), [
    'identifies routes[exact].match.exact: false → true (POST /pay, previously of route pay)',
  ])
})

void t.test('the first of overlapping routes decides', async (t) => {
  const narrow = 'name: narrow, match: { path: /v1/pay }, scope: { caller: none }'
  const wide = 'name: wide, match: { path: "/v1/*" }'
  const one = 'name: one, match: { path: "/:x/a" }, scope: { caller: none }'
  const other = 'name: other, match: { path: "/b/:y" }'
  const exact = 'name: exact, match: { path: /v1/pay, exact: true }, scope: { caller: none }'
  for (const list of [
    [narrow, wide],
    [one, other],
    [exact, wide],
    [narrow, wide, one, other],
  ])
    t.strictSame(changes(routes(...list), routes(...list)), [], 'nothing moves')
  t.strictSame(
    paths(routes(one, other), routes(other, one), 'identifies'),
    ['routes[other].scope.caller'],
    'for requests that both match',
  )
  t.strictSame(paths(routes(narrow, wide), routes(wide), 'identifies'), ['routes[wide].scope.caller'])
  t.strictSame(
    paths(routes(narrow, wide), routes(narrow, 'name: more, match: { path: /v1/more }', wide), 'identifies'),
    [],
  )
  const under = 'name: under, match: { path: "/v1/pay/*" }'
  t.strictSame(
    paths(routes(narrow), routes(narrow, under), 'identifies'),
    [],
    '/v1/pay/* needs another slash',
  )
})

const BY_KEY = 'request: { path: "/p?k={key}" }, identity: { /k: "{key}" }'
const BY_RECORD = 'request: { path: "/p/{record}" }, identity: { /k: "{record}" }'
const config = (route: string, more = 'unmatched: pass') =>
  load(`${more}
upstream: { url: http://127.0.0.1:3000 }
routes:
  - { match: { methods: [POST], path: /pay }, scope: { caller: none }, ${route} }
`)
const asks = (how: string, more = ''): string =>
  `name: pay, reconcile: { ${how}, completed: { status: 200 }, notFound: { status: 404 } }${more}`
const FENCE = ', key: { forwardFence: true }'

void t.test('a change that leaves unknown records without a reconciler is reported by route', async (t) => {
  const told = (before: string, after: string) => orphanedBy(config(before), config(after))
  const old = asks(BY_KEY)
  t.same(told(old, old), [])
  t.match(told(old, old.replace('pay', 'pays')), [
    /^Route `pay`: no route has its name, so its unknown records stay unknown until an operator resolves them\.$/,
  ])
  t.match(told(old, 'name: pay'), [/it no longer has reconcile/])
  t.match(told(old, `${old}, mode: shadow`), [/mode shadow, which sends no status queries/])
  t.match(told(old, asks(BY_RECORD, FENCE)), [/\{record\}, which was not sent to the upstream before/])
  t.match(told(asks(BY_RECORD, FENCE), old), [/\{key\}, which was not stored before/])
  t.same(told(asks(BY_KEY, FENCE), asks(BY_RECORD, FENCE)), [], 'the record id was sent before, too')
  t.same(
    told(old, asks(BY_RECORD, FENCE).replace(', notFound: { status: 404 }', '')),
    [],
    'without notFound nothing is freed',
  )
  t.same(told('name: pay', old), [], 'nobody asked before')
  t.same(told(`${old}, mode: shadow`, 'name: pay'), [])
  const everywhere = (reconcile: string) =>
    config('name: pay', `unmatched: protect\ndefaults: { key: { forwardFence: true }, ${reconcile} }`)
  const shared = `reconcile: { ${BY_RECORD}, completed: { status: 200 } }`
  t.equal(orphanedBy(everywhere(shared), everywhere('reconcile: none')).length, 2)
})
