import t from 'tap'
import { route } from './harness.ts'
import { explore, explored, runsOr } from './playing.ts'

t.setTimeout(600_000)

const RUNS = runsOr(150)

explore(t, RUNS, RUNS)

for (const places of [
  ['mirror', 'new'],
  ['plain', 'new'],
] as const)
  void t.test(`W09 ${places.join(' beside ')} can execute twice`, async (t) =>
    t.match(await explored(route(), { deadly: false, runs: 20 * RUNS, places }), /executed 2 times/),
  )
