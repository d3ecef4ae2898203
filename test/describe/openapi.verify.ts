import t from 'tap'
import { drafted } from './support.ts'

void t.test('hostile descriptions are refused with a short message', async (t) => {
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
      'deep JSON',
      `{"openapi":"3.1.0","paths":${'{"a":'.repeat(100_000)}1${'}'.repeat(100_000)}}`,
      /begins with|no operation/,
    ],
  ]
  for (const [what, text, says] of cases) {
    const { code, out, err } = await drafted(t, text)
    t.strictSame([code, out], [1, ''], what)
    t.match(err, says, what)
    t.ok(err.length < 2000, `${what}: ${err.length} characters`)
  }
})

void t.test('a large description is read, up to 3000 operations', async (t) => {
  const paths = Object.fromEntries(
    Array.from({ length: 3001 }, (_, n) => [
      `/things${n}/{id}`,
      { post: { operationId: `thing${n}`, description: 'x'.repeat(300), responses: {} } },
    ]),
  )
  const { code, out, err } = await drafted(t, JSON.stringify({ openapi: '3.1.0', paths }))
  t.equal(code, 0)
  t.equal(out.match(/- name:/g)?.length, 3000)
  t.match(err, /more than 3000 operations that change something; the rest is left out/)
})
