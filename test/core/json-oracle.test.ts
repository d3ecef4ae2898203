import fc from 'fast-check'
import t from 'tap'
import { decodeUtf8 } from '../../src/core/body/content.ts'
import { canonicalJson, canonicalValues } from '../../src/core/body/json.ts'
import { placeOf, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'
import { at, canonical, type Node, parseLossless, without } from './json-tree.ts'

/** Characters and escapes of all kinds: RFC 8785 keeps some escapes, and orders by UTF-16 what UTF-8 orders otherwise. */
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

/** Some of them with a byte that is another or missing. */
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
const runs = { numRuns: 3000, seed: 19 }

t.test('bytes are read as a tree of values was', async () => {
  fc.assert(
    fc.property(body, (bytes) => said(canonicalJson(bytes)) === textOf(treeOf(bytes))),
    runs,
  )
})

t.test('what is ignored and what alone counts is what it was', async () => {
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
            said(values?.get(placeOf(places, pointer))) === textOf(tree && at(tree, pointerTokens(pointer))),
        )
      )
    }),
    runs,
  )
})

/** Names that begin alike, that end where others go on, and that UTF-8 and UTF-16 order differently. */
const names = fc.uniqueArray(
  fc
    .tuple(
      fc.constantFrom('', 'same beginning '),
      fc.array(fc.constantFrom('a', 'b', 'é', '😀', '\uffff', '\0')),
    )
    .map(([beginning, rest]) => beginning + rest.join('')),
  { maxLength: 200 },
)

t.test('many members are put in order', async () => {
  fc.assert(
    fc.property(names, fc.boolean(), (many, isTwice) => {
      const members = many.map((name, n) => `${JSON.stringify(name)}:${n}`)
      if (isTwice && members[0] !== undefined) members.push(members[0])
      const bytes = Buffer.from(`{${members.join(',')}}`)
      return said(canonicalJson(bytes)) === textOf(treeOf(bytes))
    }),
    { numRuns: 1000, seed: 19 },
  )
})
