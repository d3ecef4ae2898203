/**
 * `npm run mutate -- [--folder src/core]… [--file F]… [--sample N --seed N] [--survivors] [--unexplained] [--tests test/core]… [--budget S] [--recheck N]`: plants small mistakes in the code, one at a time, and
 * asks the tests that execute it. `--survivors` takes only those that survived in the last run of each file, `--unexplained` none that has a reason; `--tests` asks no others;
 * a mutant is worth `--budget` seconds of tests, as long as they took without one; `--recheck` runs N of those that were noticed
 * again, each in a process of its own. Exit codes: 0 every mutant was
 * noticed or is listed in `survivors.json` with its reason, 1 not.
 */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { parseArgs } from 'node:util'
import { Bench } from './bench.ts'
import {
  allMutants,
  BUDGET,
  coverage,
  explanations,
  failsAlone,
  filesOf,
  Hunt,
  type Result,
  sampleOf,
  testsOf,
  unexplained,
} from './mutate.ts'
import { ROOT } from './plant.ts'

const { values } = parseArgs({
  options: {
    folder: { type: 'string', multiple: true, default: [] },
    file: { type: 'string', multiple: true, default: [] },
    tests: { type: 'string', multiple: true, default: ['test/'] },
    sample: { type: 'string' },
    seed: { type: 'string', default: '1' },
    recheck: { type: 'string', default: '0' },
    survivors: { type: 'boolean', default: false },
    unexplained: { type: 'boolean', default: false },
    budget: { type: 'string' },
  },
})
const LAST = `${ROOT}node_modules/.cache/mutation/last.json`
const say = (text: string): void => void process.stdout.write(`${text}\n`)

const explained = explanations()
const last = (existsSync(LAST) ? JSON.parse(readFileSync(LAST, 'utf8')) : {}) as Record<string, string[]>

const chosen = [...values.folder.flatMap(filesOf), ...values.file]
const files = chosen.length > 0 ? chosen : ['src/core', 'src/protect', 'src/store'].flatMap(filesOf)
let mutants = allMutants(files)
if (values.survivors) mutants = mutants.filter(({ file, id }) => last[file]?.includes(id))
if (values.unexplained) mutants = mutants.filter(({ id }) => !explained.has(id))
if (values.sample !== undefined) mutants = sampleOf(mutants, Number(values.sample), Number(values.seed))

const asked = testsOf(files).filter((test) => values.tests.some((prefix) => test.startsWith(prefix)))

const bench = new Bench()
const began = performance.now()
const results: Result[] = []
try {
  const hunt = new Hunt(bench, await coverage(bench, asked, say), Number(values.budget ?? BUDGET) * 1000)
  say(`${mutants.length} mutants in ${files.length} files; tests are known after ${seconds()} s`)
  for (const mutant of mutants) {
    const result = await hunt.result(mutant)
    results.push(result)
    if (result.by === null && !explained.has(mutant.id)) say(`survived: line ${mutant.line} of ${mutant.id}`)
    if (results.length % 100 === 0) say(`${results.length} of ${mutants.length} after ${seconds()} s`)
  }
} finally {
  bench.close()
}

for (const file of files) {
  const of = results.filter(({ mutant }) => mutant.file === file)
  if (of.length === 0) continue
  const survived = of.filter(({ by }) => by === null).map(({ mutant }) => mutant.id)
  const isWhole = values.sample === undefined && !values.survivors && !values.unexplained
  const before = (last[file] ?? []).filter(
    (id) => !values.survivors || (values.unexplained && explained.has(id)),
  )
  last[file] = isWhole ? survived : [...new Set([...before, ...survived])]
  const known = survived.filter((id) => explained.has(id)).length
  say(
    JSON.stringify({
      file,
      mutants: of.length,
      killed: of.length - survived.length,
      explained: known,
      survived: survived.length - known,
    }),
  )
}
mkdirSync(`${ROOT}node_modules/.cache/mutation`, { recursive: true })
writeFileSync(LAST, JSON.stringify(last))
const killed = results.filter(({ by }) => by !== null)
const survived = unexplained(results, explained).length
const again = new Set(
  sampleOf(
    killed.map(({ mutant }) => mutant),
    Number(values.recheck),
    Number(values.seed),
  ),
)
const doubted = killed.filter((result) => again.has(result.mutant) && !failsAlone(result))
for (const { mutant, by, why } of doubted) say(`not noticed by ${by} alone: ${mutant.id} (${why})`)
say(
  JSON.stringify({
    mutants: results.length,
    killed: killed.length,
    explained: results.length - killed.length - survived,
    survived,
    rechecked: again.size,
    doubted: doubted.length,
    seconds: seconds(),
  }),
)
process.exitCode = survived + doubted.length === 0 ? 0 : 1

function seconds(): number {
  return Math.round((performance.now() - began) / 1000)
}
