import fc from 'fast-check'
import t from 'tap'
import { canonical, type Node, parseLossless } from '../../src/core/json.ts'
import { carriesKey, type KeyReading, keyNeedsBody, readKey } from '../../src/core/key.ts'
import { jsonTextOf, pointedAt } from '../../src/core/pointed.ts'
import type { KeyPolicy, KeySource } from '../../src/core/policy.ts'
import { KEY } from './fixtures.ts'

const header = (name: string): KeySource => ({ kind: 'header', name })
const json = (pointer: string): KeySource => ({ kind: 'json', pointer })
const from = (...sources: KeySource[]): KeyPolicy => ({ ...KEY, from: sources })

const BY_ID = from(json('/id'))
const EVENTS = from(header('ce-id'), json('/id'))
const STRUCTURED = ['Content-Type', 'application/cloudevents+json; charset=utf-8']

function reading(body: string | Buffer | null, policy = BY_ID, headers: readonly string[] = []): KeyReading {
  return readKey(headers, policy, body === null ? null : Buffer.from(body as string))
}
/** The key, or why there is none. */
function read(...args: Parameters<typeof reading>): string {
  const found = reading(...args)
  return found.kind === 'key' ? `key:${found.key}` : found.kind
}

t.test('a pointed-at string or integer is the key', async (t) => {
  for (const [body, key] of [
    ['{"id":"evt_1"}', 'evt_1'],
    [' {\n"a" : [{"id":1}, "\\"]}"], "id" : "evt_1" }\n', 'evt_1'],
    ['{"id":42}', '42'],
    ['{"id":0}', '0'],
    ['{"id":-0}', '0'],
    ['{"id":-7}', '-7'],
    ['{"id":9007199254740993}', '9007199254740993'],
    ['{"id":123456789012345678901234567890}', '123456789012345678901234567890'],
    ['{"i\\u0064":"\\u0061"}', 'a'],
    // Verbatim: no String of RFC 9651 is undone, no list is seen.
    [String.raw`{"id":"\"a\""}`, '"a"'],
    ['{"id":"\\"a"}', '"a'],
    ['{"id":"a, b"}', 'a, b'],
    ['{"id":" a "}', ' a '],
  ] as const)
    t.same(reading(body), { kind: 'key', key, qualifier: [] }, body)
  t.equal(read('{"id":"a"}', { ...BY_ID, syntax: 'strict' }), 'key:a', 'whatever the syntax of headers')
})

t.test('a body that nests deeper than anything that is meant is no JSON', async (t) => {
  const nested = (depth: number) => `{"id":"a","x":${'['.repeat(depth)}${']'.repeat(depth)}}`
  t.equal(read(nested(999)), 'key:a')
  t.equal(read(nested(1000)), 'missing')
  t.equal(read('['.repeat(1_000_000)), 'missing')
  t.equal(read(`{"id":"${'['.repeat(200)}","y":"\\"${'{'.repeat(2000)}`), 'missing', 'not in strings')
  t.equal(read(`{"z":"${'['.repeat(2000)}\\"","id":"a"}`), 'key:a', 'not in strings')
})

t.test('pointers follow RFC 6901', async (t) => {
  const body = '{"a":{"b":[1,{"c":"x"}],"":"e"},"a/b":"s","m~n":"t","~1":"u","0":"z"}'
  for (const [pointer, key] of [
    ['/a/b/1/c', 'key:x'],
    ['/a/b/0', 'key:1'],
    ['/a/', 'key:e'],
    ['/a~1b', 'key:s'],
    ['/m~0n', 'key:t'],
    ['/~01', 'key:u'],
    ['/0', 'key:z'],
    ['/a/b/2', 'missing'],
    ['/a/b/-', 'missing'],
    ['/a/b/01', 'missing'],
    ['/a/b/99999999999999999999', 'missing'],
    ['/a/b/c', 'missing'],
    ['/a~1b/c', 'missing'],
    ['/a/b/0/c', 'missing'],
    ['/A', 'missing'],
    ['/toString', 'missing'],
    ['/a', 'invalid'],
    ['/a/b', 'invalid'],
  ] as const)
    t.equal(read(body, from(json(pointer))), key, pointer)
  t.equal(read('"k"', from(json(''))), 'key:k', 'the whole body')
  t.equal(read('[ ]', from(json('/0'))), 'missing')
  t.equal(read('{ }', from(json('/0'))), 'missing')
})

