import { join } from 'node:path'
import t from 'tap'
import { memoryHarness, tempDir } from './fixtures.ts'
import { EVENTS, followAll, followSome, harnessOf } from './model.ts'
import { open } from './sqlite-fixtures.ts'

/* Longer sequences, and Redis: model.verify.ts. */

const DEPTH = 3

for (const start of [[], ['claim']] as const)
  void t.test(
    `memory: every ${DEPTH} events after ${start[0] ?? 'nothing'} end as the contract says`,
    async (t) => {
      await using harness = memoryHarness()
      t.equal(await followAll(harness, start, DEPTH), EVENTS.length ** DEPTH)
    },
  )

void t.test('sqlite: generated sequences end as the contract says', async (t) => {
  using dir = tempDir()
  const register = await open(join(dir.path, 'r.db'))
  let skew = 0
  await using harness = harnessOf(register, (ms) => void (register.skew = skew += ms))
  await followSome(harness, 15)
  t.pass()
})
