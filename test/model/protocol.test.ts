import { join } from 'node:path'
import t, { type Test } from 'tap'
import { memoryStore } from '../../src/store/memory.ts'
import { openPostgresStore } from '../../src/store/postgres.ts'
import { openRedisStore } from '../../src/store/redis.ts'
import { openSqliteStore } from '../../src/store/sqlite.ts'
import type { Harness } from '../store/contract.ts'
import { tempDir } from '../store/fixtures.ts'
import { PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { type Exploration, explore, sample } from './explore.ts'
import { protocol } from './promises.ts'
import { MISTAKES, type Rules, STEPS, type Step } from './protocol.ts'
import { namesCode, replay } from './replay.ts'
import { VARIANTS } from './variants.ts'

t.setTimeout(600_000)

const PLAIN = VARIANTS(2)['plain'] as Rules
/** Ways that the memory store is taken, and one over a socket or a file. */
const MANY = 800
const SOME = 100

for (const [name, rules] of Object.entries(VARIANTS(2)))
  void t.test(
    `two requests, ${name}: no way leads to what the contract forbids, and the code goes the same ways`,
    async (t) => {
      const found = explore(protocol(rules))
      t.equal(found.broken, null)
      const harness = forgetful()
      for (const path of sample(found, MANY)) await replay(harness, path, rules)
      t.comment(`${found.states} states, ${found.steps} steps`)
    },
  )

void t.test('every mistake is found', async (t) => {
  for (const mistake of MISTAKES) {
    const find = (): Exploration<Step>['broken'] => {
      for (const name of ['plain', 'a failover with grace', 'a failover with grace on some replicas only']) {
        const { broken } = explore(protocol({ ...(VARIANTS(2)[name] as Rules), mistake }))
        if (broken !== null) return broken
      }
      return null
    }
    const broken = find()
    t.not(broken, null, mistake)
    t.comment(`${mistake}: ${broken?.what}: ${broken?.trace.join(', ')}`)
  }
})

void t.test('the code that a step names is there', async (t) => {
  for (const [name, where] of Object.entries(STEPS)) t.ok(namesCode(where), name)
})

async function follow(t: Test, harness: Pick<Harness, 'register' | 'advance'>): Promise<void> {
  for (const path of sample(explore(protocol(PLAIN)), SOME)) await replay(harness, path, PLAIN)
  t.pass()
}

const onEvent = (): void => {}

void t.test('sqlite goes the same ways', async (t) => {
  using dir = tempDir()
  const path = join(dir.path, 'r.db')
  const register = await openSqliteStore({ path, service: 'pay', timeoutMs: 10_000, onEvent })
  let skew = 0
  await follow(t, { register, advance: (ms) => void (register.skew = skew += ms) })
  await register.close()
})

void t.test('redis goes the same ways', async (t) => {
  await using server = await RedisServer.start()
  let skew = 0
  const options = { url: server.url, service: 'pay', timeoutMs: 10_000, onEvent, skew: () => skew }
  const register = await openRedisStore(options)
  await follow(t, { register, advance: (ms) => void (skew += ms) })
  await register.close()
})

void t.test('postgres goes the same ways', async (t) => {
  await using server = await PostgresServer.start()
  let skew = 0
  const options = { url: server.url, service: 'pay', timeoutMs: 10_000, onEvent, skew: () => skew }
  const register = await openPostgresStore(options)
  await follow(t, { register, advance: (ms) => void (skew += ms) })
  await register.close()
})

function forgetful(): Pick<Harness, 'register' | 'advance'> {
  let now = 1_795_000_000_000
  const register = memoryStore({ clock: () => now, maxBytes: Number.MAX_SAFE_INTEGER })
  return { register, advance: (ms) => void (now += ms) }
}
