/** At length and with hostile bodies: the product's reader against the tree reader. */
import fc from 'fast-check'
import t from 'tap'
import { LARGE } from '../../bench/bodies.ts'
import { canonicalJson, canonicalValues } from '../../src/core/body/json.ts'
import { nodeAt, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'
import { words } from './fixtures.ts'
import { at, canonical, form, type Node, treeOf, without } from './json-tree.ts'

/** Characters and escapes of all kinds: RFC 8785 keeps some escapes and sorts by UTF-16, where UTF-8 sorts differently. */
const PIECES = words`a b 0 ~ é € 😀 \n \" \\ \/ \u0041 \u00e9 \u000a \u001f \u001F \u0000 \u007f \u20AC \ud83d\uDE00`
const string = fc
  .array(fc.constantFrom(...PIECES, '\uffff', '\ue000', '\u007f', ' '), { maxLength: 5 })
  .map((pieces) => `"${pieces.join('')}"`)
const badString = fc.constantFrom(...words`"\ud800" "\udc00" "\ud800\u0041" "\ud800x" "\x" "\u12" "\u00é0"`)

const digits = (most: number) =>
  fc
    .array(fc.constantFrom(...words`0 0 0 1 2 3 4 5 6 7 8 9 9`), { minLength: 1, maxLength: most })
    .map((all) => all.join(''))
const number = fc.oneof(
  fc.double({ noNaN: true, noDefaultInfinity: true }).map(String),
  fc.constantFrom(
    ...words`0 -0 0.0 -0.00 0e9 1e0 1E5 1e20 1e21 1e-6 1e-7 5e-324 4e-324 1e-308 1e308 1e309 01 1. .5 - 1e 1e+`,
  ),
  fc
    .tuple(
      fc.constantFrom('', '-'),
      fc.oneof(
        fc.constant('0'),
        digits(22).map((rest) => `7${rest}`),
      ),
      fc.oneof(
        fc.constant(''),
        digits(22).map((rest) => `.${rest}`),
      ),
      fc.oneof(
        fc.constant(''),
        fc.tuple(fc.constantFrom('e', 'E', 'e+', 'e-', 'E-'), digits(3)).map((power) => power.join('')),
      ),
    )
    .map((parts) => parts.join('')),
)

const gap = fc.constantFrom('', '', '', ' ', '\n\t', '\r')
const { text } = fc.letrec<{ text: string; array: string; object: string }>((tie) => ({
  text: fc.oneof(
    { depthSize: 'small', withCrossShrink: true },
    { arbitrary: number, weight: 3 },
    { arbitrary: string, weight: 3 },
    { arbitrary: badString, weight: 1 },
    { arbitrary: fc.constantFrom('true', 'false', 'null', 'tru'), weight: 1 },
    { arbitrary: tie('array'), weight: 4 },
    { arbitrary: tie('object'), weight: 6 },
  ),
  array: fc
    .array(fc.tuple(gap, tie('text'), gap), { maxLength: 4 })
    .map((items) => `[${items.map((item) => item.join('')).join(',')}]`),
  object: fc
    .tuple(
      gap,
      fc.uniqueArray(fc.tuple(string, gap, gap, tie('text'), gap), {
        maxLength: 6,
        selector: ([name]) => name,
      }),
    )
    .map(
      ([before, members]) =>
        `{${before}${members.map(([name, a, b, value, c]) => `${name}${a}:${b}${value}${c}`).join(`,${before}`)}}`,
    ),
}))

/** Some of them with one byte changed or missing. */
const body = fc
  .tuple(text, fc.option(fc.tuple(fc.nat(), fc.integer({ min: -1, max: 255 })), { freq: 4 }))
  .map(([json, change]) => {
    const bytes = Buffer.from(json)
    if (change === null) return bytes
    const place = change[0] % bytes.length
    if (change[1] < 0) return Buffer.concat([bytes.subarray(0, place), bytes.subarray(place + 1)])
    bytes[place] = change[1]
    return bytes
  })

const pointers = fc.array(
  fc
    .array(fc.constantFrom('a', 'b', '0', '1', '2', '', 'é', '😀', '\n', 'A', '01', '-', '~0'), {
      maxLength: 3,
    })
    .map((tokens) => tokens.map((token) => `/${token}`).join('')),
  { minLength: 1, maxLength: 4 },
)

const said = (bytes: Buffer | null | undefined): string | null => bytes?.toString() ?? null
const textOf = (node: Node | null): string | null => (node === null ? null : canonical(node))

/** Whether both readers find the same text, and the same values at these places and without them. */
function isAlike(bytes: Buffer, named: readonly string[]): boolean {
  form(bytes)
  const places = placesOf(named)
  const tree = treeOf(bytes)
  const rest = tree && named.reduce((node, pointer) => without(node, pointerTokens(pointer)), tree)
  const values = canonicalValues(bytes, places)
  return (
    said(canonicalJson(bytes, places)) === textOf(rest) &&
    (values === null) === (tree === null) &&
    named.every(
      (pointer) =>
        said(values?.get(nodeAt(places, pointer))) === textOf(tree && at(tree, pointerTokens(pointer))),
    )
  )
}

/** Names about as long as a machine word, some of them prefixes of others. */
const member = fc.constantFrom('', ...words`a b ab abc abd abcd abcde é 😀 x: y"z`, '\n:')
const alike = fc
  .tuple(
    fc.uniqueArray(member, { maxLength: 6 }),
    fc.array(
      fc.tuple(
        fc.constantFrom('same', 'same', 'same', 'swapped', 'more', 'fewer', 'other', 'twice', 'late colon'),
        fc.nat(20),
        fc.constantFrom(
          ...words`1 "s" [] {"ab":1,"a":2} [{"b":1,"a":{"d":0,"c":1}},{"b":1,"a":{"d":0,"e":1}}]`,
        ),
      ),
      { minLength: 2, maxLength: 8 },
    ),
    fc.boolean(),
  )
  .map(([usual, items, isEscaped]) => {
    const objects = items.map(([how, n, value]) => {
      const own: string[] = [...usual]
      const place = n % (own.length + 1)
      if (how === 'swapped') own.push(...own.splice(place, 1))
      if (how === 'more') own.splice(place, 0, `more ${n}`)
      if (how === 'fewer') own.length = Math.min(own.length, place)
      if (how === 'other') own[place] = 'other'
      if (how === 'twice') own.push(own[place] ?? 'a')
      const colon = how === 'late colon' ? ' : ' : ':'
      const spell = (name: string): string =>
        JSON.stringify(name).replace('a', isEscaped && n % 3 === 0 ? '\\u0061' : 'a')
      return `{${own.map((name, m) => `${spell(name)}${colon}${(n + m) % 4 === 0 ? value : m}`).join(',')}}`
    })
    return Buffer.from(`[${objects.join(',')}]`)
  })

/** Items of more than one step. */
const long = fc.tuple(text, gap).map(([json, blank]) => {
  const items = Math.ceil(70_000 / (json.length + blank.length + 1))
  return Buffer.from(
    `[${Array(items)
      .fill(json + blank)
      .join()}]`,
  )
})

/** Names with a common beginning, prefixes of others, and names that UTF-8 and UTF-16 sort differently. */
const many = fc
  .tuple(
    fc.uniqueArray(
      fc
        .tuple(
          fc.constantFrom('', 'same beginning '),
          fc.array(fc.constantFrom('a', 'b', 'é', '😀', '\uffff', '\0')),
        )
        .map(([beginning, rest]) => beginning + rest.join('')),
      { maxLength: 200 },
    ),
    fc.boolean(),
  )
  .map(([names, isTwice]) => {
    const members = names.map((name, n) => `${JSON.stringify(name)}:${n}`)
    if (isTwice && members[0] !== undefined) members.push(members[0])
    return Buffer.from(`{${members.join(',')}}`)
  })

for (const [what, bodies, numRuns] of [
  ['any bodies, some of them damaged', body, 1500],
  ['objects that begin like the one before them', alike, 1500],
  ['objects with many members', many, 300],
  ['bodies that are read in several steps', long, 30],
] as const)
  void t.test(`both readers find the same in ${what}`, async () => {
    fc.assert(fc.property(bodies, pointers, isAlike), { numRuns, seed: 19 })
  })

void t.test('both readers find the same in a usual body with some bytes changed', async () => {
  const bytes = Buffer.from(
    JSON.stringify(JSON.parse(LARGE.slice(0, 4096).replace(/,\{[^}]*$/, '],"note":""}'))),
  )
  const change = fc.tuple(
    fc.nat(bytes.length - 1),
    fc.constantFrom(...words`" \ { } [ ] , : 0 . 5 e E - t a`, ' ', '\n', '\0', '\x1f'),
    fc.boolean(),
  )
  fc.assert(
    fc.property(fc.array(change, { minLength: 1, maxLength: 4 }), (changes) => {
      let body = bytes
      for (const [at, character, isMore] of changes)
        body = Buffer.concat([
          body.subarray(0, at),
          Buffer.from(character),
          body.subarray(at + (isMore ? 0 : 1)),
        ])
      form(body)
    }),
    { numRuns: 1000, seed: 98 },
  )
  form(LARGE)
})

void t.test('any character at any place is read as the tree reader does', async () => {
  const beginnings = words`| 0 1 -1 1. 1.5 0.5 0.05 1e 1e+ 1e5 1.5e-5 - [ [1 [1, ["a" { {"a" {"a": {"a":1 {"a":1, t tr tru true n nul fal fals
    " "a "\ "\u "\u0 "\u00 "\u000 "\u001 "\u006 "\u0041 "\ud83 "\ud83d "\ud83d\ "\ud83d\u "\ud83d\ud "\ud83d\ude0
    {"\ {"\u006 {"a\u0022 [{"a":1},{"a`
  const characters = '\0\t\n\r\x1f !"#+,-./0189:;@AEFG[\\]^_`abefgnrstuz{|}\x7f'
  for (const beginning of beginnings)
    for (const character of characters.split(''))
      for (const end of ['', ...words`" 0" ] 1] "] :1} ":1}`])
        form(beginning.replace('|', '') + character + end)
})

t.test('F04 a number has one form, however long, large and spelled it is', async () => {
  const digits = words`1 9 12 49 1234567 123456789012345 1234567890123456 12345678901234567
    123456789012345678 9007199254740991 9007199254740993 17976931348623157`
  const near = (limit: number): number[] => [-3, -2, -1, 0, 1, 2, 3].map((n) => limit + n)
  const powers = [-340, -324, -308, -22, -6, 0, 8, 15, 21, 100, 293, 308].flatMap(near)
  for (const all of digits) {
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
})

void t.test('hostile texts of 1 MiB are read correctly', async (t) => {
  const size = 1024 * 1024
  const numbered = (by: number, modulus: number) =>
    `{${Array.from({ length: 60_000 }, (_, i) => `"${(i * by) % modulus}":${i}`).join(',')}}`
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
    [`{${'"a":1,'.repeat(size / 6)}"a":1}`, false],
    [numbered(1, 60_000), true],
    [numbered(7919, 60_013), true],
    [numbered(7919, 59_999), false],
    [`[${'{"b":[1,{"d":1,"c":[]}],"a":{}},'.repeat(size / 32)}1]`, true],
    [`${'{"b":'.repeat(99)}"${'x'.repeat(size)}"${',"a":1}'.repeat(99)}`, true],
    [`{"b": "${'x'.repeat(9 * size)}","a":1}`, true],
  ]
  for (const [text, has] of rows) t.equal(form(text) !== null, has, `${text.slice(0, 12)}… of ${text.length}`)
})
