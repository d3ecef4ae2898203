import t, { type Test } from 'tap'
import { IDENTIFICATION_MARK } from '../../src/store/marks.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { heldUpstream } from '../support/replicas.ts'

t.setTimeout(120_000)
t.jobs = 4

const FAST = { path: '/fast' }
const REFUSED = { status: 503, code: 'idempotency_store_unavailable' }

/** More of a configuration, by which another record is found. */
const SCOPE = '\ndefaults: { scope: { caller: "header:x-session" } }'

async function world(t: Test) {
  const redis = await RedisServer.start()
  t.teardown(() => redis.stop())
  const upstream = await heldUpstream(t)
  const yaml = (more: string): string =>
    `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", grace: 2s }${more}\n`
  const start = async (more = ''): Promise<TestProxy> => {
    const proxy = await proxyInProcess(yaml(more))
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  /** As if the time had passed after which nobody who has ended counts as alive. */
  const nobodyIsLeft = async (): Promise<void> => {
    const [mark] = (await redis.command('KEYS', `*:r:${IDENTIFICATION_MARK}`)) as string[]
    await redis.command('PEXPIRE', mark as string, '1')
  }
  return { redis, upstream, yaml, start, nobodyIsLeft }
}

async function readiness({ adminUrl }: TestProxy): Promise<{ status: number; conflict: string | null }> {
  const response = await fetch(`${adminUrl}/readyz`)
  const { conflict } = (await response.json()) as { conflict: string | null }
  return { status: response.status, conflict }
}

void t.test('Y20 a replica that identifies records differently waits for the others to end', async (t) => {
  const { upstream, start } = await world(t)
  const old = await start()
  const key = newKey()
  t.match(await send(old, key, FAST), { status: 201 })
  const young = await start(SCOPE)
  t.match(await readiness(young), { status: 503, conflict: /\(defaults\.scope\) is alive.*keys of default/ })
  t.match(await readiness(old), { status: 200, conflict: null })
  t.match(await young.logged(({ msg }) => msg === 'replicas: nothing is claimed'), { why: /defaults\.scope/ })
  t.match(await send(young, key, FAST), REFUSED, 'the retry at the other replica executes nothing')
  t.match(await send(young, newKey(), FAST), REFUSED)
  t.match(await send(old, newKey(), FAST), { status: 201 }, 'the first goes on')
  t.equal(upstream.seen.length, 2)
  const same = await start()
  t.match(await readiness(same), { status: 200 }, 'and so does one that agrees with it')
  t.match(await send(same, key, FAST), { status: 201, replayed: true })
  await old.drain()
  t.match(await send(young, newKey(), FAST), REFUSED, 'there is another')
  await same.drain()
  // Nobody waits for the mark to expire.
  await until(async () => (await readiness(young)).status === 200)
  t.match(await send(young, newKey(), FAST), { status: 201 })
  await young.logged(
    ({ msg }) => msg === 'replicas: all that are alive identify records alike; this one may claim',
  )
})

t.test('two APIs under one service are told of each other', async (t) => {
  const { upstream, yaml, start } = await world(t)
  const one = await start()
  const other = await proxyInProcess(yaml('').replace(upstream.url, 'http://127.0.0.1:1'))
  t.teardown(() => other[Symbol.asyncDispose]())
  const saysSo = ({ msg }: { msg?: unknown }): boolean =>
    String(msg).startsWith('replicas: another replica of this service has a different upstream.url')
  t.ok(await other.logged(saysSo))
  t.ok(await one.logged(saysSo), 'with its next renewal')
  t.match(await send(one, newKey(), FAST), { status: 201 }, 'it may be another address of the same API')
})

t.test('the next API on a file of the same service is told', async (t) => {
  const store = `sqlite:${tempDir(t)}/records.db`
  const startWith = (port: number) =>
    proxyInProcess(`upstream: { url: "http://127.0.0.1:${port}" }\nstore: { url: "${store}" }`)
  const warning = 'the last proxy of this service on this store forwarded to another upstream.url; '
  const isWarned = async (proxy: TestProxy): Promise<boolean> => {
    await proxy.logged(({ msg }) => msg === 'listening')
    return proxy.log.some(({ msg }) => String(msg).startsWith(warning))
  }
  for (const [port, expected] of [
    [1, false],
    [1, false],
    [2, true],
  ] as const) {
    await using proxy = await startWith(port)
    t.equal(await isWarned(proxy), expected, `port ${port}`)
  }
})

t.test('Y20 with --accept-rescope it claims at once, and says which keys may execute twice', async (t) => {
  const { upstream, yaml, start, nobodyIsLeft } = await world(t)
  const old = await start()
  const key = newKey()
  t.match(await send(old, key, FAST), { status: 201 })
  const file = configFile(tempDir(t), yaml(SCOPE))
  const young = await proxyProcess(file, ['--accept-rescope'])
  t.teardown(() => young[Symbol.asyncDispose]())
  t.match(await readiness(young), { status: 200, conflict: null })
  const { why } = await young.logged(({ msg }) => msg === 'replicas: this one claims beside others')
  t.match(why, /defaults\.scope.*keys of default may execute twice/)
  t.match(await send(young, key, FAST), { status: 201, replayed: false })
  t.match(await send(old, newKey(), FAST), { status: 201 })
  t.equal(upstream.seen.length, 3)
  await old.drain()
  await nobodyIsLeft()
  await young.logged(({ msg }) => String(msg).startsWith('replicas: all that are alive'))
  const third = await start()
  t.match(await send(third, newKey(), FAST), REFUSED, 'now it decides')
})
