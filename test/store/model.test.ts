import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { openRedisStore } from '../../src/store/redis.ts'
import { openSqliteStore } from '../../src/store/sqlite.ts'
import { RedisServer } from '../support/redis.ts'
import { memoryHarness, tempDir } from './fixtures.ts'
import { EVENTS, type Event, follow } from './model.ts'

const DEPTH = 4

for (const start of [[], ['claim']] satisfies Event[][])
  void t.test(
    `memory: every sequence of ${DEPTH} events after ${start[0] ?? 'nothing'} ends as it should`,
    async (t) => {
      let count = 0
      async function extend(sequence: readonly Event[]): Promise<void> {
        if (sequence.length < start.length + DEPTH)
          for (const event of EVENTS) await extend([...sequence, event])
        else {
          await follow(memoryHarness(), sequence)
          count++
        }
      }
      await extend(start)
      t.equal(count, EVENTS.length ** DEPTH)
    },
  )

const sequences = fc.array(fc.constantFrom(...EVENTS), { minLength: 3, maxLength: 14, size: 'max' })
const onEvent = () => {}

void t.test('sqlite: generated sequences end as the contract says', async (t) => {
  using dir = tempDir()
  const register = await openSqliteStore({
    path: join(dir.path, 'r.db'),
    service: 'pay',
    timeoutMs: 10_000,
    onEvent,
  })
  let skew = 0
  const advance = (ms: number) => void (register.skew = skew += ms)
  await using harness = {
    register,
    peer: register,
    other: null,
    tellsPeers: true,
    advance,
    [Symbol.asyncDispose]: () => register.close(),
  }
  await fc.assert(
    fc.asyncProperty(sequences, (events) => follow(harness, events)),
    { numRuns: 100 },
  )
  t.pass()
})

void t.test('redis: generated sequences end as the contract says', async (t) => {
  await using server = await RedisServer.start()
  let skew = 0
  const register = await openRedisStore({
    url: server.url,
    service: 'pay',
    timeoutMs: 10_000,
    onEvent,
    skew: () => skew,
  })
  const advance = (ms: number) => void (skew += ms)
  await using harness = {
    register,
    peer: register,
    other: null,
    tellsPeers: true,
    advance,
    [Symbol.asyncDispose]: () => register.close(),
  }
  await fc.assert(
    fc.asyncProperty(sequences, (events) => follow(harness, events)),
    { numRuns: 150 },
  )
  t.pass()
})
