import { createHmac, hash } from 'node:crypto'
import t from 'tap'
import { decide } from '../../src/core/decide.ts'
import {
  Digests,
  digestResponse,
  fingerprintOf,
  hashesAlike,
  type RequestContent,
  rawDigestOf,
  recipeOf,
  sameResponse,
} from '../../src/core/fingerprint.ts'
import { contentType } from '../../src/core/headers.ts'
import { frame } from '../../src/core/identity.ts'
import type { FingerprintPolicy } from '../../src/core/policy.ts'
import type { Fingerprint } from '../../src/core/record.ts'
import { completed, FINGERPRINT, request, words } from './fixtures.ts'

const policyOf = (more: Partial<FingerprintPolicy>): FingerprintPolicy => ({ ...FINGERPRINT, ...more })
const print = (asked: RequestContent, more: Partial<FingerprintPolicy> = {}): string =>
  fingerprintOf(asked, policyOf(more)).toString('hex')

/** The fingerprint of a JSON body. */
const json = (body: string | Buffer, more: Partial<FingerprintPolicy> = {}): string =>
  print(request(body), more)
/** … of a body with these header lines. */
const sent = (
  body: string | Buffer,
  headers: readonly string[],
  more: Partial<FingerprintPolicy> = {},
): string => print(request(body, { headers }), more)
const typed = (type: string, body = '{"a":1}'): string => sent(body, ['Content-Type', type])
const queried = (query: string, mode: FingerprintPolicy['query']): string =>
  print(request('{}', { query, target: `/v1/payments?${query}` }), { query: mode })
const areDistinct = (all: readonly string[]): boolean => new Set(all).size === all.length

const recipe = recipeOf(FINGERPRINT)
const SECRET = Buffer.from('a secret of sixteen bytes')
const digestsOf = (asked: RequestContent, policy = FINGERPRINT, secret: Buffer | null = null): Digests =>
  new Digests(asked, asked.body, policy, secret)

t.test('F02 F04 F05 F08 which JSON bodies are the same operation', async (t) => {
  for (const [same, one, two] of [
    [true, '{"amount":100}', '{"amount":100}'],
    [false, '{"amount":100}', '{"amount":101}'],
    [true, '{"a":1}', '{"a":1.0}'],
    [true, '{"a":1}', '{"a":1e0}'],
    [false, '{"a":1}', '{"a":"1"}'],
    [false, '{"a":9007199254740993}', '{"a":9007199254740992}'],
    [false, '{"a":12345678901234567890}', '{"a":12345678901234567891}'],
    [true, '{"a":9007199254740993}', '{"a":9007199254740993}'],
    [true, '"\\u00e9"', '"\u00e9"'],
    [false, '"\u00e9"', '"e\u0301"'],
    [false, '[1,2]', '[2,1]'],
    // Without a lossless form, bytes are compared.
    [false, '{"a":1,"a":2}', '{"a":1, "a":2}'],
    [false, '{"a":1,"a":2}', '{"a":2}'],
    [false, '{"a":"\\ud800"}', '{"a": "\\ud800"}'],
    [false, '{"a":"\\ud800"}', '{"a":"\\ud801"}'],
    [false, '{"a":1', '{ "a":1'],
    [false, '{"a":1e400}', '{"a":1e401}'],
    [false, '\ufeff{"a":1}', '{"a":1}'],
    [false, Buffer.from([0x22, 0xff, 0x22]), Buffer.from([0x22, 0xfe, 0x22])],
    [true, Buffer.from([0x22, 0xff, 0x22]), Buffer.from([0x22, 0xff, 0x22])],
  ] as const)
    t.equal(json(one) === json(two), same, `${one.toString()} ${two.toString()}`)
  t.equal(fingerprintOf(request('{}'), FINGERPRINT).length, 32)
})

t.test('F03 member order and white space count in raw, but not in auto or json', async (t) => {
  const one = '{"a":{"b":1,"c":[1,2]},"d":null}'
  const two = ' {"d" : null,\n "a":{"c":[1, 2],"b":1}}\n'
  for (const body of ['auto', 'json'] as const) t.equal(json(one, { body }), json(two, { body }))
  t.not(json(one, { body: 'raw' }), json(two, { body: 'raw' }))
})

