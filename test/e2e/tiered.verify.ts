import t from 'tap'
import { IDENTIFICATION_MARK } from '../../src/store/moving/phases.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import type { TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { essenceOf, heldUpstream, replicas } from '../support/replicas.ts'

t.setTimeout(120_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

async function tests(): Promise<void> {
  const postgres = await PostgresServer.start()
  t.teardown(() => postgres[Symbol.asyncDispose]())
  const redis = await RedisServer.start()
  t.teardown(() => redis[Symbol.asyncDispose]())
  const yaml = (upstream: string, port: number) => `
service: pay
upstream: { url: "${upstream}" }
store: { url: "tiered:", timeout: 5s, primary: { url: "postgres://owner@127.0.0.1:${port}/records" }, cache: { url: "${redis.url}" } }
routes: [{ name: pay, match: { path: "/*" }, key: required }]
`
  const entries = async () => (await redis.command('KEYS', 'idempotency:pay~:*:r:*')) as string[]
  const recorded = async () =>
    Number(
      (
        await postgres.sql(`SELECT count(*) FROM idempotency.records WHERE id <> '${IDENTIFICATION_MARK}'`)
      )[0]?.[0],
    )

  void t.test(
    'W10 tiered: replays come from Redis; flushed, overwritten or dead, it makes no key execute again',
    async (t) => {
      const link = await relay(postgres.port)
      t.teardown(() => link[Symbol.asyncDispose]())
      const upstream = await heldUpstream(t)
      const [proxy, other] = (await replicas(t, 2, yaml(upstream.url, link.port))) as [TestProxy, TestProxy]
      const key = newKey()
      const ask = { path: '/fast' }
      const first = await send(proxy, key, ask)
      t.match(first, { status: 201, replayed: false })
      const same = async (by = proxy) => {
        const reply = await send(by, key, ask)
        t.ok(reply.replayed)
        t.same(essenceOf(reply), essenceOf(first))
      }
      await until(async () => (await entries()).length === 1)
      t.equal(await recorded(), 1)
      await same(other)
      // Without PostgreSQL only the cache can answer.
      link.accept = false
      link.cut()
      await same()
      t.match(
        await send(proxy, key, { ...ask, body: '{"amount":2}' }),
        { status: 422 },
        'the guard still compares payloads',
      )
      t.match(await send(proxy, key, { ...ask, headers: { authorization: 'Bearer bob' } }), { status: 503 })
      link.accept = true
      for (const one of [proxy, other])
        await until(async () => (await send(one, newKey(), ask)).status === 201)

      await redis.command('FLUSHALL')
      await same()
      await until(async () => (await entries()).length > 0)
      const [entry = ''] = await entries()
      await redis.command('SET', entry, 'something else')
      await same()
      await redis.command('FLUSHALL')
      await same()
      await redis.kill()
      await same()
      await same(other)
      const executed = upstream.seen.length
      const next = newKey()
      t.match(await send(proxy, next, ask), { status: 201, replayed: false })
      t.match(await send(proxy, next, ask), { status: 201, replayed: true })
      t.equal(upstream.seen.length, executed + 1)
      const own = upstream.seen.filter(({ headers }) => headers.includes(key))
      t.equal(own.length, 1, 'one execution, whatever happened to the cache')
    },
  )
}
