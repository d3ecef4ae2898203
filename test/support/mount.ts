import { mkdirSync, readlinkSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Test } from 'tap'
import { tempDir } from './e2e.ts'

/**
 * A volume as the kubelet mounts a ConfigMap: `..2026_x` holds the files, `..data` links to it, and each file is a link through
 * `..data`. An update creates another folder and renames a new link over `..data` (AtomicWriter in Kubernetes).
 */
export class Mount {
  readonly #folder: string
  #updates = 0

  constructor(t: Test, files: Readonly<Record<string, string>>) {
    this.#folder = tempDir(t)
    symlinkSync(this.#write(files), join(this.#folder, '..data'))
    for (const name of Object.keys(files)) symlinkSync(join('..data', name), this.file(name))
  }

  file(name: string): string {
    return join(this.#folder, name)
  }

  swap(files: Readonly<Record<string, string>>): void {
    const data = join(this.#folder, '..data')
    const before = readlinkSync(data)
    symlinkSync(this.#write(files), join(this.#folder, '..data_tmp'))
    renameSync(join(this.#folder, '..data_tmp'), data)
    rmSync(join(this.#folder, before), { recursive: true })
  }

  #write(files: Readonly<Record<string, string>>): string {
    const name = `..2026_11_21_08_00_00.${++this.#updates}`
    mkdirSync(join(this.#folder, name))
    for (const [file, text] of Object.entries(files)) writeFileSync(join(this.#folder, name, file), text)
    return name
  }
}
