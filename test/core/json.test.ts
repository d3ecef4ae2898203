import canonicalize from 'canonicalize'
import fc from 'fast-check'
import t from 'tap'
import { canonicalJson, canonicalValues, JsonReading } from '../../src/core/body/json.ts'
import { nodeAt, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'
import { MAX_DEPTH } from '../../src/core/body/json-scalars.ts'
import { SHORT_BODY } from '../../src/core/body/json-text.ts'
import { character, words } from './fixtures.ts'
import { form } from './json-tree.ts'

t.test('numbers are printed as in RFC 8785, appendix B', async (t) => {
  // The bits of a double, and what ECMAScript prints.
  const table = words`
    0000000000000000 0                        8000000000000000 0
    0000000000000001 5e-324                   8000000000000001 -5e-324
    7fefffffffffffff 1.7976931348623157e+308  ffefffffffffffff -1.7976931348623157e+308
    4340000000000000 9007199254740992         c340000000000000 -9007199254740992
    4430000000000000 295147905179352830000    44b52d02c7e14af5 9.999999999999997e+22
    44b52d02c7e14af6 1e+23                    44b52d02c7e14af7 1.0000000000000001e+23
    444b1ae4d6e2ef4e 999999999999999700000    444b1ae4d6e2ef4f 999999999999999900000
    444b1ae4d6e2ef50 1e+21                    3eb0c6f7a0b5ed8c 9.999999999999997e-7
    3eb0c6f7a0b5ed8d 0.000001                 41b3de4355555553 333333333.3333332
    41b3de4355555554 333333333.33333325       41b3de4355555555 333333333.3333333
    41b3de4355555556 333333333.3333334        41b3de4355555557 333333333.33333343
    becbf647612f3696 -0.0000033333333333333333 43143ff3c1cb0959 1424953923781206.2`
  for (let n = 0; n < table.length; n += 2) {
    const [bits, printed] = table.slice(n, n + 2) as [string, string]
    t.equal(form(String(Buffer.from(bits, 'hex').readDoubleBE())), printed, bits)
    t.equal(form(printed), printed, printed)
  }
  for (const text of ['NaN', 'Infinity', '-Infinity']) t.equal(form(text), null, text)
})

t.test('the examples of RFC 8785, sections 3.2 and 3.2.3, have the forms given there', async (t) => {
  const text = String.raw`{
    "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
    "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
    "literals": [null, true, false]
  }`
  const expected = `{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\\u000f\\nA'B\\"\\\\\\\\\\"/"}`
  t.equal(form(text), expected)
  // The RFC writes this number with more digits than a double has: its value is not what is printed.
  t.equal(form('333333333.33333329'), null)
  const members = String.raw`{ "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh",
    "1": "One", "\ud83d\ude00": "Emoji", "\u0080": "Control", "\u00f6": "Latin Small Letter O With Diaeresis" }`
  t.equal(
    [...(form(members) ?? '').matchAll(/:"([^"]*)"/g)].map(([, value]) => value).join(', '),
    'Carriage Return, One, Control, Latin Small Letter O With Diaeresis, Euro Sign, Emoji, Hebrew Letter Dalet With Dagesh',
  )
})

t.test('F04 equal numbers have one form', async (t) => {
  const zeros = '0'.repeat(300)
  for (const [first = '', ...others] of [
    [...words`1 1.0 1e0 1E0 1e+0 10e-1 0.1e1 1.000`, `1.${zeros}`, `1${zeros}e-300`],
    [...words`0 -0 0.0 -0.0 0e5 0e-5 -0e999999999999`, `0.${zeros}`],
    [...words`0.1 1e-1 0.10 10e-2`, `0.1${zeros}`],
    words`1e21 1000000000000000000000 1E+21 0.1e22`,
    words`-12.5 -125e-1 -0.125E2`,
    words`9007199254740992 9007199254740992.0 9.007199254740992e15`,
  ]) {
    t.not(form(first), null)
    for (const spelling of others) t.equal(form(spelling), form(first), spelling.slice(0, 40))
  }
  for (const other of ['"1"', 'true']) t.not(form('1'), form(other))
  for (const [text, printed] of [
    ['0.000001', '0.000001'],
    ['0.0000001', '1e-7'],
    ['-0.00000012', '-1.2e-7'],
  ] as const)
    t.equal(form(text), printed)
})

t.test('F04 a number that a double would change has no form', async (t) => {
  for (const text of words`
    9007199254740993 -9007199254740993 9007199254740993.0 12345678901234567890 123456789012345678
    0.1000000000000000055511151231257827 1.0000000000000000001 3.141592653589793238 18446744073709551615
    1e400 -1e400 1e-400 1e99999999999999999999 1e-99999999999999999999 4.9e-324
    1e25700 1e-25700 -1e1100 1e-1100`)
    t.equal(form(text), null, text)
  t.equal(form(`1${'0'.repeat(300)}1`), null)
})

t.test('F05 an escape equals its character; composed and decomposed forms differ', async (t) => {
  for (const [one, two] of [
    [String.raw`"\u00e9"`, '"é"'],
    [String.raw`"\u00E9"`, '"é"'],
    [String.raw`"\ud83d\ude00"`, '"😀"'],
    [String.raw`"\/"`, '"/"'],
    [String.raw`{"\u0061":1}`, '{"a":1}'],
  ] as const)
    t.equal(form(one), form(two), one)
  t.not(form('"\u00e9"'), form('"e\u0301"'))
})

t.test('F08 the order of items counts, that of members does not', async (t) => {
  t.not(form('[1,2]'), form('[2,1]'))
  t.equal(form('{"a":[{"c":1,"d":2}],"b":3}'), form(' { "b" : 3 , "a" : [ {"d":2,\r\n\t"c":1} ] } '))
  const spaced = form('[{"b" :1,"a" :2},{"b" :1,"a" :2}]')
  t.equal(spaced, form('[{"a":2,"b":1},{"a":2,"b":1}]'), 'blanks before colons')
})

t.test('JSON that would lose information, and text that is not JSON, has no form', async (t) => {
  for (const text of words`
    {"a":1,"a":1} {"a":1,"\u0061":2} {"b":{"a":1,"a":2}} [{"a":1,"a":2}] "\ud800" "\udc00\ud800" {"\ud800":1}
    { } [ ] [1 [1, [1,] [,1] {"a"} {"a":} {"a":1,} {,} {a:1} {'a':1} {"a":1 {1:2} " "a "\" "\x" "\u12" "\u12g4"
    tru truex True nul falsey undefined 01 01.5 -01.5 00.5 012345.5 [1.5:] {"a":1.5:} - -01 +1 .5 1. 1.e5 1e 1e+
    0x10 1_000 --1 [1]// /**/1`)
    t.equal(form(text), null, text)
  for (const text of [
    ['', ' ', '[1 2]', '{"a" 1}', '{"a":1 "b":2}', '1 2', '{} {}', '"\n"', '"\t"', '"\0"'],
    ['\ufeff{}', '\u00a01', '1\u2028', '\v1'],
  ].flat())
    t.equal(form(text), null, encodeURIComponent(text))
})

t.test('a bug throws instead of passing for JSON that cannot be compared', async (t) => {
  t.throws(() => canonicalJson(null as unknown as Buffer), TypeError)
  const broken = placesOf(['/a'])
  broken.members.get = () => {
    throw new Error('a bug')
  }
  t.throws(() => canonicalJson(Buffer.from('{"a":1}'), broken), { message: 'a bug' })
  t.equal(String(canonicalJson(Buffer.from('{"a":1}'))), '{"a":1}', 'the next reading is not disturbed')
})

t.test('members named like properties of Object.prototype are ordinary members', async (t) => {
  const text = '{"__proto__":{"a":1},"constructor":2,"hasOwnProperty":3,"toString":4}'
  t.equal(form(text), text)
  for (const [json, pointer] of [
    ['{}', '/__proto__'],
    ['{}', '/constructor'],
    ['[]', '/length'],
  ] as const)
    t.same(valuesAt(json, pointer), [undefined])
})

t.test('JSON nested 100 deep has a form, deeper has none', async (t) => {
  t.equal(MAX_DEPTH, 100)
  for (const [open, close, inner] of [
    ['[', ']', ''],
    ['[', ']', '1'],
    ['[', ']', '"a"'],
    ['{"a":', '}', '1'],
  ] as const) {
    const nested = (depth: number) => open.repeat(depth) + inner + close.repeat(depth)
    t.equal(form(nested(100)), nested(100))
    t.equal(form(nested(101)), null)
  }
  const mixed = (inner: string) => `${'{"a":'.repeat(99)}${inner}${'}'.repeat(99)}`
  for (const inner of ['[]', '{}']) t.equal(form(mixed(inner)), mixed(inner))
  for (const inner of ['[[]]', '{"a":{}}']) t.equal(form(mixed(inner)), null)
})

t.test('members are sorted by their UTF-16 units; a name that is there twice has no form', async (t) => {
  const odd = [
    ['', '\0', '\x1f', ' ', '!', '#', '~', '\x7f', '\x80', '\u07ff', '\u0800', '\ud7ff', '\u{10000}'],
    ['\u{10ffff}', '\ue000', '\uefff', '\uf000', '\uffff', 'abcdefgh\u{10000}', 'abcdefgh\uffff'],
    ['a\0', 'a\0b', 'a!', 'a#', '"', '""', 'a"', 'a"b'],
    words`a aa aaa aaaa aaaaa aaab aab abcd abcdefgh0 abcdefgh1 b`,
  ].flat()
  // Names are compared four bytes at a time; a common beginning makes those bytes equal in all of them.
  const many = (count: number) =>
    Array.from({ length: count }, (_, n) => `${'alike'.repeat(count % 3)}${(n * 7919) % 20_011}-\u00e9`)
  const counts = [2, 9, 31, 32, 33, 65, 300, 1025, 4097]
  for (const names of [odd, odd.toReversed(), ...counts.map(many)]) {
    const members = names.map((name, n) => [name, `${JSON.stringify(name)}:${n}`] as const)
    const text: string[] = members.map(([, member]) => member)
    const sorted = members.toSorted(([a], [b]) => (a < b ? -1 : 1)).map(([, member]) => member)
    t.equal(form(`{${text.join(' , ')} }`), `{${sorted.join()}}`, `${names.length} members`)
    for (const twice of [text[0], text.at(-1)] as string[])
      for (const at of [0, Math.floor(names.length / 2), names.length])
        t.equal(
          form(`{${text.toSpliced(at, 0, twice).join()}}`),
          null,
          `${names.length}, ${twice} again at ${at}`,
        )
  }
})

t.test('pointers are split as RFC 6901 says', async (t) => {
  for (const [pointer, ...tokens] of [
    [''],
    ['/', ''],
    ['/a/0/', 'a', '0', ''],
    ['//a//', '', 'a', '', ''],
    ['/a~1b/m~0n/~01', 'a/b', 'm~n', '~1'],
    ['/~0~1~01~10/~1~1/~~0', '~/~1/0', '//', '~~'],
  ] as const)
    t.same(pointerTokens(pointer), tokens, pointer)
})

function valuesAt(text: string, ...pointers: string[]): (string | undefined)[] {
  const places = placesOf(pointers)
  const found = canonicalValues(Buffer.from(text), places)
  return pointers.map((pointer) => found?.get(nodeAt(places, pointer))?.toString())
}

t.test('a pointer finds its value or nothing, also beside others and within their values', async (t) => {
  const text = '{"a":{"b":[10,{"c":null}]},"":1,"a/b":2,"m~n":3}'
  const found = { '/a/b/0': '10', '/a/b/1/c': 'null', '/': '1', '/a~1b': '2', '/m~0n': '3', '': form(text) }
  for (const [pointer, value] of Object.entries(found)) t.same(valuesAt(text, pointer), [value], pointer)
  for (const pointer of words`
    /x /a/x /a/b/2 /a/b/- /a/b/00 /a/b/01 /a/b/+1 /a/b/1.0 /a/b/1e0 /a/b/1a /a/b/0/0 /a/b/9007199254740993 /x/y/z`)
    t.same(valuesAt(text, pointer), [undefined], pointer)
  t.same(valuesAt('{"\\u00e9\\u20ac":1}', '/é€'), ['1'], 'by a name with escapes')
  t.same(valuesAt('{"y\\"z":1}', '/y"z'), ['1'], 'by a name with a quote')
  t.same(valuesAt('{"b":1', '/b'), [undefined])
  const inner = '{"b":[1,{"c":2}],"d":3}'
  t.same(
    valuesAt(`{"z":0,"a":${inner}}`, '', '/a', '/a/b', '/a/b/1', '/a/b/1/c', '/z'),
    [
      [`{"a":${inner},"z":0}`, inner, '[1,{"c":2}]'],
      ['{"c":2}', '2', '0'],
    ].flat(),
  )
  t.same(valuesAt('[1,[2,3],4]', '', '/0', '/1', '/1/1', '/2'), ['[1,[2,3],4]', '1', '[2,3]', '3', '4'])
})

t.test('the value at an ignored pointer is left out and nothing else changes', async (t) => {
  const left = (text: string, pointer: string): string =>
    String(canonicalJson(Buffer.from(text), placesOf([pointer])))
  const kept = '{"a":{"b":1},"c":[1]}'
  for (const [text, pointer, rest] of [
    ['{"a":1,"b":2}', '/a', '{"b":2}'],
    ['{"a":{"b":1,"c":2}}', '/a/b', '{"a":{"c":2}}'],
    ['[{"id":1,"t":2},3]', '/0/t', '[{"id":1},3]'],
    ['{"a":1}', '/a', '{}'],
    // The whole document is never left out.
    ['{"a":1}', '', '{"a":1}'],
    // A duplicate member has no form even at an ignored pointer.
    ['{"a":1,"a":2}', '/a', 'null'],
    // Of objects that begin alike.
    ['[{"a":1,"b":2},{"a":1,"c":3}]', '/1/a', '[{"a":1,"b":2},{"c":3}]'],
    ['[{"a":1,"b":2},{"a":1}]', '/1/a', '[{"a":1,"b":2},{}]'],
    ['[{"a":1,"b":2},{"a":1,"b":2,"c":3}]', '/1/b', '[{"a":1,"b":2},{"a":1,"c":3}]'],
    ...words`/x /a/x /a/b/c /c/9 /c/- /c/9/x`.map((absent): string[] => [kept, absent, kept]),
  ])
    t.equal(left(text as string, pointer as string), rest, `${text} without ${pointer}`)
  t.equal(left('[1,2,3]', '/1'), left('[1,{"x":9},3]', '/1'), 'whatever was there')
  t.not(left('[1,2,3]', '/1'), left('[1,3]', '/1'), 'the neighbours keep their places')
  t.not(left('[1,2]', '/1'), '[1,""]')
  const rest = '"x",'.repeat(40_000)
  t.equal(left(`[{"a":1},${rest}1]`, '/0/a'), `[{},${rest}1]`, 'nor is it read again later')
})

/** JSON that keeps its information: no -0 beside 0, no lone surrogates. */
const json = fc.jsonValue({ maxDepth: 3, stringUnit: character })

/** Another spelling of the same value. */
function respell(value: unknown, dice: () => number): string {
  const gap = (): string => ' \t\r\n'.slice(0, dice() % 3)
  const turned = (parts: readonly string[], from: number): string =>
    [...parts.slice(from), ...parts.slice(0, from)].join() || gap()
  let text = JSON.stringify(value)
  if (typeof value === 'string') {
    const units = value.split('').map((unit) => {
      const isPlain = dice() % 2 === 0 && !/[\ud800-\udfff]/.test(unit)
      return isPlain
        ? JSON.stringify(unit).slice(1, -1)
        : `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`
    })
    text = `"${units.join('')}"`
  } else if (typeof value === 'number') {
    const power = value.toExponential()
    const spellings = [text, power, power.replace('e', '0E').replace(/^(-?\d)0E/, '$1.0E')]
    text = spellings[dice() % 3] as string
  } else if (Array.isArray(value))
    text = `[${turned(
      value.map((item) => respell(item, dice)),
      0,
    )}]`
  else if (typeof value === 'object' && value !== null) {
    const members = Object.entries(value).map(
      ([name, item]) => `${respell(name, dice)}:${respell(item, dice)}`,
    )
    text = `{${turned(members, members.length === 0 ? 0 : dice() % members.length)}}`
  }
  return gap() + text + gap()
}

t.test('F03 any JSON has the form of the canonicalize package, however spelled', async () => {
  fc.assert(
    fc.property(json, json, fc.infiniteStream(fc.nat(1000)), (a, b, stream) => {
      const [one, two] = [JSON.stringify(a), JSON.stringify(b)]
      const expected = canonicalize(JSON.parse(one)) as string
      return (
        form(one) === expected &&
        form(expected) === expected &&
        form(respell(JSON.parse(one), () => stream.next().value as number)) === expected &&
        (form(two) === expected) === (canonicalize(JSON.parse(two)) === expected)
      )
    }),
    { numRuns: 100 },
  )
})

t.test('whole numbers have a form exactly when no digit is lost', async () => {
  fc.assert(
    fc.property(fc.bigInt({ min: -(10n ** 30n), max: 10n ** 30n }), (whole) => {
      const printed = Number(whole).toLocaleString('en', { useGrouping: false, maximumFractionDigits: 0 })
      return (form(String(whole)) !== null) === (BigInt(printed) === whole)
    }),
    { numRuns: 100 },
  )
})

t.test('nothing of one body is remembered in the next, or in the next of its objects', async (t) => {
  const first = '[{"b":1,"a":2},{"b":1,"a":2}]'
  const second = '[{"a":1,"b":2},{"b":1,"a":2}]'
  for (const text of [first, second, first, second])
    t.equal(form(text), text.replaceAll('"b":1,"a":2', '"a":2,"b":1'))
  // An earlier name, unescaped, and the bytes behind it must not make a name with a raw line feed valid.
  t.equal(form('[{"\\u000a:xyz":1},{"\n:xyz":1}]'), null)
  t.equal(form('[":",{"a":1,"b":2},{"[":1,"[":2}]'), null)
  t.equal(form('{"l":[{"b":1,"a":2,"c":3},{"b":1}]}'), '{"l":[{"a":2,"b":1,"c":3},{"b":1}]}')
  t.equal(form('[{"b":1,"a":2,"c":3},{"b":4,"a":5,"d":6}]'), '[{"a":2,"b":1,"c":3},{"a":5,"b":4,"d":6}]')
})

t.test('a body over 64 KiB is read in steps, and those of several bodies do not mix', async (t) => {
  const KiB = 1024
  const list = (length: number, item: string): string => {
    const items = `[${`${item},`.repeat((length - 8) / (item.length + 1))}`
    return `${items}${'7'.repeat(length - items.length - 1)}]`
  }
  const sorted = `${'{"b":'.repeat(16)}"${'x'.repeat(128 * KiB)}"${',"a":1}'.repeat(16)}`
  const many = (n: number): string =>
    Array.from({ length: 9000 }, (_, m) => `"${(m * 7919 + n) % 9001}":${m}`).join()
  const deep = (n: number): string =>
    `${'{"b":[1,'.repeat(n)}${'"x",'.repeat(30_000)}1${`],"a":${n}}`.repeat(n)}`
  const alike = (...names: string[]): string =>
    `{"l":[${`{${names.map((name) => `"${name}":1`).join()}},`.repeat(9000)}1],"a":1}`
  const others = [
    [1, 5].map((n) => `{"b":{${many(n)}},"a":1}`),
    [0, 3, 6, 9, 12, 15, 18].map((fill) => `["${'x'.repeat(fill)}",${'{"b":1,"a":1,"c":1},'.repeat(4000)}1]`),
    [deep(20), deep(30), alike('bb'), alike('b'), alike('c', 'b', 'a'), alike('a', 'b', 'c', 'd')],
    [alike('b', 'c', 'a'), `{"b":1,"a":2,"c":[${'"x",'.repeat(30_000)}1]}`],
  ].flat()
  // Sorting moves the bytes of an object once for each object around it.
  const rows: readonly (readonly [text: string, least: number, most: number])[] = [
    [list(64 * KiB, '1e20'), 1, 1],
    [list(64 * KiB + 1, '1e20'), 4, 5],
    [list(128 * KiB, '"a"'), 2, 3],
    [list(128 * KiB, '1e20'), 8, 10],
    [list(128 * KiB, '{"b":1,"a":2}'), 2, 4],
    [sorted, 2, 10],
    ...others.map((text) => [text, 2, 99] as const),
  ]
  const readings = rows.map(([text]) => ({
    reading: new JsonReading(Buffer.from(text), null, false),
    steps: 1,
  }))
  let left = readings
  while (left.length > 0) {
    left = left.filter(({ reading }) => !reading.step())
    for (const one of left) one.steps++
    t.equal(form('{"b":[{"d":1,"c":2},{"d":1,"c":2}],"a":{}}'), '{"a":{},"b":[{"c":2,"d":1},{"c":2,"d":1}]}')
  }
  for (const [n, [text, least, most]] of rows.entries()) {
    const { reading, steps } = readings[n] as (typeof readings)[0]
    t.ok(steps >= least && steps <= most, `${steps} steps for ${text.length} bytes of ${text.slice(0, 8)}…`)
    t.equal(reading.text?.toString(), form(text))
  }
})

