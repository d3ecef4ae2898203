import t, { type Test } from 'tap'
import { type Bank, bank, bankRoute } from '../support/bank.ts'
import { gate, newKey, send, until } from '../support/e2e.ts'
import { RedisServer } from '../support/redis.ts'
import { ALL_STORES, processes, replicas, STORES, storeUrl } from '../support/replicas.ts'
import { emptyPostgres } from '../support/shared.ts'

// Starting processes and backoffs take longer than tap's default.
t.setTimeout(600_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
const postgres = await emptyPostgres(t)

const reconciled = (result: string): string => `idempotency_reconcile_total{route="pay",result="${result}"}`

for (const kind of ALL_STORES) {
  void t.test(
    `O02 ${kind}: when the reconciler finds the request done, the next retry replays the result`,
    async (t) => {
      const upstream = await bank(t)
      const [proxy] = await replicas(t, 1, bankRoute(upstream.url, storeUrl(t, kind, redis, postgres)))
      if (proxy === undefined) throw new Error('no proxy')
      const key = `${newKey()} /?&'{record}`
      const first = await send(proxy, key)
      t.equal(first.code, 'upstream_failed')
      const early = await send(proxy, key)
      t.ok(early.code === 'idempotency_outcome_unknown' || early.replayed)
      await until(async () => (await proxy.metric(reconciled('completed'))) === 1)
      const retry = await send(proxy, key)
      t.match(retry, { status: 201, replayed: true, body: `{"id":"p-${key}","state":"paid"}` })
      t.equal(retry.headers.get('content-type'), 'application/json')
      t.ok(retry.headers.get('date'))
      t.equal(retry.headers.get('x-inner'), null)
      const again = await send(proxy, key)
      t.same([again.status, again.body, [...again.headers]], [retry.status, retry.body, [...retry.headers]])
      t.same(upstream.executed, [key])
      t.same(upstream.asked, [key])
      const headers = upstream.queries[0]?.headers.map(String) ?? []
      t.ok(headers.includes('Bearer of-the-proxy'))
      t.ok(headers.includes(key), 'the key in a header, unencoded')
      t.notOk(headers.includes('Bearer alice'), "none of the client's credentials")
      t.equal(await proxy.metric(reconciled('scheduled')), 1)
    },
  )
}

for (const kind of STORES) {
  const started = async (t: Test, upstream: Bank, more: Readonly<Record<string, string>> = {}) => {
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, storeUrl(t, kind, redis, postgres), more))
    if (proxy === undefined) throw new Error('no proxy')
    return proxy
  }

  void t.test(`O02 ${kind}: a refusal that the reconciler finds is replayed as the route says`, async (t) => {
    const upstream = await bank(t)
    upstream.fate = () => 'declined'
    const proxy = await started(t, upstream)
    const key = newKey()
    await send(proxy, key)
    await until(async () => (await proxy.metric(reconciled('completed'))) === 1)
    const retry = await send(proxy, key)
    t.match(retry, { status: 402, replayed: true, body: `{"id":"p-${key}","state":"declined"}` })
    t.equal(retry.headers.get('content-type'), 'application/vnd.bank+json')
    t.equal(retry.headers.get('x-told'), 'later')
    t.equal(upstream.executed.length, 1)
  })

  void t.test(`O03 ${kind}: after two "not found" exactly one of many retries executes`, async (t) => {
    const upstream = await bank(t)
    upstream.fate = (key) => (upstream.executed.filter((one) => one === key).length > 1 ? 'paid' : 'unheard')
    const proxy = await started(t, upstream)
    const key = newKey()
    await send(proxy, key)
    await until(async () => (await proxy.metric(reconciled('retryable'))) === 1)
    t.same(upstream.asked, [key, key])
    upstream.fault = (_, response) => void response.writeHead(201).end('second attempt')
    const retries = await Promise.all(Array.from({ length: 20 }, () => send(proxy, key)))
    t.equal(upstream.executed.length, 2)
    t.equal(retries.filter(({ status, replayed }) => status === 201 && !replayed).length, 1)
    t.match(await send(proxy, key), { status: 201, replayed: true, body: 'second attempt' })
  })

  void t.test(
    `${kind}: after exactly \`attempts\` status queries a record is dead-lettered and stays unknown`,
    async (t) => {
      const upstream = await bank(t)
      upstream.fate = () => 'processing'
      const proxy = await started(t, upstream, { attempts: '3' })
      const key = newKey()
      await send(proxy, key)
      const line = await proxy.logged(({ msg }) => String(msg).includes('dead-lettered'))
      t.match(line, { route: 'pay', asked: 3, answer: 'status 200, which matches no pattern' })
      t.equal(upstream.asked.length, 3)
      const retry = await send(proxy, key)
      t.equal(retry.code, 'idempotency_outcome_unknown')
      t.equal(await proxy.metric(reconciled('dead_lettered')), 1)
      t.equal(await proxy.metric(reconciled('pending')), 2)
      t.equal(upstream.executed.length, 1)
      t.notOk(JSON.stringify(proxy.log).includes(key), 'the key is in no log line')
    },
  )
}

