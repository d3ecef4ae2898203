/**
 * `npm run fuzz -- [--target NAME] [--seconds 30] [--seed N] [--keep]`: changes inputs, guided by coverage, until something does not
 * hold. `--keep` writes inputs that made new code run to test/fuzz/corpus/. Exit codes: 0 everything held, 1 something did not.
 */
import { writeFileSync } from 'node:fs'
import { parseArgs } from 'node:util'
import { Coverage, fuzz } from './engine.ts'
import { corpusFile, corpusOf, TARGETS } from './targets.ts'

/** Of a target: the shortest, since each is tried in every `npm test`. */
const MAX_KEPT = 150

const { values } = parseArgs({
  options: {
    target: { type: 'string' },
    seconds: { type: 'string', default: '30' },
    seed: { type: 'string' },
    keep: { type: 'boolean', default: false },
  },
})
const seed = Number(values.seed ?? Math.floor(Math.random() * 2 ** 31))
const chosen = TARGETS.filter(({ name }) => values.target === undefined || name === values.target)
if (chosen.length === 0)
  throw new Error(`no such target; there are: ${TARGETS.map(({ name }) => name).join(', ')}`)

for (const target of chosen) {
  const coverage = new Coverage(target.files)
  const until = performance.now() + Number(values.seconds) * 1000
  const { tries, kept, ran, finding } = await fuzz(
    target,
    corpusOf(target),
    seed,
    () => performance.now() >= until,
    coverage,
  )
  coverage.close()
  process.stdout.write(
    `${JSON.stringify({ target: target.name, seed, tries, ran, kept: kept.length, held: finding === null })}\n`,
  )
  if (finding !== null) {
    process.exitCode = 1
    process.stdout.write(
      `${JSON.stringify(finding.input.toString('latin1'))}\n${finding.input.toString('base64')}\n${String((finding.error as Error).stack)}\n`,
    )
  }
  if (!values.keep) continue
  const shortest = kept.toSorted((a, b) => a.length - b.length).slice(0, MAX_KEPT)
  const lines = shortest.map((input) => input.toString('base64')).sort()
  writeFileSync(corpusFile(target.name), lines.map((line) => `${line}\n`).join(''))
}
