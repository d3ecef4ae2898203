/** The reader works in shared memory, with the names of the object before in mind: none of it may show. In steps: json.test.ts. */
import t from 'tap'
import { lines } from './fixtures.ts'
import { form } from './json-tree.ts'

void t.test('the first bodies of a process are read like all later ones', async (t) => {
  const alike = (start: number, name: string): string => `${' '.repeat(start)}[{"${name}":1}]`
  t.equal(form('1'), '1')
  // What is remembered of a body has its number, beside places and lengths of names: none of these may be taken for another.
  for (let body = 2; body < 40; body += 2)
    for (const name of ['bb', 'b']) t.not(form(alike(body - 2, name)), null)
  for (let body = 40; body < 80; body++) t.not(form(`[{"${'x'.repeat(body - 2)}":1},{"y":1}]`), null)
})

void t.test('an object that begins like the one before it may end earlier, or hold others', async (t) => {
  const wide = (count: number, prefix: string, last: string): string => {
    const members = Array.from({ length: count }, (_, n) => `"${prefix}${(n * 7) % count}":${n}`)
    return `{${members.join()},"${prefix}":${last}}`
  }
  for (const count of [5, 8, 9, 12, 17, 20, 30])
    for (const inner of [2, 5, 9, 10, 16, 20]) {
      const all = ['x', 'y', 'z'].map((prefix) => wide(count, 'n', wide(inner, prefix, '1')))
      t.not(form(`[${all.join()}]`), null)
      t.not(form(`{"l":[${all.join()}],"a":[${all[0]}]}`), null)
    }
})

void t.test('a name is not taken for one that it resembles in the object before', async (t) => {
  for (const text of lines`
    [{"abcd":1,"bbbb":2},{"dcba":1,"bbbb":2}]
    [{"a":1,"wxyz:1,":2,"wxyzA":3},{"a":1,"wxyzabc":2,"wxyzA":3}]
    [{"a":1234,"abcdefgh":1},{"a":1234,"abcdefghi":1}]
    [{"abcd":1},{"abcdXY:":1}]
    [{"abcd":1},{"abcd}1x":1}]
    [{"abcd":1},{"abcdAAx":1}]
    [ {"mya":1,"z":2},{"mya":1,"a":2}]
    [{":a":1},{":a":1}]
    [{"x:" :1},{"x:" :1}]
    {"l":[{"a":1,"c":2,"b":3},{"a":1},{"a":1,"c":2,"b":3}]}
    {"l":[{"l":1,"y":2,"z":3},{"l":1,"y":2}]}`)
    t.not(form(text), null, text)
  for (let length = 0; length < 9; length++)
    for (let code = 0; code < 128; code++) {
      const name = 'abcdefghi'.slice(0, length)
      const other = String.fromCharCode(code)
      for (const second of [
        `{"${name}"${other}1}`,
        `{"${name}${other}":1}`,
        `{"${name.slice(1)}${other}":1}`,
      ])
        form(`[{"${name}":1},${second}]`)
    }
})

void t.test('objects in objects are not taken for each other', async (t) => {
  // At each depth so many members before the object within, in order or not, and one after it that is called alike.
  const nested = (depth: number, counts: readonly number[], areOrdered: readonly boolean[]): string => {
    let text = '1'
    for (let n = depth; n > 0; n--) {
      const [before, name] = areOrdered[n % 3] ? ['b', 'e'] : ['r', 'z']
      const members = Array.from({ length: counts[n % 3] as number }, (_, m) => `"${before}${m}":1`)
      text = `{${[...members, `"${name}":${text}`, '"q":2'].join()}}`
    }
    return text
  }
  for (let each = 0; each < 4 ** 3; each++)
    for (let order = 0; order < 2 ** 3; order++)
      for (const depth of [3, 5, 9]) {
        const counts = [each % 4, Math.floor(each / 4) % 4, Math.floor(each / 16)]
        const text = nested(
          depth,
          counts,
          [1, 2, 4].map((bit) => (order & bit) !== 0),
        )
        t.not(form(`[${text},${text},${text}]`), null)
      }
})

void t.test('an object with many members does not disturb those beside it', async (t) => {
  for (const count of [31, 32, 33, 34, 36])
    for (let wide = 0; wide < 5; wide++)
      for (let small = 0; small < 5; small++) {
        const members = Array.from({ length: count }, (_, n) => `"${(n * 7) % count}n":${n}`)
        const values = Array.from({ length: 5 }, (_, n) => {
          if (n === wide) return `{${members.join()}}`
          return n === small ? '{"z":1,"b":2}' : '1'
        })
        const item = `{${values.map((value, n) => `"m${n}":${value}`).join()}}`
        t.not(form(`[${item},${item},${item}]`), null)
      }
})

void t.test('where in a body an object changes makes no difference', async () => {
  const item = '{"p":{"b":1.0,"a":{"c":1}}}'
  for (let length = 1000; length < 1250; length++)
    form(`{"fill":"${'x'.repeat(length)}","l":[${item},${item}]}`)
})

void t.test('a short body may have any number of members, and so may the next one', async (t) => {
  for (const count of [1023, 1024, 1025, 3000]) {
    const members = Array.from({ length: count }, (_, n) => `"${n}":${n}`)
    t.not(form(`{${members.join()}}`), null)
    t.not(form(`[{${members.join()}},{"b":1,"a":2}]`), null)
  }
})

void t.test('a text that outgrows its memory is right, wherever that happens', async () => {
  const name = `\\u0062${'x'.repeat(3000)}`
  // With each item, the text needs more of the room that a short body has.
  for (const count of [6900, 7000, 7050, 7100, 7150, 7200, 7250, 7300])
    for (const last of [
      `{"b":"${name}","a":2}`,
      `{"b":"${'x'.repeat(3000)}","a":2}`,
      `{"${name}":1,"a":2}`,
      `{"${name}":1,"${name}":2}`,
      `["\\n${name}"]`,
    ])
      form(`[${'1e20,'.repeat(count)}${last}]`)
})