t.test('what is absent or no JSON is missing', async (t) => {
  for (const body of [
    '',
    ' ',
    '{}',
    '[]',
    '1',
    '{"Id":"a"}',
    '{"id":"a"',
    "{'id':'a'}",
    '{"id":01}',
    '{"id":"a"}x',
  ])
    t.equal(read(body), 'missing', body)
  t.equal(
    read(Buffer.from([...Buffer.from('{"x":"'), 0xff, ...Buffer.from('","id":"a"}')])),
    'missing',
    'not UTF-8',
  )
  t.equal(read('\ufeff{"id":"a"}'), 'missing', 'a byte order mark is no JSON')
  t.equal(read('{"id":"a"}', BY_ID, ['Content-Encoding', 'gzip']), 'missing', 'an encoded body')
  t.equal(read('{"id":"a"}', BY_ID, ['Content-Encoding', 'identity']), 'key:a')
})

t.test('anything else at the pointer is invalid', async (t) => {
  for (const value of [
    'null',
    'true',
    'false',
    '{}',
    '[]',
    '["a"]',
    '1.0',
    '1e3',
    '1E3',
    '-1.5',
    '""',
    '"  "',
  ])
    t.equal(read(`{"id":${value}}`), 'invalid', value)
  for (const value of [
    '"caf\u00e9"',
    '"a\\nb"',
    '"a\\u0000"',
    '"\\ud800"',
    '"\\u007f"',
    '"a\\tb"',
    '"\\u2028"',
  ])
    t.equal(read(`{"id":${value}}`), 'invalid', value)
  for (const body of [
    '{"id":"a","id":"a"}',
    '{"id":"a","id":null}',
    '{"id":"a","\\u0069d":"b"}',
    '{"id":{},"id":1}',
  ])
    t.equal(read(body), 'invalid', body)
  t.equal(read('{"a":{"id":"x"},"a":1}', from(json('/a/id'))), 'invalid', 'a member on the way there')
})

t.test('what the rest of the body holds does not matter', async (t) => {
  const deep = `${'['.repeat(900)}${']'.repeat(900)}`
  for (const rest of [
    '1e400',
    '12345678901234567890',
    '"\\ud800"',
    '{"x":1,"x":2}',
    deep,
    '"\\\\"',
    '"\\""',
    '-1.5E+3',
  ])
    for (const body of [
      `{"rest":${rest},"id":"a"}`,
      `{"id":"a","rest":${rest}}`,
      `{"r":[${rest},${rest} ] , "id":"a"}`,
    ])
      t.equal(read(body), 'key:a', body.slice(0, 60))
  t.equal(read('{"x":{"id":"b"},"y":["id"],"id":"a","z":"\\"id\\":1"}'), 'key:a')
})

t.test('K13 K14 K20 a pointed-at key is held against the same rules', async (t) => {
  const policy = { ...BY_ID, minLength: 3, maxLength: 5, pattern: /^[0-9a-z]+$/ }
  for (const [value, expected] of [
    ['"abc"', 'key:abc'],
    ['"abcde"', 'key:abcde'],
    ['12345', 'key:12345'],
    ['"ab"', 'invalid'],
    ['12', 'invalid'],
    ['"abcdef"', 'invalid'],
    ['123456', 'invalid'],
    ['"ABC"', 'invalid'],
  ] as const)
    t.equal(read(`{"id":${value}}`, policy), expected, value)
})

t.test('K12 sources that disagree are refused, those that agree are accepted', async (t) => {
  const both = from(header('idempotency-key'), json('/id'), json('/data/id'))
  const key = (value: string): string[] => ['Idempotency-Key', value]
  for (const [headers, body, expected] of [
    [key('a'), '{"id":"a"}', 'key:a'],
    [key('"42"'), '{"id":42,"data":{"id":"42"}}', 'key:42'],
    [key('a'), '{}', 'key:a'],
    [key('a'), 'no JSON', 'key:a'],
    [[], '{"data":{"id":"a"}}', 'key:a'],
    [[], '{"id":"b","data":{"id":"a"}}', 'invalid'],
    [key('a'), '{"id":"b"}', 'invalid'],
    [key('a'), '{"id":"A"}', 'invalid'],
    [key('a'), '{"id":null}', 'invalid'],
    [key(''), '{"id":"a"}', 'invalid'],
    [[], '{}', 'missing'],
  ] as const)
    t.equal(read(body, both, headers), expected, `${headers.join(' ')} ${body}`)
})

