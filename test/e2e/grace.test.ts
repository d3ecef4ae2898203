import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { RedisKeys } from '../../src/store/redis-keys.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisPair } from '../support/redis-pair.ts'
import { type HeldUpstream, heldUpstream, replicas, waitersAre } from '../support/replicas.ts'
import { SERVICE } from '../support/service.ts'

const IN_GRACE = 'idempotency_store_in_grace{store="redis"}'
const FAST = { path: '/fast' }

interface Two {
  readonly a: TestProxy
  readonly b: TestProxy
}

async function two(t: Test, upstream: HeldUpstream, url: string, grace = '2s'): Promise<Two> {
  const yaml = `upstream: { url: "${upstream.url}" }\nstore: { url: "${url}", grace: ${grace} }\n`
  const [a, b] = await replicas(t, 2, yaml)
  if (a === undefined || b === undefined) throw new Error('two replicas')
  for (const proxy of [a, b]) await inGrace(proxy, 0)
  return { a, b }
}

async function inGrace(proxy: TestProxy, value: 0): Promise<void> {
  await until(async () => (await proxy.metric(IN_GRACE)) === value)
}

void t.test(
  'W03 a store that has replaced another one holds requests for store.grace, and no longer',
  async (t) => {
    await using redis = await RedisServer.start()
    const upstream = await heldUpstream(t)
    const { a, b } = await two(t, upstream, redis.url, '4s')
    const { epochs } = new RedisKeys(SERVICE)
    await redis.command('MSET', ...epochs.flatMap((key) => [key, `${'0'.repeat(40)} 1 2`]))
    const key = newKey()
    const answers = [a, b].map((proxy) => send(proxy, key, FAST))
    await waitersAre([a, b], 2)
    t.equal(upstream.seen.length, 0)
    const statuses = (await Promise.all(answers)).map(({ status }) => status).sort((x, y) => x - y)
    t.ok(statuses[0] === 201 && (statuses[1] === 201 || statuses[1] === 409))
    t.equal(upstream.seen.length, 1)
    await inGrace(a, 0)
    await a.logged(({ msg }) => String(msg).includes('recent claims may be lost'))
    t.match(await send(b, newKey(), FAST), { status: 201 })
  },
)

/** How often keys are executed again whose claims a promotion has lost, while their owner lives. */
async function executedAgain(t: Test, grace: string): Promise<number> {
  await using pair = await RedisPair.start()
  const upstream = await heldUpstream(t)
  const { a, b } = await two(t, upstream, pair.url, grace)
  const replicated = newKey()
  t.match(await send(a, replicated, FAST), { status: 201 })
  await pair.lag()
  const [running, ended] = [newKey(), newKey()]
  const first = send(a, running)
  await until(() => upstream.seen.length === 2)
  t.match(await send(a, ended, FAST), { status: 201 })
  await pair.promote()
  // Who has a record is answered meanwhile.
  t.match(await again(b, replicated, FAST), { status: 201, replayed: true })
  const retries = [again(b, running), again(b, ended, FAST)] as const
  if (grace === 'off') {
    await until(() => upstream.seen.length === 5)
    for (const n of [2, 4, 5]) upstream.finish(n)
    await Promise.all([first, ...retries])
  } else {
    t.match(await retries[0], { status: 409, code: 'idempotency_key_in_progress' })
    t.match(await retries[1], { status: 201, replayed: true, body: 'execution 3' })
    await a.logged(({ msg }) => String(msg).includes('written again'))
    upstream.finish(2)
    t.match(await first, { status: 201 })
    t.match(await send(b, running), { status: 201, replayed: true, body: 'execution 2' })
    t.equal(await a.metric('idempotency_split_total{route="default"}'), 0)
  }
  return upstream.seen.length - 3
}

void t.test('W01 R06 a promotion that lost the last claims executes none of them again', async (t) => {
  t.equal(await executedAgain(t, '2s'), 0)
})

void t.test('W01 without a grace it executes them again: the test can fail', async (t) => {
  t.equal(await executedAgain(t, 'off'), 2)
})

