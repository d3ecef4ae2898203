import { readFileSync } from 'node:fs'
import t from 'tap'
import { ask } from '../support/admin.ts'
import { command, operated } from '../support/commands.ts'
import { newKey, send } from '../support/e2e.ts'
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

t.test('V03 with scope.host, inspect --host and /v1/outcomes find the record of that host', async (t) => {
  const { proxy, where, audit, upstream } = await operated(
    t,
    await emptyStore(t, 'sqlite'),
    'service: hosts\ntrustProxy: [127.0.0.1]\nstatus: { path: /status }\ndefaults: { scope: { host: true } }',
  )
  const key = newKey()
  const to = (host: string) => send(proxy, key, { path: '/break', headers: { 'x-forwarded-host': host } })
  const idOf = async (host: string): Promise<string> =>
    (JSON.parse((await to(host)).body) as { instance: string }).instance
  const ids = { 'a.test': await idOf('a.test'), 'b.test': await idOf('b.test') }
  t.not(ids['a.test'], ids['b.test'])
  for (const [name, status] of Object.entries({ 'a.test': 200, 'c.test': 404 })) {
    const headers = { authorization: 'Bearer alice', 'idempotency-key': key, 'x-forwarded-host': name }
    const asked = await fetch(`${proxy.url}/status?method=POST&path=/break`, { headers })
    t.equal(asked.status, status, name)
  }

  const words = ['--method', 'POST', '--path', '/break', '--caller', 'authorization: Bearer alice', '--json']
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
})
