/**
 * The packages of scripts/tools, which only `npm run verify` and `npm run check` need: installed into node_modules/.cache as their lock
 * file says, and linked into node_modules, where everything finds them. `npm ci` clears both.
 */
import { createHash } from 'node:crypto'
import { copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, rmSync, symlinkSync } from 'node:fs'
import { basename, dirname, join } from 'node:path'
import { cached, npm } from './helm-tools.ts'

const ROOT = join(import.meta.dirname, '..')
const DECLARED = join(ROOT, 'scripts/tools')
const FILES = ['package.json', 'package-lock.json', '.npmrc']

/** Throws where the registry does not give them. */
export function installToolPackages(): void {
  const digest = createHash('sha256')
  for (const name of FILES) digest.update(readFileSync(join(DECLARED, name)))
  const folder = cached(`tools-${digest.digest('hex').slice(0, 12)}`, (making) => {
    for (const name of FILES) copyFileSync(join(DECLARED, name), join(making, name))
    npm(making, ['ci', '--ignore-scripts'])
  })
  // Links to the packages of an earlier lock file then lead nowhere, and are made anew.
  for (const name of readdirSync(join(folder, '..')))
    if (name.startsWith('tools-') && name !== basename(folder))
      rmSync(join(folder, '..', name), { recursive: true })
  const { devDependencies } = JSON.parse(readFileSync(join(DECLARED, 'package.json'), 'utf8')) as {
    devDependencies: Record<string, string>
  }
  const commands = readdirSync(join(folder, 'node_modules/.bin')).map((name) => `.bin/${name}`)
  for (const name of [...Object.keys(devDependencies), ...commands]) {
    const link = join(ROOT, 'node_modules', name)
    if (existsSync(link)) continue
    mkdirSync(dirname(link), { recursive: true })
    rmSync(link, { force: true })
    symlinkSync(join(folder, 'node_modules', name), link)
  }
}