void t.test('W02 a promotion that rolled back a takeover hands it out to nobody else', async (t) => {
  await using pair = await RedisPair.start()
  const upstream = await heldUpstream(t)
  await using refusing = await proxyInProcess(
    `upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "${pair.url}", grace: 2s }\n`,
  )
  const { a, b } = await two(t, upstream, pair.url)
  const key = newKey()
  t.match(await send(refusing, key), { status: 502 }, 'nothing was sent: the key is free again')
  await pair.lag()
  const first = send(a, key)
  await until(() => upstream.seen.length === 1)
  await pair.promote()
  t.match(await again(b, key), { status: 409, code: 'idempotency_key_in_progress' })
  upstream.finish(1)
  t.match(await first, { status: 201 })
  t.match(await send(b, key), { status: 201, replayed: true })
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'W01 a flush, and a restart with an older snapshot, lose nothing that a proxy knows',
  async (t) => {
    await using redis = await RedisServer.start({ args: ['--appendonly', 'no'] })
    const upstream = await heldUpstream(t)
    const { a, b } = await two(t, upstream, redis.url)
    await redis.command('SAVE')
    for (const lose of [
      () => redis.command('FLUSHALL'),
      async () => {
        await redis.kill()
        await redis.start()
      },
    ]) {
      const before = upstream.seen.length
      const [running, done] = [newKey(), newKey()]
      const first = send(a, running)
      await until(() => upstream.seen.length === before + 1)
      t.match(await send(a, done, FAST), { status: 201 })
      await lose()
      await until(async () => (await b.metric('idempotency_store_up{store="redis"}')) === 1)
      t.match(await again(b, running), { status: 409, code: 'idempotency_key_in_progress' })
      t.match(await again(b, done, FAST), { status: 201, replayed: true })
      upstream.finish(before + 1)
      t.match(await first, { status: 201 })
      t.match(await again(b, running), { status: 201, replayed: true })
      t.equal(upstream.seen.length, before + 2)
    }
  },
)

/** Until the store is back. */
async function again(proxy: TestProxy, key: string, ask = {}) {
  let reply = await send(proxy, key, ask)
  while (reply.status === 503) {
    await wait(50)
    reply = await send(proxy, key, ask)
  }
  return reply
}

void t.test(
  'W04 an owner that was cut off for longer than the grace meets another one: a split',
  async (t) => {
    await using pair = await RedisPair.start()
    const upstream = await heldUpstream(t)
    const yaml = (url: string) =>
      `upstream: { url: "${upstream.url}" }\nstore: { url: "${url}", grace: 2s }\n`
    await using a = await proxyInProcess(yaml(pair.lateUrl))
    await using b = await proxyInProcess(yaml(pair.url))
    await inGrace(a, 0)
    await pair.lag()
    const [running, ended] = [newKey(), newKey()]
    const first = send(a, running)
    await until(() => upstream.seen.length === 1)
    t.match(await send(a, ended, FAST), { status: 201 })
    await pair.promote()
    const second = again(b, running)
    t.match(await again(b, ended, FAST), { status: 201, body: /execution [34]/ })
    await until(() => upstream.seen.length === 4)
    pair.tellLate()
    await until(async () => (await a.metric('idempotency_split_total{route="default"}')) >= 2)
    await a.logged(
      ({ msg, fence, foundFence }) =>
        String(msg).startsWith('split brain') && Number(fence) > 0 && Number(foundFence) > 0,
    )
    t.match(await send(b, running), { status: 409, code: 'idempotency_outcome_unknown' })
    t.match(
      await send(b, ended, FAST),
      { status: 201, replayed: true, body: /execution [34]/ },
      'done stays done',
    )
    for (const n of [1, 2, 3, 4]) upstream.finish(n)
    await Promise.all([first, second])
    for (const proxy of [a, b])
      t.match(
        await send(proxy, running),
        { status: 409, code: 'idempotency_outcome_unknown' },
        'neither outcome decides',
      )
    await inGrace(a, 0)
  },
)
