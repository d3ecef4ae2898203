import t from 'tap'
import { explore } from './explore.ts'
import { MISTAKES, migration, STEPS } from './migration.ts'
import { namesCode } from './replay.ts'
import { replayMigration } from './replay-migration.ts'

t.setTimeout(300_000)

/** The code takes every path of two requests, but only one in so many of three. */
const EVERY = 50

void t.test(
  'no path of three requests between two stores executes twice, and the code agrees with the model',
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

void t.test('the model finds every mistake', async (t) => {
  for (const mistake of MISTAKES) {
    const { broken } = explore(migration(3, mistake))
    t.not(broken, null, mistake)
    t.comment(`${mistake}: ${broken?.what}: ${broken?.trace.join(', ')}`)
  }
})

void t.test('every step names code that exists', async (t) => {
  for (const [name, where] of Object.entries(STEPS)) t.ok(namesCode(where), name)
})
