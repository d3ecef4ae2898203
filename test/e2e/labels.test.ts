import t, { type Test } from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { command } from '../support/commands.ts'
import { newKey, send } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { storeUrl } from '../support/replicas.ts'
import { serviceLine } from '../support/service.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

const redis = await emptyRedis(t)
const LABEL = 'ord_7f3c9a'

interface Labelled {
  readonly proxy: TestProxy
  readonly where: readonly string[]
}

async function labelled(t: Test, store: string): Promise<Labelled> {
  const upstream = await upstreamStub(({ target }, response) => {
    if (target === '/break') return void response.destroy()
    response.writeHead(201).end('done')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const admin = adminYaml(t)
  const proxy = await proxyInProcess(`${admin}
upstream: { url: "${upstream.url}" }
store: { url: "${store}" }
defaults: { record: { label: /order_id } }
routes:
  - { name: pay, match: { path: /pay } }
  - { name: break, match: { path: /break } }
  - { name: ship, match: { path: "/orders/:id/ship" }, record: { label: "path::id" } }
  - { name: quiet, match: { path: /quiet }, record: { label: off } }
${serviceLine(store)}`)
  t.teardown(() => proxy.drain())
  const token = /tokenFile: ([^ ,}]+)/.exec(admin)?.[1] as string
  return { proxy, where: ['--admin', proxy.adminUrl, '--token-file', token] }
}

const body = JSON.stringify({ amount: 1, order_id: LABEL })

for (const kind of ['memory', 'sqlite', 'redis'] as const)
  void t.test(`Y18 ${kind}: a record is found by its label`, async (t) => {
    const { proxy, where } = await labelled(t, storeUrl(t, kind, redis))
    const key = newKey()
    await send(proxy, key, { body })
    await send(proxy, newKey(), { path: '/break', body })
    await send(proxy, newKey(), { path: '/orders/A%2F1/ship', body })
    await send(proxy, newKey(), { path: '/quiet', body })
    await send(proxy, newKey())
    t.match(await send(proxy, key, { body }), { replayed: true })

    const all = await command(['list', ...where])
    t.match(all.out, /^RECORD +STATE +ROUTE +REQUEST +LABEL +AGE/)
    t.match(all.out, /A\/1/)
    t.equal(all.out.split('\n').filter((line) => line.includes(LABEL)).length, 2)
    const found = await command(['list', '--label', LABEL, '--json', ...where])
    const { records } = JSON.parse(found.out) as { records: { id: string; route: string; label: string }[] }
    t.strictSame(records.map(({ route, label }) => `${route} ${label}`).sort(), [
      `break ${LABEL}`,
      `pay ${LABEL}`,
    ])
    t.match(await command(['list', '--label', 'ord_7', ...where]), { out: /^no records/ }, 'the whole label')
    const broken = records.find(({ route }) => route === 'break')?.id as string
    t.match((await command(['inspect', broken, ...where])).out, new RegExp(`^label +${LABEL}$`, 'm'))
    t.match((await ask(proxy, `/v1/records/${broken}`)).json, { label: LABEL, state: 'unknown' })
    await command(['resolve', broken, '--retryable', '--reason', 'x', '--yes', ...where])
    t.match((await ask(proxy, `/v1/records/${broken}`)).json, { label: LABEL, state: 'failed_retryable' })

    await proxy.logged(({ msg, outcome }) => msg === 'request' && outcome === 'replayed')
    const lines = proxy.log.filter(({ msg }) => msg === 'request')
    t.strictSame(
      lines.map(({ label }) => label),
      [LABEL, LABEL, 'A/1', undefined, undefined, LABEL],
    )
  })
