import t from 'tap'
import { bank, bankRoute } from '../support/bank.ts'
import { gate, newKey, send, until } from '../support/e2e.ts'
import { emptyRedis } from '../support/redis.ts'
import { processes, replicas } from '../support/replicas.ts'

// Starting processes and backoffs take longer than tap's default.
t.setTimeout(600_000)

const redis = await emptyRedis(t)

const reconciled = (result: string): string => `idempotency_reconcile_total{route="pay",result="${result}"}`

void t.test(
  'X05 an owner paused past its lease: a reconciled completion stands, its client gets its own response',
  async (t) => {
    const upstream = await bank(t)
    const finish = gate()
    upstream.fault = async (_, response) => {
      await finish.opened
      response.writeHead(201, { 'Content-Type': 'text/plain' }).end('from the owner')
    }
    const yaml = bankRoute(upstream.url, redis.url).replace('timeout: 5s', 'timeout: 60s')
    const [owner] = await processes(t, 1, yaml)
    if (owner === undefined) throw new Error('no owner')
    const keys = { paid: newKey(), unheard: newKey() }
    upstream.fate = (key) => (key === keys.paid ? 'paid' : 'unheard')
    const first = { paid: send(owner, keys.paid), unheard: send(owner, keys.unheard) }
    // The canary arrives, too.
    await until(() => upstream.executed.length === 2)
    owner.kill('SIGSTOP')
    const [other] = await replicas(t, 1, yaml)
    if (other === undefined) throw new Error('no other')
    await until(
      async () =>
        (await other.metric(reconciled('completed'))) === 1 &&
        (await other.metric(reconciled('retryable'))) === 1,
    )
    t.equal(await other.metric('idempotency_lease_expired_total{route="pay"}'), 2)
    t.match(await send(other, keys.paid), { replayed: true, body: `{"id":"p-${keys.paid}","state":"paid"}` })
    finish.open()
    owner.kill('SIGCONT')
    for (const answer of [await first.paid, await first.unheard])
      t.match(answer, { status: 201, body: 'from the owner', replayed: false })
    t.match(await send(other, keys.paid), { replayed: true, body: `{"id":"p-${keys.paid}","state":"paid"}` })
    t.match(
      await send(other, keys.unheard),
      { replayed: true, body: 'from the owner' },
      'a late proof beats "not executed"',
    )
    t.equal(await owner.metric('idempotency_completions_total{route="pay",result="stale"}'), 1)
    t.equal(upstream.executed.length, 2)
  },
)

void t.test('when a replica is killed during a status query, another one asks later', async (t) => {
  const upstream = await bank(t)
  const asked = gate()
  let held = true
  upstream.trouble = () => {
    asked.open()
    return held
  }
  const yaml = bankRoute(upstream.url, redis.url).replace('timeout: 5s', 'timeout: 1s')
  const [doomed] = await processes(t, 1, yaml)
  if (doomed === undefined) throw new Error('no proxy')
  const key = newKey()
  await send(doomed, key)
  await asked.opened
  doomed.kill('SIGKILL')
  await doomed.exited
  held = false
  const [other] = await replicas(t, 1, yaml)
  if (other === undefined) throw new Error('no proxy')
  const retry = await send(other, key)
  t.equal(retry.code, 'idempotency_outcome_unknown')
  const wait = Number(retry.headers.get('retry-after'))
  t.ok(wait >= 1 && wait <= 7, `not wedged: Retry-After ${wait}`)
  await until(async () => (await other.metric(reconciled('completed'))) === 1)
  t.equal(upstream.asked.length, 2)
  t.match(await send(other, key), { status: 201, replayed: true })
  t.equal(upstream.executed.length, 1)
})

void t.test('three replicas query each of 1,000 unknown records once per due time', async (t) => {
  const upstream = await bank(t)
  const yaml = bankRoute(upstream.url, redis.url, { every: '2s' })
  const proxies = await processes(t, 3, yaml)
  const keys = Array.from({ length: 1000 }, newKey)
  // A first status query finds each of them processing, the second one paid.
  upstream.fate = (key) => (upstream.asked.filter((one) => one === key).length < 2 ? 'processing' : 'paid')
  const left = [...keys]
  const client = async (at: number): Promise<void> => {
    for (let key = left.pop(); key !== undefined; key = left.pop())
      await send(proxies[at % 3] as (typeof proxies)[0], key)
  }
  await Promise.all(Array.from({ length: 48 }, (_, at) => client(at)))
  t.equal(new Set(upstream.executed).size, 1000)
  const sum = async (result: string): Promise<number> =>
    (await Promise.all(proxies.map((proxy) => proxy.metric(reconciled(result))))).reduce((a, b) => a + b)
  await until(async () => (await sum('completed')) === 1000)
  const times = new Map<string, number>()
  for (const key of upstream.asked) times.set(key, (times.get(key) ?? 0) + 1)
  t.same(
    [...new Set(keys.map((key) => times.get(key)))],
    [2],
    'each of them exactly twice: once per due time',
  )
  t.equal(await sum('scheduled'), 1000)
  const shares = await Promise.all(proxies.map((proxy) => proxy.metric(reconciled('completed'))))
  t.ok(
    shares.every((share) => share > 50),
    `they share the work: ${shares.join(', ')}`,
  )
  t.match(await send(proxies[0] as (typeof proxies)[0], keys[0] as string), { status: 201, replayed: true })
  t.equal(upstream.executed.length, 1000)
})
