import canonicalize from 'canonicalize'
import fc from 'fast-check'
import t from 'tap'
import { canonicalJson, canonicalValues } from '../../src/core/body/json.ts'
import { nodeAt, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'
import { MAX_DEPTH } from '../../src/core/body/json-scalars.ts'
import { UsualJson } from '../../src/core/fingerprint.ts'
import { isJson } from './fixtures.ts'
import { canonical, parseLossless } from './json-tree.ts'

const usual = UsualJson.load()

/** Canonical text, or null if none keeps all the information. */
function form(text: string): string | null {
  const found = canonicalJson(Buffer.from(text))?.toString() ?? null
  if (found !== slowly(text)) throw new Error(`${text}: ${found} instead of ${slowly(text)}`)
  const other = usual?.textOf(Buffer.from(text))?.toString() ?? found
  if (other !== found) throw new Error(`${text}: ${other} from the WebAssembly reader instead of ${found}`)
  return found
}

function slowly(text: string): string | null {
  const node = text.isWellFormed() ? parseLossless(text) : null
  return node === null ? null : canonical(node)
}

/** RFC 8785, appendix B: the bits of a double and what ECMAScript prints. */
const RFC_NUMBERS: readonly (readonly [string, string])[] = [
  ['0000000000000000', '0'],
  ['8000000000000000', '0'],
  ['0000000000000001', '5e-324'],
  ['8000000000000001', '-5e-324'],
  ['7fefffffffffffff', '1.7976931348623157e+308'],
  ['ffefffffffffffff', '-1.7976931348623157e+308'],
  ['4340000000000000', '9007199254740992'],
  ['c340000000000000', '-9007199254740992'],
  ['4430000000000000', '295147905179352830000'],
  ['44b52d02c7e14af5', '9.999999999999997e+22'],
  ['44b52d02c7e14af6', '1e+23'],
  ['44b52d02c7e14af7', '1.0000000000000001e+23'],
  ['444b1ae4d6e2ef4e', '999999999999999700000'],
  ['444b1ae4d6e2ef4f', '999999999999999900000'],
  ['444b1ae4d6e2ef50', '1e+21'],
  ['3eb0c6f7a0b5ed8c', '9.999999999999997e-7'],
  ['3eb0c6f7a0b5ed8d', '0.000001'],
  ['41b3de4355555553', '333333333.3333332'],
  ['41b3de4355555554', '333333333.33333325'],
  ['41b3de4355555555', '333333333.3333333'],
  ['41b3de4355555556', '333333333.3333334'],
  ['41b3de4355555557', '333333333.33333343'],
  ['becbf647612f3696', '-0.0000033333333333333333'],
  ['43143ff3c1cb0959', '1424953923781206.2'],
]

t.test('numbers are printed as in RFC 8785, appendix B', async (t) => {
  for (const [bits, printed] of RFC_NUMBERS) {
    const double = Buffer.from(bits, 'hex').readDoubleBE()
    t.equal(form(String(double)), printed, bits)
    t.equal(form(printed), printed, printed)
  }
  for (const text of ['NaN', 'Infinity', '-Infinity']) t.equal(form(text), null, text)
})

t.test('the example of RFC 8785, section 3.2, has the form given there', async (t) => {
  const text = String.raw`{
    "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
    "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
    "literals": [null, true, false]
  }`
  const expected = `{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\\u000f\\nA'B\\"\\\\\\\\\\"/"}`
  t.equal(form(text), expected)
  // The RFC writes this number with more digits than a double has: its value is not what is printed.
  t.equal(form('333333333.33333329'), null)
})

t.test('members are sorted as in the example of RFC 8785, section 3.2.3', async (t) => {
  const text = String.raw`{
    "\u20ac": "Euro Sign",
    "\r": "Carriage Return",
    "\ufb33": "Hebrew Letter Dalet With Dagesh",
    "1": "One",
    "\ud83d\ude00": "Emoji: Grinning Face",
    "\u0080": "Control",
    "\u00f6": "Latin Small Letter O With Diaeresis"
  }`
  const order = [...(form(text) ?? '').matchAll(/:"([^"]*)"/g)].map(([, value]) => value)
  t.same(order, [
    'Carriage Return',
    'One',
    'Control',
    'Latin Small Letter O With Diaeresis',
    'Euro Sign',
    'Emoji: Grinning Face',
    'Hebrew Letter Dalet With Dagesh',
  ])
})

t.test('F04 equal numbers have one form', async (t) => {
  const same: readonly (readonly string[])[] = [
    [
      '1',
      '1.0',
      '1e0',
      '1E0',
      '1e+0',
      '10e-1',
      '0.1e1',
      '1.000',
      `1.${'0'.repeat(300)}`,
      `1${'0'.repeat(300)}e-300`,
    ],
    ['0', '-0', '0.0', '-0.0', '0e5', '0e-5', '-0e999999999999', `0.${'0'.repeat(300)}`],
    ['0.1', '1e-1', '0.10', '10e-2', `0.1${'0'.repeat(500)}`],
    ['1e21', '1000000000000000000000', '1E+21', '0.1e22'],
    ['-12.5', '-125e-1', '-0.125E2'],
    ['9007199254740992', '9007199254740992.0', '9.007199254740992e15'],
  ]
  for (const spellings of same) {
    for (const spelling of spellings)
      t.equal(form(spelling), form(spellings[0] as string), spelling.slice(0, 40))
    t.not(form(spellings[0] as string), null)
  }
  t.not(form('1'), form('"1"'))
  t.not(form('1'), form('true'))
})

t.test('a number that a double would change has no form', async (t) => {
  for (const text of [
    '9007199254740993',
    '-9007199254740993',
    '9007199254740993.0',
    '12345678901234567890',
    '123456789012345678',
    '0.1000000000000000055511151231257827',
    '1.0000000000000000001',
    '1e400',
    '-1e400',
    '1e-400',
    '1e99999999999999999999',
    '1e-99999999999999999999',
    // Their exponents end like those of doubles, also modulo 256 hundreds.
    '1e25700',
    '1e-25700',
    '-1e1100',
    '1e-1100',
    '4.9e-324',
    '18446744073709551615',
    '3.141592653589793238',
    `1${'0'.repeat(300)}1`,
  ])
    t.equal(form(text), null, text.slice(0, 40))
})

t.test('F04 a number has one form, however long and large it is, and however it is spelled', async (t) => {
  const digits = ['1', '9', '12', '49', '1234567', '123456789012345', '1234567890123456', '12345678901234567']
  const limits = ['123456789012345678', '9007199254740991', '9007199254740993', '17976931348623157']
  const near = (limit: number): number[] => [-3, -2, -1, 0, 1, 2, 3].map((n) => limit + n)
  const powers = [-340, -324, -308, -22, -6, 0, 8, 15, 21, 100, 293, 308].flatMap(near)
  for (const all of [...digits, ...limits]) {
    for (const power of powers)
      for (const mantissa of [all, `-0.${all}`, `${all[0]}.${all.slice(1)}0`, `0.00${all}`, `${all}00.0`])
        form(`${mantissa}e${power}`)
    for (let zeros = 0; zeros < 9; zeros++) {
      const fill = '0'.repeat(zeros)
      for (const text of [
        `0.${fill}${all}`,
        `-0.${fill}${all}0`,
        `${all}${fill}.5`,
        `${all}.${fill}1`,
        `${all}.${fill}`,
      ])
        form(text)
    }
  }
  // Of 16 digits, a double keeps some.
  for (let last = 0; last < 1000; last++)
    for (const text of [`9.007199254740${last}`, `-9.007199254740${last}0`, `900719925474${last}.5`])
      form(text)
  t.equal(form('0.000001'), '0.000001')
  t.equal(form('0.0000001'), '1e-7')
  t.equal(form('-0.00000012'), '-1.2e-7')
})

t.test('any character at any place is read as the tree reader does', async () => {
  const beginnings = String.raw`| 0 1 -1 1. 1.5 0.5 0.05 1e 1e+ 1e5 1.5e-5 - [ [1 [1, ["a" { {"a" {"a": {"a":1 {"a":1, t tr tru true n nul fal fals " "a "\ "\u
    "\u0 "\u00 "\u000 "\u001 "\u006 "\u0041 "\ud83 "\ud83d "\ud83d\ "\ud83d\u "\ud83d\ud "\ud83d\ude0 {"\ {"\u006 {"a\u0022 [{"a":1},{"a`
  const ends = ['', '"', '0"', ']', '1]', '"]', ':1}', '":1}']
  const characters = '\0\t\n\r\x1f !"#+,-./0189:;@AEFG[\\]^_`abefgnrstuz{|}\x7f'
  for (const beginning of beginnings.split(/\s+/))
    for (const character of characters.split(''))
      for (const end of ends) form(beginning.replace('|', '') + character + end)
})

t.test('F05 an escape equals its character; composed and decomposed forms differ', async (t) => {
  t.equal(form('"\\u00e9"'), form('"é"'))
  t.equal(form('"\\u00E9"'), form('"é"'))
  t.equal(form('"\\ud83d\\ude00"'), form('"😀"'))
  t.equal(form('"\\/"'), form('"/"'))
  t.not(form('"\u00e9"'), form('"e\u0301"'))
  t.equal(form('{"\\u0061":1}'), form('{"a":1}'))
})

t.test('F08 the order of items counts, that of members does not', async (t) => {
  t.not(form('[1,2]'), form('[2,1]'))
  t.equal(form('{"a":[{"c":1,"d":2}],"b":3}'), form(' { "b" : 3 , "a" : [ {"d":2,\r\n\t"c":1} ] } '))
})

t.test('JSON that would lose information has no form', async (t) => {
  for (const text of [
    '{"a":1,"a":1}',
    '{"a":1,"\\u0061":2}',
    '{"b":{"a":1,"a":2}}',
    '[{"a":1,"a":2}]',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '{"\\ud800":1}',
  ])
    t.equal(form(text), null, text)
})

t.test('text that is not JSON has no form', async (t) => {
  for (const text of [
    '',
    ' ',
    '{',
    '}',
    '[',
    ']',
    '[1',
    '[1,',
    '[1,]',
    '[,1]',
    '[1 2]',
    '{"a"}',
    '{"a":}',
    '{"a":1,}',
    '{,}',
    '{a:1}',
    "{'a':1}",
    '{"a" 1}',
    '{"a":1 "b":2}',
    '{"a":1',
    '{1:2}',
    '"',
    '"a',
    '"\\"',
    '"\\x"',
    '"\\u12"',
    '"\\u12g4"',
    '"\n"',
    '"\t"',
    '"\0"',
    'tru',
    'truex',
    'True',
    'nul',
    'falsey',
    'undefined',
    '01',
    '01.5',
    '-01.5',
    '00.5',
    '012345.5',
    '[1.5:]',
    '{"a":1.5:}',
    '-',
    '-01',
    '+1',
    '.5',
    '1.',
    '1.e5',
    '1e',
    '1e+',
    '0x10',
    '1_000',
    '--1',
    '1 2',
    '{} {}',
    '\ufeff{}',
    '\u00a01',
    '[1]//',
    '/**/1',
    '1\u2028',
    '\v1',
  ])
    t.equal(form(text), null, encodeURIComponent(text))
})

t.test('a bug throws instead of passing for text without a form', async (t) => {
  t.throws(() => canonicalJson(null as unknown as Buffer), TypeError)
})

t.test('members named like properties of Object.prototype are ordinary members', async (t) => {
  const text = '{"__proto__":{"a":1},"constructor":2,"hasOwnProperty":3,"toString":4}'
  t.equal(form(text), text)
  t.equal(valueAt('{}', '/__proto__'), null)
  t.equal(valueAt('{}', '/constructor'), null)
  t.equal(valueAt('[]', '/length'), null)
})

const nested = (open: string, close: string, depth: number, inner = ''): string =>
  open.repeat(depth) + inner + close.repeat(depth)

t.test('JSON nested 100 deep has a form, deeper has none', async (t) => {
  t.equal(MAX_DEPTH, 100)
  for (const inner of ['', '1', '"a"']) {
    t.equal(form(nested('[', ']', 100, inner)), nested('[', ']', 100, inner))
    t.equal(form(nested('[', ']', 101, inner)), null)
  }
  for (const inner of ['1', '[]']) {
    const deep = inner === '[]' ? 99 : 100
    t.equal(form(nested('{"a":', '}', deep, inner)), nested('{"a":', '}', deep, inner))
    t.equal(form(nested('{"a":', '}', deep + 1, inner)), null)
  }
  t.equal(form(nested('{"a":', '}', 100, '{}')), null)
})

t.test('hostile texts of 1 MiB are read correctly', async (t) => {
  const size = 1024 * 1024
  const rows: readonly (readonly [string, boolean])[] = [
    [`1${'0'.repeat(size)}`, false],
    ['1'.repeat(size), false],
    [`0.${'0'.repeat(size)}1`, false],
    [`0.${'0'.repeat(size - 1)}1e${size}`, true],
    [`0.${'0'.repeat(size)}`, true],
    [`1.${'0'.repeat(size)}`, true],
    [`1e${'0'.repeat(size)}`, true],
    [`1e${'9'.repeat(size)}`, false],
    [`${'10'.repeat(size / 2)}1`, false],
    [`[${'1e-1,'.repeat(size / 5)}1]`, true],
    [`[${'1e20,'.repeat(size / 5)}1]`, true],
    [`[${'1e20,'.repeat(60_000 / 5)}1]`, true],
    [`{"b":[${'1e20,'.repeat(60_000 / 5)}1],"a":1}`, true],
    [`"${'\\\\'.repeat(size / 2)}"`, true],
    [`"${'\\'.repeat(size)}1"`, true],
    [`"${'\\'.repeat(size + 1)}"`, false],
    [`"${'\\"'.repeat(size / 2)}"`, true],
    [`"${'\\"'.repeat(size / 2)}`, false],
    [`"${'\\u0061'.repeat(size / 6)}"`, true],
    ['"'.repeat(size), false],
    [`[${'"",'.repeat(size / 3)}""]`, true],
    ['['.repeat(size), false],
    ['{"a":'.repeat(size / 5), false],
    [`[${'[],'.repeat(size / 3)}[]]`, true],
    [' '.repeat(size), false],
    [`${' '.repeat(size)}1${'\n'.repeat(size)}`, true],
    [`[${' '.repeat(size)}x`, false],
    [`{${Array.from({ length: 60_000 }, (_, i) => `"${i}":${i}`).join(',')}}`, true],
    [`{${'"a":1,'.repeat(size / 6)}"a":1}`, false],
    [`{${Array.from({ length: 60_000 }, (_, i) => `"${(i * 7919) % 60_013}":${i}`).join(',')}}`, true],
    [`{${Array.from({ length: 60_000 }, (_, i) => `"${(i * 7919) % 59_999}":${i}`).join(',')}}`, false],
    [`[${'{"b":[1,{"d":1,"c":[]}],"a":{}},'.repeat(size / 32)}1]`, true],
    [`${'{"b":'.repeat(99)}"${'x'.repeat(size)}"${',"a":1}'.repeat(99)}`, true],
  ]
  for (const [text, has] of rows) t.equal(form(text) !== null, has, `${text.slice(0, 12)}… of ${text.length}`)
})

t.test('pointers are split as RFC 6901 says', async (t) => {
  t.same(pointerTokens(''), [])
  t.same(pointerTokens('/'), [''])
  t.same(pointerTokens('/a/0/'), ['a', '0', ''])
  t.same(pointerTokens('/a~1b/m~0n/~01'), ['a/b', 'm~n', '~1'])
})

function valueAt(text: string, pointer: string): string | null {
  const places = placesOf([pointer])
  return canonicalValues(Buffer.from(text), places)?.get(nodeAt(places, pointer))?.toString() ?? null
}

t.test('a pointer finds its value or nothing', async (t) => {
  const text = '{"a":{"b":[10,{"c":null}]},"":1,"a/b":2,"m~n":3}'
  const value = (pointer: string): string | null => valueAt(text, pointer)
  t.equal(value('/a/b/0'), '10')
  t.equal(value('/a/b/1/c'), 'null')
  t.equal(value('/'), '1')
  t.equal(value('/a~1b'), '2')
  t.equal(value('/m~0n'), '3')
  t.equal(value(''), form(text))
  t.equal(valueAt('{"\\u00e9\\u20ac":1}', '/é€'), '1', 'by a name with escapes')
  t.equal(valueAt('{"y\\"z":1}', '/y"z'), '1', 'by a name with a quote')
  t.equal(valueAt('{"b":1', '/b'), null)
  for (const pointer of [
    '/x',
    '/a/x',
    '/a/b/2',
    '/a/b/-',
    '/a/b/00',
    '/a/b/01',
    '/a/b/+1',
    '/a/b/1e0',
    '/a/b/0/0',
    '/a/b/9007199254740993',
    '/x/y/z',
  ])
    t.equal(value(pointer), null, pointer)
})

t.test('pointers may lead to a value and to what is in it', async (t) => {
  const values = (text: string, pointers: readonly string[]): (string | undefined)[] => {
    const places = placesOf(pointers)
    const found = canonicalValues(Buffer.from(text), places)
    return pointers.map((pointer) => found?.get(nodeAt(places, pointer))?.toString())
  }
  const inner = '{"b":[1,{"c":2}],"d":3}'
  t.same(values(`{"z":0,"a":${inner}}`, ['', '/a', '/a/b', '/a/b/1', '/a/b/1/c', '/z']), [
    `{"a":${inner},"z":0}`,
    inner,
    '[1,{"c":2}]',
    '{"c":2}',
    '2',
    '0',
  ])
  t.same(values('[1,[2,3],4]', ['', '/0', '/1', '/1/1', '/2']), ['[1,[2,3],4]', '1', '[2,3]', '3', '4'])
})

t.test('the value at an ignored pointer is left out and nothing else changes', async (t) => {
  const left = (text: string, pointer: string): string =>
    String(canonicalJson(Buffer.from(text), placesOf([pointer])))
  t.equal(left('{"a":1,"b":2}', '/a'), '{"b":2}')
  t.equal(left('{"a":{"b":1,"c":2}}', '/a/b'), '{"a":{"c":2}}')
  t.equal(left('[{"id":1,"t":2},3]', '/0/t'), '[{"id":1},3]')
  for (const pointer of ['/x', '/a/x', '/a/b/c', '/c/9', '/c/-', '/c/9/x'])
    t.equal(left('{"a":{"b":1},"c":[1]}', pointer), '{"a":{"b":1},"c":[1]}', pointer)
  t.equal(left('[1,2,3]', '/1'), left('[1,{"x":9},3]', '/1'), 'whatever was there')
  t.not(left('[1,2,3]', '/1'), left('[1,3]', '/1'), 'the neighbours keep their places')
  t.not(left('[1,2]', '/1'), '[1,""]')
  t.equal(left('{"a":1}', '/a'), '{}')
  t.equal(left('{"a":1}', ''), '{"a":1}', 'the whole document is never left out')
  t.equal(left('{"a":1,"a":2}', '/a'), 'null', 'a duplicate member has no form even at an ignored pointer')
})

/** JSON that keeps its information: no -0 beside 0, no lone surrogates. */
const json = fc.jsonValue({ maxDepth: 5, stringUnit: 'binary' })

/** Another spelling of the same value. */
function respell(value: unknown, dice: () => number): string {
  const gap = (): string => ' \t\r\n'.slice(0, dice() % 3)
  if (typeof value === 'string') {
    const units = value.split('').map((unit) => {
      const plain = JSON.stringify(unit).slice(1, -1)
      return dice() % 2 === 0 && !/[\ud800-\udfff]/.test(unit)
        ? plain
        : `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`
    })
    return `${gap()}"${units.join('')}"${gap()}`
  }
  if (typeof value === 'number') {
    const spellings = [
      JSON.stringify(value),
      value.toExponential(),
      value
        .toExponential()
        .replace('e', '0E')
        .replace(/^(-?\d)0E/, '$1.0E'),
    ]
    return gap() + (spellings[dice() % 3] as string) + gap()
  }
  if (Array.isArray(value))
    return `${gap()}[${value.map((item) => respell(item, dice)).join(',') || gap()}]${gap()}`
  if (typeof value === 'object' && value !== null) {
    const members = Object.entries(value).map(
      ([name, item]) => `${respell(name, dice)}:${respell(item, dice)}`,
    )
    const turn = members.length === 0 ? 0 : dice() % members.length
    return `${gap()}{${[...members.slice(turn), ...members.slice(0, turn)].join(',') || gap()}}${gap()}`
  }
  return gap() + JSON.stringify(value) + gap()
}

t.test('any well-formed JSON has the form that the canonicalize package gives it', async () => {
  fc.assert(
    fc.property(json, (value) => {
      const text = JSON.stringify(value)
      return form(text) === (canonicalize(JSON.parse(text)) as string)
    }),
    { numRuns: 1000 },
  )
})

t.test('F03 order, white space, escapes and the spelling of numbers do not change the form', async () => {
  fc.assert(
    fc.property(json, fc.infiniteStream(fc.nat(1000)), (value, stream) => {
      const again = JSON.parse(JSON.stringify(value)) as unknown
      return form(respell(again, () => stream.next().value as number)) === canonicalize(again)
    }),
    { numRuns: 1000 },
  )
})

t.test('a form is its own form, and different values have different forms', async () => {
  fc.assert(
    fc.property(json, json, (a, b) => {
      const [one, two] = [form(JSON.stringify(a)), form(JSON.stringify(b))] as [string, string]
      const equal =
        canonicalize(JSON.parse(JSON.stringify(a))) === canonicalize(JSON.parse(JSON.stringify(b)))
      return form(one) === one && (one === two) === equal
    }),
    { numRuns: 1000 },
  )
})

t.test('whole numbers have a form exactly when no digit is lost', async () => {
  fc.assert(
    fc.property(fc.bigInt({ min: -(10n ** 30n), max: 10n ** 30n }), (whole) => {
      const printed = String(Number(whole))
      const exact = BigInt(
        Number(printed).toLocaleString('en', { useGrouping: false, maximumFractionDigits: 0 }),
      )
      return (form(String(whole)) !== null) === (exact === whole)
    }),
    { numRuns: 1000 },
  )
})

t.test('the parser never throws and accepts no more than JSON.parse', async () => {
  const soup = fc
    .array(
      fc.constantFrom(
        '{',
        '}',
        '[',
        ']',
        ':',
        ',',
        '"',
        '\\',
        'a',
        '1',
        '-',
        '.',
        'e',
        '0',
        'true',
        'null',
        ' ',
        '"a"',
        '\\u00',
      ),
      { maxLength: 12 },
    )
    .map((parts) => parts.join(''))
  fc.assert(
    fc.property(
      fc.oneof(soup, fc.string({ unit: 'binary' })),
      (text) => canonicalJson(Buffer.from(text)) === null || isJson(text.toWellFormed()),
    ),
    { numRuns: 3000 },
  )
})

void t.test('objects with few and with many members are sorted, and duplicates have no form', async (t) => {
  for (const count of [2, 23, 31, 32, 33, 34, 300, 1000]) {
    // Names are compared four bytes at a time; a common beginning makes those bytes equal in all of them.
    const beginning = 'alike'.repeat(count % 3)
    const names = Array.from({ length: count }, (_, n) => `${beginning}${(n * 7919) % 1009}-\u00e9`)
    const members = names.map((name, n) => `"${name}":${n}`)
    const ordered = [...members].sort((a, b) => (a.split(':')[0]! < b.split(':')[0]! ? -1 : 1))
    t.equal(form(`{${members.join(' , ')}}`), `{${ordered.join(',')}}`, `${count} members`)
    t.equal(form(`{${[...members, members[0]].join(',')}}`), null, `${count} members, the first twice`)
    t.equal(form(`{${[members[1], ...members].join(',')}}`), null, `${count} members, the second twice`)
  }
})

void t.test('objects with enough members to be sorted in steps are sorted', async (t) => {
  for (const count of [4097, 8191, 8192, 8193, 20_000]) {
    const members = Array.from({ length: count }, (_, n) => `"${(n * 7919) % 20_011}":[${n},{"b":1,"a":2}]`)
    const name = (member: string): string => member.split(':')[0] as string
    const ordered = members
      .toSorted((a, b) => (name(a) < name(b) ? -1 : 1))
      .map((member) => member.replace('"b":1,"a":2', '"a":2,"b":1'))
    t.equal(form(`{${members.join()}}`), `{${ordered.join()}}`, `${count} members`)
    t.equal(form(`{${members.join(' ,')} }`), `{${ordered.join()}}`, `${count} members, with white space`)
    // Also with an ignored member as the last one.
    t.equal(
      String(canonicalJson(Buffer.from(`{${members.join()},"last":1}`), placesOf(['/last']))),
      `{${ordered.join()}}`,
      `${count} members and an ignored one`,
    )
  }
})

void t.test('a bug throws instead of passing for JSON that cannot be compared', async (t) => {
  const broken = placesOf(['/a'])
  broken.members.get = () => {
    throw new Error('a bug')
  }
  t.throws(() => canonicalJson(Buffer.from('{"a":1}'), broken), { message: 'a bug' })
  t.equal(String(canonicalJson(Buffer.from('{"a":1}'))), '{"a":1}', 'the next reading is not disturbed')
})
