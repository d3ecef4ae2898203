import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { RedisKeys } from '../../src/store/redis/keys.ts'
import { KEPT_FOR } from '../../src/store/safety.ts'
import { adminYaml, ask } from '../support/admin.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { NO_POSTGRES } from '../support/postgres.ts'
import { PostgresPair } from '../support/postgres-pair.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisPair } from '../support/redis-pair.ts'
import { type HeldUpstream, heldUpstream, replicas, waitersAre } from '../support/replicas.ts'
import { SERVICE } from '../support/service.ts'
import { upstreamStub } from '../support/upstream.ts'

const FAST = { path: '/fast' }
/** Promotions are slow on a busy machine. */
t.setTimeout(600_000)

interface Pair extends AsyncDisposable {
  readonly url: string
  /** From now on nothing reaches the replica. */
  lag(): Promise<unknown>
  /** Promotes the replica; what it lacks is lost. */
  promote(): Promise<unknown>
}
const PAIRS: Readonly<Record<string, () => Promise<Pair>>> = {
  redis: () => RedisPair.start(),
  ...(NO_POSTGRES ? {} : { postgres: () => PostgresPair.start() }),
}
if (NO_POSTGRES) void t.test('the grace on PostgreSQL', { skip: NO_POSTGRES }, () => {})

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
  await until(async () => {
    const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
    return new RegExp(`^idempotency_store_in_grace\\{.*\\} ${value}$`, 'm').test(text)
  })
}

void t.test('W03 after a store was replaced, requests are held for store.grace and no longer', async (t) => {
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
})

