import fc from 'fast-check'
import t from 'tap'
import {
  carriesKey,
  isBornSince,
  issuedAt,
  type KeyReading,
  readFirstSent,
  readKey,
  spells,
} from '../../src/core/key.ts'
import { type KeyPattern, readPattern } from '../../src/core/key-pattern.ts'
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

/** Contract §4: each line in both syntaxes. */
const LINES: readonly (readonly [id: string, line: string, lenient: string, strict: string])[] = [
  ['K03 an empty header', '', 'invalid', 'invalid'],
  ['K04 a quoted empty string', '""', 'invalid', 'invalid'],
  ['K04', '"";v=1', 'invalid', 'invalid'],
  ['K04', '"', 'invalid', 'invalid'],
  ['K05 white space alone', ' ', 'invalid', 'invalid'],
  ['K05', ' \t  ', 'invalid', 'invalid'],
  ['K05', '"   "', 'invalid', 'invalid'],
  ['K06 quoted', '"8e03978e-40d5-43dd"', 'key:8e03978e-40d5-43dd', 'key:8e03978e-40d5-43dd'],
  ['K06 and bare, one key', '8e03978e-40d5-43dd', 'key:8e03978e-40d5-43dd', 'invalid'],
  ['K06', '  abc\t', 'key:abc', 'invalid'],
  ['K06', '\t"abc" ', 'key:abc', 'key:abc'],
  ['K06', String.raw`"a\"b\\c"`, String.raw`key:a"b\c`, String.raw`key:a"b\c`],
  ['K06 unescaped once', String.raw`"a\\\\b"`, String.raw`key:a\\b`, String.raw`key:a\\b`],
  ['K06', String.raw`a\\b`, String.raw`key:a\\b`, 'invalid'],
  ['K07 strict takes a quoted string only', 'abc', 'key:abc', 'invalid'],
  ['K07', '"abc"', 'key:abc', 'key:abc'],
  ['K07', "'abc'", "key:'abc'", 'invalid'],
  ['K07', 'a"b"', 'key:a"b"', 'invalid'],
  ['K07', '42', 'key:42', 'invalid'],
  ['K07', '?1', 'key:?1', 'invalid'],
  ['K07', ':YWJj:', 'key::YWJj:', 'invalid'],
  ['K09 parameters are ignored, or refused', '"k";v=1', 'key:k', 'invalid'],
  ['K09', '"k"; a; b="x, y";c=:YQ==:', 'key:k', 'invalid'],
  ['K09', '"k";V=1', 'invalid', 'invalid'],
  ['K09', '"k";', 'invalid', 'invalid'],
  ['K09', 'k;v=1', 'key:k;v=1', 'invalid'],
  ['K10 a list', '"k1", "k2"', 'invalid', 'invalid'],
  ['K10', '"k1","k1"', 'invalid', 'invalid'],
  ['K10', 'k1, k2', 'invalid', 'invalid'],
  ['K10', 'k1,', 'invalid', 'invalid'],
  ['K10', ',', 'invalid', 'invalid'],
  ['K10', '("a" "b")', 'key:("a" "b")', 'invalid'],
  ['K10', '"a,b"', 'key:a,b', 'key:a,b'],
  ...['"abc', '"abc"x', '"abc" x', '"abc""def"'].map((line) => ['half a string', line] as const),
  ...[String.raw`"a\b"`, String.raw`"abc\"`, String.raw`"\u0061"`, `"${'\\'.repeat(15_001)}`].map(
    (line) => ['a bad escape', line] as const,
  ),
  // K15, at the ends too.
  ...'\xe9\x7f\t\x00\x01\x0b\x0c\xa0\ufeff\u2028\r\n'.split('').flatMap((char) => {
    const atEnds = char === '\t' ? [] : [`${char}ab`, `ab${char}`, char]
    return [`a${char}b`, `"a${char}b"`, ...atEnds].map((line) => ['K15 not printable ASCII', line] as const)
  }),
].map(([id, line, lenient = 'invalid', strict = 'invalid']) => [id, line, lenient, strict])

t.test('K03 K04 K05 K06 K07 K09 K10 K15 a line is read in both syntaxes', async (t) => {
  for (const [id, line, lenient, strict] of LINES) {
    t.equal(value(line), lenient, `${id}: ${encodeURIComponent(line)}, lenient`)
    t.equal(value(line, STRICT), strict, `${id}: ${encodeURIComponent(line)}, strict`)
  }
})

