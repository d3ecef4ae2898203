/** Ends `npm run verify`: the folders that decide correctness need full coverage; the rest is printed. */
import { readFileSync } from 'node:fs'
import { relative } from 'node:path'

type Measure = 'lines' | 'branches' | 'functions' | 'statements'
type Summary = Record<string, Record<Measure, { pct: number }>>

const MEASURES: readonly Measure[] = ['lines', 'branches', 'functions', 'statements']
const WHOLE = /^src\/(?:core|protect|runtime|shadow|store)\//

const report = new URL(
  '../node_modules/.cache/idempotency-proxy/coverage/coverage-summary.json',
  import.meta.url,
)
const summary = JSON.parse(readFileSync(report, 'utf8')) as Summary
let failed = 0
let seen = 0
for (const [path, measures] of Object.entries(summary)) {
  const file = relative(process.cwd(), path)
  const least = Math.min(...MEASURES.map((measure) => measures[measure].pct))
  if (WHOLE.test(file)) {
    seen++
    if (least < 100) {
      failed++
      process.stdout.write(
        `not fully covered: ${file} ${MEASURES.map((m) => `${m} ${measures[m].pct}`).join(', ')}\n`,
      )
    }
  }
}
const total = MEASURES.map((measure) => `${measure} ${summary.total?.[measure].pct} %`).join(', ')
process.stdout.write(
  `coverage: ${seen - failed} of ${seen} files of core, protect, runtime, shadow and store whole; all of src: ${total}\n`,
)
if (seen < 20) throw new Error(`only ${seen} of these files were seen: the report is not of the whole suite`)
if (failed > 0) process.exitCode = 1