/** How often keys execute again after a promotion lost their claims, while their owner lives. */
async function executedAgain(t: Test, start: () => Promise<Pair>, grace: string): Promise<number> {
  await using pair = await start()
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
  // A key that has a record is answered meanwhile.
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

/** How often a key executes after a promotion lost its takeover, while its owner lives. */
async function takenOver(t: Test, start: () => Promise<Pair>, grace: string): Promise<number> {
  await using pair = await start()
  const upstream = await heldUpstream(t)
  await using refusing = await proxyInProcess(
    `upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "${pair.url}", grace: ${grace} }\n`,
  )
  const { a, b } = await two(t, upstream, pair.url, grace)
  const key = newKey()
  t.match(await send(refusing, key), { status: 502 }, 'nothing was sent: the key is free again')
  await pair.lag()
  const first = send(a, key)
  await until(() => upstream.seen.length === 1)
  await pair.promote()
  const second = again(b, key)
  if (grace === 'off') {
    await until(() => upstream.seen.length === 2)
    for (const n of [1, 2]) upstream.finish(n)
    await Promise.all([first, second])
  } else {
    t.match(await second, { status: 409, code: 'idempotency_key_in_progress' })
    upstream.finish(1)
    t.match(await first, { status: 201 })
    t.match(await send(b, key), { status: 201, replayed: true })
  }
  return upstream.seen.length
}

const BREAK = { path: '/break' }

/** Two operators' decisions that a promotion lost, and one made right after it. */
async function decisions(t: Test, start: () => Promise<Pair>, grace: string): Promise<void> {
  await using pair = await start()
  const upstream = await upstreamStub(({ target }, response) => {
    if (target === BREAK.path && upstream.seen.length <= 3) return void response.destroy()
    response.writeHead(201).end('done at last')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = `${adminYaml(t)}\nupstream: { url: "${upstream.url}" }\nstore: { url: "${pair.url}", grace: ${grace} }\n`
  const [a, b] = (await replicas(t, 2, yaml)) as [TestProxy, TestProxy]
  for (const proxy of [a, b]) await inGrace(proxy, 0)
  const keys = [newKey(), newKey(), newKey()] as const
  const ids: string[] = []
  for (const key of keys) {
    const { code, body } = await send(a, key, BREAK)
    t.equal(code, 'upstream_failed')
    ids.push((JSON.parse(body) as { instance: string }).instance)
  }
  const [done, free, later] = ids as [string, string, string]
  await pair.lag()
  const resolve = async (proxy: TestProxy, id: string, body: object): Promise<void> => {
    await until(async () => {
      const shown = await ask(proxy, `/v1/records/${id}`)
      const headers = { 'if-match': shown.headers.get('etag') ?? '' }
      return (await ask(proxy, `/v1/records/${id}/resolve`, { method: 'POST', headers, body })).status === 200
    })
  }
  const completed = { outcome: 'completed', response: { status: 200, body: 'by hand' } }
  await resolve(a, done, completed)
  await resolve(a, free, { outcome: 'retryable' })
  await pair.promote()
  await resolve(b, later, completed)
  t.match(
    await again(b, keys[2], BREAK),
    { status: 200, replayed: true, body: 'by hand' },
    'decided during the grace',
  )
  if (grace === 'off') {
    for (const key of keys.slice(0, 2))
      t.match(await again(b, key, BREAK), { status: 409, code: 'idempotency_outcome_unknown' })
    return
  }
  await until(async () => (await again(b, keys[0], BREAK)).replayed)
  t.match(await again(b, keys[0], BREAK), { status: 200, replayed: true, body: 'by hand' })
  await until(async () => (await again(b, keys[1], BREAK)).status === 201)
  t.equal(upstream.seen.length, 4, 'the freed key executes once, the completed one never again')
}

for (const [kind, start] of Object.entries(PAIRS)) {
  void t.test(`W01 R06 ${kind}: no key executes again after a promotion lost its claim`, async (t) => {
    t.equal(await executedAgain(t, start, '2s'), 0)
  })

  void t.test(`W01 ${kind}: without a grace lost claims execute again: the test can fail`, async (t) => {
    t.equal(await executedAgain(t, start, 'off'), 2)
  })

  void t.test(`W02 ${kind}: a takeover that a promotion rolled back goes to nobody else`, async (t) => {
    t.equal(await takenOver(t, start, '2s'), 1)
  })

  void t.test(`W02 ${kind}: without a grace a lost takeover executes twice: the test can fail`, async (t) => {
    t.equal(await takenOver(t, start, 'off'), 2)
  })

  void t.test(`W02 ${kind}: an operator's decision that a promotion lost is written again`, async (t) =>
    decisions(t, start, '2s'),
  )

  void t.test(`W02 ${kind}: without a grace, an operator's decision is lost: the test can fail`, async (t) =>
    decisions(t, start, 'off'),
  )
}

void t.test('W01 a flush or a restart from an older snapshot loses nothing that a proxy knows', async (t) => {
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
})

void t.test('W01 an outage longer than outcomes are remembered loses none of them', async (t) => {
  await using redis = await RedisServer.start({ args: ['--appendonly', 'no'] })
  const upstream = await heldUpstream(t)
  const { a, b } = await two(t, upstream, redis.url)
  await redis.command('SAVE')
  const key = newKey()
  t.match(await send(a, key, FAST), { status: 201 })
  await redis.kill()
  await wait(KEPT_FOR + 1000)
  await redis.start()
  t.match(await again(b, key, FAST), { status: 201, replayed: true })
  t.equal(upstream.seen.length, 1)
})

/** Retries until the store is back. */
async function again(proxy: TestProxy, key: string, ask = {}) {
  let reply = await send(proxy, key, ask)
  while (reply.status === 503) {
    await wait(50)
    reply = await send(proxy, key, ask)
  }
  return reply
}

void t.test(
  'W04 an owner cut off for longer than the grace finds another owner: a split brain',
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
      'completed stays completed',
    )
    for (const n of [1, 2, 3, 4]) upstream.finish(n)
    await Promise.all([first, second])
    for (const proxy of [a, b])
      t.match(
        await send(proxy, running),
        { status: 409, code: 'idempotency_outcome_unknown' },
        'neither outcome wins',
      )
    await inGrace(a, 0)
  },
)
