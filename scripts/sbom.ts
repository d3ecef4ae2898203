/**
 * Prints the software bill of materials of what is installed in production: `npm run --silent sbom [-- spdx]`. Read from
 * package-lock.json alone, as `npm ci --omit=dev` in the Dockerfile is.
 *
 * `npm sbom --omit=dev` (npm 11) leaves out what a dev dependency needs as well, `yaml` and `debug` among them. So npm is
 * given a project that has no dev dependencies.
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
  // npm calls the project by the name of its folder.
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
