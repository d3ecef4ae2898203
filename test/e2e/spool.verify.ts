import { readdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { command } from '../support/commands.ts'
import {
  configFile,
  gate,
  newKey,
  onlyRecord,
  redisSnapshot,
  STATE,
  send,
  stateOf,
  tempDir,
  until,
} from '../support/e2e.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

/** A Redis for this test alone, an upstream that holds its responses, and proxies as processes with one spool directory. */
async function world(t: Test) {
  const redis = await RedisServer.start()
  t.teardown(() => redis[Symbol.asyncDispose]())
  const work = gate()
  let n = 0
  const upstream = await upstreamStub(async (_, response) => {
    const answer = `execution ${++n}`
    await work.opened
    response.writeHead(201).end(answer)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const dir = tempDir(t)
  const spool = join(dir, 'spool')
  const yaml = (more = '', directory = spool): string =>
    `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", spool: "${directory}" }\ndrain: { timeout: 100ms }\n${more}`
  const start = async (more?: string): Promise<ChildProxy> => {
    const proxy = await proxyProcess(configFile(dir, yaml(more)))
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  return { redis, upstream, work, dir, spool, yaml, start }
}

/** The response of a proxy whose Redis is killed between claim and completion. */
async function answeredWithout(
  { redis, upstream, work }: Pick<Awaited<ReturnType<typeof world>>, 'redis' | 'upstream' | 'work'>,
  proxy: ChildProxy,
  key: string,
): Promise<string> {
  const asked = send(proxy, key)
  await upstream.arrived(1)
  await redis.kill()
  await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
  work.open()
  const { status, body, replayed } = await asked
  if (status !== 201 || replayed) throw new Error(`answered ${status}`)
  return body
}

async function killed(proxy: ChildProxy): Promise<void> {
  proxy.kill('SIGKILL')
  await proxy.exited
}

void t.test('a clean shutdown with the store down keeps the outcome on disk, and says so', async (t) => {
  const w = await world(t)
  const key = newKey()
  const proxy = await w.start()
  const body = await answeredWithout(w, proxy, key)
  await proxy.drain()
  t.equal(await proxy.exited, 0)
  t.match(await proxy.logged(({ msg }) => /kept on disk/.test(String(msg))), {
    level: 'error',
    outcome: 'completed',
  })
  t.notOk(proxy.log.some(({ msg }) => /is lost/.test(String(msg))))
  await w.redis.start()
  t.strictSame((await send(await w.start(), key)).body, body)
  t.equal(w.upstream.seen.length, 1)
})

void t.test('a call that the drain cuts off is spooled as unknown', async (t) => {
  const w = await world(t)
  const key = newKey()
  const proxy = await w.start()
  const asked = send(proxy, key).catch(() => null)
  await w.upstream.arrived(1)
  await w.redis.kill()
  await proxy.drain()
  await asked
  const next = await w.start()
  t.equal((await send(next, key)).code, 'idempotency_outcome_unknown')
  await w.redis.start()
  await until(async () => (await next.metric('idempotency_spooled')) === 0)
  t.equal(stateOf((await onlyRecord(w.redis)).bytes), STATE.unknown)
  t.equal(w.upstream.seen.length, 1)
})

void t.test('the outcome of a route that the configuration no longer has is still written', async (t) => {
  const w = await world(t)
  const key = newKey()
  const proxy = await w.start('routes: [{ name: pay, match: { path: /pay }, ttl: 3d }]')
  await answeredWithout(w, proxy, key)
  await killed(proxy)
  await w.redis.start()
  const next = await w.start('unmatched: pass')
  await until(async () => (await next.metric('idempotency_spooled')) === 0)
  t.equal(await next.metric('idempotency_completions_total{route="pay",result="stored"}'), 1)
  const { key: name, bytes } = await onlyRecord(w.redis)
  t.equal(stateOf(bytes), STATE.completed)
  const left = Number(await w.redis.command('PTTL', name))
  t.ok(left > 2.9 * 86_400_000 && left <= 3 * 86_400_000, 'kept as long as its route said')
})

void t.test('V01 a renamed service leaves the outcomes of its old name in the spool', async (t) => {
  const w = await world(t)
  const key = newKey()
  const first = await w.start('service: orders')
  const body = await answeredWithout(w, first, key)
  await killed(first)
  await w.redis.start()

  const second = await w.start('service: payments')
  t.match(await second.logged(({ msg }) => /do not belong to this service/.test(String(msg))), {
    level: 'warn',
    service: 'payments',
    services: { orders: 1 },
  })
  t.equal(await second.metric('idempotency_spooled'), 0)
  t.match(await send(second, newKey()), { status: 201, replayed: false })
  const { out, code } = await command(['doctor', '--config', configFile(w.dir, w.yaml('service: payments'))])
  t.equal(code, 1)
  t.match(out, /1 outcome of service orders in .* that payments will not write: start a proxy of orders/)
  await second.drain()
  await second.exited
  const keys = [...(await redisSnapshot(w.redis)).keys()].filter((key) =>
    /^idempotency:payments:.*:r:/.test(key),
  )
  t.equal(keys.length, 1, 'only its own record')

  const third = await w.start('service: orders')
  t.strictSame((await send(third, key)).body, body)
  await until(async () => (await third.metric('idempotency_spooled')) === 0)
  await until(() => readdirSync(w.spool).length === 1)
  const executed = w.upstream.seen.filter(({ method }) => method === 'POST')
  t.equal(executed.length, 2, 'one execution for each service')
})

void t.test('a proxy does not start on a spool directory in use, or on a file in its place', async (t) => {
  const w = await world(t)
  await w.start()
  await t.rejects(proxyProcess(configFile(w.dir, w.yaml())), {
    message: new RegExp(
      `ended with 1: .*cannot start: store\\.spool: the directory ${w.spool} cannot be used: another process is using it`,
    ),
  })
  const file = join(w.dir, 'file')
  writeFileSync(file, '')
  await t.rejects(proxyProcess(configFile(w.dir, w.yaml('', file))), {
    message: new RegExp(`cannot start: store\\.spool: the directory ${file} cannot be used: EEXIST`),
  })
})
