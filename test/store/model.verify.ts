import { join } from 'node:path'
import t from 'tap'
import { openRedisStore } from '../../src/store/redis.ts'
import { RedisServer } from '../support/redis.ts'
import { memoryHarness, tempDir } from './fixtures.ts'
import { EVENTS, followAll, followSome, harnessOf } from './model.ts'
import { open } from './sqlite-fixtures.ts'

t.setTimeout(300_000)

const DEPTH = 4

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
  await followSome(harness, 100)
  t.pass()
})

void t.test('redis: generated sequences end as the contract says', async (t) => {
  await using server = await RedisServer.start()
  let skew = 0
  const { url } = server
  const register = await openRedisStore({
    url,
    service: 'pay',
    timeoutMs: 10_000,
    onEvent() {},
    skew: () => skew,
  })
  await using harness = harnessOf(register, (ms) => void (skew += ms))
  await followSome(harness, 150)
  t.pass()
})
