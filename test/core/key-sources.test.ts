import fc from 'fast-check'
import t from 'tap'
import { canonicalJson } from '../../src/core/body/json.ts'
import { lookUp } from '../../src/core/body/json-lookup.ts'
import {
  carriesKey,
  derivedParts,
  deriveKey,
  type KeyReading,
  keyNeedsBody,
  readKey,
  readKeyBody,
  sourceName,
} from '../../src/core/key.ts'
import type { DerivePolicy, KeyPolicy, KeySource } from '../../src/core/policy.ts'
import { atOnce } from '../../src/core/steps.ts'
import { KEY, keyBody, words } from './fixtures.ts'

const header = (name: string): KeySource => ({ kind: 'header', name })
const query = (name: string): KeySource => ({ kind: 'query', name })
const form = (name: string): KeySource => ({ kind: 'form', name })
const json = (pointer: string): KeySource => ({ kind: 'json', pointer })
const from = (...sources: KeySource[]): KeyPolicy => ({ ...KEY, from: sources })

const BY_ID = from(json('/id'))
const EVENTS = from(header('ce-id'), json('/id'))
const STRUCTURED = ['Content-Type', 'application/cloudevents+json; charset=utf-8']

function reading(body: string | Buffer | null, policy = BY_ID, headers: readonly string[] = []): KeyReading {
  return readKey({ headers, query: '' }, policy, body === null ? null : keyBody(headers, body, policy))
}
/** The key, or why there is none. */
const said = (found: KeyReading): string => (found.kind === 'key' ? `key:${found.key}` : found.kind)
const read = (...args: Parameters<typeof reading>): string => said(reading(...args))

t.test('a string or integer at the pointer is the key', async (t) => {
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
    // Verbatim: neither unquoted as an RFC 9651 String nor split as a list.
    [String.raw`{"id":"\"a\""}`, '"a"'],
    ['{"id":"\\"a"}', '"a'],
    ['{"id":"a, b"}', 'a, b'],
    ['{"id":" a "}', ' a '],
  ] as const)
    t.same(reading(body), { kind: 'key', key, qualifier: [] }, body)
  t.equal(read('{"id":"a"}', { ...BY_ID, syntax: 'strict' }), 'key:a', 'whatever the syntax of header keys')
})

t.test('a key is missing if the pointer finds nothing or the body is not JSON', async (t) => {
  for (const [pointer, found] of [
    ['/a/b/1/c', 'key:x'],
    ['/a/b/2', 'missing'],
    ['/a', 'invalid'],
    ['/a/b', 'invalid'],
  ] as const)
    t.equal(read('{"a":{"b":[1,{"c":"x"}]}}', from(json(pointer))), found, pointer)
  t.equal(read('"k"', from(json(''))), 'key:k', 'the whole body')
  for (const body of [words`{} [] 1 {"Id":"a"} {"id":"a" {'id':'a'} {"id":01} {"id":"a"}x`, ['', ' ']].flat())
    t.equal(read(body), 'missing', body)
  t.equal(
    read(Buffer.from([...Buffer.from('{"x":"'), 0xff, ...Buffer.from('","id":"a"}')])),
    'missing',
    'not UTF-8',
  )
  t.equal(read('\ufeff{"id":"a"}'), 'key:a', 'a byte order mark is skipped')
  t.equal(read('\ufeff'), 'missing')
  const coded = ['Content-Encoding', 'compress']
  t.equal(read('{"id":"a"}', BY_ID, coded), 'invalid', 'whether it has a key cannot be said')
  const either = { ...BY_ID, from: [{ kind: 'header', name: 'x-key' } as const, ...BY_ID.from] }
  t.equal(read('{"id":"a"}', either, [...coded, 'X-Key', 'b']), 'key:b', 'another source has one')
  t.equal(read('{"id":"a"}', BY_ID, ['Content-Encoding', 'identity']), 'key:a')
})

t.test('any other value at the pointer is an invalid key', async (t) => {
  for (const value of [...words`null true false {} [] ["a"] 1.0 1e3 1E3 -1.5 ""`, '"  "'])
    t.equal(read(`{"id":${value}}`), 'invalid', value)
  for (const value of [...words`"a\nb" "a\u0000" "\ud800" "\u007f" "a\tb" "\u2028"`, '"caf\u00e9"'])
    t.equal(read(`{"id":${value}}`), 'invalid', value)
  for (const body of words`
    {"id":"a","id":"a"} {"id":"a","id":null} {"id":"a","\u0069d":"b"} {"id":{},"id":1}`)
    t.equal(read(body), 'invalid', body)
  t.equal(read('{"a":{"id":"x"},"a":1}', from(json('/a/id'))), 'invalid', 'a duplicate member along the way')
})

