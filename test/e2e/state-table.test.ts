import t, { type Test } from 'tap'
import {
  gate,
  newKey,
  onlyRecord,
  type Reply,
  redisSnapshot,
  STATE,
  send,
  stateOf,
  until,
} from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(90_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
t.beforeEach(async () => void (await redis.command('FLUSHALL')))

/** `/status/<n>` answers n, `/cut` drops the connection, `/gated…` waits for the gate. */
async function world(t: Test, more = '', upstreamUrl?: string) {
  const work = gate()
  let n = 0
  const upstream = await upstreamStub(async ({ target }, response) => {
    const answer = `execution ${++n}`
    if (target.startsWith('/cut')) return void response.destroy()
    if (target.startsWith('/gated')) await work.opened
    response.writeHead(Number(/^\/status\/(\d+)/.exec(target)?.[1] ?? 201)).end(answer)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(
    `upstream: { url: "${upstreamUrl ?? upstream.url}", timeout: 2s }
store: { url: "${redis.url}" }
drain: { timeout: 100ms }
${more}`,
  )
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return { upstream, proxy, work }
}

async function state(): Promise<number> {
  return stateOf((await onlyRecord(redis)).bytes)
}

const OTHER = '{"amount":2}'

/** Expects a refusal as §6 describes them, after which no byte of the store has changed. */
async function refused(
  t: Test,
  ask: () => Promise<Reply>,
  expected: {
    readonly status: number
    readonly code: string
    readonly retry: string
    readonly retryAfter?: true
  },
): Promise<Record<string, unknown>> {
  const before = await redisSnapshot(redis)
  const reply = await ask()
  t.strictSame(await redisSnapshot(redis), before, `${expected.code}: no byte of the store has changed`)
  t.strictSame([reply.status, reply.code], [expected.status, expected.code])
  t.equal(reply.headers.get('content-type'), 'application/problem+json')
  t.equal(reply.headers.get('cache-control'), 'no-store')
  t.notOk(reply.replayed)
  const after = reply.headers.get('retry-after')
  if (expected.retryAfter === true) t.match(after, /^[1-9]\d*$/, 'Retry-After is a whole number, at least 1')
  else t.equal(after, null)
  const body = JSON.parse(reply.body) as Record<string, unknown>
  t.match(body, {
    type: `urn:idempotency-proxy:${expected.code}`,
    title: /\S/,
    status: expected.status,
    detail: /\S/,
    code: expected.code,
    retry: expected.retry,
  })
  return body
}

void t.test(
  '§2 absent → in_progress → completed → absent: the response is kept for ttl, from completion',
  async (t) => {
    const { upstream, proxy, work } = await world(t, 'defaults: { ttl: 2s, statusHeader: true }')
    const key = newKey()
    const asked = send(proxy, key, { path: '/gated' })
    await upstream.arrived(1)
    t.equal(await state(), STATE.in_progress)
    work.open()
    const first = await asked
    t.equal(await state(), STATE.completed)
    const record = (await onlyRecord(redis)).bytes
    const expires = record.readUIntBE(44, 6)
    t.equal(expires, record.readUIntBE(38, 6) + 2000, 'from completion')
    t.equal(
      Math.floor(Date.parse(first.headers.get('idempotency-expires') as string) / 1000),
      Math.floor(expires / 1000),
    )
    const replay = await send(proxy, key, { path: '/gated' })
    t.ok(replay.replayed)
    t.equal(replay.headers.get('idempotency-expires'), first.headers.get('idempotency-expires'))
    t.strictSame((await onlyRecord(redis)).bytes, record, 'T03 a replay does not prolong it')
    await until(async () => (await redisSnapshot(redis)).size === 0)
    t.notOk((await send(proxy, key, { path: '/gated' })).replayed, 'T01 after ttl it executes again')
    t.equal(upstream.seen.length, 2)
  },
)

void t.test('§2 completed → expired where tombstones are on; another payload is still misuse', async (t) => {
  const { upstream, proxy } = await world(t, 'defaults: { ttl: 2s, tombstone: 1h }')
  const key = newKey()
  t.equal((await send(proxy, key)).status, 201)
  await until(async () => !(await send(proxy, key)).replayed)
  await refused(t, () => send(proxy, key), { status: 409, code: 'idempotency_key_expired', retry: 'no' })
  await refused(t, () => send(proxy, key, { body: OTHER }), {
    status: 422,
    code: 'idempotency_key_reused',
    retry: 'new-key',
  })
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'O01 §2 outcome uncertain → unknown: every retry is 409, misuse beats it, N stays 1',
  async (t) => {
    const { upstream, proxy } = await world(t, 'defaults: { onLeaseExpired: retry }')
    const key = newKey()
    const first = await send(proxy, key, { path: '/cut' })
    t.strictSame([first.status, first.code], [502, 'upstream_failed'])
    t.equal(await state(), STATE.unknown)
    for (let n = 0; n < 3; n++)
      await refused(t, () => send(proxy, key, { path: '/cut' }), {
        status: 409,
        code: 'idempotency_outcome_unknown',
        retry: 'same-key',
        retryAfter: true,
      })
    await refused(t, () => send(proxy, key, { path: '/cut', body: OTHER }), {
      status: 422,
      code: 'idempotency_key_reused',
      retry: 'new-key',
    })
    t.equal(upstream.seen.length, 1)
  },
)

void t.test('§2 unresolved records outlive ttl: they are kept for unresolvedTtl', async (t) => {
  const { upstream, proxy } = await world(t, 'defaults: { ttl: 2s, lease: 1s, unresolvedTtl: 1h }')
  const key = newKey()
  await send(proxy, key, { path: '/cut' })
  const { key: name, bytes } = await onlyRecord(redis)
  const left = Number(await redis.command('PEXPIRETIME', name)) - bytes.readUIntBE(38, 6)
  t.ok(left > 3_590_000 && left <= 3_600_001, `${left} ms`)
  t.equal(bytes.readUIntBE(50, 6) - bytes.readUIntBE(38, 6), 3_600_000)
  const index = [...(await redisSnapshot(redis)).keys()].filter((one) => one.endsWith(':u'))
  t.equal(index.length, 1, 'it is in the index of unresolved records')
  const seen = upstream.seen.length
  await until(
    async () =>
      Number(((await redis.command('TIME')) as string[])[0]) * 1000 > bytes.readUIntBE(38, 6) + 3000,
  )
  t.equal((await send(proxy, key, { path: '/cut' })).code, 'idempotency_outcome_unknown', 'after its ttl')
  t.equal(upstream.seen.length, seen)
})

void t.test('F01 F02 I01 §6 refusals change neither a request in flight nor a completed one', async (t) => {
  const { upstream, proxy, work } = await world(t)
  const key = newKey()
  const asked = send(proxy, key, { path: '/gated' })
  await upstream.arrived(1)
  const misuse = { status: 422, code: 'idempotency_key_reused', retry: 'new-key' } as const
  const running = await refused(t, () => send(proxy, key, { path: '/gated' }), {
    status: 409,
    code: 'idempotency_key_in_progress',
    retry: 'same-key',
    retryAfter: true,
  })
  const { key: name } = await onlyRecord(redis)
  t.ok(name.endsWith(String(running['instance'])), 'instance is the record id')
  await refused(t, () => send(proxy, key, { path: '/gated', body: OTHER }), misuse)
  work.open()
  const first = await asked
  t.equal(first.body, 'execution 1')
  await refused(t, () => send(proxy, key, { path: '/gated', body: OTHER }), misuse)
  const replay = await send(proxy, key, { path: '/gated' })
  t.strictSame([replay.replayed, replay.body], [true, 'execution 1'], 'still replayed')
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'U09 4xx responses are stored and replayed, except those that say nothing was done',
  async (t) => {
    const { upstream, proxy } = await world(t)
    for (const status of [400, 402, 404, 409, 410, 422, 451]) {
      const [key, path, n] = [newKey(), `/status/${status}`, upstream.seen.length]
      const first = await send(proxy, key, { path })
      const retry = await send(proxy, key, { path })
      t.strictSame(
        [first.status, retry.status, retry.replayed, retry.body],
        [status, status, true, first.body],
      )
      t.equal(upstream.seen.length, n + 1, `${status}: executed once`)
    }
    for (const status of [401, 403, 407, 429]) {
      const [key, path, n] = [newKey(), `/status/${status}`, upstream.seen.length]
      for (const nth of ['first', 'retry']) {
        // fetch takes a 407 for its own proxy's.
        const answer = await rawRequest(proxy.port, post(path, key, '{}', ['Authorization: Bearer alice']))
        t.equal(answer.status, status)
        t.notOk(answer.headers.includes('Idempotent-Replayed'), `${status}, ${nth}`)
      }
      t.equal(upstream.seen.length, n + 2)
    }
  },
)
