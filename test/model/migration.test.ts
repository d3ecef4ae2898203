import t from 'tap'
import { explore } from './explore.ts'
import { MISTAKES, migration, STEPS } from './migration.ts'
import { namesCode } from './replay.ts'
import { replayMigration } from './replay-migration.ts'

t.setTimeout(300_000)

/** Of the paths of three requests, one in so many is taken by the code; of two, all are. */
const EVERY = 50

void t.test(
  'a fleet between two stores: no path of three requests executes twice, and the code takes the same paths',
  async (t) => {
    for (const [requests, every] of [
      [2, 1],
      [3, EVERY],
    ] as const) {
      const { states, steps, broken, pathTo } = explore(migration(requests, null))
      t.equal(broken, null)
      for (let n = 0; n < states; n += every) await replayMigration(pathTo(n))
      t.comment(`${requests} requests: ${states} states, ${steps} steps`)
    }
  },
)

void t.test('every mistake is found', async (t) => {
  for (const mistake of MISTAKES) {
    const { broken } = explore(migration(3, mistake))
    t.not(broken, null, mistake)
    t.comment(`${mistake}: ${broken?.what}: ${broken?.trace.join(', ')}`)
  }
})

void t.test('the code that a step names is there', async (t) => {
  for (const [name, where] of Object.entries(STEPS)) t.ok(namesCode(where), name)
})