t.test('a request without the header has no key, and K03 an empty one is not a missing one', async (t) => {
  t.equal(read([]), 'missing')
  t.equal(read(['Idempotency-Key-Hint', 'k', 'X-Idempotency-Key', 'k']), 'missing')
  t.notOk(carriesKey({ headers: ['Host', 'a'], query: '' }, KEY.from))
  t.ok(carriesKey({ headers: ['Idempotency-Key', ''], query: '' }, KEY.from))
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

const SINCE = 1_795_000_000_000
const NOW = SINCE + 60_000
const GRACE = { now: NOW, since: SINCE }

function uuid7(at: number): string {
  const hex = at.toString(16).padStart(12, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8)}-7abc-8def-0123456789ab`
}

void t.test('W03 a key shows when it was created, or proves nothing about its age', async (t) => {
  for (const [key, sentAt, isNew, why] of [
    [uuid7(SINCE + 1000), null, true, 'a UUIDv7'],
    [uuid7(SINCE + 1000).toUpperCase(), null, true, 'in capitals'],
    [uuid7(SINCE + 999), null, false, 'the client’s clock may be a second ahead'],
    [uuid7(NOW), null, true, 'just now'],
    [uuid7(NOW + 1), null, false, 'a time in the future proves nothing'],
    ['k', SINCE + 1000, true, 'a time of issue or of first sending'],
    ['k', SINCE, false, 'before the failover'],
    ['k', NOW + 1, false, 'in the future'],
    [uuid7(NOW), SINCE, false, 'the earlier of two times counts'],
    [uuid7(SINCE), NOW, false, 'the earlier of two times counts'],
    [uuid7(NOW), 0, false, 'a derived key proves nothing, whatever its form'],
    [uuid7(NOW), NOW - 1, true, 'both are new'],
    ...['k', '', 'c9e3a1f0-0000-4000-8000-000000000000', `x${uuid7(NOW)}`, `${uuid7(NOW)}0`].map(
      (other) => [other, null, false, 'any other key'] as const,
    ),
  ] as const)
    t.equal(isBornSince(GRACE, key, sentAt), isNew, `${why}: ${key}, ${sentAt}`)
})

void t.test('an issued key carries its time of issue, unless an earlier version issued it', async (t) => {
  const key = (payload: object) => `h.${Buffer.from(JSON.stringify(payload)).toString('base64url')}.signature`
  t.equal(issuedAt(key({ jti: 'x', iat: 1_800_000_000, exp: 1 })), 1_800_000_000_000)
  t.equal(issuedAt(key({ jti: 'x', exp: 1 })), null)
  t.equal(issuedAt('no token'), null)
})

const sent = (...lines: string[]): ReturnType<typeof readFirstSent> =>
  readFirstSent(lines.flatMap((line) => ['Repeatability-First-Sent', line]))

t.test('T05 Repeatability-First-Sent is sent as the instant of first sending', async (t) => {
  t.same(readFirstSent(['Repeatability-Request-ID', 'a']), { kind: 'absent' })
  t.same(sent('Sun, 06 Nov 1994 08:49:37 GMT'), { kind: 'sent', at: 784_111_777_000 })
  t.same(sent(' Sun, 06 Nov 1994 08:49:37 GMT\t'), { kind: 'sent', at: 784_111_777_000 })
  t.same(readFirstSent(['REPEATABILITY-FIRST-SENT', 'Thu, 29 Feb 2024 23:59:59 GMT']), {
    kind: 'sent',
    at: Date.UTC(2024, 1, 29, 23, 59, 59),
  })
})

t.test('T05 anything but one IMF-fixdate is invalid', async (t) => {
  for (const line of [
    '',
    'now',
    'Invalid Date',
    '1994-11-06T08:49:37Z',
    '784111777',
    // The obsolete forms of RFC 9110 §5.6.7.
    'Sunday, 06-Nov-94 08:49:37 GMT',
    'Sun Nov  6 08:49:37 1994',
    'Mon, 06 Nov 1994 08:49:37 GMT',
    'Thu, 30 Feb 2024 00:00:00 GMT',
    'Sun, 06 Nov 1994 24:00:00 GMT',
    'Sun, 06 Nov 1994 08:49:60 GMT',
    'Sun, 06 Foo 1994 08:49:37 GMT',
    'Sun, 6 Nov 1994 08:49:37 GMT',
    'sun, 06 nov 1994 08:49:37 gmt',
    'Sun, 06 Nov 1994 08:49:37 UTC',
    'Sun, 06 Nov 1994 08:49:37 +0000',
    'Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT',
    'Sat, 01 Jan 10000 00:00:00 GMT',
  ])
    t.match(sent(line), { kind: 'invalid', detail: /^repeatability-first-sent: / }, line)
  const date = 'Sun, 06 Nov 1994 08:49:37 GMT'
  t.match(sent(date, date), { kind: 'invalid', detail: /2 header lines/ })
})

t.test('T05 every date that a client prints is sent back as the same instant', async () => {
  const seconds = fc.integer({ min: 0, max: Date.UTC(9999, 11, 31) / 1000 })
  fc.assert(
    fc.property(seconds, (second) => {
      const reading = sent(new Date(second * 1000).toUTCString())
      return reading.kind === 'sent' && reading.at === second * 1000
    }),
  )
})

function pattern(text: string): KeyPattern {
  const reading = readPattern(text)
  if (reading.kind === 'refused') throw new Error(`${text}: ${reading.why}`)
  return reading.pattern
}
function whyNot(text: string): string | null {
  const reading = readPattern(text)
  return reading.kind === 'refused' ? reading.why : null
}
/** What V8's own engine says. */
function expected(text: string, key: string): boolean {
  return new RegExp(`^(?:${text})$`, 'u').test(key)
}

const UUID = '[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}'

t.test('K20 patterns that people write match as they do in V8', async (t) => {
  const keys = [
    '8e03978e-40d5-4d53-8bc5-4e4ef1c0a1b2',
    '8E03978E-40D5-4D53-8BC5-4E4EF1C0A1B2',
    '8e03978e-40d5-4d53-8bc5-4e4ef1c0a1b',
    'order-1',
    'order-12-3',
    'order_1',
    'a',
    'ab',
    'aab',
    'a b',
    'x^y$z',
    '',
    'A'.repeat(64),
    'a.b/c\\d]e',
  ]
  for (const text of [
    UUID,
    `(?:${UUID})`,
    'order-[0-9]+(?:-[0-9]+)?',
    '([a-z0-9]+-?)+',
    '[\\w.\\-/]{1,64}',
    '[A-Z]{64,}',
    'a|ab|aab',
    '(?<first>a+)(b?)',
    '^order-\\d$|^a$',
    '.*',
    '.+?',
    'a{0}b{2}|',
    '[^a-z]+',
    '[^\\]]*\\]e',
    'x\\^y\\$z',
    '\\p{Lu}+|\\P{Lu}+',
    '(?:^a)b$',
    'a$b|a^b',
    '(^|a)+b',
    '[\\[(|){*]*a',
  ])
    for (const key of keys) t.equal(pattern(text).test(key), expected(text, key), `${text} on ${key}`)
})

t.test('the source is an ECMAScript regular expression with its anchors', async (t) => {
  t.equal(pattern('a|b').source, '^(?:a|b)$')
})

t.test('a pattern that backtracks forever in V8 is answered at once', async (t) => {
  // On V8's engine each of these takes longer than anybody waits.
  for (const text of ['([a-z0-9]+-?)+', '(a|aa)+', '(a*)*b', '(?:a?){40}a{40}', '(.*a){12}'])
    t.type(pattern(text).test(`${'a'.repeat(254)}!`), 'boolean', text)
  t.notOk(pattern('([a-z0-9]+-?)+').test(`${'a'.repeat(40)}!`))
  t.ok(pattern('([a-z0-9]+-?)+').test('a'.repeat(40)))
  t.ok(pattern('[a-z]{1,1000}').test('a'.repeat(1000)))
  t.notOk(pattern('[a-z]{1,1000}').test('a'.repeat(1001)))
})

t.test('a pattern that is no RE2, or too large, is refused with the reason', async (t) => {
  for (const [text, why] of [
    ['(?=.*\\d)[a-z0-9]+', 'invalid or unsupported Perl syntax: `(?=`'],
    ['(?!x)[a-z]+', 'invalid or unsupported Perl syntax: `(?!`'],
    ['a(?<=a)b', 'invalid named capture: `(?<=a)b`'],
    ['(a)\\1', 'invalid escape sequence: `\\1`'],
    ['(?<x>a)\\k<x>', 'invalid escape sequence: `\\k`'],
    [`${'('.repeat(3000)}a${')'.repeat(3000)}`, 'expression nests too deeply'],
    ['[a-z]{5000}', 'invalid repeat count: `{5000}`'],
    ['(?:[a-z]{1,100}){1,100}', 'invalid repeat count: `{1,100}`'],
    ['(?:[a-z]{1,100}){1,10}a{100}', 'a pattern of that size'],
    ['(?:){1000000000}', 'invalid repeat count: `{1000000000}`'],
    ['[a-z', 'missing closing ]: `[a-z`'],
    ['a{2,1}', 'invalid repeat count: `{2,1}`'],
    ['\\', 'trailing backslash at end of expression'],
  ] as const)
    t.equal(whyNot(text), why, text)
})

t.test('what Go, Envoy and Prometheus read is read', async (t) => {
  for (const [text, key] of [
    ['(?i)order-[0-9]+', 'ORDER-1'],
    ['(?i:a)b', 'Ab'],
    ['(?P<year>\\d{4})-\\pL+', '2026-a'],
    ['[[:alpha:]]+', 'ab'],
    ['\\Aa\\z', 'a'],
    ['\\ba\\b', 'a'],
    ['\\Qa.b\\E', 'a.b'],
    ['[a-z]{1,255}', 'a'.repeat(255)],
  ] as const)
    t.ok(pattern(text).test(key), text)
})

t.test('a bug throws instead of becoming a refusal', async (t) => {
  t.throws(() => readPattern(Symbol('a') as unknown as string), TypeError)
})
