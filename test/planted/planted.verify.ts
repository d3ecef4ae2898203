import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { FUZZED, PLANTS } from '../simulation/plants.ts'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))
/** Where the code has changed, so have the runs: then the next seeds are tried. */
const RUNS = '4000'
t.setTimeout(1_200_000)
t.jobs = 2

interface Ended {
  readonly status: number
  readonly said: string
}

/** Runs a program with the mistake in it. */
function planted(name: string, ...program: readonly string[]): Promise<Ended> {
  const { PATH } = process.env
  const args = ['--import', './test/simulation/plant.ts', ...program]
  const options = {
    cwd: ROOT,
    env: { PATH, PLANT: name, TAP_TIMEOUT: '300', NODE_V8_COVERAGE: '' },
    maxBuffer: 2 ** 28,
  }
  return new Promise((resolve) => {
    const child = execFile(process.execPath, args, options, (_error, out, errors) =>
      resolve({ status: child.exitCode ?? -1, said: out + errors }),
    )
  })
}

for (const { name, seed } of PLANTS)
  void t.test(`the simulation catches: ${name}`, { buffered: true }, async (t) => {
    // Not by the clock: others run beside it.
    const from = ['--seed', String(seed), '--runs', RUNS, '--cpu-seconds', '120']
    const { status, said } = await planted(name, 'test/simulation/main.ts', ...from)
    t.equal(status, 1, said)
    const [report] = said.match(/^\{.*"broken":\{.*$/m) ?? []
    t.ok(report, 'with a report')
    t.match(said, /^seed \d+: /m, 'with a timeline')
    t.comment(report)
  })

for (const { name, also } of [...PLANTS, ...FUZZED])
  if (also !== undefined)
    void t.test(`${also} also catches: ${name}`, { buffered: true }, async (t) => {
      const { status, said } = await planted(name, also)
      // By a signal, if the mistake keeps the file from ending.
      t.not(status, 0)
      t.match(said, /^ *not ok /m, 'by an assertion')
    })

for (const { name, target } of FUZZED)
  void t.test(`the fuzzer catches: ${name}`, { buffered: true }, async (t) => {
    const { status, said } = await planted(name, 'test/fuzz/main.ts', '--target', target, '--seed', '1')
    t.equal(status, 1)
    t.match(said, '"held":false')
  })
