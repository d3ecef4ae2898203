import { createHmac, hash } from 'node:crypto'
import canonicalize from 'canonicalize'
import fc from 'fast-check'
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
import { completed, FINGERPRINT, request, words } from './fixtures.ts'

const print = (asked: RequestContent, more: Partial<FingerprintPolicy> = {}): string =>
  fingerprintOf(asked, { ...FINGERPRINT, ...more }).toString('hex')

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

const recipe = recipeOf(FINGERPRINT)

t.test('F02 another body is another operation', async (t) => {
  t.equal(json('{"amount":100}'), json('{"amount":100}'))
  t.not(json('{"amount":100}'), json('{"amount":101}'))
  t.equal(fingerprintOf(request('{}'), FINGERPRINT).length, 32)
})

t.test('F03 member order and white space count in raw, but not in auto or json', async (t) => {
  const one = '{"a":{"b":1,"c":[1,2]},"d":null}'
  const two = ' {"d" : null,\n "a":{"c":[1, 2],"b":1}}\n'
  for (const body of ['auto', 'json'] as const) t.equal(json(one, { body }), json(two, { body }))
  t.not(json(one, { body: 'raw' }), json(two, { body: 'raw' }))
})

t.test('F04 1, 1.0 and 1e0 are equal; a string is not a number', async (t) => {
  t.equal(json('{"a":1}'), json('{"a":1.0}'))
  t.equal(json('{"a":1}'), json('{"a":1e0}'))
  t.not(json('{"a":1}'), json('{"a":"1"}'))
})

t.test('big integers that differ in the last digit are different requests', async (t) => {
  t.not(json('{"a":9007199254740993}'), json('{"a":9007199254740992}'))
  t.not(json('{"a":12345678901234567890}'), json('{"a":12345678901234567891}'))
  t.equal(json('{"a":9007199254740993}'), json('{"a":9007199254740993}'))
})

t.test('F05 an escape equals its character; NFC and NFD differ', async (t) => {
  t.equal(json('"\\u00e9"'), json('"\u00e9"'))
  t.not(json('"\u00e9"'), json('"e\u0301"'))
})

t.test('F08 the order of an array counts', async (t) => {
  t.not(json('[1,2]'), json('[2,1]'))
})

t.test('JSON without a lossless form is compared byte by byte', async (t) => {
  for (const [one, two] of [
    ['{"a":1,"a":2}', '{"a":1, "a":2}'],
    ['{"a":1,"a":2}', '{"a":2}'],
    ['{"a":"\\ud800"}', '{"a": "\\ud800"}'],
    ['{"a":"\\ud800"}', '{"a":"\\ud801"}'],
    ['{"a":1', '{ "a":1'],
    ['{"a":1e400}', '{"a":1e401}'],
    ['\ufeff{"a":1}', '{"a":1}'],
  ] as const)
    t.not(json(one), json(two), `${encodeURIComponent(one)} ${encodeURIComponent(two)}`)
  const invalid = Buffer.from([0x22, 0xff, 0x22])
  const another = Buffer.from([0x22, 0xfe, 0x22])
  t.not(json(invalid), json(another), 'invalid UTF-8 is not read as replacement characters')
  t.equal(json(invalid), json(invalid))
})

t.test('F09 the query counts unless it is ignored, and its order counts unless it is sorted', async (t) => {
  t.not(queried('to=alice', 'include'), queried('to=bob', 'include'))
  t.not(queried('to=alice', 'sorted'), queried('to=bob', 'sorted'))
  t.not(queried('a=1&b=2', 'include'), queried('b=2&a=1', 'include'))
  t.equal(queried('a=1&b=2', 'sorted'), queried('b=2&a=1', 'sorted'))
  t.equal(queried('to=alice', 'ignore'), queried('to=bob', 'ignore'))
})

