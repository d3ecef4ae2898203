import t from 'tap'
import { route } from './harness.ts'
import { deaths } from './processes.ts'
import { SPOOLED, STORIES } from './stories.ts'

t.setTimeout(120_000)

for (const story of STORIES)
  t.test(`X06 X03 strict: executes at most once if the process dies at any call (${story.name})`, async (t) =>
    t.same(await deaths(t, { ...story, policy: route({ profile: 'strict' }) }, false), []),
  )

for (const story of SPOOLED.slice(1))
  t.test(
    `R04 R05 X06 a sent answer survives the death of its process at any call (${story.name})`,
    async (t) => t.same(await deaths(t, story, true), []),
  )