t.test('F09 the query counts unless it is ignored, and its order counts unless it is sorted', async (t) => {
  for (const [mode, same, one, two] of [
    ['include', false, 'to=alice', 'to=bob'],
    ['sorted', false, 'to=alice', 'to=bob'],
    ['ignore', true, 'to=alice', 'to=bob'],
    ['include', false, 'a=1&b=2', 'b=2&a=1'],
    ['sorted', true, 'a=1&b=2', 'b=2&a=1'],
    // Equal names keep their order, and pairs are compared as sent, by whole names and without empty ones.
    ['sorted', false, 'a=1&a=2', 'a=2&a=1'],
    ['sorted', true, 'a=1&b=0&a=2', 'b=0&a=1&a=2'],
    ['sorted', true, 'c=1&b=1&a=1&b=0', 'b=1&a=1&b=0&c=1'],
    ['sorted', false, 'a=%7E', 'a=~'],
    ['sorted', false, 'a', 'a='],
    ['sorted', true, 'ab=1&a=1', 'a=1&ab=1'],
    ['sorted', false, 'a=1=2', 'a=1'],
    ['sorted', true, 'b=1&&a=1&', 'a=1&b=1'],
    ['sorted', false, 'a=b&c', 'a=bc'],
  ] as const)
    t.equal(queried(one, mode) === queried(two, mode), same, `${mode}: ${one} ${two}`)
  t.equal(queried('b=0&a=1&a=2', 'sorted'), queried('a=1&a=2&b=0', 'include'))
  t.equal(queried('x', 'ignore'), queried('', 'include'))
  for (const query of ['include', 'sorted', 'ignore'] as const)
    t.equal(print(request('{}', { target: '/v1/payments?' }), { query }), print(request('{}'), { query }))
})

t.test('F11 another media type is another operation; charset and letter case do not count', async (t) => {
  const plain = typed('application/json')
  for (const type of [
    'application/json;charset=utf-8',
    'application/json; Charset="UTF-8"',
    'APPLICATION/JSON ; charset = utf-8',
    'application/json;',
    ' application/json ; ',
  ])
    t.equal(typed(type), plain, type)
  for (const type of ['text/plain', 'application/json; v=2', 'application/merge-patch+json'])
    t.not(typed(type), plain, type)
  t.not(plain, sent('{"a":1}', []))
  t.not(typed('application/json; v=2'), typed('application/json; v=3'))
  t.equal(typed('application/json; V=2; charset=x'), typed('application/json;v=2'))
  const text = ['Content-Type', 'text/plain']
  t.not(sent('a', [...text, 'Content-Type', 'text/html']), sent('a', text))
})

t.test('auto reads JSON where the media type says so, and bytes otherwise', async (t) => {
  const [one, two] = ['{"a":1,"b":2}', '{"b":2, "a":1}']
  for (const type of [
    'application/json',
    'application/problem+json',
    'Application/Vnd.Api+JSON; v=1',
    'application/json; charset=utf-8',
  ])
    t.equal(typed(type, one), typed(type, two), type)
  for (const type of [
    words`text/plain text/json application/jsonp application/json-seq application/x-www-form-urlencoded
      application/json+xml json`,
    ['application/json, text/plain', ''],
  ].flat())
    t.not(typed(type, one), typed(type, two), type)
  t.not(sent(one, []), sent(two, []))
  const plain = (body: string) => sent(body, ['Content-Type', 'text/plain'], { body: 'json' })
  t.equal(plain(one), plain(two), 'json reads any media type')
})

t.test('auto compares JSON of any length by its meaning; nested deeper than 100, as bytes', async (t) => {
  for (const length of [64 * 1024 - 9, 64 * 1024, 1024 * 1024]) {
    const long = `{"a":"${'x'.repeat(length)}" }`
    t.equal(json(long), json(long.replace('" }', '"}')), `${length}`)
  }
  const nested = (depth: number): string => '['.repeat(depth) + ']'.repeat(depth)
  t.equal(json(nested(100)), json(` ${nested(100)}`))
  t.not(json(nested(101)), json(` ${nested(101)}`))
})

