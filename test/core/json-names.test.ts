import t from 'tap'
import { isBefore, Order } from '../../src/core/body/json-names.ts'
import { Lossy, QUOTE_WITHIN } from '../../src/core/body/json-scalars.ts'

/** In the order of RFC 8785: by UTF-16 units. The longer ones differ after their first word, or after several. */
const NAMES = [
  ['', '\0', '\x1f', ' ', '!', '#', '~', '\x7f', '\x80', '\u07ff', '\u0800', '\ud7ff', '\u{10000}'],
  ['\u{10ffff}', '\ue000', '\uefff', '\uf000', '\uffff', 'a', 'aa', 'aaa', 'aaaa', 'aaaaa', 'aaab'],
  ['aab', 'abcd', 'abcdefgh0', 'abcdefgh1', 'abcdefgh\u{10000}', 'abcdefgh\uffff', 'b', 'a"', 'a"b'],
  ['a\0', 'a\0b', 'a!', 'a#', '"', '""'],
].flat()
/** Fields of each member. */
const MEMBER = 3
const utf16 = (a: string, b: string): number => (a < b ? -1 : a > b ? 1 : 0)

/** The names as a reading leaves them: each ends with a quote, and one within has a byte of its own. */
function written(names: readonly string[]): { memory: Uint8Array; at: number[] } {
  const at: number[] = []
  const bytes: number[] = []
  for (const name of names) {
    at.push(bytes.length)
    for (const byte of Buffer.from(name)) bytes.push(byte === 0x22 ? QUOTE_WITHIN : byte)
    bytes.push(0x22)
  }
  return { memory: Uint8Array.from([...bytes, 0, 0, 0, 0]), at }
}

/** The names as `Order` sorts them, and how many further steps that took. */
function sorted(order: Order, names: readonly string[], first = 0): { found: string[]; steps: number } {
  const { memory, at } = written(names)
  const members = new Int32Array(first + names.length * MEMBER)
  for (const [n, name] of at.entries()) members[first + n * MEMBER] = name
  order.begin(memory, members, first, names.length)
  let steps = 0
  while (!order.finish(memory, members, names.length)) if (++steps > 100) throw new Error('it never ends')
  const found = Array.from(
    order.sorted.subarray(0, names.length),
    (member) => names[(member - first) / MEMBER] as string,
  )
  return { found, steps }
}

function isLossy(run: () => unknown): boolean {
  try {
    run()
    return false
  } catch (error) {
    return error instanceof Lossy
  }
}

/** The same for all runs, and in no order. */
const shuffled = (names: readonly string[]): string[] =>
  names
    .map((name, n) => ({ name, n: (n * 7919) % 10_007 }))
    .sort((a, b) => a.n - b.n)
    .map(({ name }) => name)

t.test('names are before one another as their UTF-16 units are', async (t) => {
  const { memory, at } = written(NAMES)
  for (const [n, one] of NAMES.entries())
    for (const [m, other] of NAMES.entries()) {
      if (n === m) continue
      const found = isBefore(memory, at[n] as number, at[m] as number)
      if (found !== utf16(one, other) < 0) t.fail(`${JSON.stringify(one)} ${JSON.stringify(other)}`)
    }
  const twice = written(['b', 'a', 'a'])
  t.ok(isLossy(() => isBefore(twice.memory, twice.at[1] as number, twice.at[2] as number)))
})

t.test('any number of members is sorted, wherever they begin', async (t) => {
  const order = new Order()
  const many = Array.from(
    { length: 300 },
    (_, n) => `${'alike'.repeat(n % 4)}${n % 7}${NAMES[n % NAMES.length]}${n}`,
  )
  for (const names of [NAMES, many])
    for (const count of [...Array(40).keys(), 64, 65, 255, 256, 257, 300].filter((n) => n <= names.length))
      for (const first of [0, 6]) {
        const given = shuffled(names.slice(0, count))
        const { found, steps } = sorted(order, given, first)
        if (steps > 0 || found.join() !== [...given].sort(utf16).join()) t.fail(`${count} from ${first}`)
      }
})

t.test('an object with many members is sorted in steps', async (t) => {
  const order = new Order()
  for (const [count, expected] of [
    [4096, 0],
    [4097, 13],
    [8192, 13],
    [8193, 14],
    [16_384, 14],
    [16_385, 16],
    [5000, 13],
    [300, 0],
    [9, 0],
  ] as const) {
    const names = shuffled(Array.from({ length: count }, (_, n) => `${'alike'.repeat(n % 3)}${n}`))
    const { found, steps } = sorted(order, names, 3)
    t.equal(found.join(), [...names].sort(utf16).join(), `${count} members`)
    t.equal(steps, expected, `${count} members`)
  }
})

t.test('a name that is there twice has no order, wherever the two are', async (t) => {
  for (const count of [2, 3, 8, 9, 17, 64, 5000]) {
    const names = shuffled(Array.from({ length: count - 2 }, (_, n) => `name ${n}`))
    for (const twice of ['', 'x', 'name'])
      for (const at of [0, Math.floor(count / 2), count - 1])
        t.ok(
          isLossy(() => sorted(new Order(), names.toSpliced(0, 0, twice).toSpliced(at, 0, twice))),
          `${count}, at ${at}`,
        )
  }
})

t.test('an order that was freed holds no memory', async (t) => {
  const order = new Order()
  sorted(order, ['b', 'a'])
  order.free()
  t.equal(order.sorted.length, 0)
})
