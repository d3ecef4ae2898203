import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { gate, newKey, onlyRecord, STATE, send, stateOf, until } from '../support/e2e.ts'
import { RedisServer } from '../support/redis.ts'
import { replicas } from '../support/replicas.ts'
import { steppingClock } from '../support/stepping-clock.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

/** An upstream that refuses its first POST to `/twice`, holds all others, and finds nothing when queried. */
async function world(t: Test) {
  const redis = await RedisServer.start()
  t.teardown(() => redis[Symbol.asyncDispose]())
  const clock = await steppingClock(redis.port)
  t.teardown(() => clock[Symbol.asyncDispose]())
  const work = gate()
  const executed: string[] = []
  let asked = 0
  const upstream = await upstreamStub(async ({ method, target }, response) => {
    if (method === 'GET') {
      asked++
      return void response.writeHead(404).end()
    }
    if (target === '/twice' && executed.length === 0) {
      executed.push('turned away')
      return void response.writeHead(429).end()
    }
    const answer = `execution ${executed.push(target)}`
    await work.opened
    response.writeHead(201).end(answer)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const [a, b] = await replicas(
    t,
    2,
    `upstream: { url: "${upstream.url}", timeout: 60s }
store: { url: "redis://127.0.0.1:${clock.port}" }
drain: { timeout: 100ms }
routes:
  - name: pay
    match: { path: /pay }
    lease: 15s
    reconcile:
      request: { method: GET, path: "/pay?key={key}" }
      identity: { /key: "{key}" }
      completed: { status: 200 }
      notFound: { status: 404 }
      every: 1s
  - { name: twice, match: { path: /twice } }
`,
  )
  if (a === undefined || b === undefined) throw new Error('two replicas')
  return { redis, clock, work, executed, asked: () => asked, a, b }
}

const state = async (redis: RedisServer): Promise<number> => stateOf((await onlyRecord(redis)).bytes)

void t.test("V08 a healthy owner gets its record back after Redis' clock stepped by 90 s: N=1", async (t) => {
  const { redis, clock, work, executed, asked, a, b } = await world(t)
  const key = newKey()
  const first = send(a, key)
  await until(() => executed.length === 1)
  clock.skew = 90_000
  t.equal((await send(b, key)).code, 'idempotency_outcome_unknown', 'by that clock the lease has expired')
  await until(async () => (await state(redis)) === STATE.unknown)
  await until(() => asked() > 0)
  // The owner renews its lease every five seconds.
  await until(async () => (await state(redis)) === STATE.in_progress)
  t.equal((await send(b, key)).code, 'idempotency_key_in_progress')
  clock.skew = 0
  t.equal((await send(b, key)).code, 'idempotency_key_in_progress', 'after the step back')
  work.open()
  const { status, body } = await first
  t.strictSame([status, body], [201, 'execution 1'])
  const retry = await send(b, key)
  t.strictSame([retry.body, retry.replayed], [body, true])
  t.equal(executed.length, 1)
})

void t.test(
  '§2 Redis rolls back to a snapshot during an attempt: retries get 409, the outcome is kept',
  async (t) => {
    const { redis, work, executed, a, b } = await world(t)
    const key = newKey()
    const ask = { path: '/twice' }
    t.equal((await send(a, key, ask)).status, 429)
    const { key: name } = await onlyRecord(redis)
    const snapshot = await dumped(redis, name)
    const second = send(a, key, ask)
    await until(() => executed.length === 2)
    await redis.command('RESTORE', name, 100_000, snapshot, 'REPLACE')
    t.equal(await state(redis), STATE.failed_retryable)
    const [one, two] = await Promise.all([send(a, key, ask), send(a, key, ask)])
    t.strictSame([one.code, two.code], ['idempotency_key_in_progress', 'idempotency_key_in_progress'])
    t.equal((await send(b, key, ask)).code, 'idempotency_key_in_progress', 'the attempt has its record back')
    await redis.command('RESTORE', name, 100_000, snapshot, 'REPLACE')
    work.open()
    const { status, body } = await second
    t.equal(status, 201)
    for (const proxy of [a, b]) {
      const retry = await send(proxy, key, ask)
      t.strictSame([retry.body, retry.replayed], [body, true])
    }
    t.equal(executed.length, 2, 'the refused one, and one more')
    t.equal(await a.metric('idempotency_completions_total{route="twice",result="recovered"}'), 1)
  },
)

async function dumped(redis: RedisServer, name: string): Promise<Buffer> {
  const client = new Redis(redis.url)
  try {
    return await client.dumpBuffer(name)
  } finally {
    client.disconnect()
  }
}
