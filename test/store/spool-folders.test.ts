import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { workerFolder, workerFolders } from '../../src/store/spool/folders.ts'
import { readSpool } from '../../src/store/spool/log.ts'
import { tempDir } from '../support/e2e.ts'

void t.test('the folders of workers are found in a spool, in order, and are not strange to it', async (t) => {
  const spool = join(tempDir(t), 'spool')
  t.strictSame(await workerFolders(spool), [], 'there is no spool yet')
  for (const number of [10, 2, 1]) mkdirSync(workerFolder(spool, number), { recursive: true })
  mkdirSync(join(spool, 'worker-x'))
  t.strictSame(await workerFolders(spool), [1, 2, 10])
  const said: unknown[] = []
  await readSpool(spool, (_message, detail) => said.push(detail))
  t.strictSame(said, [{ files: ['worker-x'] }])
  writeFileSync(join(spool, 'file'), '')
  await t.rejects(workerFolders(join(spool, 'file')), { code: 'ENOTDIR' })
})
