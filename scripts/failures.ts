/**
 * `.ci/run` ends with this: what failed in the last runs of the tests, a line each, and what the test said of it. The reporters print the
 * same, but thousands of lines earlier.
 */
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'

const RESULTS = '.tap/test-results'
const INDENT = 4
/** Lines printed of a failure's diagnosis, which say more than its place and the source there. */
const DIAGNOSIS = 15
const LEFT_OUT = new Set(['at', 'source'])

/** The diagnosis that begins on the line after a failed assertion: a block of YAML between `---` and `...`. */
function diagnosis(lines: readonly string[]): string[] {
  const end = lines.findIndex((line) => line.trim() === '...')
  if (lines[0]?.trim() !== '---' || end < 0) return []
  const indent = lines[0].indexOf('---')
  let key = ''
  const kept = lines.slice(1, end).filter((line) => {
    key = /^(\w+):/.exec(line.slice(indent))?.[1] ?? key
    return !LEFT_OUT.has(key)
  })
  return kept.slice(0, DIAGNOSIS)
}

/** The failed assertions of one file's TAP, and its end without a plan. */
function failuresIn(tap: string): string[] {
  const failures: string[] = []
  const titles: string[] = []
  /** By depth: how many had failed when the subtest there began. */
  const before: number[] = []
  const lines = tap.split('\n')
  for (const [at, line] of lines.entries()) {
    const depth = Math.floor(line.search(/\S/) / INDENT)
    const subtest = /^\s*# Subtest: (.*)/.exec(line)?.[1]
    if (subtest !== undefined) {
      titles.splice(depth, titles.length, subtest)
      before[depth] = failures.length
    }
    const failed = /^\s*not ok \d+ - (.*)/.exec(line)?.[1]
    if (failed === undefined || / # (?:TODO|SKIP)\b/i.test(failed)) continue
    const title = failed.replace(/ # time=.*/, '')
    // A subtest that failed because an assertion in it did.
    if (title === titles[depth] && failures.length > (before[depth] ?? 0)) continue
    const where = [...titles.slice(0, depth), title].join(' > ')
    failures.push([where, ...diagnosis(lines.slice(at + 1))].join('\n'))
  }
  if (!/^1\.\.\d+/m.test(tap)) failures.push(`did not end; last: ${lines.filter(Boolean).at(-1)?.trim()}`)
  return failures
}

for (const name of readdirSync(RESULTS, { recursive: true, encoding: 'utf8' })) {
  if (!name.endsWith('.tap')) continue
  for (const failure of failuresIn(readFileSync(join(RESULTS, name), 'utf8')))
    process.stdout.write(`FAILED ${name.replace(/\.tap$/, '')}: ${failure}\n`)
}
