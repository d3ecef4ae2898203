import t, { type Test } from 'tap'
import { type Bank, bank, bankRoute } from '../support/bank.ts'
import { gate, newKey, send, until } from '../support/e2e.ts'
import { emptyStore, KINDS, replicas } from '../support/replicas.ts'

// Starting processes and backoffs take longer than tap's default.
t.setTimeout(600_000)

const reconciled = (result: string): string => `idempotency_reconcile_total{route="pay",result="${result}"}`

for (const kind of KINDS) {
  void t.test(
    `O02 ${kind}: when the reconciler finds the request done, the next retry replays the result`,
    async (t) => {
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
    },
  )
}

for (const kind of KINDS) {
  const started = async (t: Test, upstream: Bank, more: Readonly<Record<string, string>> = {}) => {
    const [proxy] = await replicas(t, 1, bankRoute(upstream.url, await emptyStore(t, kind), more))
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