t.test('a body with Content-Encoding is compared as sent', async (t) => {
  const type = ['Content-Type', 'application/json']
  for (const [more, same] of [
    [['Content-Encoding', 'gzip'], false],
    [['Content-Encoding', ' Identity'], true],
    [['Content-Encoding', ' Identity', 'content-encoding', 'br'], false],
  ] as const)
    for (const body of ['auto', 'json'] as const)
      t.equal(
        sent('{"a":1}', [...type, ...more], { body }) === sent('{"a": 1}', [...type, ...more], { body }),
        same,
      )
})

t.test('F12 framing and connection headers do not count', async (t) => {
  const type = ['Content-Type', 'application/json']
  const rows = [
    [...type, 'Content-Length', '7'],
    ['Transfer-Encoding', 'chunked', ...type],
    [...type, 'User-Agent', 'x', 'Traceparent', '00-1-2-3', 'Idempotency-Key', 'k'],
  ]
  const digest = (headers: readonly string[]) =>
    rawDigestOf(request('{"a":1}', { headers }), recipe).toString('hex')
  t.equal(new Set(rows.map((headers) => sent('{"a":1}', headers))).size, 1)
  t.equal(new Set(rows.map(digest)).size, 1)
})

t.test('F16 ignore leaves members out', async (t) => {
  const more = { ignore: ['/client_ts', '/meta/id', '/items/0/t'] }
  const one = '{"amount":1,"client_ts":"a","meta":{"id":1,"k":2},"items":[{"t":1,"v":2}]}'
  for (const same of [
    '{"amount":1,"client_ts":"b","meta":{"id":9,"k":2},"items":[{"t":8,"v":2}]}',
    '{"amount":1,"meta":{"k":2},"items":[{"v":2}]}',
  ])
    t.equal(json(one, more), json(same, more))
  t.not(json(one, more), json(one.replace('"amount":1', '"amount":2'), more))
  t.not(json(one, more), json(one.replace('"k":2', '"k":3'), more))
  t.not(json(one, more), json(one))
  const [ts, to] = [{ ignore: ['/ts'] }, { only: ['/to'] }]
  t.equal(json('{"a":1,"ts":1}', ts), json('{"a":1,"ts":2}', ts), 'a single one')
  t.equal(json('{"to":1,"ts":1}', to), json('{"to":1,"ts":2}', to), 'a single one')
  t.not(json('{"to":1}', to), json('{"to":2}', to))
})

t.test('F16 only takes the named members, and distinguishes absent from null', async (t) => {
  const more = { only: ['/amount', '/to'] }
  t.equal(json('{"amount":1,"to":"a","x":1}', more), json('{"to":"a","amount":1.0,"y":[]}', more))
  const bodies = words`{"amount":1} {"amount":1,"to":null} {"amount":1,"to":"null"} {"to":1} {} {"amount":"","to":""}
    {"amount":"1","to":"a"} {"amount":1,"to":"a"}`
  t.ok(areDistinct(bodies.map((body) => json(body, more))))
  t.not(json('{"amount":1', more), json('{"amount":1,', more), 'not JSON: the bytes count')
})

t.test('F19 no body, an empty string and an empty object differ', async (t) => {
  for (const body of ['auto', 'json', 'raw'] as const)
    t.ok(areDistinct(['', '""', '{}', '[]', 'null', '0'].map((text) => json(text, { body }))))
})

t.test('F20 every setting is part of the recipe, and equal settings have the same', async (t) => {
  const settings: Partial<FingerprintPolicy>[] = [
    [{}, { body: 'json' as const }, { body: 'raw' as const }, { ignore: ['/a'] }, { ignore: ['/a', '/b'] }],
    [{ only: ['/a'] }, { headers: ['a'] }, { query: 'sorted' as const }],
  ].flat()
  const recipes = settings.map((more) => recipeOf(policyOf(more)))
  t.ok(areDistinct(recipes))
  t.strictSame(
    settings.map((more) => recipeOf(policyOf(more))),
    recipes,
  )
  for (const body of ['auto', 'raw', 'none', 'json', 'form', 'multipart'] as const) {
    // json, form and multipart have new ones since they stopped comparing other kinds as bytes.
    const parts = ['fingerprint/2', JSON.stringify([body, [], [], [], 'include'])]
    if (['json', 'form', 'multipart'].includes(body)) parts.push('by kind')
    const recipe = hash('sha256', frame(parts), 'base64url').slice(0, 16)
    t.equal(recipeOf(policyOf({ body })), `${recipe},@`, `${body}, with the headers that select an account`)
  }
})

