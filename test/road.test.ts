import t from 'tap'
import { firstExecution } from './support/road.ts'

/** So many at most: who adds one to the road of every request should have to say so. */
// The 47th is store/phases.ts: a claim asks whether a migration has gone past this replica (docs/adr/0101).
const MODULES = 47
const ASYNC_FUNCTIONS = 3

void t.test('the road of a first execution on Redis', async (t) => {
  const modules = await firstExecution()
  const names = modules.map(({ path }) => path)
  t.ok(names.includes('protect/guard.ts') && names.includes('store/redis.ts'), 'the road was seen')
  t.ok(modules.length <= MODULES, `at most ${MODULES} modules: ${names.length}, ${names.join(', ')}`)
  const asyncs = modules.flatMap(({ path, functions }) =>
    functions.filter(({ isAsync }) => isAsync).map(({ name }) => `${path} ${name}`),
  )
  t.ok(asyncs.includes('protect/guard.ts walk'), 'async functions are told apart')
  t.ok(asyncs.length <= ASYNC_FUNCTIONS, `at most ${ASYNC_FUNCTIONS} async functions: ${asyncs.join(', ')}`)
})
