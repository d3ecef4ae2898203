import t from 'tap'
import { fieldLines, filterLines, firstOf, hopByHop, linesOf } from '../../src/core/headers.ts'

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
  const fixed = [
    'connection',
    'keep-alive',
    'te',
    'transfer-encoding',
    'upgrade',
    'proxy-authorization',
    'proxy-authenticate',
    'proxy-connection',
  ]
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