t.test('F20 the raw digest covers method, target, media type, coding and body as sent', async (t) => {
  const digest = (body: string, more: Partial<RequestContent> = {}): string =>
    rawDigestOf(request(body, more), recipe).toString('hex')
  const base = digest('{"a":1}')
  t.equal(base, digest('{"a":1}', { headers: ['X', 'y', 'content-type', 'application/json'] }))
  const others = [
    digest('{"a": 1}'),
    digest('{"a":1}', { method: 'PATCH' }),
    digest('{"a":1}', { target: '/v1/payments/' }),
    digest('{"a":1}', { target: '/v1/payments?' }),
    digest('{"a":1}', { headers: [] }),
    digest('{"a":1}', { headers: ['Content-Type', 'text/plain'] }),
    digest('{"a":1}', { headers: ['Content-Encoding', 'gzip'] }),
  ]
  t.ok(areDistinct([base, ...others]))
  // A body cannot pass for a header line.
  t.not(digest('4:text', { headers: [] }), digest('', { headers: ['Content-Type', 'text'] }))
  const lines = ['Content-Type', 'a', 'Content-Type', 'b']
  t.not(digest('1:b', { headers: lines.slice(0, 2) }), digest('', { headers: lines }))
})

t.test('F20 the raw digest covers each configured header only if it counted for the record', async (t) => {
  const digest = (headers: readonly string[], one: string, two: string): string => {
    const asked = request('{"a":1}', { headers: ['X-One', one, 'X-Two', two] })
    return rawDigestOf(asked, recipeOf(policyOf({ headers }))).toString('hex')
  }
  const both = ['x-one', 'x-two']
  t.equal(digest(both, '1', '1'), digest(both, '1', '1'))
  t.ok(areDistinct([digest(both, '1', '1'), digest(both, '2', '1'), digest(both, '1', '2')]))
  t.equal(digest([], '1', '1'), digest([], '2', '1'), 'a header that did not count then does not count now')

  const headers = ['Content-Type', 'application/json', 'X-Currency', 'EUR']
  const asked = request('{}', { headers })
  const digests = digestsOf(asked)
  for (const [under, currency, same] of [
    ['other,x-currency', 'EUR', true],
    ['other,x-currency', 'USD', false],
    ['other', 'USD', true],
    [digests.recipe, 'USD', true],
  ] as const) {
    const rawDigest = rawDigestOf({ ...asked, headers: headers.with(3, currency) }, under)
    t.equal(digests.isSameBytes(completed({ recipe: under, rawDigest })), same, `${under} ${currency}`)
  }
})

t.test('F20 it is known under which recipes a request has the same raw digest', async (t) => {
  const asked = request('{"a":1}', { headers: ['A', '1', 'B', '2'] })
  const recipes = [[], ['a'], ['b'], ['a', 'b'], ['b', 'a']].flatMap((headers) =>
    (['auto', 'raw'] as const).flatMap((body) =>
      [null, SECRET].map((secret) => digestsOf(asked, policyOf({ headers, body }), secret)),
    ),
  )
  for (const one of recipes)
    for (const other of recipes)
      if (hashesAlike(one.recipe, other.recipe) !== one.rawDigest.equals(other.rawDigest))
        t.fail(`${one.recipe} ${other.recipe}`)
})

/** What this version decides on a request that meets the record. */
function meets(
  record: Parameters<typeof completed>[0],
  asked: RequestContent,
  policy = FINGERPRINT,
  secret: Buffer | null = null,
): string {
  return decide(completed(record), digestsOf(asked, policy, secret), { onLeaseExpired: 'unknown' }, 3000).kind
}

