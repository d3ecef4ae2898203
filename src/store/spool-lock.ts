import { join } from 'node:path'
import { lockFile } from '../runtime/file-lock.ts'

const NAME = 'spool.lock'

/** Keeps every other process away from the directory, until it is called; else as {@link lockFile}. */
export function lock(directory: string): (() => void) | null {
  return lockFile(join(directory, NAME))
}

export function isLockName(name: string): boolean {
  return name === NAME
}
