import fc from 'fast-check'
import t from 'tap'
import { normalisePath, parseTarget } from '../../src/core/route.ts'
import { words } from './fixtures.ts'

const NORMAL: readonly (readonly [sent: string, normal: string, why: string])[] = [
  ['/', '/', 'the root'],
  ['//', '/', 'slashes alone'],
  ['/v1/payments', '/v1/payments', 'already normal'],
  ['/v1//payments', '/v1/payments', 'a duplicate slash'],
  ['///v1///payments///', '/v1/payments', 'many slashes'],
  ['/v1/payments/', '/v1/payments', 'a trailing slash'],
  ['/v1/./payments', '/v1/payments', 'a dot segment'],
  ['/v1/x/../payments', '/v1/payments', 'two dots'],
  ['/v1/payments/.', '/v1/payments', 'a dot at the end'],
  ['/v1/payments/x/..', '/v1/payments', 'two dots at the end'],
  ['/../../v1/payments', '/v1/payments', 'more dots than segments'],
  ['/v1/%2e/payments', '/v1/payments', 'an encoded dot'],
  ['/v1/x/%2e%2E/payments', '/v1/payments', 'two encoded dots'],
  ['/v1/x/.%2e/payments', '/v1/payments', 'one dot of two encoded'],
  ['/v1/.../payments', '/v1/.../payments', 'three dots are a name'],
  ['/v1/.well-known', '/v1/.well-known', 'a dot file is a name'],
  ['/v1/..a/.b.', '/v1/..a/.b.', 'dots within a name'],
  ['/%7Euser', '/~user', '%7E for ~'],
  ['/%7euser', '/~user', '%7e for ~'],
  ['/%76%31/p%61yments', '/v1/payments', 'encoded letters and digits'],
  ['/a%2Db%5Fc%2E', '/a-b_c.', 'the other unreserved characters'],
  ['/v1%3Acapture', '/v1:capture', 'a colon needs no encoding in a path'],
  ['/v1%2Fpayments', '/v1%2Fpayments', '%2F stays data'],
  ['/v1%2fpayments', '/v1%2Fpayments', '%2f is written as %2F'],
  ['/a/%2F/..', '/a', 'a segment of %2F is one segment'],
  ['/a%2F..%2Fb', '/a%2F..%2Fb', 'no dot segments within data'],
  ['/a%252Fb', '/a%252Fb', 'nothing is decoded twice'],
  ['/a/%252e%252e/b', '/a/%252e%252e/b', 'nor are dots'],
  ['/a%3Fb%23c', '/a%3Fb%23c', 'encoded ? and # stay data'],
  ['/a%20b', '/a%20b', 'an encoded blank'],
  ['/a\\b', '/a/b', 'a backslash is a slash, as the URL standard reads it'],
  ['/a%5cb', '/a%5Cb', 'an encoded one stays data'],
  ['/caf\xe9', '/caf%E9', 'a byte beyond ASCII'],
  ['/caf%e9', '/caf%E9', 'the same byte, encoded'],
  ['/caf\xc3\xa9', '/caf%C3%A9', 'UTF-8 arrives as bytes'],
  ['/a%00b', '/a%00b', 'NUL stays encoded'],
  ['/a\tb', '/a%09b', 'a control character is encoded in two digits'],
  ['/a%', '/a%25', 'a percent sign alone'],
  ['/a%4', '/a%254', 'half an encoding'],
  ['/a%zz', '/a%25zz', 'no hexadecimal digits'],
  ['/a%%2e', '/a%25.', 'a percent sign before an encoding'],
  ['/a;v=1/b', '/a;v=1/b', 'path parameters stay'],
  ['/V1/Payments', '/V1/Payments', 'letter case counts'],
  ['/a"<>^`{|}', '/a%22%3C%3E%5E%60%7B%7C%7D', 'characters not allowed in a path are encoded'],
]

t.test('F21 paths that a server may take for the same get one spelling', async (t) => {
  for (const [sent, normal, why] of NORMAL) t.equal(normalisePath(sent), normal, `${why}: ${sent}`)
})