t.test('a sorted query keeps the order of equal names and compares the pairs as sent', async (t) => {
  t.not(queried('a=1&a=2', 'sorted'), queried('a=2&a=1', 'sorted'))
  t.equal(queried('a=1&b=0&a=2', 'sorted'), queried('b=0&a=1&a=2', 'sorted'))
  t.not(queried('a=%7E', 'sorted'), queried('a=~', 'sorted'))
  t.not(queried('a', 'sorted'), queried('a=', 'sorted'))
  t.equal(queried('ab=1&a=1', 'sorted'), queried('a=1&ab=1', 'sorted'))
  t.not(queried('a=1=2', 'sorted'), queried('a=1', 'sorted'))
  for (const mode of ['include', 'sorted', 'ignore'] as const)
    t.equal(
      print(request('{}', { target: '/v1/payments?' }), { query: mode }),
      print(request('{}'), { query: mode }),
      'an empty query equals none',
    )
})

t.test('F11 another media type is another operation; charset and letter case do not count', async (t) => {
  const plain = typed('application/json')
  t.not(plain, typed('text/plain'))
  t.not(plain, sent('{"a":1}', []))
  for (const type of [
    'application/json;charset=utf-8',
    'application/json; Charset="UTF-8"',
    'APPLICATION/JSON ; charset = utf-8',
    'application/json;',
    ' application/json ; ',
  ])
    t.equal(typed(type), plain, type)
  t.not(typed('application/json; v=2'), plain)
  t.not(typed('application/json; v=2'), typed('application/json; v=3'))
  t.equal(typed('application/json; V=2; charset=x'), typed('application/json;v=2'))
  t.not(typed('application/merge-patch+json'), plain)
  t.not(
    sent('a', ['Content-Type', 'text/plain', 'Content-Type', 'text/html']),
    sent('a', ['Content-Type', 'text/plain']),
  )
})

t.test('a media type is split at semicolons outside quotes', async (t) => {
  t.equal(contentType([]).media, '')
  t.equal(contentType(['Content-Type', '']).media, '')
  t.equal(contentType(['Content-Type', 'a/b; x="1;charset=2"; charset=3']).media, 'a/b;x="1;charset=2"')
  t.equal(contentType(['Content-Type', 'a/b; x="1\\";charset=2"; charset=3']).media, 'a/b;x="1\\";charset=2"')
  t.equal(contentType(['Content-Type', 'a/b; charset="x;y"; z=1']).media, 'a/b;z=1')
  t.equal(contentType(['Content-Type', 'a/b; x="1; charset=2']).media, 'a/b;x="1; charset=2')
  t.equal(contentType(['Content-Type', 'a/b; x="\\']).media, 'a/b;x="\\')
  t.equal(contentType(['Content-Type', 'a/b; charsets=1']).media, 'a/b;charsets=1')
  t.equal(
    contentType(['Content-Type', 'A/B; Boundary="aB;C"; V=D']).media,
    'a/b;boundary="aB;C";v=d',
    'the letter case of a boundary counts (RFC 2046)',
  )
})

t.test('auto reads JSON where the media type says so, and bytes otherwise', async (t) => {
  for (const type of [
    'application/json',
    'application/problem+json',
    'Application/Vnd.Api+JSON; v=1',
    'application/json; charset=utf-8',
  ])
    t.equal(typed(type, '{"a":1,"b":2}'), typed(type, '{"b":2, "a":1}'), type)
  for (const type of [
    ...words`
      text/plain text/json application/jsonp application/json-seq application/x-www-form-urlencoded
      application/json+xml json`,
    ...['application/json, text/plain', ''],
  ])
    t.not(typed(type, '{"a":1,"b":2}'), typed(type, '{"b":2, "a":1}'), type)
  t.not(sent('{"a":1}', []), sent('{"a": 1}', []))
  t.equal(
    sent('{"a":1}', ['Content-Type', 'text/plain'], { body: 'json' }),
    sent('{"a": 1}', ['Content-Type', 'text/plain'], { body: 'json' }),
    'json reads any media type',
  )
})

t.test('auto compares JSON over 64 KiB or nested deeper than 100 as bytes', async (t) => {
  const limit = 64 * 1024
  const at = `{"a":"${'x'.repeat(limit - 9)}" }`
  t.equal(at.length, limit)
  t.equal(json(at), json(at.replace('" }', '"}')), 'at 64 KiB white space does not count')
  const over = `{"a":"${'x'.repeat(limit - 8)}" }`
  t.equal(over.length, limit + 1)
  t.not(json(over), json(over.replace('" }', '"}')), 'beyond it does')
  t.equal(
    json(over, { body: 'json' }),
    json(over.replace('" }', '"}'), { body: 'json' }),
    'json has no such limit',
  )
  const nested = (depth: number): string => '['.repeat(depth) + ']'.repeat(depth)
  t.equal(json(nested(100)), json(` ${nested(100)}`))
  t.not(json(nested(101)), json(` ${nested(101)}`))
})

