/**
 * The two tiers of tests.
 *
 * - `npm test`: the code in process and against real stores, with coverage; then whole proxies end to end, without it (their
 *   processes would write half of all coverage data and cover nothing more of what has to be whole).
 * - `npm run verify`: what is shipped around the code — packages, charts, dashboards, the page in a browser, clients in other
 *   languages, the demo, the bench.
 *
 * `npm test -- FILE…` runs these files alone, without coverage.
 */
import { spawnSync } from 'node:child_process'
import { readdirSync } from 'node:fs'

/** Most of these tests wait: for a lease, a timeout, the end of a process. */
const END_TO_END = ['test/e2e']
const VERIFY = ['bench', 'clients', 'examples', 'packaging', 'page', 'watch'].map((name) => `test/${name}`)

/** All other tests: files of `test/`, and folders that hold tests. */
function covered(): string[] {
  const elsewhere = new Set([...END_TO_END, ...VERIFY])
  return readdirSync('test', { withFileTypes: true })
    .filter((entry) =>
      entry.isDirectory() ? hasTests(`test/${entry.name}`) : entry.name.endsWith('.test.ts'),
    )
    .map(({ name }) => `test/${name}`)
    .filter((path) => !elsewhere.has(path))
}

function hasTests(folder: string): boolean {
  return readdirSync(folder).some((name) => name.endsWith('.test.ts'))
}

let failed = false
function run(program: string, ...args: readonly string[]): void {
  const { status } = spawnSync(program, args, { stdio: 'inherit' })
  if (status !== 0) failed = true
}

const [tier, ...files] = process.argv.slice(2)
if (files.length > 0) run('tap', '--disable-coverage', ...files)
else if (tier === 'verify') run('tap', '--disable-coverage', ...VERIFY)
else {
  run('tap', ...covered())
  run(process.execPath, 'scripts/coverage.ts')
  run('tap', '--disable-coverage', '--jobs=3', ...END_TO_END)
}
process.exitCode = failed ? 1 : 0