t.test('a target is split into its parts, and the upstream gets it as sent', async (t) => {
  const rows: readonly (readonly [string, string, string, string, string])[] = [
    // target, origin, rawPath, path, query
    ['/a', '/a', '/a', '/a', ''],
    ['/a?', '/a?', '/a', '/a', ''],
    ['/a?b=1', '/a?b=1', '/a', '/a', 'b=1'],
    ['/a?b=1?c=/../d', '/a?b=1?c=/../d', '/a', '/a', 'b=1?c=/../d'],
    ['//a/%7E/?b=%7E', '//a/%7E/?b=%7E', '//a/%7E/', '/a/~', 'b=%7E'],
    ['//evil.example/a', '//evil.example/a', '//evil.example/a', '/evil.example/a', ''],
    ['http://host/a?b', '/a?b', '/a', '/a', 'b'],
    ['HTTPS://user@host:8443/a//b', '/a//b', '/a//b', '/a/b', ''],
    ['http://host', '/', '/', '/', ''],
    ['http://host?b', '/?b', '/', '/', 'b'],
    ['http:///a', '/a', '/a', '/a', ''],
  ]
  for (const [target, origin, rawPath, path, query] of rows)
    t.same(parseTarget(target), { origin, rawPath, path, query }, target)
})

t.test('a target that is neither origin form nor an absolute http URI is refused', async (t) => {
  for (const target of [
    ...words`* /a#f /a?b#f http://host#f host:443 a/b ?a ftp://host/a http:/a javascript:a`,
    ...['', ' http://host/a'],
  ])
    t.equal(parseTarget(target), null, JSON.stringify(target))
})

const byte = fc.integer({ min: 0x21, max: 0xff }).map((code) => String.fromCharCode(code))
const awkward = fc.constantFrom(
  '/',
  '//',
  '/.',
  '/..',
  '%',
  '%2',
  '%2e',
  '%2E',
  '%2f',
  '%25',
  '%7E',
  '%41',
  '\\',
  '.',
  ';',
  'a',
)
const path = fc
  .array(fc.oneof(byte, awkward), { maxLength: 24, size: 'max' })
  .map((parts) => `/${parts.join('')}`.replace(/[?#]/g, 'q'))

t.test('normalising twice changes nothing', async () => {
  fc.assert(
    fc.property(path, (sent) => normalisePath(normalisePath(sent)) === normalisePath(sent)),
    { numRuns: 2000 },
  )
})

t.test(
  'a normal path has no //, no dot segment, no needless encoding, and the rest in upper case',
  async () => {
    fc.assert(
      fc.property(path, (sent) => {
        const normal = normalisePath(sent)
        const segments = normal.slice(1).split('/')
        const needless = (normal.match(/%../g) ?? []).some((hex) =>
          /[A-Za-z0-9\-._~!$&'()*+,;=:@]/.test(String.fromCharCode(Number.parseInt(hex.slice(1), 16))),
        )
        return (
          /^\/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-F]{2})*$/.test(normal) &&
          (normal === '/' ||
            segments.every((segment) => segment !== '' && segment !== '.' && segment !== '..')) &&
          !needless
        )
      }),
      { numRuns: 2000 },
    )
  },
)

t.test('all spellings of a path give the same normal path', async () => {
  const unreserved = fc.constantFrom(...'abcXYZ019-_~'.split(''))
  const segment = fc.oneof(
    fc.array(unreserved, { minLength: 1, maxLength: 6 }).map((chars) => chars.join('')),
    fc.constantFrom('%2F', '%25', '%5C', '...', '.a', '%C3%A9'),
  )
  const spelling = fc.record({
    encode: fc.infiniteStream(fc.boolean()),
    between: fc.infiniteStream(fc.constantFrom('/', '//', '/./', '/%2e/', '/zz/../', '/zz/%2E./')),
    end: fc.constantFrom('', '/', '//', '/.', '/zz/..'),
  })
  fc.assert(
    fc.property(
      fc.array(segment, { minLength: 1, maxLength: 5 }),
      spelling,
      (segments, { encode, between, end }) => {
        let sent = ''
        for (const part of segments) {
          sent += between.next().value
          const chars = part.match(/%../g) === null ? part.split('') : [part]
          for (const char of chars) {
            const code = char.charCodeAt(0).toString(16)
            sent += encode.next().value === true && char.length === 1 ? `%${code}` : char
          }
        }
        return normalisePath(sent + end) === `/${segments.join('/')}`
      },
    ),
    { numRuns: 2000 },
  )
})

t.test('different paths stay different', async (t) => {
  const paths = words`/o/1 /o/2 /o%2F1 /O/1 /o/1%2F /o/1%20 /o/1%00 /o/1%5C /o /o/1/1 /o/%251`
  t.equal(new Set(paths.map(normalisePath)).size, paths.length)
})

t.test('long hostile paths are normalised without an error', async (t) => {
  for (const part of ['/', '/.', '/..', '%', '%2e', '/%2e%2e', '\\', '\xff', 'a', '/a']) {
    t.match(normalisePath(`/${part.repeat(200_000)}`), /^\//)
    t.match(normalisePath(`/${part.repeat(200_000)}?`), /^\//)
  }
})
