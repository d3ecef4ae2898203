import t from 'tap'
import {
  contentType,
  fieldLines,
  filterLines,
  firstOf,
  foldedName,
  formDataBoundary,
  HOP_BY_HOP,
  hopByHop,
  isEncoded,
  isFieldName,
  isFieldValue,
  isNeverUpstreams,
  isOwnOnResponses,
  linesOf,
  REQUEST_HEADER,
  RESPONSE_HEADER,
  statusHeaders,
} from '../../src/core/headers.ts'
import { words } from './fixtures.ts'

const LINES = ['Set-Cookie', 'a=1', 'X-A', '1', 'set-cookie', 'b=2', 'X-AB', '2']

t.test('linesOf gives the lines of a header in order, whatever the letter case of its name', async (t) => {
  t.same(linesOf(LINES, 'set-cookie'), ['a=1', 'b=2'])
  t.same(linesOf(LINES, 'x-a'), ['1'])
  t.same(linesOf(LINES, 'x'), [])
  t.same(linesOf(LINES, 'a=1'), [], 'a value is not a name')
  t.same(linesOf([], 'x'), [])
  t.same(linesOf(['X-A'], 'x-a'), [], 'a name without a value is not a line')
})

t.test('fieldLines reads the lines of a head and trims their values (RFC 9112 §5.1)', async (t) => {
  const head = 'POST / HTTP/1.1\r\nHost:a\r\nX-A: \t one two \t\r\nX-B: \r\nX-C:c:d'
  t.same(fieldLines(head, head.indexOf('\r\n')), ['Host', 'a', 'X-A', 'one two', 'X-B', '', 'X-C', 'c:d'])
})

t.test('firstOf gives the first line of a header, or null', async (t) => {
  t.equal(firstOf(LINES, 'set-cookie'), 'a=1')
  t.equal(firstOf(['X-A', ''], 'x-a'), '')
  t.equal(firstOf(LINES, 'x-b'), null)
})

t.test('P13 the fixed fields and those that Connection names are hop-by-hop', async (t) => {
  const fixed = words`
    connection keep-alive te transfer-encoding upgrade proxy-authorization proxy-authenticate
    proxy-connection`
  for (const connection of [
    [],
    ['Connection', 'close'],
    ['connection', 'Keep-Alive'],
    ['Connection', 'X-Hop , x-other,,close', 'CONNECTION', 'Third'],
  ]) {
    const names = hopByHop(connection)
    for (const name of fixed) t.ok(names.has(name), name)
    for (const name of ['x-hop', 'x-other', 'third']) t.equal(names.has(name), connection.length === 4, name)
    for (const name of ['content-type', 'set-cookie', 'idempotency-key', 'trailer'])
      t.notOk(names.has(name), name)
  }
  t.notOk(hopByHop(['Connection', 'close']).has('close'), 'close is an option, not a field')
  t.notOk(hopByHop([]).has('x-hop'), 'what one message names is not remembered for the next')
})

t.test('filtered lines keep their order, letter case and number', async (t) => {
  t.same(
    filterLines(LINES, (name) => name !== 'x-a'),
    ['Set-Cookie', 'a=1', 'set-cookie', 'b=2', 'X-AB', '2'],
  )
  t.same(
    filterLines(LINES, () => false),
    [],
  )
})

t.test('the proxy’s own lines have the names that are documented', async (t) => {
  t.strictSame(REQUEST_HEADER, { fence: 'Idempotency-Fence', record: 'Idempotency-Record' })
  t.strictSame(RESPONSE_HEADER, {
    replayed: 'Idempotent-Replayed',
    status: 'Idempotency-Status',
    expires: 'Idempotency-Expires',
    derived: 'Idempotency-Key-Derived',
    retry: 'Idempotency-Retry',
    problem: 'Idempotency-Problem',
    outcome: 'Idempotency-Outcome',
  })
  for (const name of Object.values(RESPONSE_HEADER)) {
    t.ok(isOwnOnResponses(name.toLowerCase()), name)
    t.equal(isNeverUpstreams(name.toLowerCase()), name === 'Idempotent-Replayed', name)
  }
  t.notOk(isOwnOnResponses('idempotency-key'))
  t.notOk(isNeverUpstreams(''))
})

