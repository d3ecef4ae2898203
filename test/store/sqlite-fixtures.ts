import { join } from 'node:path'
import type { Test } from 'tap'
import { openSqliteStore, type SqliteOptions, type SqliteStore } from '../../src/store/sqlite/store.ts'
import { tempDir } from './fixtures.ts'

/* Stores with threads of their own. */

export function open(path: string, over: Partial<SqliteOptions> = {}): Promise<SqliteStore> {
  return openSqliteStore({ path, service: 'pay', timeoutMs: 10_000, onEvent: () => {}, ...over })
}

/** A register on a file of its own, both gone when the test ends. */
export async function opened(t: Test, over: Partial<SqliteOptions> = {}) {
  const dir = tempDir()
  const file = join(dir.path, 'records.db')
  const register = await open(file, over)
  t.teardown(async () => {
    await register.close()
    dir[Symbol.dispose]()
  })
  return { file, register }
}
