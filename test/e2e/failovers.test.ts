import t from 'tap'
import { failoversOf, failoversWithoutGrace } from '../support/failovers.ts'
import { RedisPair } from '../support/redis-pair.ts'

/** Failovers with a grace, over all pairs (FAILOVERS=300 for figures: docs/stores.md). */
const FAILOVERS = Number(process.env['FAILOVERS'] ?? 16)
/** Without one, at least. */
const WITHOUT = Math.max(8, Math.floor(FAILOVERS / 10))
const PAIRS = 4
t.setTimeout(300_000 + 10_000 * FAILOVERS)

void t.test(`W01 ${FAILOVERS} failovers under load execute no key twice`, async (t) => {
  const figures = await failoversOf(RedisPair.start, PAIRS, FAILOVERS, '2s')
  t.comment(JSON.stringify(figures))
  t.equal(figures.twice, 0)
  t.equal(figures.splits, 0)
  t.ok(figures.keys > FAILOVERS)
})

void t.test('W01 without a grace they do: the test can fail', async (t) => {
  const figures = await failoversWithoutGrace(RedisPair.start, PAIRS, WITHOUT)
  t.comment(JSON.stringify(figures))
  t.ok(figures.twice > 0)
})
