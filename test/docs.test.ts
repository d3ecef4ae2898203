import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { notLive, withTables } from '../scripts/docs.ts'
import { SHADOW_FIGURES } from '../src/admin/shadow-tally.ts'
import { formatConfigError, loadConfig, profileDefaults } from '../src/config/load.ts'
import { formatDuration } from '../src/config/units.ts'
import { ALWAYS_DIFFERENT } from '../src/core/fingerprint.ts'
import { REFUSALS } from '../src/core/refusal.ts'
import { classify } from '../src/core/settle.ts'
import { METRICS } from '../src/observe/metrics.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  SHADOW_VERDICTS,
} from '../src/protect/outcomes.ts'

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

t.test('docs/errors.md lists every refusal of the proxy with its status and advice, in order', async (t) => {
  const told = rows('docs/errors.md').map(([code, status, retry]) => [code, Number(status), retry])
  const known = Object.entries(REFUSALS).map(([code, { status, retry }]) => [code, status, retry])
  t.same(told, known)
})

/** The rows that a table of outcomes makes. */
function rowsOf(table: Readonly<Record<string, { readonly says: string }>>): string[][] {
  return Object.entries(table).map(([name, { says }]) => [name, says])
}

t.test('docs/metrics.md lists every metric with its kind, labels and meaning, in order', async (t) => {
  const known = Object.entries(METRICS).map(([name, { kind, labels, help }]) => [
    name,
    kind,
    labels.join(', '),
    help,
  ])
  const values = [REQUEST_OUTCOMES, CLAIM_RESULTS, COMPLETION_RESULTS].flatMap(rowsOf)
  t.same(rows('docs/metrics.md'), [...known, ...values])
})

t.test('docs/shadow.md says when every verdict is given, and what is not compared', async (t) => {
  t.same(rows('docs/shadow.md'), rowsOf(SHADOW_VERDICTS))
  const text = readFileSync(new URL('../docs/shadow.md', import.meta.url), 'utf8').toLowerCase()
  for (const name of ALWAYS_DIFFERENT) t.ok(text.includes(`\`${name}\``), name)
  for (const name of SHADOW_FIGURES) t.ok(text.includes(` ${name.toLowerCase()}`), name)
})

t.test('docs/reconciliation.md says when every result is counted', async (t) => {
  t.same(rows('docs/reconciliation.md'), rowsOf(RECONCILE_RESULTS))
})

t.test('the index of the decisions lists every page under its title', async (t) => {
  const folder = new URL('../docs/adr/', import.meta.url)
  const index = readFileSync(new URL('README.md', folder), 'utf8')
  const listed = [...index.matchAll(/^\| \[(\d+)\]\((\S+)\) \| (.+) \| \S.* \|$/gm)]
  for (const [, number, file = '', title] of listed)
    t.equal(readFileSync(new URL(file, folder), 'utf8').split('\n', 1)[0], `# ${number}. ${title}`)
  const pages = readdirSync(folder).filter((file) => file !== 'README.md')
  t.same(
    pages.toSorted(),
    listed.map(([, , file = '']) => file),
  )
})

t.test('docs/configuration.md has the generated tables', async (t) => {
  const text = readFileSync(new URL('../docs/configuration.md', import.meta.url), 'utf8')
  t.match(text, /^# /, 'it is not empty')
  t.equal(text, withTables(text), 'run: node scripts/docs.ts')
})

t.test('docs/reload.md names every property whose change is not live', async (t) => {
  const told = rows('docs/reload.md').flatMap(([properties = '', effect]) =>
    effect === 'restart' || effect === 'identifies' ? properties.split(', ').map((one) => [one, effect]) : [],
  )
  const known = notLive()
  t.same(Object.fromEntries(told), Object.fromEntries(known))
  t.equal(told.length, known.length)
})

t.test('docs/profiles.md says what every profile decides', async (t) => {
  const none = { exact: new Map(), class: new Map() }
  const told = rows('docs/profiles.md')
  for (const [i, profile] of (['standard', 'strict', 'lenient', 'stripe'] as const).entries()) {
    const { tombstone, ...rest } = profileDefaults(profile)
    const settings: Record<string, unknown> = {
      ...rest,
      'scope.anonymous': rest.scope.anonymous,
      'key.minLength': rest.key.minLength,
      'misuse.status': rest.misuse.status,
      tombstone: tombstone === 0 ? 'off' : formatDuration(tombstone),
    }
    for (const [what = '', ...cells] of told.filter(([what]) => what !== 'setting' && what !== 'status')) {
      const status = Number(/^\d+/.exec(what.replace('xx', '99'))?.[0])
      const known = Number.isNaN(status)
        ? String(settings[what])
        : classify({ profile, outcomes: none }, status, what.includes('Retry-After'))
      t.equal(cells[i], known, `${profile}: ${what}`)
    }
  }
  t.equal(told.length, 23)
})

t.test('the configurations that documents show are accepted', async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'docs-'))
  t.teardown(() => rmSync(directory, { recursive: true }))
  const secret = join(directory, 'secret')
  writeFileSync(secret, 'x'.repeat(64))
  let seen = 0
  for (const file of ['README.md', 'docs/keys.md', 'docs/duplicates.md', 'docs/reconciliation.md']) {
    const text = readFileSync(new URL(`../${file}`, import.meta.url), 'utf8')
    for (const [, yaml = ''] of text.matchAll(/```yaml\n(.*?)```/gs)) {
      seen++
      const loaded = loadConfig({
        file,
        text: yaml,
        env: { ISSUER_SECRET_FILE: secret },
        flags: { upstream: 'http://127.0.0.1:3000' },
      })
      t.ok(loaded.ok, loaded.ok ? yaml : loaded.errors.map(formatConfigError).join('\n'))
    }
  }
  t.equal(seen, 12)
})

t.test('the main documents exist and are not stubs', async (t) => {
  for (const file of [
    'README.md',
    'docs/ARCHITECTURE.md',
    'docs/record-format.md',
    'docs/configuration.md',
    'LICENSE',
  ])
    t.ok(readFileSync(new URL(`../${file}`, import.meta.url), 'utf8').length > 500, file)
})

t.test('docs/ARCHITECTURE.md names every folder of src, and only files that exist', async (t) => {
  const source = new URL('../src/', import.meta.url)
  const page = readFileSync(new URL('../docs/ARCHITECTURE.md', import.meta.url), 'utf8')
  const named = page.matchAll(/(?<![\w/.])(?:src\/)?([a-z][a-z/-]*\.ts)\b/g)
  const files = [...named].map(([, file]) => file as string)
  t.ok(files.length > 20, `${files.length} files`)
  for (const file of files.filter((name) => !name.startsWith('test/')))
    t.ok(existsSync(new URL(file, source)), file)
  const folders = readdirSync(source, { withFileTypes: true }).filter((entry) => entry.isDirectory())
  for (const { name } of folders) t.match(page, `\`${name}/\``)
})
