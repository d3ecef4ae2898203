/**
 * Runs the tests. A test file is a program that prints TAP (`node test/x.test.ts`); its name says its tier:
 *
 * - `npm test` runs `*.test.ts`: every behaviour of the product once, where it is cheapest to see.
 * - `npm run verify` runs `*.verify.ts` too: the same under faults, in combinations, at length and with other tools; then judges the
 *   coverage of both tiers. Beside it run SIMULATION_SECONDS of simulation (60; CI: 150), under seeds of the day.
 * - `npm test -- FILE…` runs these files. A folder stands for all files in it, of the tier's.
 *
 * COVERAGE=FOLDER keeps the coverage there, and `verify` then takes the first tier's from there instead of running it again.
 *
 * Prints what failed, and how to repeat it; then one line of totals.
 */
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statfsSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { availableParallelism, constants, setPriority, tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { text } from 'node:stream/consumers'
import { Parser, type Result } from 'tap-parser'

const ROOT = join(import.meta.dirname, '..')
const CACHE = join(ROOT, 'node_modules/.cache/idempotency-proxy')
/** Milliseconds after which a file that has not ended is killed. */
const FILE_LIMIT = 1_800_000
/** Many tests wait for a process or a socket: one more than there are processors keeps these busy. */
const JOBS = availableParallelism() + 1

/** What `verify` runs again on other stores: end-to-end tests, which the first tier runs on SQLite. */
const OTHER_STORES: Readonly<Record<string, readonly string[]>> = {
  admin: ['memory,redis'],
  callers: ['memory,redis'],
  keys: ['memory,redis'],
  operators: ['redis,postgres'],
  reconcile: ['memory', 'redis', 'postgres'],
  reload: ['redis'],
  services: ['redis'],
  shadow: ['memory,redis'],
  telling: ['redis'],
  waiting: ['memory,redis', 'postgres'],
}

/** What runs with nothing beside it: a proxy that does not get to run for as long as a grace has lost its claims (docs/stores.md). */
const ALONE: readonly string[] = ['test/e2e/failovers.verify.ts']

/** A file to run, on these stores if it is run on others than usual. */
interface Job {
  readonly file: string
  readonly stores?: string
}

interface Verdict {
  readonly name: string
  readonly passed: number
  readonly skipped: number
  readonly failures: readonly string[]
  readonly seconds: number
}

type Tier = 'test' | 'verify'

/** Seconds that each file took here last; empty on a fresh machine. */
const TIMES = join(CACHE, 'times.json')

function lastTimes(): Record<string, number> {
  try {
    return JSON.parse(readFileSync(TIMES, 'utf8')) as Record<string, number>
  } catch {
    return {}
  }
}

/** As it is said on a command line. */
function nameOf({ file, stores }: Job): string {
  return stores === undefined ? file : `${file} on ${stores}`
}

/** Files of `test/` whose names say that they belong to the tier. */
function filesOf(tier: Tier): Job[] {
  return readdirSync(join(ROOT, 'test'), { recursive: true, encoding: 'utf8' })
    .filter((name) => !name.includes('node_modules') && name.endsWith(`.${tier}.ts`))
    .map((name) => ({ file: `test/${name}` }))
}

/** Those first that took longest, or are largest, so that none of them begins last. */
function ordered(jobs: readonly Job[]): Job[] {
  const times = lastTimes()
  const weights = new Map(
    jobs.map((job) => [job, { time: times[nameOf(job)] ?? 0, size: statSync(join(ROOT, job.file)).size }]),
  )
  const weightOf = (job: Job) => weights.get(job) as { time: number; size: number }
  return jobs.toSorted((a, b) => weightOf(b).time - weightOf(a).time || weightOf(b).size - weightOf(a).size)
}

/** In memory where there is room: an fsync of a test's store proves nothing about the disk, and waits for it. */
function temporaryFolder(): string {
  let parent = '/dev/shm'
  try {
    const { bavail, bsize } = statfsSync(parent)
    if (bavail * bsize < 2 ** 31) parent = tmpdir()
  } catch {
    // Not Linux.
    parent = tmpdir()
  }
  const folder = mkdtempSync(join(parent, 'idempotency-proxy-'))
  // Servers that refuse to run as root run as another user.
  chmodSync(folder, 0o755)
  return folder
}

const running = new Set<{ kill(): void }>()

async function run(job: Job, env: NodeJS.ProcessEnv): Promise<Verdict> {
  const begun = performance.now()
  const child = spawn(process.execPath, [job.file], {
    cwd: ROOT,
    env: job.stores === undefined ? env : { ...env, STORES: job.stores },
    stdio: ['ignore', 'pipe', 'pipe'],
    detached: true,
  })
  // With the servers and proxies that it started.
  const kill = (): void => {
    try {
      process.kill(-(child.pid ?? 0), 'SIGKILL')
    } catch {
      // All have ended.
    }
  }
  const entry = { kill }
  running.add(entry)
  const limit = setTimeout(kill, FILE_LIMIT)
  const failures: string[] = []
  let [passed, skipped] = [0, 0]
  const parser = new Parser()
  parser.on('result', (result: Result) => {
    if (result.skip || result.todo) skipped++
    else if (result.ok) passed++
    else failures.push(described(result))
  })
  const finished = once(parser, 'complete')
  child.stdout.pipe(parser)
  const exited = once(child, 'exit').then((end) => {
    // What a test left running may hold the pipe open.
    kill()
    return end
  })
  const [said, [code, signal]] = await Promise.all([text(child.stderr), exited, finished])
  clearTimeout(limit)
  running.delete(entry)
  if (failures.length === 0 && (code !== 0 || !parser.ok))
    failures.push(
      `ended with ${signal ?? code}${parser.ok ? '' : ', and its TAP is not whole'}${parser.results?.bailout ? `: ${parser.results.bailout}` : ''}`,
    )
  if (failures.length > 0 && said.trim() !== '') failures.push(said.trim().split('\n').slice(-30).join('\n'))
  return { name: nameOf(job), passed, skipped, failures, seconds: (performance.now() - begun) / 1000 }
}

/** What tap says of a failed assertion. */
interface Diagnosis {
  readonly diff?: string
  readonly stack?: string
  readonly source?: string
  readonly at?: { readonly fileName?: string; readonly lineNumber?: number }
}

/** The titles down to the assertion, and what differs. */
function described({ fullname, name, diag }: Result): string {
  const { diff, stack, source: _, at, ...rest } = (diag ?? {}) as Diagnosis
  const where = at?.fileName === undefined ? '' : ` (${at.fileName}:${at.lineNumber})`
  const lines = [`${fullname || name}${where}`]
  if (diff !== undefined) lines.push(diff.trimEnd())
  else if (Object.keys(rest).length > 0) lines.push(JSON.stringify(rest, null, 2))
  else if (stack !== undefined) lines.push(stack)
  return lines.join('\n')
}

/** Runs the files, several at a time but for {@link ALONE}, and prints each failure as soon as its file has ended. */
async function runAll(jobs: readonly Job[], env: NodeJS.ProcessEnv): Promise<Verdict[]> {
  const alone = jobs.filter(({ file }) => ALONE.includes(file))
  const waiting = ordered(jobs.filter((job) => !alone.includes(job)))
  const verdicts: Verdict[] = []
  const work = async (queue: Job[]): Promise<void> => {
    for (let job = queue.shift(); job !== undefined; job = queue.shift()) {
      const verdict = await run(job, env)
      verdicts.push(verdict)
      if (verdict.failures.length === 0) continue
      const repeat = `${job.stores === undefined ? '' : `STORES=${job.stores} `}npm test -- ${job.file}`
      process.stdout.write(
        `\nFAILED ${verdict.name}\n${verdict.failures.join('\n\n')}\nrepeat: ${repeat}\n\n`,
      )
    }
  }
  await Promise.all(Array.from({ length: JOBS }, () => work(waiting)))
  await work(alone)
  return verdicts
}

/** Resolves to whether nothing was broken, when the simulations have used up their time. */
async function simulate(cpuSeconds: number): Promise<boolean> {
  const processes = availableParallelism()
  const day = Math.floor(Date.now() / 86_400_000)
  const runs = Array.from({ length: processes }, async (_, n) => {
    const seed = String((day * processes + n) * 1_000_000 + 1)
    const args = ['test/simulation/main.ts', '--seed', seed, '--cpu-seconds', String(cpuSeconds / processes)]
    const child = spawn(process.execPath, args, { cwd: ROOT, stdio: ['ignore', 'pipe', 'inherit'] })
    // Tests have deadlines; this has none.
    if (child.pid !== undefined) setPriority(child.pid, constants.priority.PRIORITY_LOW)
    const [said, [status]] = await Promise.all([text(child.stdout), once(child, 'close')])
    process.stdout.write(`simulation from seed ${seed}: ${said}`)
    return status === 0
  })
  return (await Promise.all(runs)).every(Boolean)
}

/** Whether the folders that decide correctness are covered whole by what wrote into `folder`. */
async function covered(folder: string): Promise<boolean> {
  const reporting = spawn(
    'c8',
    [
      'report',
      '--temp-directory',
      folder,
      '--include',
      'src/**',
      '--src',
      'src',
      '--reporter',
      'json-summary',
      '--reports-dir',
      join(CACHE, 'coverage'),
    ],
    {
      cwd: ROOT,
      stdio: ['ignore', 'ignore', 'inherit'],
      // The folder holds what some 650 processes wrote.
      env: { ...process.env, NODE_OPTIONS: '--max-old-space-size=8000' },
    },
  )
  const [status] = await once(reporting, 'exit')
  if (status !== 0) return false
  const judging = spawn(process.execPath, ['scripts/coverage.ts'], { cwd: ROOT, stdio: 'inherit' })
  return (await once(judging, 'exit'))[0] === 0
}

const [tier, ...named] = process.argv.slice(2) as [Tier, ...string[]]
const temporary = temporaryFolder()
let ended = false
function cleanUp(): void {
  if (ended) return
  ended = true
  for (const child of running) child.kill()
  rmSync(temporary, { recursive: true, force: true, maxRetries: 5 })
}
process.on('exit', cleanUp)
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const)
  process.on(signal, () => process.exit(128 + constants.signals[signal]))