t.test('F20 a record made under fingerprint/1 still replays for an unchanged request', async (t) => {
  /** Made by the version whose recipes began with fingerprint/1, under this policy. */
  const counting = policyOf({ headers: ['x-currency'] })
  const recipe = 'wyjx_K_rWmwUCY5o,x-currency'
  t.not(recipeOf(counting), recipe)
  const part = '--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
  for (const [type, body, fingerprint, raw] of [
    [
      ['application/json', '{"amount":1}'],
      words`KfSfxe1i6FTYz_og74ZnSRjwBpWNf7KuwXXw26YMS6I MfaHqS7jfD4kQX-YQgWcEJwNi20N5gE4--SaAG6tzuI`,
    ].flat(),
    [
      ['application/x-www-form-urlencoded', 'a=b+c'],
      words`QycRQp5o4z5cqHZgsQAabsZc6Imf6S0QZgyRijIeiSc jfYNvpPx4ofcVuyrm6v9wm1xmouVRUmcFzKbEqGn5qo`,
    ].flat(),
    [
      ['multipart/form-data; boundary=x', part],
      words`C26m8zYRbKZBrM6U5y62I01SPqPM64tfeBjwHxIlv20 fdzpAgR2TFKqi5cZqMdiUYyYfT7XnySJfh0GJrdOGeo`,
    ].flat(),
  ] as [string, string, string, string][]) {
    const record = {
      recipe,
      fingerprint: Buffer.from(fingerprint, 'base64url') as Fingerprint,
      rawDigest: Buffer.from(raw, 'base64url'),
    }
    const asked = (text: string, currency: string, query = 'a=b'): RequestContent =>
      request(text, {
        query,
        target: `/v1/payments?${query}`,
        headers: ['Content-Type', type, 'X-Currency', currency],
      })
    t.equal(meets(record, asked(body, 'EUR'), counting), 'replay', type)
    t.equal(meets(record, asked(body, 'EUR')), 'replay', 'under other settings too')
    t.equal(meets(record, asked(`${body} `, 'EUR'), counting), 'reused', 'another body')
    t.equal(meets(record, asked(body, 'USD')), 'reused', 'a header that counted then')
    t.equal(meets(record, asked(body, 'EUR', 'a=c'), counting), 'reused', 'another query')
  }
})

t.test('F20 after a change of settings an unchanged request replays, a changed one is misuse', async (t) => {
  const settings: Partial<FingerprintPolicy>[] = [
    [{}, { body: 'raw' as const }, { body: 'form' as const }, { body: 'none' as const }],
    [{ headers: ['x-currency'] }, { query: 'ignore' as const }],
  ].flat()
  const headers = ['Content-Type', 'application/x-www-form-urlencoded', 'X-Currency', 'EUR']
  const [first, changed] = [request('a=b+c', { headers }), request('a=b+d', { headers })]
  for (const then of settings)
    for (const now of settings) {
      if (then === now) continue
      const { recipe, fingerprint, rawDigest } = digestsOf(first, policyOf(then))
      const what = `${JSON.stringify(then)} → ${JSON.stringify(now)}`
      t.equal(meets({ recipe, fingerprint, rawDigest }, first, policyOf(now)), 'replay', what)
      t.equal(meets({ recipe, fingerprint, rawDigest }, changed, policyOf(now)), 'reused', what)
    }
})

t.test('F21 the normalised path counts, not its spelling', async (t) => {
  t.equal(print(request('{}', { target: '/v1//payments/' })), print(request('{}')))
  t.not(print(request('{}', { path: '/v1/refunds' })), print(request('{}')))
  t.not(print(request('{}', { method: 'PATCH' })), print(request('{}')))
})

t.test('named headers count, with their number and order', async (t) => {
  const more = { headers: ['x-tenant', 'x-mode'] }
  const rows = [
    [],
    ['X-Tenant', 'a'],
    ['X-Tenant', ''],
    ['X-Tenant', 'a', 'X-Tenant', 'b'],
    ['X-Tenant', 'b', 'X-Tenant', 'a'],
    ['X-Tenant', 'a, b'],
    ['X-Mode', 'a'],
    ['X-Tenant', 'a', 'X-Mode', 'a'],
    ['X-Tenant', 'A'],
  ]
  t.ok(areDistinct(rows.map((headers) => sent('{}', headers, more))))
  t.equal(sent('{}', ['X-Tenant', 'a', 'X-Other', 'b'], more), sent('{}', ['x-tenant', 'a'], more))
})

t.test('body none: everything but the body counts', async (t) => {
  t.equal(json('{"a":1}', { body: 'none' }), json('', { body: 'none' }))
  t.not(json('', { body: 'none' }), print(request('', { path: '/x' }), { body: 'none' }))
})

