/** Which tests see which mutant, in which order they are asked, and what came of it. */
import { spawnSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import { existsSync, globSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { dirname } from 'node:path'
import { Bench, type Ran } from './bench.ts'
import { type Mutant, mutantsOf } from './mutants.ts'
import { ROOT } from './plant.ts'

/**
 * Tests in process, with real stores where they need them; whole proxies end to end are too slow for thousands of mutants. Stores on servers
 * are asked of themselves alone.
 */
const TESTS = ['config', 'core', 'protect', 'reconcile', 'shadow', 'store']
const ON_SERVERS = /\/(dynamodb|pgbouncer|postgres|redis|sqlite|tiered)[^/]*$/
/** Longer ones are asked only where no other covers the mutant. */
const LONG = 15_000
/** How many seconds of tests a mutant is worth; what is not noticed until then counts as survived. */
export const BUDGET = 20
/** Code of threads that tests start, and what servers execute, leave no coverage here: the tests of their owner are asked. */
const ELSEWHERE: readonly (readonly [file: RegExp, like: string])[] = [
  [/sqlite-(worker|file|journal)\.ts$/, 'src/store/sqlite.ts'],
  [/\.lua$/, 'src/store/redis.ts'],
  [/\.sql$/, 'src/store/postgres-layout.ts'],
]
/** Made by a program, or without code. */
const NOT_MUTATED = new Set(['src/core/body/json-usual-wasm.ts'])
const CACHE = `${ROOT}node_modules/.cache/mutation/`

export interface Result {
  readonly mutant: Mutant
  /** The test that noticed, or null. */
  readonly by: string | null
  readonly why: string
}

/** Mutants that no test can notice, or that make no difference which is promised: why, by their id. */
export function explanations(): ReadonlyMap<string, string> {
  return new Map(Object.entries(JSON.parse(read('test/mutation/survivors.json')) as Record<string, string>))
}

/** What makes the command fail. */
export function unexplained(results: readonly Result[], explained: ReadonlyMap<string, string>): Result[] {
  return results.filter(({ by, mutant }) => by === null && !explained.has(mutant.id))
}

export function filesOf(folder: string): string[] {
  return globSync(`${folder}/**/*.{ts,lua,sql}`, { cwd: ROOT })
    .filter((file) => !NOT_MUTATED.has(file))
    .sort()
}

export function read(file: string): string {
  return readFileSync(ROOT + file, 'utf8')
}

export function allMutants(files: readonly string[]): Mutant[] {
  return files.flatMap((file) => mutantsOf(file, read(file)))
}

/** `count` of them, the same ones for the same seed. */
export function sampleOf(mutants: readonly Mutant[], count: number, seed: number): Mutant[] {
  const rank = ({ id }: Mutant): string => createHash('sha256').update(`${seed} ${id}`).digest('hex')
  const chosen = new Set(
    mutants
      .map((mutant) => ({ mutant, rank: rank(mutant) }))
      .sort((a, b) => (a.rank < b.rank ? -1 : 1))
      .slice(0, count)
      .map(({ mutant }) => mutant),
  )
  return mutants.filter((mutant) => chosen.has(mutant))
}

/** What each test file executes; kept until it, or one of the files that it executes, is another. */
export async function coverage(
  bench: Bench,
  tests: readonly string[],
  say: (text: string) => void,
): Promise<Ran[]> {
  const all: Ran[] = []
  for (const test of tests) {
    const file = `${CACHE}${test}.json`
    const kept = existsSync(file)
      ? (JSON.parse(readFileSync(file, 'utf8')) as Ran & { digest: string })
      : null
    if (kept !== null && kept.digest === digestOf(kept)) {
      all.push(kept)
      continue
    }
    let ran: Ran
    try {
      ran = await bench.cover(test)
    } catch (error) {
      say(`${test} is left out: ${(error as Error).message}`)
      continue
    }
    mkdirSync(dirname(file), { recursive: true })
    writeFileSync(file, JSON.stringify({ ...ran, digest: digestOf(ran) }))
    all.push(ran)
  }
  return all
}

function digestOf({ test, covered }: Ran): string {
  const hash = createHash('sha256')
  for (const file of [test, ...Object.keys(covered).sort()])
    hash.update(existsSync(ROOT + file) ? read(file) : '').update('\0')
  return hash.digest('hex')
}

/** Those that may execute something of `files`. */
export function testsOf(files: readonly string[]): string[] {
  const all = TESTS.flatMap((folder) => globSync(`test/${folder}/**/*.test.ts`, { cwd: ROOT })).sort()
  return files.some((file) => file.startsWith('src/store/'))
    ? all
    : all.filter((test) => !ON_SERVERS.test(test))
}

/** Asks the tests that execute a mutant's place: first those that are quick and often notice something in its file. */
export class Hunt {
  readonly #bench: Bench
  readonly #ran: readonly Ran[]
  /** ms */
  readonly #budget: number
  readonly #noticed = new Map<string, { tries: number; hits: number }>()

  constructor(bench: Bench, ran: readonly Ran[], budget = BUDGET * 1000) {
    this.#budget = budget
    this.#bench = bench
    this.#ran = ran
  }

  async result(mutant: Mutant): Promise<Result> {
    const tests = this.testsOf(mutant)
    const times = new Map(this.#ran.map(({ test, time }) => [test, time]))
    const verdict = await this.#bench.run(mutant, tests, (test) => 4_000 + 5 * (times.get(test) ?? 0))
    for (const test of tests) {
      const seen = this.#of(mutant.file, test)
      seen.tries++
      if (test !== verdict.by) continue
      seen.hits++
      break
    }
    return { mutant, ...verdict }
  }

  /** In the order in which they are asked. */
  testsOf({ file, start }: Mutant): string[] {
    const like = ELSEWHERE.find(([pattern]) => pattern.test(file))?.[1]
    // What follows an operator that ends early is a range of its own, which begins with the operator.
    const covering = this.#ran.filter(({ covered }) => {
      if (covered[file]?.some(([from, to]) => from <= start && start <= to)) return true
      return like !== undefined && covered[like] !== undefined
    })
    const short = covering.filter(({ time }) => time <= LONG)
    const cost = ({ test, time }: Ran): number => {
      const { tries, hits } = this.#of(file, test)
      return ((time + 20) * (tries + 2)) / (hits + (isOwn(test, file) ? 1 : 0.1))
    }
    const ordered = (short.length > 0 ? short : covering).toSorted((a, b) => cost(a) - cost(b))
    let spent = 0
    return ordered.flatMap(({ test, time }, index) => {
      spent += time
      return index === 0 || spent <= this.#budget ? [test] : []
    })
  }

  #of(file: string, test: string): { tries: number; hits: number } {
    const name = `${file} ${test}`
    const seen = this.#noticed.get(name) ?? { tries: 0, hits: 0 }
    this.#noticed.set(name, seen)
    return seen
  }
}

/** Whether the test that noticed a mutant fails on it in a process of its own, too, started as any test is. */
export function failsAlone({ mutant, by }: Result): boolean {
  const args = ['--import', './test/mutation/plant.ts', by as string]
  const env = { ...process.env, MUTANT: JSON.stringify(mutant), NODE_V8_COVERAGE: '' }
  const { status } = spawnSync(process.execPath, args, { cwd: ROOT, env, stdio: 'ignore', timeout: 120_000 })
  return status !== 0
}

function isOwn(test: string, file: string): boolean {
  const stem = (path: string): string => path.slice(path.lastIndexOf('/') + 1).replace(/\..*/, '')
  return stem(test) === stem(file)
}
