import t, { type Test } from 'tap'
import { newKey, type Reply, send } from '../support/e2e.ts'
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
