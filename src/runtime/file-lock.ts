import { existsSync, writeFileSync } from 'node:fs'
import { DatabaseSync } from 'node:sqlite'

/** What SQLite says of a lock that another process has. */
const SQLITE_BUSY = 5

/**
 * Takes the lock that `file` stands for, until what it gives is called. The lock is one of the kernel's, taken by SQLite on an
 * empty file: it ends with its process, however that ends, and holds between containers, in which process ids say nothing.
 * null: somebody else has it. Waits for nothing.
 * @throws where the file cannot be made, or the file system has no locks.
 */
export function lockFile(file: string): (() => void) | null {
  // Not where it is there: to close a file ends all locks that this process has on it.
  if (!existsSync(file)) writeFileSync(file, '', { mode: 0o600 })
  const db = new DatabaseSync(file)
  try {
    // Without it a journal would be made, and left behind by a process that is killed.
    db.exec('PRAGMA journal_mode = MEMORY; BEGIN EXCLUSIVE')
    return () => db.close()
  } catch (error) {
    db.close()
    if ((error as { errcode?: number }).errcode === SQLITE_BUSY) return null
    throw error
  }
}
