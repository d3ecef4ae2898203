import fc from 'fast-check'
import t from 'tap'
import { carriesKey, type KeyReading, readKey, spells } from '../../src/core/key.ts'
import type { KeyPolicy, KeySource } from '../../src/core/policy.ts'
import { KEY, keyBody } from './fixtures.ts'

const header = (name: string): KeySource => ({ kind: 'header', name })
const STRICT: KeyPolicy = { ...KEY, syntax: 'strict' }

/** The key, or why there is none. */
function read(headers: readonly string[], policy: KeyPolicy = KEY, body: Buffer | null = null): string {
  const reading: KeyReading = readKey({ headers, query: '' }, policy, body && keyBody(headers, body, policy))
  return reading.kind === 'key' ? `key:${reading.key}` : reading.kind
}
const value = (line: string, policy: KeyPolicy = KEY): string => read(['Idempotency-Key', line], policy)

type Row = readonly [line: string, lenient: string, strict: string]

/** Each line in both syntaxes of contract §4. */
function table(t: Tap, rows: readonly Row[]): void {
  for (const [line, lenient, strict] of rows) {
    t.equal(value(line), lenient, `${encodeURIComponent(line)}, lenient`)
    t.equal(value(line, STRICT), strict, `${encodeURIComponent(line)}, strict`)
  }
}
type Tap = Pick<typeof t, 'equal'>

t.test('a request without the header has no key', async (t) => {
  t.equal(read([]), 'missing')
  t.equal(read(['Idempotency-Key-Hint', 'k', 'X-Idempotency-Key', 'k']), 'missing')
  t.notOk(carriesKey({ headers: ['Host', 'a'], query: '' }, KEY.from))
})

t.test('K03 an empty header is an invalid key, not a missing one', async (t) => {
  table(t, [['', 'invalid', 'invalid']])
  t.ok(carriesKey({ headers: ['Idempotency-Key', ''], query: '' }, KEY.from))
})

t.test('K04 a quoted empty string is refused', async (t) => {
  table(t, [
    ['""', 'invalid', 'invalid'],
    ['"";v=1', 'invalid', 'invalid'],
    ['"', 'invalid', 'invalid'],
  ])
})

t.test('K05 white space alone is refused', async (t) => {
  table(t, [
    [' ', 'invalid', 'invalid'],
    [' \t  ', 'invalid', 'invalid'],
    ['"   "', 'invalid', 'invalid'],
  ])
})

t.test('K06 the quoted and the bare spelling are one key', async (t) => {
  table(t, [
    ['"8e03978e-40d5-43dd"', 'key:8e03978e-40d5-43dd', 'key:8e03978e-40d5-43dd'],
    ['8e03978e-40d5-43dd', 'key:8e03978e-40d5-43dd', 'invalid'],
    ['  abc\t', 'key:abc', 'invalid'],
    ['\t"abc" ', 'key:abc', 'key:abc'],
    [String.raw`"a\"b\\c"`, String.raw`key:a"b\c`, String.raw`key:a"b\c`],
    // Unescaped once, not twice.
    [String.raw`"a\\\\b"`, String.raw`key:a\\b`, String.raw`key:a\\b`],
    [String.raw`a\\b`, String.raw`key:a\\b`, 'invalid'],
  ])
})

t.test('K07 strict syntax accepts only a quoted string', async (t) => {
  table(t, [
    ['abc', 'key:abc', 'invalid'],
    ['"abc"', 'key:abc', 'key:abc'],
    ["'abc'", "key:'abc'", 'invalid'],
    ['a"b"', 'key:a"b"', 'invalid'],
    ['42', 'key:42', 'invalid'],
    ['?1', 'key:?1', 'invalid'],
    [':YWJj:', 'key::YWJj:', 'invalid'],
  ])
})

t.test('K09 parameters are ignored in lenient syntax and refused in strict', async (t) => {
  table(t, [
    ['"k";v=1', 'key:k', 'invalid'],
    ['"k"; a; b="x, y";c=:YQ==:', 'key:k', 'invalid'],
    ['"k";V=1', 'invalid', 'invalid'],
    ['"k";', 'invalid', 'invalid'],
    ['k;v=1', 'key:k;v=1', 'invalid'],
  ])
})