t.test('path, query and body cannot pass for one another', async (t) => {
  const rows = [
    ['ab', '/c', ''],
    ['b', '/c', 'a'],
    ['b', '/ca', ''],
    ['', '/c', 'ab'],
    ['3:raw', '/c', ''],
    ['3:rawab', '/c', ''],
  ].map(([body = '', path = '', query = '']) => print(request(body, { path, query }), { body: 'raw' }))
  t.ok(areDistinct(rows))
  // A body that looks like the canonical form of another is told apart by its mode.
  t.not(json('{"a":1}', { body: 'raw' }), json('{"a":1}'))
})

t.test(
  'hostile headers and queries of 64 KiB and bodies of 1 MiB are handled without an error',
  async (t) => {
    const [size, most] = [64 * 1024, 1024 * 1024]
    for (const part of ['"', '\\"', ';', '; charset', ' ', 'a/b;"', '=', '"\\']) {
      const type = `a/b${part.repeat(size / part.length)}`
      t.type(contentType(['Content-Type', type]).media, 'string')
      t.type(contentType(['Content-Type', `${type}"; charset`]).media, 'string')
      t.ok(sent('{}', ['Content-Encoding', type]))
    }
    for (const part of ['&', 'a&', 'a=', 'b=1&a=1&', '%'])
      for (const mode of ['include', 'sorted'] as const) t.ok(queried(part.repeat(size / part.length), mode))
    for (const part of ['[', '{"a":', '1', '"\\', '\xff', ' ', '0.', '1e'])
      t.equal(json(part.repeat(most / part.length), { body: 'json' }).length, 64)
  },
)

t.test('a fingerprint computed in steps equals the one computed at once', async (t) => {
  const text = `[${'{"b":[1.0,"x"],"a":null},'.repeat(10_000)}1]`
  for (const body of ['auto', 'json', 'form', 'raw', 'none'] as const)
    for (const more of [{}, { ignore: ['/0/a'] }, { only: ['/1', '/2/b'] }])
      for (const asked of [request(text), request(`${text},`)]) {
        const policy = policyOf({ ...more, body })
        const digests = digestsOf({ ...request(''), body: asked.body }, policy)
        let steps = 1
        for (const work of [digests.begin(), digests.finish()]) while (work.next().done !== true) steps++
        t.equal(steps > 5, ['json', 'auto', 'form'].includes(body), `${body}: ${steps} steps`)
        t.equal(digests.isLong, ['json', 'auto', 'form'].includes(body))
        t.same(digests.fingerprint, fingerprintOf(asked, policy))
        t.ok(digests.finish().next().done)
        t.ok(digests.isSameBytes(completed({ recipe: digests.recipe, rawDigest: digests.rawDigest })))
        t.notOk(digests.isSameBytes(completed({ recipe: digests.recipe })))
        t.ok(digests.isSameBytes(completed({ recipe: 'other', rawDigest: rawDigestOf(asked, 'other') })))
      }
})

t.test('long bodies are hashed in steps of 256 KiB; only long JSON is left for later', async (t) => {
  for (const [body, takesSteps, least, most] of [
    [Buffer.alloc(256 * 1024, 'x'), false, 0, 2],
    // The raw digest and the fingerprint, of 16 quarters each.
    [Buffer.alloc(4 * 1024 * 1024, 'x'), true, 30, 34],
  ] as const) {
    const digests = digestsOf(request(body), policyOf({ body: 'raw' }))
    t.equal(digests.takesSteps, takesSteps)
    const steps = [...digests.begin()].length
    t.ok(steps >= least && steps <= most, `${steps}`)
  }
  for (const [items, isLong, takesSteps] of [
    [1000, false, false],
    // 32 KiB less a byte, and three bytes more.
    [8_191, false, false],
    [8_192, true, false],
    [100_000, true, true],
  ] as const) {
    const digests = digestsOf(request(`[${'1.0,'.repeat(items)}1]`), policyOf({ body: 'json' }))
    t.equal(digests.isLong, isLong)
    for (const step of digests.begin()) t.equal(step, undefined)
    t.equal(digests.finish().next().done, !takesSteps, `${items} items`)
  }
})