t.test('a body with Content-Encoding is compared as sent', async (t) => {
  for (const body of ['auto', 'json'] as const) {
    const encoded = ['Content-Type', 'application/json', 'Content-Encoding', 'gzip']
    t.not(sent('{"a":1}', encoded, { body }), sent('{"a": 1}', encoded, { body }))
    const identity = ['Content-Type', 'application/json', 'Content-Encoding', ' Identity']
    t.equal(sent('{"a":1}', identity, { body }), sent('{"a": 1}', identity, { body }))
    const two = [...identity, 'content-encoding', 'br']
    t.not(sent('{"a":1}', two, { body }), sent('{"a": 1}', two, { body }))
  }
})

t.test('F12 framing and connection headers do not count', async (t) => {
  const type = ['Content-Type', 'application/json']
  const plain = sent('{"a":1}', [...type, 'Content-Length', '7'])
  t.equal(plain, sent('{"a":1}', ['Transfer-Encoding', 'chunked', ...type]))
  t.equal(
    plain,
    sent('{"a":1}', [...type, 'User-Agent', 'x', 'Traceparent', '00-1-2-3', 'Idempotency-Key', 'k']),
  )
  const digest = (headers: readonly string[]): string =>
    rawDigestOf(request('{"a":1}', { headers }), recipe).toString('hex')
  t.equal(digest([...type, 'Content-Length', '7']), digest(['Transfer-Encoding', 'chunked', ...type]))
})

t.test('F16 ignore leaves members out', async (t) => {
  const more = { ignore: ['/client_ts', '/meta/id', '/items/0/t'] }
  const one = '{"amount":1,"client_ts":"a","meta":{"id":1,"k":2},"items":[{"t":1,"v":2}]}'
  t.equal(
    json(one, more),
    json('{"amount":1,"client_ts":"b","meta":{"id":9,"k":2},"items":[{"t":8,"v":2}]}', more),
  )
  t.equal(json(one, more), json('{"amount":1,"meta":{"k":2},"items":[{"v":2}]}', more))
  t.not(json(one, more), json(one.replace('"amount":1', '"amount":2'), more))
  t.not(json(one, more), json(one.replace('"k":2', '"k":3'), more))
  t.not(json(one, more), json(one))
  const ts = { ignore: ['/ts'] }
  t.equal(json('{"a":1,"ts":1}', ts), json('{"a":1,"ts":2}', ts), 'a single one')
  const to = { only: ['/to'] }
  t.equal(json('{"to":1,"ts":1}', to), json('{"to":1,"ts":2}', to), 'a single one')
  t.not(json('{"to":1}', to), json('{"to":2}', to))
})

t.test('F16 only takes the named members, and distinguishes absent from null', async (t) => {
  const more = { only: ['/amount', '/to'] }
  t.equal(json('{"amount":1,"to":"a","x":1}', more), json('{"to":"a","amount":1.0,"y":[]}', more))
  const bodies = words`
    {"amount":1} {"amount":1,"to":null} {"amount":1,"to":"null"} {"to":1} {} {"amount":"","to":""}
    {"amount":"1","to":"a"} {"amount":1,"to":"a"}`
  t.equal(new Set(bodies.map((body) => json(body, more))).size, bodies.length)
  t.not(json('{"amount":1', more), json('{"amount":1,', more), 'not JSON: the bytes count')
})

t.test('F19 no body, an empty string and an empty object differ', async (t) => {
  for (const body of ['auto', 'json', 'raw'] as const) {
    t.equal(new Set(['', '""', '{}', '[]', 'null', '0'].map((text) => json(text, { body }))).size, 6)
  }
})

