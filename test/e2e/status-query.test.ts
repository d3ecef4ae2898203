import t, { type Test } from 'tap'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { BY_KEY, BY_RECORD, type Ledger, ledger, ledgerRoute, type Served, serve } from '../support/ledger.ts'
import { rawRequest } from '../support/raw.ts'

// Restarts and backoffs take time.
t.setTimeout(200_000)

const result = (name: string): string => `idempotency_reconcile_total{route="pay",result="${name}"}`

const sqlite = (t: Test): string => `sqlite:${tempDir(t)}/store.db`

/** Waits until the record is no longer queried, then retries once. */
async function settled(
  t: Test,
  { proxy }: Served,
  upstream: Ledger,
  key: string,
  answer: RegExp,
): Promise<void> {
  await until(
    async () => (await proxy.metric(result('dead_lettered'))) + (await proxy.metric(result('retryable'))) > 0,
  )
  const retry = await send(proxy, key)
  t.equal(retry.code, 'idempotency_outcome_unknown', 'still unknown')
  t.equal(upstream.executed.length, 1, 'executed once')
  const letter = proxy.log.find(({ msg }) => String(msg).includes('dead-lettered'))
  t.match(letter, { answer })
  t.ok(upstream.asked.length > 1, 'it was queried more than once')
}

for (const how of ['reload', 'restart'] as const)
  void t.test(`V07 a ${how} adds {record}: "not found" frees no key sent without it`, async (t) => {
    const upstream = await ledger(t)
    const store = sqlite(t)
    const served = await serve(t, ledgerRoute(upstream.url, store, {}))
    const key = newKey()
    t.equal((await send(served.proxy, key)).code, 'upstream_failed')
    const turnedOn = { key: 'presence: required, forwardFence: true', reconcile: BY_RECORD }
    await served[how](ledgerRoute(upstream.url, store, turnedOn))
    await settled(t, served, upstream, key, /not found.*was not told \{record\}/)
  })

void t.test('V07 "not found" frees no header key that `forward: none` withheld', async (t) => {
  const upstream = await ledger(t)
  const store = sqlite(t)
  const from = 'presence: required, from: ["header:idempotency-key", "json:/id"]'
  // `check` refuses this with `notFound`, but it may have been in force without it.
  const before = `${BY_KEY.replace('{ status: 404 }', 'none')}, pending: { status: 404 }`
  const quiet = ledgerRoute(upstream.url, store, { key: `${from}, forward: none`, reconcile: before })
  const served = await serve(t, quiet.replace('every: 100ms', 'every: 3s'))
  const header = newKey()
  await send(served.proxy, header)
  await served.restart(ledgerRoute(upstream.url, store, { key: from, reconcile: BY_KEY }))
  await settled(t, served, upstream, header, /not found.*was not told \{key\}/)

  await t.test('a key in the body is reconciled', async (t) => {
    const body = newKey()
    await send(served.proxy, null, { body: `{"id":"${body}"}` })
    await until(async () => (await served.proxy.metric(result('completed'))) === 1)
    t.match(await send(served.proxy, null, { body: `{"id":"${body}"}` }), { status: 201, replayed: true })
    t.equal(upstream.executed.length, 2)
  })
})

void t.test('V06 `Connection: Idempotency-Key` does not cause a second execution', async (t) => {
  const upstream = await ledger(t)
  const served = await serve(t, ledgerRoute(upstream.url, sqlite(t), { reconcile: BY_KEY }))
  const key = newKey()
  const head = (connection: string) =>
    `POST /pay HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer alice\r\nIdempotency-Key: ${key}\r\nContent-Type: application/json\r\nContent-Length: 12\r\nConnection: ${connection}\r\n\r\n{"amount":1}`
  await rawRequest(served.proxy.port, head('close, Idempotency-Key'))
  await until(
    async () =>
      (await served.proxy.metric(result('dead_lettered'))) +
        (await served.proxy.metric(result('retryable'))) +
        (await served.proxy.metric(result('completed'))) >
      0,
  )
  await send(served.proxy, key)
  t.equal(upstream.executed.length, 1)
})

void t.test('of a key that two accounts used, each gets its own operation or stays unknown', async (t) => {
  const upstream = await ledger(t)
  // The ledger finds by the key alone, and shows the path of the operation.
  const route = (identity: string): string =>
    ledgerRoute(upstream.url, sqlite(t), {
      reconcile: BY_KEY.replace('{ /key: "{key}" }', identity),
    }).replace('path: /pay', 'path: "/accounts/:id/charges"')
  const served = await serve(t, route('{ /key: "{key}", /target: "/accounts/{:id}/charges" }'))
  const key = newKey()
  for (const account of [1, 2])
    t.equal((await send(served.proxy, key, { path: `/accounts/${account}/charges` })).code, 'upstream_failed')
  await until(async () => (await served.proxy.metric(result('completed'))) === 1)
  const [one, two] = await Promise.all(
    [1, 2].map((account) => send(served.proxy, key, { path: `/accounts/${account}/charges` })),
  )
  t.match(one, { status: 201, replayed: true, body: /accounts\/1\/charges/ })
  t.equal(two?.code, 'idempotency_outcome_unknown', "never with the other's result")
  t.equal(upstream.executed.length, 2)
})

