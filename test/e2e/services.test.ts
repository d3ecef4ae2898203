import { readFileSync } from 'node:fs'
import t from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { emptyStore, KINDS } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

for (const kind of KINDS.filter((store) => store !== 'memory'))
  void t.test(`V01 ${kind}: two services on one store both execute, and each replays its own`, async (t) => {
    const store = await emptyStore(t, kind)
    const open = async (service: string) => {
      const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end(service))
      t.teardown(() => upstream[Symbol.asyncDispose]())
      const proxy = await proxyInProcess(
        `service: ${service}\nupstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\nlimits: { newKeys: 1/h }`,
      )
      t.teardown(() => proxy.drain())
      return { upstream, proxy }
    }
    const [payments, orders] = [await open('payments'), await open('orders')]
    const key = newKey()
    for (const replayed of [false, true]) {
      t.match(await send(payments.proxy, key), { status: 201, body: 'payments', replayed })
      t.match(await send(orders.proxy, key), { status: 201, body: 'orders', replayed })
    }
    t.equal(payments.upstream.seen.length, 1)
    t.equal(orders.upstream.seen.length, 1)
    t.equal((await send(payments.proxy, newKey())).code, 'rate_limited', 'each has its own rate too')

    const listed = async (service: string): Promise<string[]> => {
      const { out } = await command(['list', '--json', '--store', store, '--service', service])
      return (JSON.parse(out) as { records: { id: string }[] }).records.map(({ id }) => id)
    }
    const [mine = '', ...more] = await listed('payments')
    t.strictSame(more, [])
    t.notOk((await listed('orders')).includes(mine))
    t.match(
      await command(['inspect', mine, '--store', store, '--service', 'orders']),
      { code: 1 },
      'another service cannot find the record by its id',
    )
    t.match(await command(['inspect', mine, '--store', store, '--service', 'payments']), { code: 0 })
  })

void t.test('V01 a service reconciles only its own records', async (t) => {
  const store = await emptyStore(t, 'sqlite')
  const yaml = (service: string, upstream: string, reconcile: string): string =>
    `service: ${service}
upstream: { url: "${upstream}", timeout: 1s }
store: { url: "${store}" }
routes:
  - name: pay
    match: { path: /pay }
    key: { forwardFence: true }
    scope: { caller: header:authorization, anonymous: reject }
    ${reconcile}
`
  const theirs = await upstreamStub((_seen, response) => void response.destroy())
  t.teardown(() => theirs[Symbol.asyncDispose]())
  const orders = await proxyInProcess(yaml('orders', theirs.url, ''))
  t.teardown(() => orders.drain())
  const key = newKey()
  t.equal((await send(orders, key)).code, 'upstream_failed')

  // Finds no record and drops each POST: both records are unknown.
  const ours = await upstreamStub((seen, response) => {
    if (seen.method === 'POST') response.destroy()
    else response.writeHead(404).end()
  })
  t.teardown(() => ours[Symbol.asyncDispose]())
  const payments = await proxyInProcess(
    yaml(
      'payments',
      ours.url,
      'reconcile: { request: { method: GET, path: "/asked/{record}" }, identity: none, completed: { status: 200 }, notFound: { status: 404 }, after: 1s, every: 50ms }',
    ),
  )
  t.teardown(() => payments.drain())
  const own = await send(payments, newKey())
  const { instance } = JSON.parse(own.body) as { instance: string }
  // Without the canary of the start.
  const asked = (): string[] =>
    ours.seen
      .filter(({ method, target }) => method === 'GET' && !target.startsWith('/asked/canary-'))
      .map(({ target }) => target)
  await until(async () => (await payments.metric(RETRYABLE)) === 1)
  t.strictSame(new Set(asked()), new Set([`/asked/${instance}`]), 'only its own record')
  t.equal(
    (await send(orders, key)).code,
    'idempotency_outcome_unknown',
    "the other service's record is unchanged",
  )
  t.equal(theirs.seen.length, 1)
})

const RETRYABLE = 'idempotency_reconcile_total{route="pay",result="retryable"}'

void t.test(
  'S03 without scope.caller a cookie or API key is refused, and only the log says what to set',
  async (t) => {
    const upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('done'))
    t.teardown(() => upstream[Symbol.asyncDispose]())
    const proxy = await proxyInProcess(`upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`)
    t.teardown(() => proxy.drain())
    for (const [name, source] of [
      ['cookie', 'cookie:<name>'],
      ['x-api-key', 'header:x-api-key'],
    ] as const) {
      const refused = await send(proxy, newKey(), { headers: { authorization: '', [name]: 'a=s3cret' } })
      t.match(refused, { status: 400, code: 'idempotency_caller_missing' })
      t.notMatch(refused.body, /scope|config|route|s3cret/)
      const { cause } = await proxy.logged(
        (line) => line.outcome === 'caller_missing' && String(line.cause).includes(source),
      )
      t.notMatch(cause, /s3cret/)
    }
    t.equal(upstream.seen.length, 0)
    const warned = proxy.log.filter(({ msg }) => /share one key space/.test(String(msg)))
    t.equal(warned.length, 1, 'one warning at start')

    const shadow = await proxyInProcess(
      `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\ndefaults: { mode: shadow }`,
    )
    t.teardown(() => shadow.drain())
    const headers = { authorization: '', 'x-api-key': 's3cret' }
    t.equal((await send(shadow, newKey(), { headers })).status, 201)
    const { cause } = await shadow.logged(({ verdict }) => verdict === 'caller_missing')
    t.match(cause, /header:x-api-key/, 'shadow mode logs the same')
    t.notMatch(cause, /s3cret/)
  },
)

