import fc from 'fast-check'
import t from 'tap'
import { plain } from '../../src/commands/terminal.ts'
import type { Config } from '../../src/config/config.ts'
import { formatConfigError, loadConfig } from '../../src/config/load.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { parseTarget, Router } from '../../src/core/route.ts'
import { draftOf, draftText } from '../../src/describe/openapi/draft.ts'
import { operationsOf } from '../../src/describe/openapi/operations.ts'
import { Description } from '../../src/describe/openapi/read.ts'
import { character, words } from '../core/fixtures.ts'
import { command } from '../support/commands.ts'
import { descriptionFile, drafted, withPaths } from './support.ts'

function configOf(yaml: string): Config {
  const loaded = loadConfig({ file: 'draft.yaml', text: yaml, env: {}, flags: {} })
  if (!loaded.ok) throw new Error(`${loaded.errors.map(formatConfigError).join('\n')}\n${yaml}`)
  return loaded.config
}

interface Made {
  readonly out: string
  readonly err: string
  readonly config: Config
  readonly routes: Readonly<Record<string, RoutePolicy>>
}

async function made(t: Tap, paths: string, more?: string): Promise<Made> {
  const { code, out, err } = await drafted(t, withPaths(paths, more))
  t.equal(code, 0)
  const config = configOf(out)
  return { out, err, config, routes: Object.fromEntries(config.routes.map((route) => [route.name, route])) }
}
type Tap = Parameters<typeof drafted>[0]

