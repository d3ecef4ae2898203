import t from 'tap'
import { Bench } from './bench.ts'
import { type Mutant, mutantsOf } from './mutants.ts'
import {
  allMutants,
  coverage,
  explanations,
  failsAlone,
  filesOf,
  Hunt,
  read,
  sampleOf,
  unexplained,
} from './mutate.ts'

/** All of them: `npm run mutate`. */
const FILES = ['src/core/decide.ts']
const TESTS = ['test/core/decide.test.ts', 'test/core/settle.test.ts']
const SAMPLE = 40
t.setTimeout(600_000)

const bench = new Bench()
t.teardown(() => {
  bench.close()
})
const hunt = new Hunt(bench, await coverage(bench, TESTS, (text) => t.fail(text)))

void t.test('the tests notice small mistakes in the decisions', async (t) => {
  const results = []
  for (const mutant of sampleOf(allMutants(FILES), SAMPLE, 1)) results.push(await hunt.result(mutant))
  t.equal(results.length, SAMPLE)
  t.same(
    unexplained(results, explanations()).map(({ mutant }) => mutant.id),
    [],
  )
})

void t.test('a mutant that no test notices is reported, and one that a test notices is not', async (t) => {
  const file = 'src/core/settle.ts'
  const source = read(file)
  const planted = (from: string, text: string): Mutant => {
    const start = source.indexOf(from)
    t.ok(start > 0, from)
    return { file, start, end: start + from.length, text, kind: 'planted', id: `${from} → ${text}`, line: 0 }
  }
  const survivor = await hunt.result(
    planted('status >= 200 && status < 300', '(status >= 200 && status < 300)'),
  )
  t.same(unexplained([survivor], new Map()), [survivor])
  t.same(unexplained([survivor], new Map([[survivor.mutant.id, 'it is the same']])), [])

  const noticed = await hunt.result(
    planted('status >= 200 && status < 300', 'status >= 200 && status <= 300'),
  )
  t.equal(noticed.by, 'test/core/settle.test.ts')
  t.same(unexplained([noticed], new Map()), [])
  t.equal(failsAlone(noticed), true, 'even in a process of its own')
  t.equal(failsAlone({ ...survivor, by: noticed.by }), false)

  const stuck = planted('return status >= 200', 'for (;;) if (status < 0) return status >= 200')
  t.equal((await hunt.result(stuck)).by, 'test/core/settle.test.ts', 'an endless loop is noticed')
  t.equal((await hunt.result(survivor.mutant)).by, null, 'the next mutant is judged on its own')
})

void t.test('mutants change operators and values, but not comments, imports or error messages', async (t) => {
  const source = [
    "import { a } from './a.ts'",
    'export function f(b: number, c: string | null): string {',
    "  if (b < 1 /* < */) throw new RangeError('too small: <')",
    "  return c ?? 'none'",
    '}',
  ].join('\n')
  t.same(
    mutantsOf('src/x.ts', source).map(({ start, end, text }) => `${source.slice(start, end)} → ${text}`),
    [
      'b < 1 → true',
      'b < 1 → false',
      '< → >=',
      '< → <=',
      '1 → (1 + 1)',
      '1 → (1 - 1)',
      "c ?? 'none' → (c)",
      "c ?? 'none' → ('none')",
      "'none' → ''",
    ],
  )
})

void t.test('every explained survivor is still a mutant, and every mutant has its own id', async (t) => {
  const all = allMutants(['src/core', 'src/protect', 'src/store'].flatMap(filesOf)).map(({ id }) => id)
  const ids = new Set(all)
  t.equal(ids.size, all.length)
  for (const [id, reason] of explanations()) {
    t.ok(ids.has(id), id)
    t.match(reason, /\S+ \S+/, id)
  }
})
