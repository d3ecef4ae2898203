import t from 'tap'
import { explore, sample } from '../model/explore.ts'
import { protocol } from '../model/promises.ts'
import type { Rules } from '../model/protocol.ts'
import { nothingYet, replayGuard } from '../model/replay-guard.ts'
import { VARIANTS } from '../model/variants.ts'
import { simulateAll, timeline } from './batch.ts'
import { PLANTS } from './plants.ts'

/*
 * A little of what `npm run verify` does at length: simulations of the whole proxy, and the models of its protocol. The seeds are those that
 * show the planted mistakes: whoever makes one of these again sees it here.
 */

t.setTimeout(300_000)

const SEEDS = [...new Set(PLANTS.map(({ seed }) => seed))]
const PATHS = 40

void t.test('X06 X03 whatever happens to clients, replicas, store and upstream', async (t) => {
  let executions = 0
  for (const seed of SEEDS) {
    const batch = await simulateAll(seed, 1)
    if (batch.broken !== null) t.fail(await timeline(seed))
    executions += batch.executions
  }
  t.ok(executions > SEEDS.length / 2, `${executions} executions`)
})

void t.test('a seed repeats its run event for event, and its timeline tells what happened', async (t) => {
  const told = await timeline(7)
  t.equal(await timeline(7), told)
  t.not(await timeline(8), told)
  for (const what of [
    /^seed 7: nothing is wrong$/m,
    /lease 3000 ms/,
    /client .*sends "first"/,
    /store .*holds in_progress/,
  ])
    t.match(told, what)
})

void t.test('two requests: no way leads to what is forbidden, and the guard goes the same', async (t) => {
  const rules = VARIANTS(2)['plain'] as Rules
  const found = explore(protocol(rules))
  t.equal(found.broken, null)
  const followed = nothingYet()
  for (const path of sample(found, PATHS)) await replayGuard(path, rules, followed)
  t.ok(followed.paths > PATHS / 2 && followed.sent > 0 && followed.answers > 0)
})