t.test('K13 K14 K20 a key in the body obeys the same rules', async (t) => {
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

t.test('before the body is read, only headers are checked, and a bad key in them is refused', async (t) => {
  const both = from(json('/id'), header('idempotency-key'))
  t.equal(read(null, both), 'missing')
  t.equal(read(null, both, ['Idempotency-Key', 'a']), 'key:a')
  t.equal(read(null, both, ['Idempotency-Key', '']), 'invalid')
  t.equal(read(null, { ...both, minLength: 2 }, ['Idempotency-Key', 'a']), 'invalid')
  t.equal(read(null, BY_ID), 'missing')
  t.notOk(carriesKey({ headers: ['Id', 'a'], query: '' }, BY_ID.from))
})

t.test('the body is needed if it may carry the key or a part of a derived one', async (t) => {
  const derive = { json: [], form: [], headers: ['x-order'], path: false, bucket: null }
  t.notOk(keyNeedsBody(KEY))
  t.notOk(keyNeedsBody({ ...KEY, derive }))
  t.ok(keyNeedsBody(BY_ID))
  t.ok(keyNeedsBody(EVENTS))
  t.ok(keyNeedsBody({ ...KEY, derive: { ...derive, json: ['/order'] } }))
  t.ok(keyNeedsBody({ ...KEY, derive: { ...derive, form: ['order'] } }))
  t.ok(keyNeedsBody(from(form('key'))))
  t.notOk(keyNeedsBody(from(query('key'))))
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

const URLENCODED = ['Content-Type', 'application/x-www-form-urlencoded']
const BY_FIELD = from(form('key'))

t.test('a field of a urlencoded form is the key', async (t) => {
  for (const [body, expected] of [
    ['key=a', 'key:a'],
    ['amount=1&key=a&x=2', 'key:a'],
    ['key=a+b%2Bc%26%3d', 'key:a b+c&='],
    ['%6bey=a', 'key:a'],
    ['%6B%65%79=%61', 'key:a'],
    ['key=a=b=', 'key:a=b='],
    ['key=100%', 'key:100%'],
    ['key=%zz%4', 'key:%zz%4'],
    ['key="a", b', 'key:"a", b'],
    ['&&key=a&&', 'key:a'],
    ['', 'missing'],
    ['amount=1', 'missing'],
    ['Key=a', 'missing'],
    ['keys=a&ke=b&ke', 'missing'],
    ['a=key&b=key%3da', 'missing'],
    ['key', 'invalid'],
    ['key=', 'invalid'],
    ['key=+%20', 'invalid'],
    ['key=a&key=b', 'invalid'],
    ['key=a&key=a', 'invalid'],
    ['key&%6bey=a', 'invalid'],
    ['key=%C3%A9', 'invalid'],
    ['key=\u00e9', 'invalid'],
    ['key=a%00', 'invalid'],
    ['key=a%0D%0A', 'invalid'],
    ['key=%7f', 'invalid'],
  ] as const)
    t.equal(read(body, BY_FIELD, URLENCODED), expected, body)
  t.equal(read('a%5bkey%5d=a', from(form('a[key]')), URLENCODED), 'key:a')
  t.equal(read('a[key]=a', from(form('a[key]')), URLENCODED), 'key:a')
  t.equal(
    read('key=a', { ...BY_FIELD, syntax: 'strict' }, URLENCODED),
    'key:a',
    'whatever the syntax of header keys',
  )
  t.equal(read('key=ab', { ...BY_FIELD, minLength: 3 }, URLENCODED), 'invalid')
})

t.test('a field is read only from a body that is a form', async (t) => {
  for (const [type, expected] of [
    ['application/x-www-form-urlencoded', 'key:a'],
    ['Application/X-WWW-Form-Urlencoded; charset=UTF-8', 'key:a'],
    ['application/x-www-form-urlencoded;charset=utf-16', 'invalid'],
    ['application/json', 'missing'],
    ['text/plain', 'missing'],
    ['application/x-www-form-urlencoded-not', 'missing'],
    ['multipart/form-data', 'invalid'],
    ['multipart/form-data; boundary=b', 'invalid'],
  ] as const)
    t.equal(read('key=a', BY_FIELD, ['Content-Type', type]), expected, type)
  t.equal(read('key=a', BY_FIELD), 'missing', 'no media type')
  t.equal(read('key=a', BY_FIELD, [...URLENCODED, 'Content-Encoding', 'gzip']), 'invalid')
  t.equal(read('key=a', BY_FIELD, [...URLENCODED, 'Content-Encoding', 'identity']), 'key:a')
  t.equal(read('key=a', BY_FIELD, [...URLENCODED, ...URLENCODED]), 'invalid', 'two lines')
  t.equal(read('key=a', BY_FIELD, ['Content-Type', 'text/plain', ...URLENCODED]), 'invalid')
  t.equal(read('key=a', BY_FIELD, ['Content-Type', 'text/plain', 'Content-Type', 'text/html']), 'missing')
  t.equal(read(null, BY_FIELD, URLENCODED), 'missing', 'before the body is read')
})

t.test('a field of a multipart form is the key, verbatim', async (t) => {
  const boundary = ['Content-Type', 'multipart/form-data; boundary=XYZ']
  const field = (disposition: string, value: string, more = ''): string =>
    `--XYZ\r\nContent-Disposition: ${disposition}\r\n${more}\r\n${value}\r\n`
  const other = field('form-data; name="amount"', '1')
  const file = field('form-data; name="f"; filename="key"', 'x', 'Content-Type: image/png\r\n')
  const key = (value: string) => field('form-data; name="key"', value)
  for (const [parts, expected] of [
    [[other, file, key('a')], 'key:a'],
    [[key('a b+%41"'), other], 'key:a b+%41"'],
    [[other, file], 'missing'],
    [[key('a'), key('a')], 'invalid'],
    [[key('a'), key('b')], 'invalid'],
    ...['', ' ', '\u00e9', 'a\r\n'].map((value) => [[key(value)], 'invalid'] as const),
  ] as const)
    t.equal(read(`${parts.join('')}--XYZ--\r\n`, BY_FIELD, boundary), expected, parts.join(''))
  // If each blank were tried as the last one before the value, these would take minutes.
  const blanks = `--XYZ\r\na:${' '.repeat(8100)}\0\r\n\r\nx\r\n--XYZ--\r\n`
  for (let n = 0; n < 500; n++) if (read(blanks, BY_FIELD, boundary) !== 'invalid') t.fail('a NUL in a part')
})

t.test('a query parameter is the key, known before the body is read', async (t) => {
  const byQuery = from(query('key'))
  const readQuery = (text: string, policy = byQuery, headers: string[] = []): string =>
    said(readKey({ headers, query: text }, policy, null))
  for (const [text, expected] of [
    ['key=a', 'key:a'],
    ['x=1&key=a+%41', 'key:a A'],
    ['%6bey=a', 'key:a'],
    ['', 'missing'],
    ['x=1', 'missing'],
    ['key', 'invalid'],
    ['key=', 'invalid'],
    ['key=a&key=a', 'invalid'],
    ['key=\xe9', 'invalid'],
    ['key=%C3%A9', 'invalid'],
  ] as const) {
    t.equal(readQuery(text), expected, text)
    t.equal(carriesKey({ headers: [], query: text }, byQuery.from), expected !== 'missing', text)
  }
  const both = from(header('idempotency-key'), query('key'))
  t.equal(readQuery('key=a', both, ['Idempotency-Key', '"a"']), 'key:a')
  t.equal(readQuery('key=a', both, ['Idempotency-Key', 'b']), 'invalid', 'K12')
  t.equal(readQuery('x=a', both, ['Idempotency-Key', 'b']), 'key:b')
})

t.test('K12 a form, a query and a header that disagree are refused', async (t) => {
  const all = from(header('k'), query('k'), form('k'))
  for (const [line, text, body, expected] of [
    ['a', 'k=a', 'k=a', 'key:a'],
    [null, '', 'k=a', 'key:a'],
    ['a', '', 'k=b', 'invalid'],
    [null, 'k=a', 'k=b', 'invalid'],
    [null, '', '', 'missing'],
  ] as const) {
    const headers = [...URLENCODED, ...(line === null ? [] : ['K', line])]
    t.equal(said(readKey({ headers, query: text }, all, keyBody(headers, body, all))), expected)
  }
  t.match(readKey({ headers: ['K', 's3cr'], query: 'k=s3cr2' }, all, null), {
    kind: 'invalid',
    detail: 'k and query:k and form:k carry different keys',
  })
})

/** The key 1, of the event of that source. */
const qualified = (source: string | null) => ({ kind: 'key', key: '1', qualifier: ['ce-source', source] })
const PLAIN = { kind: 'key', key: '1', qualifier: [] }

t.test('a ce-id key is qualified by its ce-source', async (t) => {
  const policy = from(header('ce-id'))
  for (const [lines, source] of [
    [['ce-source', '/a'], '/a'],
    [['Ce-Source', '/A'], '/A'],
    [[], null],
    [['ce-source', ''], ''],
  ] as const)
    t.same(reading(null, policy, ['CE-Id', '1', ...lines]), qualified(source))
  t.match(reading(null, policy, ['CE-Id', '1', 'ce-source', '/a', 'ce-source', '/a']), {
    kind: 'invalid',
    detail: /^ce-source: 2/,
  })
  const either = from(header('idempotency-key'), header('ce-id'))
  t.same(reading(null, either, ['Idempotency-Key', '1', 'ce-source', '/a']), PLAIN)
})

t.test('an event has the same key in binary and in structured mode', async (t) => {
  const one = qualified('/a')
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

t.test('json:/id of a structured event is qualified by its source on any route', async (t) => {
  const event = '{"specversion":"1.0","id":"1","source":"/a"}'
  for (const type of [
    'application/cloudevents+json',
    'Application/CloudEvents+JSON',
    'application/cloudevents+json ; charset="UTF-8"',
    'application/cloudevents+json;profile=x;charset=us-ascii',
  ])
    t.same(reading(event, BY_ID, ['Content-Type', type]), qualified('/a'), type)
  t.same(reading('{"id":1,"source":"/b"}', BY_ID, STRUCTURED), qualified('/b'))
  t.same(reading('{"id":"1"}', BY_ID, STRUCTURED), qualified(null))
  t.same(reading(event, from(header('idempotency-key'), json('/id')), STRUCTURED), qualified('/a'))
  t.same(reading(event, BY_ID, [...STRUCTURED, 'ce-source', '/a']), qualified('/a'), 'repeated in a header')
  t.equal(read(event, BY_ID, [...STRUCTURED, 'ce-source', '/b']), 'invalid')
  for (const source of ['1', 'null', '"/a","source":"/a"'])
    t.equal(read(`{"id":"1","source":${source}}`, BY_ID, STRUCTURED), 'invalid', source)
  for (const headers of [
    ['Content-Type', 'application/json'],
    // The id of the data, not of the event.
    ['ce-id', '2', 'ce-source', '/b'],
  ])
    t.same(reading(event, BY_ID, headers), PLAIN)
})

t.test('the data of a binary event may have an id of its own', async (t) => {
  const one = qualified('/a')
  const binary = ['ce-id', '1', 'ce-source', '/a']
  for (const data of ['{"id":"order-7","source":"/b"}', '{"id":null}', '{"id":1,"id":2}'])
    t.same(reading(data, EVENTS, ['Content-Type', 'application/json', ...binary]), one, data)
  // K12: in structured mode it is the event's.
  t.match(reading('{"id":"2","source":"/a"}', EVENTS, [...STRUCTURED, ...binary]), { kind: 'invalid' })
  t.match(reading('{"id":"1"}', from(header('ce-id'), json('/key')), [...binary]), one)
  t.match(reading('{"key":"2"}', from(header('ce-id'), json('/key')), binary), { kind: 'invalid' }, 'K12')
})

t.test('a batch of events has no key', async (t) => {
  const batch = '[{"specversion":"1.0","id":"1","source":"/a"},{"specversion":"1.0","id":"2","source":"/a"}]'
  t.equal(read(batch, EVENTS, ['Content-Type', 'application/cloudevents-batch+json']), 'missing')
})

t.test('a source in any other body is ignored', async (t) => {
  const event = '{"id":"1","source":"/a"}'
  t.same(reading(event, EVENTS, ['Content-Type', 'application/json']), PLAIN)
  t.same(reading(event, EVENTS), PLAIN)
  const other = from(header('ce-id'), json('/source'))
  t.same(
    reading(event, other, STRUCTURED),
    { ...PLAIN, key: '/a' },
    'another member of an event is not qualified by it',
  )
  const three = from(header('idempotency-key'), header('ce-id'), json('/id'))
  t.same(reading('{"source":"/a"}', three, [...STRUCTURED, 'Idempotency-Key', '1']), PLAIN)
})

t.test('a pointer finds the value that was written at it', async () => {
  // Not JSON.parse: V8 13.6 reads the name `\` in `{"id":1,"\"":1}` once it has seen `{"id":1,"\\":1}`.
  const form = (text: string): string => String(canonicalJson(Buffer.from(text)))
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
        const pointer = tokens.map(escape).join('')
        const found = atOnce(lookUp([], Buffer.from(text), [pointer]))?.at(pointer)
        let expected: unknown = whole
        for (const token of tokens)
          expected =
            typeof expected === 'object' && expected !== null && Object.hasOwn(expected, token)
              ? (expected as Record<string, unknown>)[token]
              : undefined
        return found?.kind === 'literal'
          ? form(found.literal) === form(JSON.stringify(expected))
          : found?.kind === 'absent' && expected === undefined
      },
    ),
    { numRuns: 300 },
  )
})

t.test('hostile bodies of 1 MiB are handled without an error', async (t) => {
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
  t.equal(atOnce(lookUp([], Buffer.alloc(size, '['), [])), null)
})

t.test('a source is named as the configuration writes it', async (t) => {
  t.same([header('k'), query('k'), form('k'), json('/k')].map(sourceName), words`k query:k form:k json:/k`)
})

t.test('a route that reads JSON finds no key in a form', async (t) => {
  t.equal(read('id=a', BY_ID, URLENCODED), 'missing')
})

t.test('a structured event without a readable body has the key of its header', async (t) => {
  const either = from(header('idempotency-key'), json('/id'))
  const headers = [...STRUCTURED, 'Idempotency-Key', '1']
  for (const body of [null, 'no JSON']) t.same(reading(body, either, headers), PLAIN)
})

t.test('a key is qualified only by the event whose id it is', async (t) => {
  const event = ['ce-id', '9', 'ce-source', '/a']
  t.same(reading(null, from(header('k')), ['K', '1', ...event]), PLAIN, 'another header')
  t.same(readKey({ headers: event, query: 'ce-id=1' }, from(query('ce-id')), null), PLAIN, 'a parameter')
  const within = '{"id":{"x":"1"},"source":"/a"}'
  t.same(reading(within, from(json('/id/x')), STRUCTURED), PLAIN, 'a value within the id')
})

const BY_ORDER: DerivePolicy = { json: ['/order'], form: [], headers: [], path: false, bucket: null }
const BY_HEADER: DerivePolicy = {
  json: [],
  form: [],
  headers: ['x-order', 'x-shop'],
  path: false,
  bucket: null,
}
const CALLER = ['Bearer t1']

interface Asked {
  readonly policy?: DerivePolicy
  readonly headers?: readonly string[]
  readonly caller?: readonly (string | null)[]
  readonly now?: number
  readonly method?: string
  readonly path?: string
}
const derive = (
  body: string | Buffer,
  { policy = BY_ORDER, headers = [], caller = CALLER, now = 0, method = 'POST', path = '/p' }: Asked = {},
): string | null => {
  const parts = derivedParts(
    { headers, method, path },
    keyBody(headers, body, { ...KEY, derive: policy }),
    policy,
  )
  return parts === null ? null : deriveKey(parts, caller, policy, now)
}
const distinct = (keys: readonly (string | null)[]): number =>
  new Set(keys.filter((key) => key !== null)).size

t.test('a derived key is a SHA-256 in base64url, the same for the same request', async (t) => {
  const key = derive('{"order":1}')
  t.match(key, /^[A-Za-z0-9_-]{43}$/)
  t.equal(derive(' {"sent":"later", "order" : 1.0}'), key, 'only the named members count, in canonical form')
  t.equal(derive('{"order":{"a":1,"b":[2]}}'), derive('{"order":{ "b":[2], "a":1 }}'))
  t.equal(derive('{"order":"\\u0061"}'), derive('{"order":"a"}'))
})

t.test('different values, types and callers give different keys', async (t) => {
  const bodies = [...words`1 "1" 2 true "true" false 0 [] {} [1] "[1]" "a" "A"`, '"a "']
  t.equal(distinct(bodies.map((value) => derive(`{"order":${value}}`))), bodies.length)
  const callers = [[], [null], [''], ['a'], ['a', null], ['a', 'b'], ['ab'], ['1:a']]
  t.equal(distinct(callers.map((caller) => derive('{"order":1}', { caller }))), callers.length)
})

t.test('a value without a canonical form counts as it is written', async (t) => {
  const values = words`
    9007199254740993 9007199254740992 "9007199254740993" 1e400 1e401 "\ud800" "\ud801" {"a":1,"a":2}
    {"a":2}`
  t.equal(distinct(values.map((value) => derive(`{"order":${value}}`))), values.length)
  t.equal(derive('{"order":9007199254740993}'), derive('{"x":1e400,"order" : 9007199254740993 }'))
})

t.test('no key is derived unless every named member has a readable value', async (t) => {
  for (const body of [
    words`{"order":1 {} {"Order":1} [1] {"order":null} {"order":""} {"order":1,"order":1}`,
    ['', 'no JSON', '{"order":" "}', '{"order":1}\ufeff'],
  ].flat())
    t.equal(derive(body), null, body)
  t.equal(derive('{"order":1}', { headers: ['Content-Encoding', 'gzip'] }), null)
  t.equal(derive(Buffer.from([0x22, 0xff, 0x22]), { policy: { ...BY_ORDER, json: [''] } }), null)
  const two = { ...BY_ORDER, json: ['/order', '/shop'] }
  t.equal(derive('{"order":1}', { policy: two }), null, 'one of two is missing')
  t.type(derive('{"order":1,"shop":1}', { policy: two }), 'string')
})

t.test('headers count line by line, and every named header needs a value', async (t) => {
  const keyed = (...headers: string[]): string | null => derive('no JSON', { policy: BY_HEADER, headers })
  const rows = [
    ['X-Order', '1', 'X-Shop', '2'],
    ['X-Order', '2', 'X-Shop', '1'],
    ['X-Order', '1', 'X-Order', '1', 'X-Shop', '2'],
    ['X-Order', '1', 'X-Shop', '1', 'X-Shop', '2'],
    ['X-Order', '1, 1', 'X-Shop', '2'],
    ['X-Order', '12', 'X-Shop', ' '],
    ['X-Order', '1', 'X-Order', '', 'X-Shop', '2'],
  ]
  const keys = rows.map((headers) => keyed(...headers))
  t.equal(distinct(keys), rows.length - 1)
  t.equal(keys[5], null, 'a blank value is no value')
  t.equal(keys[0], keyed('x-shop', '2', 'Other', '3', 'x-order', '1'))
  for (const headers of [[], ['X-Order', '1'], ['X-Shop', '1'], ['X-Order', '', 'X-Shop', '1']])
    t.equal(keyed(...headers), null)
})

t.test('values of pointers and headers never run together', async (t) => {
  const policy = { json: ['/a', '/b'], form: [], headers: ['c'], path: false, bucket: null }
  const keys = [
    derive('{"a":1,"b":23}', { policy, headers: ['C', '4'] }),
    derive('{"a":12,"b":3}', { policy, headers: ['C', '4'] }),
    derive('{"a":1,"b":2}', { policy, headers: ['C', '34'] }),
    derive('{"a":23,"b":1}', { policy, headers: ['C', '4'] }),
  ]
  t.equal(distinct(keys), keys.length)
})

t.test('with `path`, method and path are part of a derived key', async (t) => {
  const keyed = (asked: Asked, path: boolean) =>
    derive('{}', { ...asked, policy: { ...BY_HEADER, path }, headers: ['X-Order', '1', 'X-Shop', '2'] })
  const asked = [{}, { path: '/q' }, { method: 'PATCH' }, { method: 'POS', path: 'T/p' }]
  t.equal(distinct(asked.map((one) => keyed(one, true))), asked.length)
  t.equal(keyed({}, true), keyed({}, true))
  t.equal(distinct(asked.map((one) => keyed(one, false))), 1)
})

t.test('a key is derived from form fields, urlencoded or multipart', async (t) => {
  const policy = { json: [], form: ['order', 'shop'], headers: [], path: false, bucket: null }
  const urlencoded = ['Content-Type', 'application/x-www-form-urlencoded']
  const keyed = (body: string, headers = urlencoded): string | null => derive(body, { policy, headers })
  const part = (name: string, value: string, more = ''): string =>
    `--XYZ\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n${value}\r\n`
  const multipart = ['Content-Type', 'multipart/form-data; boundary=XYZ']
  const one = keyed('order=1&shop=a+b')
  t.type(one, 'string')
  t.equal(keyed('x=1&shop=a%20b&%6frder=1'), one)
  t.equal(keyed(`${part('order', '1')}${part('shop', 'a b')}--XYZ--`, multipart), one)
  const keys = [
    one,
    ['order=1&shop=b', 'order=1a&shop=+b', 'order=a b&shop=1', 'order=1&shop=%E9'].map((body) => keyed(body)),
  ].flat()
  t.equal(distinct(keys), keys.length)
  for (const body of [
    ...words`order=1 order=1&shop= order=1&shop=+ order=1&shop=a&shop=a {"order":1,"shop":2}`,
    '',
  ])
    t.equal(keyed(body), null, body)
  t.equal(keyed('order=1&shop=a', ['Content-Type', 'application/json']), null)
  t.equal(keyed(`${part('order', '1')}${part('shop', 'a', '; filename="f"')}--XYZ--`, multipart), null)
})

t.test('with a bucket, the store’s time counts, rounded down', async (t) => {
  const at = (now: number, bucket: number | null): string | null =>
    derive('{"order":1}', { policy: { ...BY_ORDER, bucket }, now })
  t.equal(at(60_000, 60_000), at(119_999, 60_000))
  t.not(at(59_999, 60_000), at(60_000, 60_000))
  t.not(at(119_999, 60_000), at(120_000, 60_000))
  t.equal(at(0, null), at(120_000, null), 'without a bucket, time does not count')
  t.not(at(0, null), at(0, 60_000))
})

t.test('a key is derived from a long body', async (t) => {
  const long = (lines: string): string => `{"order":{"lines":[${`${lines},`.repeat(20_000)}1]}}`
  const key = derive(long('{"a":1,"b":2}'))
  t.match(key, /^[A-Za-z0-9_-]{43}$/)
  t.equal(derive(long('{ "b":2.0, "a":1 }')), key, 'in canonical form')
  t.not(derive(long('{"a":1,"b":3}')), key)
})

t.test('two requests share a derived key exactly when their named values and callers are equal', async () => {
  const value = fc.oneof(fc.integer({ min: 0, max: 12 }), fc.constantFrom('1', '12', ',', 'null', true))
  const asked = fc.record({ order: value, shop: value, who: fc.constantFrom('a', 'b', '1:a') })
  const policy = { json: ['/order', '/shop'], form: [], headers: [], path: false, bucket: null }
  const keyOf = ({ who, ...body }: { order: unknown; shop: unknown; who: string }): string | null =>
    derive(JSON.stringify(body), { policy, caller: [who] })
  fc.assert(
    fc.property(
      asked,
      asked,
      (a, b) => (keyOf(a) === keyOf(b)) === (JSON.stringify(a) === JSON.stringify(b)),
    ),
    { numRuns: 200 },
  )
})

t.test('a derived key never changes, since a retry may arrive at a later version', async (t) => {
  const policy = { ...BY_ORDER, bucket: 60_000 }
  t.equal(deriveKey(['1'], CALLER, policy, 120_001), '8Q1DeqwEZqqOYSHuENWJiX9d2997qGO9bJNyQ3yMIYI')
})

t.test('a long value is read in several steps, so that other requests get their turn', async (t) => {
  const body = Buffer.from(`{"order":[${'1,'.repeat(200_000)}1]}`)
  const steps = readKeyBody([], body, { ...KEY, derive: BY_ORDER }, true)
  let count = 1
  let step = steps.next()
  for (; step.done !== true; step = steps.next()) count++
  t.equal(step.value.values.get('/order')?.length, body.length - '{"order":}'.length)
  t.ok(count > 10, `${count} steps: half of them find the value, the others read it`)
})

t.test('no part of the body is read for a key that need not be derived', async (t) => {
  const policy = { ...KEY, derive: { ...BY_ORDER, form: ['order'] } }
  for (const derive of [policy.derive, null]) {
    const read = atOnce(readKeyBody([], Buffer.from('{"order":1}'), { ...policy, derive }, derive === null))
    t.same(read, { json: null, isUnreadable: false, fields: new Map(), values: new Map() })
  }
})
