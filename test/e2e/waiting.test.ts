import t, { type Test } from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { dial, post } from '../support/raw.ts'
import {
  emptyStore,
  essenceOf,
  heldUpstream,
  KINDS,
  refusalOf,
  replicas,
  waitersAre,
} from '../support/replicas.ts'

t.setTimeout(240_000)

const WAIT = 'defaults: { lease: 20s, inFlight: { mode: wait, wait: 30s } }\ndrain: { timeout: 3s }'

/** Claims of one key wait for each other, on a busy machine longer than the default timeout; a refused one would be missed for ever. */
function yamlOf(upstream: { readonly url: string }, store: string, more = WAIT): string {
  return `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}", timeout: 10s }\n${more}`
}

function many(count: number, ask: (i: number) => Promise<Reply>): Promise<Reply>[] {
  return Array.from({ length: count }, (_, i) => ask(i))
}

/** All got the bytes of one execution, exactly one of them as the live response. */
function oneAnswer(t: Test, replies: readonly Reply[], live = 1): void {
  t.equal(
    replies.filter(({ replayed }) => !replayed).length,
    live,
    'live responses; all others are marked as replays',
  )
  for (const reply of replies) t.same(essenceOf(reply), essenceOf(replies[0] as Reply))
  t.equal(replies[0]?.status, 201)
}

for (const kind of KINDS)
  void t.test(`L01 of 50 simultaneous identical POSTs one executes: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(
      yamlOf(upstream, await emptyStore(t, kind), 'drain: { timeout: 3s }'),
    )
    const key = newKey()
    const told: Reply[] = []
    const asking = many(50, () => send(proxy, key).then((reply) => (told.push(reply), reply)))
    await until(() => told.length === 49)
    for (const reply of told) t.strictSame(refusalOf(reply), [409, 'idempotency_key_in_progress'])
    upstream.finish(1)
    oneAnswer(
      t,
      (await Promise.all(asking)).filter(({ status }) => status === 201),
    )
    t.match(await send(proxy, key), { replayed: true, body: 'execution 1' })
    t.equal(upstream.seen.length, 1)
  })

for (const kind of KINDS)
  void t.test(`I02 50 duplicates are held and get the first response: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t, () => ({
      headers: { 'Set-Cookie': 'a=b; Expires=Mon, 01 Jan 2035 00:00:00 GMT' },
    }))
    const store = await emptyStore(t, kind)
    await using proxy = await proxyInProcess(yamlOf(upstream, store))
    const key = newKey()
    const first = send(proxy, key)
    await upstream.arrived(1)
    const held = many(50, () => send(proxy, key))
    await waitersAre([proxy], 50)
    const misused = await send(proxy, key, { body: '{"amount":2}' })
    t.strictSame(refusalOf(misused), [422, 'idempotency_key_reused'], 'another payload is not held')
    upstream.finish(1)
    oneAnswer(t, [await first, ...(await Promise.all(held))])
    t.equal(upstream.seen.length, 1)
    const counted = (outcome: string) =>
      proxy.metric(`idempotency_requests_total{route="default",outcome="${outcome}"}`)
    t.strictSame([await counted('executed'), await counted('waited'), await counted('misuse')], [1, 50, 1])
    await metricIs(proxy, 'idempotency_waiters', 0)
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    await metricIs(proxy, 'idempotency_in_flight', 0)
  })

for (const kind of KINDS.filter((one) => one !== 'memory'))
  void t.test(`I02 I04 L02 50 duplicates over replicas on one store get one response: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    const store = await emptyStore(t, kind)
    const all = await replicas(t, 3, yamlOf(upstream, store))
    const on = (i: number) => all[i % 3] as TestProxy
    const key = newKey()
    const replies = many(50, (i) => send(on(i), key))
    await upstream.arrived(1)
    await waitersAre(all, 49)
    upstream.finish(1)
    oneAnswer(t, await Promise.all(replies))
    oneAnswer(t, await Promise.all(all.map((one) => send(one, key))), 0)
    t.equal(upstream.seen.length, 1)
  })

/** A request on its own connection, which can be cut. */
function rawSend(proxy: TestProxy, key: string, body = '{"amount":1}') {
  const socket = dial(proxy.port, post('/pay', key, body, ['Authorization: Bearer alice'])).on(
    'error',
    () => {},
  )
  return socket
}

for (const kind of KINDS)
  void t.test(`I05 X01 clients that leave free their places, the original goes on: ${kind}`, async (t) => {
    const upstream = await heldUpstream(t)
    await using proxy = await proxyInProcess(yamlOf(upstream, await emptyStore(t, kind)))
    const key = newKey()
    const owner = rawSend(proxy, key)
    await upstream.arrived(1)
    const leaving = Array.from({ length: 5 }, () => rawSend(proxy, key))
    await waitersAre([proxy], 5)
    const stays = send(proxy, key)
    await waitersAre([proxy], 6)
    for (const socket of leaving) socket.destroy()
    owner.destroy()
    await waitersAre([proxy], 1)
    // What was held for the original and for the one that stays.
    await metricIs(proxy, 'idempotency_buffered_bytes', 2 * '{"amount":1}'.length)
    upstream.finish(1)
    t.match(await stays, { status: 201, body: 'execution 1', replayed: true })
    t.equal(upstream.seen.length, 1)
    await waitersAre([proxy], 0)
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    await metricIs(proxy, 'idempotency_in_flight', 0)
  })