t.test(
  'F20 json, form and multipart have new recipes since they stopped comparing other kinds as bytes',
  async (t) => {
    const id = (body: 'auto' | 'raw' | 'none' | 'json' | 'form' | 'multipart', ...more: string[]): string => {
      const settings = JSON.stringify([body, [], [], [], 'include'])
      return hash('sha256', frame(['fingerprint/2', settings, ...more]), 'base64url').slice(0, 16)
    }
    for (const body of ['auto', 'raw', 'none'] as const)
      t.equal(recipeOf({ ...FINGERPRINT, body }), id(body), body)
    for (const body of ['json', 'form', 'multipart'] as const)
      t.equal(recipeOf({ ...FINGERPRINT, body }), id(body, 'by kind'), body)
  },
)

t.test('F20 every setting is part of the recipe', async (t) => {
  const recipes = [
    FINGERPRINT,
    { ...FINGERPRINT, body: 'json' as const },
    { ...FINGERPRINT, body: 'raw' as const },
    { ...FINGERPRINT, ignore: ['/a'] },
    { ...FINGERPRINT, ignore: ['/a', '/b'] },
    { ...FINGERPRINT, only: ['/a'] },
    { ...FINGERPRINT, headers: ['a'] },
    { ...FINGERPRINT, query: 'sorted' as const },
  ].map(recipeOf)
  t.equal(new Set(recipes).size, recipes.length)
  t.equal(recipeOf({ ...FINGERPRINT }), recipes[0], 'equal settings, equal recipe')
  t.equal(recipeOf(FINGERPRINT), recipes[0], 'the second time too')
})

t.test('F20 the raw digest covers method, target, media type and body as sent', async (t) => {
  const digest = (body: string, more: Partial<RequestContent> = {}): string =>
    rawDigestOf(request(body, more), recipe).toString('hex')
  const base = digest('{"a":1}')
  t.equal(base, digest('{"a":1}'))
  t.equal(base, digest('{"a":1}', { headers: ['X', 'y', 'content-type', 'application/json'] }))
  const others = [
    digest('{"a": 1}'),
    digest('{"a":1}', { method: 'PATCH' }),
    digest('{"a":1}', { target: '/v1/payments/' }),
    digest('{"a":1}', { target: '/v1/payments?' }),
    digest('{"a":1}', { headers: [] }),
    digest('{"a":1}', { headers: ['Content-Type', 'text/plain'] }),
  ]
  t.equal(new Set([base, ...others]).size, others.length + 1)
})

t.test('F20 the raw digest covers a configured header only if it counted for the record', async (t) => {
  const headers = (currency: string): string[] => ['Content-Type', 'application/json', 'X-Currency', currency]
  const counting = recipeOf({ ...FINGERPRINT, headers: ['x-currency'] })
  const digest = (currency: string, under: string): string =>
    rawDigestOf(request('{"a":1}', { headers: headers(currency) }), under).toString('hex')
  t.not(digest('EUR', counting), digest('USD', counting), 'another currency is another request')
  t.equal(digest('EUR', counting), digest('EUR', counting))
  t.equal(digest('EUR', recipe), digest('USD', recipe), 'a header that did not count then does not count now')
  t.not(
    rawDigestOf(request('{"a":1}', { headers: ['Content-Encoding', 'gzip'] }), recipe).toString('hex'),
    rawDigestOf(request('{"a":1}', { headers: [] }), recipe).toString('hex'),
    'a content coding is part of what was sent',
  )
})

t.test('F20 it is known under which recipes a request has the same raw digest', async (t) => {
  const asked = request('{"a":1}', { headers: ['A', '1', 'B', '2'] })
  const recipes = [[], ['a'], ['b'], ['a', 'b'], ['b', 'a']].flatMap((headers) =>
    (['auto', 'raw'] as const).flatMap((body) =>
      [null, Buffer.from('a secret of sixteen bytes')].map(
        (secret) => new Digests(asked, asked.body, { ...FINGERPRINT, headers, body }, secret),
      ),
    ),
  )
  for (const one of recipes)
    for (const other of recipes)
      t.equal(hashesAlike(one.recipe, other.recipe), one.rawDigest.equals(other.rawDigest))
})

