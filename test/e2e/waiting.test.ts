import { once } from 'node:events'
import { createServer } from 'node:https'
import type { AddressInfo } from 'node:net'
import { connect } from 'node:net'
import t from 'tap'
import { certificate } from '../support/certificates.ts'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post } from '../support/raw.ts'
import { relay } from '../support/relay.ts'
import {
  emptyStore,
  heldUpstream,
  KINDS,
  recordsIn,
  refusalOf,
  replicas,
  waitersAre,
} from '../support/replicas.ts'
import { many, oneAnswer, WAIT, yamlOf } from '../support/waiting.ts'

t.setTimeout(240_000)

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
    // Claims of one key wait for each other, on a busy machine longer than the default timeout.
    const patient = yamlOf(upstream, store).replace(`"${store}"`, `"${store}", timeout: 10s`)
    const all = await replicas(t, 3, patient)
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

for (const status of [425, 202])
  void t.test(`I03 past the wait limit a duplicate gets ${status} and Retry-After`, async (t) => {
    const upstream = await heldUpstream(t)
    const policy = `defaults: { inFlight: { mode: wait, wait: 300ms, status: ${status} } }`
    const [owner, other] = await replicas(t, 2, yamlOf(upstream, await emptyStore(t, 'sqlite'), policy))
    if (!owner || !other) throw new Error('two are started')
    const key = newKey()
    const first = send(owner, key)
    await upstream.arrived(1)
    for (const reply of await Promise.all([send(owner, key), send(other, key)])) {
      t.strictSame(refusalOf(reply), [status, 'idempotency_key_in_progress'])
      t.match(JSON.parse(reply.body), { retry: 'same-key', status })
      t.match(reply.headers.get('retry-after'), /^[1-9]\d*$/)
      t.ok(Number(reply.headers.get('retry-after')) <= 30)
      t.notOk(reply.replayed)
    }
    for (const proxy of [owner, other])
      t.equal(await proxy.metric('idempotency_requests_total{route="default",outcome="in_progress"}'), 1)
    upstream.finish(1)
    t.match(await first, { status: 201, body: 'execution 1', replayed: false })
    t.ok((await send(other, key)).replayed)
    t.equal(upstream.seen.length, 1)
  })