t.test('fingerprints computed in turns do not mix', async (t) => {
  const policy = policyOf({ body: 'json' })
  const filled = (amount: string, size: number) =>
    request(`{"amount":${amount},"fill":"${'x'.repeat(size)}"}`)
  // Five times as long in canonical form.
  const grows = (digit: number) => request(`[${`${digit}e20,`.repeat(12_000)}1]`)
  const among = (size: number) => [
    filled('1.0', size),
    filled('2', size),
    filled('3.0', 20_000),
    filled('4.0', 10),
  ]
  const sizes = [100, 20_000, 65_000, 70_000, 200_000]
  for (const requests of [...sizes.map(among), [grows(1), grows(2)]]) {
    // As the claims of several requests do: one step of each per turn of the event loop.
    const all = requests.map((one) => digestsOf(one, policy))
    const work = all.map((digests) => digests.finish())
    while (!work.map((steps) => steps.next().done).every((isMade) => isMade));
    t.same(
      all.map(({ fingerprint }) => fingerprint),
      requests.map((one) => fingerprintOf(one, policy)),
      `${requests[0]?.body.length} bytes`,
    )
  }
})

t.test('§5 a secret keys the fingerprint and the raw digest, and the recipe says so', async (t) => {
  const hmac = (digest: Buffer) => createHmac('sha256', SECRET).update(digest).digest()
  for (const policy of [FINGERPRINT, policyOf({ headers: ['x-currency'] })])
    for (const body of ['{"amount":100}', `[${'1,'.repeat(200_000)}1]`]) {
      const asked = request(body, { headers: ['Content-Type', 'application/json', 'X-Currency', 'EUR'] })
      const [plain, keyed] = [digestsOf(asked, policy), digestsOf(asked, policy, SECRET)]
      t.equal(keyed.recipe, `keyed.${plain.recipe}`)
      for (const step of keyed.begin()) t.equal(step, undefined)
      t.same(keyed.rawDigest, hmac(rawDigestOf(asked, plain.recipe)))
      t.same(keyed.fingerprint, hmac(fingerprintOf(asked, policy)))
      t.equal(keyed.fingerprint, keyed.fingerprint, 'computed once')
      for (const under of [keyed.recipe, 'keyed.other', 'keyed.other,x-currency'])
        t.same(keyed.rawDigestUnder(under), hmac(rawDigestOf(asked, under)))
      t.same(keyed.rawDigestUnder('other'), rawDigestOf(asked, 'other'))
      const stored = completed({ recipe: keyed.recipe, rawDigest: keyed.rawDigest })
      t.ok(keyed.isSameBytes(stored))
      t.notOk(plain.isSameBytes(stored))
      t.notOk(digestsOf(asked, policy, Buffer.from('another secret of 16')).isSameBytes(stored))
    }
})

t.test('a record made before digests were keyed is compared without the secret', async (t) => {
  const first = request('{"amount":100,"to":"a"}')
  const { recipe, fingerprint, rawDigest } = digestsOf(first)
  const other = policyOf({ ignore: ['/to'] })
  for (const [body, policy, verdict] of [
    ['{"amount":100,"to":"a"}', FINGERPRINT, 'replay'],
    ['{ "to": "a", "amount": 1e2 }', FINGERPRINT, 'replay'],
    ['{"amount":101,"to":"a"}', FINGERPRINT, 'reused'],
    // Under other settings, only the same bytes.
    ['{"amount":100,"to":"a"}', other, 'replay'],
    ['{ "amount":100,"to":"a"}', other, 'reused'],
  ] as const)
    t.equal(meets({ recipe, fingerprint, rawDigest }, request(body), policy, SECRET), verdict, body)
  const keyed = digestsOf(first, FINGERPRINT, SECRET)
  t.same(keyed.fingerprintUnder(recipe), fingerprint)
  for (const under of ['other', keyed.recipe]) t.equal(keyed.fingerprintUnder(under), null)
  t.equal(digestsOf(first).fingerprintUnder(recipe), null)
})

