import t from 'tap'
import { firstExecution } from './support/road.ts'

/** At most. Whoever adds one to the path of every request should have to say so here. */
const MODULES = 34
const ASYNC_FUNCTIONS = 3

void t.test('a first execution on Redis takes few modules and async functions', async (t) => {
  const modules = await firstExecution()
  const names = modules.map(({ path }) => path)
  t.ok(names.includes('protect/guard.ts') && names.includes('store/redis.ts'), 'the path was recorded')
  t.ok(modules.length <= MODULES, `at most ${MODULES} modules: ${names.length}, ${names.join(', ')}`)
  const asyncs = modules.flatMap(({ path, functions }) =>
    functions.filter(({ isAsync }) => isAsync).map(({ name }) => `${path} ${name}`),
  )
  t.ok(asyncs.includes('protect/guard.ts walk'), 'async functions are told apart')
  t.ok(asyncs.length <= ASYNC_FUNCTIONS, `at most ${ASYNC_FUNCTIONS} async functions: ${asyncs.join(', ')}`)
})
