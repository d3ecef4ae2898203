import t from 'tap'
import { newKey, send, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { essenceOf, heldUpstream, processes, replicas } from '../support/replicas.ts'
import { valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

const yamlOf = (upstream: string, port: number, more = '', timeout = '500ms') => `
service: pay
upstream: { url: "${upstream}", connectTimeout: 30s }
store: { url: "postgres://owner@127.0.0.1:${port}/records", timeout: ${timeout} }
routes:
  - { name: pay, match: { path: "/pay/*" }, key: required, lease: 30s${more} }
`

/** How often the upstream was asked, by key. */
function executionsOf(seen: readonly { headers: readonly string[] }[]): Map<string, number> {
  const counts = new Map<string, number>()
  for (const one of seen) {
    const key = valueOf(one, 'idempotency-key')
    counts.set(key, (counts.get(key) ?? 0) + 1)
  }
  return counts
}

async function tests(): Promise<void> {
  const server = await PostgresServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())

  void t.test(
    'two replicas race for one key: one execution, one response for all, byte for byte',
    async (t) => {
      const upstream = await heldUpstream(t)
      const proxies = await replicas(
        t,
        2,
        yamlOf(upstream.url, server.port, ', inFlight: { mode: wait, wait: 30s }', '10s'),
      )
      for (let round = 1; round <= 5; round++) {
        const key = newKey()
        const asked = Array.from({ length: 20 }, (_, n) =>
          send(proxies[n % 2] as (typeof proxies)[0], key, { path: '/pay/slow' }),
        )
        await upstream.arrived(round)
        upstream.finish(round)
        const replies = await Promise.all(asked)
        t.same([...new Set(replies.map((reply) => JSON.stringify(essenceOf(reply))))].slice(1), [])
        t.match(replies[0], { status: 201, body: `execution ${round}` })
      }
      t.equal(upstream.seen.length, 5, 'executions at the upstream')
    },
  )

  void t.test('the store is killed again and again under load: no key is executed twice', async (t) => {
    const upstream = await heldUpstream(t)
    const proxies = await processes(t, 2, yamlOf(upstream.url, server.port))
    const keys: string[] = []
    const load = { isOn: true }
    const worker = async (n: number): Promise<void> => {
      while (load.isOn) {
        const key = newKey()
        keys.push(key)
        await Promise.all(
          [0, 1].map((m) =>
            send(proxies[(n + m) % 2] as (typeof proxies)[0], key, { path: '/pay/fast' }).catch(() => {}),
          ),
        )
      }
    }
    const workers = [0, 1, 2, 3].map(worker)
    for (let round = 0; round < 3; round++) {
      const seen = upstream.seen.length
      await until(() => upstream.seen.length > seen + 20)
      await server.kill()
      await server.start()
    }
    const seen = upstream.seen.length
    await until(() => upstream.seen.length > seen + 20)
    load.isOn = false
    await Promise.all(workers)
    for (const [key, count] of executionsOf(upstream.seen))
      if (count > 1) t.fail(`${key} was executed ${count} times`)
    t.ok(keys.length > 80)
  })

  void t.test('after lost replies, retries execute no key twice', async (t) => {
    const wire = await relay(server.port)
    t.teardown(() => wire[Symbol.asyncDispose]())
    const upstream = await heldUpstream(t)
    const [cut, whole] = [
      ...(await replicas(t, 1, yamlOf(upstream.url, wire.port))),
      ...(await replicas(t, 1, yamlOf(upstream.url, server.port))),
    ]
    if (cut === undefined || whole === undefined) throw new Error('no proxies')
    for (let n = 0; n < 12; n++) {
      const key = newKey()
      // Each round loses the replies from a later point on.
      let left = n
      wire.onReply = () => {
        if (left-- <= 0) wire.passReplies = false
      }
      await send(cut, key, { path: '/pay/fast' }).catch(() => {})
      wire.onReply = () => {}
      wire.passReplies = true
      wire.cut()
      for (const proxy of [cut, whole, cut]) await send(proxy, key, { path: '/pay/fast' }).catch(() => {})
    }
    for (const [key, count] of executionsOf(upstream.seen))
      if (count > 1) t.fail(`${key} was executed ${count} times`)
    t.ok(upstream.seen.length > 0)
  })
}
