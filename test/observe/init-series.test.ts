import t from 'tap'
import { METRICS, Metrics } from '../../src/observe/metrics.ts'
import { newKey, send, until } from '../support/e2e.ts'
import { failNextImport } from '../support/imports.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

const RECONCILE =
  'reconcile: { request: { path: "/pay?k={key}" }, identity: none, completed: { status: 200 } }'

void t.test('every counter by route starts at 0', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end())
  await using proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}", timeout: 1s }\nstore: { url: "memory:" }\nroutes: [{ name: pay, match: { path: /pay }, ttl: 1s, lease: 1s, ${RECONCILE} }]\n`,
  )
  const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
  const of = (name: string, route: string): string[] =>
    text.split('\n').filter((line) => line.startsWith(`${name}{`) && line.includes(`route="${route}"`))
  const counters = Object.entries(METRICS).filter(
    ([name, { kind, labels }]) =>
      kind === 'counter' && labels[0] === 'route' && name !== 'idempotency_shadow_total',
  )
  t.equal(counters.length, 11)
  for (const route of ['pay', 'default'])
    for (const [name] of counters) {
      if (route === 'default' && name === 'idempotency_reconcile_total') continue
      t.ok(of(name, route).length > 0, `${name} of ${route}`)
      for (const line of of(name, route)) t.match(line, / 0$/)
    }
  t.equal(of('idempotency_requests_total', 'pay').length, 16)
  t.same(of('idempotency_reconcile_total', 'default'), [], 'it has no status query')
  t.match(text, /^idempotency_pruned_total\{store="memory"\} 0$/m)
  t.match(text, /^idempotency_store_errors_total\{store="memory"\} 0$/m)
  t.same(of('idempotency_retention_seconds', 'pay'), ['idempotency_retention_seconds{route="pay"} 1'])
  t.same(of('idempotency_retention_seconds', 'default'), [
    'idempotency_retention_seconds{route="default"} 86400',
  ])

  t.equal((await send(proxy, newKey())).status, 201)
  await until(async () => {
    await send(proxy, newKey())
    return (await proxy.metric('idempotency_pruned_total{store="memory"}')) > 0
  })
})

/** The samples of /metrics, without their values. */
async function seriesOf(proxy: TestProxy): Promise<string[]> {
  const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
  return text
    .split('\n')
    .flatMap((line) => (line === '' || line.startsWith('#') ? [] : [line.split(' ')[0] ?? '']))
}

/** The outcomes that the route starts with. */
function outcomesIn(series: readonly string[], route: string): string[] {
  return series
    .filter((one) => one.startsWith(`idempotency_requests_total{route="${route}"`))
    .map((one) => /outcome="(\w+)"/.exec(one)?.[1] as string)
}

void t.test('a route starts with the counters that its settings allow for', async (t) => {
  await using proxy = await proxyInProcess(`upstream: { url: "http://127.0.0.1:1", timeout: 1s }
store: { url: "memory:" }
unmatched: pass
routes:
  - name: all
    match: { path: /all }
    key: required
    inFlight: wait
    tombstone: 1d
    onStoreUnavailable: bypass
    respondWithin: 500ms
    authorizeReplay: { path: /me }
    limits: { newKeys: 1/s }
  - { name: plain, match: { path: /plain }, scope: { caller: none } }
  - { name: shadowed, match: { path: /shadowed }, mode: shadow }
  - { name: ignored, match: { path: /ignored }, key: ignored }
  - { name: off, match: { path: /off }, mode: off }
`)
  const series = await seriesOf(proxy)
  const plain = outcomesIn(series, 'plain')
  const more = `
    key_missing caller_missing waited expired bypassed upstream_slow rate_limited replay_forbidden
  `
    .trim()
    .split(/\s+/)
  for (const outcome of more) t.notOk(plain.includes(outcome), outcome)
  t.strictSame(
    outcomesIn(series, 'all').toSorted(),
    [...plain.filter((one) => one !== 'passed'), ...more].toSorted(),
  )
  for (const route of ['shadowed', 'ignored', 'off', 'default'])
    t.strictSame(outcomesIn(series, route), ['passed'], route)
  const of = (route: string): string[] => series.filter((one) => one.includes(`route="${route}"`))
  t.match(of('ignored').join(), /lease_expired_total.*unresolved_expiring_total/, 'for records from before')
  t.equal(of('ignored').length, 5)
  t.notMatch(of('shadowed').join(), /claims|prevented|reconcile|shadow_total/)
  t.match(
    of('shadowed').join(),
    /completions_total.*lease_expired_total|lease_expired_total.*completions_total/,
  )
})

void t.test('after all sorts of traffic a route has at most 120 series', async (t) => {
  await using upstream = await upstreamStub((seen, response) => {
    if (seen.target.endsWith('cut')) response.socket?.destroy()
    else setTimeout(() => response.writeHead(201).end('done'), 50)
  })
  await using proxy = await proxyInProcess(`upstream: { url: "${upstream.url}" }
store: { url: "memory:" }
routes: [{ name: pay, match: { path: "/pay/*" } }]
`)
  const [path, key, cut] = ['/pay/1', newKey(), newKey()]
  await Promise.all([send(proxy, key, { path }), send(proxy, key, { path })])
  await send(proxy, key, { path })
  await send(proxy, key, { path, body: '{"amount":2}' })
  await send(proxy, null, { path })
  await send(proxy, '""', { path })
  await send(proxy, cut, { path: '/pay/cut' })
  await send(proxy, cut, { path: '/pay/cut' })
  for (const outcome of 'executed replayed in_progress misuse passed key_invalid upstream_failed unknown'.split(
    ' ',
  ))
    t.equal(await proxy.metric(`idempotency_requests_total{route="pay",outcome="${outcome}"}`), 1, outcome)
  const series = await seriesOf(proxy)
  const own = series.filter((one) => one.includes('route="pay"'))
  t.ok(own.length <= 120, `${own.length} series`)
  t.ok(series.includes('process_cpu_seconds_total'))
})

void t.test('metrics.defaults: false leaves out Node’s metrics but process_start_time_seconds', async (t) => {
  await using proxy = await proxyInProcess(
    'upstream: { url: "http://127.0.0.1:1" }\nstore: { url: "memory:" }\nmetrics: { defaults: false }\n',
  )
  const series = await seriesOf(proxy)
  t.strictSame(
    series.filter((one) => !one.startsWith('idempotency_')),
    ['process_start_time_seconds'],
  )
  const age = Date.now() / 1000 - (await proxy.metric('process_start_time_seconds'))
  t.ok(age >= 0 && age < 3600, 'of this process')
})

void t.test('the next scrape loads a metrics library that could not be loaded before', async (t) => {
  const metrics = new Metrics()
  failNextImport('prom-client')
  await t.rejects(metrics.exposition(), { message: 'too many open files' })
  t.match((await metrics.exposition()).text, 'idempotency_build_info')
})
