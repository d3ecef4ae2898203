/**
 * Prints the software bill of materials of the production packages, the only ones that the bundle contains:
 * `npm run --silent sbom [-- spdx]`. Reads nothing but package-lock.json.
 *
 * `npm sbom --omit=dev` (npm 11) also leaves out packages that a dev dependency shares, such as `yaml` and `debug`. So npm gets a project
 * without dev dependencies.
 */
import { spawnSync } from 'node:child_process'
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

interface Lock {
  packages: Record<string, { readonly dev?: boolean; devDependencies?: unknown }>
}

function read(name: string): string {
  return readFileSync(new URL(`../${name}`, import.meta.url), 'utf8')
}

const { devDependencies: _, ...manifest } = JSON.parse(read('package.json')) as {
  name: string
  devDependencies: unknown
}
const lock = JSON.parse(read('package-lock.json')) as Lock
lock.packages = Object.fromEntries(Object.entries(lock.packages).filter(([, { dev }]) => dev !== true))
delete lock.packages['']?.devDependencies

const place = mkdtempSync(join(tmpdir(), 'sbom-'))
try {
  // npm names the project after its folder.
  const folder = join(place, manifest.name)
  mkdirSync(folder)
  writeFileSync(join(folder, 'package.json'), JSON.stringify(manifest))
  writeFileSync(join(folder, 'package-lock.json'), JSON.stringify(lock))
  const format = process.argv[2] ?? 'cyclonedx'
  const args = ['sbom', '--package-lock-only', '--sbom-type=application', `--sbom-format=${format}`]
  const { status } = spawnSync('npm', args, { cwd: folder, stdio: 'inherit' })
  process.exitCode = status ?? 1
} finally {
  rmSync(place, { recursive: true })
}
