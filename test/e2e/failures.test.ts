/** One path of each family whose faults and combinations are in the second tier: `*.verify.ts`. */
import { randomBytes } from 'node:crypto'
import { readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { configFile, gate, newKey, onlyRecord, STATE, send, stateOf, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis, freePort } from '../support/redis.ts'
import { replicas } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const redis = await emptyRedis(t)

/** An upstream that holds `/gated` until `work` opens. */
async function world(t: Test) {
  const work = gate()
  let n = 0
  const upstream = await upstreamStub(async ({ target }, response) => {
    const answer = `execution ${++n}`
    if (target === '/gated') await work.opened
    response.writeHead(201).end(answer)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = (store: string, more = '') =>
    `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { ${store} }\n${more}\n`
  const start = async (store: string, more?: string) =>
    (await replicas(t, 1, yaml(store, more)))[0] as TestProxy
  const fork = async (store: string, more?: string): Promise<ChildProxy> => {
    const proxy = await proxyProcess(configFile(tempDir(t), yaml(store, more)))
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  return { upstream, work, start, fork, yaml }
}

const GATED = { path: '/gated' }
const isDown = ({ msg }: Record<string, unknown>) => /store (disconnected|error)/.test(String(msg))

t.test('X06 L07 kill -9 after the upstream executed: in progress, then unknown, never again', async (t) => {
  const { upstream, fork, start } = await world(t)
  const store = `url: "sqlite:${tempDir(t)}/store.db"`
  const owner = await fork(store, 'defaults: { lease: 5s }')
  const key = newKey()
  const asked = send(owner, key, GATED).catch((error: unknown) => error)
  await upstream.arrived(1)
  owner.kill('SIGKILL')
  t.equal(await owner.exited, 'SIGKILL')
  t.ok((await asked) instanceof Error)
  const next = await start(store)
  const told: (string | null)[] = []
  await until(async () => {
    told.push((await send(next, key, GATED)).code)
    return told.at(-1) !== 'idempotency_key_in_progress'
  })
  t.equal(told.at(-1), 'idempotency_outcome_unknown')
  t.equal(upstream.seen.length, 1)
})

t.test('R01 with Redis down a claim gets 503, traffic without keys goes on; then it recovers', async (t) => {
  const { upstream, start } = await world(t)
  const proxy = await start(`url: "${redis.url}"`)
  const key = newKey()
  await redis.stop()
  await proxy.logged(isDown)
  const refused = await send(proxy, key)
  t.strictSame([refused.status, refused.code], [503, 'idempotency_store_unavailable'])
  t.match(refused.headers.get('retry-after'), /^[1-9]\d*$/)
  t.equal(upstream.seen.length, 0)
  t.equal(await proxy.metric('idempotency_store_up{store="redis"}'), 0)
  t.equal((await send(proxy, null)).status, 201)
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200, 'the fleet stays in service')
  await redis.start()
  await until(async () => (await send(proxy, key)).status === 201)
  t.ok((await send(proxy, key)).replayed)
  t.equal(upstream.seen.length, 2)
})

t.test('R01 a process with no Redis at its address exits 0 on SIGTERM, and logs no password', async (t) => {
  const { fork } = await world(t)
  const proxy = await fork(`url: "redis://user:hush@127.0.0.1:${await freePort()}"`)
  t.equal((await send(proxy, newKey())).status, 503)
  proxy.kill('SIGTERM')
  t.equal(await proxy.exited, 0)
  t.notMatch(JSON.stringify(proxy.log), /hush/)
})

void t.test('R04 R05 Redis dies after the claim, then the proxy: its spool keeps the outcome', async (t) => {
  const { upstream, work, fork, start } = await world(t)
  const spool = join(tempDir(t), 'spool')
  const store = `url: "${redis.url}", spool: "${spool}"`
  const proxy = await fork(store)
  const key = newKey()
  const asked = send(proxy, key, GATED)
  await upstream.arrived(1)
  await redis.kill()
  await proxy.logged(isDown)
  work.open()
  t.match(await asked, { status: 201, body: 'execution 1', replayed: false })
  t.match(await send(proxy, key, GATED), { body: 'execution 1', replayed: true })
  proxy.kill('SIGKILL')
  await proxy.exited
  await redis.start()
  t.equal(stateOf((await onlyRecord(redis)).bytes), STATE.in_progress)
  const next = await start(store)
  t.match(await send(next, key, GATED), { status: 201, body: 'execution 1', replayed: true })
  await until(async () => (await next.metric('idempotency_spooled')) === 0)
  t.equal(stateOf((await onlyRecord(redis)).bytes), STATE.completed)
  await until(() => readdirSync(spool).length === 1)
  t.equal(upstream.seen.length, 1)
})

void t.test('W01 L11 a Redis flushed during a call loses nothing that a proxy knows', async (t) => {
  const { upstream, work, start } = await world(t)
  const [a, b] = [
    await start(`url: "${redis.url}", grace: 2s`),
    await start(`url: "${redis.url}", grace: 2s`),
  ]
  const [running, done] = [newKey(), newKey()]
  const first = send(a, running, GATED)
  await upstream.arrived(1)
  t.equal((await send(a, done)).status, 201)
  await redis.command('FLUSHALL')
  const again = async (key: string, ask = {}) => {
    let reply = await send(b, key, ask)
    await until(async () => (reply.status === 503 ? ((reply = await send(b, key, ask)), false) : true))
    return reply
  }
  t.match(await again(running, GATED), { status: 409, code: 'idempotency_key_in_progress' })
  t.match(await again(done), { status: 201, replayed: true })
  await a.logged(({ msg }) => String(msg).includes('recent claims may be lost'))
  await a.logged(({ msg }) => String(msg).includes('they were written again'))
  work.open()
  t.equal((await first).status, 201)
  t.match(await again(running, GATED), { status: 201, replayed: true })
  t.equal(upstream.seen.length, 2)
})

t.test('S09 W08 a sealed store shows no secret, and without its key a record never executes', async (t) => {
  const { upstream, start } = await world(t)
  const dir = tempDir(t)
  const [one, two] = ['one', 'two'].map((id) => {
    writeFileSync(join(dir, id), randomBytes(32).toString('hex'))
    return `encryption: { keys: [{ id: ${id}, file: "${join(dir, id)}" }] }`
  })
  const url = `url: "sqlite:${dir}/store.db"`
  const own = await start(`${url}, ${one}`)
  const ask = { path: '/secret-path' }
  t.equal((await send(own, 'secret-key-1', ask)).status, 201)
  t.ok((await send(own, 'secret-key-1', ask)).replayed)
  await own.drain()
  const written = readFileSync(`${dir}/store.db`, 'latin1')
  for (const secret of ['secret-key-1', 'secret-path', 'execution 1']) t.notOk(written.includes(secret))
  const other = await start(`${url}, ${two}`)
  t.equal((await send(other, 'secret-key-1', ask)).code, 'idempotency_store_unavailable')
  t.equal(await other.metric('idempotency_seal_errors_total{reason="unknown_key"}'), 1)
  t.equal(upstream.seen.length, 1)
})