t.test('F20 a body cannot pass for a header line in the raw digest', async (t) => {
  const digest = (headers: readonly string[], body: string): string =>
    rawDigestOf(request(body, { headers }), recipe).toString('hex')
  t.not(digest([], '4:text'), digest(['Content-Type', 'text'], ''))
  t.not(digest(['Content-Type', 'a'], '1:b'), digest(['Content-Type', 'a', 'Content-Type', 'b'], ''))
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
  t.equal(new Set(rows.map((headers) => sent('{}', headers, more))).size, rows.length)
  t.equal(sent('{}', ['X-Tenant', 'a', 'X-Other', 'b'], more), sent('{}', ['x-tenant', 'a'], more))
})

t.test('body none: everything but the body counts', async (t) => {
  t.equal(json('{"a":1}', { body: 'none' }), json('', { body: 'none' }))
  t.not(json('', { body: 'none' }), print(request('', { path: '/x' }), { body: 'none' }))
})

t.test('path, query and body cannot pass for one another', async (t) => {
  const raw = { body: 'raw' } as const
  const rows = [
    print(request('ab', { path: '/c', query: '' }), raw),
    print(request('b', { path: '/c', query: 'a' }), raw),
    print(request('b', { path: '/ca', query: '' }), raw),
    print(request('', { path: '/c', query: 'ab' }), raw),
    print(request('3:raw', { path: '/c' }), raw),
    print(request('3:rawab', { path: '/c' }), raw),
  ]
  t.equal(new Set(rows).size, rows.length)
  // A body that looks like the canonical form of another is told apart by its mode.
  t.not(json('{"a":1}', raw), json('{"a":1}'))
})

t.test('two JSON bodies share a fingerprint exactly when their canonical forms are equal', async () => {
  const value = fc.jsonValue({ maxDepth: 3 })
  const form = (text: string): string | undefined => canonicalize(JSON.parse(text))
  fc.assert(
    fc.property(value, value, fc.constantFrom(0, 1, 2), (a, b, indent) => {
      const [one, two, again] = [JSON.stringify(a), JSON.stringify(b), JSON.stringify(a, null, indent)]
      return json(one) === json(again) && (json(one) === json(two)) === (form(one) === form(two))
    }),
    { numRuns: 500 },
  )
})

t.test('two raw bodies share a fingerprint exactly when they are equal', async () => {
  const body = fc.uint8Array({ maxLength: 3 }).map((bytes) => Buffer.from(bytes))
  fc.assert(
    fc.property(
      body,
      body,
      (a, b) => (json(a, { body: 'raw' }) === json(b, { body: 'raw' })) === a.equals(b),
    ),
    { numRuns: 500 },
  )
})

t.test('hostile headers, queries and bodies of 1 MiB are handled without an error', async (t) => {
  const size = 1024 * 1024
  for (const part of ['"', '\\"', ';', '; charset', ' ', 'a/b;"', '=', '"\\']) {
    const type = `a/b${part.repeat(size / part.length)}`
    t.type(contentType(['Content-Type', type]).media, 'string')
    t.type(contentType(['Content-Type', `${type}"; charset`]).media, 'string')
    t.ok(sent('{}', ['Content-Encoding', type]))
  }
  for (const part of ['&', 'a&', 'a=', 'b=1&a=1&', '%'])
    for (const mode of ['include', 'sorted'] as const) t.ok(queried(part.repeat(size / part.length), mode))
  for (const part of ['[', '{"a":', '1', '"\\', '\xff', ' ', '0.', '1e'])
    t.equal(json(part.repeat(size / part.length), { body: 'json' }).length, 64)
})

