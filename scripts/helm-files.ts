/**
 * Copies dashboards/*.json and alerts/rules.yaml into the observability chart, since a chart cannot read outside its folder.
 *
 *   node scripts/helm-files.ts            # after a change to dashboards or alerts
 *   node scripts/helm-files.ts --check    # exit 1 if a copy differs from its source
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'

const ROOT = join(import.meta.dirname, '..')
const FILES = join(ROOT, 'helm/idempotency-proxy-observability/files')

const dashboards = (folder: string): string[] =>
  existsSync(folder) ? readdirSync(folder).filter((name) => name.endsWith('.json')) : []
const text = (file: string): string | null => (existsSync(file) ? readFileSync(file, 'utf8') : null)

const names = new Set([...dashboards(join(ROOT, 'dashboards')), ...dashboards(join(FILES, 'dashboards'))])
const pairs = [
  ...[...names].sort().map((name) => [`dashboards/${name}`, `dashboards/${name}`] as const),
  ['alerts/rules.yaml', 'rules.yaml'] as const,
]
const stale = pairs.filter(([source, copy]) => text(join(ROOT, source)) !== text(join(FILES, copy)))

if (process.argv.includes('--check')) {
  for (const [source] of stale)
    process.stderr.write(`${source} differs from the chart's copy: run node scripts/helm-files.ts\n`)
  process.exitCode = stale.length === 0 ? 0 : 1
} else
  for (const [source, copy] of stale) {
    const found = text(join(ROOT, source))
    const target = join(FILES, copy)
    if (found === null) rmSync(target)
    else {
      mkdirSync(dirname(target), { recursive: true })
      writeFileSync(target, found)
    }
  }
