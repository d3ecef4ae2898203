/**
 * The two tiers of tests.
 *
 * - `npm test`: in-process tests against real stores, with coverage; then whole proxies end to end, without coverage (their processes
 *   would write half of the data and add nothing to the folders that need full coverage).
 * - `npm run verify`: everything shipped around the code: packages, charts, dashboards, the page in a browser, clients in other
 *   languages, the demo, the bench; whether planted mistakes are caught; some mutants; a short torture; and beside them, in what they leave
 *   of the processors, SIMULATION_SECONDS of simulation (60; CI: 600), on all processors together, under seeds of the day.
 *
 * `npm test -- FILE…` runs only these files, without coverage.
 */
import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readdirSync } from 'node:fs'
import { availableParallelism, constants, setPriority } from 'node:os'
import { text } from 'node:stream/consumers'

/** Most of these tests spend their time waiting: for a lease, a timeout, the end of a process. */
const END_TO_END = ['test/e2e']
const VERIFY = [
  'bench',
  'clients',
  'examples',
  'mutation',
  'packaging',
  'page',
  'planted',
  'torture',
  'watch',
].map((name) => `test/${name}`)

/** All test files: beside them in `test/` are programs, which the runner would run. */
const FILES = readdirSync('test', { recursive: true, encoding: 'utf8' })
  .filter((name) => name.endsWith('.test.ts'))
  .map((name) => `test/${name}`)

function filesIn(folders: readonly string[]): string[] {
  return FILES.filter((file) => folders.some((folder) => file.startsWith(`${folder}/`)))
}

/** All other tests. */
function covered(): string[] {
  const elsewhere = new Set(filesIn([...END_TO_END, ...VERIFY]))
  return FILES.filter((file) => !elsewhere.has(file))
}

let failed = false
function run(program: string, ...args: readonly string[]): void {
  const { status } = spawnSync(program, args, { stdio: 'inherit' })
  if (status !== 0) failed = true
}

/** Resolves when the simulations have used up their time, or printed a failure. */
async function simulate(cpuSeconds: number): Promise<void> {
  const processes = availableParallelism()
  const day = Math.floor(Date.now() / 86_400_000)
  const runs = Array.from({ length: processes }, async (_, n) => {
    const seed = String((day * processes + n) * 1_000_000 + 1)
    const args = ['test/simulation/main.ts', '--seed', seed, '--cpu-seconds', String(cpuSeconds / processes)]
    const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] })
    // Tests have deadlines; this has none.
    if (child.pid !== undefined) setPriority(child.pid, constants.priority.PRIORITY_LOW)
    const [said, [status]] = await Promise.all([text(child.stdout), once(child, 'close')])
    process.stdout.write(`simulation from seed ${seed}: ${said}`)
    if (status !== 0) failed = true
  })
  await Promise.all(runs)
}

const [tier, ...files] = process.argv.slice(2)
if (files.length > 0) run('tap', '--disable-coverage', ...files)
else if (tier === 'verify') {
  const simulated = simulate(Number(process.env['SIMULATION_SECONDS'] ?? 60))
  const tests = spawn('tap', ['--disable-coverage', ...filesIn(VERIFY)], { stdio: 'inherit' })
  const [status] = await once(tests, 'exit')
  if (status !== 0) failed = true
  await simulated
} else {
  run('tap', ...covered())
  run(process.execPath, 'scripts/coverage.ts')
  run('tap', '--disable-coverage', '--jobs=3', ...filesIn(END_TO_END))
}
process.exitCode = failed ? 1 : 0
