import type { Socket } from 'node:net'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { StoreConfig } from '../../src/config/config.ts'
import type { Millis } from '../../src/core/record.ts'
import type { StoreHooks } from '../../src/store/around.ts'
import { openStores } from '../../src/store/open.ts'
import { readStamps } from '../../src/store/record/codec.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { RedisServer } from '../support/redis.ts'
import { bytesOf, newId, newToken, PLAIN_STORE, SPANS, tempDir, until } from './fixtures.ts'

/* How the parts of a store are connected: its breaker, its grace and its cache. */

const HOOKS: StoreHooks = { onEvent: () => {}, onBreaker: () => {} }
const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`

async function open(t: Test, own: Partial<StoreConfig> & { readonly url: string }, hooks = HOOKS) {
  const { to: store } = await openStores({ service: 'pay', store: { ...PLAIN_STORE, ...own } }, hooks)
  t.teardown(() => store.close())
  return store
}

/** A Redis whose scripts and clock are refused, except that it says how long it holds claims. */
async function holding(t: Test) {
  const says = { left: 1 }
  const waiting: Socket[] = []
  const server = await fake(
    t,
    greeting(([name, ...args], socket) => {
      if (name === 'info') return bulk('run_id:0a\r\n')
      if (name === 'waitaof') {
        waiting.push(socket)
        return null
      }
      const keys = args.slice(2, 2 + Number(args[1]))
      if (name !== 'evalsha' || !keys[0]?.endsWith(':e')) return '-NOPERM no\r\n'
      return `*${2 * keys.length + 1}\r\n${keys.map(() => `:${says.left}\r\n:7\r\n`).join('')}:${args.at(-1)}\r\n`
    }),
  )
  return { says, waiting, ...server }
}

void t.test('only a store that holds claims closes the breaker', async (t) => {
  const clock = frozenClock(t)
  const { url, says, waiting } = await holding(t)
  const held: Millis[] = []
  const states: string[] = []
  const opening = open(
    t,
    // To open it, this waits for an answer.
    { url, grace: 4000, timeout: 2000, wait: { replicas: 'none', disk: 'local', timeout: 10 } },
    { ...HOOKS, onHeld: (left) => void held.push(left), onBreaker: (state) => void states.push(state) },
  )
  // Before there is a breaker.
  await clock.passUntil(() => held.includes(1) && waiting.length > 0)
  waiting[0]?.write('*2\r\n:1\r\n:0\r\n')
  const store = await opening
  says.left = 0
  await clock.passUntil(() => held.at(-1) === 0)
  for (let n = 0; n < 5; n++) await t.rejects(store.get(newId()), { name: 'StoreUnavailable' })
  const before = held.length
  await clock.passUntil(
    () => states.filter((state) => state === 'half_open').length >= 2 && held.length > before + 2,
  )
  t.notOk(states.includes('closed'), 'probes fail, and to hold nothing shows nothing')
  says.left = 1
  await clock.passUntil(() => states.includes('closed'))
})

void t.test('a cache is asked for no grace', async (t) => {
  using dir = tempDir()
  const asked: string[] = []
  const { url } = await fake(
    t,
    greeting(([name = '']) => {
      asked.push(name)
      return '-NOPERM no\r\n'
    }),
  )
  const file = `sqlite:${join(dir.path, 'records.db')}`
  await open(t, { url: file, cache: { url }, grace: 5000 })
  t.strictSame(asked, [])
})

void t.test('a cache that does not answer is waited for a moment only', async (t) => {
  using dir = tempDir()
  const asked: string[] = []
  const { url } = await fake(
    t,
    greeting(([name = '']) => {
      asked.push(name)
      return null
    }),
  )
  const timeout = 60_000
  const store = await open(t, {
    url: `sqlite:${join(dir.path, 'records.db')}`,
    cache: { url },
    timeout,
  })
  const [id, token] = [newId(), newToken()]
  t.ok((await store.put(id, bytesOf('completed', token), SPANS)).done)
  const began = performance.now()
  for (let n = 0; n < 2; n++) t.notOk((await store.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
  t.ok(performance.now() - began < timeout / 2)
  t.ok(asked.includes('evalsha'))
})

void t.test('entries of a cache count only for those who have the secret', async (t) => {
  using dir = tempDir()
  await using redis = await RedisServer.start()
  const url = `sqlite:${join(dir.path, 'records.db')}`
  const plain = await open(t, { url })
  const secret = Buffer.alloc(32, 1)
  const cached = (secret: Buffer | null) => open(t, { url, cache: { url: redis.url }, secret })
  const claims = (store: typeof plain, id: ReturnType<typeof newId>) =>
    store.put(id, bytesOf('in_progress', newToken()), SPANS)
  const keys = () => redis.command('KEYS', '*') as Promise<string[]>
  const [id, token] = [newId(), newToken()]
  const owner = await cached(secret)
  await owner.put(id, bytesOf('completed', token), SPANS)
  t.notOk((await claims(owner, id)).done)
  await until(async () => (await keys()).some((key) => key.includes(id)))
  const [other, none, same] = [await cached(Buffer.alloc(32, 2)), await cached(null), await cached(secret)]
  // The cache is asked only for what a process has seen completed.
  for (const store of [other, none, same]) t.notOk((await claims(store, id)).done)
  const { bytes } = await plain.get(id)
  const remove = async () => plain.remove(id, readStamps((await plain.get(id)).bytes as Buffer).version)
  t.ok(bytes !== null && (await remove()))
  for (const store of [other, none]) {
    t.ok((await claims(store, id)).done)
    t.ok(await remove())
  }
  t.notOk((await claims(same, id)).done, 'whoever has it is answered')
})