void t.test('V07 "not found" from a new `upstream.url` frees no key sent to the old one', async (t) => {
  const [upstream, other] = [await ledger(t), await ledger(t)]
  const store = sqlite(t)
  const slow = ledgerRoute(upstream.url, store, { reconcile: BY_KEY }).replace('every: 100ms', 'every: 3s')
  const served = await serve(t, slow)
  const key = newKey()
  t.equal((await send(served.proxy, key)).code, 'upstream_failed')
  await served.restart(ledgerRoute(other.url, store, { reconcile: BY_KEY }))
  await until(
    async () =>
      (await served.proxy.metric(result('dead_lettered'))) +
        (await served.proxy.metric(result('retryable'))) >
      0,
  )
  t.equal((await send(served.proxy, key)).code, 'idempotency_outcome_unknown')
  t.same([upstream.executed.length, other.executed.length], [1, 0])
  const letter = served.proxy.log.find(({ msg }) => String(msg).includes('dead-lettered'))
  t.match(letter, { answer: /sent to another `upstream.url`/ })
})

void t.test('a status query keeps a path segment that is not UTF-8 as it was sent', async (t) => {
  const upstream = await ledger(t)
  const query = BY_KEY.replace('/payments?', '/accounts/{:id}/payments?')
  const route = ledgerRoute(upstream.url, sqlite(t), { reconcile: query })
  const served = await serve(t, route.replace('path: /pay', 'path: "/accounts/:id/charges"'))
  for (const segment of ['%FF', 'caf%E9', '%C3%A9%FF']) {
    const key = newKey()
    await send(served.proxy, key, { path: `/accounts/${segment}/charges` })
    await until(() => upstream.asked.some((target) => target.includes(key)))
    t.ok(
      upstream.asked.some((target) => target.startsWith(`/accounts/${segment}/payments?key=${key}`)),
      segment,
    )
  }
})

const MISTYPED = BY_KEY.replace('/payments?', '/paymnets?')
const REFUTED = /does not find requests that were completed/

/** One request that the upstream answers properly. */
async function completes(t: Test, { proxy }: Served, upstream: Ledger): Promise<void> {
  const answer = upstream.answer
  upstream.answer = (_entry, response) => void response.writeHead(201).end('{}')
  t.equal((await send(proxy, newKey())).status, 201)
  upstream.answer = answer
}

for (const how of ['the same process', 'reload', 'restart'] as const)
  void t.test(`a mistyped path of the status query frees no key: ${how}`, async (t) => {
    const upstream = await ledger(t)
    const store = sqlite(t)
    const right = ledgerRoute(upstream.url, store, { reconcile: BY_KEY })
    const wrong = ledgerRoute(upstream.url, store, { reconcile: MISTYPED })
    const served = await serve(t, how === 'the same process' ? wrong : right)
    await completes(t, served, upstream)
    if (how !== 'the same process') await served[how](wrong)
    const key = newKey()
    t.equal((await send(served.proxy, key)).code, 'upstream_failed')
    await until(
      async () =>
        (await served.proxy.metric(result('dead_lettered'))) +
          (await served.proxy.metric(result('retryable'))) >
        0,
    )
    t.equal((await send(served.proxy, key)).code, 'idempotency_outcome_unknown')
    t.equal(upstream.executed.length, 2, 'each executed once')
    t.ok(await served.proxy.metric(result('failed')), 'counted as failed')
    const line = await served.proxy.logged(({ msg }) => REFUTED.test(String(msg)))
    t.match(line, { level: 50, route: 'pay', query: 'GET /paymnets' })
    t.equal(served.proxy.log.filter(({ msg }) => REFUTED.test(String(msg))).length, 1, 'logged once')
    t.notOk(JSON.stringify(served.proxy.log).includes(key), 'the key is in no log line')
  })

void t.test(
  'a status query that has found a completed request is believed when it says "not found"',
  async (t) => {
    const upstream = await ledger(t)
    const served = await serve(t, ledgerRoute(upstream.url, sqlite(t), { reconcile: BY_KEY }))
    await until(() => upstream.canaries.length === 1)
    await completes(t, served, upstream)
    const lost = async (): Promise<string> => {
      const key = newKey()
      const { answer } = upstream
      upstream.answer = (entry, response) => {
        upstream.executed.splice(upstream.executed.indexOf(entry), 1)
        response.socket?.destroy()
      }
      t.equal((await send(served.proxy, key)).code, 'upstream_failed')
      upstream.answer = answer
      return key
    }
    const key = await lost()
    await until(async () => (await served.proxy.metric(result('retryable'))) === 1)
    upstream.answer = (_entry, response) => void response.writeHead(201).end('{}')
    t.match(await send(served.proxy, key), { status: 201, replayed: false })
    t.equal(upstream.executed.length, 2)
    t.ok(await served.proxy.logged(({ msg }) => String(msg).includes('finds a request that was completed')))
  },
)

void t.test('a status query that finds the canary at start, or answers neither way, is logged', async (t) => {
  for (const [status, told] of [
    [200, /finds a request that never existed/],
    [401, /is not answered by `notFound`/],
  ] as const) {
    const upstream = await ledger(t)
    upstream.lie = (target, response) => {
      const key = new URL(target, 'http://ledger').searchParams.get('key')
      response.writeHead(status, { 'Content-Type': 'application/json' })
      response.end(JSON.stringify({ key, state: 'paid' }))
      return true
    }
    const served = await serve(t, ledgerRoute(upstream.url, sqlite(t), { reconcile: BY_KEY }))
    t.match(await served.proxy.logged(({ msg }) => told.test(String(msg))), {
      route: 'pay',
      query: 'GET /payments',
    })
    t.equal(upstream.canaries.length, 1)
  }
})
