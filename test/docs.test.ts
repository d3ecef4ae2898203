import { readFileSync } from 'node:fs'
import t from 'tap'
import { REFUSALS } from '../src/core/refusal.ts'
import { METRICS } from '../src/observe/metrics.ts'
import { configurationDoc } from './support/configuration-doc.ts'

/** The rows of a Markdown file's tables, cells without backticks. */
function rows(file: string): string[][] {
  return readFileSync(new URL(`../${file}`, import.meta.url), 'utf8')
    .split('\n')
    .filter((line) => line.startsWith('| `'))
    .map((line) =>
      line
        .slice(1, -1)
        .split('|')
        .map((cell) => cell.trim().replaceAll('`', '')),
    )
}

t.test('docs/errors.md lists every answer of the proxy with its status and advice, in order', async (t) => {
  const told = rows('docs/errors.md').map(([code, status, retry]) => [code, Number(status), retry])
  const known = Object.entries(REFUSALS).map(([code, { status, retry }]) => [code, status, retry])
  t.same(told, known)
})

t.test('docs/metrics.md lists every metric with its kind, labels and meaning, in order', async (t) => {
  const known = Object.entries(METRICS).map(([name, { kind, labels, help }]) => [
    name,
    kind,
    labels.join(', '),
    help,
  ])
  t.same(rows('docs/metrics.md'), known)
})

t.test('docs/configuration.md is what the schema says', async (t) => {
  const text = readFileSync(new URL('../docs/configuration.md', import.meta.url), 'utf8')
  t.equal(text, configurationDoc(), 'run: node scripts/docs.ts > docs/configuration.md')
})

t.test('the documents that others point to are there', async (t) => {
  for (const file of [
    'README.md',
    'docs/ARCHITECTURE.md',
    'docs/record-format.md',
    'docs/configuration.md',
    'LICENSE',
  ])
    t.ok(readFileSync(new URL(`../${file}`, import.meta.url), 'utf8').length > 500, file)
})