t.test('K10 a list is refused', async (t) => {
  table(t, [
    ['"k1", "k2"', 'invalid', 'invalid'],
    ['"k1","k1"', 'invalid', 'invalid'],
    ['k1, k2', 'invalid', 'invalid'],
    ['k1,', 'invalid', 'invalid'],
    [',', 'invalid', 'invalid'],
    ['("a" "b")', 'key:("a" "b")', 'invalid'],
    ['"a,b"', 'key:a,b', 'key:a,b'],
  ])
})

t.test('an incomplete string and a bad escape are refused', async (t) => {
  for (const line of [
    '"abc',
    '"abc"x',
    '"abc" x',
    '"abc""def"',
    String.raw`"a\b"`,
    String.raw`"abc\"`,
    String.raw`"\u0061"`,
    `"${'\\'.repeat(15_001)}`,
  ]) {
    table(t, [[line, 'invalid', 'invalid']])
  }
})

t.test('K11 two header lines are refused, different or equal', async (t) => {
  t.equal(read(['Idempotency-Key', 'a', 'Idempotency-Key', 'b']), 'invalid')
  t.equal(read(['Idempotency-Key', 'a', 'idempotency-key', 'a']), 'invalid')
  t.equal(read(['Idempotency-Key', '', 'Idempotency-Key', 'a']), 'invalid')
})

t.test('K12 sources that disagree are refused, those that agree are accepted', async (t) => {
  const both: KeyPolicy = { ...KEY, from: [header('idempotency-key'), header('x-idempotency-key')] }
  t.equal(read(['Idempotency-Key', 'a', 'X-Idempotency-Key', 'b'], both), 'invalid')
  t.equal(read(['Idempotency-Key', 'a', 'X-Idempotency-Key', 'A'], both), 'invalid')
  t.equal(read(['Idempotency-Key', 'a', 'X-Idempotency-Key', '"a"'], both), 'key:a')
  t.equal(read(['X-Idempotency-Key', 'b'], both), 'key:b')
  t.equal(read(['Idempotency-Key', 'a', 'X-Idempotency-Key', ''], both), 'invalid')
  t.equal(read([], both), 'missing')
  t.ok(carriesKey({ headers: ['X-Idempotency-Key', 'b'], query: '' }, both.from))
})

t.test('K13 255 characters are accepted, 256 are not; quotes and escapes do not count', async (t) => {
  t.equal(value('k'.repeat(255)), `key:${'k'.repeat(255)}`)
  t.equal(value('k'.repeat(256)), 'invalid')
  t.equal(value(`"${'k'.repeat(255)}"`), `key:${'k'.repeat(255)}`)
  t.equal(value(`"${'k'.repeat(256)}"`), 'invalid')
  t.equal(value(`"${'\\"'.repeat(255)}"`), `key:${'"'.repeat(255)}`)
})

t.test('K14 a key shorter than minLength is refused', async (t) => {
  const long: KeyPolicy = { ...KEY, minLength: 16 }
  t.equal(value('k'.repeat(15), long), 'invalid')
  t.equal(value(`"${'k'.repeat(15)}"`, long), 'invalid')
  t.equal(value(`"${'\\\\'.repeat(15)}"`, long), 'invalid')
  t.equal(value('k'.repeat(16), long), `key:${'k'.repeat(16)}`)
})

t.test('K15 bytes outside printable ASCII are refused, at the ends too', async (t) => {
  for (const char of [
    ...['\xe9', '\x7f', '\t', '\x00', '\x01', '\x0b', '\x0c', '\xa0', '\ufeff', '\u2028', '\r', '\n'],
  ]) {
    for (const line of [
      `a${char}b`,
      `"a${char}b"`,
      ...(char === '\t' ? [] : [`${char}ab`, `ab${char}`, char]),
    ]) {
      table(t, [[line, 'invalid', 'invalid']])
    }
  }
})

