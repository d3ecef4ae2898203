import t, { type Test } from 'tap'
import { Value } from 'typebox/value'
import { type Report, reportSchema } from '../../src/admin/report.ts'
import { adminYaml, ask } from '../support/admin.ts'
import { type Bank, bank, bankRoute } from '../support/bank.ts'
import { command } from '../support/commands.ts'
import { gate, newKey, redisSnapshot, send, until } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { emptyStore, KINDS, replicas, SHARED_KINDS } from '../support/replicas.ts'

// Starting processes and backoffs take longer than tap's default.
t.setTimeout(600_000)
// They wait for the sweeper and for status queries; on SQLite each has a store of its own. A server is emptied before each.
t.jobs = SHARED_KINDS.length === 0 ? 8 : 1

const reconciled = (result: string): string => `idempotency_reconcile_total{route="pay",result="${result}"}`

for (const kind of KINDS) {
  t.test(`O02 ${kind}: once the request is found done, a retry replays it`, { buffered: true }, async (t) => {
    const upstream = await bank(t)
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, await emptyStore(t, kind)))
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
  })
}

for (const kind of KINDS) {
  const started = async (t: Test, upstream: Bank, more: Readonly<Record<string, string>> = {}) => {
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, await emptyStore(t, kind), more))
    if (proxy === undefined) throw new Error('no proxy')
    return proxy
  }

  t.test(`O03 ${kind}: after two "not found" one of many retries executes`, { buffered: true }, async (t) => {
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
}

void t.test('a drain waits for a running status query, and starts none', { buffered: true }, async (t) => {
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
  const url = await emptyStore(t, 'sqlite')
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

const NOT_FOUND = /does not find requests that were completed/

t.test('"not found" counts only while the query finds a completed request', { buffered: true }, async (t) => {
  const upstream = await bank(t)
  const lost = upstream.fault
  const [proxy] = await replicas(
    t,
    1,
    bankRoute(upstream.url, await emptyStore(t, 'sqlite'), { attempts: '4' }),
  )
  if (proxy === undefined) throw new Error('no proxy')
  upstream.fault = (_key, response) => void response.writeHead(201).end('{}')
  t.equal((await send(proxy, newKey())).status, 201)
  upstream.fault = lost
  // As a mistyped path would have it.
  upstream.trouble = (_key, response) => (response.writeHead(404).end(), true)
  const key = newKey()
  t.equal((await send(proxy, key)).code, 'upstream_failed')
  await until(async () => (await proxy.metric(reconciled('dead_lettered'))) === 1)
  t.equal((await send(proxy, key)).code, 'idempotency_outcome_unknown')
  t.ok(await proxy.metric(reconciled('failed')), 'counted as failed')
  t.match(
    proxy.log.filter(({ msg }) => NOT_FOUND.test(String(msg))),
    [{ level: 50, route: 'pay', query: 'GET /payments' }],
    'logged once',
  )
  t.notOk(JSON.stringify(proxy.log).includes(key), 'the key is in no log line')

  upstream.trouble = () => false
  const unheard = newKey()
  upstream.fate = (one) => (one === unheard ? 'unheard' : 'paid')
  t.equal((await send(proxy, unheard)).code, 'upstream_failed')
  await until(async () => (await proxy.metric(reconciled('retryable'))) === 1)
  t.ok(await proxy.logged(({ msg }) => String(msg).includes('finds a request that was completed')))
})

t.test('a query that finds the canary, or answers neither way, is logged', { buffered: true }, async (t) => {
  for (const [status, told] of [
    [200, /finds a request that never existed/],
    [401, /is not answered by `notFound`/],
  ] as const) {
    const upstream = await bank(t)
    upstream.canaryStatus = status
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, await emptyStore(t, 'sqlite')))
    const line = await proxy?.logged(({ msg }) => told.test(String(msg)))
    t.match(line, { route: 'pay', query: 'GET /payments' })
  }
})

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

t.test('O05 the report checks a sample upstream and changes nothing', { buffered: true }, async (t) => {
  const upstream = await bank(t)
  const { promise: completed, resolve: completes } = Promise.withResolvers<void>()
  upstream.canaryWaits = completed
  const admin = adminYaml(t)
  await using proxy = await proxyInProcess(`${admin}\n${bankRoute(upstream.url, redis.url)}`)
  const [paid, gone] = [newKey(), newKey()]
  upstream.fault = (key, response) =>
    void response
      .writeHead(201, { 'Content-Type': 'application/json' })
      .end(`{"id":"p-${key}","state":"paid"}`)
  for (const key of [paid, gone]) t.equal((await send(proxy, key)).status, 201)
  // After the canary, the proxy tests the status query by a request that was completed, if there is one.
  completes()
  await until(() => upstream.asked.length === 1)
  upstream.fate = (key) => (key === gone ? 'unheard' : 'paid')
  const before = await redisSnapshot(redis)

  const { json, status } = await ask(proxy, '/v1/report?sample=100')
  t.equal(status, 200)
  const report = json as unknown as Report
  t.strictSame([...Value.Errors(reportSchema, report)], [], 'it matches its schema')
  t.match(report.asked, {
    routes: [{ route: 'pay', eligible: 2, sampled: 2, agreed: 1, disagreed: 1, undecided: 0, notAsked: 0 }],
    found: [{ verdict: 'disagrees', why: 'the upstream does not know of it' }],
  })
  t.equal(upstream.asked.length, 1 + 3, 'once each, and once more where it was not found')
  for (const { headers } of upstream.queries.slice(1)) t.ok(headers.includes('Bearer of-the-proxy'))
  const token = /tokenFile: "?([^",}\s]+)/.exec(admin)?.[1] as string
  const words = ['report', '--sample', '100', '--admin', proxy.adminUrl, '--token-file', token]
  t.match(await command(words), {
    code: 1,
    err: '',
    out: /checked against the upstream\nROUTE +ELIGIBLE .*\npay +2 +2 +1 +0 +1 +0 +0\n/,
  })
  const { out: csv } = await command([...words, '--format', 'csv'])
  t.match(csv, /\r\nasked,pay,disagreed,1\r\n/)
  t.match(csv, /\r\ndisagrees,pay,\S+,the upstream does not know of it\r\n/)
  const { out: markdown } = await command([...words, '--format', 'markdown'])
  t.match(markdown, /\| disagrees \| pay \| \S+ \| the upstream does not know of it \|\n/)
  t.match(await command(['report', '--sample', '9', '--store', redis.url, '--service', 'test']), {
    code: 2,
    err: /found --sample without --admin URL: only a running proxy asks the upstream/,
  })
  t.match(await command(words.with(2, '0')), { code: 2, err: /--sample: a whole number, 1 to 1000/ })
  for (const query of ['sample=0', 'sample=1001', 'sample=x', 'sample=', 'sample=1&sample=2', 'samples=1'])
    t.equal((await ask(proxy, `/v1/report?${query}`)).code, 'invalid_request', query)
  t.equal((await ask(proxy, '/v1/report')).json['asked'], null, 'nothing without a sample')
  t.same(await redisSnapshot(redis), before, 'nothing was changed')
})
