import t from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { type Figures, failovers, sumOf } from '../support/failovers.ts'
import type { Losing } from '../support/losses.ts'
import { NO_POSTGRES } from '../support/postgres.ts'
import { PostgresPair } from '../support/postgres-pair.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { RedisPair } from '../support/redis-pair.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { heldUpstream } from '../support/replicas.ts'

interface Topology {
  readonly start: () => Promise<Losing>
  /** At the same time. */
  readonly stores: number
  /** In `npm test`. */
  readonly failovers: number
}

const TOPOLOGIES: Readonly<Record<string, Topology>> = {
  redis: { start: RedisPair.start, stores: 4, failovers: 8 },
  sentinel: {
    stores: 2,
    failovers: 2,
    async start() {
      const group = await SentinelGroup.start()
      await group.impatient()
      return group
    },
  },
  cluster: {
    stores: 2,
    failovers: 2,
    start: () => RedisCluster.start({ replicas: 1, nodeTimeout: 1000 }),
  },
  postgres: { start: PostgresPair.start, stores: 2, failovers: 4 },
}

/** `FAILOVERS=300 TOPOLOGY=sentinel node test/e2e/failovers.verify.ts` measures the figures of docs/stores.md; without TOPOLOGY, for all of them. */
const { FAILOVERS, TOPOLOGY } = process.env
t.setTimeout(600_000 + 60_000 * Number(FAILOVERS ?? 0))
// A failover is mostly waiting; figures are measured one topology after the other.
t.jobs = FAILOVERS === undefined ? 2 : 1
/** The default, or longer where other stores fail over beside it: proxies must be scheduled within it. */
const GRACE = FAILOVERS === undefined ? '5s' : '2s'

for (const [name, topology] of Object.entries(TOPOLOGIES)) {
  if (name !== (TOPOLOGY ?? name)) continue
  const skip = name === 'postgres' && NO_POSTGRES
  const { start, stores } = topology
  const enough = Number(FAILOVERS ?? topology.failovers)

  t.test(
    `W01 ${name}: ${enough} failovers under load execute no key twice`,
    { skip, buffered: true },
    async (t) => {
      const figures = await failovers(start, stores, GRACE, (so) => sumOf(so.failovers) >= enough)
      t.comment(JSON.stringify(figures))
      t.same(figures.twice, [], `at worst, this process did not run for ${figures.stalled} ms`)
      t.equal(figures.splits, 0)
      t.ok(figures.keys > enough)
    },
  )

  t.test(
    `W01 ${name}: without a grace, failovers execute keys twice: the test can fail`,
    { skip, buffered: true },
    async (t) => {
      const isOver = (so: Figures) => so.twice.length > 0 && sumOf(so.failovers) >= enough / 10
      const figures = await failovers(start, stores, 'off', isOver)
      t.comment(JSON.stringify(figures))
      t.ok(figures.twice.length > 0)
    },
  )
}

const FAST = { path: '/fast' }

/** Retries until the store is back. */
async function again(proxy: TestProxy, key: string, ask = {}): Promise<Reply> {
  let reply = await send(proxy, key, ask)
  await until(async () => reply.status !== 503 || ((reply = await send(proxy, key, ask)), false))
  return reply
}

t.test('W04 an owner cut off for longer than the grace finds another owner: a split brain', async (t) => {
  await using pair = await RedisPair.start()
  const upstream = await heldUpstream(t)
  const yaml = (url: string) => `upstream: { url: "${upstream.url}" }\nstore: { url: "${url}", grace: 2s }\n`
  await using a = await proxyInProcess(yaml(pair.lateUrl))
  await using b = await proxyInProcess(yaml(pair.url))
  await until(async () => (await a.metric('idempotency_store_in_grace{store="redis"}')) === 0)
  await pair.lag()
  const [running, ended] = [newKey(), newKey()]
  const first = send(a, running)
  await until(() => upstream.seen.length === 1)
  t.match(await send(a, ended, FAST), { status: 201 })
  await pair.promote()
  const second = again(b, running)
  t.match(await again(b, ended, FAST), { status: 201, body: /execution [34]/ })
  await until(() => upstream.seen.length === 4)
  pair.tellLate()
  await until(async () => (await a.metric('idempotency_split_total{route="default"}')) >= 2)
  await a.logged(
    ({ msg, fence, foundFence }) =>
      String(msg).startsWith('split brain') && Number(fence) > 0 && Number(foundFence) > 0,
  )
  t.match(await send(b, running), { status: 409, code: 'idempotency_outcome_unknown' })
  t.match(
    await send(b, ended, FAST),
    { status: 201, replayed: true, body: /execution [34]/ },
    'completed stays completed',
  )
  for (const n of [1, 2, 3, 4]) upstream.finish(n)
  await Promise.all([first, second])
  for (const proxy of [a, b])
    t.match(
      await send(proxy, running),
      { status: 409, code: 'idempotency_outcome_unknown' },
      'neither outcome wins',
    )
})