t.test('before the body is read headers alone are looked at, and their errors found', async (t) => {
  const both = from(json('/id'), header('idempotency-key'))
  t.equal(read(null, both), 'missing')
  t.equal(read(null, both, ['Idempotency-Key', 'a']), 'key:a')
  t.equal(read(null, both, ['Idempotency-Key', '']), 'invalid')
  t.equal(read(null, { ...both, minLength: 2 }, ['Idempotency-Key', 'a']), 'invalid')
  t.equal(read(null, BY_ID), 'missing')
  t.notOk(carriesKey(['Id', 'a'], BY_ID.from))
})

t.test('the body is needed where it may carry the key, or what a key is derived from', async (t) => {
  const derive = { json: [], headers: ['x-order'], bucket: null }
  t.notOk(keyNeedsBody(KEY))
  t.notOk(keyNeedsBody({ ...KEY, derive }))
  t.ok(keyNeedsBody(BY_ID))
  t.ok(keyNeedsBody(EVENTS))
  t.ok(keyNeedsBody({ ...KEY, derive: { ...derive, json: ['/order'] } }))
})

t.test('K22 a refusal names the source and never repeats the key', async (t) => {
  const policy = {
    ...from(json('/id'), header('k'), json('/b')),
    minLength: 8,
    maxLength: 12,
    pattern: /^\d+$/,
  }
  for (const [body, headers] of [
    ['{"id":"s3cr"}', []],
    ['{"id":"s3crs3crs3crs3cr"}', []],
    ['{"id":"s3crs3crs3"}', []],
    ['{"id":"s3cr\\n"}', []],
    ['{"id":["s3cr"]}', []],
    ['{"id":"s3cr","id":"s3cr"}', []],
    ['{"id":"s3crs3cr","b":"s3crs3cr2"}', []],
    ['{"id":"s3crs3cr"}', ['K', 's3crs3cr2']],
  ] as const) {
    const found = reading(body, policy, headers)
    t.match(found, { kind: 'invalid', detail: /json:\/id/ }, body)
    t.notMatch(JSON.stringify(found), /s3cr/)
  }
  t.match(reading('{"id":"12"}', policy), { detail: 'json:/id: 2 characters; at least 8 are needed' })
  t.match(reading('{}', policy, ['K', '12']), { detail: 'k: 2 characters; at least 8 are needed' })
})

t.test('ce-id takes ce-source in with it', async (t) => {
  const policy = from(header('ce-id'))
  const qualified = (...lines: string[]): unknown => reading(null, policy, ['CE-Id', '1', ...lines])
  t.same(qualified('ce-source', '/a'), { kind: 'key', key: '1', qualifier: ['ce-source', '/a'] })
  t.same(qualified('Ce-Source', '/A'), { kind: 'key', key: '1', qualifier: ['ce-source', '/A'] })
  t.same(qualified(), { kind: 'key', key: '1', qualifier: ['ce-source', null] })
  t.same(qualified('ce-source', ''), { kind: 'key', key: '1', qualifier: ['ce-source', ''] })
  t.match(qualified('ce-source', '/a', 'ce-source', '/a'), { kind: 'invalid', detail: /^ce-source: 2/ })
  const either = from(header('idempotency-key'), header('ce-id'))
  t.same(reading(null, either, ['Idempotency-Key', '1', 'ce-source', '/a']), {
    kind: 'key',
    key: '1',
    qualifier: [],
  })
})

