import { existsSync } from 'node:fs'
import t, { type Test } from 'tap'
import { configFile, gate, newKey, type Reply, STATE, send, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { SHARED, type SharedServer, sharedServers } from '../support/shared.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

const servers = await sharedServers(t)
t.beforeEach(async () => {
  for (const kind of SHARED) await servers[kind].clear()
})

/** An upstream that holds `/slow…` until the gate opens; every response is different. */
async function slowUpstream(t: Test) {
  const work = gate()
  let n = 0
  const stub = await upstreamStub(async ({ target }, response) => {
    const answer = `execution ${++n}`
    if (target.startsWith('/slow')) await work.opened
    response.writeHead(201, { 'content-type': 'text/plain', 'x-execution': String(n) }).end(answer)
  })
  t.teardown(() => stub[Symbol.asyncDispose]())
  return { ...stub, work }
}

async function processes(t: Test, count: number, yaml: string, env: Readonly<Record<string, string>>[] = []) {
  const file = configFile(tempDir(t), yaml)
  const started = await Promise.all(
    Array.from({ length: count }, (_, i) => proxyProcess(file, [], env[i] ?? {})),
  )
  for (const one of started) t.teardown(() => one[Symbol.asyncDispose]())
  return started
}

function asExpected(t: Test, replies: readonly Reply[], answer = 'execution 1'): void {
  const live = replies.filter(({ status, replayed }) => status === 201 && !replayed)
  t.equal(live.length, 1, 'one request is answered by its own execution')
  for (const reply of replies) {
    if (reply.status === 201) t.equal(reply.body, answer)
    else t.strictSame([reply.status, reply.code], [409, 'idempotency_key_in_progress'])
  }
}

/** The first 49 of 50 responses, in order of arrival. */
function losers(asking: readonly Promise<Reply>[]): Promise<Reply>[] {
  const slots = asking.slice(1).map(() => Promise.withResolvers<Reply>())
  let next = 0
  for (const one of asking) void one.then((reply) => slots[next++]?.resolve(reply))
  return slots.map(({ promise }) => promise)
}

for (const store of SHARED.map((kind) => servers[kind]))
  void t.test(`L02 50 identical POSTs over three replicas on one ${store.kind} execute once`, async (t) => {
    const upstream = await slowUpstream(t)
    const replicas = await processes(
      t,
      3,
      `upstream: { url: "${upstream.url}" }\nstore: { url: "${store.url}", timeout: 10s }`,
    )
    const on = (i: number) => replicas[i % 3] as TestProxy
    for (let round = 0; round < 5; round++) {
      const key = newKey()
      const replies = await Promise.all(Array.from({ length: 50 }, (_, i) => send(on(i), key)))
      asExpected(t, replies, `execution ${round + 1}`)
      t.equal(upstream.seen.length, round + 1)
    }
    const key = newKey()
    const asking = Array.from({ length: 50 }, (_, i) => send(on(i), key, { path: '/slow' }))
    await upstream.arrived(6)
    t.equal((await Promise.all(losers(asking))).length, 49)
    upstream.work.open()
    asExpected(t, await Promise.all(asking), 'execution 6')
    t.equal(upstream.seen.length, 6)
    for (const replica of replicas) t.equal((await send(replica, key, { path: '/slow' })).body, 'execution 6')
  })

/** Resolves when the lease of the only record has lapsed by the store's clock. */
async function lapsed(store: SharedServer): Promise<void> {
  const { due } = await store.only()
  await until(async () => (await store.time()) > due)
}

for (const store of SHARED.map((kind) => servers[kind]))
  for (const policy of ['unknown', 'retry'] as const)
    t.test(`L07 L08 ${store.kind}: after the kill of an owner, retries follow ${policy}`, async (t) => {
      const upstream = await slowUpstream(t)
      const [owner, other, third] = await processes(
        t,
        3,
        `upstream: { url: "${upstream.url}" }\nstore: { url: "${store.url}" }\ndefaults: { lease: 2s, onLeaseExpired: ${policy} }`,
      )
      if (!owner || !other || !third) throw new Error('three are started')
      const key = newKey()
      const lost = send(owner, key, { path: '/slow' }).catch((error: unknown) => error)
      await upstream.arrived(1)
      owner.kill('SIGKILL')
      t.ok((await lost) instanceof Error)
      const early = await send(other, key, { path: '/slow' })
      t.strictSame([early.status, early.code], [409, 'idempotency_key_in_progress'], 'within the lease')
      const wait = Number(early.headers.get('retry-after'))
      t.ok(wait >= 1 && wait <= 2, `Retry-After ${wait} is at most the rest of the lease`)
      await lapsed(store)
      if (policy === 'unknown') {
        const first = await send(other, key, { path: '/slow' })
        t.strictSame(
          [first.status, first.code],
          [409, 'idempotency_outcome_unknown'],
          'it reads as unknown at once',
        )
        // The sweeper writes that down within about a second; from then on nothing changes the record.
        await until(async () => (await store.only()).state === STATE.unknown)
        const before = await store.snapshot()
        const late = await Promise.all(
          Array.from({ length: 20 }, (_, i) => send(i % 2 ? other : third, key, { path: '/slow' })),
        )
        for (const { status, code, headers } of late) {
          t.strictSame([status, code], [409, 'idempotency_outcome_unknown'])
          t.ok(Number(headers.get('retry-after')) >= 1)
        }
        t.equal(upstream.seen.length, 1)
        t.strictSame(await store.snapshot(), before, 'refused requests write nothing')
        return
      }
      const late = Array.from({ length: 20 }, (_, i) => send(i % 2 ? other : third, key, { path: '/slow' }))
      await upstream.arrived(2)
      upstream.work.open()
      asExpected(t, await Promise.all(late), 'execution 2')
      t.equal(upstream.seen.length, 2, 'exactly one of twenty executes')
      t.equal((await send(third, key, { path: '/slow' })).body, 'execution 2')
      t.equal(
        (await other.metric('idempotency_claims_total{route="default",result="failed_retry"}')) +
          (await third.metric('idempotency_claims_total{route="default",result="failed_retry"}')),
        1,
      )
    })

for (const store of SHARED.map((kind) => servers[kind]))
  t.test(`X07 ${store.kind}: an owner paused for two leases: unknown, then its outcome counts`, async (t) => {
    const upstream = await slowUpstream(t)
    const [owner, other] = (await processes(
      t,
      2,
      `upstream: { url: "${upstream.url}" }\nstore: { url: "${store.url}" }\ndefaults: { lease: 1s }`,
    )) as [ChildProxy, ChildProxy]
    const key = newKey()
    const asked = send(owner, key, { path: '/slow' })
    await upstream.arrived(1)
    owner.kill('SIGSTOP')
    await lapsed(store)
    t.equal((await send(other, key, { path: '/slow' })).code, 'idempotency_outcome_unknown')
    owner.kill('SIGCONT')
    upstream.work.open()
    t.equal((await asked).body, 'execution 1')
    for (const replica of [owner, other])
      t.match(await send(replica, key, { path: '/slow' }), { replayed: true, body: 'execution 1' })
    t.equal(upstream.seen.length, 1)
  })

const LIBRARY = [
  '/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1',
  '/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1',
].find((path) => existsSync(path))

t.test(
  'L12 replicas whose clocks differ by 20 minutes agree on leases and retention',
  LIBRARY === undefined ? { skip: 'libfaketime is not installed (apt-get install faketime)' } : {},
  async (t) => {
    const store = servers.redis
    const upstream = await slowUpstream(t)
    const clock = (FAKETIME: string) => ({
      LD_PRELOAD: LIBRARY as string,
      FAKETIME,
      FAKETIME_DONT_FAKE_MONOTONIC: '1',
      DONT_FAKE_MONOTONIC: '1',
    })
    const [behind, ahead] = await processes(
      t,
      2,
      `upstream: { url: "${upstream.url}", timeout: 3s }
store: { url: "${store.url}" }
defaults: { lease: 2s, ttl: 3s, statusHeader: true }`,
      [clock('-10m'), clock('+10m')],
    )
    if (!behind || !ahead) throw new Error('two are started')
    const apart = timeOf(ahead.log[0]) - timeOf(behind.log[0])
    t.ok(apart > 19 * 60_000, `their clocks differ by ${apart} ms`)
    for (const [owner, other] of [
      [behind, ahead],
      [ahead, behind],
    ] as const) {
      await store.clear()
      const key = newKey()
      const done = await send(owner, key)
      const left = Date.parse(done.headers.get('idempotency-expires') as string) - (await store.time())
      t.ok(left > 0 && left <= 3000, `expires in ${left} ms of the store's time`)
      const replay = await send(other, key)
      t.ok(replay.replayed, 'a replica 20 minutes apart replays it')
      t.equal(replay.headers.get('idempotency-expires'), done.headers.get('idempotency-expires'))
      const n = upstream.seen.length
      await until(async () => (await store.count()) === 0)
      t.notOk((await send(other, key)).replayed, 'after ttl it executes again')
      t.equal(upstream.seen.length, n + 1)
    }
    await store.clear()
    const key = newKey()
    const n = upstream.seen.length
    const lost = send(behind, key, { path: '/slow' }).catch((error: unknown) => error)
    await upstream.arrived(n + 1)
    const running = await send(ahead, key, { path: '/slow' })
    t.equal(running.code, 'idempotency_key_in_progress', 'a clock ten minutes ahead does not end a lease')
    behind.kill('SIGKILL')
    await lost
    await lapsed(store)
    t.equal((await send(ahead, key, { path: '/slow' })).code, 'idempotency_outcome_unknown')
    t.equal(upstream.seen.length, n + 1)
  },
)

function timeOf(line: Record<string, unknown> | undefined): number {
  return Date.parse(String(line?.['time']))
}