/** The comments right before a route. */
function commentsOf(out: string, name: string): string {
  const [before = ''] = out.split(`  - name: ${JSON.stringify(name)}\n`)
  return (/(?: {2}# .*\n)*$/.exec(before)?.[0] ?? '').replaceAll(/\n? {2}# /g, ' ')
}

void t.test('POST and PATCH become routes, and PUT and DELETE only if they declare a key', async (t) => {
  const key = 'parameters: [ { name: Idempotency-Key, in: header } ]'
  const { config, out } = await made(
    t,
    `/a:
  get: { operationId: get-a, ${key} }
  head: {}
  options: {}
  put: { operationId: put-a }
  delete: { operationId: delete-a }
  post: { operationId: post-a }
  patch: { operationId: patch-a }
/b:
  put: { operationId: put-b, ${key} }
  delete: { operationId: delete-b, ${key} }`,
  )
  t.strictSame(
    config.routes.map(({ name, match }) => `${name} ${match.methods.join()} ${match.path}`),
    ['post-a POST /a', 'patch-a PATCH /a', 'put-b PUT /b', 'delete-b DELETE /b'],
  )
  t.match(out, /4 routes for 9 operations/)
})

t.test('a route has the base path, its parameters, and a comment if it matches more', async (t) => {
  const { routes, out } = await made(
    t,
    `/pets/{pet-id}/toys/{n}: { post: { operationId: toys } }
/files/{name}.json: { post: { operationId: part } }
"/jobs/{id}:cancel": { post: { operationId: verb } }
/:odd: { post: { operationId: colon } }
/a/*: { post: { operationId: star } }
/späti/a b//x/./y%2Fz/: { post: { operationId: normal } }
/q?action=do: { post: { operationId: query } }
/{id}/{id}: { post: { operationId: twice } }
/{}: { post: { operationId: nameless } }
/{1}/9: { post: { operationId: digit } }
/: { post: { operationId: root } }
/own: { servers: [ { url: /other/ } ], post: { operationId: own } }
/op: { post: { operationId: op, servers: [ { url: "https://x.example/deep/er/" } ] } }
x-note: 1
relative: { post: {} }`,
    'servers: [ { url: "https://{host}/v{n}/", variables: { host: { default: api.example.com }, n: { default: 2 } } } ]',
  )
  t.strictSame(Object.fromEntries(Object.entries(routes).map(([name, { match }]) => [name, match.path])), {
    toys: '/v2/pets/:pet_id/toys/:n',
    part: '/v2/files/:name_json',
    verb: '/v2/jobs/:id_cancel',
    colon: '/v2/:odd',
    star: '/v2/a/:p_',
    normal: '/v2/sp%C3%A4ti/a%20b/x/y%2Fz',
    query: '/v2/q',
    twice: '/v2/:id/:id',
    digit: '/v2/:p_1/9',
    root: '/v2',
    own: '/other/own',
    op: '/deep/er/op',
  })
  for (const name of ['part', 'verb', 'colon', 'star', 'query'])
    t.match(commentsOf(out, name), /Matches more than the description says: /, name)
  t.match(commentsOf(out, 'colon'), /POST \/\{\} is left out: the route below matches the same requests\./)
})

void t.test('the narrower route comes first, whatever the order of the description', async (t) => {
  const { config } = await made(
    t,
    `/{a}/{b}: { post: { operationId: any } }
/x/{b}: { post: { operationId: x-any } }
/{a}/y: { post: { operationId: any-y } }
/x/y: { post: { operationId: x-y } }
/{c}/{d}: { patch: { operationId: patch } }`,
  )
  const router = new Router(config.routes)
  for (const [path, name] of Object.entries({
    '/x/y': 'x-y',
    '/x/z': 'x-any',
    '/z/y': 'any-y',
    '/z/z': 'any',
  }))
    t.equal(router.match('POST', parseTarget(path) as never)?.name, name)
})

void t.test('routes are named after operations, with unique and valid names', async (t) => {
  const long = 'l'.repeat(80)
  const { routes, out } = await made(
    t,
    `/a: { post: { operationId: "create it!" } }
/b: { post: { operationId: "create-it" } }
/c: { post: { operationId: default } }
/d: { post: { operationId: ${long} } }
/e: { post: { operationId: ${long} } }
/f/{id}: { post: {} }
/g: { post: { operationId: "" } }
/h: { post: { operationId: 7 } }
/i: { post: { operationId: "__x" } }
/j: { post: { operationId: "\\u00e4\\n" } }`,
  )
  const shortened = `${long.slice(0, 64)} ${long.slice(0, 62)}-2`
  const names = `create-it create-it-2 post-default ${shortened} post-f-id post-root post-h x post-root-2`
  t.strictSame(Object.keys(routes).join(' '), names)
  t.match(commentsOf(out, 'post-f-id'), /No operationId: named after its path/)
})

void t.test('a route takes the header, presence and lengths of its key from the description', async (t) => {
  const header = (name: string, more = '') => `{ name: ${name}, in: header, ${more} }`
  const { routes, out } = await made(
    t,
    `/a: { post: { operationId: required, parameters: [ ${header('Idempotency-Key', 'required: true')} ] } }
/b: { post: { operationId: optional, parameters: [ ${header('idempotency-key')} ] } }
/c: { post: { operationId: none, parameters: [ ${header('X-Request-Id')}, { name: Idempotency-Key, in: query } ] } }
/d: { post: { operationId: paypal, parameters: [ ${header('PayPal-Request-Id', 'required: true')} ] } }
/e: { post: { operationId: both, parameters: [ ${header('X-Idempotency-Key', 'schema: { maxLength: 30, minLength: 8 }')}, ${header('Idempotency-Key', 'required: true, schema: { maxLength: 300, minLength: 10 }')} ] } }
/f: { post: { operationId: silly, parameters: [ ${header('Idempotency-Key', 'schema: { minLength: 9, maxLength: 3 }')} ] } }
/g: { post: { operationId: huge, parameters: [ ${header('Idempotency-Key', 'schema: { maxLength: 99999 }')} ] } }
/h:
  parameters: [ ${header('Idempotency-Key', 'required: true')} ]
  post: { operationId: over, parameters: [ ${header('IDEMPOTENCY-KEY')} ] }
  patch: { operationId: inherited }`,
  )
  const told = Object.values(routes).map(({ name, key }) => {
    const from = key.from.map((source) => (source.kind === 'header' ? source.name : ''))
    return `${name}: ${key.presence} ${from.join()} ${key.minLength}-${key.maxLength}`
  })
  t.strictSame(told, [
    'required: required idempotency-key 1-255',
    'optional: optional idempotency-key 1-255',
    'none: optional idempotency-key 1-255',
    'paypal: required paypal-request-id 1-255',
    'both: required x-idempotency-key,idempotency-key 8-300',
    'silly: optional idempotency-key 1-255',
    'huge: optional idempotency-key 1-255',
    'over: optional idempotency-key 1-255',
    'inherited: required idempotency-key 1-255',
  ])
  t.match(commentsOf(out, 'none'), /The description has no key header/)
  t.match(commentsOf(out, 'both'), /headers X-Idempotency-Key, Idempotency-Key and requires one of them/)
  t.match(commentsOf(out, 'optional'), /DECIDE: required, if every client sends it/)
})

t.test('bodies are compared by media type, and uploads get a comment about their limit', async (t) => {
  const takes = (id: string, ...types: string[]) =>
    `/${id}: { post: { operationId: ${id}, requestBody: { content: { ${types.map((type) => `"${type}": {}`).join(', ')} } } } }`
  const { routes, out } = await made(
    t,
    [
      takes('json', 'application/json', 'application/problem+json; charset=utf-8'),
      takes('upload', 'multipart/form-data'),
      takes('form', 'application/x-www-form-urlencoded'),
      takes('mixed', 'application/json', 'multipart/form-data'),
      takes('image', 'image/png'),
      takes('xml', 'application/xml'),
      '/nothing: { post: { operationId: nothing } }',
    ].join('\n'),
  )
  t.strictSame(
    Object.values(routes).map(({ name, fingerprint }) => `${name} ${fingerprint.body}`),
    ['json auto', 'upload multipart', 'form form', 'mixed auto', 'image auto', 'xml auto', 'nothing auto'],
  )
  for (const name of ['upload', 'mixed', 'image'])
    t.match(commentsOf(out, name), /over limits\.request \(1MiB\) are refused with 413/, name)
  for (const name of ['json', 'xml', 'nothing']) t.notMatch(commentsOf(out, name), /413/, name)
  t.match(commentsOf(out, 'xml'), /Accepts application\/xml: compared by media type/)
})

t.test('callers come from the security of the description, or of an operation', async (t) => {
  const secured = (id: string, security: string) =>
    `/${id}: { post: { operationId: ${id}, security: ${security} } }`
  const more = `security: [ { bearer: [] } ]
components:
  securitySchemes:
    bearer: { type: http, scheme: bearer }
    oauth: { type: oauth2, flows: {} }
    key: { type: apiKey, in: header, name: X-API-Key }
    cookie: { type: apiKey, in: cookie, name: SID }
    query: { type: apiKey, in: query, name: k }
    signed: { type: apiKey, in: header, name: X-Hub-Signature-256 }
    odd: { type: apiKey, in: header, name: "no token" }
    mutual: { type: mutualTLS }
    behind: { $ref: "#/components/securitySchemes/key" }`
  const { config, routes, out } = await made(
    t,
    [
      '/inherits: { post: { operationId: inherits } }',
      secured('same', '[ { oauth: [a] } ]'),
      secured('key', '[ { key: [] } ]'),
      secured('cookie', '[ { cookie: [] } ]'),
      secured('both', '[ { bearer: [], behind: [] } ]'),
      secured('either', '[ { bearer: [] }, { cookie: [] }, {} ]'),
      secured('open', '[]'),
      secured('signed', '[ { signed: [] } ]'),
      secured('query', '[ { query: [] } ]'),
      secured('mutual', '[ { mutual: [], key: [] } ]'),
      secured('odd', '[ { odd: [] }, { unheard: [] } ]'),
    ].join('\n'),
    more,
  )
  const callers = ({ scope }: RoutePolicy) => scope.caller.map(({ kind, name }) => `${kind}:${name}`).join()
  t.equal(callers(config.defaults), 'header:authorization')
  t.notOk(config.defaults.scope.callerIsDefault, 'written, so that strict can be chosen')
  const own: Readonly<Record<string, string>> = {
    key: 'header:x-api-key',
    cookie: 'cookie:SID',
    both: 'header:authorization,header:x-api-key',
    either: 'header:authorization,cookie:SID',
    mutual: 'header:x-api-key',
  }
  for (const [name, route] of Object.entries(routes))
    t.equal(callers(route), own[name] ?? 'header:authorization', name)
  t.equal(Object.keys(routes).length, 11)
  t.match(out, /# Callers are identified by the description's security schemes: bearer \(http bearer\)\./)
  t.match(commentsOf(out, 'either'), /Requests without any are accepted, and share one key space/)
  t.match(commentsOf(out, 'open'), /DECIDE: this operation accepts anonymous requests/)
  t.match(commentsOf(out, 'query'), /what identifies callers\? scope\.caller cannot read query \(query k\)/)
  t.match(commentsOf(out, 'signed'), /cannot read signed \(header X-Hub-Signature-256, new in each request\)/)
  t.match(commentsOf(out, 'mutual'), /Not used: mutual \(mutualTLS\)/)
  t.match(commentsOf(out, 'odd'), /cannot read odd \(header no token\), unheard \(not described\)/)
})

void t.test('without security the draft leaves callers to the default', async (t) => {
  const { config } = await made(t, '/a: { post: { operationId: a } }')
  t.ok(config.defaults.scope.callerIsDefault)
})

void t.test('the draft asks for what only a person can decide', async (t) => {
  const { out } = await made(
    t,
    `/orders/search: { post: { operationId: a1 } }
/orders: { post: { operationId: findOrders } }
/checkout: { post: { operationId: checkout } }
/research: { post: { operationId: research } }
/graphql: { post: { operationId: a2 } }
/oauth/token: { post: { operationId: a3 } }
/chat: { post: { operationId: a4, responses: { "200": { content: { text/event-stream: {} } } } } }
/jobs: { post: { operationId: a5, deprecated: true, responses: { "202": {} } } }`,
  )
  for (const name of ['a1', 'findOrders'])
    t.match(commentsOf(out, name), /looks read-only\. If it is: key: ignored/, name)
  for (const name of ['checkout', 'research']) t.notMatch(commentsOf(out, name), /ignored/, name)
  t.match(commentsOf(out, 'a2'), /GraphQL/)
  t.match(commentsOf(out, 'a3'), /keep: outcome/)
  t.match(commentsOf(out, 'a4'), /idempotency_response_unavailable/)
  t.match(commentsOf(out, 'a5'), /Answers 202: .* Deprecated/)
})

void t.test('from 51 routes on, the draft says how many time series they make', async (t) => {
  const outOf = async (count: number) =>
    (await made(t, Array.from({ length: count }, (_, n) => `/a${n}: { post: {} }`).join('\n'))).out
  t.match(await outOf(1), /^# 1 route for 1 operation: /m)
  t.notMatch(await outOf(50), 'time series')
  t.match(
    (await outOf(51)).replaceAll('\n# ', ' '),
    'DECIDE: 51 routes make 1785 time series for each replica',
  )
})

void t.test('servers that cannot be read are reported, and their paths left out', async (t) => {
  for (const [url, says] of [
    ['https://{host}/a', /server https:\/\/\{host\}\/a: no default for host; its path is left out/],
    ['http://[', /server http:\/\/\[: no URL; its path is left out/],
  ] as const) {
    const servers = `servers: [ { url: "${url}" } ]`
    const { routes, err } = await made(t, '/a: { post: { operationId: a } }', servers)
    t.equal(routes['a']?.match.path, '/a')
    t.match(err, says)
  }
})

void t.test('invalid operations are reported and left out', async (t) => {
  const paths = '/a: { post: 7, patch: { operationId: a, parameters: nonsense } }\n/b: 1'
  const { config, err } = await made(t, paths)
  t.equal(config.routes.length, 1)
  t.match(err, /api\.yaml:5: POST \/a: found no mapping; left out/)
})

void t.test('control characters of a description do not reach the draft', async (t) => {
  const evil = 'x\\ny: 1\\u0085z\\u2028\\u001b]0;t\\u0007\\u202e # \\"\'{}[]'
  const { out, err, config } = await made(
    t,
    `"/${evil}/{${evil}}":
  post:
    operationId: "${evil}"
    requestBody: { content: { "${evil}": {} } }
    security: [ { "${evil}": [] } ]
"/ref": { $ref: "${evil}" }`,
    `servers: [ { url: "https://a.example/${evil}" } ]`,
  )
  t.equal(config.routes.length, 1)
  for (const line of [...out.split('\n'), ...err.split('\n')]) t.notMatch(line, /[\p{Cc}\u2028\u202e]/u)
})

const POST = '/a: { post: { operationId: a, responses: {} } }'

void t.test('a file that is not an OpenAPI description in YAML or JSON exits 1 and says why', async (t) => {
  for (const [text, says] of [
    ['', /api\.yaml:1:1: found no mapping; allowed: an OpenAPI description\n$/],
    ['- a\n', /:1:1: found no mapping/],
    ['openapi: 3.1.0\npaths: {\n  a: [\n', /:4:1: found invalid YAML: .*; allowed: YAML 1\.2 or JSON\n$/],
    ['{"openapi": "3.1.0", "paths": {]', /:1:32: found invalid YAML/],
    [
      '# a\nswagger: "2.0"\n',
      /:2:1: swagger: found "2\.0"; allowed: OpenAPI 3; many tools convert Swagger 2\.0 into it/,
    ],
    ['info: {}\n', /:1:1: openapi: found nothing; allowed: 3\.0, 3\.1 or 3\.2\n$/],
    ['info: {}\nopenapi: 4.0.0\n', /:2:1: openapi: found "4\.0\.0"; allowed: 3\.0, 3\.1 or 3\.2\n$/],
    ['openapi: [3]\n', /openapi: found nothing/],
    ['a: 1\n---\nb: 1\n', /found invalid YAML: .*document/],
    [
      'openapi: 3.0.0\npaths: []\n',
      /:2: paths: found no mapping\n.*found no operation that changes anything \(of 0\)\n$/s,
    ],
    [
      'openapi: 3.0.0\npaths: { /a: { get: {} } }\n',
      /api\.yaml: found no operation that changes anything \(of 1\)\n$/,
    ],
  ] as const) {
    const { code, out, err } = await drafted(t, text)
    t.strictSame([code, out], [1, ''], text)
    t.match(err, says)
  }
  t.match(await command(['routes', 'from', descriptionFile(t, Buffer.from([0xff, 0xfe, 0x00]))]), {
    code: 1,
    err: /found bytes that are not UTF-8; allowed: a readable file of YAML or JSON in UTF-8/,
  })
  t.match(await command(['routes', 'from', '/nowhere/at-all.yaml']), {
    code: 1,
    err: /at-all\.yaml: found no such file; allowed: a readable file of YAML or JSON/,
  })
  t.match(await command(['routes', 'from', '.']), { code: 1, err: /found a directory/ })
})

void t.test('every version of OpenAPI 3 is read, as text or number, in YAML or JSON', async (t) => {
  for (const version of ['3.0.0', '3.0.3', '3.1.1', '3.2.0', '3.1'])
    t.equal((await drafted(t, `openapi: ${version}\npaths:\n  ${POST}\n`)).code, 0, version)
  const json = { openapi: '3.0.3', paths: { '/a': { post: { operationId: 'a' } } } }
  const compact = await drafted(t, JSON.stringify(json), 'api.json')
  t.match(compact, { code: 0, err: '' })
  t.match(compact.out, /drafted from api\.json by/)
  t.match(compact.out, /# POST \/a\n/, 'no line number for a file of one line')
  t.match((await drafted(t, JSON.stringify(json, null, 2))).out, /# POST \/a, line 5\n/)
})

void t.test('references within the file are followed, others are reported', async (t) => {
  const more = `
components:
  pathItems:
    Shared: { $ref: "#/components/pathItems/Behind" }
    Behind: { post: { operationId: shared } }
    Ring: { $ref: "#/components/pathItems/Gnir" }
    Gnir: { $ref: "#/components/pathItems/Ring" }
  parameters:
    Key: { name: Idempotency-Key, in: header, required: true, schema: { $ref: "#/components/schemas/Key~1s%20x" } }
    Self: { $ref: "#/components/parameters/Self" }
  schemas:
    "Key/s x": { type: string, maxLength: 40 }`
  const { code, out, err } = await drafted(
    t,
    withPaths(
      `/shared: { $ref: "#/components/pathItems/Shared" }
/ring: { $ref: "#/components/pathItems/Ring" }
/out: { $ref: "./other.yaml#/paths/~1a" }
/url: { $ref: "https://example.com/a.yaml" }
/none: { $ref: "#/components/pathItems/None" }
/bad: { $ref: "#nonsense" }
/worse: { $ref: "#/%E0%A4%A" }
/whole: { $ref: "#" }
/key: { post: { operationId: key, parameters: [ { $ref: "#/components/parameters/Key" }, { $ref: "#/components/parameters/Self" }, { $ref: p.yaml } ] } }`,
      more,
    ),
  )
  t.equal(code, 0)
  t.match(out, /name: "shared"\n {4}match: \{ methods: \[POST\], path: "\/shared" \}/)
  t.match(out, /name: "key"\n.*\n {4}key: \{ presence: required, maxLength: 40 \}/)
  t.equal(out.match(/- name:/g)?.length, 2)
  for (const [line, says] of [
    [17, '$ref #/components/pathItems/Ring points back to itself'],
    [
      18,
      '$ref ./other.yaml#/paths/~1a points outside the file and is not followed; bundle the description first',
    ],
    [
      19,
      '$ref https://example.com/a.yaml points outside the file and is not followed; bundle the description first',
    ],
    [20, '$ref #/components/pathItems/None points to nothing in this file'],
    [21, '$ref #nonsense points to nothing in this file'],
    [22, '$ref #/%E0%A4%A points to nothing in this file'],
    [24, '$ref #/components/parameters/Self points back to itself'],
    [24, '$ref p.yaml points outside the file and is not followed; bundle the description first'],
  ] as const)
    t.ok(err.includes(`api.yaml:${line}: ${says}\n`), `${line} ${says}`)
})

void t.test('names that objects inherit have no meaning of their own', async (t) => {
  const text = `{"openapi":"3.1.0","paths":{"__proto__":{"post":{}},"/constructor":{"post":{"operationId":"toString","parameters":[{"$ref":"#/constructor"}],"requestBody":{"$ref":"#/toString"}}}},"security":[{"constructor":[]}]}`
  const { code, out, err } = await drafted(t, text)
  t.equal(code, 0)
  t.match(
    out,
    /name: "toString"\n {4}match: \{ methods: \[POST\], path: "\/constructor" \}\n {4}key: optional/,
  )
  t.match(out, /what identifies callers\? scope\.caller cannot read constructor \(not described\)/)
  t.match(err, /#\/toString points to nothing/)
})

void t.test('any description makes a configuration that loads', (t) => {
  const segment = fc.oneof(
    fc.constantFrom(...words`{id} {a-b} x y . .. :v {a}:b %2F %zz * { \ `, '', 'a b'),
    fc.string({ maxLength: 6, unit: character }),
  )
  const path = fc.array(segment, { maxLength: 4 }).map((segments) => `/${segments.join('/')}`)
  const parameter = fc.record({
    name: fc.oneof(fc.constantFrom('Idempotency-Key', 'X-Idempotency-Key', 'PayPal-Request-Id'), fc.string()),
    in: fc.constantFrom('header', 'query'),
    required: fc.boolean(),
    schema: fc.record({ minLength: fc.anything(), maxLength: fc.oneof(fc.nat(), fc.anything()) }),
  })
  const operation = fc.record(
    {
      operationId: fc.oneof(fc.string(), fc.anything()),
      parameters: fc.oneof(fc.array(parameter, { maxLength: 3 }), fc.anything()),
      security: fc.oneof(
        fc.array(fc.dictionary(fc.constantFrom('a', 'b', 'c'), fc.constant([]))),
        fc.anything(),
      ),
      requestBody: fc.oneof(
        fc.record({
          content: fc.dictionary(fc.constantFrom('multipart/form-data', 'text/x'), fc.anything()),
        }),
        fc.anything(),
      ),
      responses: fc.anything(),
    },
    { requiredKeys: [] },
  )
  const scheme = fc.record({
    type: fc.constantFrom('apiKey', 'http', 'nonsense'),
    in: fc.constantFrom('header', 'cookie', 'query'),
    name: fc.string({ maxLength: 4 }),
  })
  const api = fc.record({
    openapi: fc.constant('3.1.0'),
    info: fc.record({ title: fc.string(), version: fc.anything() }),
    servers: fc.array(fc.record({ url: fc.string() }), { maxLength: 1 }),
    security: fc.array(fc.dictionary(fc.constantFrom('a', 'b', 'c'), fc.constant([])), { maxLength: 2 }),
    components: fc.record({ securitySchemes: fc.dictionary(fc.constantFrom('a', 'b'), scheme) }),
    paths: fc.dictionary(path, fc.dictionary(fc.constantFrom('post', 'patch', 'put', 'get'), operation), {
      maxKeys: 8,
    }),
  })
  let routes = 0
  fc.assert(
    fc.property(api, (value) => {
      const text = JSON.stringify(value)
      const description = new Description(JSON.parse(text), () => 0)
      const operations = operationsOf(description)
      if (operations.found.length === 0) return
      const lines = draftText(draftOf(description, operations), 'f', 'http://a:1', operations.all)
      const config = configOf(lines.map(plain).join('\n'))
      routes += config.routes.length
    }),
    { numRuns: 40 },
  )
  t.ok(routes > 30, `${routes} routes`)
  t.end()
})