t.test('a fingerprint computed in steps equals the one computed at once', async (t) => {
  const text = `[${'{"b":[1.0,"x"],"a":null},'.repeat(10_000)}1]`
  for (const mode of ['auto', 'json', 'form', 'raw', 'none'] as const)
    for (const more of [{}, { ignore: ['/0/a'] }, { only: ['/1', '/2/b'] }])
      for (const body of [Buffer.from(text), Buffer.from(`${text},`)]) {
        const policy = { ...FINGERPRINT, ...more, body: mode }
        const digests = new Digests(request(''), body, policy, null)
        let steps = 1
        for (const work of [digests.begin(), digests.finish()]) while (work.next().done !== true) steps++
        t.equal(steps > 5, mode === 'json', `${mode}: ${steps} steps`)
        t.equal(digests.isLong, mode === 'json' || mode === 'form')
        const asked = request(body)
        t.same(digests.fingerprint, fingerprintOf(asked, policy))
        t.ok(digests.finish().next().done)
        t.ok(digests.isSameBytes(completed({ recipe: digests.recipe, rawDigest: digests.rawDigest })))
        t.notOk(digests.isSameBytes(completed({ recipe: digests.recipe })))
        t.ok(digests.isSameBytes(completed({ recipe: 'other', rawDigest: rawDigestOf(asked, 'other') })))
      }
})

t.test('§5 a secret keys the fingerprint and the raw digest, and the recipe says so', async (t) => {
  const secret = Buffer.from('a secret of sixteen bytes')
  const hmac = (digest: Buffer) => createHmac('sha256', secret).update(digest).digest()
  for (const policy of [FINGERPRINT, { ...FINGERPRINT, headers: ['x-currency'] }])
    for (const body of ['{"amount":100}', `[${'1,'.repeat(200_000)}1]`]) {
      const asked = request(body, { headers: ['Content-Type', 'application/json', 'X-Currency', 'EUR'] })
      const [plain, keyed] = [null, secret].map((key) => new Digests(asked, asked.body, policy, key)) as [
        Digests,
        Digests,
      ]
      t.equal(keyed.recipe, `keyed.${plain.recipe}`)
      const steps = keyed.begin()
      while (steps.next().done !== true);
      t.same(keyed.rawDigest, hmac(rawDigestOf(asked, plain.recipe)))
      t.same(keyed.fingerprint, hmac(fingerprintOf(asked, policy)))
      t.equal(keyed.fingerprint, keyed.fingerprint, 'computed once')
      for (const under of [keyed.recipe, 'keyed.other', 'keyed.other,x-currency'])
        t.same(keyed.rawDigestUnder(under), hmac(rawDigestOf(asked, under)))
      t.same(keyed.rawDigestUnder('other'), rawDigestOf(asked, 'other'))
      const stored = completed({ recipe: keyed.recipe, rawDigest: keyed.rawDigest })
      t.ok(keyed.isSameBytes(stored))
      t.notOk(plain.isSameBytes(stored))
      t.notOk(new Digests(asked, asked.body, policy, Buffer.from('another secret of 16')).isSameBytes(stored))
    }
})

t.test('a record made before digests were keyed is compared without the secret', async (t) => {
  const secret = Buffer.from('a secret of sixteen bytes')
  const first = request('{"amount":100,"to":"a"}')
  const { recipe, fingerprint, rawDigest } = new Digests(first, first.body, FINGERPRINT, null)
  const record = completed({ recipe, fingerprint, rawDigest })
  const verdict = (body: string, policy = FINGERPRINT) => {
    const asked = request(body)
    return decide(record, new Digests(asked, asked.body, policy, secret), { onLeaseExpired: 'unknown' }, 1500)
      .kind
  }
  t.equal(verdict('{"amount":100,"to":"a"}'), 'replay')
  t.equal(verdict('{ "to": "a", "amount": 1e2 }'), 'replay', 'in another spelling too')
  t.equal(verdict('{"amount":101,"to":"a"}'), 'reused')
  const other = { ...FINGERPRINT, ignore: ['/to'] }
  t.equal(verdict('{"amount":100,"to":"a"}', other), 'replay', 'other settings, the same bytes')
  t.equal(verdict('{ "amount":100,"to":"a"}', other), 'reused')
})

t.test('short bodies that grow in canonical form do not mix when read in turns', async (t) => {
  const policy: FingerprintPolicy = { ...FINGERPRINT, body: 'json' }
  // Five times as long in canonical form.
  const exponents = (digit: number): RequestContent => request(`[${`${digit}e20,`.repeat(12_000)}1]`)
  const requests = [exponents(1), exponents(2)]
  const all = requests.map((one) => new Digests(one, one.body, policy, null))
  const work = all.map((digests) => digests.finish())
  while (!work.map((steps) => steps.next().done).every((isMade) => isMade));
  t.same(
    all.map(({ fingerprint }) => fingerprint),
    requests.map((one) => fingerprintOf(one, policy)),
  )
})

