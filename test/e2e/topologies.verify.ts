import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { DynamoDbServer } from '../support/dynamodb.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import type { TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { essenceOf, heldUpstream, processes, replicas } from '../support/replicas.ts'

t.setTimeout(400_000)

/** What `store` says in the configuration of a proxy. Other suites run on one Redis, PostgreSQL, SQLite and memory. */
type Topology = (t: Test) => Promise<string>

function owned<Server extends AsyncDisposable>(t: Test, server: Server): Server {
  t.teardown(() => server[Symbol.asyncDispose]())
  return server
}

const TOPOLOGIES: Readonly<Record<string, Topology>> = {
  Sentinel: async (t) => `url: "${owned(t, await SentinelGroup.start()).url}"`,
  'a cluster': async (t) => `url: "${owned(t, await RedisCluster.start()).url}"`,
  DynamoDB: async (t) => `url: "${owned(t, await DynamoDbServer.start()).url}"`,
  ...(NO_POSTGRES
    ? {}
    : {
        'PostgreSQL behind a cache': async (t) => {
          const primary = owned(t, await PostgresServer.start())
          const cache = owned(t, await RedisServer.start())
          return `url: "tiered:", primary: { url: "${primary.url}" }, cache: { url: "${cache.url}" }`
        },
      }),
}

const TOKEN = 'of-an-operator'

/** All start at the same time. */
const STORES = Object.entries(TOPOLOGIES).map(([name, start]) => [name, start(t)] as const)

for (const [name, starting] of STORES)
  void t.test(`on ${name}`, async (t) => {
    const store = await starting
    const tokenFile = join(tempDir(t), 'token')
    writeFileSync(tokenFile, TOKEN)
    const yamlOf = (upstream: string, route = '') => `
service: pay
upstream: { url: "${upstream}", timeout: 30s }
admin: { listen: "127.0.0.1:0", tokenFile: "${tokenFile}" }
store: { ${store}, timeout: 10s, grace: off }
routes: [{ name: pay, match: { path: "/*" }, key: required, lease: 30s${route} }]
`
    const admin = (proxy: TestProxy, path: string, decision: object | null = null, version = '') =>
      fetch(`${proxy.adminUrl}${path}`, {
        method: decision === null ? 'GET' : 'POST',
        headers: {
          authorization: `Bearer ${TOKEN}`,
          'content-type': 'application/json',
          'if-match': version,
        },
        body: decision && JSON.stringify(decision),
      })

    await t.test('L01 L02 I01 50 requests with one key at two replicas execute once', async (t) => {
      const upstream = await heldUpstream(t)
      const proxies = await replicas(t, 2, yamlOf(upstream.url))
      const on = (n: number) => proxies[n % 2] as TestProxy
      const key = newKey()
      const first = send(on(0), key)
      await upstream.arrived(1)
      const others = await Promise.all(Array.from({ length: 49 }, (_, n) => send(on(n), key)))
      for (const other of others) t.equal(other.code, 'idempotency_key_in_progress')
      upstream.finish(1)
      const live = await first
      t.match(live, { status: 201, replayed: false, body: 'execution 1' })
      for (const n of [0, 1]) {
        const replay = await send(on(n), key)
        t.ok(replay.replayed)
        t.same(essenceOf(replay), essenceOf(live))
        t.equal((await send(on(n), key, { body: '{"amount":2}' })).code, 'idempotency_key_reused')
        const bob = await send(on(n), key, { path: '/fast', headers: { authorization: `Bearer bob${n}` } })
        t.match(bob, { status: 201, replayed: false }, 'another caller')
      }
      t.equal(upstream.seen.length, 3)
    })

    await t.test('O01 a killed owner leaves unknown records, which an operator resolves', async (t) => {
      const upstream = await heldUpstream(t)
      const route = yamlOf(upstream.url)
        .replace('timeout: 10s', 'timeout: 1s')
        .replace('lease: 30s', 'lease: 3s')
      const [owner] = await processes(t, 1, route)
      const [proxy] = (await replicas(t, 1, route)) as [TestProxy]
      const [key, other] = [newKey(), newKey()]
      const lost = [key, other].map((one) => send(owner as TestProxy, one).catch(() => null))
      await upstream.arrived(2)
      owner?.child.kill('SIGKILL')
      await Promise.all(lost)
      for (const one of [key, other])
        await until(async () => (await send(proxy, one)).code === 'idempotency_outcome_unknown')
      const listed = async (state: string) => {
        const page = await (await admin(proxy, `/v1/records?state=${state}`)).json()
        return (page as { records: { id: string }[] }).records
      }
      await until(async () => (await listed('unknown')).length === 2)
      const [one, two] = (await listed('unknown')).map(({ id }) => id)
      let version = ''
      const decide = (id: string | undefined, outcome: object) =>
        admin(proxy, `/v1/records/${id}/resolve`, outcome, version)
      /** The sweeper may be writing `unknown` at the same time. */
      const insist = (id: string | undefined, outcome: object) =>
        until(async () => {
          version = String((await admin(proxy, `/v1/records/${id}`)).headers.get('etag'))
          return (await decide(id, outcome)).status === 200
        })
      const response = { status: 201, headers: [['Content-Type', 'text/plain']], body: 'by hand' }
      await insist(one, { outcome: 'completed', response })
      t.equal((await decide(one, { outcome: 'retryable' })).status, 412, 'that version is gone')
      await insist(two, { outcome: 'retryable' })
      upstream.finish(3)
      const answers = await Promise.all([key, other].map((each) => send(proxy, each)))
      t.same(answers.map(({ body }) => body).toSorted(), ['by hand', 'execution 3'])
      t.equal(upstream.seen.length, 3)
    })
  })
