import { spawnSync } from 'node:child_process'
import { mkdtempSync, rmSync, statfsSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const SIZE = '2g'

/** A folder with its own file system where that is allowed: then it can be filled. */
export class Disk implements AsyncDisposable {
  readonly folder = mkdtempSync(join(tmpdir(), 'torture-'))
  readonly canFill: boolean

  readonly #unmount = (): void => void spawnSync('umount', ['--lazy', this.folder])

  constructor() {
    this.canFill = mount('-t', 'tmpfs', '-o', `size=${SIZE},mode=700`, 'tmpfs', this.folder)
    if (this.canFill) process.once('exit', this.#unmount)
  }

  /** Leaves hardly a page free: what is written meanwhile must fit. */
  fill(): boolean {
    for (let spare = 1; spare < 256; spare += 16) {
      const { blocks, bfree, bsize } = statfsSync(this.folder)
      // 0 would be no limit.
      if (mount('-o', `remount,size=${(blocks - bfree + spare) * bsize}`, this.folder)) return true
    }
    return false
  }

  free(): boolean {
    return mount('-o', `remount,size=${SIZE}`, this.folder)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    process.off('exit', this.#unmount)
    if (this.canFill) this.#unmount()
    rmSync(this.folder, { recursive: true, force: true })
  }
}

function mount(...args: readonly string[]): boolean {
  return spawnSync('mount', args, { stdio: 'ignore' }).status === 0
}
