import { spawnSync } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { FUZZED, PLANTS } from '../simulation/plants.ts'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))
/** Most are caught within a hundred. */
const RUNS = 40_000
t.setTimeout(1_200_000)

interface Report {
  readonly runs: number
  readonly broken: { readonly seed: number; readonly what: string } | null
}

function simulateWith(
  plant: string,
  ...args: readonly string[]
): { status: number | null; report: Report | null; said: string } {
  const { PATH } = process.env
  const { status, stdout, stderr } = spawnSync(
    process.execPath,
    ['--import', './test/simulation/plant.ts', 'test/simulation/main.ts', ...args],
    {
      cwd: ROOT,
      encoding: 'utf8',
      env: { PATH, PLANT: plant },
      maxBuffer: 2 ** 28,
    },
  )
  const last = stdout.trimEnd().split('\n').at(-1) ?? ''
  return { status, report: last.startsWith('{') ? (JSON.parse(last) as Report) : null, said: stdout + stderr }
}

for (const { name } of PLANTS)
  void t.test(`the simulation catches: ${name}`, async (t) => {
    const { status, report, said } = simulateWith(
      name,
      '--seed',
      '1',
      '--runs',
      String(RUNS),
      '--seconds',
      '900',
    )
    t.equal(status, 1, report === null ? said : `${report.runs} runs`)
    t.comment(`caught by seed ${report?.broken?.seed} after ${report?.runs} runs: ${report?.broken?.what}`)
    t.match(said, /^seed \d+: /m, 'with a timeline')
  })

/** Whether a program fails with the mistake and passes without it. */
function failsOnlyWith(plant: string, ...program: readonly string[]): string {
  const { PATH } = process.env
  const run = (env: Record<string, string | undefined>, ...hook: readonly string[]): number | null =>
    spawnSync(process.execPath, [...hook, ...program], { cwd: ROOT, env: { PATH, ...env } }).status
  const [without, withIt] = [run({}), run({ PLANT: plant }, '--import', './test/simulation/plant.ts')]
  return without !== 0 ? 'fails also without it' : withIt === 0 ? 'does not fail with it' : 'caught'
}

for (const { name, also } of [...PLANTS, ...FUZZED])
  if (also !== undefined)
    void t.test(`${also} also catches: ${name}`, async (t) => t.equal(failsOnlyWith(name, also), 'caught'))

for (const { name, target } of FUZZED)
  void t.test(`the fuzzer catches: ${name}`, async (t) =>
    t.equal(
      failsOnlyWith(name, 'test/fuzz/main.ts', '--target', target, '--seconds', '20', '--seed', '1'),
      'caught',
    ),
  )
