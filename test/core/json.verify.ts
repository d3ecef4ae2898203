/** At length and with hostile bodies: the product's reader against the tree reader; bodies of all kinds: the fuzz target `json`. */
import t from 'tap'
import { LARGE } from '../../bench/bodies.ts'
import { words } from './fixtures.ts'
import { form } from './json-tree.ts'

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
    [LARGE, true],
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