const env: NodeJS.ProcessEnv = {
  ...process.env,
  TMPDIR: temporary,
  TAP_TIMEOUT: '300',
  // Compiled code of the product is shared by all files.
  NODE_COMPILE_CACHE: join(CACHE, 'compiled'),
}
mkdirSync(CACHE, { recursive: true })
const judged = tier === 'verify' && named.length === 0
const kept = process.env['COVERAGE']
const first = filesOf('test')
const all = [...first, ...(tier === 'verify' ? filesOf('verify') : [])]
const jobs = judged
  ? [
      ...(kept !== undefined && existsSync(kept) ? all.slice(first.length) : all),
      ...Object.entries(OTHER_STORES).flatMap(([name, stores]) =>
        stores.map((one) => ({ file: `test/e2e/${name}.test.ts`, stores: one })),
      ),
    ]
  : named.length === 0
    ? all
    : named.flatMap((name) => {
        const inside = all.filter(({ file }) => file.startsWith(`${name.replace(/\/$/, '')}/`))
        return inside.length > 0 ? inside : [{ file: name }]
      })
const coverage = judged || kept !== undefined ? resolve(kept ?? join(temporary, 'coverage')) : undefined
const begun = performance.now()
const simulated = judged ? simulate(Number(process.env['SIMULATION_SECONDS'] ?? 60)) : Promise.resolve(true)
const verdicts = await runAll(
  jobs,
  coverage === undefined ? env : { ...env, NODE_V8_COVERAGE: coverage, NODE_DISABLE_COMPILE_CACHE: '1' },
)
const whole = judged && coverage !== undefined ? await covered(coverage) : true
const sound = await simulated

writeFileSync(
  TIMES,
  JSON.stringify({
    ...lastTimes(),
    ...Object.fromEntries(verdicts.map(({ name, seconds }) => [name, seconds])),
  }),
)

const failed = verdicts.filter(({ failures }) => failures.length > 0)
const sum = (count: (verdict: Verdict) => number): number =>
  verdicts.reduce((total, one) => total + count(one), 0)
const times = verdicts.map(({ seconds }) => seconds).toSorted((a, b) => a - b)
const slowest = verdicts.toSorted((a, b) => b.seconds - a.seconds)[0]
process.stdout.write(
  `${verdicts.length} files in ${((performance.now() - begun) / 1000).toFixed(0)} s, ` +
    `half of them in at most ${times[times.length >> 1]?.toFixed(1)} s, the slowest ${slowest?.name} in ${slowest?.seconds.toFixed(1)} s\n` +
    failed.map(({ name }) => `failed: ${name}\n`).join('') +
    `${sum(({ passed }) => passed)} passed, ${sum(({ failures }) => failures.length)} failed, ${sum(({ skipped }) => skipped)} skipped\n`,
)
process.exitCode = failed.length === 0 && whole && sound ? 0 : 1
