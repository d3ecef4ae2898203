import fc from 'fast-check'
import t from 'tap'
import { derivedParts, deriveKey, readKeyBody } from '../../src/core/key.ts'
import type { DerivePolicy } from '../../src/core/policy.ts'
import { atOnce } from '../../src/core/steps.ts'
import { KEY, keyBody, words } from './fixtures.ts'

const POLICY: DerivePolicy = { json: ['/order'], form: [], headers: [], bucket: null }
const BY_HEADER: DerivePolicy = { json: [], form: [], headers: ['x-order', 'x-shop'], bucket: null }
const CALLER = ['Bearer t1']

interface Asked {
  readonly policy?: DerivePolicy
  readonly headers?: readonly string[]
  readonly caller?: readonly (string | null)[]
  readonly now?: number
}
const derive = (
  body: string | Buffer,
  { policy = POLICY, headers = [], caller = CALLER, now = 0 }: Asked = {},
): string | null => {
  const parts = derivedParts(headers, keyBody(headers, body, { ...KEY, derive: policy }), policy)
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
  const bodies = [
    '1',
    '"1"',
    '2',
    'true',
    '"true"',
    'false',
    '0',
    '[]',
    '{}',
    '[1]',
    '"[1]"',
    '"a"',
    '"A"',
    '"a "',
  ]
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
    ...words`{"order":1 {} {"Order":1} [1] {"order":null} {"order":""} {"order":1,"order":1}`,
    ...['', 'no JSON', '{"order":" "}', '{"order":1}\ufeff'],
  ])
    t.equal(derive(body), null, body)
  t.equal(derive('{"order":1}', { headers: ['Content-Encoding', 'gzip'] }), null)
  t.equal(derive(Buffer.from([0x22, 0xff, 0x22]), { policy: { ...POLICY, json: [''] } }), null)
  const two = { ...POLICY, json: ['/order', '/shop'] }
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
  const policy = { json: ['/a', '/b'], form: [], headers: ['c'], bucket: null }
  const keys = [
    derive('{"a":1,"b":23}', { policy, headers: ['C', '4'] }),
    derive('{"a":12,"b":3}', { policy, headers: ['C', '4'] }),
    derive('{"a":1,"b":2}', { policy, headers: ['C', '34'] }),
    derive('{"a":23,"b":1}', { policy, headers: ['C', '4'] }),
  ]
  t.equal(distinct(keys), keys.length)
})

t.test('a key is derived from form fields, urlencoded or multipart', async (t) => {
  const policy = { json: [], form: ['order', 'shop'], headers: [], bucket: null }
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
    ...['order=1&shop=b', 'order=1a&shop=+b', 'order=a b&shop=1', 'order=1&shop=%E9'].map((body) =>
      keyed(body),
    ),
  ]
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
    derive('{"order":1}', { policy: { ...POLICY, bucket }, now })
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
  const policy = { json: ['/order', '/shop'], form: [], headers: [], bucket: null }
  const keyOf = ({ who, ...body }: { order: unknown; shop: unknown; who: string }): string | null =>
    derive(JSON.stringify(body), { policy, caller: [who] })
  fc.assert(
    fc.property(
      asked,
      asked,
      (a, b) => (keyOf(a) === keyOf(b)) === (JSON.stringify(a) === JSON.stringify(b)),
    ),
    { numRuns: 1000 },
  )
})

t.test('a derived key never changes, since a retry may arrive at a later version', async (t) => {
  const policy = { ...POLICY, bucket: 60_000 }
  t.equal(deriveKey(['1'], CALLER, policy, 120_001), '8Q1DeqwEZqqOYSHuENWJiX9d2997qGO9bJNyQ3yMIYI')
})

t.test('a long value is read in several steps, so that other requests get their turn', async (t) => {
  const body = Buffer.from(`{"order":[${'1,'.repeat(200_000)}1]}`)
  const steps = readKeyBody([], body, { ...KEY, derive: POLICY }, true)
  let count = 1
  let step = steps.next()
  for (; step.done !== true; step = steps.next()) count++
  t.equal(step.value.values.get('/order')?.length, body.length - '{"order":}'.length)
  t.ok(count > 10, `${count} steps: half of them find the value, the others read it`)
})

t.test('no part of the body is read for a key that need not be derived', async (t) => {
  const policy = { ...KEY, derive: { ...POLICY, form: ['order'] } }
  for (const derive of [policy.derive, null]) {
    const read = atOnce(readKeyBody([], Buffer.from('{"order":1}'), { ...policy, derive }, derive === null))
    t.same(read, { json: null, fields: new Map(), values: new Map() })
  }
})