void t.test(
  'O03 with an upstream that keeps the quotes of a key, the request is found and not executed again',
  async (t) => {
    const upstream = await bank(t)
    upstream.fate = (key) => (upstream.executed.includes(key) ? 'paid' : 'unheard')
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, 'memory:'))
    if (proxy === undefined) throw new Error('no proxy')
    const key = `"${newKey()}"`
    await send(proxy, key)
    const ended = async (result: string) => (await proxy.metric(reconciled(result))) === 1
    await until(async () => (await ended('completed')) || (await ended('retryable')))
    t.match(await send(proxy, key), { status: 201, replayed: true })
    t.same(upstream.executed, [key])
  },
)

for (const cache of ['that honours no-cache', 'that ignores no-cache'] as const)
  void t.test(`O03 "not found" from a cache ${cache} frees nothing`, async (t) => {
    const upstream = await bank(t)
    // The first status query comes before the request has been worked on.
    upstream.fate = () => (upstream.asked.length > 1 ? 'paid' : 'unheard')
    upstream.trouble = (_key, response) => {
      const { length } = upstream.asked
      const fresh = upstream.queries.at(-1)?.headers.includes('no-cache') && cache === 'that honours no-cache'
      if (length === 1 || length > 4 || fresh) return false
      response.writeHead(404, { Age: String(length) }).end()
      return true
    }
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, 'memory:', { after: '500ms' }))
    if (proxy === undefined) throw new Error('no proxy')
    const key = newKey()
    await send(proxy, key)
    const ended = async (result: string) => (await proxy.metric(reconciled(result))) === 1
    await until(async () => (await ended('completed')) || (await ended('retryable')))
    t.match(await send(proxy, key), { status: 201, replayed: true })
    t.equal(upstream.executed.length, 1)
  })

void t.test('the reconciler settles each fault that leaves an outcome unknown', async (t) => {
  const upstream = await bank(t)
  const [proxy] = await replicas(
    t,
    1,
    bankRoute(upstream.url, 'memory:').replace('timeout: 5s', 'timeout: 2s'),
  )
  if (proxy === undefined) throw new Error('no proxy')
  const faults: Record<string, Bank['fault']> = {
    reset: (_, response) => void response.socket?.resetAndDestroy(),
    closed: (_, response) => void response.socket?.end(),
    malformed: (_, response) => void response.socket?.end('HTTP/1.1 twohundred\r\n\r\n'),
    truncated: (_, response) => void response.socket?.end('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf'),
    'no answer in time': () => {},
    502: (_, response) => void response.writeHead(502).end('bad gateway'),
    503: (_, response) => void response.writeHead(503).end('who knows'),
  }
  const keys = new Map(Object.keys(faults).map((name) => [name, newKey()]))
  upstream.fault = (key, ...rest) => {
    const [name = ''] = [...keys].find(([, one]) => one === key) ?? []
    return faults[name]?.(key, ...rest)
  }
  await Promise.all([...keys.values()].map((key) => send(proxy, key)))
  await until(async () => (await proxy.metric(reconciled('completed'))) === keys.size)
  for (const [name, key] of keys)
    t.match(
      await send(proxy, key),
      { status: 201, replayed: true, body: `{"id":"p-${key}","state":"paid"}` },
      name,
    )
  t.same(upstream.executed.toSorted(), [...keys.values()].toSorted(), 'each executed once')
})

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

void t.test('a drain waits for a running status query, and starts none', async (t) => {
  const upstream = await bank(t)
  const finish = gate()
  const reached = gate()
  upstream.trouble = (key, response) => {
    reached.open()
    void finish.opened.then(() =>
      response
        .writeHead(200, { 'Content-Type': 'application/json' })
        .end(JSON.stringify({ key, state: 'paid', payment: 'late' })),
    )
    return true
  }
  const url = storeUrl(t, 'sqlite', redis)
  const [proxy] = await replicas(t, 1, bankRoute(upstream.url, url))
  if (proxy === undefined) throw new Error('no proxy')
  const key = newKey()
  await send(proxy, key)
  await reached.opened
  const drained = proxy.drain()
  await proxy.logged(({ msg }) => msg === 'draining')
  finish.open()
  await drained
  const [next] = await replicas(t, 1, bankRoute(upstream.url, url))
  if (next === undefined) throw new Error('no proxy')
  t.match(await send(next, key), { status: 201, replayed: true, body: '"late"' })
  t.equal(upstream.asked.length, 1)
})
