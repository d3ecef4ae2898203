import fc from 'fast-check'
import t from 'tap'
import { canonicalJson, canonicalValues } from '../../src/core/body/json.ts'
import { nodeAt, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'
import { UsualJson } from '../../src/core/fingerprint.ts'
import { at, canonical, decodeUtf8, type Node, parseLossless, without } from './json-tree.ts'

/** Characters and escapes of all kinds: RFC 8785 keeps some escapes and sorts by UTF-16, where UTF-8 sorts differently. */
const PIECES = String.raw`a b 0 ~ é € 😀 \n \" \\ \/ \u0041 \u00e9 \u000a \u001f \u001F \u0000 \u007f \u20AC \ud83d\uDE00`
const string = fc
  .array(fc.constantFrom(...PIECES.split(' '), '\uffff', '\ue000', '\u007f', ' '), { maxLength: 5 })
  .map((pieces) => `"${pieces.join('')}"`)
const badString = fc.constantFrom(
  ...String.raw`"\ud800" "\udc00" "\ud800\u0041" "\ud800x" "\x" "\u12" "\u00é0"`.split(' '),
)

const digits = (most: number) =>
  fc.array(fc.constantFrom(...'0 0 0 1 2 3 4 5 6 7 8 9 9'.split(' ')), { minLength: 1, maxLength: most })
const number = fc.oneof(
  fc.double({ noNaN: true, noDefaultInfinity: true }).map(String),
  fc.constantFrom(
    ...'0 -0 0.0 -0.00 0e9 1e0 1E5 1e20 1e21 1e-6 1e-7 5e-324 4e-324 1e-308 1e308 1e309 01 1. .5 - 1e 1e+'.split(
      ' ',
    ),
  ),
  fc
    .tuple(
      fc.constantFrom('', '-'),
      fc.oneof(
        fc.constant(['0']),
        digits(22).map((rest) => ['7', ...rest]),
      ),
      fc.option(digits(22)),
      fc.option(fc.tuple(fc.constantFrom('e', 'E', 'e+', 'e-', 'E-'), digits(3))),
    )
    .map(
      ([sign, whole, fraction, power]) =>
        `${sign}${whole.join('')}${fraction === null ? '' : `.${fraction.join('')}`}${power === null ? '' : power[0] + power[1].join('')}`,
    ),
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

function treeOf(bytes: Buffer): Node | null {
  const json = decodeUtf8(bytes)
  return json === null ? null : parseLossless(json)
}

function textOf(node: Node | null): string | null {
  return node === null ? null : canonical(node)
}

const said = (bytes: Buffer | null | undefined): string | null => bytes?.toString() ?? null

const usual = UsualJson.load()
/** Whether the WebAssembly reader gives `text` too, unless it declines the body. */
function agrees(bytes: Buffer, text: string | null): boolean {
  const found = said(usual?.textOf(bytes))
  return found === null || found === text
}

const runs = { numRuns: 3000, seed: 19 }

t.test('the byte reader gives the same canonical text as the tree reader', async () => {
  fc.assert(
    fc.property(body, (bytes) => {
      const text = textOf(treeOf(bytes))
      return said(canonicalJson(bytes)) === text && agrees(bytes, text)
    }),
    runs,
  )
})

t.test('a body read in several steps gives the same canonical text as the tree reader', async () => {
  fc.assert(
    fc.property(text, gap, pointers, (json, blank, named) => {
      const items = Math.ceil(70_000 / (json.length + blank.length + 1))
      const bytes = Buffer.from(
        `[${Array(items)
          .fill(json + blank)
          .join()}]`,
      )
      const places = placesOf(named)
      const tree = treeOf(bytes)
      const rest = tree && named.reduce((node, pointer) => without(node, pointerTokens(pointer)), tree)
      return (
        said(canonicalJson(bytes)) === textOf(tree) && said(canonicalJson(bytes, places)) === textOf(rest)
      )
    }),
    { numRuns: 100, seed: 19 },
  )
})

t.test('ignored places and selected values are those of the tree reader', async () => {
  fc.assert(
    fc.property(body, pointers, (bytes, named) => {
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
    }),
    runs,
  )
})

/** Names with a common beginning, prefixes of others, and names that UTF-8 and UTF-16 sort differently. */
const names = fc.uniqueArray(
  fc
    .tuple(
      fc.constantFrom('', 'same beginning '),
      fc.array(fc.constantFrom('a', 'b', 'é', '😀', '\uffff', '\0')),
    )
    .map(([beginning, rest]) => beginning + rest.join('')),
  { maxLength: 200 },
)

t.test('many members are sorted as the tree reader sorts them', async () => {
  fc.assert(
    fc.property(names, fc.boolean(), (many, isTwice) => {
      const members = many.map((name, n) => `${JSON.stringify(name)}:${n}`)
      if (isTwice && members[0] !== undefined) members.push(members[0])
      const bytes = Buffer.from(`{${members.join(',')}}`)
      const text = textOf(treeOf(bytes))
      return said(canonicalJson(bytes)) === text && agrees(bytes, text)
    }),
    { numRuns: 1000, seed: 19 },
  )
})

/** Names about as long as a machine word, some of them prefixes of others. */
const member = fc.constantFrom(
  '',
  'a',
  'b',
  'ab',
  'abc',
  'abd',
  'abcd',
  'abcde',
  'é',
  '😀',
  'x:',
  'y"z',
  '\n:',
)
const list = fc
  .tuple(
    fc.uniqueArray(member, { maxLength: 6 }),
    fc.array(
      fc.tuple(
        fc.constantFrom('same', 'same', 'same', 'swapped', 'more', 'fewer', 'other', 'twice', 'late colon'),
        fc.nat(20),
        fc.constantFrom(
          '1',
          '"s"',
          '[]',
          '{"ab":1,"a":2}',
          '[{"b":1,"a":{"d":0,"c":1}},{"b":1,"a":{"d":0,"e":1}}]',
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

t.test('objects that begin like the one before them are read correctly', async () => {
  fc.assert(
    fc.property(list, pointers, (bytes, named) => {
      const places = placesOf(named)
      const tree = treeOf(bytes)
      const rest = tree && named.reduce((node, pointer) => without(node, pointerTokens(pointer)), tree)
      return (
        said(canonicalJson(bytes)) === textOf(tree) &&
        said(canonicalJson(bytes, places)) === textOf(rest) &&
        agrees(bytes, textOf(tree))
      )
    }),
    runs,
  )
  const wide = (count: number, last: string): string =>
    `{${Array.from({ length: count }, (_, n) => `"${(n * 7) % count}n":${n}`).join()},"${last}":0}`
  for (const count of [30, 31, 32, 100]) {
    const bytes = Buffer.from(`[${[wide(count, 'z'), wide(count, 'z'), wide(count, '3')].join()}]`)
    t.equal(said(canonicalJson(bytes)), textOf(treeOf(bytes)), `${count} members`)
    t.ok(agrees(bytes, textOf(treeOf(bytes))), `${count} members`)
  }
})

t.test('nothing of one body is remembered in the next', async () => {
  const first = Buffer.from('[{"b":1,"a":2},{"b":1,"a":2}]')
  const second = Buffer.from('[{"a":1,"b":2},{"b":1,"a":2}]')
  for (const bytes of [first, second, first, second])
    t.equal(said(canonicalJson(bytes)), textOf(treeOf(bytes)))
  for (const bytes of [first, second, first, second])
    t.equal(said(usual?.textOf(bytes)), textOf(treeOf(bytes)))
  // An earlier name, unescaped, and the bytes behind it must not make a name with a raw line feed valid.
  t.equal(canonicalJson(Buffer.from('[{"\\u000a:xyz":1},{"\n:xyz":1}]')), null)
})