void t.test('P18 the memory used to read long JSON is freed, whether or not it can be read', (t) => {
  const items = Array.from({ length: 50_000 }, (_, n) => `{"b":${n},"a":1e2}`)
  const members = Array.from({ length: 50_000 }, (_, n) => `"${(n * 7919) % 1_000_003}":1`)
  for (const [more, text] of [
    [{}, `[${items.join()}]`],
    [{ only: ['/0'] }, `[${items.join()}]`],
    [{}, `[${items.join()},1e999]`],
    [{}, `{${members.join()}}`],
  ] as const) {
    const asked = request(text)
    const before = process.memoryUsage().arrayBuffers
    fingerprintOf(asked, policyOf({ body: 'json', ...more }))
    t.ok(process.memoryUsage().arrayBuffers - before < asked.body.length)
  }
  t.end()
})

t.test('two responses are the same if status, body and the lines that can be the same are', async (t) => {
  const of = (headers: readonly string[], status = 201, body = 'ok') =>
    digestResponse({ status, reason: 'Created', headers, body: Buffer.from(body), trailers: [] })
  const lines = ['B', '1', 'A', '2', 'C', '3', 'A', '1']
  const one = of(lines)
  t.strictSame(one, {
    status: 201,
    lines: '[["a","2"],["a","1"],["b","1"],["c","3"]]',
    digest: hash('sha256', 'ok', 'base64url'),
  })
  for (const [other, same] of [
    [of(['a', '2', 'c', '3', 'A', ' 1 ', 'b', '1']), true],
    // Lines of one name in another order.
    [of(['A', '1', 'B', '1', 'C', '3', 'A', '2']), false],
    [of([...lines, 'D', '']), false],
    [of(lines, 200), false],
    [of(lines, 201, 'OK'), false],
  ] as const)
    t.equal(sameResponse(one, other), same)
  for (const name of words`age cf-ray content-length date request-id server-timing traceparent tracestate trailer
    x-amzn-requestid x-amzn-trace-id x-correlation-id x-envoy-upstream-service-time x-request-id x-response-time
    x-runtime x-trace-id`)
    t.ok(sameResponse(one, of([...lines, name.toUpperCase(), 'x'])), name)
  t.strictSame(of(['A', '1', 'B']).lines, '[["a","1"]]', 'a name without a value is no line')
})

t.test('the digests of a request never change, since records are compared with them', async (t) => {
  const asked = request('{"b":1,"a":2.0}', { query: 'b=1&a=2', target: '/v1/payments?b=1&a=2' })
  for (const [more, ...digests] of [
    [{}, 'QzgPYX5HREAXN_G8,@', '5260a071445e3557', 'ff6c8432591a9886'],
    [
      { body: 'raw', headers: ['content-type'] },
      ['EdXYsQhSHzFVM2Xt,@,content-type', 'a00f9ea1f84ff2d7', 'cf9597a45c876872'],
    ].flat(),
    [{ body: 'none', query: 'ignore' }, '6Rhp7rlKOGSiF57D,@', '6f44afd77d9bd1c1', 'ff6c8432591a9886'],
    [{ query: 'sorted', only: ['/a'] }, 'Fh8SmaT5IZ2YLxvS,@', '408aa9d1ea7754f5', 'ff6c8432591a9886'],
  ] as [Partial<FingerprintPolicy>, ...string[]][]) {
    const { recipe, fingerprint, rawDigest } = digestsOf(asked, policyOf(more))
    t.strictSame(
      [recipe, [fingerprint, rawDigest].map((one) => one.toString('hex').slice(0, 16))].flat(),
      digests,
    )
  }
  // Records of releases in which selecting headers did not count.
  const former = 'QzgPYX5HREAXN_G8'
  for (const secret of [null, Buffer.alloc(32, 1)]) {
    const digests = (headers: readonly string[]) =>
      new Digests({ ...asked, headers: [...asked.headers, ...headers] }, asked.body, FINGERPRINT, secret)
    const own = digests([])
    t.same(
      own.fingerprintUnder(secret === null ? former : `keyed.${former}`),
      own.fingerprint,
      'F20 equal without one',
    )
    t.equal(digests(['X-Tenant', '1']).fingerprintUnder(former), null, 'with one, only the same bytes are')
  }
  const part = '--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--'
  for (const [type, body, fingerprint] of [
    ['application/x-www-form-urlencoded; v=1', 'a=%41', '4826facc5a94eb73'],
    ['multipart/form-data; boundary=B', part, 'ca0c385baa76d5d5'],
  ] as const)
    t.equal(typed(type, body).slice(0, 16), fingerprint, type)
})
