import t from 'tap'
import { explore } from './explore.ts'
import { MISTAKES, migration, STEPS } from './migration.ts'
import { namesCode } from './replay.ts'

void t.test('a fleet between two stores: no way of three requests leads to a second execution', async (t) => {
  const { states, steps, broken } = explore(migration(3, null))
  t.equal(broken, null)
  t.comment(`${states} states, ${steps} steps`)
})

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
