import { setTimeout as wait } from 'node:timers/promises'
import t from 'tap'
import { METRICS } from '../../src/observe/metrics.ts'
import { newKey, send } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

void t.test('every counter by route begins at 0, so that its first event is an increase', async (t) => {
  await using upstream = await upstreamStub((_, response) => void response.writeHead(201).end())
  await using proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}", timeout: 1s }\nstore: { url: "memory:" }\nroutes: [{ name: pay, match: { path: /pay }, ttl: 1s, lease: 1s }]\n`,
  )
  const text = await (await fetch(`${proxy.adminUrl}/metrics`)).text()
  const of = (name: string, route: string): string[] =>
    text.split('\n').filter((line) => line.startsWith(`${name}{`) && line.includes(`route="${route}"`))
  const counters = Object.entries(METRICS).filter(
    ([name, { kind, labels }]) =>
      kind === 'counter' && labels[0] === 'route' && name !== 'idempotency_shadow_total',
  )
  t.equal(counters.length, 8)
  for (const route of ['pay', 'default'])
    for (const [name] of counters) {
      t.ok(of(name, route).length > 0, `${name} of ${route}`)
      for (const line of of(name, route)) t.match(line, / 0$/)
    }
  t.equal(of('idempotency_requests_total', 'pay').length, 23)
  t.match(text, /^idempotency_pruned_total\{store="memory"\} 0$/m)
  t.match(text, /^idempotency_store_errors_total\{store="memory"\} 0$/m)
  t.same(of('idempotency_retention_seconds', 'pay'), ['idempotency_retention_seconds{route="pay"} 1'])
  t.same(of('idempotency_retention_seconds', 'default'), [
    'idempotency_retention_seconds{route="default"} 86400',
  ])

  t.equal((await send(proxy, newKey())).status, 201)
  await wait(1001)
  t.equal((await send(proxy, newKey())).status, 201)
  t.equal(await proxy.metric('idempotency_pruned_total{store="memory"}'), 1)
})
