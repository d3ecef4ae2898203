/** `node scripts/assembly.ts` compiles assembly/ into a module of src/ (docs/adr/0072). A test compares them. */
import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const ROOT = fileURLToPath(new URL('..', import.meta.url))
const SOURCE = 'assembly/json-usual.ts'
export const MODULE = join(ROOT, 'src/core/body/json-usual-wasm.ts')

/** No objects, no strings, nothing imported: one memory of a fixed size, in pages of 64 KiB. */
const OPTIONS =
  '-O3 --noAssert --enable simd --runtime stub --use abort= --initialMemory 9 --maximumMemory 9'.split(' ')

export function compiled(): string {
  const folder = mkdtempSync(join(tmpdir(), 'assembly-'))
  try {
    const outFile = join(folder, 'out.wasm')
    const compiler = join(ROOT, 'node_modules/assemblyscript/bin/asc.js')
    execFileSync(process.execPath, [compiler, SOURCE, ...OPTIONS, '--outFile', outFile], { cwd: ROOT })
    const text = readFileSync(outFile, 'base64')
    return `/** Made of ${SOURCE} by scripts/assembly.ts. */\nexport const MODULE =\n  '${text}'\n`
  } finally {
    rmSync(folder, { recursive: true })
  }
}

if (import.meta.main) writeFileSync(MODULE, compiled())
