import t from 'tap'
import { explore } from './explore.ts'
import { migration } from './migration.ts'
import { memoryPair, replayMigration } from './replay-migration.ts'

// Three requests, other stores, and mistakes: migration.verify.ts.
void t.test('no path of two requests between two stores executes twice, nor does the code', async (t) => {
  const { states, broken, pathTo } = explore(migration(2, null))
  t.equal(broken, null)
  for (let n = 0; n < states; n++) await replayMigration(pathTo(n), memoryPair())
  t.ok(states > 1000, `${states} states`)
})
