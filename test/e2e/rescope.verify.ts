import t from 'tap'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, proxyProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream } from '../support/replicas.ts'

t.setTimeout(120_000)

const FAST = { path: '/fast' }

void t.test(
  'Y20 a replica that was stopped for longer than its mark lasts neither claims nor sends',
  async (t) => {
    await using redis = await RedisServer.start()
    const upstream = await heldUpstream(t)
    const yaml = (more = ''): string =>
      `upstream: { url: "${upstream.url}", connections: 1 }\nstore: { url: "${redis.url}", grace: 1s }\n${more}`
    const old = await proxyProcess(configFile(tempDir(t), yaml()))
    t.teardown(() => old[Symbol.asyncDispose]())
    const [running, claimed, late] = [newKey(), newKey(), newKey()]
    const first = send(old, running)
    await until(() => upstream.seen.length === 1)
    // It has its claim, and waits for the connection to the upstream.
    const waiting = send(old, claimed)
    await until(
      async () => (await old.metric('idempotency_claims_total{route="default",result="created"}')) === 2,
    )
    await using young = await proxyInProcess(yaml('defaults: { scope: { caller: none } }'))
    t.match(await send(young, claimed, FAST), { status: 503 })
    old.kill('SIGSTOP')
    await young.logged(({ msg }) => String(msg).startsWith('replicas: all that are alive'))
    t.match(await send(young, claimed, FAST), { status: 201 })
    const stopped = send(old, late)
    old.kill('SIGCONT')
    t.match(await stopped, { status: 503, code: 'idempotency_store_unavailable' })
    upstream.finish(1)
    t.match(await first, { status: 201 })
    t.match(await waiting, { status: 502, code: 'upstream_unreachable' }, 'nothing was sent')
    t.same(
      upstream.seen.map(({ headers }) => [running, claimed, late].find((key) => headers.includes(key))),
      [running, claimed],
    )
  },
)