t.test('a long text is gone once it is freed, and short bodies can still be read', async (t) => {
  const [short, long] = [2, 70_000].map((length) => {
    const reading = new JsonReading(Buffer.from(`{"b":"${'x'.repeat(length)}","a":1}`), null, false)
    while (!reading.step());
    const { text } = reading
    reading.free()
    return text
  })
  t.equal(long?.length, 0)
  t.equal(short?.toString(), '{"a":1,"b":"xx"}')
  t.equal(form('{"b":2,"a":[1.0]}'), '{"a":[1],"b":2}')
})

const USUAL = `{"amount":1250.50,"currency":"EUR","items":[{"sku":"A-1","price":1.5,"tags":["é"]},{"sku":"B-2","price":2,"tags":[]}],"note":null}`

t.test(
  'usual, rare and invalid bodies have the form that the tree reader gives, up to all limits',
  async (t) => {
    const numbers = (count: number) =>
      Array.from({ length: count }, (_, n) => `"${String(n).padStart(4, '0')}":0`)
    const deep = `{"b":${'{"b":0,"a":'.repeat(99)}${'7'.repeat(15)}${'}'.repeat(99)},"a":1}`
    const wide = Array.from({ length: 33 }, (_, n) => `"${32 - n}":0`)
    const nested = (depth: number) => '['.repeat(depth) + ']'.repeat(depth)
    for (const body of [
      [
        USUAL,
        JSON.stringify(JSON.parse(USUAL), null, 2),
        ' 1',
        '{"b":1,"a":2}',
        ' { "b" : [ ] , "a" : { } } ',
      ],
      '[10.50,10.00,-0.5,0,true,false,null,"é😀"]',
      String.raw`["\/","\\\"\b\f\n\r\t"]`,
      ['[{"a":1},{"a" :2}]', '[{"a" :1},{"a" :2}]', '{"b":{"d":[{"z":1,"y": 2},{"z":3,"y":4}],"c":1},"a":1}'],
      '{"a name of more than sixteen bytes":1,"a name of more than fifteen bytes":2}',
      [nested(MAX_DEPTH), deep, `{${numbers(32).reverse().join()}}`, `{${numbers(6000).join()}}`],
      [
        `"${'x'.repeat(SHORT_BODY - 2)}"`,
        '123456789012345',
        '{"\ue000":1,"😀":2}',
        `{${wide.join()}}`,
        `[{${wide.join()}},{${wide.join()}}]`,
        '-0',
      ],
      words`"\u0041" {"\n":1} 0.0 0.01 1e1 1E1 1.5e1 1234567890123456 1.23456789012345`,
      `"${'x'.repeat(SHORT_BODY - 1)}"`,
    ].flat())
      t.not(form(body), null, body.slice(0, 40))
    for (const body of [
      words`{ [1,] {"a":1,} " "\ tru nul fals 01 - 1. .5 {"a":1,"a":2} {"b":1,"a":2,"a":3} [{"a":1},{"a":1,"a":2}]`,
      ['', ' ', '"\t"', '1 2', '\0', '[1\0]', nested(MAX_DEPTH + 1), `{"b":1${',"":1'.repeat(13_105)}}`],
      Buffer.from([0x22, 0xff, 0x22]),
    ].flat())
      t.equal(form(body as string), null, body.slice(0, 40).toString())
  },
)
