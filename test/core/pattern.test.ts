import fc from 'fast-check'
import t from 'tap'
import { type KeyPattern, readPattern } from '../../src/core/key-pattern.ts'

function pattern(text: string): KeyPattern {
  const reading = readPattern(text)
  if (reading.kind === 'refused') throw new Error(`${text}: ${reading.why}`)
  return reading.pattern
}
function whyNot(text: string): string | null {
  const reading = readPattern(text)
  return reading.kind === 'refused' ? reading.why : null
}
/** What V8's own engine says. */
function expected(text: string, key: string): boolean {
  return new RegExp(`^(?:${text})$`, 'u').test(key)
}

const UUID = '[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}'

t.test('K20 patterns that people write match as they do in V8', async (t) => {
  const keys = [
    '8e03978e-40d5-4d53-8bc5-4e4ef1c0a1b2',
    '8E03978E-40D5-4D53-8BC5-4E4EF1C0A1B2',
    '8e03978e-40d5-4d53-8bc5-4e4ef1c0a1b',
    'order-1',
    'order-12-3',
    'order_1',
    'a',
    'ab',
    'aab',
    'a b',
    'x^y$z',
    '',
    'A'.repeat(64),
    'a.b/c\\d]e',
  ]
  for (const text of [
    UUID,
    `(?:${UUID})`,
    'order-[0-9]+(?:-[0-9]+)?',
    '([a-z0-9]+-?)+',
    '[\\w.\\-/]{1,64}',
    '[A-Z]{64,}',
    'a|ab|aab',
    '(?<first>a+)(b?)',
    '^order-\\d$|^a$',
    '.*',
    '.+?',
    'a{0}b{2}|',
    '\\x61\\u0062|\\u{61}',
    '[^a-z]+',
    '[^\\]]*\\]e',
    'x\\^y\\$z',
    '\\p{Lu}+|\\P{Lu}+',
    '(?:a|b)*(?:){3}',
    '(?:^a)b$',
    'a$b|a^b',
    '(^|a)+b',
    '\\cM|\\0|\\t|a',
    '(?:\\ud83d\\ude00)?a|😀*ab',
    '[\\[(|){*]*a',
  ])
    for (const key of keys) t.equal(pattern(text).test(key), expected(text, key), `${text} on ${key}`)
})

t.test('the source is an ECMAScript regular expression with its anchors', async (t) => {
  t.equal(pattern('a|b').source, '^(?:a|b)$')
})

t.test('a pattern that backtracks forever in V8 is answered at once', async (t) => {
  // On V8's engine each of these takes longer than anybody waits.
  for (const text of ['([a-z0-9]+-?)+', '(a|aa)+', '(a*)*b', '(?:a?){40}a{40}', '(.*a){12}'])
    t.type(pattern(text).test(`${'a'.repeat(254)}!`), 'boolean', text)
  t.notOk(pattern('([a-z0-9]+-?)+').test(`${'a'.repeat(40)}!`))
  t.ok(pattern('([a-z0-9]+-?)+').test('a'.repeat(40)))
  t.ok(pattern('[a-z]{1,1000}').test('a'.repeat(1000)))
  t.notOk(pattern('[a-z]{1,1000}').test('a'.repeat(1001)))
})

t.test('a pattern may have 4000 characters to match', async (t) => {
  t.ok(pattern('a{4000}').test('a'.repeat(4000)))
})

t.test('a pattern matches printable ASCII only, the characters of keys', async (t) => {
  t.match(readPattern('.'), { kind: 'pattern' })
  for (let code = 0; code < 0x100; code++)
    t.equal(pattern('.|\\s').test(String.fromCharCode(code)), code >= 0x20 && code <= 0x7e, `${code}`)
})

t.test('a construct that cannot be matched in linear time is refused by name', async (t) => {
  for (const [text, why] of [
    ['(?=.*\\d)[a-z0-9]+', 'the lookaround (?='],
    ['(?!x)[a-z]+', 'the lookaround (?!'],
    ['a(?<=a)b', 'the lookaround (?<='],
    ['a(?<!b)b', 'the lookaround (?<!'],
    ['(a)\\1', 'the backreference \\1'],
    ['(?<x>a)\\k<x>', 'the backreference \\k'],
    ['\\ba', 'the word boundary \\b'],
    ['a\\B', 'the word boundary \\B'],
    ['(?i:a)', 'the modifier (?i:'],
    ['(?s-i:a)', 'the modifier (?s-i:'],
    ['(?i:a:b)', 'the modifier (?i:'],
    [`${'('.repeat(3000)}a${')'.repeat(3000)}`, 'groups more than 100 deep'],
    ['[a-z]{5000}', 'a pattern of that size'],
    ['(?:[a-z]{1,100}){1,100}', 'a pattern of that size'],
    ['(((a{1000}){1000}){1000}){1000}', 'a pattern of that size'],
    ['(?:){1000000000}', 'a pattern of that size'],
    ['[a-z', 'Unterminated character class'],
    ['a{2,1}', 'numbers out of order in {} quantifier'],
    ['\\', '\\ at end of pattern'],
    ['\\1', 'Invalid escape'],
  ] as const)
    t.equal(whyNot(text), why, text)
})

t.test('groups may nest a hundred deep, any number of times', async (t) => {
  const deep = `${'('.repeat(100)}a${')'.repeat(100)}`
  t.ok(pattern(`${deep}${deep}`).test('aa'))
})

t.test('a bug throws instead of becoming a refusal', async (t) => {
  t.throws(() => readPattern(Symbol('a') as unknown as string), TypeError)
})

t.test('any pattern matches what V8 matches', async () => {
  const atom = fc.constantFrom('a', 'b', 'c', '[ab]', '[^a]', '.', '\\w', '^', '$', '\\x62')
  const quantifier = fc.constantFrom('', '', '*', '+', '?', '{2}', '{0,2}', '{1,}', '*?', '{0}')
  const { tree } = fc.letrec<{ tree: string }>((tie) => ({
    tree: fc.oneof(
      { maxDepth: 4, withCrossShrink: true },
      atom,
      fc
        .tuple(fc.constantFrom('(', '(?:'), tie('tree'), quantifier)
        .map(([open, inner, sign]) => `${open}${inner})${sign}`),
      fc.tuple(tie('tree'), tie('tree')).map(([a, b]) => `${a}${b}`),
      fc.tuple(tie('tree'), tie('tree')).map(([a, b]) => `${a}|${b}`),
    ),
  }))
  const key = fc.array(fc.constantFrom('a', 'b', 'c'), { maxLength: 7 }).map((chars) => chars.join(''))
  fc.assert(
    fc.property(tree, fc.array(key, { minLength: 4, maxLength: 8 }), (text, keys) => {
      const own = pattern(text)
      return keys.every((one) => own.test(one) === expected(text, one))
    }),
    { numRuns: 3000 },
  )
})
