import t from 'tap'
import { failoversOf, failoversWithoutGrace } from '../support/failovers.ts'
import { NO_POSTGRES } from '../support/postgres.ts'
import { PostgresPair } from '../support/postgres-pair.ts'

/** Failovers with a grace, over all pairs (FAILOVERS=50 for figures: docs/stores.md). */
const FAILOVERS = Number(process.env['FAILOVERS'] ?? 4)
/** Without one, at least. */
const WITHOUT = Math.max(4, Math.floor(FAILOVERS / 10))
const PAIRS = 2
t.setTimeout(600_000 + 30_000 * FAILOVERS)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests()

function tests(): void {
  void t.test(`W01 ${FAILOVERS} failovers of PostgreSQL under load execute no key twice`, async (t) => {
    const figures = await failoversOf(PostgresPair.start, PAIRS, FAILOVERS, '2s')
    t.comment(JSON.stringify(figures))
    t.equal(figures.twice, 0)
    t.equal(figures.splits, 0)
    t.ok(figures.keys > FAILOVERS)
  })

  void t.test('W01 without a grace they do: the test can fail', async (t) => {
    const figures = await failoversWithoutGrace(PostgresPair.start, PAIRS, WITHOUT)
    t.comment(JSON.stringify(figures))
    t.ok(figures.twice > 0)
  })
}