t.test('fingerprints computed in turns do not mix', async (t) => {
  const policy: FingerprintPolicy = { ...FINGERPRINT, body: 'json' }
  const asked = (amount: string, size: number): RequestContent =>
    request(`{"amount":${amount},"fill":"${'x'.repeat(size)}"}`)
  for (const size of [100, 20_000, 65_000, 70_000, 200_000])
    for (const amount of ['1', '1.0']) {
      // As the claims of several requests do: one step of each per turn of the event loop.
      const requests = [asked(amount, size), asked('2', size), asked('3.0', 20_000), asked('4.0', 10)]
      const expected = requests.map((one) => fingerprintOf(one, policy))
      const all = requests.map((one) => new Digests(one, one.body, policy, null))
      const work = all.map((digests) => digests.finish())
      while (!work.map((steps) => steps.next().done).every((isMade) => isMade));
      t.same(
        all.map(({ fingerprint }) => fingerprint),
        expected,
        `${size} bytes, ${amount}`,
      )
    }
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
    const body = Buffer.from(text)
    const policy: FingerprintPolicy = { ...FINGERPRINT, body: 'json', ...more }
    const asked = request(body)
    const before = process.memoryUsage().arrayBuffers
    fingerprintOf(asked, policy)
    t.ok(process.memoryUsage().arrayBuffers - before < body.length)
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
  t.ok(sameResponse(one, of(['a', '2', 'c', '3', 'A', ' 1 ', 'b', '1'])), 'in another order and spelling')
  t.notOk(
    sameResponse(one, of(['A', '1', 'B', '1', 'C', '3', 'A', '2'])),
    'lines of one name in another order',
  )
  t.notOk(sameResponse(one, of([...lines, 'D', ''])))
  t.notOk(sameResponse(one, of(lines, 200)))
  t.notOk(sameResponse(one, of(lines, 201, 'OK')))
  const names =
    'age cf-ray content-length date request-id server-timing traceparent tracestate trailer x-amzn-requestid x-amzn-trace-id x-correlation-id x-envoy-upstream-service-time x-request-id x-response-time x-runtime x-trace-id'
  for (const name of names.split(' ')) t.ok(sameResponse(one, of([...lines, name.toUpperCase(), 'x'])), name)
  t.strictSame(of(['A', '1', 'B']).lines, '[["a","1"]]', 'a name without a value is no line')
})

t.test('the digests of a request never change, since records are compared with them', async (t) => {
  const asked = request('{"b":1,"a":2.0}', { query: 'b=1&a=2', target: '/v1/payments?b=1&a=2' })
  const policies: readonly Partial<FingerprintPolicy>[] = [
    {},
    { body: 'raw', headers: ['content-type'] },
    { body: 'none', query: 'ignore' },
    { query: 'sorted', only: ['/a'] },
  ]
  t.strictSame(
    policies.map((more) => {
      const digests = new Digests(asked, asked.body, { ...FINGERPRINT, ...more }, null)
      return [
        digests.recipe,
        digests.fingerprint.toString('hex').slice(0, 16),
        digests.rawDigest.toString('hex').slice(0, 16),
      ]
    }),
    [
      ['QzgPYX5HREAXN_G8', '5260a071445e3557', 'b6ae31e68b1582d2'],
      ['EdXYsQhSHzFVM2Xt,content-type', 'a00f9ea1f84ff2d7', '216a9e55a00c5484'],
      ['6Rhp7rlKOGSiF57D', '6f44afd77d9bd1c1', 'b6ae31e68b1582d2'],
      ['Fh8SmaT5IZ2YLxvS', '408aa9d1ea7754f5', 'b6ae31e68b1582d2'],
    ],
  )
})

t.test('the fingerprint of a form never changes', async (t) => {
  const form = ['Content-Type', 'application/x-www-form-urlencoded; v=1']
  const parts = ['Content-Type', 'multipart/form-data; boundary=B']
  const part = '--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--'
  t.strictSame(
    [sent('a=%41', form), sent(part, parts)].map((hex) => hex.slice(0, 16)),
    ['4826facc5a94eb73', 'ca0c385baa76d5d5'],
  )
})