t.test('an event is one record in binary and in structured mode', async (t) => {
  const one = { kind: 'key', key: '1', qualifier: ['ce-source', '/a'] }
  const event = '{"specversion":"1.0","id":"1","source":"/a"}'
  t.same(reading('{"amount":1}', EVENTS, ['ce-id', '1', 'ce-source', '/a']), one)
  t.same(reading(event, EVENTS, STRUCTURED), one)
  t.same(reading(event, EVENTS, ['content-type', 'Application/CloudEvents+JSON']), one)
  t.same(reading(event, EVENTS, [...STRUCTURED, 'ce-id', '1', 'ce-source', '/a']), one, 'both at once')
  t.same(reading(event, EVENTS, [...STRUCTURED, 'ce-id', '1']), one)
  t.same(reading('{"id":"1"}', EVENTS, [...STRUCTURED, 'ce-id', '1', 'ce-source', '/a']), one)
  t.match(reading(event, EVENTS, [...STRUCTURED, 'ce-source', '/b']), { kind: 'invalid' })
  t.same(reading('{"id":"1"}', EVENTS, STRUCTURED), { ...one, qualifier: ['ce-source', null] })
  t.match(reading(event, EVENTS, [...STRUCTURED, 'ce-id', '1', 'ce-source', '/b']), { kind: 'invalid' })
  t.match(reading(event, EVENTS, [...STRUCTURED, 'ce-id', '2', 'ce-source', '/a']), { kind: 'invalid' })
  for (const source of ['1', 'null', '["/a"]', '"\\ud800"', '"/a","source":"/b"'])
    t.match(reading(`{"id":"1","source":${source}}`, EVENTS, STRUCTURED), { kind: 'invalid' }, source)
})

t.test('elsewhere a source in the body is not looked at', async (t) => {
  const event = '{"id":"1","source":"/a"}'
  const plain = { kind: 'key', key: '1', qualifier: [] }
  t.same(reading(event, EVENTS, ['Content-Type', 'application/json']), plain)
  t.same(reading(event, EVENTS), plain)
  t.same(reading(event, BY_ID, STRUCTURED), plain, 'a route that does not read ce-id')
  const other = from(header('ce-id'), json('/source'))
  t.same(reading(event, other, STRUCTURED), { ...plain, key: '/a' }, 'nor another member of an event')
  const three = from(header('idempotency-key'), header('ce-id'), json('/id'))
  t.same(reading('{"source":"/a"}', three, [...STRUCTURED, 'Idempotency-Key', '1']), plain)
})

t.test('a pointer finds the value that was written there', async () => {
  // Not JSON.parse: V8 13.6 reads the name `\` in `{"id":1,"\"":1}` once it has seen `{"id":1,"\\":1}`.
  const form = (text: string): string => canonical(parseLossless(text) as Node)
  const name = fc.constantFrom('id', 'a', '', '/', '~', '0', '"', '\\', '\u00e9')
  const value = fc.letrec((tie) => ({
    any: fc.oneof(
      { depthSize: 'small' },
      fc.constantFrom(null, true, 0, -1.5, 1e21, 'x', '{"id":1}', ']', '\\"', ''),
      fc.dictionary(name, tie('any')),
      fc.array(tie('any')),
    ),
  })).any
  const escape = (token: string): string => `/${token.replaceAll('~', '~0').replaceAll('/', '~1')}`
  fc.assert(
    fc.property(
      value,
      fc.array(name, { maxLength: 3 }),
      fc.constantFrom(0, 1, '\t'),
      (whole, tokens, indent) => {
        const text = JSON.stringify(whole, null, indent)
        const found = pointedAt(text, tokens.map(escape).join(''))
        let expected: unknown = whole
        for (const token of tokens)
          expected =
            typeof expected === 'object' && expected !== null && Object.hasOwn(expected, token)
              ? (expected as Record<string, unknown>)[token]
              : undefined
        return found.kind === 'literal'
          ? form(found.literal) === form(JSON.stringify(expected))
          : found.kind === 'absent' && expected === undefined
      },
    ),
    { numRuns: 2000 },
  )
})

t.test('hostile bodies of 1 MiB are read to the end', async (t) => {
  const size = 1024 * 1024
  for (const part of ['[', '{"id":', '"', '\\', ' ', '1', '{}', '\xff', '"\\"'])
    t.type(read(part.repeat(size / part.length)), 'string')
  for (const [open, close] of [
    ['[', ']'],
    ['{"id":', '}'],
  ] as const)
    t.type(read(`${open.repeat(size / 8)}1${close.repeat(size / 8)}`), 'string', 'nested')
  t.equal(read(`{"id":${'1'.repeat(size)}}`), 'invalid')
  t.equal(read(`{"x":"${'\\\\'.repeat(size / 2)}","id":1}`), 'key:1')
  t.equal(read(`{${'"x":1,'.repeat(size / 8)}"id":1}`), 'key:1')
  t.equal(jsonTextOf([], Buffer.alloc(size, '[')), null)
})
