import t from 'tap'
import { type Figures, failovers, sumOf } from '../support/failovers.ts'
import type { Losing } from '../support/losses.ts'
import { NO_POSTGRES } from '../support/postgres.ts'
import { PostgresPair } from '../support/postgres-pair.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { RedisPair } from '../support/redis-pair.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'

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

  void t.test(
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

  void t.test(
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
