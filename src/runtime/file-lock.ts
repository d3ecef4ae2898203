import { existsSync, writeFileSync } from 'node:fs'
import { DatabaseSync } from 'node:sqlite'

/** SQLite's error code for a lock that another process holds. */
const SQLITE_BUSY = 5

/**
 * Takes the lock named by `file`; the returned function releases it. Null if another process holds it; never waits.
 *
 * This is a kernel lock that SQLite takes on an empty file: it ends with its process, however that ends, and works across containers, where
 * process ids mean nothing.
 *
 * @throws if the file cannot be created, or the file system has no locks.
 */
export function lockFile(file: string): (() => void) | null {
  // Only if it does not exist: closing a file drops all locks that this process has on it.
  if (!existsSync(file)) writeFileSync(file, '', { mode: 0o600 })
  const db = new DatabaseSync(file)
  try {
    // Otherwise SQLite creates a journal file, which a killed process leaves behind.
    db.exec('PRAGMA journal_mode = MEMORY; BEGIN EXCLUSIVE')
    return () => db.close()
  } catch (error) {
    db.close()
    if ((error as { errcode?: number }).errcode === SQLITE_BUSY) return null
    throw error
  }
}
