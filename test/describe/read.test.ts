import { performance } from 'node:perf_hooks'
import t from 'tap'
import { command } from '../support/commands.ts'
import { descriptionFile, drafted, withPaths } from './support.ts'

t.setTimeout(240_000)

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
      /:2: paths: found no mapping\n.*found no operation that changes something, of 0\n$/s,
    ],
    [
      'openapi: 3.0.0\npaths: { /a: { get: {} } }\n',
      /api\.yaml: found no operation that changes something, of 1\n$/,
    ],
  ] as const) {
    const { code, out, err } = await drafted(t, text)
    t.strictSame([code, out], [1, ''], text)
    t.match(err, says)
  }
  t.match(await command(['routes', 'from', descriptionFile(t, Buffer.from([0xff, 0xfe, 0x00]))]), {
    code: 1,
    err: /found bytes that are not UTF-8; allowed: YAML or JSON in UTF-8/,
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

void t.test('hostile descriptions are refused within a minute, with a short message', async (t) => {
  const letters = 'abcdefghijklmnop'.split('')
  const bomb = letters.map((name, n) =>
    n === 0 ? 'a: &a [x, x, x, x, x, x]' : `${name}: &${name} [${`*${letters[n - 1]},`.repeat(9)}]`,
  )
  const merges = letters.map((name, n) =>
    n === 0 ? 'a: &a { x: 1 }' : `${name}: &${name} { <<: [${`*${letters[n - 1]},`.repeat(9)}] }`,
  )
  const cases: [string, string, RegExp][] = [
    ['brackets', `openapi: ${'['.repeat(50_000)}`, /nested too deeply/],
    ['closed brackets', `openapi: ${'['.repeat(20_000)}${']'.repeat(20_000)}`, /nested too deeply/],
    ['question marks', '? '.repeat(50_000), /nested too deeply/],
    ['dashes', '- '.repeat(50_000), /nested too deeply/],
    ['aliases of aliases', bomb.join('\n'), /Excessive alias count|resource exhaustion/],
    ['merges of merges', merges.join('\n'), /Excessive alias count|openapi: found nothing/],
    ['an alias of itself', 'openapi: 3.1.0\npaths: &p\n  /a: *p\n', /./],
    ['much YAML', `openapi: 3.1.0\n#${'x'.repeat(9 * 1024 ** 2)}`, /more than 8MiB of YAML/],
    [
      'more than any',
      `{"openapi":"${'x'.repeat(33 * 1024 ** 2)}"}`,
      /found more than 32MiB; allowed: at most/,
    ],
    [
      'deep JSON',
      `{"openapi":"3.1.0","paths":${'{"a":'.repeat(100_000)}1${'}'.repeat(100_000)}}`,
      /begins with|no operation/,
    ],
  ]
  for (const [what, text, says] of cases) {
    const before = performance.now()
    const { code, out, err } = await drafted(t, text)
    t.strictSame([code, out], [1, ''], what)
    t.match(err, says, what)
    t.ok(err.length < 2000, `${what}: ${err.length} characters`)
    t.ok(performance.now() - before < 60_000, `${what}: ${Math.round(performance.now() - before)} ms`)
  }
})

void t.test('reading a device ends, too', async (t) => {
  t.match(await command(['routes', 'from', '/dev/zero']), { code: 1, err: /found more than 32MiB/ })
  t.match(await command(['routes', 'from', '/dev/null']), { code: 1, err: /found no mapping/ })
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

void t.test('a large description is read within a minute, up to 3000 operations', async (t) => {
  const paths = Object.fromEntries(
    Array.from({ length: 3001 }, (_, n) => [
      `/things${n}/{id}`,
      { post: { operationId: `thing${n}`, description: 'x'.repeat(300), responses: {} } },
    ]),
  )
  const before = performance.now()
  const { code, out, err } = await drafted(t, JSON.stringify({ openapi: '3.1.0', paths }))
  t.equal(code, 0)
  t.equal(out.match(/- name:/g)?.length, 3000)
  t.match(err, /more than 3000 operations that change something; the rest is left out/)
  t.ok(performance.now() - before < 60_000, `${Math.round(performance.now() - before)} ms`)
})
