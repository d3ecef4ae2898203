import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { openStore } from '../../src/store/open.ts'
import { sealingKeyOf } from '../../src/store/record/codec.ts'
import { PLAIN_STORE } from '../store/fixtures.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream, replicas } from '../support/replicas.ts'

t.setTimeout(120_000)
t.jobs = 5

/** A body that does not compress well. */
const BODY = randomBytes(3000).toString('base64')
/** More bytes than a record without its response has, sealed and with its path. */
const WITHOUT = 600

interface Place {
  /** Lines of `store` in the configuration. */
  readonly store: string
  /** Where its records are. */
  readonly url: string
  /** The tier that answers replays: no response may be left there either. */
  readonly cache?: string
  readonly isSealed?: boolean
}

async function redis(t: Test): Promise<RedisServer> {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  return server
}

async function postgres(t: Test): Promise<PostgresServer> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  return server
}

function keyFile(t: Test): string {
  const file = join(tempDir(t), 'key')
  writeFileSync(file, randomBytes(32).toString('hex'))
  return file
}

const plain = ({ url }: { readonly url: string }): Place => ({ url, store: `url: "${url}"` })

const PLACES: Readonly<Record<string, (t: Test) => Promise<Place>>> = {
  sqlite: async (t) => plain({ url: `sqlite:${tempDir(t)}/store.db` }),
  redis: async (t) => plain(await redis(t)),
  'redis, sealed and compressed': async (t) => {
    const { url } = await redis(t)
    const sealing = `encryption: { keys: [{ id: one, file: "${keyFile(t)}" }] }, compression: zstd`
    return { url, isSealed: true, store: `url: "${url}", ${sealing}` }
  },
  ...(NO_POSTGRES
    ? {}
    : {
        postgres: async (t: Test) => plain(await postgres(t)),
        tiered: async (t: Test) => {
          const [{ url }, cache] = await Promise.all([postgres(t), redis(t)])
          const tiers = `primary: { url: "${url}" }, cache: { url: "${cache.url}" }`
          return { url, cache: cache.url, store: `url: "tiered:", ${tiers}` }
        },
      }),
}

async function raw(t: Test, service: string, url: string) {
  const store = await openStore(
    { service, store: { ...PLAIN_STORE, url } },
    { onEvent: () => {}, onBreaker: () => {} },
  )
  t.teardown(() => store.close())
  return store
}

for (const [kind, make] of Object.entries(PLACES))
  void t.test(
    `${kind}: until ttl.body retries are replayed; then they are refused, and the body is removed`,
    { buffered: true },
    async (t) => {
      const place = await make(t)
      const upstream = await heldUpstream(t, () => ({ headers: { Location: '/payments/1' }, body: BODY }))
      const proxies = await replicas(
        t,
        2,
        `
service: pay
upstream: { url: "${upstream.url}", timeout: 5s }
store: { ${place.store}, timeout: 5s }
routes: [{ name: pay, match: { path: "/*" }, ttl: { record: 10m, body: 10s } }]
`,
      )
      const [key, ask] = [newKey(), { path: '/fast' }]
      for (const [n, proxy] of [...proxies, ...proxies].entries())
        t.match(await send(proxy, key, ask), { status: 201, body: BODY, replayed: n > 0 })

      const store = await raw(t, 'pay', place.url)
      const [id] = (await store.list('all', null, 10)).ids
      if (id === undefined) throw new Error('no record')
      const sizeOf = async () => (await store.get(id)).bytes?.length ?? 0
      t.ok((await sizeOf()) > 3000)
      // Past ttl.body retries are refused, before the body is removed and after.
      for (const proxy of proxies) await until(async () => !(await send(proxy, key, ask)).replayed)
      const gone = async () => {
        for (const proxy of proxies) {
          const reply = await send(proxy, key, ask)
          t.match(reply, { status: 409, code: 'idempotency_response_unavailable', replayed: false })
          t.match(JSON.parse(reply.body), { originalStatus: 201, location: '/payments/1', retry: 'no' })
          t.match(await send(proxy, key, { ...ask, body: '{"amount":2}' }), { status: 422 })
        }
      }
      await gone()
      await until(async () => (await sizeOf()) < WITHOUT)
      await gone()
      const { bytes } = await store.get(id)
      t.equal(bytes === null ? null : sealingKeyOf(bytes), place.isSealed ? 'one' : null)
      t.same(await store.due(10, 'bodies'), [])
      if (place.cache !== undefined) {
        const cache = await raw(t, 'pay~', place.cache)
        await until(async () => ((await cache.get(id)).bytes?.length ?? 0) < 2 * WITHOUT)
      }
      t.equal(upstream.seen.length, 1)
    },
  )