t.test('names and values of fields have only the characters that HTTP allows', async (t) => {
  for (const name of ['X-A', "!#$%&'*+.^_`|~", 'host']) t.ok(isFieldName(name), name)
  for (const name of ['', 'X A', 'X:', 'é', 'X\n', '(x)']) t.notOk(isFieldName(name), JSON.stringify(name))
  for (const value of ['', 'a b\t~', 'é\xff']) t.ok(isFieldValue(value), value)
  for (const value of ['\n', 'a\r', '\x00', '\x7f', '€']) t.notOk(isFieldValue(value), JSON.stringify(value))
})

t.test('statusHeaders tells the status, and the end of a record if it is known', async (t) => {
  const route = { statusHeader: true }
  const at = Date.UTC(2026, 10, 26, 12)
  t.strictSame(
    statusHeaders('executed', route, at),
    words`
    Idempotency-Status executed Idempotency-Expires 2026-11-26T12:00:00.000Z`,
  )
  for (const unknown of [null, Number.POSITIVE_INFINITY])
    t.strictSame(statusHeaders('executed', route, unknown), ['Idempotency-Status', 'executed'])
  t.strictSame(statusHeaders('executed', { statusHeader: false }, at), [])
})

t.test('P13 every field of one hop is among the fixed ones', async (t) => {
  t.strictSame(
    [...HOP_BY_HOP].sort(),
    words`
    connection http2-settings keep-alive proxy-authenticate proxy-authentication-info proxy-authorization
    proxy-connection te transfer-encoding upgrade`,
  )
})

t.test('P13 Connection cannot remove fields of the content or fields that count', async (t) => {
  const named = 'Content-Type, Authorization, idempotency-key, X-Counted, X-Hop'
  const names = hopByHop(['Connection', named], new Set(['x-counted']))
  t.strictSame(
    [...names].filter((name) => !HOP_BY_HOP.has(name)),
    ['x-hop'],
  )
  const lines = ['Connection', 'keep-alive', 'Connection', 'X-Hop']
  t.ok(hopByHop(lines).has('x-hop'), 'in any of its lines')
})

t.test('foldedName gives names that applications cannot tell apart the same spelling', async (t) => {
  for (const [name, folded] of [
    ['x-user', 'x-user'],
    ['x_user', 'x-user'],
    ['x.user~1', 'x-user-1'],
  ] as const)
    t.equal(foldedName(name), folded)
})

t.test('a name without a value at the end of a list is no line', async (t) => {
  t.equal(firstOf(['X-A', '1', 'X-B'], 'x-b'), null)
  t.equal(firstOf(['X-A', 'x-b', 'X-B', '2'], 'x-b'), '2', 'a value is not a name')
  t.same(
    filterLines(['X-A', '1', 'X-B'], () => true),
    ['X-A', '1'],
  )
})

t.test('contentType splits at semicolons outside quoted strings only', async (t) => {
  const of = (...lines: string[]) => contentType(lines.flatMap((line) => ['Content-Type', line]))
  t.strictSame(of('text/plain; a="x;\\";y" ;b=1').parameters, ['text/plain', 'a="x;\\";y"', 'b=1'])
  t.strictSame(of('text/plain; a=\\";"; b').parameters, ['text/plain', 'a=\\";"', 'b'])
  t.strictSame(of('"a;b";c').parameters, ['"a;b"', 'c'])
  t.equal(of('Text/Plain; Charset=x; A=B').media, 'text/plain;a=b')
  t.equal(of('multipart/form-data; Boundary=A=B').media, 'multipart/form-data;boundary=A=B')
  t.equal(of('a/b', 'c/d').essence, 'a/b, c/d', 'two lines are a list')
  t.equal(of().essence, '')
})

t.test('a body is encoded if any coding but identity is named', async (t) => {
  const of = (...lines: string[]) => isEncoded(lines.flatMap((line) => ['Content-Encoding', line]))
  for (const line of ['gzip', 'identity, gzip', '']) t.ok(of(line), line)
  for (const line of ['identity', ' Identity\t']) t.notOk(of(line), line)
  t.ok(of('identity', 'br'))
  t.notOk(of())
})

t.test('a form without a media type, or of another, has no boundary', async (t) => {
  for (const type of [[], ['Content-Type', ''], ['Content-Type', 'x; boundary=b']])
    t.equal(formDataBoundary(type), null)
  t.equal(formDataBoundary(['Content-Type', 'Multipart/Form-Data; boundary="b c"']), null)
  t.equal(formDataBoundary(['Content-Type', 'Multipart/Form-Data; boundary=b']), 'b')
  t.equal(formDataBoundary(['Content-Type', 'multipart/form-data; charset=utf-8; boundary="b:c"']), 'b:c')
})
