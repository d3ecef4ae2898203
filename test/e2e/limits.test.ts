import t, { type Test } from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import type { TestProxy } from '../support/proxy.ts'
import { emptyStore, heldUpstream, KINDS, recordsIn, refusalOf, replicas } from '../support/replicas.ts'

t.setTimeout(200_000)

function yamlOf(upstream: { readonly url: string }, store: string, more: string): string {
  return `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\ndrain: { timeout: 3s }\n${more}`
}

const FAST = { path: '/fast' }

function limited(t: Test, reply: Reply, what: string): void {
  t.strictSame(refusalOf(reply), [429, 'rate_limited'], what)
  t.match(reply.headers.get('retry-after'), /^[1-9]\d*$/, what)
  t.match(JSON.parse(reply.body), { retry: 'same-key', status: 429 })
}

/** With `newKeys: 3/h`. */
async function threeKeys(t: Test, all: readonly TestProxy[], store: string, seen: readonly unknown[]) {
  const on = (i: number) => all[i % all.length] as TestProxy
  const keys = [newKey(), newKey(), newKey()]
  for (const [i, key] of keys.entries()) t.equal((await send(on(i), key, FAST)).status, 201)
  const before = await recordsIn(store)
  const late = newKey()
  for (const proxy of all) {
    limited(t, await send(proxy, late, FAST), 'a fourth key')
    limited(t, await send(proxy, newKey(), FAST), 'a fifth key')
  }
  t.strictSame(await recordsIn(store), before, 'nothing is claimed')
  t.equal(seen.length, 3, 'the upstream is not asked')

  for (let i = 0; i < 10; i++) {
    const replay = await send(on(i), keys[i % 3] as string, FAST)
    t.ok(replay.replayed, 'a replay is never limited')
    const misuse = await send(on(i), keys[0] as string, { ...FAST, body: '{}' })
    t.equal(misuse.status, 422)
  }
  t.equal((await send(on(0), null, FAST)).status, 201, 'nor is a request without a key')
  const other = { ...FAST, headers: { authorization: 'Bearer bob' } }
  t.match(await send(on(1), late, other), { status: 201, replayed: false }, 'nor another caller')
  t.ok((await send(on(0), late, other)).replayed)
  limited(t, await send(on(0), late, FAST), 'still limited')
  t.equal(seen.length, 5)
}

for (const kind of KINDS)
  void t.test(`§10 limits.newKeys bounds a caller across replicas: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const count = kind === 'memory' ? 1 : 2
    const all = await replicas(t, count, yamlOf(upstream, store, 'limits: { newKeys: 3/h }'))
    const on = (i: number) => all[i % count] as TestProxy
    await threeKeys(t, all, store, upstream.seen)
    const refused = '{route="default",outcome="rate_limited"}'
    const counts = await Promise.all(all.map((one) => one.metric(`idempotency_requests_total${refused}`)))
    t.strictSame(counts, count === 1 ? [3] : [3, 2])

    const before = upstream.seen.length
    const bursting = { ...FAST, headers: { authorization: 'Bearer carol' } }
    const burst = await Promise.all(Array.from({ length: 30 }, (_, i) => send(on(i), newKey(), bursting)))
    t.equal(burst.filter(({ status }) => status === 201).length, 3, 'three of a burst')
    for (const reply of burst) if (reply.status !== 201) limited(t, reply, 'the rest')
    t.equal(upstream.seen.length, before + 3)
  })

for (const kind of KINDS)
  void t.test(`§10 L01 duplicates of a new key count once against limits.newKeys: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const [proxy] = await replicas(t, 1, yamlOf(upstream, store, 'limits: { newKeys: 3/h }'))
    if (!proxy) throw new Error('one is started')
    const key = newKey()
    const burst = await Promise.all(Array.from({ length: 20 }, () => send(proxy, key, FAST)))
    for (const { status, code } of burst) t.ok(status === 201 || status === 409, `${status} ${code}`)
    t.equal(upstream.seen.length, 1)
    // Together they count as one key.
    for (const more of [newKey(), newKey()]) t.equal((await send(proxy, more, FAST)).status, 201)
    limited(t, await send(proxy, newKey(), FAST), 'a fourth key')
  })

for (const kind of KINDS)
  void t.test(
    `§10 limits.newKeys can be set per route, does not count retries of released keys, and refills: ${kind}`,
    async (t) => {
      const upstream = await heldUpstream(t, (_, { target }) =>
        target === '/fast/no' ? { status: 429 } : {},
      )
      const store = await emptyStore(t, kind)
      const [proxy] = await replicas(
        t,
        1,
        yamlOf(
          upstream,
          store,
          `limits: { newKeys: 1/h }
routes:
  - { name: own, match: { path: "/fast/own" }, limits: { newKeys: 1/s } }
  - { name: off, match: { path: "/fast/off" }, limits: { newKeys: off } }`,
        ),
      )
      if (!proxy) throw new Error('one is started')
      const at = (path: string, key = newKey()) => send(proxy, key, { path })
      for (let i = 0; i < 5; i++) t.equal((await at('/fast/off')).status, 201)
      const key = newKey()
      for (let i = 0; i < 5; i++)
        t.match(await at('/fast/no', key), { status: 429, code: null, body: `execution ${6 + i}` })
      limited(t, await at('/fast/no'), 'another key')
      await metricIs(proxy, 'idempotency_claims_total{route="default",result="failed_retry"}', 4)

      t.equal((await at('/fast/own')).status, 201, 'a rate of its own')
      const late = newKey()
      await until(async () => {
        const reply = await at('/fast/own', late)
        if (reply.status !== 201) t.equal(reply.headers.get('retry-after'), '1')
        return reply.status === 201
      })
    },
  )
