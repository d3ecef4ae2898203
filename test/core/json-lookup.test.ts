import fc from 'fast-check'
import t from 'tap'
import { type LookedUp, lookUp, type PointerResult } from '../../src/core/body/json-lookup.ts'
import { atOnce } from '../../src/core/steps.ts'
import { character, isJson, words } from './fixtures.ts'

const read = (text: string | Buffer, ...pointers: string[]): LookedUp | null =>
  atOnce(lookUp([], Buffer.from(text as string), pointers))
const at = (text: string, pointer: string): PointerResult | undefined => read(text, pointer)?.at(pointer)
const literal = (text: string): PointerResult => ({ kind: 'literal', literal: text })

const check = (text: string): boolean => (read(text) !== null) === isJson(text)

t.test('lookUp accepts what RFC 8259 and JSON.parse accept', async (t) => {
  for (const text of [
    words`1 -1 - 01 -01 0 -0 1. .1 1.0 1e 1e+ 1E-07 1e5x 10 -10 9 -9.09 1e+5 1e-5 1E5 1E+ 1d5 1D5 1: 1/ 00 -00 0. -a
      t f n true tru truE true1 false null nul nulll nan Infinity +1 0x1
      " "a "a" "\ "\" "\x" "\n" "\u" "\u00" "\u00e" "\u0000" "\u0100" "\ug0e9" "\u0ge9" "\u00g9" "\u00e"9" "\U00e9"
      "\u00e9" "\u00eg" "\ud800" "\uDC00\ud800" 'a' [ ] [] [1 [1] [1,] [,1] [1,2] [1} [[] [1,]]
      { } {} {"a" {"a"} {"a": {"a":} {"a":1 {"a":1} {"a":1,} {,"a":1} {:1} {a":1} {a:1} {1:1} {"a"::1} {"a":1]
      {"a":1,"a":1} {"\u00":1} /**/1 1// []]`,
    ['', ' ', '1 1', '"\n"', '"\t"', '"\nn"', '"\x1fb"', '"\x7f"', '"\u2028"', '[ ]', '[1 2]', '{ }'],
    ['{"a" 1}', '{"a":1 "b":1}', '\xa01', '\v1', '\f1', '\r\n\t 1 \r\n\t ', '1\0'],
  ].flat())
    t.ok(check(text), encodeURIComponent(text))
})

t.test('lookUp accepts what JSON.parse accepts, whatever the text', async () => {
  const part = fc.constantFrom(
    ...words`{ } [ ] : , " \ a u 1 - + . e 0 true null "a" {} [] "a": \u00e9 \ud83d`,
    '\u00e9',
    ' ',
    '\n',
    '\x01',
  )
  const soup = fc.array(part, { maxLength: 12, size: 'max' }).map((parts) => parts.join(''))
  const mutilated = fc
    .tuple(fc.json(), fc.nat(), fc.nat({ max: 2 }), part)
    .map(([text, n, length, other]) => {
      const place = n % (text.length + 1)
      return text.slice(0, place) + other + text.slice(place + length)
    })
    .filter((text) => text.isWellFormed())
  fc.assert(fc.property(fc.oneof(soup, fc.string({ unit: character }), fc.json(), mutilated), check), {
    numRuns: 500,
  })
})

t.test('lookUp refuses invalid UTF-8, encoded bodies and more than 1000 levels', async (t) => {
  t.equal(read(Buffer.from('"\xff"', 'latin1')), null)
  t.equal(read('['.repeat(1_000_000)), null)
  t.equal(read(`{"id":"${'['.repeat(200)}","y":"\\"${'{'.repeat(2000)}`), null, 'an unterminated string')
  t.equal(atOnce(lookUp(['Content-Encoding', 'gzip'], Buffer.from('1'), [])), null)
  for (const [open, inner, close] of [
    ['[', '', ']'],
    ['[', '1', ']'],
    ['{"a":', '1', '}'],
  ] as const) {
    const nested = (levels: number): string => open.repeat(levels) + inner + close.repeat(levels)
    t.not(read(nested(1000)), null)
    t.equal(read(nested(1001)), null)
  }
})