t.test('F20 the raw digest covers every header that counted for the record', async (t) => {
  const under = recipeOf({ ...FINGERPRINT, headers: ['x-one', 'x-two'] })
  const digest = (one: string, two: string): string =>
    rawDigestOf(request('', { headers: ['X-One', one, 'X-Two', two] }), under).toString('hex')
  t.equal(new Set([digest('1', '1'), digest('2', '1'), digest('1', '2')]).size, 3)
})

t.test('a query is sorted by whole names, without empty pairs', async (t) => {
  t.equal(queried('b=1&&a=1&', 'sorted'), queried('a=1&b=1', 'sorted'))
  t.equal(queried('b=0&a=1&a=2', 'sorted'), queried('a=1&a=2&b=0', 'include'))
  t.equal(queried('c=1&b=1&a=1&b=0', 'sorted'), queried('b=1&a=1&b=0&c=1', 'sorted'))
  t.not(queried('a=2&a=1', 'sorted'), queried('a=1&a=2', 'sorted'))
  t.not(queried('a=b&c', 'sorted'), queried('a=bc', 'sorted'))
  t.equal(queried('x', 'ignore'), queried('', 'ignore'))
  t.equal(queried('', 'ignore'), queried('', 'include'))
})

t.test('long bodies are hashed in steps of a quarter of a MiB', async (t) => {
  const stepsOf = (length: number, policy: FingerprintPolicy): number => {
    const digests = new Digests(request(''), Buffer.alloc(length, 'x'), policy, null)
    t.equal(digests.takesSteps, length > 256 * 1024)
    let steps = 0
    const work = digests.begin()
    while (work.next().done !== true) steps++
    return steps
  }
  const raw: FingerprintPolicy = { ...FINGERPRINT, body: 'raw' }
  t.equal(stepsOf(256 * 1024, raw) <= 2, true)
  const steps = stepsOf(4 * 1024 * 1024, raw)
  t.ok(steps >= 30 && steps <= 34, `${steps}: the raw digest and the fingerprint, of 16 quarters each`)
})

t.test('F20 a record of other settings is compared by the headers that counted for it', async (t) => {
  const headers = ['Content-Type', 'application/json', 'X-Currency', 'EUR']
  const asked = request('{}', { headers })
  const digests = new Digests(asked, asked.body, FINGERPRINT, null)
  const under = (recipe: string, header: string) =>
    completed({
      recipe,
      rawDigest: rawDigestOf({ ...asked, headers: [...headers.slice(0, 3), header] }, recipe),
    })
  t.ok(digests.isSameBytes(under('other,x-currency', 'EUR')))
  t.notOk(digests.isSameBytes(under('other,x-currency', 'USD')))
  t.ok(digests.isSameBytes(under('other', 'USD')), 'it did not count')
  t.ok(digests.isSameBytes(under(digests.recipe, 'USD')), 'it does not count')
})

t.test('a fingerprint under another recipe is known only if that recipe was not keyed yet', async (t) => {
  const asked = request('{}')
  const keyed = new Digests(asked, asked.body, FINGERPRINT, Buffer.from('a secret of sixteen bytes'))
  t.same(keyed.fingerprintUnder(recipe), fingerprintOf(asked, FINGERPRINT))
  for (const other of ['other', keyed.recipe]) t.equal(keyed.fingerprintUnder(other), null)
  t.equal(new Digests(asked, asked.body, FINGERPRINT, null).fingerprintUnder(recipe), null)
})

t.test('only the fingerprint of a long body is left for later', async (t) => {
  const policy: FingerprintPolicy = { ...FINGERPRINT, body: 'json' }
  for (const [items, isLong] of [
    [1000, false],
    [100_000, true],
  ] as const) {
    const digests = new Digests(request(''), Buffer.from(`[${'1.0,'.repeat(items)}1]`), policy, null)
    t.equal(digests.isLong, isLong)
    for (const step of digests.begin()) t.equal(step, undefined)
    t.equal(digests.finish().next().done, !isLong, `${items} items`)
  }
})
