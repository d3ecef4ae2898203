import { spawnSync } from 'node:child_process'
import { cpSync, rmSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

export const ROOT = fileURLToPath(new URL('..', import.meta.url))

/** Builds the JavaScript into a folder, as `npm run build` does into dist; where that fails it says why, and the process ends. */
export function build(into: string): void {
  rmSync(into, { recursive: true, force: true })
  const args = ['-p', join(ROOT, 'tsconfig.build.json'), '--outDir', into]
  const tsc = spawnSync(process.execPath, [join(ROOT, 'node_modules/typescript/bin/tsc'), ...args])
  if (tsc.status !== 0) {
    process.stderr.write(`${tsc.error?.message ?? ''}${tsc.stdout.toString()}${tsc.stderr.toString()}`)
    process.exit(1)
  }
  for (const folder of ['store/lua', 'admin/page'])
    cpSync(join(ROOT, 'src', folder), join(into, folder), { recursive: true })
}