void t.test('shadow mode logs why the upstream gave no complete response', async (t) => {
  const upstream = await upstreamStub((_seen, response) => void response.destroy())
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\ndefaults: { mode: shadow }`,
  )
  t.teardown(() => proxy.drain())
  await send(proxy, newKey()).catch(() => {})
  const { cause } = await proxy.logged(({ verdict }) => verdict === 'upstream_failed')
  t.match(cause, /closed/)
})

void t.test(
  'V03 with scope.host two hosts are two operations, without it one; lookups name the host',
  async (t) => {
    for (const host of [true, false]) {
      const upstream = await upstreamStub((seen, response) => void response.writeHead(201).end(seen.target))
      t.teardown(() => upstream[Symbol.asyncDispose]())
      const proxy = await proxyInProcess(
        `${adminYaml(t)}
upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
trustProxy: [127.0.0.1]
status: { path: /status }
defaults: { scope: { host: ${host} } }`,
      )
      t.teardown(() => proxy.drain())
      const key = newKey()
      const to = (name: string) => send(proxy, key, { headers: { 'x-forwarded-host': name } })
      t.notOk((await to('a.test')).replayed)
      t.ok((await to('A.test.:443')).replayed)
      t.equal((await to('b.test')).replayed, !host)
      t.equal(upstream.seen.length, host ? 2 : 1)

      const asked = await fetch(`${proxy.url}/status?method=POST&path=/pay`, {
        headers: { authorization: 'Bearer alice', 'idempotency-key': key, 'x-forwarded-host': 'a.test' },
      })
      t.equal(asked.status, 200)
      const lookup = { key, caller: { authorization: 'Bearer alice' }, method: 'POST', path: '/pay' }
      const found = (more: object) =>
        ask(proxy, '/v1/records/lookup', { method: 'POST', body: { ...lookup, ...more } })
      t.equal((await found({ host: 'b.test' })).status, 200)
      t.equal((await found({ host: 'c.test' })).status, host ? 404 : 200)
      t.equal((await found({})).status, host ? 400 : 200)
    }
  },
)

void t.test(
  'V03 with scope.host, inspect --host and POST /v1/outcomes find the record of that host',
  async (t) => {
    const { proxy, where, audit, upstream } = await operated(
      t,
      await emptyStore(t, 'sqlite'),
      'service: hosts\ntrustProxy: [127.0.0.1]\ndefaults: { scope: { host: true } }',
    )
    const key = newKey()
    const to = (host: string) => send(proxy, key, { path: '/break', headers: { 'x-forwarded-host': host } })
    const idOf = async (host: string): Promise<string> =>
      (JSON.parse((await to(host)).body) as { instance: string }).instance
    const ids = { 'a.test': await idOf('a.test'), 'b.test': await idOf('b.test') }
    t.not(ids['a.test'], ids['b.test'])

    const words = [
      '--method',
      'POST',
      '--path',
      '/break',
      '--caller',
      'authorization: Bearer alice',
      '--json',
    ]
    for (const source of [where.admin, where.config]) {
      const inspect = (...host: string[]) => command(['inspect', key, ...words, ...host, ...source])
      for (const [host, id] of Object.entries(ids)) {
        const { code, out } = await inspect('--host', host.toUpperCase())
        t.equal(code, 0)
        t.match(JSON.parse(out), { id, state: 'unknown' })
      }
      t.match(await inspect('--host', 'c.test'), { code: 1, out: '', err: /record_not_found/ })
      t.match(await inspect(), { code: 2, out: '', err: /--host: required/ })
    }

    const subject = { key, caller: { authorization: 'Bearer alice' }, method: 'POST', path: '/break' }
    const outcome = (more: object) =>
      ask(proxy, '/v1/outcomes', {
        method: 'POST',
        body: { ...subject, outcome: 'retryable', reason: 'looked', ...more },
      })
    t.match(await outcome({}), { status: 400, code: 'invalid_request' })
    t.match(await outcome({ host: 'c.test' }), { status: 404, code: 'record_not_found' })
    t.match(await outcome({ host: 'a.test' }), { status: 200 })
    t.equal((await to('b.test')).code, 'idempotency_outcome_unknown', "the other host's record is unchanged")
    t.equal(upstream.seen.length, 2)
    t.equal((await to('a.test')).code, 'upstream_failed', 'executed again')
    t.equal(upstream.seen.length, 3)
    t.match(
      readFileSync(audit, 'utf8')
        .trim()
        .split('\n')
        .map((line) => JSON.parse(line) as unknown),
      [{ service: 'hosts', what: 'outcome', record: ids['a.test'] }],
    )
  },
)