/** A request on its own connection, which can be cut. */
function rawSend(proxy: TestProxy, key: string, body = '{"amount":1}') {
  const socket = connect(proxy.port, '127.0.0.1')
  socket.on('error', () => {})
  socket.write(post('/pay', key, body, ['Authorization: Bearer alice']))
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

void t.test('I05 bodies of waiting duplicates count in limits.buffered', async (t) => {
  const upstream = await heldUpstream(t)
  const store = await emptyStore(t, 'sqlite')
  await using proxy = await proxyInProcess(
    yamlOf(upstream, store, `${WAIT}\nlimits: { buffered: 350KiB, request: 200KiB, response: 100KiB }`),
  )
  const body = JSON.stringify('x'.repeat(100 * 1024 - 2))
  const key = newKey()
  const first = send(proxy, key, { body })
  await upstream.arrived(1)
  const held = many(2, () => send(proxy, key, { body }))
  await waitersAre([proxy], 2)
  t.equal(await proxy.metric('idempotency_buffered_bytes'), 300 * 1024)
  const before = await recordsIn(store)
  const another = newKey()
  for (const one of [key, another]) {
    const refused = await send(proxy, one, { body })
    t.strictSame(refusalOf(refused), [503, 'overloaded'])
    t.match(refused.headers.get('retry-after'), /^[1-9]\d*$/)
    t.match(JSON.parse(refused.body), { retry: 'same-key' })
  }
  t.strictSame(await recordsIn(store), before, 'nothing is claimed')
  upstream.finish(1)
  oneAnswer(t, [await first, ...(await Promise.all(held))])
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  t.equal(upstream.seen.length, 1)
  upstream.finish(2)
  t.match(await send(proxy, another, { body }), { status: 201, body: 'execution 2', replayed: false })
})

const FREED = [
  {
    how: 'the upstream says not-applied',
    answer: { status: 200, headers: { 'Idempotency-Outcome': 'not-applied' }, body: 'nothing done' },
    count: 1,
  },
  { how: 'the status releases the key', answer: { status: 401, body: 'who are you' }, count: 1 },
  { how: 'they wait on three replicas', answer: { status: 429, body: 'later' }, count: 3 },
] as const

for (const kind of KINDS)
  for (const { how, answer, count } of FREED) {
    if (kind === 'memory' && count > 1) continue
    void t.test(`I02 exactly one waiting duplicate takes over where ${how}: ${kind}`, async (t) => {
      const upstream = await heldUpstream(t, (n) => (n === 1 ? answer : {}))
      const all = await replicas(t, count, yamlOf(upstream, await emptyStore(t, kind)))
      const on = (i: number) => all[i % count] as TestProxy
      const key = newKey()
      const first = send(on(0), key)
      await upstream.arrived(1)
      const gone = rawSend(on(1), key)
      await waitersAre(all, 1)
      const held = many(12, (i) => send(on(i), key))
      await waitersAre(all, 13)
      gone.destroy()
      await waitersAre(all, 12)
      upstream.finish(1)
      t.match(await first, { status: answer.status, body: answer.body, replayed: false })
      t.equal((await first).headers.get('idempotency-outcome'), null, 'removed')
      await upstream.arrived(2)
      await waitersAre(all, 11)
      upstream.finish(2)
      const replies = await Promise.all(held)
      oneAnswer(t, replies)
      t.equal(replies[0]?.body, 'execution 2')
      t.equal(upstream.seen.length, 2)
      t.match(await send(on(2), key), { body: 'execution 2', replayed: true })
      await waitersAre(all, 0)
    })
  }

void t.test('I02 U12 one waiting duplicate takes over where the first request was never sent', async (t) => {
  using cert = certificate('IP:127.0.0.1')
  let n = 0
  const https = createServer({ cert: cert.cert, key: cert.key }, (request, response) => {
    request.resume().on('end', () => response.writeHead(201).end(`execution ${++n}`))
  }).listen(0, '127.0.0.1')
  await once(https, 'listening')
  t.teardown(() => https.close())
  await using between = await relay((https.address() as AddressInfo).port)
  between.holdReplies = true
  let hello = false
  between.onReply = () => {
    hello = true
  }
  await using proxy = await proxyInProcess(
    `upstream: { url: "https://127.0.0.1:${between.port}", connectTimeout: 20s, tls: { ca: "${cert.certFile}" } }
store: { url: "memory:" }
${WAIT}`,
  )
  const key = newKey()
  const first = send(proxy, key)
  await until(() => hello)
  const held = many(10, () => send(proxy, key))
  await waitersAre([proxy], 10)
  between.holdReplies = false
  between.cut()
  t.strictSame(refusalOf(await first), [502, 'upstream_unreachable'])
  const replies = await Promise.all(held)
  oneAnswer(t, replies)
  t.equal(n, 1, 'one of two attempts was sent')
})

void t.test('X04 in a drain waiting duplicates get the response before it ends', async (t) => {
  const upstream = await heldUpstream(t)
  const [proxy] = (await replicas(t, 1, yamlOf(upstream, 'memory:'))) as [TestProxy]
  const key = newKey()
  const replies = [send(proxy, key)]
  await upstream.arrived(1)
  replies.push(...many(10, () => send(proxy, key)))
  await waitersAre([proxy], 10)
  const drained = proxy.drain()
  upstream.finish(1)
  oneAnswer(t, await Promise.all(replies))
  await drained
  t.equal(upstream.seen.length, 1)
})

void t.test('X05 a drain ends a replica whose duplicates wait for another one', async (t) => {
  const upstream = await heldUpstream(t)
  const store = await emptyStore(t, 'sqlite')
  const [owner] = (await replicas(t, 1, yamlOf(upstream, store))) as [TestProxy]
  const [ending] = (await replicas(t, 1, yamlOf(upstream, store, WAIT.replace('3s', '10ms')))) as [TestProxy]
  const key = newKey()
  const first = send(owner, key)
  await upstream.arrived(1)
  const held = many(5, () => send(ending, key))
  await waitersAre([ending], 5)
  await ending.drain()
  t.equal(upstream.seen.length, 1, 'while the original still runs elsewhere')
  for (const reply of await Promise.all(held)) {
    t.strictSame(refusalOf(reply), [409, 'idempotency_key_in_progress'])
    t.match(reply.headers.get('retry-after'), /^[1-9]\d*$/)
  }
  upstream.finish(1)
  t.match(await first, { status: 201, body: 'execution 1' })
  t.ok((await send(owner, key)).replayed)
  t.equal(upstream.seen.length, 1)
})
