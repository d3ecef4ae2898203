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
  prefersHtml,
  REQUEST_HEADER,
  RESPONSE_HEADER,
  statusHeaders,
} from '../../src/core/headers.ts'
import { lines, words } from './fixtures.ts'

const LINES = ['Set-Cookie', 'a=1', 'X-A', '1', 'set-cookie', 'b=2', 'X-AB', '2']

t.test('linesOf and firstOf find the lines of a header, whatever the letter case of its name', async (t) => {
  t.same(linesOf(LINES, 'set-cookie'), ['a=1', 'b=2'])
  t.same(linesOf(LINES, 'x-a'), ['1'])
  t.same(linesOf(LINES, 'x'), [])
  t.same(linesOf(LINES, 'a=1'), [], 'a value is not a name')
  t.same(linesOf([], 'x'), [])
  t.same(linesOf(['X-A'], 'x-a'), [], 'a name without a value is not a line')
  t.equal(firstOf(LINES, 'set-cookie'), 'a=1')
  t.equal(firstOf(['X-A', ''], 'x-a'), '')
  t.equal(firstOf(LINES, 'x-b'), null)
  t.equal(firstOf(['X-A', '1', 'X-B'], 'x-b'), null)
  t.equal(firstOf(['X-A', 'x-b', 'X-B', '2'], 'x-b'), '2', 'a value is not a name')
})

t.test('fieldLines reads the lines of a head and trims their values (RFC 9112 §5.1)', async (t) => {
  const head = 'POST / HTTP/1.1\r\nHost:a\r\nX-A: \t one two \t\r\nX-B: \r\nX-C:c:d'
  t.same(fieldLines(head, head.indexOf('\r\n')), ['Host', 'a', 'X-A', 'one two', 'X-B', '', 'X-C', 'c:d'])
})

t.test('P13 the fixed fields and those that Connection names are hop-by-hop', async (t) => {
  t.strictSame(
    [...HOP_BY_HOP].sort(),
    words`connection http2-settings keep-alive proxy-authenticate proxy-authentication-info proxy-authorization
      proxy-connection te transfer-encoding upgrade`,
  )
  for (const connection of [
    [],
    ['Connection', 'close'],
    ['connection', 'Keep-Alive'],
    ['Connection', 'X-Hop , x-other,,close', 'CONNECTION', 'Third'],
  ]) {
    const names = hopByHop(connection)
    for (const name of HOP_BY_HOP) t.ok(names.has(name), name)
    for (const name of ['x-hop', 'x-other', 'third']) t.equal(names.has(name), connection.length === 4, name)
    for (const name of words`content-type set-cookie idempotency-key trailer`) t.notOk(names.has(name), name)
  }
  t.notOk(hopByHop(['Connection', 'close']).has('close'), 'close is an option, not a field')
  t.notOk(hopByHop([]).has('x-hop'), 'what one message names is not remembered for the next')
  t.ok(hopByHop(['Connection', 'keep-alive', 'Connection', 'X-Hop']).has('x-hop'), 'in any of its lines')
})

t.test('P13 Connection cannot remove fields of the content or fields that count', async (t) => {
  const named = 'Content-Type, Authorization, idempotency-key, X-Counted, X-Hop'
  const names = hopByHop(['Connection', named], new Set(['x-counted']))
  t.strictSame(
    [...names].filter((name) => !HOP_BY_HOP.has(name)),
    ['x-hop'],
  )
})