t.test('K19 the letter case of the header name does not count', async (t) => {
  for (const name of ['Idempotency-Key', 'idempotency-key', 'IDEMPOTENCY-KEY', 'iDEMPOTENCY-kEY'])
    t.equal(read([name, 'a']), 'key:a')
})

t.test('K20 a key that does not match the pattern of the route is refused', async (t) => {
  const uuid = /^(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$/u
  const policy: KeyPolicy = { ...KEY, pattern: uuid }
  const key = '8e03978e-40d5-43dd-bc93-6894a57f9324'
  t.equal(value(key, policy), `key:${key}`)
  t.equal(value(`"${key}"`, policy), `key:${key}`)
  t.equal(value(`${key}0`, policy), 'invalid')
  t.equal(value('abc', policy), 'invalid')
})

t.test('K21 the letter case of a key counts', async (t) => {
  t.not(value('abc'), value('ABC'))
  t.equal(value('ABC'), 'key:ABC')
})

t.test('braces, slashes, wildcards and colons are part of an opaque key', async (t) => {
  for (const key of ['{a}', '*', '../x', 'a:b', 'a/b', '%2F', '${x}', '-', '0:', 'null'])
    t.equal(value(key), `key:${key}`)
})

t.test('a refusal never repeats the key', async (t) => {
  const policy: KeyPolicy = {
    ...KEY,
    minLength: 8,
    maxLength: 12,
    pattern: /^\d+$/,
    from: [header('idempotency-key'), header('x')],
  }
  for (const line of ['s3cr', 's3cr,s3cr', '"s3cr', 's3cr\xe9', 's3crs3cr', 's3crs3crs3crs3cr']) {
    for (const syntax of ['lenient', 'strict'] as const) {
      const reading = readKey({ headers: ['Idempotency-Key', line], query: '' }, { ...policy, syntax }, null)
      t.equal(reading.kind, 'invalid')
      t.notMatch(JSON.stringify(reading), /s3cr/)
    }
  }
  t.notMatch(
    JSON.stringify(readKey({ headers: ['Idempotency-Key', 's3cr', 'X', 's3cr2'], query: '' }, policy, null)),
    /s3cr/,
  )
})

t.test('every printable key survives quoting, in both syntaxes', async () => {
  const printable = fc.string({
    unit: fc.integer({ min: 0x20, max: 0x7e }).map((code) => String.fromCharCode(code)),
    minLength: 1,
    maxLength: 255,
  })
  fc.assert(
    fc.property(
      printable.filter((key) => key.trim() !== ''),
      (key) => {
        const quoted = `"${key.replaceAll(/["\\]/g, '\\$&')}"`
        return value(quoted) === `key:${key}` && value(quoted, STRICT) === `key:${key}`
      },
    ),
  )
})

t.test('no header line makes the reader throw', async () => {
  const anything = fc.string({
    unit: fc.integer({ min: 0, max: 255 }).map((code) => String.fromCharCode(code)),
  })
  fc.assert(
    fc.property(anything, fc.constantFrom(KEY, STRICT), (line, policy) => {
      const reading = readKey({ headers: ['Idempotency-Key', line], query: '' }, policy, null)
      return (
        reading.kind === 'invalid' || (reading.kind === 'key' && /^[\x20-\x7e]{1,255}$/.test(reading.key))
      )
    }),
  )
})

void t.test('a line spells a key in every form that its syntax allows', async (t) => {
  for (const line of ['k1', '"k1"', '"k1";a=1']) t.ok(spells(line, 'lenient', 'k1'), line)
  for (const line of ['k2', '"k1', 'k1, k1', '']) t.notOk(spells(line, 'lenient', 'k1'), line)
  t.notOk(spells('k1', 'strict', 'k1'))
})

t.test('K03 K05 a refusal of an empty key says so', async (t) => {
  for (const line of ['', ' '])
    for (const policy of [KEY, STRICT])
      t.same(readKey({ headers: ['Idempotency-Key', line], query: '' }, policy, null), {
        kind: 'invalid',
        detail: 'idempotency-key: the value is empty',
      })
})
