import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import t from 'tap'
import { bytesOf, newId, newToken, SPANS, tempDir } from './fixtures.ts'
import { open, opened, ready } from './sqlite-fixtures.ts'

/* Threads that wait for the lock of a file, which another process would have. */

void t.test('opening a locked file waits up to the timeout', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const other = new DatabaseSync(file, { timeout: 10_000 })
  other.exec('BEGIN EXCLUSIVE')
  await t.rejects(open(file, { timeoutMs: 2 }), { name: 'StoreUnavailable', message: /locked/ })
  const waiting = open(file, { timeoutMs: 200 })
  setTimeout(() => other.exec('COMMIT'), 150)
  const register = await waiting
  await ready(register)
  await register.close()
  other.close()
})

void t.test('a write waits for its turn while another process writes', async (t) => {
  const { file, register } = await opened(t)
  const other = new DatabaseSync(file)
  other.exec('BEGIN IMMEDIATE')
  setTimeout(() => other.exec('COMMIT'), 200)
  t.ok((await register.put(newId(), bytesOf('in_progress', newToken()), SPANS)).done)
  other.close()
})

void t.test('a write to a file that another process keeps locked is not applied', async (t) => {
  const { file, register } = await opened(t, { timeoutMs: 400 })
  await ready(register)
  const other = new DatabaseSync(file, { timeout: 10_000 })
  other.exec('BEGIN IMMEDIATE')
  const id = newId()
  await t.rejects(async () => register.put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /locked/,
  })
  t.equal((await register.get(id)).bytes, null, 'reads still work')
  other.exec('COMMIT')
  other.close()
  t.ok((await register.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
})