t.test('filtered lines keep their order, letter case and number', async (t) => {
  const filtered = (from: string[], keep: (name: string) => boolean) => filterLines(from, keep)
  t.same(
    filtered(LINES, (name) => name !== 'x-a'),
    words`Set-Cookie a=1 set-cookie b=2 X-AB 2`,
  )
  t.same(
    filtered(LINES, () => false),
    [],
  )
  t.same(
    filtered(['X-A', '1', 'X-B'], () => true),
    ['X-A', '1'],
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
  const at = Date.UTC(2026, 10, 26, 12)
  const status = ['Idempotency-Status', 'executed']
  const ends = ['Idempotency-Expires', '2026-11-26T12:00:00.000Z']
  const of = (expires: number | null, statusHeader = true) =>
    statusHeaders('executed', { statusHeader }, expires)
  t.strictSame(of(at), [...status, ...ends])
  for (const unknown of [null, Number.POSITIVE_INFINITY]) t.strictSame(of(unknown), status)
  t.strictSame(of(at, false), [])
})

t.test('foldedName gives names that applications cannot tell apart the same spelling', async (t) => {
  t.same(['x-user', 'x_user', 'x.user~1'].map(foldedName), ['x-user', 'x-user', 'x-user-1'])
})

t.test('a media type is split at semicolons outside quoted strings only', async (t) => {
  const of = (...lines: string[]) => contentType(lines.flatMap((line) => ['Content-Type', line]))
  for (const [line, parameters] of [
    ['text/plain; a="x;\\";y" ;b=1', ['text/plain', 'a="x;\\";y"', 'b=1']],
    ['text/plain; a=\\";"; b', ['text/plain', 'a=\\";"', 'b']],
    ['"a;b";c', ['"a;b"', 'c']],
  ] as const)
    t.strictSame(of(line).parameters, parameters)
  for (const [line, media] of [
    ['', ''],
    ['Text/Plain; Charset=x; A=B', 'text/plain;a=b'],
    ['a/b; x="1;charset=2"; charset=3', 'a/b;x="1;charset=2"'],
    ['a/b; x="1\\";charset=2"; charset=3', 'a/b;x="1\\";charset=2"'],
    ['a/b; charset="x;y"; z=1', 'a/b;z=1'],
    ['a/b; x="1; charset=2', 'a/b;x="1; charset=2'],
    ['a/b; x="\\', 'a/b;x="\\'],
    ['a/b; charsets=1', 'a/b;charsets=1'],
    // The letter case of a boundary counts (RFC 2046).
    ['A/B; Boundary="aB;C"; V=D', 'a/b;boundary="aB;C";v=d'],
    ['multipart/form-data; Boundary=A=B', 'multipart/form-data;boundary=A=B'],
  ] as const)
    t.equal(of(line).media, media, line)
  t.equal(of('a/b', 'c/d').essence, 'a/b, c/d', 'two lines are a list')
  t.equal(of().essence, '')
  t.equal(of().media, '')
})

t.test('a body is encoded if any coding but identity is named', async (t) => {
  const of = (...lines: string[]) => isEncoded(lines.flatMap((line) => ['Content-Encoding', line]))
  for (const line of ['gzip', 'identity, gzip', '']) t.ok(of(line), line)
  for (const line of ['identity', ' Identity\t']) t.notOk(of(line), line)
  t.ok(of('identity', 'br'))
  t.notOk(of())
})

t.test('a form without a media type, or of another, has no boundary', async (t) => {
  for (const [type, boundary] of [
    ['', null],
    ['x; boundary=b', null],
    ['Multipart/Form-Data; boundary="b c"', null],
    ['Multipart/Form-Data; boundary=b', 'b'],
    ['multipart/form-data; charset=utf-8; boundary="b:c"', 'b:c'],
  ] as const)
    t.equal(formDataBoundary(['Content-Type', type]), boundary, type)
  t.equal(formDataBoundary([]), null)
})

t.test('a client that prefers HTML gets a page, any other a problem', async (t) => {
  const accepts = (...lines: string[]): boolean => prefersHtml(lines.flatMap((line) => ['Accept', line]))
  // Chrome, Firefox, Safari, opening a page or sending a form, and rarer ones.
  for (const line of lines`
    text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8,application/signed-exchange;v=b3;q=0.7
    text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8
    text/html
    Text/HTML; charset=utf-8
    text/html;q=0.2, application/json;q=0.1
    application/json;q=0.5, text/html;level=1;q=0.7
    text/html, application/json;q=0
    text/html;q=0.001
    text/html;q=1, application/json;q=0.9
    text/html;q=0.3, application/json;q=0.2, text/html;q=0.1
    text/html;q=0.9, application/*;q=0.8
    text/html;q=0.3,*/*;q=0.1,text/html;q=0.2`)
    t.ok(accepts(line), line)
  t.ok(accepts('application/json;q=0.9', 'text/html'), 'several Accept lines count as one list')
  for (const line of lines`
    */*
    text/*
    application/json
    application/problem+json, text/html;q=0.9
    application/json, text/plain, */*
    text/html, application/json
    text/html, application/json;q=1
    text/html, */*
    text/html;q=0.8, application/*
    text/html;q=0
    text/html;q=0.0
    text/html;q=2
    text/html;q=
    text/html;q=0.1234
    text/html;q=0.5, application/problem+json;q=0.5
    application/xhtml+xml
    x-text/html-not
    ,;q=1,,`)
    t.notOk(accepts(line), line)
  t.notOk(accepts(''))
  t.notOk(prefersHtml([]))
  t.notOk(prefersHtml(['Accept-Language', 'text/html']))
})
