import t from 'tap'
import { openRedisStore } from '../../src/store/redis/store.ts'
import { RedisServer } from '../support/redis.ts'
import { followModel, followSome, harnessOf } from './model.ts'

t.setTimeout(300_000)

followModel(t, 4, 100)

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
