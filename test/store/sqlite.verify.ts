import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { bytesOf, newId, newToken, SPANS, tempDir, until } from './fixtures.ts'
import { open, opened } from './sqlite-fixtures.ts'

/* Processes that are killed, and thousands of records while threads move them from the journal to the table. */

t.setTimeout(280_000)

const MODULE = new URL('../../src/store/sqlite/store.ts', import.meta.url).href

/** Makes a record of almost 4 KiB: 2,000 of them fill the journal. */
const LONG = { lastError: 'x'.repeat(3600) }

function program(body: string, file: string, uid?: number) {
  const source = `
    import { openSqliteStore } from '${MODULE}'
    const register = await openSqliteStore({ path: ${JSON.stringify(file)}, service: 'pay', timeoutMs: 10_000, onEvent() {} })
    ${body}`
  const process_ = spawn(process.execPath, ['--input-type=module', '-e', source], {
    stdio: ['ignore', 'pipe', 'pipe'],
    ...(uid === undefined ? {} : { uid, gid: uid }),
  })
  let stderr = ''
  process_.stderr.on('data', (chunk) => (stderr += chunk))
  return {
    process: process_,
    said: once(process_.stdout, 'data').then(([chunk]) => chunk as Buffer),
    exited: once(process_, 'exit').then(([code]) => code as number | null),
    stderr: () => stderr,
  }
}

void t.test('acknowledged records survive kill -9 while records move to the table', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const child = program(
    `const bytes = Buffer.from('${bytesOf('in_progress', newToken(), LONG).toString('base64')}', 'base64')
     const outcome = Buffer.from('${bytesOf('completed', newToken(), { fence: 7 }).toString('base64')}', 'base64')
     for (let n = 0; ; n++) {
       const id = String(n).padStart(43, 'x')
       const put = register.put(id, bytes, { dueIn: 1000, dropIn: 1e9 }).then(async ({ stamp }) => {
         process.stdout.write('put ' + id + '\\n')
         await register.swap(id, { version: stamp.version }, outcome, { dueIn: 1000, dropIn: 1e9 }, false)
         process.stdout.write('end ' + id + '\\n')
       })
       if (n % 200 === 0) await put
     }`,
    file,
  )
  let said = ''
  child.process.stdout.on('data', (chunk: Buffer) => (said += chunk.toString()))
  await until(() => said.length > 2 * 48 * 3000)
  child.process.kill('SIGKILL')
  await child.exited
  const register = await open(file)
  const lost: string[] = []
  for (const line of said.split('\n').slice(0, -1)) {
    const { bytes } = await register.get(line.slice(4) as RecordId)
    if (bytes === null || (line.startsWith('end') && decodeRecord(bytes).state !== 'completed'))
      lost.push(line)
  }
  t.same(lost, [])
  await register.close()
})

void t.test(
  'a read-only file or folder is refused at open',
  { skip: process.getuid?.() !== 0 },
  async (t) => {
    using dir = tempDir()
    const file = join(dir.path, 'records.db')
    await (await open(file)).close()
    chmodSync(dir.path, 0o755)
    chmodSync(file, 0o444)
    const NOBODY = 65534
    for (const path of [file, join(dir.path, 'new.db')]) {
      const child = program(`process.stdout.write('opened')`, path, NOBODY)
      child.said.catch(() => {})
      t.not(await child.exited, 0)
      t.match(child.stderr(), /StoreUnavailable.*cannot open the store/)
    }
  },
)

void t.test('a flood does not make the journal grow without bound', async (t) => {
  const { file, register } = await opened(t)
  const bytes = bytesOf('in_progress', newToken())
  for (let n = 0; n < 60; n++)
    await Promise.all(Array.from({ length: 2000 }, async () => register.put(newId(), bytes, SPANS)))
  const db = new DatabaseSync(file, { readOnly: true })
  t.teardown(() => db.close())
  const { left } = db.prepare('SELECT sum(length(entries)) AS left FROM journal').get() as { left: number }
  t.ok(left < 40_000 * bytes.length, `${Math.round(left / bytes.length)} records are in the journal`)
})