t.test('a value is given exactly as written', async (t) => {
  for (const [text, pointer, value] of [
    [' {"a" : [ 1 , {"b":-1.50e+3} ] } ', '/a/1/b', '-1.50e+3'],
    [' {"a" : [ 1 , {"b":2 } ] } ', '/a', '[ 1 , {"b":2 } ]'],
    [' [1, 2 ]\n', '', '[1, 2 ]'],
    ['{"\\u0061":"\\u00e9"}', '/a', '"\\u00e9"'],
    ['{"\u00e9":1}', '/\u00e9', '1'],
    ['{"a\\"b":1}', '/a"b', '1'],
    ['{"a":{"":"e"}}', '/a/', '"e"'],
    ['{"a/b":1,"m~n":2}', '/a~1b', '1'],
    ['{"a/b":1,"m~n":2}', '/m~0n', '2'],
    ['{"~1":1}', '/~01', '1'],
    [`{"z":"${'['.repeat(2000)}\\"","id":"a"}`, '/id', '"a"'],
    ['{"x":{"id":"b"},"y":["id"],"id":"a","z":"\\"id\\":1"}', '/id', '"a"'],
    // In an object, 0 is a member name.
    ['{"0":1}', '/0', '1'],
    ['[1,2]', '/1', '2'],
    ['[[1],[2,3]]', '/1/1', '3'],
  ] as const)
    t.same(at(text, pointer), literal(value), `${text} ${pointer}`)
  for (const [text, pointer] of [
    ['[1,2]', '/2'],
    ['[1,2]', '/01'],
    ['[1,2]', '/-'],
    ['[1,2]', '/99999999999999999999'],
    ['[1,2]', '/c'],
    ['[1,2]', '/0/c'],
    ['{"a/b":"s"}', '/a~1b/c'],
    ['{"a":1}', '/A'],
    ['{"a":1}', '/toString'],
    ['{ }', '/0'],
    ['[ ]', '/0'],
    ['[]', '/0'],
    ['{}', '/a'],
    ['1', '/a'],
    ['{"a":1}', '/a/b'],
    ['{"b":{"a":1}}', '/a'],
  ] as const)
    t.same(at(text, pointer), { kind: 'absent' }, `${text} ${pointer}`)
  t.equal(read(' [1]\n')?.text, ' [1]\n')
})

t.test('a duplicate member along a pointer makes it ambiguous', async (t) => {
  for (const [text, pointer, kind] of [
    ['{"a":1,"a":1}', '/a', 'ambiguous'],
    ['{"a":1,"\\u0061":1}', '/a', 'ambiguous'],
    ['{"a":{"b":1},"a":{}}', '/a/b', 'ambiguous'],
    ['{"a":{},"a":{}}', '/a/b', 'ambiguous'],
    ['{"a":{"b":1,"b":2}}', '/a/b', 'ambiguous'],
    ['{"a":{"b":1,"c":2,"c":3}}', '/a/b', 'literal'],
    ['{"a":{"b":1,"b":2}}', '/a', 'literal'],
    ['{"a":1,"b":{"a":1}}', '/a', 'literal'],
    ['[{"a":1},{"a":1}]', '/1/a', 'literal'],
  ] as const)
    t.equal(at(text, pointer)?.kind, kind, `${text} ${pointer}`)
})

t.test('several pointers are looked up in one pass, and a long body in steps', async (t) => {
  const items = Array.from({ length: 30_000 }, (_, n) => `{"n":${n},"x":"${'\\n'.repeat(n % 3)}"}`)
  const text = `{"items":[${items.join()}],"id":"k"}`
  const steps = lookUp([], Buffer.from(text), ['/id', '/items/29999', '/items/2/x', '/nobody'])
  let count = 0
  let step = steps.next()
  for (; step.done !== true; step = steps.next()) count++
  t.equal(count, Math.floor(text.length / (64 * 1024)), 'one for each 64 KiB')
  const found = step.value as LookedUp
  t.same(found.at('/id'), literal('"k"'))
  t.same(found.at('/items/29999'), literal(items[29_999] as string))
  t.same(found.at('/items/2/x'), literal('"\\n\\n"'))
  t.same(found.at('/nobody'), { kind: 'absent' })
})
